"""Dynamic loss scaling: one rule, every framework's as a preset of it, and a run that steps it."""

from .history import ScaleHistory, explain, naive_loss_ratio, run
from .presets import FRAMEWORKS, preset
from .rule import REASONS, STOPS, ScalePolicy, ScaleState, advance, initial, stack

__all__ = [
    "FRAMEWORKS",
    "REASONS",
    "STOPS",
    "ScaleHistory",
    "ScalePolicy",
    "ScaleState",
    "advance",
    "explain",
    "initial",
    "naive_loss_ratio",
    "preset",
    "run",
    "stack",
]
