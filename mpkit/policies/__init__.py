"""Dynamic loss scaling: one rule, every framework's as a preset of it, and a run that steps it."""

from .history import REASONS, ScaleHistory, explain, naive_loss_ratio, run
from .presets import FRAMEWORKS, own_names, preset
from .rule import STOPS, ScalePolicy, ScaleState, Stop, initial, stack
from .tensor_scale import (
    TENSOR_SCALE_PRESETS,
    TensorScalePolicy,
    TensorScaleState,
    advance,
    advance_tensor_scale,
    initial_tensor_scale,
    stack_tensor_scales,
    tensor_scale_preset,
)

__all__ = [
    "FRAMEWORKS", "REASONS", "STOPS", "TENSOR_SCALE_PRESETS", "ScaleHistory", "ScalePolicy", "ScaleState", "Stop",
    "TensorScalePolicy", "TensorScaleState", "advance", "advance_tensor_scale", "explain", "initial",
    "initial_tensor_scale", "naive_loss_ratio", "own_names", "preset", "run", "stack", "stack_tensor_scales",
    "tensor_scale_preset",
]  # fmt: skip
