"""Modules of torch whose forward is one operation: they run by their handler, and their mode is set aside meanwhile.

A mode sees every torch function that Python calls, the unlisted ones too, and each look costs more than a small kernel.
What such a module computes is known beforehand, so nobody needs to look: either its operation is left alone, and the
forward runs as it stands, or its handler is called with the module's own tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.casting.handlers import Caster, Handler, unchanged
from mpkit.casting.operations import words
from mpkit.casting.rules import Rule

_CONVOLUTION = words("weight bias stride padding dilation groups")
# modules that are run by their handler: the operation, and the attributes that are its arguments after the input
BY_HANDLER: dict[type[nn.Module], tuple[Callable[..., Any], tuple[str, ...]]] = {
    nn.ReLU: (torch.relu, ()),
    nn.Linear: (F.linear, ("weight", "bias")),
    nn.Conv1d: (F.conv1d, _CONVOLUTION),
    nn.Conv2d: (F.conv2d, _CONVOLUTION),
    nn.Conv3d: (F.conv3d, _CONVOLUTION),
}
# modules that run as they stand, their input and their result cast: the one operation on values in them
_AS_THEY_STAND: dict[type[nn.Module], str] = {
    nn.AdaptiveAvgPool1d: "adaptive_avg_pool1d",
    nn.AdaptiveAvgPool2d: "adaptive_avg_pool2d",
    nn.AvgPool1d: "avg_pool1d",
    nn.AvgPool2d: "avg_pool2d",
    nn.BatchNorm1d: "batch_norm",
    nn.BatchNorm2d: "batch_norm",
    nn.BatchNorm3d: "batch_norm",
    nn.Dropout: "dropout",
    nn.ELU: "elu",
    nn.Embedding: "embedding",
    nn.Flatten: "flatten",
    nn.GELU: "gelu",
    nn.GroupNorm: "group_norm",
    nn.Hardswish: "hardswish",
    nn.Identity: "",
    nn.LayerNorm: "layer_norm",
    nn.LeakyReLU: "leaky_relu",
    nn.LogSoftmax: "log_softmax",
    nn.MaxPool1d: "max_pool1d",
    nn.MaxPool2d: "max_pool2d",
    nn.RMSNorm: "rms_norm",
    nn.SiLU: "silu",
    nn.Sigmoid: "sigmoid",
    nn.Softmax: "softmax",
    nn.Softplus: "softplus",
    nn.Tanh: "tanh",
}

Run = Callable[[Caster, Any, Any], Any]


@dataclass(frozen=True, eq=False)
class Leaf:
    """How a module of one class computes by one rule.

    Args:
        run:      (mode, module, input) -> result, while the mode is set aside; NotImplemented if it must see this very
                  module, None if it must see all of the class.
        forward:  the forward that `run` stands for: whoever replaced it since means another one.
    """

    run: Run | None
    forward: Callable[..., Any]


def leaf_of(rule: Rule, kind: type[nn.Module]) -> Leaf:
    """What modules of exactly this class do by `rule`."""
    run = _run_of(rule, kind) if _is_torchs_own(kind) else None
    leaf = rule.leaves[kind] = Leaf(run, kind.forward)
    return leaf


LEAVES = frozenset((*BY_HANDLER, *_AS_THEY_STAND))


def operation(kind: type[nn.Module]) -> str:
    """The name of the one operation on values in the forward of this class; "" if there is none."""
    return BY_HANDLER[kind][0].__name__ if kind in BY_HANDLER else _AS_THEY_STAND[kind]


def _is_torchs_own(kind: type[nn.Module]) -> bool:
    code = getattr(kind.forward, "__code__", None)
    return code is not None and code.co_filename == sys.modules[kind.__module__].__file__


def _run_of(rule: Rule, kind: type[nn.Module]) -> Run | None:
    name = operation(kind)
    handler = rule.handlers.get(name, rule.default) if name else None
    if handler is None or handler is unchanged:
        return _as_it_stands(kind)
    if kind in BY_HANDLER:
        return _by_handler(handler, kind)
    return None if handler.around is None else _cast_around(kind, *handler.around)


def _as_it_stands(kind: type[nn.Module]) -> Run:
    forward = kind.forward

    def run(mode: Caster, module: nn.Module, x: Any) -> Any:
        return forward(module, x)

    return run


def _cast_around(kind: type[nn.Module], low: torch.dtype | None, result: torch.dtype | None) -> Run:
    forward = kind.forward

    def run(mode: Caster, module: Any, x: Any) -> Any:
        own = module.__dict__
        if type(x) is not Tensor or own.get("inplace") or "weight" in own:  # a replica's are no parameters
            return NotImplemented
        if low is not None:
            for p in (*own["_parameters"].values(), *own["_buffers"].values()):
                if p is not None and p.dtype is not low and p.is_floating_point():
                    return NotImplemented  # the handler would cast it
            x = mode.cast(x, low)
        out = forward(module, x)
        return out if result is None else mode.cast_all(out, result)

    return run


def arguments(kind: type[nn.Module], module: nn.Module, x: Any) -> tuple[Any, ...]:
    """What the operation of a module in BY_HANDLER is called with."""
    return (x, *[getattr(module, name) for name in BY_HANDLER[kind][1]])


def by_handler(module: nn.Module) -> bool:
    """Whether this module of a class in BY_HANDLER does just the operation that stands there."""
    own = module.__dict__
    return not own.get("inplace") and own.get("padding_mode", "zeros") == "zeros"


def _by_handler(handler: Handler, kind: type[nn.Module]) -> Run:
    function, run_handler = BY_HANDLER[kind][0], handler.run

    def linear(mode: Caster, module: Any, x: Any) -> Any:
        return run_handler(mode, function, (x, module.weight, module.bias), {})

    def run(mode: Caster, module: nn.Module, x: Any) -> Any:
        return run_handler(mode, function, arguments(kind, module, x), {}) if by_handler(module) else NotImplemented

    return linear if kind is nn.Linear else run
