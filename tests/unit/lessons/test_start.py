"""Lessons 00 and 04: the training on the digits, its steered scale, the answers of lesson 00 a second way."""

import time
from operator import itemgetter

import numpy as np
import pytest
import torch

from mpkit.formats import FP16
from mpkit.lessons.digits import Run, training
from mpkit.lessons.start import SteeredScaler, live, live_policy
from mpkit.scalers import DynamicLossScaler, StaticLossScaler, all_finite
from mpkit.view.words import words

WORDS = words("start")


@pytest.mark.slow
def test_every_level_learns_the_digits_in_both_formats():
    kinds = ("O0", "float16"), ("O2", "float16"), ("O2", "bfloat16")
    wide, *runs = ([*training(level, DynamicLossScaler(2**16, 2, 50), dtype=dtype)][-1] for level, dtype in kinds)
    assert all(run.accuracy > 0.85 for run in (wide, *runs))
    assert wide.losses[0] == pytest.approx(np.log(10), abs=0.05)  # ten classes, nothing learnt yet
    assert wide.skipped == ()  # float32 gradients are far from overflow
    assert [run.skipped == () for run in runs] == [False, True]


def test_the_same_seed_gives_the_same_run_and_a_static_scale_of_1_never_skips():
    first, second = ([*training("O2", StaticLossScaler(1.0), dtype="bfloat16", steps=20)][-1] for _ in range(2))
    assert (first, first.skipped, set(first.scales)) == (second, (), {1.0})


def test_the_first_lesson_has_no_hand_on_the_scale():
    assert set(live(hand=False).sheet.buttons) == {"Train"}
    assert "floor" in live(hand=False).sheet.idle
    assert live_policy(0, 2, 50, 10).min_scale == 1  # a floor above the start is taken for the start


def test_a_steered_scaler_follows_its_policy_and_kicks_between_steps():
    given, kicks = {"start": 16, "factor": 2, "window": 2, "floor": 0}, [0]
    scaler = SteeredScaler(lambda: live_policy(**given), lambda: kicks[0])
    seen = []
    for step, finite in enumerate([True, True, True, False, True, True, True, True, True]):
        kicks[0] = -10 if step >= 2 else 0
        given |= {"factor": 4 if step >= 3 else 2, "window": 9 if step in (6, 7) else 2}  # lowered, it is full
        scaler.adjust(torch.tensor(finite))
        seen.append(float(scaler.scale_value))
    assert seen == [2.0**16, 2.0**17, 2.0**7, 2.0**5, 2.0**5, 2.0**7, 2.0**7, 2.0**7, 2.0**9]


def test_what_was_moved_before_the_first_step_counts_and_is_told():
    scaler = SteeredScaler(lambda: live_policy(16, 2, 240, 0), lambda: -40)
    for _ in range(2):
        scaler.adjust(torch.tensor(True))
        assert scaler.scale_value == 2.0**-24
    view = live()
    for _ in range(4):
        view.press("Scale / 2^10")
    assert "moved by hand by 2^-40" in view.sentence


@pytest.mark.slow
def test_a_training_is_steered_stops_and_keeps_the_run_before():
    view = live(window=10, steps=30)
    view.press("Train")
    with pytest.raises(ValueError, match="Stop"):
        view.press("Train")
    view.wait(60)
    first = view.numbers["run"]
    assert len(first.losses) == 30
    assert first.accuracy is not None
    assert first.losses[-1] < first.losses[0]
    assert "30 steps" in view.sentence
    view.set(level="O0", steps=2000)
    view.press("Train")
    with pytest.raises(ValueError, match="scale_factor"):
        view.set(factor=1.01)
    while not view.progress:
        time.sleep(0.01)
    assert "1.01" in view.message  # the training goes on, and leaves it
    for refused in ({"level": "O3"}, {"window": 5, "start": 30}):  # it has begun with another one
        with pytest.raises(ValueError, match="Stop"):
            view.set(**refused)
    view.press("Scale / 2^10")
    view.press("window 200")  # this alone; what was moved by hand stays
    settings = itemgetter("level", "start", "window", "kicks")
    assert (settings(view.params), view.message) == (("O0", 16, 200, -10), "")
    view.press("Reset")
    assert (settings(view.params), "Stop" in view.message) == (("O0", 16, 10, 0), True)
    view.press("Stop")
    view.wait(60)
    assert view.numbers["before"] == first
    assert view.numbers["run"] is None or view.numbers["run"].accuracy is None


def test_a_run_of_nan_and_a_scale_beyond_the_axis_are_drawn():
    broken = Run("O3", "float16", [float("nan"), 1e9] * 130, [1.0, 2.0**60] * 130, [1, 250])
    view = live()
    view.set(run=broken)
    assert "260 steps" in view.sentence
    assert view.png()


def test_answers_a_second_way():
    asked = {name: q["truth"] for name, q in WORDS["question"].items()}
    assert (asked["largest"], asked["after"]) == (FP16.max / 1024, 2**14 * 2 / 2**3)
    assert asked["weights"] == 10**6 * torch.float32.itemsize
    assert torch.tensor(2.0 * 65536).half().isinf()
    assert WORDS["predict"]["overflow"]["right"] == "b"


def test_cases_of_the_task_are_the_scaler():
    for (gradients, scale), (applied, after) in WORDS["task"]["cases"]:
        scaler = DynamicLossScaler(scale, 2, 50)
        finite = all_finite([(torch.tensor(gradients) * scale).half()])
        scaler.adjust(finite)
        assert (bool(finite), float(scaler.scale_value)) == (applied, after)
