"""Questions of lesson 14."""

import numpy as np

from mpkit.check import Question
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
        "Above {truth:g} the scaled gradients pass 65504; a dynamic scaler would settle there.",
        "The report says it in its second line; any power of two above it overflows.",
        ((2.0**24, "That is the scale that failed. Read `max_scale` of the report."),),
    ),
    "square": Question(
        "Training B fails in float16. What does the report say in bfloat16? Answer with the verdict.",
        lambda: investigated("B", 12, "bfloat16").verdict,
        "bfloat16 reaches 3.4e38, so a square of 300 is an ordinary number. It only has fewer digits.",
        "Ask the detective with the other format.",
        (("forward_overflow", "That is float16. What is the largest bfloat16?"),),
    ),
    "forward": Question(
        "In which step of the run growing_activations was the loss itself not finite for the first time?",
        _first_skip,
        "From step {truth} on no loss scale could help: the forward pass does not see the scale.",
        "Look for the first NaN or inf in `trace.loss`; skipped steps before it still had a finite loss.",
    ),
    "cure": Question(
        "What does `recommend` want for growing_activations: 'fp16' or 'bf16'?",
        lambda: recommend(load_run("growing_activations")).dtype,
        "The activations leave float16, and only a format with more range holds them.",
        "Can any loss scale repair a forward overflow?",
        (("fp16", "Every scale was tried on the way down to 0, and none worked."),),
    ),
}
