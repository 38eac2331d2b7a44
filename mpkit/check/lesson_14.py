"""Questions of lesson 14."""

import math

import numpy as np
import torch
import torch.nn.functional as F

from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task
from mpkit.diagnose import diagnose, recommend
from mpkit.explorers.evidence import case, investigated, load_run


def _largest() -> float | None:
    found = case("A")
    smaller = diagnose(found.network, found.batch, lambda y, t: F.cross_entropy(y, t) / 32, level="O2", scale=2.0**24)
    return smaller.max_scale


def _skips_with_a_finite_loss() -> int:
    trace = load_run("growing_activations")
    return int((trace.overflow & np.isfinite(trace.loss)).sum())


QUESTIONS = {
    "largest": Question(
        "Training A divides its loss by 32 before the backward pass. What is now the largest power-of-two loss scale "
        "with which its batch has finite gradients?",
        _largest,
        "{truth:.0f}: all gradients are 32 times smaller, so with a scale 32 times larger they are what they were.",
        "The largest scale without the division stands in the last column of the table. How does it change?",
        (
            (2.0**20, "That is the largest scale for the loss as it was."),
            (2.0**15, "Mind the direction: smaller gradients bear a larger scale."),
        ),
    ),
    "wider": Question(
        "Training A fails in float16 at the scale 2^24. What does the report say in bfloat16, at the same scale? "
        "Answer with the verdict.",
        lambda: investigated("A", 24, "bfloat16").verdict,
        "bfloat16 reaches 3.4e38, so gradients times 2^24 are ordinary numbers there.",
        "Ask the detective with the other format.",
        (("scale_too_high", "That is float16. How large is the largest bfloat16?"),),
    ),
    "finite": Question(
        "In how many of the skipped steps of growing_activations was the loss itself still finite?",
        _skips_with_a_finite_loss,
        "{truth}: in these steps only the scale was too high. In all others no scale could have helped.",
        "Count the steps in which `trace.overflow` is True and `trace.loss` is finite.",
        (
            (268, "These are all skipped steps. In most of them the loss was inf or NaN."),
            (255, "In these steps the loss was inf or NaN."),
            (29, "Not every step from 116 to 144 was skipped."),
        ),
    ),
    "cure": Question(
        "The run resnet_digits skipped 19 of its 200 steps. Which format does `recommend` name for it: 'fp16' or "
        "'bf16'?",
        lambda: recommend(load_run("resnet_digits")).dtype,
        "Its loss was finite in every step: only the scale was too high, and a smaller one repairs that.",
        "`recommend(load_run('resnet_digits'))`. Was the loss of this run ever inf or NaN?",
        (
            ("bf16", "Skipped steps alone are no reason to leave float16. Was the loss itself ever inf or NaN?"),
            ("float16", "You mean the right format. Give it the name that `recommend` gives it."),
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
