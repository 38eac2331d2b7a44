"""Questions of lesson 17."""

import numpy as np

from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task
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


def _clips_of(amaxes: np.ndarray, length: int) -> int:
    policy = tensor_scale_preset("te_delayed", E5M2, amax_history_len=length)
    return int(replay_tensor_scales(amaxes, [policy]).clipped[0])


QUESTIONS = {
    "scale": Question(
        "E4M3 (largest value 448), a history of 2 steps, amaxes 7, 2, 1. With which scale is the next step cast?",
        _scale,
        "The two newest amaxes are 2 and 1, and 448 / 2 = {truth:g}.",
        "The largest amax of the last two steps counts. The 7 has left the history.",
        (
            (64, "The 7 is three steps back: a history of 2 has forgotten it."),
            (448, "The largest amax of the history counts, not the newest one."),
        ),
    ),
    "first": Question(
        f"In how many recorded steps is {GRAD} clipped in E5M2, with a delayed scale and a history of 16 steps?",
        lambda: _clips_of(load_amaxes().series()[GRAD], 16),
        "{truth} steps. In each of them the gradient had grown beyond every amax of the 16 steps before.",
        'Replay tensor_scale_preset("te_delayed", E5M2, amax_history_len=16) on the series of this tensor, and read '
        "`clipped`.",
    ),
    "grows": Question(
        "The amax of a tensor grows by 1 % in every step, and the margin is 0. Does a longer history clip the tensor "
        "in fewer steps? Answer True or False.",
        lambda: _clips_of(1.01 ** np.arange(64), 16) < _clips_of(1.01 ** np.arange(64), 1),
        "Every amax is larger than all before it, so the scale is too small with any history. A margin helps.",
        "Which is the largest amax of the history, when every amax is larger than all before it?",
    ),
}


def _delayed(amaxes: list[float], length: int) -> list[float]:
    """The scale that each step is cast with, and the next one."""
    policy = tensor_scale_preset("te_delayed", E4M3FN, amax_history_len=length)
    state = initial_tensor_scale(policy)
    scales = [float(state.scale)]
    for amax in amaxes:
        state = advance(policy, state, amax)
        scales.append(float(state.scale))
    return scales


def _clipped_step() -> str:
    amaxes = [4.0, 0.5, 0.5, 0.5, 8.0]
    clipped = [amax > E4M3FN.max / scale for amax, scale in zip(amaxes, _delayed(amaxes, 3))]
    return {(): "a", (1,): "b", (4,): "c", (1, 4): "d"}[tuple(i for i, c in enumerate(clipped) if c)]


def _scales() -> list[tuple[tuple[list[float], int], float]]:
    histories = ([4.0], [4.0, 0.5, 0.5], [4.0, 0.5, 0.5, 0.5], [7.0, 2.0, 1.0], [0.5, 2.0, 8.0], [1024.0, 4.0])
    return [((amaxes, length), _delayed(amaxes, length)[-1]) for amaxes in histories for length in (1, 2, 3)]


PREDICTIONS = {
    "clipped": Prediction(
        "E4M3 (largest value 448), a history of 3 steps, the amaxes 4, 0.5, 0.5, 0.5, 8: which step is clipped?",
        (
            (
                "None: the scale always fits.",
                "The scale fits the steps before. The amax of the step itself is not known yet.",
            ),
            (
                "The second, because its scale comes from the 4 before it.",
                "A large amax makes the next scale small, so smaller values have much room.",
            ),
            (
                "The last, because its scale comes from the three steps with 0.5.",
                "The scale is stale: it fits values up to 0.5, and every larger value is clipped.",
            ),
            ("The second and the last.", "The second has room: the 4 before it made the scale small."),
        ),
        _clipped_step,
    ),
}

TASK = Task(
    "the function gets all amaxes so far (a list, the newest last) and the length of the history, and returns the "
    "scale of the next step in E4M3: the largest value 448 divided by the largest amax that the history still holds.",
    _scales,
    "This is delayed scaling, as TransformerEngine does it.",
    "amaxes[-length:] are the steps that the history holds. The scale turns the largest of them into 448.",
)
