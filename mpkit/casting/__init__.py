"""Casting: which operation of a network runs in which precision."""

from mpkit.casting.ledger import Ledger, ledger
from mpkit.casting.levels import (
    LEVELS,
    amp_level,
    auto_mixed_precision,
    custom_mixed_precision,
    get_black_list,
    get_white_list,
    remove_mixed_precision,
    to_float,
)
from mpkit.casting.presets import PRESETS, cast_like

__all__ = [
    "LEVELS",
    "PRESETS",
    "Ledger",
    "amp_level",
    "auto_mixed_precision",
    "cast_like",
    "custom_mixed_precision",
    "get_black_list",
    "get_white_list",
    "ledger",
    "remove_mixed_precision",
    "to_float",
]
