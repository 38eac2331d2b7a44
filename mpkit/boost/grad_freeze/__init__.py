"""Gradient freezing: on some steps only the last layers train, and the backward pass stops early."""

from mpkit.boost.grad_freeze.cell import FreezeTrainCell, freeze_cell, reduce_
from mpkit.boost.grad_freeze.optimizer import FreezeOpt, split_learning_rates
from mpkit.boost.grad_freeze.stages import (
    expected_saving,
    index_probabilities,
    stage_costs,
    stages_by_module,
    stages_by_name,
)
from mpkit.boost.grad_freeze.strategy import GradientFreeze

__all__ = [
    "FreezeOpt",
    "FreezeTrainCell",
    "GradientFreeze",
    "expected_saving",
    "freeze_cell",
    "index_probabilities",
    "reduce_",
    "split_learning_rates",
    "stage_costs",
    "stages_by_module",
    "stages_by_name",
]
