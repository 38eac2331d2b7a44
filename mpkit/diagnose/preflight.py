"""Check network, optimizer and training loop against a level before the first step."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.casting import LEVELS
from mpkit.casting.table import MINDSPORE
from mpkit.diagnose.own_norms import own_norms
from mpkit.formats import FloatFormat, dtype_name, get_format
from mpkit.optimizers.arguments import coming_rate, inner, parameters_of
from mpkit.replay.percent import percent
from mpkit.rounding import ulp

_STATE_SHARE = 0.5  # share of updates below half an ulp from which it is reported
_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


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
    loop: Callable[..., Any] | str | None = None,
) -> list[Finding]:
    """Look for mistakes that break a training in mixed precision; an empty list means that none was found.

    Args:
        network:   as it will be trained. If it has gradients, the sizes of the next updates are checked too.
        level:     "O0", "O1", "O2", "O3" or "auto".
        dtype:     what the level computes in.
        loop:      the training loop, as a function or its source: does it clip gradients before it unscales them? A
                   loss scaler is known by its `scale(...)`, from which a backward pass starts.
    Raises:  TypeError, ValueError for wrong arguments.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be O0, O1, O2, O3 or auto, got {level!r}")
    if not isinstance(network, nn.Module) or not isinstance(optimizer, Optimizer):
        got = f"{type(network).__name__} and {type(optimizer).__name__}"
        raise TypeError(f"preflight takes an nn.Module and then a torch.optim.Optimizer, got {got}")
    if not (isinstance(dtype, FloatFormat) or (isinstance(dtype, torch.dtype) and dtype in _NAMES)):
        raise TypeError(f"dtype must be torch.float16, torch.bfloat16 or a FloatFormat, got {dtype!r}")
    fmt = dtype if isinstance(dtype, FloatFormat) else get_format(_NAMES[dtype])
    named = {id(p): name for name, p in network.named_parameters()}
    found = [*_dtypes(network, level), *_ownership(network, optimizer, named)]
    found += [*_constants(optimizer, fmt, level), *_states(optimizer, named), *_small_updates(optimizer, named)]
    found += _overridden(network, level, fmt)
    if loop is not None:
        found += _clip_order(_parsed(loop))
    return found


def _parsed(loop: Callable[..., Any] | str) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(loop if isinstance(loop, str) else inspect.getsource(loop)))
    except SyntaxError as error:
        raise ValueError(f"loop must be Python, got a text with {error.msg} in line {error.lineno}") from error
    except OSError as error:
        raise ValueError(f"the source of loop is not at hand ({error}); give it as a text") from error
    except TypeError as error:
        raise TypeError(f"loop must be a function or its source as a text, got {loop!r:.60}") from error


def _dtypes(network: nn.Module, level: str) -> Iterator[Finding]:
    for name, p in network.named_parameters():
        if not _is_finite(p):
            yield Finding(
                "error",
                name,
                "the parameter holds inf or NaN",
                "initialize it anew, or load a checkpoint that is whole",
            )
        if p.dtype in (torch.float16, torch.bfloat16) and level != "O0":
            yield Finding(
                "error",
                name,
                f"the parameter is stored in {dtype_name(p.dtype)}, so small updates vanish and a GradScaler refuses "
                "its gradient",
                f"keep parameters in float32 (network.float()) and let level {level} cast them where they are used",
            )
        if p.grad is not None and p.grad.dtype == torch.float16:
            yield Finding(
                "error",
                name,
                "the gradient is float16, and dividing it by the scale would flush it to zero again",
                "store the parameter in float32; then its gradient is float32 too",
            )
    for name, buffer in network.named_buffers():
        if not _is_finite(buffer, mask=True):
            yield Finding(
                "error",
                name,
                "the buffer holds inf or NaN: a step that is skipped has changed running statistics all the same, and "
                "evaluation reads them",
                "reset it, as reset_running_stats() of a batch norm does, or load a checkpoint that is whole",
            )


def _overridden(network: nn.Module, level: str, fmt: FloatFormat) -> Iterator[Finding]:
    if not MINDSPORE[level].overrides:
        return
    modules = dict(network.named_modules())
    for path, kind in own_norms(network, MINDSPORE[level].protected):
        own = vars(modules.get(path, network))
        small = [
            f"{k}={v:g}" for k, v in own.items() if "eps" in k and isinstance(v, float) and 0 < v <= fmt.zero_up_to
        ]
        lost = f"; {small[0]} is zero in {fmt.name}, so that a row of zeros, as of padding, gives NaN" if small else ""
        yield Finding(
            "warning",
            path,
            f"{kind} casts to float32 itself, but level {level} casts back to {fmt.bits} bits: a square may leave "
            f"their range, and the angle of a position lose its digits{lost}",
            f"custom_mixed_precision(network, black_list=[*get_black_list(), {kind}]) keeps it in float32",
        )


def _ownership(network: nn.Module, optimizer: Optimizer, named: dict[int, str]) -> Iterator[Finding]:
    held = {id(p) for p in parameters_of(optimizer)}
    strangers = held - set(named)
    if strangers:
        yield Finding(
            "error",
            "optimizer",
            f"{len(strangers)} of its parameters are not in this network: it would train another network",
            "build the optimizer from this network's parameters, after replacing any of them",
        )
    left = [name for name, p in network.named_parameters() if p.requires_grad and id(p) not in held]
    if left:
        yield Finding(
            "warning",
            left[0],
            f"{len(left)} trainable parameters are in no group of the optimizer",
            "add them, or set requires_grad=False",
        )


def _constants(optimizer: Optimizer, fmt: FloatFormat, level: str) -> Iterator[Finding]:
    """Constants of the optimizer that the format of its states cannot hold."""
    for index, group in enumerate(optimizer.param_groups):
        stored = {p.dtype for p in group["params"]}
        low = [get_format(_NAMES[d]) for d in stored if d in (torch.float16, torch.bfloat16)]
        formats = low or ([fmt] if level == "O3" else [])
        for key in ("eps", "lr", "weight_decay"):
            value = group.get(key)
            several = value if isinstance(value, tuple | list) else [value]
            value = min((v for v in several if isinstance(v, float)), default=None)  # torch's Adafactor has a None
            for one in formats:
                if isinstance(value, float) and 0 < value <= one.zero_up_to:
                    yield Finding(
                        "error" if low else "warning",
                        f"optimizer group {index}",
                        f"{key}={value:g} is zero in {one.name} (smallest value {one.min_subnormal:.3g})",
                        f"use {key} >= {one.min_normal:.2g}, or keep parameters and states in float32",
                    )


def _states(optimizer: Optimizer, named: dict[int, str]) -> Iterator[Finding]:
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
                yield Finding(
                    "warning",
                    named.get(id(p), "a parameter"),
                    f"optimizer state {key} is {dtype_name(value.dtype)}: squares of small gradients vanish in it",
                    "keep the states in float32",
                )
            if isinstance(value, Tensor) and not _is_finite(value):
                yield Finding(
                    "error",
                    named.get(id(p), "a parameter"),
                    f"optimizer state {key} holds inf or NaN",
                    "go back to a checkpoint; an overflowed step was not skipped",
                )


def _small_updates(optimizer: Optimizer, named: dict[int, str]) -> Iterator[Finding]:
    """Parameters most of whose next updates round away: lr * |g| (Adam's kin: lr) below half an ulp of the weight."""
    name = type(inner(optimizer)).__name__.lower()
    adaptive = any(word in name for word in ("adam", "lamb", "rmsprop", "adafactor"))
    for group in optimizer.param_groups:
        rate = float(coming_rate(optimizer, group))
        if math.isnan(rate):
            continue
        for p in group["params"]:
            if p.grad is None or p.dtype not in _NAMES or not _is_finite(p):
                continue
            fmt = get_format(_NAMES[p.dtype])
            grad = (p.grad.to_dense() if p.grad.is_sparse else p.grad).detach().double().abs()
            size = torch.full_like(grad, rate) if adaptive else grad * rate
            moving = grad > 0
            lost = float((moving & (size < ulp(p.detach().double(), fmt) / 2)).sum()) / max(1, int(moving.sum()))
            if lost > _STATE_SHARE:
                yield Finding(
                    "warning",
                    named.get(id(p), "a parameter"),
                    f"{percent(lost)} of the updates are below half an ulp of their {fmt.name} weight and "
                    "change nothing",
                    "store the weights in float32" if fmt.bits <= 16 else "raise the learning rate",
                )


def _is_finite(t: Tensor, *, mask: bool = False) -> bool:
    """Whether no inf or NaN is in it, but for -inf in what may be a `mask`; a lazy tensor, one on meta, and one of
    integers hold none."""
    if nn.parameter.is_lazy(t) or t.is_meta or not (t.is_floating_point() or t.is_complex()):
        return True
    values = t.detach().float() if t.dtype.itemsize == 1 else t.detach()
    return bool((values.isfinite() | (values == -math.inf) if mask else values.isfinite()).all())


def _clip_order(tree: ast.AST) -> Iterator[Finding]:
    """Find a clip between `scale(loss).backward()` and `unscale_`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    scalers, scaled = _loss_scalers(tree, calls), set[str]()
    for node in sorted(
        calls, key=lambda node: (node.end_lineno, node.end_col_offset)
    ):  # what is called inside ends first
        name, owner = _called(node)
        if owner in scalers and name == "scale":
            scaled.add(owner)
        elif name in ("unscale_", "unscale", "update"):
            scaled.discard(owner)
        elif name in ("clip_grad_norm_", "clip_grad_value_") and scaled:
            yield Finding(
                "error",
                f"line {node.lineno} of the loop",
                f"{name} sees gradients that are still multiplied by the loss scale: the limit means limit / scale",
                f"call {min(scaled)}.unscale_(optimizer) before it",
            )


def _loss_scalers(tree: ast.AST, calls: list[ast.Call]) -> set[str]:
    """Whose `.scale(...)` reaches a backward pass; that of a transform or of a picture does not."""
    into: list[ast.AST] = [
        part for call in calls if _called(call)[0] in ("backward", "grad") for part in (call.func, *call.args)
    ]
    given = [(target, node.value) for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets]
    found, met = set[str](), set[str]()
    while into:
        node = into.pop()
        if isinstance(node, ast.Call):
            if _called(node)[0] == "scale":
                found.add(_called(node)[1])
            into.append(node.func)  # not its arguments: a network may take what is scaled, and its loss is not
            continue
        into += ast.iter_child_nodes(node)
        if isinstance(node, ast.Name | ast.Attribute) and (name := ast.unparse(node)) not in met:
            met.add(name)
            into += [value for target, value in given if ast.unparse(target) == name]
    return found


def _called(node: ast.Call) -> tuple[str, str]:
    """The name that is called, and of what."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr, ast.unparse(node.func.value)
    return getattr(node.func, "id", ""), ""
