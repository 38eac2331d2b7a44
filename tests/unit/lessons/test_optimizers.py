"""*The optimizer*: Adam's step against the optimizer, trainings under two scales, the answers a second way."""

import numpy as np
import pytest
import torch

from mpkit.formats import BF16, FP16, FP32
from mpkit.lessons.optimizers import (
    FORMATS,
    MAKERS,
    adam_state,
    first_adam_step,
    loss_scale,
    train_scaled,
    train_with_state,
)
from mpkit.optimizers import Adam
from mpkit.view.words import words

WORDS = words("optimizers")


def test_the_first_step_in_float32_is_that_of_the_optimizer():
    gradients = torch.exp2(torch.arange(-20.0, 10.0))
    weight = torch.nn.Parameter(torch.zeros_like(gradients))
    weight.grad = gradients
    Adam([weight], 1.0).step()
    torch.testing.assert_close(first_adam_step(gradients, 1e-8, FP32).size, -weight.detach(), rtol=2e-6, atol=0)
    seen = adam_state(state="float32").numbers
    torch.testing.assert_close(seen["narrow"], seen["wide"], rtol=0, atol=0)


def test_a_narrow_state_breaks_where_its_numbers_end():
    steps = first_adam_step(torch.tensor([2.0**-10, 2.0**-2, 2.0**10]), 1e-8, FP16)
    assert steps.eps == 0.0
    assert steps.size[0].isinf()  # v underflows, and so does eps
    assert steps.size[1] == pytest.approx(1, rel=0.02)
    assert steps.size[2] == 0  # g squared overflows
    assert first_adam_step(torch.tensor([2.0**-10]), 1e-8, BF16).size == pytest.approx(1, rel=0.02)
    twice = (
        first_adam_step(torch.tensor([2.0**-8]), 1e-4, FP16).size
        / first_adam_step(torch.tensor([2.0**-8]), 1e-4, FP32).size
    )
    assert 1.5 < twice < 2.5
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


@pytest.mark.parametrize("kind", MAKERS)
def test_equal_scales_train_as_none_and_unequal_ones_hurt_all_but_adam(kind):
    plain, agreed, apart = train_scaled(kind, 1, 1), train_scaled(kind, 1024, 1024), train_scaled(kind, 1024, 1)
    assert agreed == plain  # powers of two are exact
    assert (apart[-1] > 2 * plain[-1]) == (kind != "Adam")
    view = loss_scale(optimizer=kind, scale=0)
    np.testing.assert_array_equal(view.numbers["losses"], apart)
    np.testing.assert_array_equal(view.numbers["agreed"], plain)
    assert " 1024 times " in view.sentence


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
    step = first_adam_step(torch.tensor(0.001), 1e-8, FP16)
    assert (float(step.moment2), step.eps, float(step.size)) == (0, 0, np.inf)
    assert WORDS["predict"]["step"]["right"] == "c"


def test_cases_of_the_task_are_sgd_with_a_master_copy():
    for (master, scaled, scale, rate), (new, shown) in WORDS["task"]["cases"]:
        assert new == pytest.approx(master - rate * scaled / scale, rel=1e-7)
        assert shown == float(np.float16(new))
