"""The first lesson's model and view, without a browser."""

import pytest
import torch
from scenes import look

from mpkit.explorers.start import DTYPES, StartExplorer, trained
from mpkit.scalers import DynamicLossScaler, StaticLossScaler
from mpkit.widgets.start import start_view


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_level_learns_the_digits(dtype):
    runs = [trained(level, DynamicLossScaler(2**16, 2, 50), dtype=dtype) for level in ("O0", "O2")]
    assert all(run.accuracy > 0.85 for run in runs)
    assert abs(runs[0].accuracy - runs[1].accuracy) < 0.05
    assert runs[0].losses[0] == pytest.approx(2.303, abs=0.05)  # ln 10: ten classes, nothing learnt yet


def test_the_same_seed_gives_the_same_run_and_a_static_scale_of_1_never_skips():
    first, second = (trained("O2", StaticLossScaler(1.0), dtype="bfloat16", steps=20) for _ in range(2))
    assert first == second
    assert first.skipped == []
    assert set(first.scales) == {1.0}


def test_the_plan_is_the_scale_without_overflow():
    model = StartExplorer(init_exponent=4, scale_factor=3, scale_window=100)
    assert [model.plan[i] for i in (0, 99, 100, 199, 200)] == [16, 16, 48, 48, 144]
    assert "would be multiplied 2 times" in model.summary()


def test_every_setting_changes_the_picture_and_reset_restores_it():
    view = start_view()
    first = look(view)
    for name, values in {
        "init_exponent": (0, 30),
        "scale_factor": (16, 2),
        "scale_window": (1, 240),
    }.items():
        for value in values:
            before = look(view)
            view.ask({name: value})
            assert look(view) != before or getattr(view.explorer, name) == value
    for name, value in {"level": "O3", "dtype": "bfloat16"}.items():
        view.ask({name: value})
        assert value in view.summary()
    view.press("Reset")
    assert look(view) == first


def test_training_draws_the_run_and_keeps_the_one_before():
    view = start_view()
    view.press("Train")
    view.explorer.wait(60)
    trained_once = look(view)
    assert view.explorer.run.accuracy > 0.85
    assert view.data()[0]["level"] == "O2"
    view.explorer.set(level="O0", init_exponent=0)
    view.press("Train")
    view.explorer.wait(60)
    assert look(view) != trained_once
    assert [row["run"] for row in view.data()] == ["this", "before"]
    assert "Before: O2" in view.summary()


def test_stop_ends_the_training_between_two_steps():
    view = start_view(level="O0")
    view.press("Train")
    view.press("Stop")
    view.explorer.wait(60)
    assert len(view.explorer.run.losses) < 240
    assert view.explorer.run.accuracy is None
    assert torch.isfinite(torch.tensor(view.explorer.run.losses)).all()
