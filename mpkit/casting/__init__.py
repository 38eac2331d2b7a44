"""Casting: which operation of a network runs in which precision."""

from mpkit.casting.levels import LEVELS, amp_level, auto_mixed_precision, remove_mixed_precision, to_float

__all__ = ["LEVELS", "amp_level", "auto_mixed_precision", "remove_mixed_precision", "to_float"]
