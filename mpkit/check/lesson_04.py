"""Questions of lesson 04."""

from __future__ import annotations

import math

from mpkit.check import Question
from mpkit.formats import FP16


def _recommended() -> int:
    from mpkit.explorers.training import gradients_of_digits, recommended_exponent

    return recommended_exponent(gradients_of_digits()[720, "activations"], FP16)


QUESTIONS = {
    "edge": Question(
        "Write as a power of two, n in 2^n: the largest magnitude that float16 rounds to zero.",
        lambda: round(math.log2(FP16.min_subnormal / 2)),
        "Half the smallest subnormal lies exactly between 0 and 2^-24, and the tie goes to the even one, zero.",
        "The smallest subnormal is 2^-24. Which numbers lie closer to zero than to it, and where does the tie go?",
        ((-24, "2^-24 itself is kept: it is the smallest subnormal."), (-14, "2^-14 is the smallest normal number.")),
    ),
    "shift": Question(
        "A static scale of 2^10 moves the histogram by how many powers of two to the right?",
        lambda: 10,
        "Scaling by a power of two changes the exponent alone, so it costs no precision.",
        "Multiply 2^-20 by 2^10 and compare the exponents.",
    ),
    "recommended": Question(
        "Activation gradients after 720 steps: which n does the histogram recommend for a scale of 2^n in fp16?",
        _recommended,
        "The largest gradient then stands one power of two below overflow, and nearly nothing is flushed.",
        "Set the view to 720, activations, fp16 and press 'Recommended'.",
    ),
    "forward": Question(
        "Can a loss scale repair an overflow in the forward pass (True or False)?",
        lambda: False,
        "The loss is multiplied after the forward pass, so only gradients are moved.",
        "At which moment of the step is the loss multiplied: before or after the activations are computed?",
    ),
}
