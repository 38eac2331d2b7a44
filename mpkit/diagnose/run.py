"""Run one batch again in several precisions and scales, and say what went wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import nn

from mpkit.arguments import check_choice, check_function, check_number, checked
from mpkit.casting import LEVELS
from mpkit.diagnose.passes import LossFn, Pass, Question, dtype_of
from mpkit.diagnose.precision import ModuleLoss, module_losses
from mpkit.diagnose.report import AS_IT_IS, IN_AUTOCAST, LOST_TOO_MUCH, Cure, Report
from mpkit.diagnose.watch import OUTSIDE, ROOT, Event, finite
from mpkit.formats import FloatFormat, dtype_name
from mpkit.model.randomness import random_state, set_random_state

Blame = tuple[str, Event | None, tuple[str, ...]]  # verdict, where it was born, or the names of the tensors it was in


@checked
def diagnose(
    network: nn.Module,
    batch: object,
    loss_fn: LossFn | None,
    *,
    level: str | None = "O2",
    scale: Annotated[float, partial(check_number, high=2.0**128)] = 2.0**16,  # times the loss it is one of float32
    dtype: torch.dtype | FloatFormat = torch.float16,
) -> Report:
    """Re-run one batch and say whether scale, format, model, data or weights make it non-finite, and where first.

    The batch runs in float32, then at the level; the backward pass at `scale`, at 1, and at the powers of two that find
    the largest scale that works. All of it runs on copies of network, batch and loss, and with the same random numbers;
    afterwards the random states of torch, CUDA, NumPy and Python are as they were before. Hooks of modules and
    parameters run in each of these passes.

    Args:
        network:  any module, with or without a level on it. Its training mode is respected.
        batch:    (inputs, target): the loss is loss_fn(network(inputs), target); a tuple or dict of inputs is unpacked.
                  A single tensor: the loss is loss_fn(network(batch)). A dict of inputs: loss_fn(network(**batch)).
        loss_fn:  gives a scalar; None if network(*batch) is the loss. A module, or a method of one, may have a state.
        level:    "O0", "O1", "O2", "O3" or "auto", put on a copy; None keeps the levels that the network has, and its
                  dtype, and an autocast context around this call, whose dtype then counts.
        scale:    the loss scale to ask about (finite; 0, as a collapsed scaler has it, is explained).
        dtype:    what the level computes in: torch.float16, torch.bfloat16, or a FloatFormat to emulate.
    Raises:  TypeError, ValueError for wrong arguments, a network that cannot be copied, a loss that is not
             one number or has no gradient; RuntimeError, with torch's own words, for a batch that does not run
             in float32, or uses an operation that does not exist in the low precision.
    Edges:   infinities that an attention mask puts in on purpose are no fault as long as a softmax removes them. The
             search assumes that where a scale works, every smaller scale works too.
    """
    check_function("loss_fn", loss_fn, "a function (output, target) -> loss", optional=True)
    if level is not None:
        check_choice("level", level, LEVELS)
    kept = [name for name, p in network.named_parameters() if p.is_leaf and p.grad is not None and not finite(p.grad)]
    asked, scale = scale, scale or 1.0
    dtype = dtype_of(network, dtype) if level is None else dtype
    state = random_state(None)
    try:
        question = Question(network, batch, loss_fn, level, dtype, lambda: set_random_state(state, None))
        with torch.inference_mode(False), torch.enable_grad():
            report = _diagnosed(question, scale)
    finally:
        set_random_state(state, None)
    if kept or not asked:
        verdict = "gradients_non_finite" if kept else "scale_zero"
        beside = "" if report.verdict == "healthy" else f"{report.verdict} in {report.module or 'the backward pass'}"
        return replace(report, verdict=verdict, scale=asked, module=", ".join(kept), operation="", beside=beside)
    return report


def _diagnosed(asked: Question, scale: float) -> Report:
    full = asked.plain()
    if not full.finite:
        return _report(asked, scale, _blame_model(full), full)
    low = asked.at(scale)
    largest = None if not math.isfinite(low.loss) else low.largest_scale()
    without = math.isfinite(low.loss) and not low.finite and scale > 1 > (largest or 0.0)
    blame = _blame_precision(full, asked.at(1.0) if without else low, largest)  # not what this scale adds
    report = _report(asked, scale, blame, full, low, largest)
    modules, first = module_losses(full.watch.calls, low.watch.calls, asked.step)
    report = replace(report, modules=modules)
    if report.verdict == "healthy":
        report = _lost_in_silence(report, full, low, first)
    return _with_cures(report, full, asked)


def _blame_model(full: Pass) -> Blame:
    event, leaves = full.watch.born(full.bad)
    if not leaves:
        return "model_non_finite", event, leaves
    inside = tuple(name for name in leaves if not name.startswith("batch"))
    return ("weights_non_finite", None, inside) if inside else ("bad_data", None, leaves)


def _blame_precision(full: Pass, low: Pass, largest: float | None) -> Blame:
    event, leaves = low.watch.born(low.bad)
    hidden = low.watch.hidden if full.watch.hidden is None else None
    if hidden is not None and not leaves and (event is None or hidden.index < event.index):
        return "forward_overflow", hidden, ()  # the first one, whatever came of it and whatever the scale
    if low.finite:
        return "healthy", None, ()
    if not math.isfinite(low.loss) or (event is not None and event.phase == "forward"):
        return "forward_overflow", event, leaves
    return "scale_too_high" if largest is not None and largest >= 1 else "gradient_overflow", event, leaves


def _report(
    asked: Question, scale: float, blame: Blame, full: Pass, low: Pass | None = None, largest: float | None = None
) -> Report:
    verdict, event, leaves = blame
    level = asked.level or (IN_AUTOCAST if asked.autocast else AS_IT_IS)
    seen: dict[str, Any] = {"module": ", ".join(leaves)}
    if event is not None and not leaves:
        seen = {key: getattr(event, key) for key in ("phase", "module", "operation", "gradient_of", "operands")}
    if low is not None:
        seen |= {"max_scale": largest, "lost": full.lost(low.again(1.0)), "lost_at_scale": full.lost(low.gradients)}
        seen |= {} if largest is None else {"lost_at_best": full.lost(low.again(largest))}
    return Report(verdict, full.loss, (low or full).loss, scale, level, dtype_name(asked.dtype), **seen)


def _lost_in_silence(report: Report, full: Pass, low: Pass, first: ModuleLoss | None) -> Report:
    """Finite is not enough: gradients that no scale brings back, a module that lost its digits, a buffer its range."""
    buffers = zip(full.network.named_buffers(), low.network.named_buffers())
    broken = [name for (name, wide), (_, narrow) in buffers if finite(wide) and not finite(narrow)]
    lost = replace(report, verdict="precision_lost", phase="forward")
    if broken:
        return replace(lost, module=f"buffer {broken[0]}")
    gone = {key: share - full.watch.zeroed.get(key, 0.0) for key, share in low.watch.zeroed.items()}
    place = next((key for key, share in gone.items() if share > LOST_TOO_MUCH), None)
    if report.stays_lost and place is not None:
        return replace(lost, verdict="lost_in_forward", module=place[0], operation=place[1])
    return report if first is None else replace(lost, module=first.module, loss_of_module=first)


def _with_cures(report: Report, full: Pass, asked: Question) -> Report:
    """The report with those changes that end what it found, each tried on this batch."""

    def works(cure: Cure) -> bool:
        after = asked.cured(cure)
        if after is None or not after.finite:
            return False
        if report.verdict == "lost_in_forward":
            return full.lost(after.again(after.largest_scale() or 1.0)) <= LOST_TOO_MUCH
        if report.verdict == "precision_lost":
            return module_losses(full.watch.calls, after.watch.calls, asked.step)[1] is None
        return full.watch.hidden is not None or after.watch.hidden is None

    curable = ("forward_overflow", "gradient_overflow", "lost_in_forward", "precision_lost")
    if report.verdict not in curable or report.phase == "" or report.module.startswith("buffer "):
        return report
    good: list[Cure] = []  # bfloat16, and of the others the first alone
    for cure in _candidates(asked.network, report.module, asked.level, asked.autocast):
        if (not good or cure.kind == "bfloat16") and works(cure):
            good.append(cure)
    return replace(report, cures=tuple(good))


def _candidates(network: nn.Module, module: str, level: str | None, autocast: bool) -> Iterator[Cure]:
    """What may end an overflow that was born in `module`, the smallest change first.

    autocast: the network runs inside an autocast region, and has no level.
    """
    if module == OUTSIDE:
        yield Cure("loss")
    elif module != ROOT:
        parts, keep = module.split("."), "autocast" if autocast else "keep"
        yield from (Cure(keep, ".".join(parts[:end])) for end in range(len(parts), 0, -1))
    if level in ("O2", "O3"):
        yield from (Cure("level", gentler) for gentler in ("O1", "auto"))
    if level is not None or autocast or any(p.dtype is torch.float16 for p in network.parameters()):
        yield Cure("bfloat16")
