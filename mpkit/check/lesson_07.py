"""Questions of lesson 07."""

from __future__ import annotations

import torch

from mpkit.check import Question
from mpkit.formats import FP16
from mpkit.optimizers.arguments import decays_by_name
from mpkit.rounding import round_to
from mpkit.schedules import PolynomialDecayLR, WarmUpLR

NAMES = ("conv.weight", "fc.bias", "bn.gamma", "bn.beta")


def _least_eps() -> int:
    """The smallest power of ten, as an exponent, that float16 does not round to 0."""
    return min(e for e in range(-12, 0) if float(round_to(torch.tensor(10.0**e), FP16)) > 0)


QUESTIONS = {
    "warmup": Question(
        "A schedule is WarmUpLR(0.4, 4).then(PolynomialDecayLR(0.4, 0.0, 8, 1.0), at=4). Its rate at step 6?",
        lambda: WarmUpLR(0.4, 4).then(PolynomialDecayLR(0.4, 0.0, 8, 1.0), at=4)(6),
        "After the switch the second schedule counts from 0, so this is its step 2: {truth:g}.",
        "Which step does the second schedule see at step 6, when it starts at step 4?",
        ((0.1, "That is the decay at its own step 6; it starts counting at the switch."),),
    ),
    "eps": Question(
        "Which is the smallest eps = 10^n that float16 does not turn into 0? Give n.",
        _least_eps,
        "10^{truth} is above half of the smallest subnormal, 2.98e-08; anything smaller rounds to 0.",
        "Half of float16's smallest subnormal number is 2.98e-08.",
        ((-8, "1e-08 is below half of the smallest subnormal number: it rounds to 0."),),
    ),
    "decayed": Question(
        f"Weight decay is set and there are no groups. Which of {', '.join(NAMES)} are decayed? A list of names.",
        lambda: [name for name in NAMES if decays_by_name(name)],
        "The name decides: those with beta or gamma are left out, biases are not.",
        "The rule looks for two words in the name, and for nothing else.",
        ((["conv.weight"], "Biases are decayed too: only the names with beta or gamma are left out."),),
    ),
    "factor": Question(
        "sens is 1024 and the optimizer's loss_scale was forgotten (1.0). How many times too far does one SGD step go?",
        lambda: 1024.0 / 1.0,
        "The gradient arrives multiplied by sens and nobody divides it: {truth:g} times.",
        "What multiplies the gradient, and what divides it?",
    ),
}
