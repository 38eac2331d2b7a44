"""The lessons on eight and four bits: scales and blocks a second way, what they say of recorded trainings, answers."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from mpkit.blocks import E8M0, MXFP4, NVFP4, hadamard, quantize_blocks
from mpkit.casting import RECIPES as LINEAR
from mpkit.experiment.statistics import paired
from mpkit.lessons.recipes import RECIPES, SPIKE, TENSORS, block_format, blocks, delayed, load_recipes, trained
from mpkit.policies import tensor_scale_preset
from mpkit.replay import replay_tensor_scales
from mpkit.view import quiz
from mpkit.view.words import words

WORDS = words("recipes")


# ---- *A scale for every tensor*
@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("given", [{}, {"length": 1}, {"length": 128}, {"margin": 3}, {"current": True}, {"spike": 10}])
def test_a_delayed_scale_holds_the_largest_of_its_history(tensor, given):
    view = delayed(tensor=tensor, **given)
    kind = ml_dtypes.float8_e5m2 if tensor.endswith("grad") else ml_dtypes.float8_e4m3fn
    top, seen, scale, clipped, unused = float(ml_dtypes.finfo(kind).max), view.numbers, 1.0, [], []
    for step, amax in enumerate(seen["amax"]):
        past = seen["amax"][max(0, step - given.get("length", 16)) : step]
        if given.get("current"):
            scale = top / amax
        elif len(past):
            scale = top / past.max() / 2.0 ** given.get("margin", 0)
        if amax * scale / top > 1 + 2.0**-22:
            clipped.append(step)
        else:
            unused.append(math.floor(math.log2(top)) - math.floor(math.log2(np.float32(amax * scale))))
    assert seen["clipped"].tolist() == clipped
    assert seen["unused"] == pytest.approx(np.mean(unused), abs=1e-6)
    assert f"clipped in {len(clipped)} of 300" in view.sentence


def test_what_the_lesson_on_tensor_scales_says():
    clips = [len(delayed(length=n).numbers["clipped"]) for n in (1, 16, 128)]
    assert 0.4 < clips[0] / 300 < 0.6
    assert clips == sorted(clips, reverse=True)
    weight = "h.0.attn.c_attn.weight"
    often = delayed(tensor=weight).numbers
    assert len(often["clipped"]) > 100
    assert often["worst"] < 1.1
    assert len(delayed(tensor=weight, margin=1).numbers["clipped"]) == 0
    for tensor in TENSORS:
        assert SPIKE in delayed(tensor=tensor, spike=10).numbers["clipped"]
        assert len(delayed(tensor=tensor, spike=10, current=True).numbers["clipped"]) == 0


def test_what_changes_nothing_is_hidden():
    assert delayed(current=True).sheet.idle == {"length", "margin"}
    assert blocks(fmt="NVFP4").sheet.idle == {"rule"}
    assert "0" in {row["stored"] for row in blocks(size=16, outlier=10).table()}  # it lies at the picture's edge


# ---- *Blocks*
def test_shares_of_clipped_blocks_are_those_of_gaussian_data():
    """Blocks clipped and dB, measured by others: MXFP8 16.8 % 30.6, MXFP4 29.5 % 18.8, NVFP4 20.4."""
    for fmt, rule, clipped, snr in (
        ("MXFP8", "floor", 0.168, 30.6), ("MXFP8", "rceil", 0.0, 31.5), ("MXFP4", "floor", 0.295, 18.8),
        ("MXFP4", "even", 0.128, 19.0), ("MXFP4", "ceil", 0.0, 16.8), ("NVFP4", "floor", None, 20.4),
    ):  # fmt: skip
        seen = blocks(fmt=fmt, rule=rule, size=16 if fmt == "NVFP4" else 32, outlier=0).numbers
        assert abs(seen["snr"] - snr) < 0.15
        assert clipped is None or abs(seen["clipped"] - clipped) < 0.03


def test_what_the_lesson_on_blocks_says():
    for fmt in ("MXFP4", "NVFP4"):
        snr = [blocks(fmt=fmt, rule="rceil", size=size, outlier=6).numbers["snr"] for size in (16, 32, 64, 128)]
        assert np.all(np.diff(snr) < 0)
    row = torch.full((64,), 5.0)
    row[20] = 1000.0
    for size in (16, 32, 64):
        stored = quantize_blocks(row, block_format("MXFP4", size, "floor")).dequantize()
        assert (stored == 0).sum() == size - 1
        assert (float(stored[0]) in (4.0, 6.0)) == (size == 16)
    assert (WORDS["predict"]["beside"]["right"], WORDS["predict"]["next_block"]["right"]) == ("c", "a")
    q = quantize_blocks(torch.tensor([0.1, -0.6, 1.0, 2.4, 5.0, 0.02]), MXFP4)
    assert E8M0.decode(q.scale_codes()).tolist() == q.scales.tolist() == [1.0]
    assert (MXFP4.bits_per_element, NVFP4.bits_per_element) == (4.25, 4.5)


# ---- *Three products*
def test_what_three_products_says_of_the_recorded_trainings():
    data = load_recipes()
    end = data["end"].astype(float)
    assert (data["names"][0], len(RECIPES)) == ("float32", 8)
    assert all(gap.low < 0 < gap.high for gap in (paired(list(one - end[0])) for one in end[1:]))
    assert (np.abs((end[1:] - end[0]).mean(1)) < np.ptp(end[0])).all()
    assert WORDS["predict"]["apart"]["right"] == "b"


@pytest.mark.parametrize("recipe", RECIPES)
def test_operands_that_a_recipe_does_not_cast_are_told(recipe):
    high = [row["operand"] for row in trained(recipe=recipe).table() if row["flushed"] == "not cast"]
    assert sorted(high) == (["wgrad.grad", "wgrad.input"] if recipe.endswith("weight gradient high") else [])


# ---- answers
def test_answers_a_second_way():
    asked = {name: q["truth"] for name, q in WORDS["question"].items()}
    assert asked["scale"] == 448 / 2
    assert asked["first"] == len(delayed(tensor="h.1.mlp.2.grad").numbers["clipped"])
    rules = [tensor_scale_preset("te_delayed", amax_history_len=n) for n in (1, 16)]
    grown = replay_tensor_scales(1.01 ** np.arange(64), rules).clipped
    assert (asked["grows"], asked["bits"]) == (grown[1] < grown[0], 4 + 8 / 64)
    assert asked["block_scale"] == min(2.0**n for n in range(-9, 9) if 6 * 2.0**n >= 7)
    x = torch.ones(64)
    x[0], x[1:10] = 64.0, 8.0
    assert asked["zeros"] == int((quantize_blocks(x, block_format("MXFP4", 32, "rceil")).dequantize() == 0).sum())
    assert asked["casts"] == sum(cast is not None for _, cast in LINEAR["mxfp4"].casts()) - 2
    assert (asked["axis"], asked["hadamard"]) == ("fprop", float(hadamard(32 * torch.eye(16)[0]).abs().max()))
    amaxes = [4.0, 0.5, 0.5, 0.5, 8.0]
    holds = [448.0] + [max(amaxes[max(0, i - 3) : i]) for i in range(1, 5)]
    assert [i for i, (a, h) in enumerate(zip(amaxes, holds)) if a > h] == [4]
    assert WORDS["predict"]["clipped"]["right"] == "c"


def test_cases_of_the_tasks():
    for (amaxes, length), scale in WORDS["tasks"]["delayed"]["cases"]:
        assert scale == 448 / max(amaxes[-length:])
    for (block,), scale in WORDS["tasks"]["block"]["cases"]:
        assert scale == float(quantize_blocks(torch.tensor(block), MXFP4).scales[0])


def test_a_layer_in_a_case_is_a_layer(capsys):
    def stays_high(name, layer):
        return name.startswith("h.1.") or layer.weight.shape[0] % 16 > 0 or layer.in_features % 16

    quiz.judge("recipes", stays_high, "keep")
    quiz.judge("recipes", lambda name, layer: name.startswith("h.1"), "keep")
    right, wrong = capsys.readouterr().out.splitlines()
    assert right.startswith("Right")
    assert "h.10" in wrong
    assert "Linear(in_features=16" in wrong
