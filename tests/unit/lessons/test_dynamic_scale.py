"""Lesson 04: the numbers of its views by laws and by hand, its answers a second way."""

import json

import numpy as np
import pytest
import torch

from mpkit.data import data_dir
from mpkit.lessons.dynamic_scale import SKIPPED, dynamics, load_run, recorded, sweep
from mpkit.policies import preset, run
from mpkit.scalers import DynamicLossScaler
from mpkit.view.words import words

WORDS = words("dynamic_scale")


def by_hand(ceiling, start, factor, window, floor):
    """The rule as the lesson's table tells it."""
    scale, count, used = 2.0**start, 0, []
    for top in ceiling:
        used.append(scale)
        count = count + 1 if scale <= top else 0
        if scale > top:
            scale = max(2.0**floor, scale / factor)
        elif count == window:
            scale, count = scale * factor, 0
    return used


@pytest.mark.parametrize("name", ["gpt_sums", "mlp_digits", "rare_outliers", "growing_activations"])
@pytest.mark.parametrize(("start", "factor", "window", "floor"), [(24, 2, 50, 0), (16, 4, 1, 3), (32, 1.25, 400, -24)])
def test_the_scale_follows_the_rule_of_the_table(name, start, factor, window, floor):
    seen = dynamics(run=name, start=start, factor=factor, window=window, floor=floor).numbers
    want = by_hand(seen["ceiling"], start, factor, window, floor)
    np.testing.assert_allclose(seen["scale"], want, rtol=1e-6)
    assert (seen["finite"] == (seen["scale"] <= seen["ceiling"])).all()


def test_what_the_lesson_says_of_the_search():
    seen = dynamics(run="gpt_sums", start=24, window=50).numbers
    assert (~seen["finite"][:5]).all()
    assert seen["finite"][5]
    assert "grew" in seen["reasons"][:110]
    assert seen["scale"][:110].min() > 1
    assert WORDS["predict"]["search"]["right"] == "b"


def test_smaller_windows_skip_more_and_leave_less_headroom():
    skipped, room = [], []
    for window in (400, 200, 100, 50, 20, 10, 5):
        seen = dynamics(run="gpt_sums", start=16, window=window).numbers
        skipped.append((~seen["finite"]).sum())
        room.append(seen["headroom"][seen["finite"]].mean())
    assert (skipped, room) == (sorted(skipped), sorted(room, reverse=True))
    grids = sweep(run="gpt_sums").numbers
    assert (grids["skipped"][:, 0] > grids["skipped"][:, -1]).all()
    assert grids["skipped"][2, 4] == pytest.approx((~dynamics(start=16).numbers["finite"]).mean())


def test_what_the_lesson_says_of_huge_batches_and_of_a_broken_run():
    starved = dynamics(run="rare_outliers", start=16, floor=-24, window=400).numbers
    assert (starved["zeros"][-20:] > 0.9).sum() > 10
    assert starved["finite"][-10:].all()
    fed = dynamics(run="rare_outliers", start=16, floor=-24, window=10).numbers
    assert (np.abs(fed["zeros"][-20:] - 0.25) < 0.05).all()
    broken = dynamics(run="growing_activations", start=16)
    assert not broken.numbers["finite"][129:].any()
    assert np.isnan(broken.numbers["zeros"][200])
    assert run(preset("mpkit", growth_interval=50), broken.numbers["finite"]).raised_at > 129
    assert "no scale helps" in broken.sentence


def test_what_is_drawn_and_put_counts_and_undo_forgets_it():
    view = dynamics(run="mlp_digits", start=14, window=400)
    view.set(drawn={"200": 3.0, "900": 5.0, "-1": 2.0})
    assert view.params["drawn"] == {200: 3.0}
    assert np.flatnonzero(~view.numbers["finite"]).tolist() == [200]
    view.set(puts={"300": 10})
    assert view.numbers["scale"][300] == 2.0**10
    view.press("Undo drawing")
    assert view.params["drawn"] == view.params["puts"] == {}


def test_a_floor_above_the_start_is_refused():
    with pytest.raises(ValueError, match="must not lie above the start"):
        dynamics(floor=10, start=3)


def test_the_cells_that_tell_the_least_loss_are_framed():
    seen = sweep()
    marks = [m for p in seen.sheet.panels for m in p.marks]
    assert len(next(m for m in marks if m.get("names"))["text"]) == seen.numbers["lost"].size == 49
    framed = next(m for m in marks if m.get("label") == "least training signal lost")
    assert len(framed["x0"]) == (np.round(seen.numbers["lost"], 1) == round(seen.numbers["lost"].min(), 1)).sum()
    time = sweep(run="rare_outliers", figure="time")  # the least time is that of most pairs
    assert not any(m.get("edge") for p in time.sheet.panels for m in p.marks)
    assert "frame" not in time.sentence


def test_a_trace_of_ones_own_is_loaded_by_path(tmp_path):
    load_run("mnist_lenet").before(50).save(tmp_path / "mine.npz")  # it holds the gradients of every second step
    view = dynamics(own=str(tmp_path / "mine.npz"))
    assert len(view.numbers["scale"]) == len(view.numbers["zeros"]) == 50
    assert np.isfinite(view.numbers["zeros"]).all()
    assert "mine" in view.sentence
    assert "mine" in sweep(own=str(tmp_path / "mine.npz")).sentence
    (tmp_path / "broken.npz").write_bytes(b"no trace")
    for wrong, said in ((str(tmp_path / "broken.npz"), "damaged"), ("nowhere", "path")):
        with pytest.raises(ValueError, match=said):
            view.set(own=wrong)
    assert len(view.numbers["scale"]) == 50


def test_answers_a_second_way():
    asked = {name: q["truth"] for name, q in WORDS["question"].items()}
    scale, count = 1024, 0
    for finite in (True, True, False, True, True):
        count = count + 1 if finite else 0
        scale = scale * 2 if count == 3 else scale if finite else scale // 2
    skips = sum(not ok for ok in [True, True, True, True, False] * 20)
    assert asked == asked | {"sequence": scale, "descent": 24 - 10, "window": skips, "floor": (10 - 4) + 1}


def test_cases_of_the_task_are_the_scaler():
    scaler = DynamicLossScaler(8.0, 2, 3)
    for (scale, count, finite), (after, counted) in WORDS["task"]["cases"]:
        assert (scaler.scale_value.item(), scaler.counter.item()) == (scale, count)
        scaler.adjust(torch.tensor(finite))
        assert (scaler.scale_value.item(), scaler.counter.item()) == (after, counted)


def test_what_a_skipped_step_costs_and_which_layer_makes_a_dip():
    rows = json.loads((data_dir() / "benchmarks" / "boost.json").read_text())["blocks"]["rows"]
    row = next(r for r in rows if (r["network"], r["index"]) == ("plain", 0))
    parts = [row[name] for name in ("forward", "batch_norm", "backward", "update")]
    assert pytest.approx(1 - row["update"] / sum(parts), abs=1e-3) == SKIPPED
    grids = sweep(figure="time").numbers
    assert (grids["time"] <= 100 * grids["skipped"]).all()
    assert (grids["time"][grids["skipped"] > 0] > 0).all()
    seen, trace = dynamics().numbers, recorded("gpt_sums")[0]
    dip = int(seen["ceiling"].argmin())
    largest = dict(zip(trace.gradients.names, trace.gradients.largest[dip]))
    assert largest[seen["layers"][dip]] == max(largest.values())


def test_what_learning_rate_and_batch_do_to_the_ceiling():
    plain, rate, batch = (np.log2(recorded(run)[1]) for run in ("mlp_digits", "mlp_digits_rate", "mlp_digits_batch"))
    assert np.median(plain) - np.median(rate) > 1
    assert np.median(plain) - np.median(batch) > 2
