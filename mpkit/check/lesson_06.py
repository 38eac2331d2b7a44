"""Questions of lesson 06."""

from __future__ import annotations

from mpkit.check import Question


def _scale_after() -> float:
    from mpkit.explorers.training import one_step

    phases, _, _ = one_step(16, True)
    return float(phases[-1].seen.rsplit(maxsplit=1)[1])


def _early_norm() -> float:
    from mpkit.explorers.training import handed_over, micro_gradients

    return float(handed_over(micro_gradients(1), 1024.0, 0.25, "clip, unscale").norm())


QUESTIONS = {
    "scale": Question(
        "A step starts with the scale 65536, scale_factor 2, and its batch holds an inf. What is the next scale?",
        _scale_after,
        "An overflow divides the scale at once: {truth:g}.",
        "Put the inf into the batch in the first view and look at phase 8.",
        ((65536, "That is the scale of the step itself; phase 8 adjusts it."),),
    ),
    "weights": Question(
        "How many weights does a skipped step change?",
        lambda: 0,
        "None, and no momentum or step counter either: bit for bit as if the batch had not been.",
        "Look at phase 7 with the inf in the batch.",
    ),
    "clip": Question(
        "Clipping to 0.25 before unscaling, at a scale of 1024: to which norm are the true gradients clipped?",
        _early_norm,
        "0.25 / 1024: the wrong order clips to max_norm / scale, and the result changes whenever the scale does.",
        "Set the second view to 2^10 and look at the dashed line, or divide.",
        ((0.25, "That is the right order: unscale first."), (256, "Divide, do not multiply.")),
        rel=1e-2,
    ),
    "divisions": Question(
        "Four micro-batches per update: how often are the gradients divided by the scale in one update?",
        lambda: 1,
        "Once, after the last backward pass; all four are summed at the same scale.",
        "What happens to the first micro-batch's gradient if it is divided after every backward pass?",
        ((4, "Then the first micro-batch's gradient is divided four times."),),
    ),
}
