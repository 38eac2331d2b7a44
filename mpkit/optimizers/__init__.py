"""Optimizers with MindSpore's formulas, groups and static loss scale, usable wherever torch.optim is."""

from mpkit.optimizers.adagrad import FTRL, Adadelta, AdaFactor, Adagrad, ProximalAdagrad, RMSProp
from mpkit.optimizers.adam import Adam, AdaMax, AdamOffload, AdamWeightDecay, Lamb, LazyAdam
from mpkit.optimizers.arguments import centralized, trainable_params, untrainable_params
from mpkit.optimizers.base import Optimizer
from mpkit.optimizers.bf16 import BFloat16Weights, stochastic_bf16
from mpkit.optimizers.sgd import ASGD, SGD, Momentum, Rprop
from mpkit.optimizers.wrapper import LARS, Wrapper

__all__ = [
    "ASGD", "FTRL", "LARS", "SGD", "AdaFactor", "AdaMax", "Adadelta", "Adagrad", "Adam", "AdamOffload",
    "AdamWeightDecay", "BFloat16Weights", "Lamb", "LazyAdam", "Momentum", "Optimizer", "ProximalAdagrad", "RMSProp",
    "Rprop", "Wrapper", "centralized", "stochastic_bf16", "trainable_params", "untrainable_params",
]  # fmt: skip
