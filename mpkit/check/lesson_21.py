"""Questions of lesson 21."""

from __future__ import annotations

import torch

from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task
from mpkit.optimizers import SGD
from mpkit.optimizers.arguments import decays_by_name
from mpkit.schedules import PolynomialDecayLR, WarmUpLR, piecewise_constant_lr

NAMES = ("bn.weight", "fc.bias", "bn.beta", "gamma_net.weight")


def _listed() -> float:
    return piecewise_constant_lr([3, 6, 8], [0.1, 0.05, 0.01])[6]


QUESTIONS = {
    "warmup": Question(
        "A schedule is WarmUpLR(0.4, 4).then(PolynomialDecayLR(0.4, 0.0, 8, 1.0), at=4). What is its rate at step 6?",
        lambda: WarmUpLR(0.4, 4).then(PolynomialDecayLR(0.4, 0.0, 8, 1.0), at=4)(6),
        "After the switch the second schedule counts from 0, so this is its step 2: {truth:g}.",
        "Which step does the second schedule see at step 6, when it starts at step 4?",
        ((0.1, "That is the rate of the second schedule at its own step 6. It starts counting at the switch."),),
    ),
    "decayed": Question(
        f"There are no groups. Which of {', '.join(NAMES)} does weight decay reach? Give a list of names.",
        lambda: [name for name in NAMES if decays_by_name(name)],
        "The name decides: those with beta or gamma are left out. torch calls the factor of a batch norm bn.weight, so "
        "decay reaches it.",
        "The rule looks for two words in the name, and for nothing else.",
        (
            (["bn.weight"], "Biases are decayed too: only the names with beta or gamma are left out."),
            (["fc.bias", "gamma_net.weight"], "The rule knows no layers: it reads names only."),
            (["bn.weight", "fc.bias", "gamma_net.weight"], "One of these names has gamma in it."),
        ),
    ),
    "listed": Question(
        "The rates are piecewise_constant_lr([3, 6, 8], [0.1, 0.05, 0.01]). The first step is step 0. What is the "
        "rate of step 6?",
        _listed,
        "A milestone is the step at which the next rate begins: {truth:g}.",
        "Print the list and count from 0.",
        ((0.05, "That rate ends before its milestone: it is used in the steps 3, 4 and 5."),),
    ),
}


def _shrunk(grouped: bool) -> list[str]:
    names = ["fc.weight", "fc.bias", "bn.gamma", "bn.beta"]
    named = [(name, torch.nn.Parameter(torch.ones(2))) for name in names]
    optimizer = SGD([{"params": named}] if grouped else named, 0.1, weight_decay=0.5)
    for _, parameter in named:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return [name for name, parameter in named if parameter[0] < 1]


def _reached() -> str:
    return {(1, 1): "a", (2, 4): "b", (4, 4): "c"}[len(_shrunk(False)), len(_shrunk(True))]


def _trapezes() -> list[tuple[tuple[int, float, int, int], float]]:
    found = []
    for peak, warmup, total in ((0.1, 4, 20), (2.0, 5, 8)):
        straight = PolynomialDecayLR(peak, 0.0, total - warmup, 1.0)
        schedule = WarmUpLR(peak, warmup).then(straight, at=warmup)
        steps = (0, 1, warmup, warmup + 1, total - 1, total + 1)
        found += [((step, peak, warmup, total), float(schedule(step))) for step in steps]
    return found


PREDICTIONS = {
    "decay": Prediction(
        "Which of fc.weight, fc.bias, bn.gamma and bn.beta does weight decay reach without groups, and which in a "
        "group?",
        (
            (
                "Only fc.weight, without groups and in a group.",
                "Papers often leave biases out. The name rule looks for beta and gamma only.",
            ),
            (
                "Without groups fc.weight and fc.bias, in a group all four.",
                "In a group the name plays no part: the decay reaches every parameter.",
            ),
            (
                "All four in both cases.",
                "In a group, yes. Without groups, names with beta or gamma are left out.",
            ),
        ),
        _reached,
    ),
}

TASK = Task(
    "the function gets a step, the highest rate `peak`, and two numbers of steps, `warmup` and `total`. It returns the "
    "rate at this step. The rate rises in equal parts from 0 at step 0 to peak at step `warmup`, falls in equal parts "
    "to 0 at step `total`, and stays 0.",
    _trapezes,
    "In mpkit this is WarmUpLR(peak, warmup).then(PolynomialDecayLR(peak, 0.0, total - warmup, 1.0), at=warmup).",
    "There are three parts: `warmup` steps of rise, `total - warmup` steps of fall, and a rate of 0 from there on.",
    rel=1e-6,
)
