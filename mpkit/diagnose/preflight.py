"""Check network and optimizer against a level before the first step; `watch_loop` watches the loop itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.arguments import check_choice, check_kind, checked
from mpkit.casting import LEVELS
from mpkit.diagnose.watch import checkable, numbers
from mpkit.diagnose.words import WORDS, said
from mpkit.formats import BF16, FP16, FP32, FP64, FloatFormat, dtype_name
from mpkit.optimizers import BFloat16Weights
from mpkit.optimizers.arguments import coming_rate, inner, parameters_of
from mpkit.replay.percent import percent
from mpkit.rounding import ulp

_LOST_TOO_MUCH = 0.5  # share of updates below half an ulp from which it is reported
_FORMATS = {fmt.torch_dtype: fmt for fmt in (FP16, BF16, FP32, FP64)}
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


@checked
def preflight(
    network: nn.Module,
    optimizer: Optimizer,
    level: str = "O2",
    *,
    dtype: torch.dtype | FloatFormat = torch.float16,
    average: nn.Module | Mapping[str, Tensor] | None = None,
) -> list[Finding]:
    """Look for mistakes that break a training in mixed precision; an empty list means that none was found.

    Args:
        network:   as it will be trained. If it has gradients, the sizes of the next updates are checked too.
        level:     "O0", "O1", "O2", "O3", "auto", or "torch_autocast" for a training under `torch.autocast`.
        dtype:     what the level computes in.
        average:   the average of the weights (EMA), if there is one: a module, or a dict of tensors.
    Raises:  TypeError, ValueError for wrong arguments.
    """
    check_choice("level", level, (*LEVELS, "torch_autocast"))
    if not (isinstance(dtype, FloatFormat) or (isinstance(dtype, torch.dtype) and dtype in _FORMATS)):
        raise TypeError(f"dtype must be torch.float16, torch.bfloat16 or a FloatFormat, got {dtype!r}")
    fmt = dtype if isinstance(dtype, FloatFormat) else _FORMATS[dtype]
    check_kind("average", average, (nn.Module, Mapping), "a module, or a dict of name: tensor,", optional=True)
    names = {id(p): name for name, p in network.named_parameters()}
    return [
        *_tensors(network, level, isinstance(optimizer, BFloat16Weights)),
        *_ownership(network, optimizer),
        *_constants(optimizer, fmt, level),
        *_small_updates(optimizer, names),
        *_average_of_weights(average),
    ]


def _found(key: str, where: str, severity: str = "", /, **values: object) -> Finding:
    words = {name: text.format(**values) for name, text in WORDS["preflight"][key].items()}
    return Finding(**(words | {"where": where} | ({"severity": severity} if severity else {})))


def _tensors(network: nn.Module, level: str, remedied: bool) -> Iterator[Finding]:
    cast = "torch.autocast" if level == "torch_autocast" else f"level {level}"
    parameters = dict(network.named_parameters())
    if bad := [name for name, p in parameters.items() if p.is_leaf and not _is_finite(p.grad)]:
        yield _found("gradient_not_finite", bad[0], count=len(bad))
    for name, p in parameters.items():
        if not _is_finite(p):
            yield _found("parameter_not_finite", name)
        if p.dtype in _LOW and level != "O0" and not (remedied and p.dtype is torch.bfloat16):
            yield _found("parameter_low", name, dtype=dtype_name(p.dtype), cast=cast)
    broken = (name for name, buffer in network.named_buffers() if not _is_finite(buffer, mask=True))
    yield from (_found("buffer_not_finite", name) for name in broken)


def _ownership(network: nn.Module, optimizer: Optimizer) -> Iterator[Finding]:
    own = {id(p): name for name, p in network.named_parameters() if p.requires_grad}
    held = {id(p) for p in parameters_of(optimizer)}
    if strangers := held - {id(p) for p in network.parameters()}:
        yield _found("strangers", "optimizer", count=len(strangers))
    if left := [name for key, name in own.items() if key not in held]:
        yield _found("left_out", left[0], count=len(left))


def _constants(optimizer: Optimizer, fmt: FloatFormat, level: str) -> Iterator[Finding]:
    """Constants of the optimizer that the format of its states cannot hold."""
    for index, group in enumerate(optimizer.param_groups if not isinstance(optimizer, BFloat16Weights) else ()):
        low = [_FORMATS[d] for d in {p.dtype for p in group["params"]} if d in _LOW]
        severity = "error" if low else "warning"
        for key in ("eps", "lr", "weight_decay"):
            value = group.get(key)
            for one in low or ([fmt] if level == "O3" else []):
                if isinstance(value, float) and 0 < value <= one.zero_up_to:
                    yield _found("constant_zero", f"optimizer group {index}", severity, key=key, value=value, fmt=one)


def _small_updates(optimizer: Optimizer, names: dict[int, str]) -> Iterator[Finding]:
    """Parameters most of whose next updates round away: lr * |g| (Adam's kin: lr) below half an ulp of the weight.

    Weight decay apart: lr * weight_decay * |w|, where an optimizer shrinks the weight itself and adds nothing to the
    gradient.
    """
    kind = type(inner(optimizer)).__name__.lower()
    adaptive = any(word in kind for word in ("adam", "lamb", "rmsprop", "adafactor", "adagrad", "rprop"))
    for group in optimizer.param_groups:
        decoupled = "w" in kind or "decay" in kind or group.get("decoupled_weight_decay")
        rate, decay = float(coming_rate(optimizer, group)), group.get("weight_decay") if decoupled else 0
        for p in group["params"]:
            remedied = isinstance(optimizer, BFloat16Weights) and p.dtype is torch.bfloat16
            if math.isnan(rate) or remedied or p.dtype not in _FORMATS or not _is_finite(p) or not _is_finite(p.grad):
                continue
            fmt, weight, where = _FORMATS[p.dtype], p.detach().double(), names.get(id(p), "a parameter")
            more = {"fmt": fmt, "remedy": said("remedies", fmt.name)}
            if p.grad is not None:
                grad = (p.grad.to_dense() if p.grad.is_sparse else p.grad).detach().double().abs()
                lost = _lost(torch.full_like(grad, rate) if adaptive else grad * rate, weight, fmt, grad > 0)
                if lost > _LOST_TOO_MUCH:
                    yield _found("updates_lost", where, lost=percent(lost), **more)
            if fmt.bits <= 16 and isinstance(decay, int | float) and decay:
                lost = _lost(rate * decay * weight.abs(), weight, fmt, weight != 0)
                if lost > _LOST_TOO_MUCH:
                    yield _found("decay_lost", where, lost=percent(lost), decay=rate * decay, **more)


def _lost(size: Tensor, weight: Tensor, fmt: FloatFormat, moving: Tensor) -> float:
    """Share of the moves that are below half an ulp of the weight, among those that are one."""
    small = moving & (size < ulp(weight, fmt) / 2)
    return float(small.sum()) / max(1, int(moving.sum()))


def _average_of_weights(average: nn.Module | Mapping[str, Tensor] | None) -> Iterator[Finding]:
    """In 16 bits, what it takes over in a step is below half an ulp. Some keep the average as buffers."""
    held = average.state_dict() if isinstance(average, nn.Module) else average or {}
    low = next((t.dtype for t in held.values() if isinstance(t, Tensor) and t.dtype in _LOW), None)
    if low is not None:
        yield _found("average_low", "average", dtype=dtype_name(low), half=_FORMATS[low].eps / 2)


def _is_finite(t: Tensor | None, *, mask: bool = False) -> bool:
    """Whether no inf or NaN is in it, but for -inf in what may be a `mask`; a lazy tensor, one on meta, and one of
    integers hold none."""
    if t is None or nn.parameter.is_lazy(t) or not checkable(t):
        return True
    values = numbers(t)
    return bool((values.isfinite() | (values == -math.inf if mask else False)).all())
