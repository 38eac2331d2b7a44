"""Questions of lesson 18."""

from dataclasses import replace

import torch

from mpkit.blocks import MXFP4, NVFP4, BlockFormat, quantize_blocks
from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task


def _zeros() -> int:
    x = torch.ones(64)
    x[0] = 64.0
    return int((quantize_blocks(x, replace(MXFP4, scale_rounding="rceil")).dequantize() == 0).sum())


QUESTIONS = {
    "bits": Question(
        "How many bits does a value of NVFP4 take, with its share of the block's scale?",
        lambda: NVFP4.bits_per_element,
        "Four for the element, and 8 / 16 of a bit for the scale: {truth}.",
        "Sixteen values share a scale of 8 bits.",
        ((4, "The scale must be stored too."), (4.25, "That is MXFP4, whose blocks have 32 values.")),
    ),
    "scale": Question(
        "The largest element of an MXFP4 block is 7. Which scale does rceil take (E2M1 ends at 6)?",
        lambda: float(quantize_blocks(torch.tensor([7.0]), replace(MXFP4, scale_rounding="rceil")).scales[0]),
        "With scale 1 the 7 would be clipped to 6, so rceil takes {truth:g}.",
        "Which is the smallest power of two s with 6 s at least 7?",
        ((1, "That is what floor takes: then 7 becomes 6."),),
    ),
    "zeros": Question(
        "64 values, all 1 but the first, which is 64. How many become 0 in MXFP4 with rceil (blocks of 32)?",
        _zeros,
        "The scale of the first block is 16, and 1 / 16 is below a quarter: its {truth} other values are lost.",
        "Only one block has the outlier, and E2M1's smallest value above 0 is 0.5.",
        ((63, "The second block has a scale of its own."), (32, "The outlier itself does not become 0.")),
    ),
}


def _remains(place: int, fmt: BlockFormat) -> float:
    """What is left of 5.0 at the start of a row whose value at `place` is 1000."""
    row = torch.full((64,), 5.0)
    row[place] = 1000.0
    return float(quantize_blocks(row, fmt).dequantize()[0])


def _beside() -> str:
    left = _remains(20, MXFP4)
    return "a" if abs(left - 5) < 0.1 else "b" if left > 0 else "c"


def _next_block() -> str:
    return "a" if _remains(20, replace(MXFP4, block=(1, 16))) > 0 else "b"


def _shared() -> list[tuple[tuple[list[float]], float]]:
    blocks = ([0.1, -0.6, 5.0], [6.1, 1.0], [1000.0, 5.0], [0.02, 0.01], [-7.9, 4.0])
    return [((block,), float(quantize_blocks(torch.tensor(block), MXFP4).scales[0])) for block in blocks]


PREDICTIONS = {
    "beside": Prediction(
        "One of the 32 values of a block is 1000, the others are 5.0. What remains of a 5.0 in MXFP4?",
        (
            (
                "5.0, or a number near it.",
                "The scale must serve the 1000; the 5.0 is then a 200th of the largest value.",
            ),
            ("A rough value such as 4 or 6.", "So it would be without the outlier. Now the smallest step is 64."),
            ("0.", "Everything below a 24th of the largest value of its block becomes zero."),
        ),
        _beside,
    ),
    "next_block": Prediction(
        "The same values in blocks of 16, and the outlier is the 21st value. What remains of the first one?",
        (
            ("About 5.", "Its block does not hold the outlier, so its scale fits it. An outlier hurts its own block."),
            ("0.", "The outlier is in another block, and every block has a scale of its own."),
        ),
        _next_block,
    ),
}

TASK = Task(
    "the function gets the values of one block (a list) and returns its scale in MXFP4 by the floor rule: the power of "
    "two 2^(floor(log2(largest magnitude)) - 2), since the largest power of two in E2M1 is 4 = 2^2.",
    _shared,
    "Two powers of two below the largest: so the largest element comes to lie between 4 and 8.",
    "Take the largest magnitude first, its logarithm to base 2 rounded down, then subtract 2.",
)
