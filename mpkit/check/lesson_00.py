"""Questions of lesson 00."""

import torch

from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task
from mpkit.formats import FP16
from mpkit.scalers import DynamicLossScaler, all_finite


def _after_one_overflow() -> float:
    import torch

    from mpkit.scalers import DynamicLossScaler

    scaler = DynamicLossScaler(2.0**16, 2, 50)
    scaler.adjust(torch.tensor(False))
    return float(scaler.scale_value)


QUESTIONS = {
    "largest": Question(
        "What is the largest finite number that float16 can hold?",
        lambda: FP16.max,
        "Anything from 65520 on becomes inf, and that is what the scaler looks for.",
        "Run `torch.finfo(torch.float16).max` and compare.",
        ((65536, "That is 2^16, one step too far: it is already inf in float16."),),
    ),
    "after": Question(
        "A DynamicLossScaler(2**16, 2, 50) meets one overflow. What is its scale afterwards?",
        _after_one_overflow,
        "It is divided by scale_factor at once: {truth:g}.",
        "An overflow acts at once and divides by scale_factor; the window only counts steps without one.",
        ((65536, "That would hold if nothing had overflowed: look at what scale_factor does."),),
    ),
    "weights": Question(
        "In which dtype does an O2 network keep its parameters: 'float16' or 'float32'?",
        lambda: "float32",
        "They are cast at every use, so small updates are not lost: the float32 parameters are the master weights.",
        "Look at the table of dtypes above: what does its column *weight* say?",
    ),
}


def _overflow() -> str:
    scaler = DynamicLossScaler(2.0**16, 2, 50)
    finite = all_finite([scaler.scale(torch.tensor([2.0])).half()])
    scaler.adjust(finite)
    return "a" if finite else "b" if scaler.scale_value == 2.0**15 else "c"


def _decisions() -> list[tuple[tuple[list[float], float], tuple[bool, float]]]:
    found = []
    cases = [([0.5, 2.0], 1024.0), ([0.5, 2.0], 65536.0), ([2.0, 0.5], 65536.0), ([-70.0], 1024.0), ([1e-9], 8.0)]
    cases += [
        ([-32752.0], 2.0),
        ([32767.0], 2.0),
        ([70.0, -70.0], 1024.0),
        ([0.5, 70.0, 2.0], 1024.0),
        ([1e-3], 2.0**17),
    ]
    for gradients, scale in cases:
        scaler = DynamicLossScaler(scale, 2, 50)
        finite = all_finite([scaler.scale(torch.tensor(gradients)).half()])
        scaler.adjust(finite)
        found.append(((gradients, scale), (bool(finite), float(scaler.scale_value))))
    return found


PREDICTIONS = {
    "overflow": Prediction(
        "In float16, a gradient entry of 2.0 is multiplied by a loss scale of 65536. What does the check find?",
        (
            (
                "It is finite, and the step is applied.",
                "131072 lies beyond 65504, the largest float16, so the product is inf. It stays inf when it is cast to "
                "float32.",
            ),
            (
                "It is inf in float16: the step is skipped, and the scale halves.",
                "One step is lost, nothing else: the weights never meet the inf.",
            ),
            (
                "It is inf in float16, and the training is lost.",
                "Only an update could spoil the weights, and this update is left out.",
            ),
        ),
        _overflow,
    ),
}

TASK = Task(
    "the function gets a list of true gradients and the loss scale. It returns a pair: is the step applied (True or "
    "False), and the scale of the next step. Multiply the gradients by the scale first: float16 ends at 65504. The "
    "scale does not grow here.",
    _decisions,
    "This is the decision that every loss scaler takes.",
    "A step is applied when all gradients times the scale are finite in float16; otherwise the scale is halved.",
)
