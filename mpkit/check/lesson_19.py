"""Questions of lesson 19."""

from dataclasses import replace

import numpy as np
import torch

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
        "In how many of the six casts of nvfp4 is there a Hadamard transform?",
        lambda: sum(cast is not None and cast.hadamard for _, cast in RECIPES["nvfp4"].casts()),
        "{truth}: both operands of the weight gradient. The two transforms cancel in their product.",
        'RECIPES["nvfp4"].describe() lists what is done in each cast.',
    ),
}


def _told_apart() -> str:
    """Whether any recipe's mean gap to float32 leaves the spread of float32's own seeds."""
    end = load_recipes()["end"].astype(float)
    gaps = np.abs((end[1:] - end[0]).mean(axis=1))
    return "b" if (gaps < np.ptp(end[0])).all() else "a"


def _kept() -> list[tuple[tuple[str], bool]]:
    names = [name for name, module in TinyGPT().named_modules() if isinstance(module, torch.nn.Linear)]
    return [((name,), name == "lm_head" or name.startswith("h.0.")) for name in names]


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
                "So this network tells neither which recipe is best nor which product is the cause.",
            ),
        ),
        _told_apart,
    ),
}

TASK = Task(
    "write a filter. The function gets the name of a linear layer of the small GPT and returns True for the layers "
    "that should stay in high precision: the output layer `lm_head`, and all layers of the first transformer block, "
    "whose names begin with `h.0.`.",
    _kept,
    "Call `cast_like(network, recipe, keep=...)` with such a filter; it refuses one that matches no layer.",
    "Compare the beginning of the name with `h.0.`, the last dot included.",
)
