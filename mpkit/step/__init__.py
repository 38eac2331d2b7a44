"""One training step: what it does, what it reports, and where others may look in."""

from mpkit.step.cells import TrainOneStepCell, TrainOneStepWithLossScaleCell, WithLossCell
from mpkit.step.hooks import Hook, StepContext, StepOutcome

__all__ = [
    "Hook",
    "StepContext",
    "StepOutcome",
    "TrainOneStepCell",
    "TrainOneStepWithLossScaleCell",
    "WithLossCell",
]
