"""Questions of lesson 18."""

from dataclasses import replace

import torch

from mpkit.blocks import MXFP4, BlockFormat, quantize_blocks
from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task


def _zeros() -> int:
    x = torch.ones(64)
    x[0], x[1:10] = 64.0, 8.0
    return int((quantize_blocks(x, replace(MXFP4, scale_rounding="rceil")).dequantize() == 0).sum())


QUESTIONS = {
    "bits": Question(
        "How many bits would a value of MXFP4 take, with its share of the scale, if a block had 64 values?",
        lambda: replace(MXFP4, block=(1, 64)).bits_per_element,
        "Four bits for the element, and 8 / 64 of a bit for its share of the scale: {truth}.",
        "Sixty-four values share a scale of 8 bits.",
        ((4, "The scale must be stored too."), (4.25, "That is MXFP4 as it is: its blocks have 32 values.")),
    ),
    "scale": Question(
        "The largest value of an MXFP4 block is 7. Which scale does rceil take (E2M1 ends at 6)?",
        lambda: float(quantize_blocks(torch.tensor([7.0]), replace(MXFP4, scale_rounding="rceil")).scales[0]),
        "With scale 1 the 7 would be clipped to 6, so rceil takes {truth:g}.",
        "Which is the smallest power of two s for which 6 * s is at least 7?",
        ((1, "That is the scale of the rule floor: then 7 becomes 6."),),
    ),
    "zeros": Question(
        "A row has 64 values: the first is 64, the next nine are 8, all others are 1. How many become 0 in MXFP4 with "
        "rceil (blocks of 32)?",
        _zeros,
        "The scale of the first block is 16. There 8 / 16 is 0.5 and stays, and 1 / 16 is below 0.25. So the {truth} "
        "ones of this block become 0.",
        "Only one block has the outlier. The smallest magnitude of E2M1 above 0 is 0.5.",
        (
            (54, "The second block has a scale of its own."),
            (63, "The second block has a scale of its own."),
            (31, "The scale of the first block is 16. What does 8 become?"),
        ),
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
    blocks = ([0.1, -0.6, 5.0], [6.1, 3.0], [1000.0, 5.0], [0.02, 0.01], [-7.9, 3.0])
    return [((block,), float(quantize_blocks(torch.tensor(block), MXFP4).scales[0])) for block in blocks]


PREDICTIONS = {
    "beside": Prediction(
        "One of the 32 values of a block is 1000, the others are 5.0. What remains of a 5.0 in MXFP4?",
        (
            (
                "5.0, or a number near it.",
                "The scale must fit the 1000. The 5.0 is a 200th of it, which is too small for E2M1.",
            ),
            (
                "A rough value such as 4 or 6.",
                "That is so without the outlier. With it the smallest magnitude above 0 is 64.",
            ),
            (
                "0.",
                "The scale is 128, and the smallest magnitude above 0 is 64. 5.0 is less than half of that, so it "
                "becomes 0.",
            ),
        ),
        _beside,
    ),
    "next_block": Prediction(
        "The same values in blocks of 16; the outlier is the 21st value. What remains of the first value, a 5.0?",
        (
            (
                "A rough value such as 4 or 6.",
                "The outlier is not in its block, so its scale fits 5.0, and E2M1 has no value between 4 and 6.",
            ),
            ("0.", "The outlier is in another block, and every block has a scale of its own."),
        ),
        _next_block,
    ),
}

TASK = Task(
    "the function gets the values of one block (a list) and returns its scale in MXFP4 by the floor rule: the power of "
    "two 2^(floor(log2(largest magnitude)) - 2), since the largest power of two in E2M1 is 4 = 2^2.",
    _shared,
    "Divided by this scale, the largest value of the block lies between 4 and 8.",
    "Take the largest magnitude, then its logarithm to base 2, round that down, and subtract 2: this is the exponent.",
)
