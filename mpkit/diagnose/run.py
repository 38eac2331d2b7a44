"""Run one batch again in several precisions and scales, and say what went wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mpkit.arguments import check_choice, check_function, is_number, kind_of
from mpkit.casting import LEVELS, auto_mixed_precision, remove_mixed_precision, to_float
from mpkit.diagnose.copies import copied, copied_batch, tensors_of
from mpkit.diagnose.cure import Cure, candidates, cures
from mpkit.diagnose.plain import NoAutocast
from mpkit.diagnose.precision import ModuleLoss, Outputs, module_losses
from mpkit.diagnose.report import AS_IT_IS, IN_AUTOCAST, LOST_TOO_MUCH, Report, operation_of
from mpkit.diagnose.stale import stale_operands
from mpkit.diagnose.watch import Event, Watch
from mpkit.formats import BF16, FloatFormat, dtype_name
from mpkit.model.randomness import random_state, set_random_state

T = TypeVar("T")
LossFn = Callable[..., Tensor]
SMALLEST, LARGEST = -40, 127  # exponents of the loss scales that are tried


def diagnose(
    network: nn.Module,
    batch: object,
    loss_fn: LossFn | None,
    *,
    level: str | None = "O2",
    scale: float = 2.0**16,
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
                  dtype, and an autocast context around this call, whose dtype then counts. If the network has a recipe
                  with delayed scales (`cast_like`), the report names the scales that are too large for this batch.
        scale:    the loss scale to ask about (finite; 0, as a collapsed scaler has it, is explained).
        dtype:    what the level computes in: torch.float16, torch.bfloat16, or a FloatFormat to emulate.
    Raises:  TypeError, ValueError for wrong arguments, a network that cannot be copied or is TorchScript, a loss that
             is not one number; RuntimeError, with torch's own words, for a batch that does not run in float32, or uses
             an operation that does not exist in the low precision.
    Edges:   infinities that an attention mask puts in on purpose are no fault as long as a softmax removes them. The
             search assumes that where a scale works, every smaller scale works too.
    """
    _check(network, loss_fn, level, scale)
    kept = [name for name, p in network.named_parameters() if p.is_leaf and p.grad is not None and not _finite(p.grad)]
    asked, scale = scale, scale or 1.0
    dtype = torch.get_autocast_dtype(_device(network)) if level is None and _in_autocast(network) else dtype
    with _same_numbers() as again, torch.inference_mode(False), torch.enable_grad():
        report = _diagnosed(_Question(network, batch, loss_fn, level, dtype, again), scale)
    if kept or not asked:
        verdict = "gradients_non_finite" if kept else "scale_zero"
        beside = "" if report.verdict == "healthy" else f"{report.verdict} in {report.module or 'the backward pass'}"
        return replace(report, verdict=verdict, scale=asked, module=", ".join(kept), operation="", beside=beside)
    return report


@dataclass(frozen=True)
class _Question:
    """What is asked about; `again` makes the next pass meet the random numbers of the first."""

    network: nn.Module
    batch: object
    loss_fn: LossFn | None
    level: str | None
    dtype: torch.dtype | FloatFormat
    again: Callable[[], None]

    def plain(self) -> _Run:
        with _saying("the batch does not even run in float32"):
            network, loss_fn = copied(self.network, self.loss_fn)
            loss_fn = loss_fn.float() if isinstance(loss_fn, nn.Module) else loss_fn
            return _run(remove_mixed_precision(network).float(), loss_fn, self.batch, 1.0, plain=True)

    def low(self) -> tuple[nn.Module, LossFn | None]:
        network, loss_fn = copied(self.network, self.loss_fn)
        if self.level is None:
            return network, loss_fn
        return auto_mixed_precision(remove_mixed_precision(network).float(), self.level, self.dtype), loss_fn

    def at(self, scale: float) -> _Run:
        where = f"at level {self.level}" if self.level is not None else "with the levels that the network has"
        self.again()
        with _saying(f"the batch runs in float32 but not {where} in {self.dtype}"):
            return _run(*self.low(), self.batch, scale)


def _diagnosed(asked: _Question, scale: float) -> Report:
    full = asked.plain()
    if not full.finite:
        return _report(_blame_model(full), full, full, None, scale, asked)
    low = asked.at(scale)
    largest = None if not math.isfinite(low.loss) else low.largest_scale()
    without = math.isfinite(low.loss) and not low.finite and scale > 1 > (largest or 0.0)
    blame = _blame_precision(full, asked.at(1.0) if without else low, largest)  # not what this scale adds
    report = _report(blame, full, low, largest, scale, asked)
    if asked.level is None and report.verdict == "healthy":
        asked.again()
        report = _with_stale_scales(report, *copied(asked.network, asked.loss_fn), copied_batch(asked.batch))
    modules, first = module_losses(full.outputs, low.outputs, _step(asked.dtype))
    report = replace(report, modules=modules)
    if report.verdict == "healthy":
        report = _lost_in_silence(report, full, low, first)
    return _with_cures(report, full, asked)


def _lost_in_silence(report: Report, full: _Run, low: _Run, first: ModuleLoss | None) -> Report:
    """Finite is not enough: gradients that no scale brings back, a module that lost its digits, a buffer its range."""
    broken = [
        name
        for (name, wide), (_, narrow) in zip(full.network.named_buffers(), low.network.named_buffers())
        if _finite(wide) and not _finite(narrow)
    ]
    if broken:
        return replace(report, verdict="precision_lost", phase="forward", module=f"buffer {broken[0]}")
    gone = {key: share - full.watch.zeroed.get(key, 0.0) for key, share in low.watch.zeroed.items()}
    place = next((key for key, share in gone.items() if share > LOST_TOO_MUCH), None)
    if report.stays_lost and place is not None:
        module, operation = place
        return replace(report, verdict="lost_in_forward", phase="forward", module=module, operation=operation)
    if first is not None:
        return replace(report, verdict="precision_lost", phase="forward", module=first.module, loss_of_module=first)
    return report


def _with_cures(report: Report, full: _Run, asked: _Question) -> Report:
    """The report with those changes that end what it found, each tried on this batch."""

    def works(cure: Cure) -> bool:
        asked.again()
        run = _with_cure(cure, asked)
        if run is None or not run.finite:
            return False
        if report.verdict == "lost_in_forward":
            return _lost(full, run.again(run.largest_scale() or 1.0)) <= LOST_TOO_MUCH
        if report.verdict == "precision_lost":
            return module_losses(full.outputs, run.outputs, _step(asked.dtype))[1] is None
        return full.watch.hidden() is not None or run.watch.hidden() is None

    if report.verdict not in ("forward_overflow", "gradient_overflow", "lost_in_forward", "precision_lost"):
        return report
    if report.phase == "" or report.module.startswith("buffer "):
        return report
    autocast = asked.level is None and _in_autocast(asked.network)
    tried = candidates(report.module, asked.level, _light_class(asked.network, report.module), autocast)
    return replace(report, cures=cures(tried, works))


def _step(dtype: torch.dtype | FloatFormat) -> float:
    return dtype.eps if isinstance(dtype, FloatFormat) else torch.finfo(dtype).eps


def _device(network: nn.Module) -> str:
    return next((p.device.type for p in network.parameters()), "cpu")


def _in_autocast(network: nn.Module) -> bool:
    kind = _device(network)
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _finite(t: Tensor) -> bool:
    return bool((t.to_dense() if t.layout != torch.strided else t).isfinite().all())


def _check(network: object, loss_fn: object, level: str | None, scale: float) -> None:
    if not isinstance(network, nn.Module):
        raise TypeError(f"diagnose runs an nn.Module, got {kind_of(network)}")
    check_function("loss_fn", loss_fn, "a function (output, target) -> loss", optional=True)
    if any(isinstance(module, torch.jit.ScriptModule) for module in network.modules()):
        raise TypeError(
            "diagnose watches modules in Python, and TorchScript has none; give the module it was made from"
        )
    if level is not None:
        check_choice("level", level, LEVELS)
    if not is_number(scale):
        raise TypeError(f"scale must be a number, got {scale!r}")
    if not 0 <= scale <= torch.finfo(torch.float32).max:
        raise ValueError(f"scale must be at least 0 and finite in float32, as the scaled loss is, got {scale}")


@contextmanager
def _saying(what: str) -> Iterator[None]:
    """Errors of torch behind a sentence that says in which run they arose."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{what}: {error}") from error


@contextmanager
def _same_numbers() -> Iterator[Callable[[], None]]:
    """A function that takes all random generators back to where they are now; the end of the context does so too."""
    state = random_state(None)
    try:
        yield lambda: set_random_state(state, None)
    finally:
        set_random_state(state, None)


def _with_stale_scales(report: Report, network: nn.Module, loss_fn: LossFn | None, batch: object) -> Report:
    """The report, or one that names the tensors that the delayed scales of a recipe cannot hold."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    stale = stale_operands(network, lambda: _gradients(_loss(network, batch, loss_fn), parameters, report.scale))
    if not stale:
        return report
    return replace(report, verdict="stale_scale", module=", ".join(stale), overshoot=max(stale.values()))


def _with_cure(cure: Cure, asked: _Question) -> _Run | None:
    """The batch at scale 1 once the advice is followed; None where a float32 result then meets a 16-bit weight."""
    if cure.kind == "bfloat16":
        asked = replace(asked, dtype=BF16 if isinstance(asked.dtype, FloatFormat) else torch.bfloat16)
    tried, loss_fn = replace(asked, level=cure.what if cure.kind == "level" else asked.level).low()
    kept = [tried.get_submodule(cure.what)] if cure.kind == "keep" else []
    if cure.kind == "class":
        kept = [module for module in tried.modules() if type(module).__name__ == cure.what]
    for module in kept:
        to_float(module, torch.float32)
    if cure.kind == "autocast":
        _without_autocast(tried.get_submodule(cure.what), _device(tried))

    def of_float32(output: object, *target: object) -> Tensor:
        assert loss_fn is not None
        return loss_fn(_widened(output), *target)

    inside = asked.level is None and cure.kind == "bfloat16"
    try:
        with torch.autocast(_device(tried), torch.bfloat16) if inside else nullcontext():
            return _run(tried, of_float32 if cure.kind == "loss" and loss_fn is not None else loss_fn, asked.batch, 1.0)
    except Exception:  # whatever a network or a loss raises for a dtype that it does not take
        return None


def _widened(nest: T) -> T:
    widened: T = tree_map(lambda t: t.float() if isinstance(t, Tensor) and t.is_floating_point() else t, nest)
    return widened


def _without_autocast(module: nn.Module, kind: str) -> None:
    forward = module.forward

    def in_float32(*args: object, **kwargs: object) -> object:
        with torch.autocast(kind, enabled=False):
            return forward(*_widened(args), **_widened(kwargs))

    module.forward = in_float32


@dataclass
class _Run:
    """One forward pass and the backward pass from it at one scale."""

    network: nn.Module
    watch: Watch
    outputs: Outputs
    loss: float
    bad: list[Tensor]
    gradients: list[Tensor | None]
    again: Callable[[float], list[Tensor | None]]

    @property
    def finite(self) -> bool:
        return not self.bad

    def born(self) -> tuple[Event | None, tuple[str, ...]]:
        return self.watch.born(self.bad)

    def largest_scale(self) -> float | None:
        """Largest 2**k with finite gradients, by bisection; None if not even the smallest works."""
        works, fails = SMALLEST, LARGEST + 1
        if not self._works(works):
            return None
        while fails - works > 1:
            middle = (works + fails) // 2
            works, fails = (middle, fails) if self._works(middle) else (works, middle)
        return 2.0**works

    def _works(self, exponent: int) -> bool:
        return all(bool(g.isfinite().all()) for g in self.again(2.0**exponent) if g is not None)


def _run(network: nn.Module, loss_fn: LossFn | None, batch: object, scale: float, plain: bool = False) -> _Run:
    """The batch, or a copy of it in float32 and without an autocast context if `plain`."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    batch = copied_batch(batch, widened=plain)
    watch, outputs = Watch(network, _leaves(network, batch)), Outputs(network)
    with ExitStack() as stack:
        if plain:
            stack.enter_context(NoAutocast(parameters[0].device.type if parameters else "cpu"))
        stack.enter_context(watch)
        stack.enter_context(watch.attached())  # in the backward pass too: a re-entrant checkpoint runs modules there
        with outputs:
            loss = _loss(network, batch, loss_fn)
        if not parameters:
            raise ValueError("no parameter of the network has requires_grad=True, so there is no gradient to look at")
        wide = loss.float()
        watch.backward = True
        gradients = _gradients(wide, parameters, scale)
    bad = [t for t in (wide.detach(), *gradients) if t is not None and not bool(t.isfinite().all())]
    if not bool(wide.isfinite()):
        bad = [loss.detach()] if not bool(loss.isfinite()) else [wide.detach()]
    return _Run(
        network, watch, outputs, float(wide.detach()), bad, gradients, lambda s: _gradients(wide, parameters, s)
    )


def _gradients(loss: Tensor, parameters: list[nn.Parameter], scale: float) -> list[Tensor | None]:
    seed = torch.full_like(loss, scale)
    found: Sequence[Tensor | None]
    try:
        found = torch.autograd.grad(loss, parameters, seed, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        for p in parameters:  # of a copy of the network; a re-entrant checkpoint only knows backward()
            p.grad = None
        loss.backward(seed, retain_graph=True)
        found = [p.grad for p in parameters]
    return [g.to_dense() if g is not None and g.is_sparse else g for g in found]


def _loss(network: nn.Module, batch: object, loss_fn: LossFn | None) -> Tensor:
    if loss_fn is None:
        loss = network(*batch) if isinstance(batch, tuple | list) else network(batch)
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        loss = loss_fn(_forward(network, batch[0]), batch[1])
    elif isinstance(batch, Tensor | Mapping):
        loss = loss_fn(_forward(network, batch))
    else:
        raise TypeError(
            f"batch must be (inputs, target), one tensor or a dict of inputs, got {type(batch).__name__}; "
            "several inputs go into a tuple: ((x1, x2), target)"
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        came = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        came += " that depends on no parameter" * (isinstance(loss, Tensor) and not loss.requires_grad)
        way = (
            "reduce a tensor with loss.mean()"
            if isinstance(loss, Tensor)
            else "return the tensor from which backward starts"
        )
        raise ValueError(f"the loss must be one number that depends on a parameter, got {came}; {way}")
    return loss.reshape(())


def _forward(network: nn.Module, inputs: object) -> object:
    if isinstance(inputs, Mapping):
        return network(**inputs)
    return network(*inputs) if isinstance(inputs, tuple | list) else network(inputs)


def _leaves(network: nn.Module, batch: object) -> dict[str, Tensor]:
    found = dict(tensors_of("batch", batch))
    found |= {f"parameter {name}": p for name, p in network.named_parameters()}
    return found | {f"buffer {name}": b for name, b in network.named_buffers()}


def _blame_model(full: _Run) -> tuple[str, Event | None, tuple[str, ...]]:
    event, leaves = full.born()
    if not leaves:
        return "model_non_finite", event, leaves
    inside = [name for name in leaves if not name.startswith("batch")]
    return ("weights_non_finite", None, tuple(inside)) if inside else ("bad_data", None, leaves)


def _blame_precision(full: _Run, low: _Run, largest: float | None) -> tuple[str, Event | None, tuple[str, ...]]:
    event, leaves = low.born()
    hidden = low.watch.hidden() if full.watch.hidden() is None else None
    if hidden is not None and not leaves and (event is None or hidden.index < event.index):
        return "forward_overflow", hidden, ()  # the first one, whatever came of it and whatever the scale
    if low.finite:
        return "healthy", None, ()
    if not math.isfinite(low.loss) or (event is not None and event.phase == "forward"):
        return "forward_overflow", event, leaves
    return "scale_too_high" if largest is not None and largest >= 1 else "gradient_overflow", event, leaves


def _light_class(network: nn.Module, path: str) -> str:
    """The class of a module that costs little in float32, of which there are several: one with vectors only.

    One without any is a function of the reader's as a module, and its class says nothing of what it does.
    """
    found = dict(network.named_modules()).get(path)
    sizes = [] if found is None else [p.dim() for p in found.parameters()]
    if found is None or any(True for _ in found.children()) or not sizes or max(sizes) > 1:
        return ""
    return type(found).__name__ if sum(type(m) is type(found) for m in network.modules()) > 1 else ""


def _report(
    blame: tuple[str, Event | None, tuple[str, ...]],
    full: _Run,
    low: _Run,
    largest: float | None,
    scale: float,
    asked: _Question,
) -> Report:
    verdict, event, leaves = blame
    fields = operation_of(event)
    if leaves:
        fields["module"] = ", ".join(leaves)
    low_too = verdict not in ("bad_data", "model_non_finite", "weights_non_finite")
    at_one = _lost(full, low.again(1.0)) if low_too else math.nan
    zeros = largest is None or not low.finite or not low_too
    one_factor = event is not None and "mm" in event.operation and {"mul", "div"} & low.watch.consumers(event)
    return Report(
        verdict=verdict,
        **fields,  # type: ignore[arg-type]
        max_scale=largest,
        lost=at_one,
        lost_at_scale=_lost(full, low.gradients) if low.finite and full is not low else math.nan,
        loss=full.loss,
        low_loss=low.loss,
        scale=scale,
        level=asked.level or (IN_AUTOCAST if _in_autocast(full.network) else AS_IT_IS),
        dtype=dtype_name(asked.dtype),
        lost_at_best=math.nan if zeros or largest is None else _lost(full, low.again(largest)),
        scaled_later=bool(one_factor),
    )


def _lost(full: _Run, gradients: list[Tensor | None]) -> float:
    """Share of the values that are not zero in float32 and zero in `gradients`; NaN when those are not finite."""
    pairs = [(a, b) for a, b in zip(full.gradients, gradients) if a is not None and b is not None]
    if not pairs or not all(bool(b.isfinite().all()) for _, b in pairs):
        return math.nan
    there = sum(int((a != 0).sum()) for a, _ in pairs)
    gone = sum(int(((a != 0) & (b == 0)).sum()) for a, b in pairs)
    return gone / there if there else 0.0
