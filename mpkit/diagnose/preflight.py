"""Check network and optimizer against a level before the first step; `watch_loop` watches the loop itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from mpkit.casting import LEVELS
from mpkit.formats import FloatFormat, dtype_name, get_format
from mpkit.optimizers import BFloat16Weights
from mpkit.optimizers.arguments import coming_rate, inner, parameters_of
from mpkit.replay.percent import percent
from mpkit.rounding import ulp

_STATE_SHARE = 0.5  # share of updates below half an ulp from which it is reported
_AVERAGE = 0.001  # how much of a difference a usual average of weights (EMA) takes over in a step
_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
_LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Finding:
    """One thing to look at: its `severity`, "error" (training will fail or go wrong) or "warning", where it is, what it
    is, and the way out."""

    severity: str
    where: str
    what: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.where}: {self.what}; {self.way_out}"


def preflight(
    network: nn.Module,
    optimizer: Optimizer,
    level: str = "O2",
    *,
    dtype: torch.dtype | FloatFormat = torch.float16,
    average: nn.Module | None = None,
) -> list[Finding]:
    """Look for mistakes that break a training in mixed precision; an empty list means that none was found.

    Args:
        network:   as it will be trained. If it has gradients, the sizes of the next updates are checked too.
        level:     "O0", "O1", "O2", "O3", "auto", or "torch_autocast" for a training under `torch.autocast`.
        dtype:     what the level computes in.
        average:   the average of the weights (EMA), if there is one; `AveragedModel`s inside the network are seen.
    Raises:  TypeError, ValueError for wrong arguments.
    """
    if level not in (*LEVELS, "torch_autocast"):
        raise ValueError(f"level must be O0, O1, O2, O3, auto or torch_autocast, got {level!r}")
    if not isinstance(network, nn.Module) or not isinstance(optimizer, Optimizer):
        got = f"{type(network).__name__} and {type(optimizer).__name__}"
        raise TypeError(f"preflight takes an nn.Module and then a torch.optim.Optimizer, got {got}")
    if not (isinstance(dtype, FloatFormat) or (isinstance(dtype, torch.dtype) and dtype in _NAMES)):
        raise TypeError(f"dtype must be torch.float16, torch.bfloat16 or a FloatFormat, got {dtype!r}")
    if not isinstance(average, nn.Module | None):
        raise TypeError(f"average must be the module with the averaged weights, got {type(average).__name__}")
    fmt = dtype if isinstance(dtype, FloatFormat) else get_format(_NAMES[dtype])
    named = {id(p): name for name, p in network.named_parameters()}
    return [
        *_gradients(network),
        *_dtypes(network, level, isinstance(optimizer, BFloat16Weights)),
        *_ownership(network, optimizer, named),
        *_constants(optimizer, fmt, level),
        *_states(optimizer, named),
        *_small_updates(optimizer, named),
        *_averages(network, average),
    ]


def _gradients(network: nn.Module) -> Iterator[Finding]:
    bad = [
        name for name, p in network.named_parameters() if p.is_leaf and p.grad is not None and not _is_finite(p.grad)
    ]
    if bad:
        yield Finding(
            "error",
            bad[0],
            f"the gradient, as that of {len(bad)} parameters, holds inf or NaN already; whatever is added to "
            "it, it stays so, and every step is skipped",
            "clear the gradients once per step: optimizer.zero_grad() before loss.backward()",
        )


def _dtypes(network: nn.Module, level: str, remedied: bool) -> Iterator[Finding]:
    cast = "torch.autocast" if level == "torch_autocast" else f"level {level}"
    for name, p in network.named_parameters():
        if not _is_finite(p):
            what, way = "the parameter holds inf or NaN", "initialize it anew, or load a checkpoint that is whole"
            yield Finding("error", name, what, way)
        if p.dtype in _LOW and level != "O0" and not (remedied and p.dtype is torch.bfloat16):
            what = f"the parameter is stored in {dtype_name(p.dtype)}, so small updates vanish and a GradScaler "
            way = f"keep parameters in float32 (network.float()) and let {cast} cast them where they are used"
            yield Finding("error", name, what + "refuses its gradient", way)
        if p.grad is not None and p.grad.dtype == torch.float16:
            what = "the gradient is float16, and dividing it by the scale would flush it to zero again"
            yield Finding("error", name, what, "store the parameter in float32; then its gradient is float32 too")
    for name, buffer in network.named_buffers():
        if not _is_finite(buffer, mask=True):
            yield Finding(
                "error",
                name,
                "the buffer holds inf or NaN: a step that is skipped has changed running statistics all the same, and "
                "evaluation reads them",
                "reset it, as reset_running_stats() of a batch norm does, or load a checkpoint that is whole",
            )


def _ownership(network: nn.Module, optimizer: Optimizer, named: dict[int, str]) -> Iterator[Finding]:
    held = {id(p) for p in parameters_of(optimizer)}
    strangers = held - set(named)
    if strangers:
        what = f"{len(strangers)} of its parameters are not in this network: it would train another network"
        way = "build the optimizer from this network's parameters, after replacing any of them"
        yield Finding("error", "optimizer", what, way)
    left = [name for name, p in network.named_parameters() if p.requires_grad and id(p) not in held]
    if left:
        what = f"{len(left)} trainable parameters are in no group of the optimizer"
        yield Finding("warning", left[0], what, "add them, or set requires_grad=False")


def _constants(optimizer: Optimizer, fmt: FloatFormat, level: str) -> Iterator[Finding]:
    """Constants of the optimizer that the format of its states cannot hold."""
    for index, group in enumerate(optimizer.param_groups if not isinstance(optimizer, BFloat16Weights) else ()):
        low = [get_format(_NAMES[d]) for d in {p.dtype for p in group["params"]} if d in _LOW]
        for key in ("eps", "lr", "weight_decay"):
            value = group.get(key)
            several = value if isinstance(value, tuple | list) else [value]
            value = min((v for v in several if isinstance(v, float)), default=None)  # torch's Adafactor has a None
            for one in low or ([fmt] if level == "O3" else []):
                if isinstance(value, float) and 0 < value <= one.zero_up_to:
                    what = f"{key}={value:g} is zero in {one.name} (smallest value {one.min_subnormal:.3g})"
                    way = f"use {key} >= {one.min_normal:.2g}, or keep parameters and states in float32"
                    yield Finding("error" if low else "warning", f"optimizer group {index}", what, way)


def _states(optimizer: Optimizer, named: dict[int, str]) -> Iterator[Finding]:
    for p, state in optimizer.state.items():
        for key, value in state.items():
            name = named.get(id(p), "a parameter")
            if isinstance(value, Tensor) and value.dtype in _LOW:
                what = f"optimizer state {key} is {dtype_name(value.dtype)}: squares of small gradients vanish in it"
                yield Finding("warning", name, what, "keep the states in float32")
            if isinstance(value, Tensor) and not _is_finite(value):
                what = f"optimizer state {key} holds inf or NaN"
                yield Finding("error", name, what, "go back to a checkpoint; an overflowed step was not skipped")


def _small_updates(optimizer: Optimizer, named: dict[int, str]) -> Iterator[Finding]:
    """Parameters most of whose next updates round away: lr * |g| (Adam's kin: lr) below half an ulp of the weight.

    Weight decay apart: lr * weight_decay * |w|, where an optimizer shrinks the weight itself and adds nothing to the
    gradient.
    """
    name = type(inner(optimizer)).__name__.lower()
    adaptive = any(word in name for word in ("adam", "lamb", "rmsprop", "adafactor"))
    for group in optimizer.param_groups:
        rate, decay = float(coming_rate(optimizer, group)), group.get("weight_decay") or 0.0
        for p in group["params"]:
            remedied = isinstance(optimizer, BFloat16Weights) and p.dtype is torch.bfloat16
            if math.isnan(rate) or remedied or p.dtype not in _NAMES or not _is_finite(p) or not _is_finite(p.grad):
                continue
            fmt, weight = get_format(_NAMES[p.dtype]), p.detach().double()
            step = "the weights in float32" if p.dtype is not torch.bfloat16 else _REMEDY
            way = f"store {step}" if fmt.bits <= 16 else "raise the learning rate"
            where = named.get(id(p), "a parameter")
            if p.grad is not None:
                grad = (p.grad.to_dense() if p.grad.is_sparse else p.grad).detach().double().abs()
                size = torch.full_like(grad, rate) if adaptive else grad * rate
                if (lost := _lost(size, weight, fmt, grad > 0)) > _STATE_SHARE:
                    what = f"{percent(lost)} of the updates are below half an ulp of their {fmt.name} weight and "
                    yield Finding("warning", where, what + "change nothing", way)
            shrinks = fmt.bits <= 16 and isinstance(decay, int | float) and decay and ("w" in name or "decay" in name)
            if shrinks and (lost := _lost(rate * decay * weight.abs(), weight, fmt, weight != 0)) > _STATE_SHARE:
                what = f"lr * weight_decay = {rate * decay:.2g} is below half an ulp of {percent(lost)} of the "
                yield Finding("warning", where, what + f"{fmt.name} weights: they never decay", way)


_REMEDY = (
    "them in bfloat16 with BFloat16Weights(optimizer), which keeps or evens out what rounding loses, or in float32"
)


def _lost(size: Tensor, weight: Tensor, fmt: FloatFormat, moving: Tensor) -> float:
    """Share of the moves that are below half an ulp of the weight, among those that are one."""
    small = moving & (size < ulp(weight, fmt) / 2)
    return float(small.sum()) / max(1, int(moving.sum()))


def _averages(network: nn.Module, average: nn.Module | None) -> Iterator[Finding]:
    """Averages of weights in 16 bits: what they take over in a step is below half an ulp."""
    inside = {name: m for name, m in network.named_modules() if isinstance(m, AveragedModel)}
    for where, module in {**inside, "average": average}.items():
        low = [p for p in module.parameters() if p.dtype in _LOW] if module is not None else []
        if low:
            fmt = get_format(_NAMES[low[0].dtype])
            yield Finding(
                "warning",
                where or type(module).__name__,
                f"the average of the weights is kept in {dtype_name(low[0].dtype)}: it takes over {_AVERAGE:g} of a "
                f"difference in a step, and less than {fmt.eps / 2:.2g} of a weight is half an ulp: it does not move",
                "keep the average in float32: copy.deepcopy(network).float()",
            )


def _is_finite(t: Tensor | None, *, mask: bool = False) -> bool:
    """Whether no inf or NaN is in it, but for -inf in what may be a `mask`; a lazy tensor, one on meta, and one of
    integers hold none."""
    if t is None or nn.parameter.is_lazy(t) or t.is_meta or not (t.is_floating_point() or t.is_complex()):
        return True
    t = t.detach().coalesce().values() if t.is_sparse else t.detach()
    values = t.float() if t.dtype.itemsize == 1 else t
    return bool((values.isfinite() | (values == -math.inf) if mask else values.isfinite()).all())
