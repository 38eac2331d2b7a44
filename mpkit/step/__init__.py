"""One training step: what it does, what it reports, and where others may look in."""

from mpkit.step.build import build_train_network
from mpkit.step.cells import TrainOneStepCell, TrainOneStepWithLossScaleCell, WithLossCell
from mpkit.step.hooks import Hook, StepContext, StepOutcome
from mpkit.step.scaled import ScaledStep

__all__ = [
    "Hook", "ScaledStep", "StepContext", "StepOutcome", "TrainOneStepCell", "TrainOneStepWithLossScaleCell",
    "WithLossCell", "build_train_network",
]  # fmt: skip
