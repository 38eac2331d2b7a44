"""Boost: algorithms that trade a little of the training for speed, as MindSpore's boost module offers them."""

from mpkit.boost.adasum import AdaSum
from mpkit.boost.auto import AutoBoost
from mpkit.boost.cells import BoostTrainOneStepCell, BoostTrainOneStepWithLossScaleCell
from mpkit.boost.dim_reduce import DimReduce
from mpkit.boost.grad_accumulation import GradientAccumulation
from mpkit.boost.grad_freeze import FreezeOpt, GradientFreeze, freeze_cell
from mpkit.boost.group_loss_scale import GroupLossScaleManager
from mpkit.boost.less_bn import LessBN
from mpkit.boost.process import OptimizerProcess, ParameterProcess

__all__ = [
    "AdaSum", "AutoBoost", "BoostTrainOneStepCell", "BoostTrainOneStepWithLossScaleCell", "DimReduce", "FreezeOpt",
    "GradientAccumulation", "GradientFreeze", "GroupLossScaleManager", "LessBN", "OptimizerProcess", "ParameterProcess",
    "freeze_cell",
]  # fmt: skip
