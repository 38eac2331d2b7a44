"""Questions of lesson 03."""

import copy

import torch
from torch import nn

from mpkit.casting import LEVELS, auto_mixed_precision, ledger
from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task


class Squares(nn.Module):
    """A product that is no matrix product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


class Logs(nn.Module):
    """The logarithm of softmax, in two operations."""

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return torch.log(torch.softmax(z, -1))


def _product_bits() -> int:
    with ledger(auto_mixed_precision(network := Squares(), "O1", torch.float16)) as book:
        network(torch.ones(2))
    return 32 if book.rows[0].compute == "float32" else 16


def _lost_probabilities() -> int:
    logits = -2.0 * torch.arange(17)
    return int(auto_mixed_precision(Logs(), "O2", torch.float16)(logits).isinf().sum())


def _auto_bias() -> str:
    with ledger(auto_mixed_precision(network := nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "auto")) as book:
        network(torch.ones(1, 2))
    return book.rows[0].output[0]


def _protected() -> list[str]:
    modules = (
        nn.BatchNorm1d(4),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm1d(4),
        nn.LayerNorm(4),
        nn.RMSNorm(4),
        nn.Softmax(-1),
    )
    network = nn.Sequential(*modules)
    with ledger(auto_mixed_precision(network, "O2", torch.bfloat16)) as book:
        network(torch.ones(3, 4, 4))
    return [type(m).__name__ for m, row in zip(modules, book.rows, strict=True) if row.compute == "float32"]


QUESTIONS = {
    "product": Question(
        "x and y are results of two layers. In how many bits is `x * y`, their product element by element, computed at "
        "O1 in float16?",
        _product_bits,
        "{truth} bits: it is no matrix product and not on the white list, and a listed layer gives float32 to the "
        "next.",
        "Which operations are on O1's list? Only those are cast, the others take what they get.",
        ((16, "That is so for `x @ y`, a matrix product. Is `*` on the white list, too?"),),
    ),
    "lost": Question(
        "log(softmax(z)) is computed for the 17 logits 0, -2, -4, ..., -32 at O2 in float16. How many results are "
        "-inf?",
        _lost_probabilities,
        "{truth}: every probability of at most half of the smallest float16, 2^-25 = 3e-8, becomes 0.",
        "Give -2.0 * torch.arange(17) to a `Head` at O2 as above, and count what `isinf()` finds.",
        (
            (0, "O2 does not protect softmax: only the four norm classes are on its list."),
            (16, "That is for the 33 logits of the view. Here the logits lie 2 apart."),
        ),
    ),
    "bias": Question(
        "Which dtype does an nn.Linear *with* bias hand to the next layer at level auto in float16? Answer "
        "'float16' or 'float32'.",
        _auto_bias,
        "The product is float16. But a sum takes the widest format of its inputs, and the bias is {truth}.",
        "In which format is the sum of a float16 tensor and a float32 bias?",
        (
            ("float16", "Without a bias that is right. With a bias, a float16 and a float32 tensor are added."),
            (lambda v: str(v) in ("fp32", "32"), "The format is right. Write the name of the dtype, as torch does."),
        ),
    ),
    "black": Question(
        "Which of these compute in float32 at O2: BatchNorm1d, GroupNorm, InstanceNorm1d, LayerNorm, RMSNorm, Softmax? "
        "A list of their names.",
        _protected,
        "{truth}. The other norms are not on the black list, and neither are softmax and the losses.",
        "Print get_black_list(): only the classes on it are kept in float32.",
        (
            (lambda v: isinstance(v, list | tuple) and len(v) > 2, "O2's list is short: not every norm is on it."),
            (["LayerNorm"], "One more is missing."),
            (["BatchNorm1d"], "One more is missing."),
        ),
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
