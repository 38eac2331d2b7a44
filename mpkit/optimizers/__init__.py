"""Optimizers with the reference's formulas, groups and static loss scale, usable wherever torch.optim is."""

from mpkit.optimizers.adam import Adam
from mpkit.optimizers.arguments import centralized, trainable_params, untrainable_params
from mpkit.optimizers.base import Optimizer
from mpkit.optimizers.sgd import SGD, Momentum

__all__ = ["SGD", "Adam", "Momentum", "Optimizer", "centralized", "trainable_params", "untrainable_params"]
