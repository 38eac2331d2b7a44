"""Questions of lesson 17."""

import numpy as np

from mpkit.check import Question
from mpkit.explorers.recipes import load_amaxes
from mpkit.formats import E4M3FN, E5M2
from mpkit.policies import advance, initial_tensor_scale, tensor_scale_preset
from mpkit.replay import replay_tensor_scales

GRAD = "h.1.mlp.2.grad"


def _scale() -> float:
    policy = tensor_scale_preset("te_delayed", E4M3FN, amax_history_len=2)
    state = initial_tensor_scale(policy)
    for amax in (7.0, 2.0, 1.0):
        state = advance(policy, state, amax)
    return float(state.scale)


def _clips(length: int) -> int:
    policy = tensor_scale_preset("te_delayed", E5M2, amax_history_len=length)
    return int(replay_tensor_scales(load_amaxes().series()[GRAD], [policy]).clipped[0])


QUESTIONS = {
    "scale": Question(
        "E4M3 (largest value 448), a history of 2 steps, amaxes 7, 2, 1. With which scale is the next step cast?",
        _scale,
        "The two newest amaxes are 2 and 1, and 448 / 2 = {truth:g}.",
        "The largest amax of the last two steps counts, the 7 has left.",
        (
            (64, "The 7 is three steps back: a history of 2 has forgotten it."),
            (448, "The largest counts, not the newest."),
        ),
    ),
    "first": Question(
        f"How many of the recorded steps of {GRAD} does a history of 16 clip in E5M2?",
        lambda: _clips(16),
        "{truth} steps, most of them where the loss was multiplied by 64 or the run began to move.",
        'Replay tensor_scale_preset("te_delayed", E5M2, amax_history_len=16) on its series and read `clipped`.',
    ),
    "safe": Question(
        "Does current scaling ever clip a finite tensor? Answer True or False.",
        lambda: bool(
            replay_tensor_scales(np.array([1.0, 1e30, 1e-30]), [tensor_scale_preset("te_current")]).clipped[0] > 0
        ),
        "Its scale comes from the tensor itself, so the largest element always fits.",
        "From which tensor does a current scale come?",
    ),
}
