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
    decay_varies = True  # False where the weight decay is a number, never a function
    faithful: bool
    rates_grouped: bool
    _counts: dict[str, Any]
    _order: list[tuple[int, int]] | None

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; as the groups given to the constructor, but `order_params` is no longer possible."""
        group, name = dict(param_group), type(self).__name__
        if "params" not in group or set(group) - GROUP_KEYS:
            raise KeyError(f"a group needs 'params' and takes {sorted(GROUP_KEYS)}, got {sorted(group)}")
        if "lr" in group and not self.rate_by_group:
            raise ValueError(f"{name} takes one learning rate for all groups; leave 'lr' out of the group")
        group["params"] = listed(group["params"], "a group's params")
        tensors = tensors_of(group["params"])
        for tensor in tensors:
            check_kind("each of a group's params", tensor, Tensor, "a parameter or a (name, parameter) pair")
            if not tensor.is_floating_point():
                raise TypeError(f"parameters must be real floating point, got {tensor.dtype}")
        every = parameters_of(self) + tensors
        if len({id(p) for p in every}) < len(every):
            raise RuntimeError("a parameter is in two groups, or twice in one; it would be updated twice")
        for key, converted in (("lr", learning_rate_of), ("weight_decay", weight_decay_of)):
            if key in group:
                group[key] = converted(key, group[key])
        if callable(group.get("weight_decay")) and not self.decay_varies:
            raise TypeError(f"{name} takes a fixed weight decay; use Momentum for one that changes")
        check_flags(grad_centralization=group.get("grad_centralization", False))
        rates = [g["lr"] for g in self.param_groups] + [group.get("lr", self.defaults["lr"])]
        if len(lengths := {len(rate.values) for rate in rates if isinstance(rate, ListedLR)}) > 1:
            raise ValueError(f"lists of learning rates must have one length in all groups, got {sorted(lengths)}")
        if self.param_groups:
            group["decay_by_name"] = False
        own_rate = "lr" in group
        super().add_param_group(group)
        self.rates_grouped = self.rates_grouped or own_rate

    def _checked_order(self, order: list[Tensor] | None) -> list[tuple[int, int]] | None:
        """`order_params` as (group, index) pairs, which survive a copy of the optimizer."""
        if order is None:
            return None
        place = {id(p): (i, j) for i, g in enumerate(self.param_groups) for j, p in enumerate(g["params"])}
        if len(order) != len(place) or {id(p) for p in order} != set(place):
            raise ValueError(f"order_params must list the {len(place)} grouped parameters once each, got {len(order)}")
        return [place[id(p)] for p in order]

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters: in the order of `order_params` when given, else group after group."""
        first = [self.param_groups[i]["params"][j] for i, j in self._order or ()]
        known = {id(p) for p in first}
        return first + [p for p in parameters_of(self) if id(p) not in known]

    def _rate(self, group: Group) -> Number:
        rate, step = group["lr"], self._counts["global_step"]
        if not isinstance(rate, float | LearningRateSchedule) and not (isinstance(rate, Tensor) and rate.ndim == 0):
            rate = group["lr"] = learning_rate_of("lr", rate)  # set by hand, as the constructor takes it
        if isinstance(rate, LearningRateSchedule):
            if isinstance(rate, ListedLR) and self._counts["calls"] >= len(rate.values):
                step = int(step)  # perhaps past the end, which only the host can report
            return _at(rate, step)
        if self.faithful and isinstance(rate, float):
            rates = [g["lr"] for g in [*self.param_groups, self.defaults]]
            if any(isinstance(other, LearningRateSchedule) for other in rates):
                return float(np.float32(rate) + np.float32(1) - np.float32(1))
        return rate

    def _decay(self, group: Group) -> Number:
        decay = group["weight_decay"]
        if callable(decay):
            return _at(decay, self._counts["global_step"])
        return decay if isinstance(decay, float | Tensor) else weight_decay_of("weight_decay", decay)

    def get_lr(self) -> Tensor | list[Tensor]:
        """The rate of the next step, 0-d float32; one per parameter, in order, when groups were given rates."""
        if self.rates_grouped:
            return self.get_lr_parameter(self.parameters)
        return torch.as_tensor(self._rate(self.param_groups[0]), dtype=torch.float32)

    def get_lr_parameter(self, param: object) -> Tensor | list[Tensor]:
        """The rate of the next step of one parameter, or the list of rates of a list of them.

        Raises:  TypeError for something else; ValueError for a parameter that is not in this optimizer.
        """
        params = param if isinstance(param, list | tuple) and not is_named(param) else [param]
        rates = [torch.as_tensor(self._rate(group), dtype=torch.float32) for group in self.param_groups]
        shown = {id(p): rate for rate, group in zip(rates, self.param_groups) for p in group["params"]}
        for p in (wanted := tensors_of(params)):
            check_kind("each of param", p, Tensor, "a parameter")
            if id(p) not in shown:
                raise ValueError(f"the parameter of shape {tuple(p.shape)} is not in this optimizer")
        found = [shown[id(p)] for p in wanted]
        return found if params is param else found[0]


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


def split_groups(params: object) -> tuple[list[dict[str, Any]], list[Tensor] | None, bool]:
    """The argument `params` -> (groups, the wanted order or None, were they given as groups)."""
    if params is None:
        raise ValueError("params is None; pass the parameters to train, for instance trainable_params(network)")
    items = listed(params, "params")
    grouped = isinstance(items[0], Mapping)
    for item in items:
        if grouped != isinstance(item, Mapping) or not (grouped or isinstance(item, Tensor) or is_named(item)):
            raise TypeError(
                f"params must be all parameters, all (name, parameter) or all dicts, got {type(item).__name__}"
            )
    if not grouped:
        return [{"params": items}], None, False
    orders = [item for item in items if "order_params" in item]
    groups = [dict(item) for item in items if "order_params" not in item]
    if not groups or len(orders) > 1 or any(len(item) > 1 for item in orders):
        raise ValueError(f"need groups with params and at most one order_params, alone in its dict, got {items!r:.200}")
    order = tensors_of(listed(orders[0]["order_params"], "order_params")) if orders else None
    return groups, order, True
