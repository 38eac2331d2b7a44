"""Questions of lesson 01."""

import math

import torch

from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task
from mpkit.formats import BF16, E3M2, FP16, FP32, get_format
from mpkit.rounding import round_to

QUESTIONS = {
    "smallest": Question(
        "Another format, e4m7, has 4 exponent bits with a bias of 7, and 7 fraction bits. What is the smallest "
        "positive number that it can hold, subnormals included?",
        lambda: get_format("e4m7").min_subnormal,
        "The smallest normal number is 2^(1 - 7) = 2^-6, and seven fraction bits go on to 2^-13 = {truth:.4g}.",
        "Its smallest normal number is 2^(1 - bias). Which value has the last of the fraction bits there?",
        (
            (2.0**-6, "That is the smallest *normal* number; below it the leading 1 is given up."),
            (-13, "That is the exponent. The question asks for the number itself."),
            (2.0**-14, "The exponent field 0 means the exponent of the field 1, which is 1 - 7 = -6."),
            (FP16.min_subnormal, "That is the one of fp16, which has a bias of 15 and 10 fraction bits."),
        ),
        rel=1e-2,
    ),
    "pattern": Question(
        "Which 16 bits, as an integer such as 0x1234, does fp16 use for -2.0?",
        lambda: int(FP16.encode(-2.0)),
        "Sign 1, exponent field 16 (16 - 15 = 1), fraction 0: {truth:#06x}.",
        "Put 1 into the sign, 1 + bias into the exponent field, 0 into the fraction.",
        (
            (int(FP16.encode(2.0)), "Only the sign bit, the first one, is wrong."),
            (
                1100000000000000,
                "These are the right bits, read as a decimal number. Write 0b1100000000000000 for them.",
            ),
        ),
    ),
    "bf16": Question(
        "A gradient of 2^-130 is stored in bf16. How many significant bits does it keep?",
        lambda: 1 + round(math.log2(2.0**-130 / BF16.min_subnormal)),
        "{truth}: 2^-130 is below 2^-126, where the normal numbers of bf16 end, and each halving costs a bit.",
        "Move the slider of the ranges to -130 and read the line of bf16.",
        (
            (BF16.fraction_bits + 1, "So many has a normal number of bf16. Is 2^-130 one?"),
            (0, "bf16 has subnormal numbers, down to 2^-133."),
        ),
    ),
    "beyond": Question(
        "What does 100 become in e3m2, by the format's own rule? A number, 'inf' or 'nan'.",
        lambda: round_to(torch.tensor(100.0), E3M2).item(),
        "The format saturates: it has neither inf nor NaN, so {truth:g}, its largest number, stands for all larger "
        "ones.",
        "Find e3m2 in the table of formats: where does it end, and what becomes of numbers beyond?",
        (
            (math.inf, "e3m2 has no inf. What does the last column of the table say?"),
            (math.nan, "That is e4m3fn. e3m2 has no NaN, either."),
        ),
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
