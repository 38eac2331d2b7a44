"""What no sentence, cell or label of the lessons 00 to 10 may say, whatever the controls are set to together."""

import re
from functools import cache

import matplotlib.colors
import ml_dtypes
import numpy as np
import pytest
from sentences import NARROW, in_percent, jointly, power

from mpkit.explorers.boost import BoostExplorer, CentralizeExplorer, FreezeExplorer, LessBNExplorer
from mpkit.explorers.casting import CastingExplorer, LogSoftmaxExplorer
from mpkit.explorers.evidence import NaiveRuleExplorer
from mpkit.explorers.formats import BitsExplorer, GradientsExplorer, RangesExplorer
from mpkit.explorers.optimizers import AdamStateExplorer, DecayExplorer, SchedulesExplorer
from mpkit.explorers.rounding import ModesExplorer, StaircaseExplorer, UpdatesExplorer
from mpkit.explorers.scaling import DynamicsExplorer, LiveExplorer, SweepExplorer
from mpkit.explorers.start import Run, StartExplorer
from mpkit.explorers.training import OrderExplorer, StepExplorer
from mpkit.explorers.zoo import NaiveExplorer, ZooExplorer
from mpkit.plots.boost import boost_scene, less_bn_scene
from mpkit.plots.casting import casting_scene, log_softmax_scene
from mpkit.plots.evidence import naive_rule_scene
from mpkit.plots.formats import bits_scene
from mpkit.plots.optimizers import adam_state_scene, schedules_scene
from mpkit.plots.rounding import modes_scene, staircase_scene, updates_scene
from mpkit.plots.scaling import naive_scene, sweep_scene, zoo_scene
from mpkit.plots.scene import ROLES, unpack
from mpkit.plots.start import start_scene
from mpkit.plots.static import figure

NEVER = {
    "one as many": r"(?<![\d.,/^(=-])1 (?:steps|times(?! the)|values|operations|rules|other pairs|micro-batches)\b",
    "many as one": r"(?<!\d[.,])(?<!\d)(?:0|[2-9]|\d\d+) (?:step|time|value|operation|rule)\b",
    "none of none": r"\b0 of 0\b",
    "no number": r"(?i)\bnan %|\binf %|\boff by -?(?:inf|nan)|[+-]nan",
    "minus nothing": r"-0\.0+ bits|^ [+-]0\.0+ $|[+-]0\.0 points",
    "a bound of a bound": r"at (?:most|least) (?:more|less|above|below)",
    "sure by rounding": r"probability (?:1|0)\b(?!\.|e-)",
    "nothing as something": r"the first 0\b|: 0 of .* of the others is",
}
NUMBERS = (
    "0.1",
    "0",
    "-0",
    "inf",
    "-inf",
    "nan",
    "1e400",
    "-1e400",
    "1e-400",
    "1/3",
    "2^1024",
    "65520",
    "-2.5",
    "7.75",
)
LOWER = ("0", "1", "1.5", "65504", "448", "57344", "28", "7.5", "6", "0.0625", "2^-25", "1e-400")
CASES = [
    (StartExplorer, 60, {}),
    (BitsExplorer, 60, {"number": NUMBERS}),
    (RangesExplorer, 60, {}),
    (GradientsExplorer, 60, {}),
    (ModesExplorer, 200, {"lower": LOWER, "offset": (0.0, 1e-9, 0.03125, 0.5, 0.9996, 1 - 1e-9, 1.0)}),
    (StaircaseExplorer, 60, {}),
    (UpdatesExplorer, 40, {"update": (1e-6,), "progress": (0, 1, 100)}),
    (CastingExplorer, 8, {"network": ("MLP",), "exponent": (0, 18, -20)}),
    (
        CastingExplorer,
        1,
        {"network": ("transformer block",), "level": ("O1",), "fmt": ("fp16",), "kept": (5,), "exponent": (-18,)},
    ),
    (LogSoftmaxExplorer, 60, {}),
    (DynamicsExplorer, 30, {"step": (0, 1, 15, 129, 399)}),
    (SweepExplorer, 6, {}),
    (StepExplorer, 30, {}),
    (OrderExplorer, 15, {}),
    (AdamStateExplorer, 60, {}),
    (DecayExplorer, 8, {}),
    (SchedulesExplorer, 40, {}),
    (ZooExplorer, 4, {}),
    (NaiveExplorer, 60, {}),
    (BoostExplorer, 60, {}),
    (FreezeExplorer, 60, {}),
    (LessBNExplorer, 12, {"network": ("ResNet-18", "LeNet-5")}),
    (CentralizeExplorer, 40, {}),
]


@cache
def patterns(dtype):
    """Every finite value of a format of at most 16 bits, ascending."""
    bits = ml_dtypes.finfo(dtype).bits
    with np.errstate(invalid="ignore"):
        values = np.arange(2**bits).astype(np.uint16 if bits == 16 else np.uint8).view(dtype).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def complaints(text):
    return [f"{name}: {text}" for name, pattern in NEVER.items() if re.search(pattern, text)]


@pytest.mark.parametrize(("kind", "count", "only"), CASES, ids=[kind.__name__ for kind, *_ in CASES])
def test_no_sentence_and_no_cell_says(kind, count, only):
    for model in jointly(kind(), count, **only):
        said = [model.summary(), model.stored(), *(f" {cell} " for row in model.table() for cell in row.values())]
        assert not [c for text in said for c in complaints(text)], model.state()


@pytest.mark.parametrize("steps", [1, 2])
def test_no_sentence_of_a_training_says(steps):
    run = Run("O2", "float16", [2.3] * steps, [2.0**20] * steps, list(range(steps)))
    for model in (StartExplorer(), LiveExplorer()):
        model.run = run
        assert not complaints(model.summary())
        assert "scale 2^20" in model.summary()
        assert f"{steps} step{'s' * (steps > 1)}" in model.summary()


def test_a_ceiling_drawn_where_the_run_is_broken_has_no_gradients_to_count():
    model = DynamicsExplorer(run="growing_activations", step=200)
    model.draw({"200": 30})
    assert not complaints(model.summary())
    assert model.summary().endswith("no recorded gradients, because its loss was not finite.")


def test_a_headroom_just_below_0_is_not_told_as_0():
    model = DynamicsExplorer(scale_factor=1.25, scale_window=1)
    close = [i for i, bits in enumerate(model.headroom) if -0.05 < bits < 0]
    assert close
    for step in close:
        model.step = step
        told = float(re.search(r"headroom (\S+) bits", model.summary())[1])
        assert told == pytest.approx(model.headroom[step], rel=0.2)


def test_a_held_scale_lists_the_steps_that_it_skips():
    model = DynamicsExplorer(hold=True, init_exponent=20, step=60)
    assert [row["step"] for row in model.table()] == np.flatnonzero(~model.finite[:61]).tolist()
    assert {row["decision"] for row in model.table()} == {"tolerated"}


def test_the_pictures_say_what_the_sentences_say():
    assert "LeNet-5 has no BatchNorm" in str(less_bn_scene(LessBNExplorer(network="LeNet-5")).spec())
    lost = log_softmax_scene(LogSoftmaxExplorer(fmt="e4m3fn"))
    assert "log(0), stored as NaN" in str(lost.spec())  # log(0) itself is -inf
    assert "more than 99 %" in str(modes_scene(ModesExplorer(offset=0.9996)).spec())


def test_the_sweep_frames_every_pair_that_loses_least():
    model = SweepExplorer(run="rare_outliers", init_exponent=28)
    lost = model.grids["lost"]
    assert len(model.least) == int((lost <= lost.min() + 1e-10).sum()) > 1
    assert f"{len(model.least) - 1} other pairs lose as little" in model.summary()
    marks = sweep_scene(model).spec()["panels"][0]["marks"]
    (frames,) = (mark["x0"] for mark in marks if mark.get("label") == "least training signal lost")
    assert frames == pytest.approx([column - 0.47 for _, column in model.least])


@pytest.mark.parametrize("situation", ["drop", "outliers", "fixed", "model", "free"])
def test_the_zoo_names_no_rule_for_a_number_that_others_share(situation):
    for model in jointly(ZooExplorer(), 4, situation=(situation,)):
        skipped = model.done.skipped
        for count, who in re.findall(r"(\d+) \(([^)]+)\)", model.summary().split("The rules skip", 1)[-1]):
            names = [name for name, own in zip(model.names, skipped) if own == int(count)]
            assert who == (names[0] if len(names) == 1 else f"{len(names)} rules, such as {names[0]}")
        for row, final in zip(model.table(), model.done.final):  # a rule ends nowhere below its lowest scale
            assert power(row["lowest"]) <= final * (1 + 3e-3)


@pytest.mark.parametrize("situation", ["drop", "model", "free"])
def test_no_rule_of_the_zoo_is_cut_off_where_it_would_seem_to_rest(situation):
    model = ZooExplorer(situation=situation, interval=2)
    powers = np.log2(model.scales[np.isfinite(model.scales) & (model.scales > 0)])
    y = zoo_scene(model).spec()["panels"][0]["y"]
    assert y["lo"] < powers.min() <= powers.max() < y["hi"]


@pytest.mark.parametrize("start", [-8, 0, 16])
def test_the_naive_rule_is_not_cut_off_either(start):
    model = NaiveExplorer(start_exponent=start, ceiling_exponent=24)
    y = naive_scene(model).spec()["panels"][0]["y"]
    assert y["lo"] < np.log2(model.naive.min()) <= np.log2(model.naive.max()) < y["hi"]


def test_a_plan_that_leaves_the_picture_does_not_run_along_its_edge():
    model = StartExplorer(scale_window=1, scale_factor=16)
    spec = start_scene(model).spec()
    panel = spec["panels"][1]
    (line,) = (mark for mark in panel["marks"] if mark.get("label") == "without an overflow")
    drawn, plan = np.asarray(unpack(line["y"], spec["data"])), np.log2(model.plan)
    assert np.array_equal(np.isnan(drawn), plan > panel["y"]["hi"])
    assert np.isnan(drawn).any()


def drawn(scene, panel=0):
    """The marks of a panel, their numbers unpacked."""
    spec = scene.spec()
    return [{k: unpack(v, spec["data"]) for k, v in mark.items()} for mark in spec["panels"][panel]["marks"]]


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize(("fmt", "lower"), [("fp16", "65504"), ("e4m3fn", "448"), ("e2m1", "6"), ("bf16", "1")])
def test_what_no_format_holds_is_drawn_in_the_colour_of_overflow_in_every_row(fmt, lower, negative):
    model = ModesExplorer(fmt=fmt, lower=lower, offset=0.5, negative=negative)
    row = len(model.results)
    balls = [m for m in drawn(modes_scene(model)) if m["type"] == "points" and m["y"] == [row]]
    ends = [end for end, chance in zip(model.reached, (1 - model.chance_up, model.chance_up)) if chance]
    assert [mark["color"] == "overflow" for mark in balls] == [not np.isfinite(end) for end in ends]
    for mark, end in zip(balls, ends):
        assert (0 <= mark["x"][0] <= 1) == np.isfinite(end)
    said = [
        str(m["text"]) for m in drawn(modes_scene(model)) if m["type"] == "text" and np.ravel(m["y"]).tolist() == [row]
    ]
    assert sum("inf" in words or "nan" in words for words in said) == sum(not np.isfinite(end) for end in ends)


@pytest.mark.parametrize("fmt", ["e2m1", "e2m3", "e3m2"])
def test_no_step_of_the_staircase_is_drawn_beyond_the_largest_number(fmt):
    model = StaircaseExplorer(fmt=fmt, span=6)
    (line,) = (mark for mark in drawn(staircase_scene(model), 1) if mark["type"] == "line")
    assert np.max(line["x"]) <= np.log2(model.format.max) + 1e-6


@pytest.mark.parametrize("eps", [-12, -7, -4, -1])
@pytest.mark.parametrize("fmt", ["float16", "bfloat16"])
def test_only_a_step_of_0_is_called_0_and_only_one_without_end_inf(fmt, eps):
    model = AdamStateExplorer(state_format=fmt, eps_exponent=eps)
    sizes = dict(zip(np.log2(model.gradients.numpy()).tolist(), model.narrow.size.tolist()))
    for mark in drawn(adam_state_scene(model)):
        if mark.get("label") == "no step: 0":
            assert {sizes[x] for x in np.asarray(mark["x"], float).tolist()} == {0.0}
        if mark.get("label") == "inf or NaN":
            assert not np.isfinite([sizes[x] for x in np.asarray(mark["x"], float).tolist()]).any()
    assert ("no step: 0" in str(adam_state_scene(model).spec())) == (0.0 in sizes.values())


def test_an_error_at_an_edge_says_what_it_is():
    model = CastingExplorer(network="MLP", level="O3", exponent=18)
    y = casting_scene(model).spec()["panels"][1]["y"]
    (line,) = (m for m in drawn(casting_scene(model), 1) if str(m.get("label")).endswith("at the level"))
    assert [4, "not finite"] not in y["ticks"]
    assert [3, "not finite"] in y["ticks"]
    assert y["lo"] < np.min(line["y"]) <= np.max(line["y"]) == 3 < y["hi"]


def test_a_run_of_one_step_is_seen():
    model = StartExplorer()
    model.run = Run("O2", "float16", [2.3], [2.0**16], [])
    for panel in (0, 1):
        (line,) = (mark for mark in drawn(start_scene(model), panel) if mark.get("label") == "this run")
        assert line.get("glyph") == "o"


def test_the_zoo_says_that_its_two_rules_are_some_of_those_that_differ_first():
    model = ZooExplorer()
    at, first, second = model.parting
    title = zoo_scene(model).spec()["panels"][0]["title"]
    assert title == f"rules differ first at step {at}: here are {model.names[first]} and {model.names[second]}"


def test_the_share_that_is_not_known_to_fit_is_named_in_16_bits_too():
    """float16 ends at 65520 for what is rounded to it, inside its last power of two."""
    model = GradientsExplorer(scale_exponent=30)
    inside = float(model.share[np.flatnonzero(model.exponents == 15)].sum())
    assert inside > 0
    assert f"{in_percent(inside, 1)} lie between 2^15 and 2^16, where fp16 ends" in model.summary()


def test_a_picture_shows_how_far_a_tiny_update_has_moved_the_weight():
    spec = updates_scene(UpdatesExplorer(update=1e-6, progress=2)).spec()
    (words,) = (mark for mark in spec["panels"][0]["marks"] if "exact by" in str(mark.get("text")))
    nearest, exact = (np.asarray(unpack(field, spec["data"])) for field in words["fields"])
    assert nearest[2] == 0
    assert exact[2] == pytest.approx(4e-5)


def test_a_format_that_is_said_to_have_no_value_so_near_has_none():
    numbers = ("0.1", "0", "6", "70000", "-70000", "1e400", "-1e-9", "448", "2^-14")
    for model in jointly(BitsExplorer(pinned="e5m2"), 50, number=numbers, pinned=tuple(NARROW)):
        if model.fields.value is None:
            continue
        dtype = NARROW[model.pinned]
        low, high = model.window
        every = patterns(dtype)
        inside = every[(every >= low) & (every <= high)]
        shown, stored = model.pinned_near
        assert set(shown) <= set(inside.tolist()), model.state()
        whole = len(shown) == len(inside)
        assert whole or "its nearest values" in str(bits_scene(model).spec()), model.state()
        if not whole:  # as many on each side, as far as there are any
            at = np.searchsorted(inside, min(max(model.wanted, low), high))
            assert min(at, 59) <= np.searchsorted(shown, inside[min(at, len(inside) - 1)]) <= 61, model.state()
        assert ("has no value so near" in str(bits_scene(model).spec())) == (not len(inside))
        assert stored in every


@pytest.mark.parametrize(("number", "told"), [("1e400", "off by more than 1e300"), ("-inf", "e2m1 has no inf")])
def test_a_number_beyond_every_float_ends_at_the_largest_of_a_format_without_inf(number, told):
    model = BitsExplorer(number=number, fmt="e2m1")
    assert f"{'-' * number.startswith('-')}6.0 ({told})" in model.summary()
    assert BitsExplorer(number="2^1024").value == BitsExplorer(number="1e400").value == float("inf")


def test_the_legend_of_bars_that_are_all_0_has_their_colour():
    spec = boost_scene(BoostExplorer(mode="manual")).spec()
    (legend,) = figure(spec).legends
    colours = dict(zip((text.get_text() for text in legend.get_texts()), legend.get_patches()))
    assert matplotlib.colors.to_hex(colours["this"].get_edgecolor()) == ROLES["own"][0]


@pytest.mark.parametrize("fmt", ["fp32", "tf32", "bf16"])
def test_a_region_too_narrow_for_its_name_bears_none(fmt):
    told = [str(m["text"]) for m in drawn(bits_scene(BitsExplorer(fmt=fmt)), 1) if m["type"] == "text"]
    assert told == ["['normal']"]


@pytest.mark.parametrize(("kind", "scene"), [(NaiveRuleExplorer, naive_rule_scene), (NaiveExplorer, naive_scene)])
def test_no_line_crosses_the_name_of_a_region_of_two_rules(kind, scene):
    for m in jointly(kind(), 60):
        panel = scene(m).panels[0]
        x, y = panel.given["x"], panel.given["y"]
        (name,) = [t for t in panel.marks if t["type"] == "text" and t["text"][0].startswith("below")]
        assert (float(name["x"]), float(name["y"]), name["valign"]) == (0, y["lo"], "bottom")
        wide, tall = 0.3 * (x["hi"] - x["lo"]), 0.07 * (y["hi"] - y["lo"])  # of 26 letters in 11 pixels, and more
        for line in (mark for mark in panel.marks if mark["type"] == "line"):
            at, height = (unpack(line[k], {}) for k in ("x", "y"))
            assert (height[at <= wide] > y["lo"] + tall).all(), m.state()


def test_a_schedule_that_grows_stays_in_the_picture_up_to_four_times_the_rate():
    for decay_steps, share in ((200, 1.5), (60, 3.84), (1, 4.0)):
        m = SchedulesExplorer(decay_rate=1.5, decay_steps=decay_steps)
        top = schedules_scene(m).panels[0].given["y"]["hi"] / 1.05
        assert top == pytest.approx(0.1 * share, rel=0.01)
