"""Predictions and tasks of all lessons: right passes, wrong is told why, nothing is said before an answer."""

import json
import math
import re
import statistics
import struct
from importlib import import_module

import numpy as np
import pytest
import torch
from support import ROOT

from mpkit import check
from mpkit.casting import get_black_list
from mpkit.check.names import names_used
from mpkit.check.prediction import Prediction
from mpkit.data import data_dir
from mpkit.policies import ScalePolicy
from mpkit.record import Trace
from mpkit.replay import replay
from mpkit.widgets.commit import Commit

LESSONS = sorted(path.stem[-2:] for path in (ROOT / "mpkit" / "check").glob("lesson_*.py"))


PREDICTIONS = [(n, name) for n in LESSONS for name in import_module(f"mpkit.check.lesson_{n}").PREDICTIONS]


# what was found by other means than the computation in `mpkit.check`
TRUTHS = {
    ("00", "overflow"): "b",  # 2 * 65536 > 65504
    ("01", "tenth"): "b",
    ("01", "last_bit"): "c",
    ("02", "tie"): "b",  # 2048 = 1024 * 2, and 1024 is even
    ("03", "norm"): "c",
    ("04", "zero"): "c",
    ("05", "search"): "b",
    ("06", "inf"): "b",
    ("07", "step"): "c",  # v and eps are below half of 2^-24
    ("08", "drop"): "b",
    ("08", "naive"): "c",  # 1 < 2.3, so it shrinks, and below 2.3 it goes on shrinking
    ("09", "alone"): "b",
    ("10", "share"): "b",  # 1 - 0.7
    ("10", "rule"): "b",
    ("11", "directions"): "a",
    ("12", "rule"): "b",
    ("13", "fate"): "b",
    ("14", "scale"): "a",
    ("14", "format"): "b",
    ("15", "window"): "c",
    ("15", "start"): "b",
    ("17", "clipped"): "c",
    ("18", "beside"): "c",
    ("18", "next_block"): "a",
    ("19", "apart"): "b",
    ("20", "differs"): "b",
    ("21", "decay"): "b",
}


def test_every_prediction_is_known_here():
    assert set(PREDICTIONS) == set(TRUTHS)


def test_a_prediction_says_that_it_computes_while_it_does():
    said = []
    slow = Prediction("?", [("yes", "Because."), ("no", "Since.")], lambda: said.append(widget.status.value) or "a")
    widget = Commit(slow)
    widget.choose("a")
    assert "One moment" in said[0]
    assert "You predicted (a), and so it is. Because." in widget.status.value


@pytest.mark.parametrize(("lesson", "name"), PREDICTIONS, ids="-".join)
def test_a_prediction_tells_nothing_before_it_is_made_and_the_truth_after(lesson, name):
    widget = check.predict(lesson, name)
    truth = TRUTHS[lesson, name]
    asked = repr(widget)
    assert asked.startswith("Predict: ")
    assert widget._repr_mimebundle_()["text/plain"] == asked
    for letter, (text, word) in zip("abcd", widget.prediction.choices):
        assert f"({letter}) {text}" in asked
        assert word not in asked
    assert widget.status.value == ""
    wrong = next(letter for letter in widget.buttons if letter != truth)
    widget.buttons[wrong].click()
    assert "something else" in widget.status.value
    widget.buttons[truth].click()
    assert f"Your prediction was ({wrong})" in widget.status.value
    assert f"Of ({truth}): right" in widget.status.value
    again = check.predict(lesson, name)
    again.buttons[truth].click()
    assert f"You predicted ({truth}), and so it is." in again.status.value


NAMED = [("03", "black"), ("08", "below"), ("09", "active"), ("12", "sizes"), ("21", "decayed")]


@pytest.mark.parametrize(("lesson", "name"), NAMED)
def test_the_right_names_in_another_order_are_right(lesson, name):
    truth = import_module(f"mpkit.check.lesson_{lesson}").QUESTIONS[name].truth()
    assert len(truth) > 1
    assert check.verdict(lesson, name, truth[::-1])[0]
    assert check.verdict(lesson, name, tuple(truth))[0]
    assert not check.verdict(lesson, name, [*truth, truth[0]])[0]
    assert not check.verdict(lesson, name, [truth[0], *truth[:-1]])[0]
    assert not check.verdict(lesson, name, truth[:-1])[0]


# right, though not in the form that one would expect
UNUSUAL = [
    ("00", "largest", 63.97),
    ("00", "largest", torch.finfo(torch.float16).max / 1024),
    ("00", "largest", "65504/1024"),
    ("00", "weights", "4000000"),
    ("00", "weights", 4e6),
    ("00", "weights", "4,000,000"),  # as lessons write large numbers
    ("00", "weights", "4_000_000"),
    ("00", "after", "2**(12)"),
    ("01", "smallest", 1.22e-4),
    ("01", "smallest", "2⁻¹³"),  # as powers stand in the text of the lesson
    ("01", "smallest", "2^(-13)"),
    ("04", "edge", "−17"),
    ("01", "pattern", "0xC000"),
    ("01", "pattern", "0b1100000000000000"),
    ("01", "pattern", "'0xc000'."),  # as a name may be written
    ("01", "smallest", '"2^-13"'),
    ("01", "smallest", "2^{-13}"),
    ("01", "smallest", "2.0**-13."),
    ("01", "smallest", "1.22·10⁻⁴"),  # as lessons write small numbers
    ("01", "smallest", "1.22 x 10^-4"),
    ("05", "sequence", "0.5 * 2**10"),
    ("10", "saving", "'11 %'"),
    ("02", "mean", ".25"),
    ("01", "pattern", "49,152"),
    ("01", "beyond", "28"),
    ("01", "beyond", np.float16(28)),
    ("02", "lost", 0.0156),
    ("02", "tie", torch.tensor(4102.0).half()),
    ("03", "bias", torch.float32),
    ("03", "bias", "torch.float32"),
    ("03", "bias", "'float32'"),
    ("03", "black", [torch.nn.BatchNorm1d, torch.nn.LayerNorm]),
    ("03", "black", {torch.nn.LayerNorm, torch.nn.BatchNorm1d}),
    ("03", "black", "LayerNorm, BatchNorm1d"),
    ("04", "forward", "False"),
    ("04", "forward", np.bool_(False)),
    ("15", "collapse", torch.tensor(False)),
    ("14", "largest", "2²⁵"),
    ("14", "wider", "'healthy'."),
    ("16", "position", np.float32(0.8)),
    ("16", "position", torch.tensor([0.8])),
    ("16", "half", "7.9989e-5"),
    ("20", "interval", "not_distinguishable"),
    ("20", "interval", ["Not-distinguishable."]),
    ("20", "chance", "64 %"),
    ("20", "better", "['centralized']"),
    ("18", "zeros", torch.tensor([[22]])),
    ("21", "warmup", torch.tensor(0.3)),
    ("09", "active", np.array(["less_bn", "grad_accumulation"])),
    ("09", "active", "['grad_accumulation', 'less_bn']"),
    ("08", "below", "mpkit; deepspeed flax mxnet apex"),
    ("09", "active", "less_bn and grad_accumulation"),
    ("09", "active", {"less_bn": True, "grad_accumulation": 4, "adasum": False}),
    ("08", "below", [(name, "2^24") for name in ("flax", "apex", "mpkit", "mxnet", "deepspeed")]),
    ("12", "sizes", {32: "yes", 64: "yes"}),
    ("06", "clip", 6.1e-5),  # 2^-14, to two digits
    ("06", "clip", 6.2e-5),
]


@pytest.mark.parametrize(("lesson", "name", "value"), UNUSUAL)
def test_an_answer_to_these_lessons_is_right_in_any_form(lesson, name, value):
    assert check.verdict(lesson, name, value)[0] is True


WRONG_FORMS = [
    ("03", "bias", torch.float16),
    ("00", "largest", "many"),
    ("00", "largest", True),
    ("00", "largest", 64),
    ("00", "weights", "40,00,000"),
    ("01", "smallest", 2**-14),
    ("01", "smallest", "2^(-13"),
    ("01", "smallest", "⁻¹³"),
    ("01", "pattern", "0xzz"),
    ("01", "pattern", "0b12"),
    ("01", "smallest", "2^{-13)"),
    ("01", "smallest", "."),
    ("02", "mean", "25"),  # not ".25"
    ("05", "sequence", "2*5**2*10"),
    ("01", "beyond", math.inf),
    ("02", "lost", 0.0039),
    ("03", "black", [torch.nn.LayerNorm]),
    ("03", "black", get_black_list()),
    ("04", "forward", 0),
    ("04", "forward", "True"),
    ("08", "back", "inf"),
    ("09", "active", {"less_bn", "grad_accumulation", "adasum"}),
    ("06", "clip", 2**-13),
    ("06", "clip", 6.3e-5),
    ("14", "wider", "not healthy"),
    ("09", "active", [("less_bn", True), ("adasum", True)]),
    ("09", "active", {"less_bn": False, "grad_accumulation": True}),
    ("09", "active", [("grad_accumulation", "on", 4), ("less_bn", "on", 1)]),
]


@pytest.mark.parametrize(("lesson", "name", "value"), WRONG_FORMS)
def test_a_wrong_answer_is_wrong_in_any_form(lesson, name, value):
    assert check.verdict(lesson, name, value)[0] is False


def test_the_order_of_verdicts_counts():
    truth = import_module("mpkit.check.lesson_16").QUESTIONS["verdicts"].truth()
    assert check.verdict("16", "verdicts", truth)[0]
    assert not check.verdict("16", "verdicts", sorted(truth))[0]


def test_bad_names_are_refused():
    with pytest.raises(ValueError, match="lesson 05 has the predictions search, got 'nothing'"):
        check.predict("05", "nothing")
    with pytest.raises(ValueError, match="no lesson '99'"):
        check.predict("99", "search")
    with pytest.raises(ValueError, match="the answers are a, b, c, got 'z'"):
        check.predict("05", "search").choose("z")
    with pytest.raises(TypeError, match="the function that you wrote"):
        check.judge("05", 3)


def decide(gradients, scale):
    finite = all(abs(g * scale) <= 65504 for g in gradients)
    return finite, scale if finite else scale / 2


def decode(sign, exponent, fraction):
    if exponent == 31:
        value = math.inf if fraction == 0 else math.nan
    elif exponent == 0:
        value = 2.0**-14 * fraction / 1024
    else:
        value = 2.0 ** (exponent - 15) * (1 + fraction / 1024)
    return -value if sign else value


def width(layer, level):
    low = {"O0": (), "O1": ("linear", "relu"), "O2": ("linear", "relu", "softmax")}
    return 16 if layer in low.get(level, ("linear", "relu", "softmax", "batch_norm")) else 32


def after(scale, counter, finite):
    if not finite:
        return max(scale / 2, 1.0), 0
    return (scale * 2, 0) if counter + 1 == 3 else (scale, counter + 1)


def usable(scaled, scale, max_norm):
    true = [g / scale for g in scaled]
    norm = math.sqrt(sum(g * g for g in true))
    return [g * min(1, max_norm / norm) for g in true]


def usable_late(scaled, scale, max_norm):
    norm = math.sqrt(sum(g * g for g in scaled))
    return [g * min(1, max_norm / norm) / scale for g in scaled]


def half(x):
    return struct.unpack("e", struct.pack("e", x))[0]


def updated(master, scaled, scale, rate):
    master -= rate * scaled / scale
    return master, half(master)


def patient(scale, credit, overflow):
    if not overflow:
        return scale, credit
    left = max(credit - 1, 0)
    return (scale, left) if left else (scale / 2, 0)


def centralize(gradient):
    return [[v - statistics.fmean(row) for v in row] for row in gradient]


def inside(rows, step):
    parts = [sum(a * b for a, b in zip(row, step)) for row in rows]
    return [sum(part * row[i] for part, row in zip(parts, rows)) for i in range(len(step))]


def adasum(a, b):
    d, aa, bb = (sum(x * y for x, y in zip(u, v)) for u, v in ((a, b), (a, a), (b, b)))
    return [(1 - d / (2 * aa)) * x + (1 - d / (2 * bb)) * y for x, y in zip(a, b)]


def first_bad(heard):
    return next((name for name, out in heard if not all(map(math.isfinite, out))), "")


def replayed(ceilings, scale, window):
    count = skipped = 0
    for ceiling in ceilings:
        if scale > ceiling:
            skipped, count, scale = skipped + 1, 0, max(scale / 2, 1)
        else:
            count += 1
            if count == window:
                scale, count = scale * 2, 0
    return skipped


def interval(base, other):
    d = [b - a for a, b in zip(base, other)]
    half = 2.7764 * statistics.stdev(d) / 5**0.5
    return statistics.fmean(d) - half, statistics.fmean(d) + half


# lesson -> (a right solution, a typical wrong one)
def stays_high(name, layer):
    return name.startswith("h.1.") or bool(layer.in_features % 16 or layer.out_features % 16)


def trapeze(step, peak, warmup, total):
    if step < warmup:
        return peak * step / warmup
    return peak * max(0, total - step) / (total - warmup)


SOLUTIONS = {
    "00": (decide, lambda gradients, scale: (all(abs(g) <= 65504 for g in gradients), scale)),
    "01": (decode, lambda s, e, f: (-1) ** s * 2.0 ** (e - 15) * (1 + f / 1024)),
    "02": (lambda x: 2 * round(x / 2), lambda x: 2 * math.floor(x / 2 + 0.5)),
    "03": (width, lambda layer, level: 16 if level in ("O2", "O3") else 32),
    "04": (lambda v: math.floor(math.log2(65504 / v)), lambda v: round(math.log2(65536 / v))),
    "05": (after, lambda s, c, finite: (s * 2, 0) if finite else (s / 2, 0)),
    "06": (usable, usable_late),
    "07": (updated, lambda master, scaled, scale, rate: (half(master - rate * scaled / scale),) * 2),
    "08": (patient, lambda s, c, overflow: (s / 2, c) if overflow else (s, c)),
    "09": (
        lambda off, on: statistics.median(a / b for a, b in zip(off, on)),
        lambda off, on: statistics.fmean(off) / statistics.fmean(on),
    ),
    "10": (centralize, lambda g: [[v - statistics.fmean([x for r in g for x in r]) for v in row] for row in g]),
    "11": (inside, lambda rows, step: step),
    "12": (adasum, lambda a, b: [(x + y) / 2 for x, y in zip(a, b)]),
    "13": (lambda g, S, i, j: g * S[i] / S[j], lambda g, S, i, j: g * S[j] / S[i]),
    "14": (first_bad, lambda heard: heard[-1][0]),
    "15": (replayed, lambda ceilings, scale, window: sum(scale > c for c in ceilings)),
    "16": (
        lambda gradients: sum(v != 0 and abs(v) <= 2**-25 for v in gradients) / len(gradients),
        lambda gradients: sum(abs(v) <= 2**-25 for v in gradients) / len(gradients),
    ),
    "17": (lambda amaxes, n: 448 / max(amaxes[-n:]), lambda amaxes, n: 448 / amaxes[-1]),
    "18": (
        lambda block: 2.0 ** (math.floor(math.log2(max(map(abs, block)))) - 2),
        lambda block: max(map(abs, block)) / 6,
    ),
    "19": (stays_high, lambda name, layer: name.startswith("h.1.")),
    "20": (interval, lambda base, other: (min(other) - max(base), max(other) - min(base))),
    "21": (trapeze, lambda step, peak, warmup, total: peak * min(1, step / warmup)),
}


def told(lesson, function, capsys):
    check.judge(lesson, function)
    return capsys.readouterr().out


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_task_knows_right_from_wrong_and_unwritten(lesson, capsys):
    right, wrong = SOLUTIONS[lesson]
    assert re.match(r"Right, in all \d+ cases\. \w", told(lesson, right, capsys))
    refused = told(lesson, wrong, capsys)
    assert re.match(r"Not yet\. \S.* must give .*, and gave ", refused), refused
    assert told(lesson, lambda *_: None, capsys).startswith("Write it yourself: ")
    assert "raised ZeroDivisionError" in told(lesson, lambda *_: 1 / 0, capsys)
    assert told(lesson, lambda: 1, capsys).startswith("Not yet. ")


def counted(floor=1.0, cut=True, anew=True, late=0):
    """The replay of lesson 15 with one of its usual mistakes."""

    def skipped(ceilings, scale, window):
        count = found = 0
        for ceiling in ceilings:
            if scale > ceiling:
                found, count, scale = found + 1, 0 if cut else count, max(scale / 2, floor)
            elif (count := count + 1) >= window + late:
                scale, count = scale * 2, 0 if anew else count
        return found

    return skipped


def only_inf(heard):
    return next((name for name, out in heard if math.inf in map(abs, out)), "")


def only_plus_inf(heard):
    return next((name for name, out in heard if any(v == math.inf or math.isnan(v) for v in out)), "")


def only_large(heard):
    return next((name for name, out in heard if max(map(abs, out)) > 65504), "")


def strict(gradients, scale):
    finite = all(abs(g * scale) < 65504 for g in gradients)
    return finite, scale if finite else scale / 2


def judged_by(some):
    """The decision by some of the gradients: a loop that forgets the others."""

    def decided(gradients, scale):
        finite = all(abs(g * scale) <= 65504 for g in some(gradients))
        return finite, scale if finite else scale / 2

    return decided


def by_test(fits):
    """The decision by another test of the gradients and the scale."""
    return lambda gradients, scale: (found := fits(gradients, scale), scale if found else scale / 2)


def one_growth(grown):
    """The rule of lesson 05 with another scale after a full window."""
    return lambda s, c, finite: (grown(s), 0) if finite and c == 2 else after(s, c, finite)


def norm_of_two(scaled, scale, max_norm):
    true = [g / scale for g in scaled]
    return [g * min(1, max_norm / math.hypot(*true[:2])) for g in true]


def usable_if_scaled_is_long(scaled, scale, max_norm):
    return usable(scaled, scale, max_norm) if math.hypot(*scaled) > max_norm else scaled


def not_below_zero(a, b):
    """AdaSum with weights that never fall below 0."""
    a, b = np.array(a), np.array(b)
    return max(0, 1 - a @ b / (2 * a @ a)) * a + max(0, 1 - a @ b / (2 * b @ b)) * b


def of_two_entries(a, b):
    """AdaSum as the lesson computes it by hand: of a plane."""
    d, A, B = a[0] * b[0] + a[1] * b[1], a[0] ** 2 + a[1] ** 2, b[0] ** 2 + b[1] ** 2
    return [(1 - d / (2 * A)) * x + (1 - d / (2 * B)) * y for x, y in zip(a, b)]


def only_last_value(heard):
    return next((name for name, out in heard if not math.isfinite(out[-1])), "")


def only_layers_behind_the_input(heard):
    return next((name for name, out in heard[1:] if not all(map(math.isfinite, out))), "")


MISTAKES = [
    ("00", strict),
    ("00", judged_by(lambda gradients: gradients[:1])),
    ("00", judged_by(lambda gradients: gradients[-1:])),
    ("00", judged_by(lambda gradients: (gradients[0], gradients[-1]))),
    ("00", by_test(lambda gradients, scale: all(abs(g * scale) <= 65536 for g in gradients))),
    ("00", by_test(lambda gradients, scale: abs(sum(gradients) * scale) <= 65504)),
    ("00", by_test(lambda gradients, scale: scale <= 65504 and all(abs(g * scale) <= 65504 for g in gradients))),
    ("04", lambda v: 15 - math.floor(math.log2(v))),  # 1.9995 times 2^15 is above 65504
    ("05", one_growth(lambda scale: 16.0)),
    ("05", one_growth(lambda scale: scale + 8)),
    ("05", one_growth(lambda scale: scale**2 / 4)),
    ("06", norm_of_two),
    ("06", usable_if_scaled_is_long),
    ("07", lambda m, g, s, r: (m - r * g / s, half(half(m) - r * g / s))),  # the weight is not made of the master copy
    ("07", lambda m, g, s, r: (m - r * g / s, torch.tensor(m - r * g / s).bfloat16())),
    ("07", lambda m, g, s, r: updated(m, g, s, half(r))),
    ("07", lambda m, g, s, r: updated(m, half(g * r), s, 1)),
    ("07", lambda master, scaled, scale, rate: updated(half(master), scaled, scale, rate)),  # forgets what it collected
    ("07", lambda master, scaled, scale, rate: updated(master, half(scaled / scale), 1, rate)),
    ("07", lambda master, scaled, scale, rate: updated(master, half(rate * scaled / scale), 1, 1)),
    ("09", lambda off, on: statistics.median_high(a / b for a, b in zip(off, on))),
    ("09", lambda off, on: statistics.median_low(a / b for a, b in zip(off, on))),
    ("09", lambda off, on: statistics.median(a / b for a, b in zip(sorted(off), sorted(on)))),
    ("09", lambda off, on: statistics.median(a / b for a in off for b in on)),
    ("10", lambda g: [[v - sum(row) // len(row) for v in row] for row in g]),
    ("12", not_below_zero),
    ("12", of_two_entries),
    ("14", only_last_value),
    ("14", only_layers_behind_the_input),
    ("14", only_inf),
    ("14", only_plus_inf),
    ("14", only_large),
    ("15", counted(floor=0.0)),
    ("15", counted(cut=False)),
    ("15", counted(anew=False)),
    ("15", counted(late=1)),
    ("15", counted(late=-1)),
    ("16", lambda gradients: sum(v != 0 and v <= 2**-25 for v in gradients) / len(gradients)),
    ("16", lambda gradients: sum(0 < abs(v) < 2**-25 for v in gradients) / len(gradients)),
    ("16", lambda gradients: str(sum(0 < abs(v) <= 2**-25 for v in gradients) / len(gradients))),
    ("17", lambda amaxes, n: 448 / max(amaxes[-n:-1] or amaxes[-1:])),
    ("17", lambda amaxes, n: 448 // max(amaxes[-n:])),
    ("18", lambda block: 2.0 ** (math.floor(math.log2(max(block))) - 2)),
    ("19", lambda name, layer: str(stays_high(name, layer))),  # "False" counts as true
    ("19", lambda name, layer: name.startswith("h.1") or stays_high(name, layer)),  # h.10 too
    ("19", lambda name, layer: name.startswith("h.1.") or layer.out_features % 16 != 0),
    ("19", lambda name, layer: name.startswith("h.1.") or layer.in_features % 16 != 0),
    ("19", lambda name, layer: name.startswith("h.1.") or bool(layer.in_features * layer.out_features % 16)),
    ("20", lambda base, other: tuple(map(str, interval(base, other)))),
    ("18", lambda block: 2.0 ** (math.floor(math.log2(abs(sum(block)))) - 2)),
    ("21", lambda step, peak, warmup, total: min(step / warmup, (total - step) / (total - warmup)) * peak),  # below 0
    ("21", lambda step, peak, warmup, total: trapeze(step + 1, peak, warmup, total)),
    ("21", lambda step, peak, warmup, total: trapeze(step, peak, warmup, total + warmup)),
    ("21", lambda step, peak, warmup, total: trapeze(step, peak, warmup, total) if step < total - 1 else 0.0),
]


@pytest.mark.parametrize(("lesson", "wrong"), MISTAKES, ids=lambda v: getattr(v, "__name__", v))
def test_a_mistake_that_only_some_cases_show_is_found(lesson, wrong, capsys):
    assert told(lesson, wrong, capsys).startswith("Not yet. ")


def test_a_function_that_forgets_its_last_return_is_not_taken_for_an_unwritten_one(capsys):
    def forgets(heard):
        for name, out in heard:
            if not all(map(math.isfinite, out)):
                return name

    assert "must give '', and gave None" in told("14", forgets, capsys)
    shown = told("13", lambda g, S, i, j: print(g * S[i] / S[j]), capsys)
    assert "must give 128, and gave None, as a function without return does" in shown


def test_a_task_takes_a_result_that_was_float32_on_its_way(capsys):
    def widened(rows, step):
        rows = torch.tensor(rows).double()  # torch.tensor makes float32 of a list
        return rows.T @ (rows @ torch.tensor(step).double())

    assert told("11", widened, capsys).startswith("Right")


def test_a_right_answer_is_right_in_any_form():
    keys = {64: "a", 32: "b"}
    lists = [32, 64], (64, 32), {32, 64}, np.array([32, 64]), torch.tensor([64, 32])
    for form in (*lists, keys.keys(), dict(enumerate(keys)).values(), range(32, 65, 32)):
        assert check.verdict("12", "sizes", form)[0], form
    assert check.verdict("15", "collapse", np.False_)[0]
    assert not check.verdict("15", "collapse", np.True_)[0]
    assert check.verdict("12", "sixteen", torch.tensor([12.0]))[0]
    scale = torch.tensor(1024.0) * torch.tensor(2.0**-0.5) * torch.tensor(2.0**-0.5)  # in float32, as a manager does
    assert scale != 512
    assert check.verdict("13", "two", scale)[0]
    assert not check.verdict("13", "two", 1024 / 2**0.5)[0]
    assert "right format" in check.verdict("14", "cure", "float16")[1]
    written = {("01", "smallest"): "2^-13", ("02", "mean"): "1/4", ("10", "saving"): "11 %", ("06", "weights"): " 96 "}
    written |= {("08", "below"): "mpkit, deepspeed, flax, apex, mxnet", ("09", "active"): "less_bn,grad_accumulation"}
    for question, form in written.items():
        assert check.verdict(*question, form)[0], form
    assert not check.verdict("10", "saving", "11")[0]


def test_percent_without_its_sign_is_told_so():
    for lesson, name, answer, written in (("10", "saving", 11, "11 %"), ("09", "saved", "23", "23 %")):
        right, told = check.verdict(lesson, name, answer)
        assert not right
        assert f"its sign is missing: write '{written}' in quotes" in told
        assert check.verdict(lesson, name, written)[0]
    for lesson, name, answer in (("10", "saving", 12), ("09", "saved", 77), ("14", "largest", 100 * 2**25)):
        assert "sign is missing" not in check.verdict(lesson, name, answer)[1]


def test_infinity_may_be_written(monkeypatch):
    monkeypatch.setitem(
        import_module("mpkit.check.lesson_20").QUESTIONS, "one", check.Question("?", lambda: math.inf, "", "")
    )
    for form in ("inf", math.inf, np.float32("inf")):
        assert check.verdict("20", "one", form)[0], form
    assert not check.verdict("20", "one", "0")[0]


def test_a_single_name_may_hold_a_comma(monkeypatch):
    questions = import_module("mpkit.check.lesson_20").QUESTIONS
    monkeypatch.setitem(questions, "one", check.Question("?", lambda: ["e5m1 O2, scaled"], "", ""))
    for form in ("e5m1 O2, scaled", "['e5m1 O2, scaled']", ["e5m1 O2, scaled"]):
        assert check.verdict("20", "one", form)[0], form


def test_what_python_makes_of_a_power_as_lessons_write_it_is_told_so():
    positive = ("14", "largest", 2 ^ 25), ("13", "two", 2 ^ 9), ("01", "smallest", 2 ^ -13), ("00", "after", 2 ^ 12)
    exponents = (
        ("04", "edge", 2 ^ -17),
        ("04", "recommended", 2 ^ 19),
        ("07", "square", 2 ^ -7),
        ("01", "smallest", 2 ^ -6),
    )
    for lesson, name, crossed in (*positive, *exponents):
        right, told = check.verdict(lesson, name, crossed)
        assert not right
        assert "the sign ^ is no power" in told
        assert told.endswith(import_module(f"mpkit.check.lesson_{lesson}").QUESTIONS[name].hint)
    for lesson, name, plain in (("14", "largest", 25), ("04", "edge", -26), ("10", "stages", 2 ^ 6)):
        assert "the sign ^" not in check.verdict(lesson, name, plain)[1]


def test_what_cannot_be_read_is_not_called_wrong_as_if_it_were():
    for answer in ("300 steps", "three hundred", "", True, 1j, [300, 1]):
        assert (
            f"A number is asked for, such as 0.1, 1e-5, 1/3 or 2^-14, got {answer!r}."
            in check.verdict("10", "share", answer)[1]
        )
    for answer in ("no", 0, "", [False, True]):
        assert f"True or False is asked for, got {answer!r}." in check.verdict("15", "collapse", answer)[1]
    for lesson, name, answer in (
        ("10", "share", 299),
        ("15", "collapse", True),
        ("01", "beyond", 3),
        ("01", "beyond", "nan"),
        ("08", "zero", "1/3"),
    ):
        assert "is asked for" not in check.verdict(lesson, name, answer)[1]
    for answer in ("the verdict healthy", "too high"):
        assert f"Only the word itself is asked for, got {answer!r}." in check.verdict("14", "wider", answer)[1]
    for answer in (32, filter(None, [32, 64])):
        told = check.verdict("12", "sizes", answer)[1]
        assert told.startswith(f'Not yet. A list is asked for, such as [1, 2] or ["a", "b"], got {answer!r:.60}. ')
    for answer in ([32], (32, 48), {64}, "32", "32, 48"):
        assert "is asked for" not in check.verdict("12", "sizes", answer)[1]
    for lesson, name, answer in (("14", "wider", "bad_data"), ("20", "interval", "better"), ("05", "window", 5)):
        assert "is asked for" not in check.verdict(lesson, name, answer)[1]


def test_the_collapse_of_lesson_15_is_not_told_by_the_windows_above_it():
    def run(factor):
        policy = ScalePolicy.by_factor(2.0**16, factor, 20)
        return replay(Trace.load(data_dir() / "traces" / "rare_outliers_float32.npz"), policy, fmt="fp16").iloc[0]

    assert run(2)["collapsed"]  # as its table lets a reader guess
    assert check.verdict("15", "collapse", bool(run(1.25)["collapsed"]))[0]
    slow = run(1.25)
    assert (slow["skipped"], round(slow["final_scale"])) == (31, round(2**16 / 1.25**31)) == (31, 65)
    assert slow["flushed"] < 0.02
    assert "factor 1.25" in check.verdict("15", "collapse", True)[1]


ABOVE = {  # lesson -> what its questions are answered by, as its own cells would print it
    "00": ["63.97", "4096", "4000000"],
    "01": ["0.0001221", "49152", "254"],
    "02": ["0.015625"],
    "04": ["2^19", "-17"],
    "06": ["2048", "6.1e-05", "96"],
    "07": ["-7"],
    "08": ["51", "160", "132"],
    "10": ["200"],
    "11": ["55"],
    "12": ["12"],
    "13": ["0.015625"],
    "14": ["33554432", "13"],
    "15": ["25"],
    "16": ["57344", "7.9989e-05", "0.8", "178"],
    "18": ["4.125", "22"],
}


@pytest.mark.parametrize("lesson", ABOVE)
def test_a_question_is_not_answered_by_what_is_stored_above_it(lesson):
    """They could be copied: 2^21, 32768, 0.000244, 1001, 166, 158; 18 more in 00 to 07, ten in 10 to 15, six later."""
    (path,) = (ROOT / "notebooks").glob(f"{lesson}_*.ipynb")
    outputs = [output for cell in json.loads(path.read_text("utf-8"))["cells"] for output in cell.get("outputs", ())]
    told = "".join(line for o in outputs for line in o.get("text", o.get("data", {}).get("text/plain", ())))
    questions = import_module(f"mpkit.check.lesson_{lesson}").QUESTIONS.values()
    asked = [q for q in questions if type(q.truth()) in (int, float) and math.isfinite(q.truth())]
    for answer in ABOVE[lesson]:
        value = float(answer.removeprefix("2^"))
        assert any(math.isclose(value, q.truth(), rel_tol=q.rel) for q in asked)
        assert not re.search(rf"(?<![\w.^-]){re.escape(answer)}(?![\w.])", told)


def test_a_wrong_answer_is_told_what_it_is():
    for lesson, name, value, words in (
        ("01", "smallest", -13, "That is the exponent"),
        ("03", "bias", "fp32", "The format is right"),
        ("03", "bias", 32, "The format is right"),
        ("04", "edge", 17, "a sign is missing"),
        ("20", "chance", 64, "That is percent"),
        ("20", "chance", 0.36, "none of the twenty"),
        ("20", "better", ["e5m1 O2, scaled", "freezing"], "they are worse"),
        ("21", "decayed", ["gamma_net.weight", "fc.bias"], "reads names only"),
        ("21", "decayed", {"gamma_net.weight", "fc.bias", "bn.weight"}, "has gamma in it"),
    ):
        right, told = check.verdict(lesson, name, value)
        assert not right
        assert words in told


def test_bits_written_as_a_decimal_number_are_told_so():
    assert "0b1100000000000000" in check.verdict("01", "pattern", 1100000000000000)[1]


def test_verdicts_in_ones_and_zeros_are_not_called_wrong():
    truth = import_module("mpkit.check.lesson_16").QUESTIONS["verdicts"].truth()
    assert "a list of eleven times True or False" in check.verdict("16", "verdicts", list(map(int, truth)))[1]
    assert "At least one verdict is wrong" in check.verdict("16", "verdicts", [not t for t in truth])[1]


def test_a_power_in_place_of_its_exponent_is_told_so():
    for lesson, name, power in (("04", "edge", 2.0**-17), ("04", "recommended", 2**19), ("07", "square", 2.0**-7)):
        right, told = check.verdict(lesson, name, power)
        assert not right
        assert told.endswith("The question asks for n, its exponent.")


def test_an_error_that_cannot_say_what_it_is_is_told_by_its_name(capsys):
    class Mute(ValueError):
        def __str__(self):
            raise self

    def raises(*_):
        raise Mute

    assert re.search(r"raised Mute$", told("10", raises, capsys).strip())


def test_a_task_takes_rows_of_any_kind(capsys):
    def by_numpy(gradient):
        return [np.array(row) - np.mean(row) for row in gradient]

    def by_torch(gradient):
        return tuple(row - row.mean() for row in torch.tensor(gradient))

    assert told("10", by_numpy, capsys).startswith("Right")
    assert told("10", by_torch, capsys).startswith("Right")
    assert told("21", lambda *given: torch.tensor([trapeze(*given)]), capsys).startswith("Right")
    assert told("00", lambda g, s: [np.bool_(decide(g, s)[0]), decide(g, s)[1]], capsys).startswith("Right")


@pytest.mark.parametrize(
    ("lesson", "tempting"),
    [
        ("01", lambda s, e, f: math.inf if e == 31 else decode(s, e, f)),  # -inf has a sign, too
        ("04", lambda v: int(math.log2(65504 / v))),  # cuts off towards 0, and the logarithm may be negative
    ],
)
def test_a_task_tells_what_is_nearly_right(lesson, tempting, capsys):
    assert told(lesson, tempting, capsys).startswith("Not yet")


@pytest.mark.parametrize(
    ("t", "begins"), [(2.776, "Right"), (2.7764451, "Right"), (2.78, "Not yet"), (2.571, "Not yet")]
)
def test_an_interval_may_be_made_with_the_number_of_a_table(t, begins, capsys):
    """2.776, which lab 06 gives, was refused where 2.7764 was right."""

    def by_table(base, other):
        low, high = interval(base, other)
        middle, half = (low + high) / 2, (high - low) / 2 * t / 2.7764
        return middle - half, middle + half

    assert told("20", by_table, capsys).startswith(begins)


def test_a_task_hands_out_copies(capsys):
    def spoils(base, other):  # the cases of this lesson share one list of the baseline
        found = interval(base, other)
        base.clear()
        return found

    assert told("20", spoils, capsys).startswith("Right")


def test_judging_a_bound_method_and_a_class_works(capsys):
    class Decider:
        def __call__(self, gradients, scale):
            return decide(gradients, scale)

    assert told("00", Decider(), capsys).startswith("Right")


def test_right_lines_in_float32_are_right(capsys):
    def inside(rows, step):
        rows = torch.tensor(rows)
        return rows.T @ (rows @ torch.tensor(step))

    def added(a, b):
        a, b = np.float32(a), np.float32(b)
        return (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b

    assert told("11", inside, capsys).startswith("Right")
    assert told("12", added, capsys).startswith("Right")
    assert not check.verdict("21", "warmup", torch.tensor(0.3001))[0]
    assert not check.verdict("16", "position", np.float32(math.inf))[0]


def test_results_that_look_alike_are_told_with_the_digits_that_differ(capsys):
    refused = told("12", lambda a, b: [v * (1 + 1e-8) for v in added_by_hand(a, b)], capsys)
    assert "must give [2.0, 0.0], and gave [2.00000002, 0.0]" in refused, refused


def added_by_hand(a, b):
    dot = sum(x * y for x, y in zip(a, b))
    one, two = (1 - dot / (2 * sum(x * x for x in v)) for v in (a, b))
    return [one * x + two * y for x, y in zip(a, b)]


BY_OTHER_NAMES = {  # ways to float16 that do not spell it
    "a code": lambda x: np.array(x, dtype="<f2"),
    "a code of two letters": lambda x: np.dtype("f2").type(x),
    "a kind of tensor": lambda x: torch.HalfTensor([x]),
    "its name as a text": lambda x: torch.tensor(x).type("torch.HalfTensor"),
}


@pytest.mark.parametrize("name", BY_OTHER_NAMES)
def test_a_dtype_is_seen_behind_its_other_names(name):
    assert np.float32(BY_OTHER_NAMES[name](0.1)) == np.float16(0.1)
    assert "float16" in names_used(BY_OTHER_NAMES[name])
    assert not {"float16", ""} & names_used(lambda x: f"{x:e}: {x:.2f} of f22, torch.Half, {np.float32(x)}")
