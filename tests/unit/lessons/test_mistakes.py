"""*Common mistakes*: its eleven verdicts, each computed, and its other answers a second way."""

import math

import numpy as np
import torch

from mpkit.casting import auto_mixed_precision
from mpkit.formats import E5M2, FP16, FP32
from mpkit.lessons.zoo import naive
from mpkit.optimizers import SGD
from mpkit.policies import naive_loss_ratio
from mpkit.scalers import all_finite
from mpkit.view import quiz
from mpkit.view.words import words

WORDS = words("mistakes")


def test_verdicts_statement_by_statement():
    gradient = torch.tensor([1.5e-3, -0.0123, 2.0]).half()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = SGD([weight], 0.1, 0.9, 1e-4)
    other = torch.nn.Linear(2, 2)
    early, scale = torch.tensor([2.0**-129]), torch.tensor(2.0**-128)
    late = early * (1 / scale)  # 1/2, and as scalers divide: inf
    weight.grad = torch.full((2,), math.inf)
    if all_finite([weight.grad]):
        optimizer.step()
    assert WORDS["question"]["verdicts"]["truth"] == [
        float(FP32.max) == 1.7e38,
        torch.equal((gradient * 1024) / 1024, gradient),
        bool(torch.tensor(0.00006666666).half().isinf()),
        not all_finite([torch.full((4,), 1e-9).half()]),
        bool(all_finite([late])) == bool(all_finite([early])),
        bool(torch.tensor(3e38).bfloat16().isfinite()),
        {p.dtype for p in auto_mixed_precision(torch.nn.Linear(2, 2), "O3").parameters()} == {torch.float16},
        any(p is q for p in other.parameters() for q in optimizer.param_groups[0]["params"]),
        optimizer.param_groups[0]["weight_decay"] == 1e-4,
        torch.equal(weight.detach(), torch.ones(2)),
        naive_loss_ratio(1.0, 2.3) >= 1.0,
    ]


def test_a_wrong_list_is_told_how_many_are_right():
    truth = WORDS["question"]["verdicts"]["truth"]
    assert "10 of 11 are right" in quiz.verdict("mistakes", "verdicts", [not truth[0], *truth[1:]])[1]
    assert "8 of 11 are right" in quiz.verdict("mistakes", "verdicts", [False] * 11)[1]
    for strange in ([int(fits) for fits in truth], ["F"] * 11):  # no count of what is no verdict
        assert "True or False is asked for" in quiz.verdict("mistakes", "verdicts", strange)[1]


def test_a_list_of_another_length_is_told_to_have_eleven():
    for wrong in ([True] * 10, [True] * 12):
        assert "eleven times" in quiz.verdict("mistakes", "verdicts", wrong)[1]


def test_what_the_lesson_says_of_a_scale_that_follows_the_loss():
    ends = {(2, 3.0, 0.0): (4, 4), (2, 3.0, 0.005): (1e6, math.inf), (0, 2.3, 0.0): (0, 2.0**-24)}
    for (start, loss, decay), (least, most) in ends.items():
        assert least <= naive(start=start, loss=loss, decay=decay).numbers["scale"][-1] <= most
    scale, steps = 65536.0, 0
    while scale <= FP32.max:
        scale, steps = naive_loss_ratio(scale, 2.3), steps + 1
    assert steps == 815


def test_answers_a_second_way():
    asked = {name: q["truth"] for name, q in WORDS["question"].items()}
    assert asked["max"] == E5M2.max == (2 - 2**-2) * 2.0**15
    assert asked["half"] == float(np.float16(0.00008))
    group = SGD([torch.nn.Parameter(torch.ones(1))], 0.1, 0.9, 0.2).param_groups[0]
    assert asked["position"] == 1 - float(group["dampening"])
    assert asked["steps"] == math.ceil(math.log(FP16.min_subnormal / 8) / math.log(0.9))


def test_cases_of_the_task():
    for (gradients,), share in WORDS["task"]["cases"]:
        values = np.array(gradients, dtype=np.float32)
        assert share == ((values != 0) & (values.astype(np.float16) == 0)).mean()
