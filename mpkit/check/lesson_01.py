"""Questions of lesson 01."""

from mpkit.check import Question
from mpkit.formats import BF16, E4M3FN, FP16, FP32

QUESTIONS = {
    "smallest": Question(
        "What is the smallest positive number that fp16 can hold, subnormals included?",
        lambda: FP16.min_subnormal,
        "It is 2^-24 = {truth:.4g}; half of it is a tie and rounds to 0.",
        "Take the pattern whose 15 low bits are 0 but for the last, and look at its value.",
        (
            (FP16.min_normal, "That is the smallest *normal* number; below it the leading 1 is given up."),
            (FP16.min_subnormal / 2, "That is exactly half of it: a tie, which goes to the even neighbour, 0."),
        ),
    ),
    "pattern": Question(
        "Which 16 bits, as an integer such as 0x1234, does fp16 use for -2.0?",
        lambda: int(FP16.encode(-2.0)),
        "Sign 1, exponent field 16 (16 - 15 = 1), fraction 0: {truth:#06x}.",
        "Put 1 into the sign, 1 + bias into the exponent field, 0 into the fraction.",
        ((int(FP16.encode(2.0)), "Right but for the sign bit, the topmost one."),),
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
