"""The models and views of lessons 09 and 10, without a browser."""

from __future__ import annotations

import threading
from importlib import import_module
from typing import Any

import pytest
from scenes import look

from mpkit.check import verdict
from mpkit.explorers.boost import (
    CYCLE,
    FREEZE_STEPS,
    LAYERS,
    NETWORKS,
    PARTS,
    BoostExplorer,
    CentralizeExplorer,
    FreezeExplorer,
    LessBNExplorer,
    blocks_reached,
    first_steps,
    measured,
    relative_time,
)
from mpkit.plots.boost import _rows, boost_scene, speedups
from mpkit.widgets.boost import boost_view, centralize_view, freeze_view, less_bn_view
from mpkit.widgets.scene import View

SWEEPS: dict[Any, dict[str, list[Any]]] = {
    boost_view: {
        "level": ["O0", "O1", "O2"],
        "mode": ["manual", "enable_all", "disable_all", "tuned", "auto"],
        "full_step_fraction": [0.0, 1.0, 0.7],
        "freeze_type": [0, 1],
        "compare": ["O1 tuned", "none"],
        "beside": ["freezing", "O1"],
        "less_bn": [True, False],
        "grad_freeze": [True, False],
        "adasum": [True, False],
        "grad_accumulation": [True, False],
    },
    freeze_view: {
        "groups": [1, 21, 10],
        "freeze_type": [0, 1],
        "full_step_fraction": [0.0, 1.0, 0.7],
        "seed": [0, 99],
        "step": [0, FREEZE_STEPS - 1],
    },
    less_bn_view: {"network": list(NETWORKS)[::-1], "fn_flag": [True, False], "faithful": [True, False]},
    centralize_view: {"layer": list(LAYERS), "output": [9, 0], "centralize": [False, True]},
}


@pytest.mark.parametrize("make", SWEEPS, ids=lambda f: f.__name__)
def test_every_control_over_its_range_draws_and_reset_restores(make: Any) -> None:
    view: View = make()
    first = look(view)
    for name, values in SWEEPS[make].items():
        for value in values:
            view.explorer.set(**{name: value})
            assert view.summary()
            assert view.data()
    view.press("Reset")
    assert look(view) == first
    assert look(make()) == first


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (boost_view, {"mode": "tuned"}),
        (boost_view, {"compare": "freezing"}),
        (boost_view, {"beside": "freezing"}),
        (freeze_view, {"step": 50}),
        (freeze_view, {"seed": 1}),
        (less_bn_view, {"network": "ResNet-50"}),
        (less_bn_view, {"fn_flag": True}),
        (centralize_view, {"centralize": False}),
        (centralize_view, {"output": 3}),
    ],
)
def test_other_data_give_another_picture(make: Any, change: dict[str, Any]) -> None:
    view: View = make()
    before = look(view), view.summary()
    view.explorer.set(**change)
    assert look(view) != before[0]
    assert view.summary() != before[1]


@pytest.mark.parametrize(
    ("explorer", "bad"),
    [
        (BoostExplorer, {"level": "O7"}),
        (BoostExplorer, {"full_step_fraction": 1.1}),
        (FreezeExplorer, {"groups": 0}),
        (FreezeExplorer, {"step": FREEZE_STEPS}),
        (LessBNExplorer, {"network": "VGG"}),
        (CentralizeExplorer, {"output": 6}),  # conv1 has six outputs, 0 to 5
    ],
)
def test_refused_values_leave_everything_as_it_was(explorer: Any, bad: dict[str, Any]) -> None:
    model = explorer()
    state = model.state()
    with pytest.raises(ValueError, match=next(iter(bad)) if "output" not in bad else "has 6 outputs"):
        model.set(**bad)
    assert model.state() == state
    assert model.message


def test_controls_that_change_nothing_are_idle() -> None:
    for freeze_type, idle in ((0, ("seed",)), (1, ())):
        runs = [FreezeExplorer(freeze_type=freeze_type, seed=seed) for seed in (1, 2)]
        assert (runs[0].sequence == runs[1].sequence) == bool(idle)
        assert runs[0].idle() == idle
    assert set(BoostExplorer(mode="manual", grad_freeze=True).idle()) == set()
    assert {"less_bn", "freeze_type"} <= set(BoostExplorer(level="O0").idle())


def test_two_threads_never_tear_a_picture() -> None:
    view = freeze_view()
    wanted = {}
    for step in range(4):
        view.explorer.set(step=step)
        wanted[step] = look(view)

    def drag() -> None:
        for i in range(20):
            view.explorer.set(step=i % 4)

    threads = [threading.Thread(target=drag) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert look(view) == wanted[view.explorer.step]


# what the models say


def test_levels_say_what_runs_and_what_does_not() -> None:
    model = BoostExplorer(level="O2")
    assert model.this.active == ("less_bn", "grad_freeze")
    assert "Inactive: adasum" in model.summary()
    assert BoostExplorer(level="O0").this.speedup == pytest.approx(1.0)
    manual = BoostExplorer(level="O0", mode="manual", less_bn=True)
    assert manual.this.active == ("less_bn",)
    assert manual.this.removed == 11
    assert "runs nothing" in BoostExplorer(mode="disable_all").summary()


def test_the_step_is_the_measured_one_and_mixes_over_the_indices() -> None:
    model = BoostExplorer(full_step_fraction=1.0)  # nothing is frozen: this is less_bn, which was measured
    assert model.this.step == pytest.approx(relative_time("less_bn"))
    half = BoostExplorer(mode="manual", level="O0", grad_freeze=True, full_step_fraction=0.0, freeze_type=0)
    every = sum(relative_time(f"plain index {v}") for v in range(1, 10)) / 9
    assert half.this.step == pytest.approx(every)


def test_two_configurations_are_taken_apart_step_by_step() -> None:
    view = boost_view()
    for name in ("O1", "O1 tuned", "O1 tuned"):
        view.ask({"compare_with": name})
    model = view.explorer
    assert isinstance(model, BoostExplorer)
    assert (model.beside, model.compare) == ("O1", "O1 tuned")
    o1, tuned = model.rows
    assert tuned.indices == (*[0] * 9, *range(1, 10))
    for row in (o1, tuned):
        took = [relative_time(f"O1 index {v}") for v in row.indices]
        assert row.parts.sum(1) == pytest.approx(took)
        assert row.total == pytest.approx(sum(took))
    none = first_steps("none")
    norms = PARTS.index("batch_norm")
    assert o1.parts[0, norms] < 0.8 * none.parts[0, norms]  # 11 of 20 BatchNorms are gone
    backward = PARTS.index("backward")
    assert tuned.parts[17, backward] < 0.2 * tuned.parts[0, backward]  # nine of ten groups stand still
    assert f"{CYCLE} steps of O1 tuned take as long as {tuned.total:.1f} steps without boost" in view.summary()


def test_nothing_is_compared_with_itself() -> None:
    """The first 18 steps of none took as long as 18.0 steps without boost, and O1 was compared with O1."""
    model = BoostExplorer(compare="O1", beside="none")
    told = model.summary()
    assert "BatchNorms take 11 % of a step without boost." in told
    assert "steps of none" not in told
    assert told.count("speed-up") == 1
    assert "the speed-up of O1 is 1.19" in BoostExplorer(mode="tuned", compare="O1").summary()
    assert "the speed-up of none" not in BoostExplorer(mode="tuned", compare="none").summary()
    words = [str(t) for p in boost_scene(model).spec()["panels"] for m in p["marks"] for t in m.get("text", ())]
    assert [t for t in words if t.startswith("18 ")] == ["18 steps", "18 take 14.9"]


def test_a_mark_of_a_promise_bears_the_promised_number() -> None:
    """1.17, the measured speed-up of O2, stood beside the mark of the promised 1.30."""
    rows = [{"contender": "O2", "ratio": 1.17, "quartiles": [1.1, 1.23]}]
    marks = speedups(rows, {"O2": 1.3}).spec()["panels"][0]["marks"]
    at = {mark["text"][0]: mark["x"] for mark in marks if mark["type"] == "text"}
    assert at == {"1.17": 0.0, "promised 1.30": 1.3}


def test_accuracy_is_only_stated_where_it_was_measured() -> None:
    assert "accuracy on the digits is" in BoostExplorer().summary()
    assert "accuracy on the digits is" in BoostExplorer(mode="tuned").summary()
    assert "was not measured" in BoostExplorer(full_step_fraction=0.45).summary()


def test_the_stored_benchmark_names_its_device_and_versions() -> None:
    meta = measured()["meta"]
    assert meta["made_by"].startswith("python -m mpkit.bench")
    assert any("torch" in key for key in meta)
    assert all(row["ratio"] > 0 for row in measured()["speed"])
    seeds = {len(row["accuracy_percent"]) for row in measured()["accuracy"]}
    assert min(seeds) >= 5


def test_the_timeline_counts_what_the_strategy_says() -> None:
    model = FreezeExplorer(groups=10, full_step_fraction=0.5, freeze_type=0)
    assert [row["index"] for row in model.table()] == model.sequence
    model.set(step=model.sequence.index(9))
    assert model.frozen_now == 18
    assert model.saved[model.step] == pytest.approx(sum(model.costs[:18]) / sum(model.costs))
    assert FreezeExplorer(groups=1).formula == 0
    assert "saves 0 % of its backward work" in FreezeExplorer(full_step_fraction=1.0).summary()


def test_a_frozen_prefix_hears_no_gradient() -> None:
    assert len(blocks_reached(0)) == 8
    assert blocks_reached(9) == ["layer4.1"]


def test_centralization_takes_the_mean_and_keeps_the_rest() -> None:
    model = CentralizeExplorer()
    assert abs(float(model.used.mean(1).abs().max())) < 1e-8
    assert model.norm_ratio < 1
    model.set(centralize=False)
    assert model.norm_ratio == 1


@pytest.mark.parametrize("lesson", ["09", "10"])
def test_questions_know_their_answers(lesson: str) -> None:
    questions = import_module(f"mpkit.check.lesson_{lesson}").QUESTIONS
    assert len(questions) == 4
    for name, question in questions.items():
        assert verdict(lesson, name, question.truth())[0] is True
        assert verdict(lesson, name, "nonsense")[0] is False
        for wrong, sentence in question.hints:
            assert verdict(lesson, name, wrong) == (False, "Not yet. " + sentence)


def test_a_network_without_one_graph_is_refused_by_a_faithful_rule_with_the_way_out() -> None:
    model = LessBNExplorer(network="LeNet-5")
    with pytest.raises(ValueError, match=r"in LeNet-5: .*; untick faithful, or choose another network"):
        model.set(faithful=True)
    assert not model.faithful
    assert model.message.endswith("choose another network")


@pytest.mark.parametrize("network", NETWORKS)
def test_a_frame_holds_a_whole_block(network: str) -> None:
    """The lesson says of a frame what it says of a block: no block is parted between two rows."""
    layers = LessBNExplorer(network=network).layers
    rows = _rows(layers)
    assert [layer for row in rows for layer in row] == layers
    blocks = [{name for name, _ in map(_split, row)} for row in rows]
    assert all(not a & b for i, a in enumerate(blocks) for b in blocks[:i])
    assert max(map(len, rows)) <= 32


def _split(layer: tuple[str, str]) -> tuple[str, str]:
    """The block of a layer, as `layer2.0` or `features.7`, and its kind."""
    parts = layer[0].split(".")
    return ".".join(parts[:2]), layer[1]


def test_a_speed_that_nobody_measured_is_not_told() -> None:
    model = BoostExplorer(mode="enable_all")  # runs dim_reduce
    assert "Its speed was not measured. Its accuracy was not measured." in model.summary()
    assert model.table()[0]["speed-up"] == "not measured"
    assert _drawn_speeds(model) == []
    model.set(mode="auto")
    assert _drawn_speeds(model) == ["this: 1.19"]


def _drawn_speeds(model: BoostExplorer) -> list[str]:
    marks = (mark for panel in boost_scene(model).spec()["panels"] for mark in panel["marks"])
    return [text for mark in marks for text in mark.get("text", ()) if str(text).startswith("this: ")]
