"""What a call leaves out has the value that the original gives it, or that mpkit's own pages promise.

Defaults are an interface: code that relies on one changes silently with it. First the signatures that mpkit
reproduces (MindSpore 2.7: nn.optim, nn.learning_rate_schedule, amp, boost; PyTorch's GradScaler where named), then
mpkit's own, a change of which is named in CHANGELOG.md.
"""

import enum
import importlib
import inspect
import math
from typing import Any

import pytest
import torch

from mpkit.formats import E4M3FN
from mpkit.optimizers.layerwise import not_norm_or_bias
from mpkit.policies.rule import NEVER

ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "loss_scale": 1.0}
FLAGS = {"use_locking": False, "use_nesterov": False}
DECAY = {"weight_decay": 0.0, "loss_scale": 1.0}
ORIGINAL: dict[str, dict[str, Any]] = {
    "optimizers.Momentum": {**DECAY, "use_nesterov": False},
    "optimizers.SGD": {"learning_rate": 0.1, "momentum": 0.0, "dampening": 0.0, "nesterov": False, **DECAY},
    "optimizers.Adam": {**ADAM, **FLAGS, "use_amsgrad": False, "use_lazy": False, "use_offload": False},
    "optimizers.LazyAdam": {**ADAM, **FLAGS},
    "optimizers.AdamOffload": {**ADAM, **FLAGS},
    "optimizers.AdamWeightDecay": {k: v for k, v in {**ADAM, "eps": 1e-6}.items() if k != "loss_scale"},
    "optimizers.AdaMax": ADAM,
    "optimizers.RMSProp": {
        "learning_rate": 0.1, "decay": 0.9, "momentum": 0.0, "epsilon": 1e-10, "use_locking": False, "centered": False,
        **DECAY,
    },
    "optimizers.Adagrad": {"accum": 0.1, "learning_rate": 1e-3, "update_slots": True, **DECAY},
    "optimizers.Adadelta": {"learning_rate": 1.0, "rho": 0.9, "epsilon": 1e-6, **DECAY},
    "optimizers.ASGD": {"learning_rate": 0.1, "lambd": 1e-4, "alpha": 0.75, "t0": 1e6, "weight_decay": 0.0},
    "optimizers.Rprop": {"learning_rate": 0.1, "etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0), "weight_decay": 0.0},
    "optimizers.FTRL": {
        "initial_accum": 0.1, "learning_rate": 1e-3, "lr_power": -0.5, "l1": 0.0, "l2": 0.0, "use_locking": False,
        **DECAY,
    },
    "optimizers.ProximalAdagrad": {
        "accum": 0.1, "learning_rate": 1e-3, "l1": 0.0, "l2": 0.0, "use_locking": False, **DECAY,
    },
    "optimizers.AdaFactor": {
        "learning_rate": None, "eps": (1e-30, 1e-3), "clip_threshold": 1.0, "decay_rate": 0.8, "beta1": 0.9,
        "scale_parameter": True, "relative_step": True, "warmup_init": False, "compression": False, **DECAY,
    },
    "optimizers.Lamb": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.0},
    "schedules.exponential_decay_lr": {"is_stair": False},
    "schedules.natural_exp_decay_lr": {"is_stair": False},
    "schedules.inverse_decay_lr": {"is_stair": False},
    "schedules.polynomial_decay_lr": {"update_decay_epoch": False},
    "schedules.ExponentialDecayLR": {"is_stair": False},
    "schedules.NaturalExpDecayLR": {"is_stair": False},
    "schedules.InverseDecayLR": {"is_stair": False},
    "schedules.PolynomialDecayLR": {"update_decay_steps": False},
    "scalers.DynamicLossScaleManager": {"init_loss_scale": 2**24, "scale_factor": 2, "scale_window": 2000},
    "scalers.FixedLossScaleManager": {"loss_scale": 128.0, "drop_overflow_update": True},
    "casting.auto_mixed_precision": {"amp_level": "O0", "dtype": torch.float16, "grad_dtype": None},
    "model.Model.train": {"callbacks": None, "dataset_sink_mode": False, "sink_size": -1, "initial_epoch": 0},
    "model.Model.fit": {
        "valid_dataset": None, "valid_frequency": 1, "callbacks": None, "dataset_sink_mode": False,
        "valid_dataset_sink_mode": False, "sink_size": -1, "initial_epoch": 0,
    },
    "model.Model.eval": {"callbacks": None, "dataset_sink_mode": False},
    "model.LossMonitor": {"per_print_times": 1},
    "model.Model": {
        "loss_fn": None, "optimizer": None, "metrics": None, "eval_network": None, "eval_indexes": None,
        "amp_level": "O0", "boost_level": "O0",
    },
    "boost.AutoBoost": {"level": "O0", "boost_config_dict": "", "faithful": False},
    "boost.BoostTrainOneStepCell": {"sens": 1.0, "boost": None},
    "boost.BoostTrainOneStepWithLossScaleCell": {"boost": None},
    "boost.LessBN": {"fn_flag": False, "faithful": False, "last_fc": None, "keep_bias": False},
    "boost.adasum.adasum_enabled": {"device_number": 8},
    "boost.freeze_cell": {"mean": None, "degree": None, "max_accumulation_step": 1},
    "boost.FreezeOpt": {"train_parameter_groups": None, "train_strategy": None, "faithful": False},
    "optimizers.LARS": {
        "epsilon": 1e-5, "coefficient": 0.001, "use_clip": False, "lars_filter": not_norm_or_bias,
    },
}  # fmt: skip
SWITCHES = (
    "growth_ge", "refill_on_growth", "refill_on_finite", "refill_on_backoff", "raise_at_min", "error_at_zero",
    "error_at_inf", "clamp_both_ways", "delayed", "flush_subnormal",
)  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "boost.adasum.adasum": {"eps": 1e-12},  # for each worker of a level
    "boost.adasum.adasum_pair": {"eps": 2e-12},
    "boost.adasum.adasum_coefficients": {"eps": 2e-12},
    "boost.dim_reduce.pca.read_pca_rows": {"timeout": 1800.0},
    "model.RunContext": {"cur_epoch_num": 0, "cur_step_in_epoch": 0, "cur_step_num": 0, "failed": False},
    "step.TrainOneStepCell": {
        "sens": None, "return_grad": False, "hooks": (), "clip_norm": None, "accumulation_steps": 1,
    },
    "step.TrainOneStepWithLossScaleCell": {"hooks": (), "clip_norm": None, "accumulation_steps": 1},
    "step.ScaledStep": {"skip": "all", "average": True},
    "step.build_train_network": {
        "loss_fn": None, "level": "O0", "boost_level": "O0", "hooks": (), "clip_norm": None, "accumulation_steps": 1,
    },
    "optimizers.AdamW8bit": {  # torch.optim.AdamW
        **{k: v for k, v in ADAM.items() if k != "loss_scale"}, "weight_decay": 0.01,
    },
    "optimizers.Adam8bit": ADAM,
    "optimizers.BFloat16Weights": {"way": "stochastic", "generator": None},
    "scalers.PolicyLossScaler": {"remember": 1000},
    "scalers.check_and_unscale_": {"found_inf": None, "uniform": False},
    "scalers.update_all_": {"only_seen": False},
    "model.Checkpoint": {"every": 100},
    "model.ProgressBar": {"every": 10},
    "boost.GradientFreeze": {
        "freeze_p": None, "total_steps": None, "full_step_fraction": None, "faithful": False, "seed": 0,
    },
    "boost.AdaSum": {"process_group": None, "exchange": "halving", "eps": 1e-12, "timeout": None},
    "boost.GroupLossScaleManager": {  # a skip costs half a power of two; 1000 good steps give one back
        "loss_scale_groups": (), "shrink": 2**-0.5, "growth": 2 ** (1 / 1000), "min_scale": 1.0,
        "max_scale": 2.0**24, "blame": "first", "faithful": False,
    },
    "record.Recorder": {
        "optimizer": None, "scaler": None, "every": 1, "by": "parameter", "activations": False, "amaxes": False,
        "format": "fp16", "meta": None,
    },
    "replay.sweep": {
        "init": None, "factor": 2.0, "window": 2000, "fmt": None, "min_scale": 0.0, "device": "cpu",
    },
    "replay.replay": {"fmt": None, "scales": None, "device": "cpu"},
    "replay.sweep_tensor_scales": {
        "history_len": (1, 16, 1024), "margin": (0,), "algorithm": ("max", "most_recent"), "element": E4M3FN,
        "preset": "te_delayed",
    },
    "diagnose.diagnose": {"level": "O2", "scale": 2.0**16, "dtype": torch.float16},
    "diagnose.preflight": {"level": "O2", "dtype": torch.float16, "loop": None},
    "diagnose.recommend_recipe": {"histograms": None, "history_len": 1024},
    "diagnose.stale_scales": {"preset": "te_delayed"},
    "diagnose.Report": {"overshoot": 1.0, "cures": ()},
    "diagnose.cure.Cure": {"what": ""},
    "formats.FloatFormat": {"specials": "ieee", "torch_dtype": None},
    "rounding.quantize": {"grad_fmt": None, "mode": "nearest_even", "overflow": None},
    "rounding.rounding_error": {"mode": "nearest_even"},
    "rounding.round_to": {"mode": "nearest_even", "overflow": None, "generator": None, "out": None},
    "casting.ledger": {"count": False, "keep": False},
    "casting.Ledger": {"count": False, "keep": False},
    "casting.Cast": {"granularity": None, "policy": None, "rounding": "nearest_even", "hadamard": False},
    "casting.table.Level": {
        "parameters": "float32", "protected": (), "overrides": False, "loss_scale": "none", "wide_loss": False,
    },
    "casting.custom_mixed_precision": {
        "white_list": None, "black_list": None, "dtype": torch.float16, "grad_dtype": None,
    },
    "boost.AutoBoost.from_json": {"level": "O0"},
    "boost.DimReduce": {
        "n_components": 32, "rho": 0.55, "gamma": 0.9, "alpha": 0.001, "sigma": 0.4, "rank": 0, "rank_size": 1,
        "process_group": None,
    },
    "boost.FreezeOpt.zero_grad": {"set_to_none": True},
    "boost.GradientAccumulation.forward": {"grads": None, "overflow": False},
    "boost.OptimizerProcess": {"multiple_of": 1},
    "boost.ParameterProcess": {"continue_ids": False},
    "boost.less_bn.LessBNReport": {"normalized": ()},
    "boost.less_bn.NormalizedLinear": {"bias": False},
    "optimizers.Optimizer": {"weight_decay": 0.0, "loss_scale": 1.0, "hyper": None, "options": None},
    "optimizers.centralized": {"multiple_of": 1},
    "record.Trace": {"activations": None, "format": "fp16"},
    "record.Trace.to_frame": {"part": "steps"},
    "replay.replay_tensor_scales": {"scales": False},
    "replay.simulate": {"sample": None, "device": "cpu"},
    "replay.swept": {"min_scale": 0.0},
    "policies.ScalePolicy": {  # PyTorch's torch.amp.GradScaler
        "init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000,
        "min_scale": 0.0, "max_scale": math.inf, "backoff_divisor": 1.0, "scale_bits": 32, "hold_at_overflow": True,
        "hysteresis": 1, "tolerance": -1.0, "stop_at": -math.inf, "max_consecutive": NEVER, "init_count": 0,
        "first_growth_lag": 0, "next_growth_lag": 0, "name": "", "layers": (), **dict.fromkeys(SWITCHES, False),
    },
    "policies.ScalePolicy.by_factor": {"floor": 0.0},
    "policies.stack": {"device": "cpu"},
    "policies.stack_tensor_scales": {"device": "cpu"},
    "policies.tensor_scale_preset": {"element": E4M3FN},
    "policies.TensorScalePolicy": {  # Transformer Engine's DelayedScaling
        "element_max": 448.0, "delayed": True, "history_len": 1024, "most_recent": False, "margin": 0,
        "amax_floor": 0.0, "unfused": False, "double": False, "power_of_two": False, "name": "",
    },
}  # fmt: skip


def named(path: str) -> Any:
    """A function or class of a module, or a method of a class."""
    home, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(f"mpkit.{home}"), name)
    except ModuleNotFoundError:
        return getattr(named(home), name)


def defaults_of(thing: Any) -> dict[str, Any]:
    parameters = inspect.signature(thing).parameters
    return {key: p.default for key, p in parameters.items() if p.default is not p.empty}


def check(given: dict[str, Any], promised: dict[str, Any]) -> None:
    held = {key: given.get(key, "no such argument") for key in promised}
    assert held == promised
    assert [type(value) for value in held.values()] == [type(value) for value in promised.values()]


@pytest.mark.parametrize("name", [*ORIGINAL, *OWN])
def test_what_is_left_out_has_the_promised_value(name):
    given, promised = defaults_of(named(name)), {**ORIGINAL, **OWN}[name]
    check(given, promised)
    assert name in OWN or given.keys() == promised.keys()


MODULES = (
    "formats", "rounding", "casting", "policies", "scalers", "step", "optimizers", "schedules", "model", "boost",
    "record", "replay", "diagnose",
)  # fmt: skip
SEEN_ELSEWHERE = {  # a default that is a text, a function or a new object
    "formats.FloatFormat.source", "step.TrainOneStepCell.update", "step.TrainOneStepWithLossScaleCell.update",
    "model.RunContext.metrics", "record.Trace.meta", "record.Trace.measured",
}  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_every_default_of_a_public_name_is_in_a_table(module):
    """None says that nothing is given, and is nobody's number."""
    home = importlib.import_module(f"mpkit.{module}")
    tables = {path: {**ORIGINAL, **OWN}[path] for path in (*ORIGINAL, *OWN)}
    promised = {(id(named(path)), key) for path, table in tables.items() for key in table}
    missing = []
    for name, thing in vars(home).items():
        if (
            name.startswith("_")
            or not callable(thing)
            or not getattr(thing, "__module__", "").startswith(home.__name__)
            or isinstance(thing, enum.EnumType)  # whose call is Python's own
        ):
            continue
        own = vars(thing) if inspect.isclass(thing) else {}
        parts = {f"{name}.{key}": part for key, part in own.items() if inspect.isfunction(part) and key[0] != "_"}
        for path, part in {name: thing, **parts}.items():
            missing += [
                f"{module}.{path}.{key}"
                for key, value in defaults_of(part).items()
                if value is not None and (id(part), key) not in promised
            ]
    assert set(missing) <= SEEN_ELSEWHERE
