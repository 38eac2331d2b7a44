"""Questions of lesson 03."""

import copy

import torch
from torch import nn

from mpkit.casting import LEVELS, auto_mixed_precision, ledger
from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task


def _computes(level: str, operation: str) -> str:
    """What an operation of the residual block computes in at a level with float16."""
    from mpkit.explorers.casting import walk

    return next(step.compute for step in walk("residual block", level, "fp16").steps if step.operation == operation)


def _bits(precision: str) -> int:
    return 32 if precision == "float32" else 16


def _lost_probabilities() -> int:
    from mpkit.explorers.casting import LogSoftmaxExplorer

    return LogSoftmaxExplorer(level="O2", fmt="fp16").lost


def _auto_bias() -> str:
    import torch
    from torch import nn

    from mpkit.casting import auto_mixed_precision
    from mpkit.formats import dtype_name

    return dtype_name(auto_mixed_precision(nn.Linear(2, 2), "auto")(torch.ones(1, 2)).dtype)


def _protected() -> list[str]:
    from mpkit.casting import get_black_list

    return sorted(cls.__name__ for cls in get_black_list())


QUESTIONS = {
    "norm": Question(
        "In how many bits does a BatchNorm2d compute at O2 in float16?",
        lambda: _bits(_computes("O2", "batch_norm")),
        "{truth} bits: batch norm is on the black list. Yet its input and its result have 16 bits.",
        "Show the first view as a table at O2: what does its column *computes in* say?",
        ((16, "That is the width of its input and of its result; ask the ledger what it computes in."),),
    ),
    "add": Question(
        "In how many bits is the residual sum `x + y` computed at O1 in float16?",
        lambda: _bits(_computes("O1", "add")),
        "{truth} bits: add is not on the white list, and everything between white-listed operations is float32.",
        "Which operations are on O1's list? Only those are cast, the others take what they get.",
        ((16, "That would be O2 or O3. At O1, results of listed operations are cast back to float32."),),
    ),
    "lost": Question(
        "log(softmax(z)) is computed for the logits 0, -1, ..., -32 at O2 in fp16. How many results are -inf?",
        _lost_probabilities,
        "{truth}: every probability below half of the smallest float16, 2^-25 = 3e-8, becomes 0.",
        "Set the second view to O2 and fp16, or count the z with softmax(z) < 2^-25.",
        ((0, "O2 does not protect softmax: only the four norm classes are on its list."),),
    ),
    "bias": Question(
        "Which dtype does an nn.Linear *with* bias return at level auto in float16? Answer 'float16' or 'float32'.",
        _auto_bias,
        "The product is float16. But a sum takes the widest format of its inputs, and the bias is {truth}.",
        "In which format is the sum of a float16 tensor and a float32 bias?",
        (("float16", "Without a bias that is right. With a bias, a float16 and a float32 tensor are added."),),
    ),
    "black": Question(
        "Name the four classes that compute in float32 at O2. Give a sorted list of class names.",
        _protected,
        "{truth}. GroupNorm, InstanceNorm, softmax and losses are not among them.",
        "Print get_black_list().",
    ),
}


LAYERS = {"linear": nn.Linear(4, 4), "relu": nn.ReLU(), "batch_norm": nn.BatchNorm1d(4), "softmax": nn.Softmax(-1)}


def _ran(layer: str, level: str) -> tuple[str, str]:
    """What the ledger says of a layer inside a network: (computes in, its result)."""
    inner = nn.Sequential(nn.Linear(4, 4), copy.deepcopy(LAYERS[layer]), nn.Linear(4, 4))
    with ledger(auto_mixed_precision(inner, level, torch.bfloat16)) as book:
        inner(torch.ones(3, 4))
    return book.rows[1].compute, book.rows[1].output[0]


def _norm() -> str:
    return {("bfloat16", "bfloat16"): "a", ("float32", "float32"): "b", ("float32", "bfloat16"): "c"}[
        _ran("batch_norm", "O2")
    ]


def _widths() -> list[tuple[tuple[str, str], int]]:
    pairs = [(layer, level) for level in LEVELS if level != "auto" for layer in LAYERS]
    return [(pair, 32 if _ran(*pair)[0] == "float32" else 16) for pair in pairs]


PREDICTIONS = {
    "norm": Prediction(
        "In which format does a batch norm compute at O2 in float16? In which format is its result?",
        (
            (
                "It computes in float16, and its result is float16.",
                "That is O3. O2 keeps four classes in float32 inside, and batch norm is one of them.",
            ),
            (
                "It computes in float32, and its result is float32.",
                "The inside is right. But its result is rounded as it leaves, so that the next layer stays in 16 bits.",
            ),
            (
                "It computes in float32, and its result is float16.",
                "The mean of many values needs float32. The result that is handed on does not.",
            ),
        ),
        _norm,
    ),
}

TASK = Task(
    "the function gets a layer ('linear', 'relu', 'batch_norm' or 'softmax') and a level ('O0' to 'O3'). It returns "
    "how many bits, 16 or 32, this layer computes in when it stands inside a network.",
    _widths,
    "As casting levels, O0 to O3 differ in nothing but what they cast.",
    "O1 has a list of what it casts, O2 a list of what it does not cast. Ask the ledger where you are unsure.",
)
