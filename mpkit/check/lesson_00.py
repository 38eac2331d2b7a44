"""Questions of lesson 00."""

from mpkit.check import Question
from mpkit.formats import FP16


def _after_one_overflow() -> float:
    import torch

    from mpkit.scalers import DynamicLossScaler

    scaler = DynamicLossScaler(2.0**16, 2, 50)
    scaler.adjust(torch.tensor(False))
    return float(scaler.scale_value)


QUESTIONS = {
    "largest": Question(
        "What is the largest finite number that float16 can hold?",
        lambda: FP16.max,
        "Anything from 65520 on becomes inf, and that is what the scaler looks for.",
        "Run `torch.finfo(torch.float16).max` and compare.",
        ((65536, "That is 2^16, one step too far: it is already inf in float16."),),
    ),
    "after": Question(
        "A DynamicLossScaler(2**16, 2, 50) meets one overflow. What is its scale afterwards?",
        _after_one_overflow,
        "It is divided by scale_factor at once: {truth:g}.",
        "An overflow acts at once and divides by scale_factor; the window only counts steps without one.",
        ((65536, "That would hold if nothing had overflowed: look at what scale_factor does."),),
    ),
    "weights": Question(
        "In which dtype does an O2 network keep its parameters: 'float16' or 'float32'?",
        lambda: "float32",
        "They are cast at every use, so small updates are not lost: the float32 parameters are the master weights.",
        "Look at the table of dtypes above: what does `parameter.dtype` say?",
    ),
}
