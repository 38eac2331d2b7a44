"""What a diagnosis says, and what to do about it, in words a student understands."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mpkit.diagnose.cure import Cure
from mpkit.diagnose.precision import ModuleLoss
from mpkit.diagnose.watch import Event, Operand
from mpkit.formats import get_format
from mpkit.replay.percent import percent

VERDICTS = {
    "healthy": "Nothing is wrong with this batch: loss and gradients are finite.",
    "scale_too_high": "The loss scale is too high: the gradients overflow only because they are multiplied by it.",
    "forward_overflow": "A value leaves the number format in the forward pass; no loss scale can repair that.",
    "gradient_overflow": "The gradients leave the number format in the backward pass even without a loss scale.",
    "model_non_finite": "The model itself makes inf or NaN, in float32 too: neither scale nor format is to blame.",
    "bad_data": "The batch holds inf or NaN and passes it on to the loss or the gradients.",
    "lost_in_forward": "Values become zero in the forward pass, and their gradients with them, at any loss scale.",
    "precision_lost": "All numbers are finite, but a module loses far more digits than the format must lose.",
    "gradients_non_finite": "p.grad holds inf or NaN already: it stays there until somebody clears the gradients.",
    "scale_zero": "The loss scale is 0: every gradient is multiplied by 0, and unscaling divides 0 by 0, which is NaN.",
    "stale_scale": "Loss and gradients are finite, but a scale from earlier steps cannot hold a tensor of this batch.",
    "weights_non_finite": "A weight or buffer holds inf or NaN already: the damage was done in an earlier step.",
}


@dataclass(frozen=True)
class Report:
    """Why a step went bad.

    verdict:     a key of `VERDICTS`.
    phase:       "forward", "backward", or "" when nothing was born in this step.
    module:      dotted path of the module where the first non-finite value was born, or the first digits were lost; for
                 `bad_data`, `weights_non_finite` and `gradients_non_finite` the tensor that holds it, for
                 `stale_scale` the clipped ones, the worst first.
    operation:   what torch calls the operation, or the cast or rounding it is.
    gradient_of: the forward operation whose gradient was being computed, in the backward pass.
    operands:    what went into that operation.
    max_scale:   the largest power-of-two scale with finite gradients; None if none works.
    lost:        share (0..1) of the gradient values that become zero at scale 1 but are not zero in float32.
    lost_at_scale: the same at `scale`; NaN when that run is not finite. `lost_at_best`: at `max_scale`.
    loss:        in float32. `low_loss` is the loss in the low precision.
    overshoot:   for `stale_scale` how many times too large the worst tensor's largest element is (2 and more).
    cures:       the changes that end it; each was tried on this batch.
    modules:     for each call of a module its relative error against float32, and the distinct rows left.
    beside:      what else was found, where the verdict is about the loop.
    """

    verdict: str
    phase: str
    module: str
    operation: str
    gradient_of: str
    operands: tuple[Operand, ...]
    max_scale: float | None
    lost: float
    lost_at_scale: float
    loss: float
    low_loss: float
    scale: float
    level: str
    dtype: str
    overshoot: float = 1.0
    cures: tuple[Cure, ...] = ()
    lost_at_best: float = math.nan
    modules: tuple[ModuleLoss, ...] = ()
    loss_of_module: ModuleLoss | None = None
    scaled_later: bool = False
    beside: str = ""

    @property
    def stays_lost(self) -> bool:
        """Whether even the largest scale loses many gradient values, and hardly fewer than the scale in use."""
        return self.lost_at_best > max(LOST_TOO_MUCH, self.lost_at_scale / 2)

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do, most useful first."""
        return tuple(_advice(self))

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {VERDICTS[self.verdict]}", *self._birth(), *self._scales()]
        return "\n".join([*lines, *(f"  -> {a}" for a in self.advice)])

    def _birth(self) -> list[str]:
        if self.verdict in ("bad_data", "weights_non_finite", "gradients_non_finite"):
            return [f"  They are in {self.module}."]
        if self.verdict == "stale_scale":
            worst = f"The worst one is {self.overshoot:.3g} times too large for its scale."
            return [f"  Values were clipped in {self.module}. {worst}"]
        if self.verdict == "precision_lost":
            return [f"  The first is {self.loss_of_module or self.module}."]
        if self.verdict == "lost_in_forward":
            return [f"  They became zero in module {self.module}, in the operation {self.operation}."]
        if not self.operation:
            return []
        of = f" (the gradient of {self.gradient_of})" if self.gradient_of else ""
        place = f"in the {self.phase} pass of module {self.module}, in the operation {self.operation}{of}"
        went_in = [f"  Into it went {operand}." for operand in self.operands]
        return [f"  The first inf or NaN was born {place}.", *went_in]

    def _scales(self) -> list[str]:
        if self.verdict in ("bad_data", "weights_non_finite", "model_non_finite", "scale_zero"):
            return []
        largest = (
            "No loss scale works."
            if self.max_scale is None
            else f"The largest scale that works is {power(self.max_scale)}."
        )
        as_is = f"The network was tried {self.level},"
        level = as_is if self.level in (AS_IT_IS, IN_AUTOCAST) else f"The level is {self.level}"
        lines = [f"  {level} in {self.dtype}. Your loss scale is {power(self.scale)}. {largest}"]
        if not math.isnan(self.lost):
            here = (
                ""
                if math.isnan(self.lost_at_scale)
                else f", and {percent(self.lost_at_scale, 1)} at {power(self.scale)}"
            )
            lines.append(f"  Of the gradient values, {percent(self.lost, 1)} are lost to zero at scale 1{here}.")
        return lines


def power(value: float) -> str:
    """A scale as a reader likes it: 65536 -> "2^16 = 65536", 1000 -> "1000".

    >>> power(65536.0), power(0.25), power(1000.0)
    ('2^16 = 65536', '2^-2 = 0.25', '1000')
    """
    if math.frexp(value)[0] == 0.5:
        return f"2^{math.frexp(value)[1] - 1} = {value:.10g}"
    return f"{value:.10g}"


_HINTS = {  # by a word in the name of the operation; of several the first counts
    "softmax": "a softmax over inf or a fully masked row: keep the logits inside the format and one entry unmasked",
    "log": "a log of zero: add a small number inside, or use log_softmax, logsumexp or log1p",
    "div": "a division by zero or by something that flushed to zero: add an eps that the format holds",
    "exp": "an exp of a large number: subtract the largest argument first, as softmax does",
    "sqrt": "a square root at zero has an infinite slope: add a small eps inside the root",
    "rsqrt": "an inverse root of zero: the eps is too small for the format",
    "weight_norm": "a row of zeros has no direction: start from other values",
    "sum": "a long sum leaves the range: divide before it, or take a mean",
    "pow": "a power grows out of the range: make the base smaller first",
    "mul": "a product grows out of the range: make one of the factors smaller first",
}


AS_IT_IS = "as it is"  # the level of a report on a network with the levels that it has
IN_AUTOCAST = "in torch.autocast"
LOST_TOO_MUCH = 0.05  # share of the gradient values that may become zero
_ONE_FACTOR = (
    "the product is scaled too late: scale one factor first, (q * scale) @ k, or use "
    "torch.nn.functional.scaled_dot_product_attention, which does"
)
_NOT_TRIED = "no module kept in float32 ends this; call diagnose with level= and dtype=, and it tries those as well"
_NO_CURE = "neither float32 for a module, nor another level, nor bfloat16 ends this: train the network in float32"


def _advice(report: Report) -> list[str]:
    late = _ONE_FACTOR if report.scaled_later else ""
    hint = late or _hint(report.gradient_of) or _hint(report.operation.split(" ")[0]) or _hint_at_a_mask(report)
    silent = report.verdict in ("healthy", "scale_too_high", "lost_in_forward", "precision_lost")
    return ([hint] if hint and not silent else []) + _ADVICE[report.verdict](report)


def _healthy(report: Report) -> list[str]:
    lost = f"{percent(report.lost_at_scale, 1)} of the gradient values are lost at this scale: "
    if report.stays_lost:
        return [f"no scale helps: at the largest possible one {percent(report.lost_at_best, 1)} are still lost"]
    up = f" up to {power(report.max_scale)}" if report.max_scale else ""
    return [f"{lost}raise it{up}"] if report.lost_at_scale > LOST_TOO_MUCH else []


def _cured(report: Report) -> list[str]:
    none = _NOT_TRIED if report.level == AS_IT_IS else _NO_CURE
    return [str(cure) for cure in report.cures] or [none]


def _forward(report: Report) -> list[str]:
    hidden = "the loss stays finite only because a later operation turns the inf into a number, which is wrong"
    seen = "lowering the loss scale will not help: the forward pass does not see it"
    return [*_cured(report), hidden if math.isfinite(report.low_loss) else seen]


def _gradients(report: Report) -> list[str]:
    fits = [] if report.max_scale is None else [f"a scale of {power(report.max_scale)} would fit"]
    return [*fits, *map(str, report.cures), "divide the loss (mean, not sum, over batch and positions)"]


def _zeros(report: Report) -> list[str]:
    larger = ["make the numbers larger before they are cast, or compute this place in float32"]
    share = percent(report.lost_at_best, 1)
    none = f"no scale helps: at the largest possible one {share} of the gradient values are still lost"
    return [none, *(map(str, report.cures) if report.cures else larger)]


def _digits(report: Report) -> list[str]:
    if report.module.startswith("buffer "):
        return ["keep it in float32: float32 buffers and network, and no level O3 for its module"]
    return _cured(report)


def _beside(report: Report) -> list[str]:
    return [f"in this batch itself: {report.beside}"] if report.beside else []


_ADVICE: dict[str, Callable[[Report], list[str]]] = {  # what to do at each verdict, most useful first
    "healthy": _healthy,
    "scale_too_high": lambda report: [
        f"lower the scale to {power(report.max_scale or 1.0)} or below; a dynamic scaler does so by itself",
        "a step skipped now and then is no fault: this is how a dynamic scaler finds the ceiling",
    ],
    "forward_overflow": _forward,
    "gradient_overflow": _gradients,
    "model_non_finite": lambda report: [
        "repair the model first, and train it in float32 until then: the precision is not at fault"
    ],
    "bad_data": lambda report: ["drop or repair the sample: check with torch.isfinite before training"],
    "weights_non_finite": lambda report: [
        "go back to the last good checkpoint and record from there: an update with inf or NaN got through",
        "check that overflowed steps are skipped, and that the scale has not reached 0",
    ],
    "stale_scale": lambda report: [
        'a current scale follows at once: cast_like(network, "te_current")',
        "a margin of one power of two, or the largest of a longer history, leaves room for growth",
        "AmaxRecorder and replay_tensor_scales say which length of the history would have fitted the whole run",
    ],
    "lost_in_forward": _zeros,
    "precision_lost": _digits,
    "gradients_non_finite": lambda report: [
        "clear them once per step: optimizer.zero_grad() before loss.backward(); watch_loop finds where",
        *_beside(report),
    ],
    "scale_zero": lambda report: [
        f"begin again at {power(report.max_scale or 1.0)} or below: torch.amp.GradScaler(init_scale=...); a scale "
        "collapses when every step overflows, whatever it is",
        *_beside(report),
    ],
}


def _hint(operation: str) -> str:
    found = (text for key, text in _HINTS.items() if key in operation.split("_") or ("_" in key and key in operation))
    return next(found, "")


def _hint_at_a_mask(report: Report) -> str:
    native = report.dtype in ("float16", "bfloat16", "float32", "float64")
    brought = report.operation == "masked_fill" or any(operand.nonfinite for operand in report.operands)
    if native or not brought or get_format(report.dtype).has_inf:
        return ""
    return f"{report.dtype} has no infinity: the -inf of a mask becomes NaN in it, so mask with minus its max instead"


def operation_of(event: Event | None) -> dict[str, object]:
    """The fields of a Report that an event fills."""
    if event is None:
        return {"phase": "", "module": "", "operation": "", "gradient_of": "", "operands": ()}
    return {key: getattr(event, key) for key in ("phase", "module", "operation", "gradient_of", "operands")}
