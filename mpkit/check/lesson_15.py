"""Questions of lesson 15."""

import numpy as np

from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task
from mpkit.data import data_dir
from mpkit.explorers.evidence import load_run
from mpkit.formats import FP16
from mpkit.policies import ScalePolicy, preset
from mpkit.record import Trace
from mpkit.replay import replay, simulate, swept


def _skips(run: str, name: str, **parameters: float) -> int:
    return int(replay(load_run(run), preset(name, **parameters), fmt=FP16).iloc[0]["skipped"])


def _measured() -> Trace:
    """The recording that knows the true ceiling of every step."""
    return Trace.load(data_dir() / "traces" / "rare_outliers_float32.npz")


def _never_full() -> int:
    """The smallest window with which a scale never grows when every 25th step overflows at any scale."""
    tops = np.where(np.arange(500) % 25 == 24, -1.0, 2.0**30)
    scales = {w: simulate(tops, ScalePolicy.by_factor(2.0**16, 2.0, w)).sampled[:, 0] for w in range(20, 30)}
    return next(window for window, scale in scales.items() if (np.diff(scale) <= 0).all())


QUESTIONS = {
    "megatron": Question(
        "Megatron-LM is given a start at 2^24; all else is its default. How many steps of mlp_digits would it have "
        "skipped?",
        lambda: _skips("mlp_digits", "megatron", initial_scale=2.0**24),
        "{truth}: eight fewer than from 2^32, one for each power of two that it need not come down.",
        "Replay preset('megatron', initial_scale=2**24) on the trace and read the column `skipped`.",
        ((3, "That is the recorded policy."), (16, "That is from 2^32, its default.")),
    ),
    "window": Question(
        "In another run every 25th batch overflows at every scale. What is the smallest scale_window (in finite steps) "
        "with which the scale never grows?",
        _never_full,
        "Only 24 finite steps lie between two such batches, so a window of {truth} is never full.",
        "Growth needs `window` finite steps in a row. How many lie between two such batches?",
        (
            (24, "24 finite steps in a row do happen, so with a window of 24 the scale still grows."),
            (16, "That is for the run rare_outliers, in which every 16th batch is huge."),
        ),
    ),
    "collapse": Question(
        "Take the float32 recording of rare_outliers, a start at 2^16, factor 1.25 and window 20. Does this policy "
        "collapse? Answer True or False.",
        lambda: bool(replay(_measured(), swept(2.0**16, 1.25, 20), fmt=FP16).iloc[0]["collapsed"]),
        "False: the scale never grows, but 31 overflows divide it by 1.25^31, about 2^10. So it ends at 65, and there "
        "few gradients become zero.",
        "Replay `swept(2**16, 1.25, 20)` on the float32 recording with fmt='fp16', and read the column `collapsed`.",
        ((True, "So it is with factor 2. How far do 31 overflows lower the scale with factor 1.25?"),),
    ),
}


def _torch_default() -> str:
    skipped = _skips("mlp_digits", "torch")
    return "a" if skipped > 3 else "b" if skipped == 3 else "c"


def _before_the_first() -> str:
    first = int(replay(load_run("mlp_digits"), {"megatron": preset("megatron")})["first_good"].iloc[0])
    return "a" if first <= 2 else "b" if first <= 20 else "c"


def _counted() -> list[tuple[tuple[list[float], float, int], int]]:
    courses = (
        ([16.0] * 8, 64.0, 3),
        ([8.0, 8.0, 8.0, 16.0, 16.0, 2.0, 4.0, 8.0, 4.0], 4.0, 2),  # a window that a skip cuts, and one that is full
        ([0.5, 0.5, 0.25, 1.0, 0.5, 4.0], 1.0, 2),  # ceilings below the smallest scale
        ([1e9] * 5, 2.0, 1),
    )
    found = []
    for tops, start, window in courses:
        policy = ScalePolicy.by_factor(start, 2.0, window, floor=1.0)
        found.append(((tops, start, window), int(simulate(np.array(tops), policy).skipped[0])))
    return found


PREDICTIONS = {
    "window": Prediction(
        "mlp_digits skipped 3 of 400 steps with a window of 50. How many would it have skipped with torch's default "
        "window of 2000?",
        (
            ("More than 3.", "A longer window means fewer growths. The scale stays lower, and fewer steps overflow."),
            (
                "Also 3.",
                "The three skips were made at scales of 2^19 and 2^20. With a window of 2000 the scale stays at 2^16, "
                "because 400 steps never fill the window.",
            ),
            ("Fewer than 3.", "In 400 steps the window is never full, so the scale stays at its start."),
        ),
        _torch_default,
    ),
    "start": Prediction(
        "Megatron-LM starts at 2^32. How many steps of mlp_digits are skipped before the first one is applied?",
        (
            ("One or two.", "A skipped step halves the scale once at most. The ceiling is many powers of two lower."),
            (
                "About a dozen.",
                "One for each power of two down to the ceiling, and one more because Megatron-LM tolerates the first "
                "overflow (lesson 08).",
            ),
            ("More than fifty.", "From 2^32 to 1 there are only 32 halvings, and the ceiling lies far above 1."),
        ),
        _before_the_first,
    ),
}

TASK = Task(
    "the function gets the ceilings of a run (a list), the first scale and the window. It returns how many steps a "
    "dynamic loss scale with factor 2 skips. A step is skipped when the scale is above the ceiling of this step. The "
    "scale never falls below 1.",
    _counted,
    "This is a replay. `replay` does the same for thousands of policies at once.",
    "Go through the ceilings with the rule of lesson 05, and count.",
)
