"""The parameters of an optimizer in their groups, each with its rate and its decay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from mpkit.arguments import check_flags, check_kind
from mpkit.optimizers.arguments import learning_rate_of, parameters_of, weight_decay_of
from mpkit.optimizers.many import Number
from mpkit.schedules import LearningRateSchedule, ListedLR

Group = dict[str, Any]
GROUP_KEYS = frozenset({"params", "lr", "weight_decay", "grad_centralization"})


class Grouped(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` with MindSpore's groups, order of parameters, schedules and names of rates."""

    rate_by_group = True  # False where all groups have one rate
    rates_grouped = False  # whether a group was given a rate of its own
    faithful: bool
    _counts: dict[str, Any]
    _order: list[Tensor]  # of `order_params`

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; as the groups given to the constructor, but `order_params` is no longer possible."""
        group, own_rate = dict(param_group), "lr" in param_group
        if "params" not in group or set(group) - GROUP_KEYS:
            raise KeyError(f"a group needs 'params' and takes {sorted(GROUP_KEYS)}, got {sorted(group)}")
        if own_rate and not self.rate_by_group:
            raise ValueError(
                f"{type(self).__name__} takes one learning rate for all groups; leave 'lr' out of the group"
            )
        group["params"] = listed(group["params"], "a group's params")
        for tensor in (tensors := tensors_of(group["params"])):
            check_kind("each of a group's params", tensor, Tensor, "a parameter or a (name, parameter) pair")
            if not tensor.is_floating_point():
                raise TypeError(f"parameters must be real floating point, got {tensor.dtype}")
        every = parameters_of(self) + tensors
        if len(set(every)) < len(every):
            raise RuntimeError("a parameter is in two groups, or twice in one; it would be updated twice")
        for key, converted in (("lr", learning_rate_of), ("weight_decay", weight_decay_of)):
            if key in group:
                group[key] = converted(key, group[key])
        check_flags(grad_centralization=group.get("grad_centralization", False))
        rates = [g["lr"] for g in self.param_groups] + [group.get("lr", self.defaults["lr"])]
        if len(lengths := {len(rate.values) for rate in rates if isinstance(rate, ListedLR)}) > 1:
            raise ValueError(f"lists of learning rates must have one length in all groups, got {sorted(lengths)}")
        if self.param_groups:
            group["decay_by_name"] = False
        super().add_param_group(group)
        self.rates_grouped = self.rates_grouped or own_rate

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters: in the order of `order_params` when given, else group after group."""
        place = {p: i for i, p in enumerate(self._order)}
        return sorted(parameters_of(self), key=lambda p: place.get(p, len(place)))

    def _rate(self, group: Group) -> Number:
        rate, step = group["lr"], self._counts["global_step"]
        if not isinstance(rate, float | LearningRateSchedule) and not (isinstance(rate, Tensor) and rate.ndim == 0):
            rate = group["lr"] = learning_rate_of("lr", rate)  # set by hand, as the constructor takes it
        if isinstance(rate, LearningRateSchedule):
            if isinstance(rate, ListedLR) and self._counts["calls"] >= len(rate.values):
                step = int(step)  # perhaps past the end, which only the host can report
            return _at(rate, step)
        rates = [g["lr"] for g in [*self.param_groups, self.defaults]] if self.faithful else []
        if isinstance(rate, float) and any(isinstance(other, LearningRateSchedule) for other in rates):
            return float(np.float32(rate) + np.float32(1) - np.float32(1))
        return rate

    def _decay(self, group: Group) -> Number:
        decay = group["weight_decay"]
        if callable(decay):
            return _at(decay, self._counts["global_step"])
        return decay if isinstance(decay, float | Tensor) else weight_decay_of("weight_decay", decay)

    def get_lr(self) -> Tensor | list[Tensor]:
        """The rate of the next step, 0-d float32; one per parameter, in order, when groups were given rates."""
        return self.get_lr_parameter(self.parameters if self.rates_grouped else self.parameters[0])

    def get_lr_parameter(self, param: object) -> Tensor | list[Tensor]:
        """The rate of the next step of one parameter, or the list of rates of a list of them.

        Raises:  TypeError for something else; ValueError for a parameter that is not in this optimizer.
        """
        if isinstance(param, list | tuple) and not is_named(param):
            return [self._shown(p) for p in param]
        return self._shown(param)

    def _shown(self, param: object) -> Tensor:
        (wanted,) = tensors_of([param])
        check_kind("param", wanted, Tensor, "a parameter, or a list of them")
        for group in self.param_groups:
            if any(p is wanted for p in group["params"]):
                return torch.as_tensor(self._rate(group), dtype=torch.float32)
        raise ValueError(f"the parameter of shape {tuple(wanted.shape)} is not in this optimizer")


def _at(function: Callable[[Any], Any], step: int | Tensor) -> Number:
    """A schedule or function of the step; a schedule on the device in float64, so that no weight loses digits."""
    if isinstance(function, LearningRateSchedule) and isinstance(step, Tensor):
        return torch.as_tensor(function.rate(step.double()), dtype=torch.float64, device=step.device)
    return function(step)


def is_named(item: object) -> TypeGuard[tuple[str, Tensor]]:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Tensor)


def listed(params: object, what: str) -> list[Any]:
    if isinstance(params, Tensor | str | Mapping) or not isinstance(params, Iterable):
        raise TypeError(f"{what} must be an iterable of parameters, got {type(params).__name__}; put it into a list")
    if not (items := list(params)):
        raise ValueError(f"{what} is empty: are all of them frozen? Leave an empty group out")
    return items


def tensors_of(items: Iterable[Any]) -> list[Tensor]:
    return [item[1] if is_named(item) else item for item in items]


def split_groups(params: object) -> tuple[list[Group], list[Tensor], bool]:
    """The argument `params` -> (groups, the wanted order, were they given as groups)."""
    if params is None:
        raise ValueError("params is None; pass the parameters to train, for instance trainable_params(network)")
    items = listed(params, "params")
    if not any(isinstance(item, Mapping) for item in items):
        return [{"params": items}], [], False
    for item in items:
        check_kind("each of params", item, Mapping, "a dict where one of them is; else all are parameters")
    orders = [item for item in items if "order_params" in item]
    groups = [dict(item) for item in items if "order_params" not in item]
    if not groups or len(orders) > 1 or any(len(item) > 1 for item in orders):
        raise ValueError(f"need groups with params and at most one order_params, alone in its dict, got {items!r:.200}")
    order = tensors_of(listed(orders[0]["order_params"], "order_params")) if orders else []
    return groups, order, True
