"""Loss scalers, managers and update cells: state on the device, rules from `policies`, no host read in a step."""

from .finite import all_finite, check_and_unscale_
from .managers import (
    DynamicLossScaleManager,
    DynamicLossScaleUpdateCell,
    FixedLossScaleManager,
    FixedLossScaleUpdateCell,
    LossScaleManager,
)
from .scale import Scale
from .scaler import DynamicLossScaler, LossScaler, PolicyLossScaler, StaticLossScaler
from .tensor_scale import TensorScaler, update_all_

__all__ = [
    "DynamicLossScaleManager", "DynamicLossScaleUpdateCell", "DynamicLossScaler", "FixedLossScaleManager",
    "FixedLossScaleUpdateCell", "LossScaleManager", "LossScaler", "PolicyLossScaler", "Scale", "StaticLossScaler",
    "TensorScaler", "all_finite", "check_and_unscale_", "update_all_",
]  # fmt: skip
