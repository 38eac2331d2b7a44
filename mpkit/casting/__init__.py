"""Casting: which operation of a network runs in which precision."""

from mpkit.casting import checkpoint as _checkpoints  # noqa: F401  (it makes those of torch carry rules)
from mpkit.casting.ledger import Ledger, ledger
from mpkit.casting.levels import (
    LEVELS,
    amp_level,
    auto_mixed_precision,
    cast_like,
    custom_mixed_precision,
    get_black_list,
    get_white_list,
    remove_mixed_precision,
    to_float,
    within,
)
from mpkit.casting.presets import PRESETS
from mpkit.casting.products import end_step, recipe_linear, recipe_of
from mpkit.casting.recipe import RECIPES, Cast, Recipe, uniform

__all__ = [
    "LEVELS", "PRESETS", "RECIPES", "Cast", "Ledger", "Recipe", "amp_level", "auto_mixed_precision", "cast_like",
    "custom_mixed_precision", "end_step", "get_black_list", "get_white_list", "ledger", "recipe_linear", "recipe_of",
    "remove_mixed_precision", "to_float", "uniform", "within",
]  # fmt: skip
