"""Questions of lesson 04."""

from __future__ import annotations

import math

from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task
from mpkit.explorers.training import gradients_of_digits, shares_at
from mpkit.formats import E5M2, FP16


def _recommended() -> int:
    from mpkit.explorers.training import gradients_of_digits, recommended_exponent

    return recommended_exponent(gradients_of_digits()[0, "weights"], E5M2)


QUESTIONS = {
    "edge": Question(
        "Which is the largest magnitude that e5m2 rounds to zero? Write it as 2^n, and give n.",
        lambda: round(math.log2(E5M2.min_subnormal / 2)),
        "As in fp16, half the smallest subnormal becomes 0, although the smallest subnormal is just as near.",
        "The smallest subnormal is 2^-16. Which numbers lie closer to zero than to it? And the one in the middle?",
        (
            (-16, "2^-16 itself is kept: it is the smallest subnormal."),
            (-14, "2^-14 is the smallest normal number."),
            (17, "The size is right, but a sign is missing: 2^17 is far above 1."),
            (-25, "That is float16. e5m2 has the same exponents, but only 2 fraction bits."),
            (2.0**-17, "That is the magnitude itself. The question asks for n, its exponent."),
        ),
    ),
    "shift": Question(
        "By how many powers of two does a static scale of 32768 move the histogram to the right?",
        lambda: round(math.log2(32768)),
        "32768 is 2^{truth}. Scaling by a power of two changes the exponent alone, so it costs no precision.",
        "Write 32768 as a power of two.",
        ((32768, "That is the factor itself. Which power of two is it?"),),
    ),
    "recommended": Question(
        "For gradients of weights after 0 steps in e5m2, the view recommends a scale of 2^n. Which n is it?",
        _recommended,
        "The largest gradient then stands one to two powers of two below overflow, and nearly nothing is flushed to "
        "zero.",
        "Set the view to 0, weights, e5m2 and press 'Recommended'.",
        (
            (2.0**19, "That is the scale itself. The question asks for n, its exponent."),
            (20, "That is the one for fp16."),
        ),
    ),
    "forward": Question(
        "Can a loss scale repair an overflow in the forward pass (True or False)?",
        lambda: False,
        "The loss is multiplied after the forward pass, so only gradients are moved.",
        "At which moment of the step is the loss multiplied: before or after the activations are computed?",
    ),
}


def _share() -> str:
    lost = shares_at(gradients_of_digits()[720, "activations"], 1.0, FP16).lost
    return "a" if lost == 0 else "b" if lost < 0.05 else "c"


def _largest_scales() -> list[tuple[tuple[float], int]]:
    largest = (1.0, 1.9995, 65504.0, 1e-3, 2.0**-20, 3.1e-7, 700.0, 1e5)
    return [((v,), math.floor(math.log2(FP16.max / v))) for v in largest]


PREDICTIONS = {
    "zero": Prediction(
        "How many of the gradients between the layers become zero when they are stored in float16?",
        (
            (
                "None: float16 goes down to 2^-24, about 0.00000006, and gradients are not that small.",
                "At the start of a training that is nearly right. A network that has learnt makes small errors, and "
                "its gradients shrink with them.",
            ),
            (
                "About one in a thousand.",
                "At the start it is less than one in ten thousand. After 720 steps the gradients are far smaller.",
            ),
            (
                "More than one in twenty.",
                "No message says so: a gradient of zero is a legal number.",
            ),
        ),
        _share,
    ),
}

TASK = Task(
    "the function gets the largest gradient of a training, and returns the largest n for which a loss scale of 2^n "
    "keeps this gradient within 65504.",
    _largest_scales,
    "A dynamic scaler finds this number by trying.",
    "2^n times the gradient may be 65504 at most: divide, take the logarithm to base 2, and round down.",
)
