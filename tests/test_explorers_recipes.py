"""Explorers of the lessons on recipes: their numbers, their scenes at the ends of every control, their sentences."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from mpkit.blocks import quantize_blocks
from mpkit.explorers.recipes import (
    RECIPES_SHOWN,
    TENSORS,
    AmaxExplorer,
    BlockExplorer,
    RecipeExplorer,
    gaussian,
    load_recipes,
)
from mpkit.plots.recipes import amax_scene, block_scene, recipe_scene


def ends(explorer: Any) -> list[dict[str, Any]]:
    """Every control at each of its ends or choices, the others as they open."""
    found = []
    for name in explorer.controls:
        trait = explorer.traits()[name]
        values = (
            trait.values if hasattr(trait, "values") else (trait.min, trait.max) if hasattr(trait, "min") else (0, 1)
        )
        found += [{name: bool(v) if type(getattr(explorer, name)) is bool else v} for v in values]
    return found


@pytest.mark.parametrize(
    ("kind", "scene"), [(AmaxExplorer, amax_scene), (BlockExplorer, block_scene), (RecipeExplorer, recipe_scene)]
)
def test_every_end_of_every_control_has_a_scene_a_sentence_and_a_table(kind, scene):
    explorer = kind()
    for change in ends(explorer):
        explorer.reset()
        explorer.set(**change)
        spec = scene(explorer).spec()
        assert spec["panels"][0]["marks"]
        assert any(c.isdigit() for c in explorer.summary())
        assert explorer.table()


def test_a_spike_of_ones_own_is_clipped_by_delayed_scaling_alone():
    for tensor in TENSORS:
        calm, spiked = AmaxExplorer(tensor=tensor), AmaxExplorer(tensor=tensor, spike=10)
        assert 200 in spiked.clipped
        assert len(AmaxExplorer(tensor=tensor, spike=10, current=True).clipped) == 0
        assert spiked.replayed.unused_bits[0] > calm.replayed.unused_bits[0]


@pytest.mark.parametrize(("fmt", "size", "share", "most"), [("NVFP4", 16, 0.49, 1 / 17), ("MXFP4", 32, 0.30, 0.25)])
def test_what_the_largest_value_of_a_clipped_block_loses(fmt, size, share, most):
    """E4M3 has three fraction bits: rounded to nearest, a scale is at most 1 / 17 too small. Floor leaves 6 of 8."""
    blocks = gaussian(257).view(-1, size)
    stored = quantize_blocks(blocks, BlockExplorer(fmt=fmt, size=size).format)
    tops, limit = blocks.abs().amax(1), stored.largest().reshape(len(blocks), -1)[:, 0]
    clipped = tops > limit * (1 + 2.0**-22)
    assert abs(clipped.double().mean() - share) < 0.01
    lost = 1 - stored.dequantize().abs().amax(1)[clipped] / tops[clipped]
    assert 0.9 * most < lost.max() <= most


def test_shares_of_clipped_blocks_are_those_of_gaussian_data():
    """Blocks clipped and dB, measured by others on gaussian data: MXFP8 16.8 % 30.6, MXFP4 29.5 % 18.8, NVFP4 20.4."""
    for fmt, rule, clipped, snr in (
        ("MXFP8", "floor", 0.168, 30.6),
        ("MXFP8", "rceil", 0.0, 31.5),
        ("MXFP4", "floor", 0.295, 18.8),
        ("MXFP4", "even", 0.128, 19.0),
        ("MXFP4", "ceil", 0.0, 16.8),
        ("NVFP4", "floor", None, 20.4),
    ):
        model = BlockExplorer(fmt=fmt, rule=rule, size=16 if fmt == "NVFP4" else 32)
        assert abs(model.snr - snr) < 0.15
        assert clipped is None or abs(model.clipped_blocks - clipped) < 0.03
    values = gaussian(257)
    assert abs(values.mean()) < 1e-6
    assert abs(values.std() - 1) < 1e-3


def test_a_value_at_the_bottom_of_the_picture_is_zero():
    for fmt, outlier, size in itertools.product(("MXFP8", "MXFP4", "NVFP4"), (0, 3, 6, 10), (16, 128)):
        model = BlockExplorer(fmt=fmt, outlier=outlier, size=size, rule="ceil")
        kept = np.abs(np.concatenate([model.x, model.decoded[model.decoded != 0]]))
        assert np.log2(kept.min()) > block_scene(model).panels[0].given["y"]["lo"], model.state()


def test_an_outlier_costs_more_in_larger_blocks():
    for fmt, rule in itertools.product(("MXFP4", "NVFP4"), ("rceil",)):
        snr = [BlockExplorer(fmt=fmt, rule=rule, size=size, outlier=6).snr for size in (16, 32, 64, 128)]
        assert np.all(np.diff(snr) < 0)


def test_the_recorded_trainings_hold_what_the_lesson_shows():
    data = load_recipes()
    assert data["names"][0] == "float32"
    assert set(data["names"][1:]) == set(RECIPES_SHOWN)
    assert np.isfinite(data["losses"]).all()
    assert data["losses"].shape[:2] == data["end"].shape


def test_a_history_that_changes_nothing_is_hidden():
    """Where only the newest amax counts, every length of the history gives the same scales."""
    held = [AmaxExplorer(most_recent=True, history_len=length) for length in (1, 16, 128)]
    assert all((model.holds == held[0].holds).all() and "history_len" in model.idle() for model in held)
    assert "history_len" not in AmaxExplorer().idle()
