"""Questions of lesson 02."""

import torch

from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task
from mpkit.formats import BF16, FP16
from mpkit.rounding import round_to


def _rounded(value: float, mode: str = "nearest_even") -> float:
    import torch

    from mpkit.rounding import round_to

    return float(round_to(torch.tensor(value, dtype=torch.float64), FP16, mode))  # type: ignore[arg-type]


QUESTIONS = {
    "tie": Question(
        "2049 lies halfway between the fp16 numbers 2048 and 2050. What does nearest_even give?",
        lambda: _rounded(2049.0),
        "The fraction field of {truth:g} is even; 2051 would go up, to 2052.",
        "Of the two neighbours, take the one whose last fraction bit is 0.",
        ((2050.0, "That is what nearest_away gives; its last fraction bit is 1."),),
    ),
    "ulp": Question(
        "What is the distance between neighbouring fp16 numbers around 1000?",
        lambda: 2.0 ** (9 - FP16.fraction_bits),
        "1000 lies between 2^9 and 2^10, so the gap is 2^(9-10) = {truth:g}.",
        "Find e with 2^e <= 1000 < 2^(e+1); the gap is 2^(e-10).",
        ((FP16.eps, "That is the gap at 1; it doubles with every power of two."),),
    ),
    "stall": Question(
        "Ones are added to a bf16 total, one by one. At which total does it stop growing?",
        lambda: 2.0 ** (BF16.fraction_bits + 1),
        "From {truth:g} on the gap is 2, so adding 1 is a tie that goes back to the even number.",
        "Where does the gap become 2? bf16 has 7 fraction bits.",
        ((2048.0, "That is where fp16 stops; bf16 has three bits fewer."),),
    ),
    "lost": Question(
        "Updates are added to the fp16 weight 1.0 with nearest_even. Which is the largest update that is lost?",
        lambda: FP16.eps / 2,
        "Half an ulp of 1: {truth:.4g}. At exactly half the tie goes back to 1.0, which is even.",
        "How far is it from 1.0 to the middle between 1.0 and its upper neighbour?",
        ((FP16.eps, "That is the whole gap; beyond the middle, rounding goes up already."),),
        rel=1e-2,
    ),
    "mean": Question(
        "x lies a quarter of an ulp above its lower neighbour. With which probability does stochastic rounding go up?",
        lambda: 0.25,
        "Then the mean of many roundings is x itself.",
        "Choose p so that p times one ulp is the distance above the lower neighbour.",
        (
            (
                0.75,
                "Then the mean would lie three quarters of an ulp above. The nearer neighbour is the more likely one.",
            ),
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
