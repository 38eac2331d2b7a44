"""Questions of lesson 06."""

from __future__ import annotations

import torch

from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task


def _scale_after() -> float:
    from mpkit.explorers.training import one_step

    phases, _, _ = one_step(12, True)
    return float(phases[-1].seen.rsplit(maxsplit=1)[1])


def _early_norm() -> float:
    from mpkit.explorers.training import handed_over, micro_gradients

    return float(handed_over(micro_gradients(1), 4096.0, 0.25, "clip, unscale").norm())


def _too_small() -> float:
    """The first of four micro-batches in an update with one division, over the same with four."""
    from mpkit.explorers.training import handed_over

    micro = torch.zeros(4, 1)
    micro[0] = 1.0
    once, often = (handed_over(micro, 2.0, 1e9, order) for order in ("unscale, clip", "unscale each micro-batch"))
    return float(once / often)


QUESTIONS = {
    "scale": Question(
        "A step starts with the scale 4096 and the scale_factor 2. Its batch holds an inf. What is the next scale?",
        _scale_after,
        "An overflow divides the scale at once: {truth:g}.",
        "Set the scale of the first view to 2^12, put the inf into the batch and look at phase 8.",
        ((4096, "That is the scale of the step itself; phase 8 adjusts it."),),
    ),
    "weights": Question(
        "Adam counts its steps. A run has 100 training steps, and 4 of them are skipped. What does Adam's counter say?",
        lambda: 100 - 4,
        "{truth}: a skipped step changes neither weights nor momentum nor counter. For Adam its batch never came.",
        "Look at phase 7 with the inf in the batch: is the optimizer called?",
        (
            (100, "In a skipped step the optimizer is not called at all."),
            (4, "These are the steps in which the optimizer is not called."),
        ),
    ),
    "clip": Question(
        "At a scale of 4096, gradients are clipped to the norm 0.25 and then unscaled. Which norm do they have now?",
        _early_norm,
        "0.25 / 4096: the wrong order clips to max_norm / scale, and the result changes whenever the scale does.",
        "Set the second view to 2^12 and read what it says of clipping first, or divide.",
        ((0.25, "That is the right order: unscale first."), (1024, "Divide, do not multiply.")),
        rel=2e-2,  # two digits are enough
    ),
    "divisions": Question(
        "An update uses four micro-batches at a scale of 2. By mistake the gradients are divided by the scale after "
        "each of the four backward passes. Then the part of the first micro-batch is too small. How many times too "
        "small is it?",
        _too_small,
        "{truth:g} times: it was multiplied by 2 once and divided by 2 four times. Divide once, after the last pass.",
        "How often is the gradient of the first micro-batch multiplied by 2, and how often divided by 2?",
        (
            (16, "It is divided four times, but it was also multiplied by the scale once."),
            (4, "It is divided four times in all, and one of them is right."),
            (2, "It is divided after each of the four passes, not only after two."),
        ),
    ),
}


def _step_with_inf() -> str:
    from mpkit.explorers.training import one_step

    phases, skipped, change = one_step(16, True)
    if change == 0 and skipped and phases[-1].seen == "next scale 32768":
        return "b"
    return "c" if change != change else "a"


def _clipped() -> list[tuple[tuple[list[float], float, float], list[float]]]:
    found = []
    for true, scale, max_norm in (
        ([3.0, 4.0], 8.0, 1.0),
        ([0.3, 0.4], 1024.0, 1.0),
        ([-6.0, 8.0], 2.0, 5.0),
        ([2.0, 3.0, 6.0], 4.0, 3.5),
        ([0.03, 0.04], 2.0, 1.0),  # shorter than allowed even while it is scaled
    ):
        parameter = torch.nn.Parameter(torch.zeros(len(true), dtype=torch.float64))
        parameter.grad = torch.tensor(true, dtype=torch.float64)
        torch.nn.utils.clip_grad_norm_([parameter], max_norm)
        found.append((([g * scale for g in true], scale, max_norm), parameter.grad.tolist()))
    return found


PREDICTIONS = {
    "inf": Prediction(
        "An image in the batch holds an inf, and the loss scale is 65536. What does this one step change?",
        (
            (
                "The weights change a little, and the scale stays.",
                "One inf in the batch makes many gradients inf or NaN. So the step is skipped, and the scale halves.",
            ),
            (
                "Only the scale changes: it becomes 32768.",
                "The check comes before the update, so neither the weights nor the momentum meet the inf.",
            ),
            (
                "The weights become NaN.",
                "They would become NaN if nothing checked the gradients before the update.",
            ),
        ),
        _step_with_inf,
    ),
}

TASK = Task(
    "the function gets scaled gradients (a list), the loss scale and the largest norm allowed. It returns the "
    "gradients that the optimizer may use: they are unscaled, and clipped if their norm is larger than allowed.",
    _clipped,
    "Unscaled first, then clipped: in the other order the threshold would move with the scale.",
    "The norm is the root of the sum of squares. Divide by the scale before you compare it with the largest one.",
    rel=1e-5,  # clip_grad_norm_ adds 1e-6 to the norm
)
