"""What a diagnosis says, and what to do about it, in words a student understands."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mpkit.diagnose.precision import ModuleLoss
from mpkit.diagnose.watch import Operand
from mpkit.diagnose.words import WORDS, said
from mpkit.replay.percent import percent

VERDICTS: dict[str, str] = WORDS["verdicts"]
AS_IT_IS = "as it is"  # the level of a report on a network with the levels that it has
IN_AUTOCAST = "in torch.autocast"
LOST_TOO_MUCH = 0.05  # share of the gradient values that may become zero


@dataclass(frozen=True)
class Cure:
    """One change that ends an overflow.

    kind: "keep" (a module in float32), "autocast" (off for a module), "level" (another level), "bfloat16", or "loss"
          (on the output in float32).
    what: path of the module, or name of the level; else "".
    """

    kind: str
    what: str = ""

    def __str__(self) -> str:
        return said("cures", self.kind, what=self.what)


@dataclass(frozen=True)
class Report:
    """Why a step went bad.

    verdict:     a key of `VERDICTS`.
    phase:       "forward", "backward", or "" when nothing was born in this step.
    module:      dotted path of the module where the first non-finite value was born, or the first digits were lost; for
                 `bad_data`, `weights_non_finite` and `gradients_non_finite` the tensor that holds it.
    operation:   what torch calls the operation, or the cast or rounding it is.
    gradient_of: the forward operation whose gradient was being computed, in the backward pass.
    operands:    what went into that operation.
    max_scale:   the largest power-of-two scale with finite gradients; None if none works.
    lost:        share (0..1) of the gradient values that become zero at scale 1 but are not zero in float32.
    lost_at_scale: the same at `scale`; NaN when that run is not finite. `lost_at_best`: at `max_scale`.
    loss:        in float32. `low_loss` is the loss in the low precision.
    cures:       the changes that end it; each was tried on this batch.
    modules:     for each call of a module its relative error against float32, and the distinct rows left.
    beside:      what else was found, where the verdict is about the loop.
    """

    verdict: str
    loss: float
    low_loss: float
    scale: float
    level: str
    dtype: str
    phase: str = ""
    module: str = ""
    operation: str = ""
    gradient_of: str = ""
    operands: tuple[Operand, ...] = ()
    max_scale: float | None = None
    lost: float = math.nan
    lost_at_scale: float = math.nan
    lost_at_best: float = math.nan
    cures: tuple[Cure, ...] = ()
    modules: tuple[ModuleLoss, ...] = ()
    loss_of_module: ModuleLoss | None = None
    beside: str = ""

    @property
    def stays_lost(self) -> bool:
        """Whether even the largest scale loses many gradient values, and hardly fewer than the scale in use."""
        return self.lost_at_best > max(LOST_TOO_MUCH, self.lost_at_scale / 2)

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do, most useful first."""
        return tuple(self._say("advice", line) if line in WORDS["advice"] else line for line in _advice(self))

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {VERDICTS[self.verdict]}", *(f"  {line}" for line in self._seen())]
        return "\n".join([*lines, *(f"  -> {a}" for a in self.advice)])

    def _say(self, part: str, key: str, **more: object) -> str:
        scales = {"max_scale": power(self.max_scale or 1.0), "scale": power(self.scale)}
        shares = {key: percent(getattr(self, key), 1) for key in ("lost", "lost_at_scale", "lost_at_best")}
        return said(part, key, **(vars(self) | scales | shares | more))

    def _seen(self) -> Iterator[str]:
        """Where it was, and what the scale has to do with it."""
        key = _PLACES.get(self.verdict, "born" if self.operation else "")
        if key:
            of = f" (the gradient of {self.gradient_of})" if self.gradient_of else ""
            yield self._say("report", key, of=of, loss_of_module=self.loss_of_module or self.module)
        if key == "born":
            yield from (said("report", "went_in", operand=operand) for operand in self.operands)
        if self.verdict in ("bad_data", "weights_non_finite", "model_non_finite", "scale_zero"):
            return
        largest = self._say("report", "no_largest" if self.max_scale is None else "largest")
        yield self._say("report", "as_is" if self.level in (AS_IT_IS, IN_AUTOCAST) else "level", largest=largest)
        if not math.isnan(self.lost):
            known = not math.isnan(self.lost_at_scale)
            here = f", and {percent(self.lost_at_scale, 1)} at {power(self.scale)}" if known else ""
            yield self._say("report", "lost", here=here)


_PLACES = {
    **dict.fromkeys(("bad_data", "weights_non_finite", "gradients_non_finite"), "held"),
    **{"precision_lost": "digits", "lost_in_forward": "zeros"},
}
_ALWAYS = {  # what to do at a verdict, whatever else was seen
    "scale_too_high": ("lower_it", "now_and_then"),
    "model_non_finite": ("repair_model",),
    "bad_data": ("repair_data",),
    "weights_non_finite": ("checkpoint", "check_skips"),
    "gradients_non_finite": ("clear",),
    "scale_zero": ("begin_again",),
}


def _advice(report: Report) -> Iterator[str]:
    """Keys of the advice, or advice, most useful first."""
    cures = [str(cure) for cure in report.cures]
    if report.verdict not in ("healthy", "scale_too_high", "lost_in_forward", "precision_lost"):
        yield from _hint(report)
    yield from _ALWAYS.get(report.verdict, ()) if report.verdict != "scale_zero" or report.max_scale else ()
    if report.beside:
        yield "beside"
    if report.verdict == "healthy" and report.stays_lost:
        yield "no_scale_helps"
    elif report.verdict == "healthy" and report.lost_at_scale > LOST_TOO_MUCH:
        yield "raise_it"
    elif report.verdict == "lost_in_forward":
        yield from ("no_scale_helps", *(cures or ["larger"]))
    elif report.verdict == "gradient_overflow":
        yield from (*(["would_fit"] if report.max_scale else []), *cures, "divide")
    elif report.module.startswith("buffer ") and report.verdict == "precision_lost":
        yield "wide_buffer"
    elif report.verdict in ("forward_overflow", "precision_lost"):
        yield from cures or ["not_tried" if report.level == AS_IT_IS else "no_cure"]
    if report.verdict == "forward_overflow":
        yield "hidden" if math.isfinite(report.low_loss) else "not_the_scale"


def _hint(report: Report) -> list[str]:
    """What is to be done about the operation in which it was born."""
    for operation in (report.gradient_of, report.operation.split(" ")[0]):
        for key, hint in WORDS["hints"].items():
            if key in operation.split("_") or ("_" in key and key in operation):
                below = report.phase == "forward" and any(operand.low < 0 for operand in report.operands)
                return ["negative" if below and key in ("log", "sqrt", "rsqrt") else hint]
    return []


def power(value: float) -> str:
    """A scale as a reader likes it: 65536 -> "2^16 = 65536", 1000 -> "1000".

    >>> power(65536.0), power(0.25), power(1000.0)
    ('2^16 = 65536', '2^-2 = 0.25', '1000')
    """
    if math.frexp(value)[0] == 0.5:
        return f"2^{math.frexp(value)[1] - 1} = {value:.10g}"
    return f"{value:.10g}"
