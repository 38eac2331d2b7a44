"""Questions of lesson 01."""

import torch

from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task
from mpkit.formats import BF16, E4M3FN, FP16, FP32
from mpkit.rounding import round_to

QUESTIONS = {
    "smallest": Question(
        "What is the smallest positive number that fp16 can hold, subnormals included?",
        lambda: FP16.min_subnormal,
        "It is 2^-24 = {truth:.4g}; half of it is a tie and rounds to 0.",
        "Take the pattern in which only the last bit is 1, and look at its value.",
        (
            (FP16.min_normal, "That is the smallest *normal* number; below it the leading 1 is given up."),
            (FP16.min_subnormal / 2, "That is exactly half of it: a tie, which goes to the even neighbour, 0."),
        ),
        rel=1e-2,
    ),
    "pattern": Question(
        "Which 16 bits, as an integer such as 0x1234, does fp16 use for -2.0?",
        lambda: int(FP16.encode(-2.0)),
        "Sign 1, exponent field 16 (16 - 15 = 1), fraction 0: {truth:#06x}.",
        "Put 1 into the sign, 1 + bias into the exponent field, 0 into the fraction.",
        ((int(FP16.encode(2.0)), "Only the sign bit, the first one, is wrong."),),
    ),
    "bf16": Question(
        "A gradient of 2^-30 is stored in bf16. How many significant bits does it keep?",
        lambda: BF16.fraction_bits + 1,
        "All {truth} of them: bf16 has the exponents of float32, but never more bits than this.",
        "Move the slider of the ranges to -30 and read the line of bf16.",
        ((FP16.fraction_bits + 1, "That is the precision of fp16, and fp16 has nothing left at 2^-30."),),
    ),
    "beyond": Question(
        "What does 1000 become in e4m3fn by the format's own rule: 'inf', 'nan' or 'saturate'?",
        lambda: E4M3FN.overflow,
        "The format has no infinity, so it marks the overflow with its one special pattern; many libraries saturate.",
        "Set the bits of e4m3fn all to 1, then look at the kind.",
        (("inf", "e4m3fn gave up infinity to gain the numbers from 256 to 448."),),
    ),
    "range": Question(
        "How many powers of two are normal numbers in fp32 (the count of exponents)?",
        lambda: FP32.max_exponent - FP32.min_exponent + 1,
        "From 2^-126 to 2^127: {truth}. Eight bits give 256 exponent fields, and two of them are special.",
        "Take the largest exponent minus the smallest, plus one.",
        (
            (256, "Two of the 256 exponent fields are special: one for zero and subnormals, one for inf and NaN."),
            (253, "Count both ends: the difference plus one."),
        ),
    ),
}


def _value(pattern: int) -> float:
    return float(FP16.decode(torch.tensor(pattern)))


def _decoded() -> list[tuple[tuple[int, int, int], float]]:
    fields = [(0, 15, 0), (1, 16, 512), (0, 30, 1023), (0, 1, 0), (0, 0, 1), (1, 0, 1023), (0, 0, 0)]
    fields += [(0, 31, 0), (1, 31, 0)]
    return [((s, e, f), _value(s << 15 | e << 10 | f)) for s, e, f in fields]


def _stored() -> str:
    return "a" if round_to(torch.tensor(0.1, dtype=torch.float64), FP16).item() == 0.1 else "b"


def _next_to_one() -> str:
    gap = _value(int(FP16.encode(1.0)) + 1) - 1
    return {2.0**-24: "a", 2.0**-16: "b", 2.0**-10: "c"}[gap]


PREDICTIONS = {
    "tenth": Prediction(
        "0.1 is not a sum of a few powers of two. What does float16 store in its place?",
        (
            ("0.1 exactly.", "With eleven binary digits 0.1 cannot be written, as 1/3 cannot with decimal ones."),
            ("The nearest of its values, a little off.", "The error is at most half the gap to the next value."),
            (
                "0.1, cut off after three decimal digits.",
                "The digits that are kept are binary, and the last one is rounded, not cut off.",
            ),
        ),
        _stored,
    ),
    "last_bit": Prediction(
        "You flip the last of the 16 bits of 1.0. How far is the new number from 1.0?",
        (
            ("2^-24 away.", "That is the gap near zero. Near 1 the values lie 2^14 times farther apart."),
            ("2^-16 away.", "Sixteen bits are not sixteen digits: only ten of them belong to the fraction."),
            ("2^-10 away.", "Ten fraction bits divide the way from 1 to 2 into 1024 steps."),
        ),
        _next_to_one,
    ),
}

TASK = Task(
    "the function gets the sign bit, the exponent field (0 to 31) and the fraction field (0 to 1023) of a float16. It "
    "returns the value. An exponent field of 0 means zero or a subnormal. An exponent field of 31 with a fraction of 0 "
    "means inf, or -inf.",
    _decoded,
    "You have written the decoder of float16.",
    "A normal number is 2^(exponent - 15) x (1 + fraction / 1024). A subnormal has no leading 1, and the exponent -14.",
)
