"""Questions of lesson 19."""

from mpkit.casting import RECIPES
from mpkit.check import Question

QUESTIONS = {
    "casts": Question(
        "How many casts does a recipe describe for one linear layer?",
        lambda: len(list(RECIPES["mxfp8"].casts())),
        "Three products with two operands each: {truth}.",
        "Count the products of forward and backward pass, and the operands of each.",
        ((3, "That is the number of products; each has two operands."),),
    ),
    "axis": Question(
        "Over which axis of the gradient of the output does the weight gradient sum: 'rows' or 'features'?",
        lambda: "rows",
        "grad.T @ input sums over the {truth}, so both are cast along them.",
        "Write the shapes: (rows, out) and (rows, in) give (out, in).",
    ),
    "hadamard": Question(
        "In how many of the six casts of nvfp4 is there a Hadamard transform?",
        lambda: sum(cast is not None and cast.hadamard for _, cast in RECIPES["nvfp4"].casts()),
        "{truth}: both operands of the weight gradient, or it would not cancel.",
        'RECIPES["nvfp4"].describe() says it for each cast.',
    ),
}
