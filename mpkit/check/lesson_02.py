"""Questions of lesson 02."""

import torch

from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task
from mpkit.formats import BF16, E5M2, FP16
from mpkit.rounding import round_to


def _stalls() -> float:
    """Where a sum of ones stops in E5M2."""
    total = torch.zeros(())
    for _ in range(20):
        total = round_to(total + 1, E5M2)
    return total.item()


QUESTIONS = {
    "tie": Question(
        "4102 lies halfway between the fp16 numbers 4100 and 4104. What does nearest_even give?",
        lambda: round_to(torch.tensor(4102.0), FP16).item(),
        "The gap is 4 there. {truth:g} is 1026 times the gap, which is even; 4100 is 1025 times the gap.",
        "Of the two neighbours, take the one whose last fraction bit is 0: it is an even number of gaps.",
        ((4100.0, "Its last fraction bit is 1: it is 1025 times the gap of 4, and 1025 is odd."),),
    ),
    "ulp": Question(
        "What is the distance between neighbouring fp16 numbers around 1000?",
        lambda: 2.0 ** (9 - FP16.fraction_bits),
        "1000 lies between 2^9 and 2^10, so the gap is 2^(9-10) = {truth:g}.",
        "Find e with 2^e <= 1000 < 2^(e+1); the gap is 2^(e-10).",
        (
            (FP16.eps, "That is the gap at 1; it doubles with every power of two."),
            (1.0, "That is the gap from 1024 on. 1000 lies below."),
        ),
    ),
    "stall": Question(
        "Ones are added to an e5m2 total, one by one. e5m2 has 2 fraction bits. At which total does it stop growing?",
        _stalls,
        "From {truth:g} on the gap is 2, so adding 1 is a tie that goes back to the even number.",
        "Where does the gap become 2?",
        (
            (256.0, "That is where bf16 stops, with 7 fraction bits."),
            (2048.0, "That is where fp16 stops, with 10 fraction bits."),
            (4.0, "At 4 the gap is still 1, and 5 can be held."),
        ),
    ),
    "lost": Question(
        "Updates are added to the bf16 weight 4.0 with nearest_even. Which is the largest update that is lost?",
        lambda: 4 * BF16.eps / 2,
        "Half an ulp of 4: {truth:.4g}. At exactly half the tie goes back to 4.0, which is even.",
        "How far is it from 4.0 to the middle between 4.0 and its upper neighbour?",
        (
            (4 * BF16.eps, "That is the whole gap; beyond the middle, rounding goes up already."),
            (BF16.eps / 2, "That is for a weight of 1. The gap at 4 is four times as large."),
            (4 * FP16.eps / 2, "That is fp16. bf16 has three fraction bits fewer."),
        ),
        rel=1e-2,
    ),
    "mean": Question(
        "x is 1 + 2^-12. With which probability does stochastic rounding to fp16 go up?",
        lambda: 2.0**-12 / FP16.eps,
        "One ulp of 1 is 2^-10, so x lies {truth:g} ulp above 1. With this probability the mean of many is x itself.",
        "How large is an ulp of 1 in fp16, and which part of it is 2^-12?",
        (
            (
                0.75,
                "Then the mean would lie three quarters of an ulp above. The nearer neighbour is the more likely one.",
            ),
            (2.0**-12, "That is the distance itself. The probability is the distance in ulps."),
        ),
    ),
}


def _tie() -> str:
    return {2050: "a", 2048: "b"}[int(torch.tensor(2049.0).half())]


def _nearest_even() -> list[tuple[tuple[float], float]]:
    numbers = (2048.5, 2049.0, 2049.5, 2051.0, 2053.0, 3001.0, 3001.1, 4094.9)
    return [((x,), round_to(torch.tensor(x, dtype=torch.float64), FP16).item()) for x in numbers]


PREDICTIONS = {
    "tie": Prediction(
        "2049 lies exactly halfway between the float16 numbers 2048 and 2050. What does float16 store?",
        (
            (
                "2050, as in school.",
                "School rounds every tie away from zero. Then sums of many positive numbers drift upwards.",
            ),
            ("2048.", "A tie goes to the neighbour whose last fraction bit is 0. So 2051 goes up, to 2052."),
            (
                "Sometimes one, sometimes the other.",
                "That is stochastic rounding. The default of all casts gives the same answer each time.",
            ),
        ),
        _tie,
    ),
}

TASK = Task(
    "the function gets a number between 2048 and 4096. There the float16 numbers are the even integers. It returns the "
    "float16 number that is nearest. At a tie it returns the one that is a multiple of 4.",
    _nearest_even,
    "Ties went to the neighbour whose last bit is 0: this is the default rounding of IEEE 754.",
    "Divide by 2, round to an integer with ties to even, and multiply by 2. What does Python's round() do with ties?",
)
