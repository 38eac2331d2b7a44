"""Questions of lesson 15."""

from mpkit.check import Question
from mpkit.explorers.evidence import load_run
from mpkit.formats import FP16
from mpkit.policies import preset
from mpkit.replay import replay, swept


def _skips(run: str, name: str) -> int:
    return int(replay(load_run(run), preset(name), fmt=FP16).iloc[0]["skipped"])


QUESTIONS = {
    "megatron": Question(
        "How many steps of mlp_digits would Megatron-LM's defaults have skipped?",
        lambda: _skips("mlp_digits", "megatron"),
        "{truth}: it starts at 2^32, and its hysteresis of 2 spends two overflows on the first halving.",
        "Replay preset('megatron') on the trace and read the column `skipped`.",
        ((3, "That is the recorded policy."),),
    ),
    "window": Question(
        "In the run rare_outliers every 16th batch overflows. From which scale_window on (in steps) can the scale "
        "never grow again while the outliers overflow?",
        lambda: 16,
        "Only 15 finite steps lie between two outliers, so a window of {truth} is never full.",
        "Growth needs `window` finite steps in a row. How many lie between two outliers?",
        ((15, "15 finite steps in a row do happen, so a window of 15 still grows."),),
    ),
    "collapse": Question(
        "Does rare_outliers collapse in a replay from 2^16 with factor 2 and window 10? Answer True or False.",
        lambda: bool(replay(load_run("rare_outliers"), swept(2.0**16, 2, 10), fmt=FP16).iloc[0]["collapsed"]),
        "The scale recovers between the outliers: each costs one step, and nothing else.",
        "Replay `swept(2**16, 2, 10)` and read the column `collapsed`.",
    ),
}
