"""Questions of lesson 14."""

import math

import numpy as np
import torch

from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task
from mpkit.diagnose import recommend
from mpkit.explorers.evidence import investigated, load_run


def _first_skip() -> int:
    trace = load_run("growing_activations")
    lost = ~np.isfinite(trace.loss)
    return int(trace.step[lost.argmax()])


QUESTIONS = {
    "largest": Question(
        "What is the largest power-of-two loss scale with which training A's batch has finite gradients?",
        lambda: investigated("A", 24, "float16").max_scale,
        "{truth:.0f}: at twice this scale a scaled gradient passes 65504. A dynamic scaler would come down to it.",
        "Look at the last column of the table, or ask the detective.",
        ((2.0**24, "That is the scale that failed. Read `max_scale` of the report."),),
    ),
    "square": Question(
        "Training B fails in float16. What does the report say in bfloat16? Answer with the verdict.",
        lambda: investigated("B", 12, "bfloat16").verdict,
        "bfloat16 reaches 3.4e38, so the square of 300, to which `gain` leads, is an ordinary number there. It "
        "only has fewer digits.",
        "Ask the detective with the other format.",
        (("forward_overflow", "That is float16. What is the largest bfloat16?"),),
    ),
    "forward": Question(
        "In which step of the run growing_activations was the loss itself not finite for the first time?",
        _first_skip,
        "From step {truth} on no loss scale can help: the forward pass does not see the scale.",
        "Look for the first NaN or inf in `trace.loss`; skipped steps before it still had a finite loss.",
    ),
    "cure": Question(
        "Which format does `recommend` name for growing_activations: 'fp16' or 'bf16'?",
        lambda: recommend(load_run("growing_activations")).dtype,
        "The activations leave float16, and only a format with more range holds them.",
        "Can any loss scale repair a forward overflow?",
        (
            ("fp16", "From step 145 on the scale was halved down to 0, and no step worked."),
            ("bfloat16", "You mean the right format. Give it the name that `recommend` gives it."),
        ),
    ),
}


def _where(verdict: str) -> str:
    exponents = {"A": 24, "B": 12, "C": 12, "D": 12}
    found = {name: investigated(name, exponent, "float16").verdict for name, exponent in exponents.items()}
    return next(name for name, told in found.items() if told == verdict).lower()


def _first_bad() -> list[tuple[tuple[list[tuple[str, list[float]]]], str]]:
    found = []
    for start, gain in ((1.0, 1e3), (-1.0, 1e30), (math.nan, 1.0), (1.0, 1.0), (-300.0, 100.0)):  # -inf alone
        heard, values = [("input", [0.5, 2.0])], torch.tensor([1.0, start])
        for name in ("first", "second", "third"):
            values = (values * gain).half().float()
            heard.append((name, values.tolist()))
        first = next((name for name, out in heard if not all(map(math.isfinite, out))), "")
        found.append(((heard,), first))
    return [*found, (([("input", [0.5, math.inf, 2.0]), ("first", [1.0, math.nan, 3.0])],), "input")]


PREDICTIONS = {
    "scale": Prediction(
        "Which of the four trains again when the loss scale is lowered?",
        (
            ("A", "Its structure is harmless, and its scale of 2^24 is the largest of the four."),
            ("B", "The square is made in the forward pass, and the loss scale is applied after it."),
            ("C", "Its batch holds a NaN. No scale turns a NaN into a number."),
            ("D", "The logarithm of 0 is -inf in every format."),
        ),
        lambda: _where("scale_too_high"),
    ),
    "format": Prediction(
        "Which of them trains in bfloat16, but at no scale in float16?",
        (
            ("A", "It trains in float16 too, at a smaller scale."),
            ("B", "Its square passes 65504 in the forward pass. bfloat16 reaches as far as float32."),
            ("C", "Its batch holds a NaN, in every format."),
            ("D", "The logarithm of 0 is -inf in every format."),
        ),
        lambda: _where("forward_overflow"),
    ),
}

TASK = Task(
    "the function gets what forward hooks have recorded: a list of pairs (name of the layer, list of its outputs), in "
    "the order of the forward pass. It returns the name of the first layer with an output that is inf or NaN. If there "
    "is none, it returns ''.",
    _first_bad,
    "This is how `diagnose` finds the layer. Then it looks at the operations inside.",
    "math.isfinite is False for inf and for NaN. Later layers only hand the damage on: return the first.",
)
