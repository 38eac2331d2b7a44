"""Questions of lesson 18."""

from dataclasses import replace

import torch

from mpkit.blocks import MXFP4, NVFP4, quantize_blocks
from mpkit.check import Question


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
