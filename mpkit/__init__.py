"""mpkit: learn, test and experiment with mixed-precision training in PyTorch.

Every public name lives in the module that is named after its idea; the names a lesson uses can also be had from
here, and are loaded when first touched, so that `import mpkit` costs little more than `import torch`.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# fmt: off
_EXPORTS: dict[str, str] = {  # module -> its names; functions named like their module (replay, diagnose) stay there
    "boost": "AdaSum AutoBoost BoostTrainOneStepCell BoostTrainOneStepWithLossScaleCell DimReduce FreezeOpt "
             "GradientAccumulation GradientFreeze GroupLossScaleManager LessBN OptimizerProcess ParameterProcess "
             "freeze_cell",
    "casting": "amp_level auto_mixed_precision cast_like custom_mixed_precision get_black_list get_white_list ledger "
               "remove_mixed_precision to_float",
    "data": "digits mnist",
    "diagnose": "Report preflight recommend watch_loop",
    "formats": "BF16 E2M1 E2M3 E3M2 E4M3FN E5M2 FP16 FP32 FP64 TF32 FloatFormat get_format",
    "model": "Callback LossMonitor Model",
    "optimizers": "ASGD AdaFactor AdaMax Adadelta Adagrad Adam AdamWeightDecay FTRL LARS Lamb LazyAdam Momentum "
                  "ProximalAdagrad RMSProp Rprop SGD",
    "policies": "ScaleHistory ScalePolicy preset",
    "record": "Recorder Trace",
    "replay": "sweep",
    "rounding": "quantize round_to rounding_error ulp",
    "scalers": "DynamicLossScaleManager DynamicLossScaleUpdateCell DynamicLossScaler FixedLossScaleManager "
               "FixedLossScaleUpdateCell LossScaleManager LossScaler PolicyLossScaler StaticLossScaler all_finite",
    "schedules": "CosineDecayLR ExponentialDecayLR InverseDecayLR NaturalExpDecayLR PolynomialDecayLR WarmUpLR "
                 "cosine_decay_lr exponential_decay_lr inverse_decay_lr natural_exp_decay_lr piecewise_constant_lr "
                 "polynomial_decay_lr warmup_lr",
    "step": "Hook StepOutcome TrainOneStepCell TrainOneStepWithLossScaleCell WithLossCell build_train_network",
}
# fmt: on
_HOME = {name: module for module, names in _EXPORTS.items() for name in names.split()}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"mpkit.{_HOME[name]}"), name)
    raise AttributeError(f"module 'mpkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
