"""Gradient freezing: on some steps only the last layers train, and the backward pass stops early."""

from .cell import freeze_cell
from .optimizer import FreezeOpt
from .strategy import GradientFreeze, expected_saving, index_probabilities, stage_costs, stages_by_module

__all__ = [
    "FreezeOpt",
    "GradientFreeze",
    "expected_saving",
    "freeze_cell",
    "index_probabilities",
    "stage_costs",
    "stages_by_module",
]
