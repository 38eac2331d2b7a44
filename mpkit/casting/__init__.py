"""Casting: which operation of a network runs in which precision."""

from mpkit.casting.checkpoint import install as _make_checkpoints_carry_rules
from mpkit.casting.ledger import Ledger, ledger
from mpkit.casting.levels import (
    LEVELS,
    amp_level,
    auto_mixed_precision,
    cast_like,
    copy_to_float,
    custom_mixed_precision,
    get_black_list,
    get_white_list,
    remove_mixed_precision,
    to_float,
    within,
)
from mpkit.casting.low import float_tensors, map_tensors, values_of
from mpkit.casting.marks import check_castable
from mpkit.casting.operators import EXACT
from mpkit.casting.presets import MINDSPORE, PRESETS, Level, preset_table, protect_children
from mpkit.casting.products import end_step, linear_layers, recipe_linear, recipe_of
from mpkit.casting.recipe import RECIPES, Cast, Recipe, amax_of, uniform

_make_checkpoints_carry_rules()

__all__ = [
    "EXACT",
    "LEVELS",
    "MINDSPORE",
    "PRESETS",
    "RECIPES",
    "Cast",
    "Ledger",
    "Level",
    "Recipe",
    "amax_of",
    "amp_level",
    "auto_mixed_precision",
    "cast_like",
    "check_castable",
    "copy_to_float",
    "custom_mixed_precision",
    "end_step",
    "float_tensors",
    "get_black_list",
    "get_white_list",
    "ledger",
    "linear_layers",
    "map_tensors",
    "preset_table",
    "protect_children",
    "recipe_linear",
    "recipe_of",
    "remove_mixed_precision",
    "to_float",
    "uniform",
    "values_of",
    "within",
]
