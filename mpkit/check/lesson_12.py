"""Questions of lesson 12."""

import torch

from mpkit.boost.adasum import adasum, adasum_enabled, adasum_pair
from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task


def _against() -> float:
    a = torch.tensor([1.0, 0.0], dtype=torch.float64)
    return round(float(adasum_pair(a, -3 * a, eps=0.0)[0]), 9)


def _sixteen_axes() -> float:
    return round(float(adasum([[3 * axis] for axis in torch.eye(16, dtype=torch.float64)], eps=0.0)[0].norm()), 9)


QUESTIONS = {
    "against": Question(
        "Two workers propose a and -3a: opposite directions, and one update is three times as long. AdaSum is how many "
        "times a?",
        _against,
        "It is the mean: two updates on one line are averaged, whatever their lengths and signs.",
        "Put d = -3, A = 1 and B = 9 into the formula and add the two parts.",
        (
            (-2, "That is the sum. AdaSum does not add updates that lie on one line."),
            (0, "Opposite updates cancel only if they are equally long."),
            (1, "Mind the sign: the longer update points against a."),
        ),
    ),
    "sixteen": Question(
        "16 workers propose updates of length 3, all at right angles. How long is their AdaSum?",
        _sixteen_axes,
        "Nothing is shared, so the updates are added, and by Pythagoras the sum of 16 of them has length {truth:g}.",
        "At right angles AdaSum is the sum. How long is the diagonal of a cube in 16 dimensions, with sides of 3?",
        (
            (3, "That would be 16 equal updates."),
            (48, "Lengths add like this only for parallel vectors."),
            (4, "That is for updates of length 1."),
        ),
    ),
    "sizes": Question(
        "Which of 24, 32, 40, 48 and 64 workers can be merged pair by pair? Give a list.",
        lambda: [n for n in (24, 32, 40, 48, 64) if adasum_enabled(n, 1)],
        "Every round halves the number of updates, and that ends at one only for a power of two.",
        "Halve each number until you reach 1, or an odd number.",
    ),
}


def _rule() -> str:
    a, right = torch.tensor([2.0, 0.0], dtype=torch.float64), torch.tensor([0.0, 1.5], dtype=torch.float64)
    same, apart = adasum_pair(a, a, eps=0), adasum_pair(a, right, eps=0)
    if torch.equal(apart, (a + right) / 2):
        return "a"
    return "b" if torch.equal(same, a) and torch.equal(apart, a + right) else "c"


def _merged() -> list[tuple[tuple[list[float], list[float]], list[float]]]:
    pairs = (
        ([2.0, 0.0], [2.0, 0.0]),
        ([2.0, 0.0], [0.0, 1.5]),
        ([1.0, 2.0], [3.0, -1.0]),
        ([1.0, 1.0], [-2.0, -2.0]),
        ([1.0, 0.0], [4.0, 0.0]),  # the weight of a is -1 here
        ([1.0, 2.0, 2.0], [0.0, 3.0, 4.0]),  # the first two entries alone have other products
    )
    both = [(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)) for a, b in pairs]
    return [(pair, adasum_pair(a, b, eps=0).tolist()) for pair, (a, b) in zip(pairs, both)]


PREDICTIONS = {
    "rule": Prediction(
        "Two workers propose the same update a; later two workers propose updates at a right angle. What should be "
        "applied?",
        (
            (
                "The mean in both cases.",
                "At a right angle the two have nothing in common, and the mean halves what each of them found.",
            ),
            (
                "The update a itself in the first case, the sum in the second.",
                "What both propose counts once, what only one proposes counts in full. AdaSum gives both results, and "
                "at the angles between them a length between.",
            ),
            (
                "The sum in both cases.",
                "When 16 workers propose the same, the sum goes 16 times too far.",
            ),
        ),
        _rule,
    ),
}

TASK = Task(
    "the function gets two updates (lists of numbers). It returns their AdaSum, (1 - d / 2A) a + (1 - d / 2B) b. "
    "Here d = a·b, A = a·a and B = b·b.",
    _merged,
    "This is all of AdaSum; more workers are merged two by two.",
    "d, A and B are numbers: sums over the products of the entries.",
)
