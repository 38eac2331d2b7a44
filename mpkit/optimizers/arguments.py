"""What the constructors take: parameters, groups, rates, decay and the options common to all, with their checks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeGuard

import numpy as np
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer as TorchOptimizer

from mpkit.arguments import check_count, check_float, check_kind, check_number, is_number
from mpkit.schedules import LearningRateSchedule, ListedLR

GradientTransform = Callable[[list[Tensor], list[Tensor], dict[str, Any]], list[Tensor]]
Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
"""Parameters, named ones, or groups of them."""
Rate = float | Sequence[float] | np.ndarray | Tensor | LearningRateSchedule
"""A number, one for each step, or a function of the step."""
Decay = float | Callable[..., Any]
"""A number or a function of the step."""
GROUP_KEYS = frozenset({"params", "lr", "weight_decay", "grad_centralization", "order_params"})


class Options(TypedDict, total=False):
    """Keyword-only arguments that every optimizer takes beside MindSpore's own.

    gradient_transform:  called as `transform(grads, parameters, group) -> grads` between weight decay and the division
                         by `loss_scale`, once per device and dtype of a group.
    count_skipped:       True lets a skipped step advance the schedule (never the moments); default False, as the
                         reference, whose optimizer does not run at all on overflow.
    faithful:            True reproduces two roundings of MindSpore: fixed rates pass through float32 `(lr + 1) - 1`
                         when another rate is dynamic, and centralization only touches gradients whose axis 1 is a
                         multiple of 16. Default False does neither.
    """

    gradient_transform: GradientTransform | None
    count_skipped: bool
    faithful: bool


# --- helpers on modules and gradients


def trainable_params(module: nn.Module) -> list[tuple[str, Parameter]]:
    """(name, parameter) of every parameter that requires a gradient, in order of definition.

    Filter by name: `[(n, p) for n, p in trainable_params(net) if "conv" not in n]`. Every optimizer here and in
    `torch.optim` takes such pairs, and here the names switch the weight-decay rule on.

    Source:  MindSpore Cell.trainable_params. Batch statistics are buffers in torch, so they are in neither list.
    """
    check_kind("module", module, nn.Module, "an nn.Module")
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def untrainable_params(module: nn.Module) -> list[tuple[str, Parameter]]:
    """(name, parameter) of every parameter that does not require a gradient, in order of definition."""
    check_kind("module", module, nn.Module, "an nn.Module")
    return [(name, p) for name, p in module.named_parameters() if not p.requires_grad]


def parameters_of(optimizer: TorchOptimizer) -> list[Tensor]:
    """The parameters that `optimizer` updates, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def decays_by_name(name: str) -> bool:
    """MindSpore's rule for ungrouped parameters: no decay where the name contains "beta" or "gamma"."""
    return "beta" not in name and "gamma" not in name


def centralized(grad: Tensor, multiple_of: int = 1) -> Tensor:
    """`grad` minus its mean over all axes but the first; unchanged for fewer than two axes.

    Shapes:  grad (n, *) float -> (n, *) float.
    Edges:   `multiple_of=16` is MindSpore's kernel: it leaves a gradient alone unless shape[1] is a multiple of 16.
    Source:  Yong et al. 2020, arXiv:2004.01461, equation 1; MindSpore 2.7 for the multiple.
    """
    check_kind("grad", grad, Tensor, "a tensor")
    check_count("multiple_of", multiple_of)
    if grad.ndim < 2 or grad.shape[1] % multiple_of:
        return grad
    return grad - grad.mean(dim=tuple(range(1, grad.ndim)), keepdim=True)


# --- checks


def check_betas(beta1: object, beta2: object, eps: object) -> None:
    """Raise unless the betas are floats in (0, 1) and eps a positive number."""
    check_float("beta1", beta1, high=1.0, open_low=True)
    check_float("beta2", beta2, high=1.0, open_low=True)
    check_number("eps", eps, open_low=True)


def learning_rate_of(value: object) -> float | LearningRateSchedule:
    """What a user may pass as a rate -> a number or a schedule.

    Raises:  TypeError for None and other kinds; ValueError for a negative or infinite number, a string or a tensor of
             two axes.
    """
    if isinstance(value, LearningRateSchedule):
        return value
    if isinstance(value, str):
        raise ValueError(f"a learning rate is a number, a list or a schedule, got the string {value!r}")
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim > 1:
            raise ValueError(f"a tensor of learning rates has 0 or 1 axes, got shape {tuple(value.shape)}")
        value = value.tolist()
    if is_number(value):
        huge = isinstance(value, int) and abs(value) > sys.float_info.max
        rate = math.inf if huge else float(value)
        if not 0 <= rate < math.inf:
            raise ValueError(f"a learning rate must be at least 0 and finite, got {value}")
        return rate
    if isinstance(value, Iterable) and not isinstance(value, bytes | bytearray | Mapping):
        return ListedLR(tuple(value))
    raise TypeError(f"a learning rate is a number, a list, a tensor or a schedule, got {value!r}")


def weight_decay_of(value: object) -> Decay:
    """A number at least 0, or a function of the step -> the same, the number as float."""
    if callable(value):
        return value
    return check_number("weight_decay", value)


def is_named(item: object) -> TypeGuard[tuple[str, Tensor]]:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Tensor)


def listed(params: object, what: str) -> list[Any]:
    if isinstance(params, Tensor | str | Mapping) or not isinstance(params, Iterable):
        raise TypeError(f"{what} must be an iterable of parameters, got {type(params).__name__}; put it into a list")
    return list(params)


def tensors_of(items: Iterable[Any]) -> list[Tensor]:
    return [item[1] if is_named(item) else item for item in items]


def split_groups(params: object) -> tuple[list[dict[str, Any]], list[Tensor] | None, bool]:
    """The argument `params` -> (groups, the wanted order or None, were they given as groups)."""
    if params is None:
        raise ValueError("params is None; pass the parameters to train, for instance trainable_params(network)")
    items = listed(params, "params")
    if not items:
        raise ValueError("params is empty; is every parameter of the network frozen?")
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
    for item in orders:
        if len(item) > 1:
            raise ValueError(f"order_params must be alone in its group, got {sorted(item)}")
    if not groups or len(orders) > 1:
        raise ValueError(f"need groups with params and at most one order_params, got {len(groups)} and {len(orders)}")
    order = tensors_of(listed(orders[0]["order_params"], "order_params")) if orders else None
    return groups, order, True


def inner(optimizer: TorchOptimizer) -> TorchOptimizer:
    """The optimizer that holds the parameter groups: itself, or what a wrapper such as LARS wraps."""
    wrapped = optimizer.__dict__.get("optimizer")
    return inner(wrapped) if isinstance(wrapped, TorchOptimizer) else optimizer


def coming_rate(optimizer: TorchOptimizer, group: dict[str, Any]) -> float | Tensor:
    """The learning rate of the next step of a group; NaN where what stands there is no number, or is not used.

    A schedule is asked at the optimizer's own count of steps; AdaFactor's relative steps use no rate.
    Raises:  TypeError for what is no optimizer, or no group; RuntimeError where a list of rates has ended.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    check_kind("group", group, Mapping, "a parameter group of it")
    rate: Any = group.get("lr")
    if isinstance(rate, LearningRateSchedule):
        rate = getattr(inner(optimizer), "_rate", lambda _: math.nan)(group)
    one = rate.numel() == 1 if isinstance(rate, Tensor) else is_number(rate)
    return rate if one and not (group.get("relative_step") and rate == 0) else math.nan
