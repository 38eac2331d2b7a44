"""Questions of lesson 19."""

from dataclasses import replace

import numpy as np
import torch

from mpkit.blocks import hadamard
from mpkit.casting import RECIPES
from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task
from mpkit.explorers.recipes import load_recipes
from mpkit.networks import TinyGPT

QUESTIONS = {
    "casts": Question(
        "How many casts does the recipe 'mxfp4, weight gradient high' make for one linear layer?",
        lambda: sum(
            cast is not None for _, cast in replace(RECIPES["mxfp4"], wgrad_grad=None, wgrad_input=None).casts()
        ),
        "Two products are left with two operands each: {truth} casts.",
        "Which of the six operands does this recipe leave in high precision?",
        (
            (6, "That is the number of casts of mxfp4. This recipe does not cast the operands of the weight gradient."),
            (5, "The weight gradient has two operands, and this recipe casts neither."),
        ),
    ),
    "axis": Question(
        "A weight has the shape (output features, input features), and each of its rows has one scale. Which product "
        "can use this cast: 'fprop' or 'dgrad'?",
        lambda: "fprop",
        "{truth} sums over the input features, along the rows of the weight. dgrad sums over the output features, "
        "across the rows.",
        "A row that shares a scale must lie along the axis that the product sums over.",
        (("wgrad", "The weight is no operand of wgrad."),),
    ),
    "hadamard": Question(
        "Of 16 values one is 32, and the others are 0. How large is the largest of them after the Hadamard transform?",
        lambda: float(hadamard(32 * torch.eye(16)[0]).abs().max()),
        "All 16 values have the magnitude {truth:g} then: 32 / 4. The sum of their squares is that of before.",
        "Each new value is a sum or difference of all 16, divided by 4. mpkit.blocks.hadamard computes it.",
        (
            (2, "That is 32 / 16. The sums and differences are divided by 4, the square root of 16."),
            (32, "The outlier is spread over all 16 values, so none of them is as large as before."),
        ),
    ),
}


def _told_apart() -> str:
    """Whether any recipe's mean gap to float32 leaves the spread of float32's own seeds."""
    end = load_recipes()["end"].astype(float)
    gaps = np.abs((end[1:] - end[0]).mean(axis=1))
    return "b" if (gaps < np.ptp(end[0])).all() else "a"


def _kept() -> list[tuple[tuple[str, torch.nn.Linear], bool]]:
    gpt = TinyGPT(vocabulary=50, width=16, layers=11)
    found = {name: module for name, module in gpt.named_modules() if isinstance(module, torch.nn.Linear)}
    found["lm_in"] = torch.nn.Linear(40, 16)
    return [
        ((name, layer), name.startswith("h.1.") or layer.in_features % 16 > 0 or layer.out_features % 16 > 0)
        for name, layer in found.items()
    ]


PREDICTIONS = {
    "apart": Prediction(
        "A small GPT learns under every recipe, from three seeds each. Can you tell the recipes apart by its loss?",
        (
            (
                "Yes: fewer bits end with a visibly higher loss.",
                "Look at the seeds of float32 first: the largest difference between two of them is larger than the "
                "mean difference between any recipe and float32.",
            ),
            (
                "No: the mean difference between a recipe and float32 is smaller than the largest difference "
                "between two seeds of float32.",
                "So this network does not tell which recipe is best.",
            ),
        ),
        _told_apart,
    ),
}

TASK = Task(
    "write a filter. The function gets the name of a linear layer and the layer. It returns True for the layers that "
    "should stay in high precision: all layers of the block `h.1`, and each layer whose `in_features` or "
    "`out_features` is not a multiple of 16.",
    _kept,
    "Give your function to `cast_like(network, recipe, keep=...)` as it is; it refuses one that picks no layer.",
    "The layers of `h.1` have names that begin with `h.1.`, and there can be a block `h.10`. Both sizes count.",
)
