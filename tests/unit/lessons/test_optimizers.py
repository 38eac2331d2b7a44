"""*The optimizer*: Adam's step against the optimizer, trainings under two scales, the answers a second way."""

import numpy as np
import pytest
import torch
from torch import nn

from mpkit.data import digits
from mpkit.formats import BF16, FP16, FP32
from mpkit.lessons.optimizers import FORMATS, adam_state, first_adam_step, train_with_state
from mpkit.optimizers import SGD, Adam, Momentum
from mpkit.step import TrainOneStepCell, WithLossCell
from mpkit.view.words import words

WORDS = words("optimizers")


def test_the_first_step_in_float32_is_that_of_the_optimizer():
    gradients = torch.exp2(torch.arange(-20.0, 10.0))
    weight = torch.nn.Parameter(torch.zeros_like(gradients))
    weight.grad = gradients
    Adam([weight], 1.0).step()
    torch.testing.assert_close(first_adam_step(gradients, 1e-8, FP32)[2], -weight.detach(), rtol=2e-6, atol=0)
    seen = adam_state(state="float32").numbers
    torch.testing.assert_close(seen["narrow"], seen["wide"], rtol=0, atol=0)


def test_a_narrow_state_breaks_where_its_numbers_end():
    _, eps, size = first_adam_step(torch.tensor([2.0**-10, 2.0**-2, 2.0**10]), 1e-8, FP16)
    assert eps == 0.0
    assert size[0].isinf()  # v underflows, and so does eps
    assert size[1] == pytest.approx(1, rel=0.02)
    assert size[2] == 0  # g squared overflows
    assert first_adam_step(torch.tensor([2.0**-10]), 1e-8, BF16)[2] == pytest.approx(1, rel=0.02)
    narrow, wide = (first_adam_step(torch.tensor([2.0**-8]), 1e-4, fmt)[2] for fmt in (FP16, FP32))
    assert 1.5 < narrow / wide < 2.5
    seen = adam_state().numbers
    assert not seen["narrow"][seen["gradients"] < 1e-3].isfinite().any()  # inf, and NaN where m is 0 too
    usual = seen["wide"][seen["gradients"] > 2.0**-18.1]
    assert 0.9 < usual.min() <= usual.max() < 1.01
    assert "step is inf times" in adam_state(gradient=-10).sentence


def test_training_with_a_float16_state_is_lost_at_once_and_saved_by_a_larger_eps():
    ends = {name: train_with_state(fmt, 1e-8, steps=40)["last loss"] for name, fmt in FORMATS.items()}
    assert np.isnan(ends.pop("float16"))
    assert max(ends.values()) < 1
    assert train_with_state(FP16, 1e-4, steps=40)["last loss"] < 1


@pytest.mark.parametrize(("kind", "given"), [(SGD, (0.5,)), (Momentum, (0.05, 0.9)), (Adam, (0.01,))])
def test_equal_scales_train_as_none_and_unequal_ones_hurt_all_but_adam(kind, given):
    images, labels = digits("train", size=8)

    def trained(sens, scale):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = kind(network.parameters(), *given, loss_scale=scale)
        cell = TrainOneStepCell(WithLossCell(network, nn.CrossEntropyLoss()), optimizer, sens=sens)
        return [cell(x, y).item() for _ in range(2) for x, y in zip(images.split(64), labels.split(64))]

    plain, agreed, apart = trained(1.0, 1.0), trained(1024.0, 1024.0), trained(1024.0, 16.0)
    assert agreed == plain  # powers of two are exact
    assert (apart[-1] > 2 * plain[-1]) == (kind is not Adam)


def test_answers_a_second_way():
    asked = {name: q["truth"] for name, q in WORDS["question"].items()}
    # of 2^-7 the square is 2^-14 and a thousandth of it still above half of 2^-24; of 2^-8 it is not
    assert asked["square"] == -7
    stored = [float(np.float16(0.001 * 2.0 ** (2 * n))) for n in (-8, -7)]
    assert stored[0] == 0 < stored[1]
    weight = np.float16(1)
    for _ in range(100):
        weight = np.float16(weight - np.float16(0.0001))
    assert asked["lost"] == weight == 1
    assert asked["factor"] == 2.0**12 / 2.0**8
    assert first_adam_step(torch.tensor(0.001), 1e-8, FP16) == (0, 0, np.inf)
    assert WORDS["predict"]["step"]["right"] == "c"


def test_cases_of_the_task_are_sgd_with_a_master_copy():
    for (master, scaled, scale, rate), (new, shown) in WORDS["task"]["cases"]:
        assert new == pytest.approx(master - rate * scaled / scale, rel=1e-7)
        assert shown == float(np.float16(new))
