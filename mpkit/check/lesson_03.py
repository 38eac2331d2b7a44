"""Questions of lesson 03."""

from mpkit.check import Question


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

    return str(auto_mixed_precision(nn.Linear(2, 2), "auto")(torch.ones(1, 2)).dtype).removeprefix("torch.")


def _protected() -> list[str]:
    from mpkit.casting import get_black_list

    return sorted(cls.__name__ for cls in get_black_list())


QUESTIONS = {
    "norm": Question(
        "At O2 in float16, how many bits wide is the arithmetic inside a BatchNorm2d?",
        lambda: _bits(_computes("O2", "batch_norm")),
        "{truth} bits: batch norm is on the black list. Its input and its result have 16 all the same.",
        "Look at the table of the residual block at O2, column 'computes in'.",
        ((16, "That is the width of its input and of its result; ask the ledger what it computes in."),),
    ),
    "add": Question(
        "At O1 in float16, how many bits wide is the residual sum `x + y`?",
        lambda: _bits(_computes("O1", "add")),
        "{truth} bits: add is not on the white list, and everything between white-listed operations is float32.",
        "Which operations are on O1's list? Only those are cast, the others take what they get.",
        ((16, "That would be O3: at O1 results of listed operations are cast back to float32."),),
    ),
    "lost": Question(
        "log(softmax(z)) of the logits 0, -1, ..., -32 at O2 in fp16: how many results are -inf?",
        _lost_probabilities,
        "{truth}: every probability below half of the smallest float16, 2^-25 = 3e-8, becomes 0.",
        "Set the second view to O2 and fp16, or count the z with softmax(z) < 2^-25.",
        ((0, "O2 does not protect softmax: only the four norm classes are on its list."),),
    ),
    "bias": Question(
        "Which dtype does an nn.Linear *with* bias return at level auto in float16? Answer 'float16' or 'float32'.",
        _auto_bias,
        "The product is float16, but adding the bias is on the promote list, and the bias is {truth}.",
        "The sum of a float16 tensor and a float32 bias is what?",
        (("float16", "Without a bias, yes. With one there is a sum to do, of a float16 and a float32 tensor."),),
    ),
    "black": Question(
        "Name the four classes that O2 keeps in float32 (a sorted list of class names).",
        _protected,
        "{truth}. GroupNorm, InstanceNorm, softmax and losses are not among them.",
        "Print get_black_list().",
    ),
}
