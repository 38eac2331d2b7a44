"""Questions of lesson 00."""

import torch

from mpkit.casting import auto_mixed_precision
from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task
from mpkit.formats import FP16
from mpkit.scalers import DynamicLossScaler, all_finite


def _after_three_overflows() -> float:
    scaler = DynamicLossScaler(2.0**14, 2, 50)
    for finite in [True] * 50 + [False] * 3:
        scaler.adjust(torch.tensor(finite))
    return float(scaler.scale_value)


QUESTIONS = {
    "largest": Question(
        "The loss scale is 1024. What is the largest true gradient for which the scaled gradient is not above 65504, "
        "the largest float16?",
        lambda: FP16.max / 1024,
        "It is 65504 / 1024, about {truth:.2f}. A larger scale leaves room for smaller gradients only.",
        "The scaled gradient is the true one times 1024. Divide.",
        (
            (64, "64 times 1024 is 65536: that is already inf in float16. Divide 65504 itself."),
            (65504, "That is the largest scaled gradient. Divide it by the scale."),
        ),
        rel=2e-4,  # two digits after the point are enough, and 64 is too large
    ),
    "after": Question(
        "A DynamicLossScaler(2**14, 2, 50) sees 50 finite steps, and then three overflows in a row. What is its scale "
        "then?",
        _after_three_overflows,
        "The 50 finite steps double it to 2^15, and each overflow halves it: {truth:g}.",
        "What does a full window of finite steps do to the scale, and what does each overflow do?",
        (
            (2048, "Three overflows alone would do that. What did the 50 finite steps before them do?"),
            (16384, "Each of the three overflows halves the scale, not only the first."),
            (32768, "That is the scale before the three overflows."),
        ),
    ),
    "weights": Question(
        "A network has 1,000,000 weights and is trained at O3 in float16. How many bytes do its weights take between "
        "two steps?",
        lambda: sum(
            p.nbytes
            for p in auto_mixed_precision(torch.nn.Linear(1000, 1000, bias=False, device="meta"), "O3").parameters()
        ),
        "At every level each weight keeps its 32 bits, which are 4 bytes: {truth:,}. So small updates are not lost.",
        "Look at the table of dtypes above: what does its column *weight* say? A byte has 8 bits.",
        (
            (2_000_000, "That would be float16. A step casts copies of the weights; what does it keep?"),
            (32_000_000, "These are bits. A byte has 8 bits."),
            (6_000_000, "The float16 copies live only while a step runs."),
        ),
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
