"""What a call leaves out has the value that the original gives it, or that mpkit's own pages promise.

Arguments, their order and their defaults are an interface: code that relies on them changes silently with them. First
the signatures that mpkit reproduces (MindSpore 2.7: nn.optim, nn.learning_rate_schedule, nn.dynamic_lr, amp, boost),
then mpkit's own, a change of which is named in CHANGELOG.md.
"""

import importlib
import inspect
import math
from typing import Any

import pytest
import torch

from mpkit.formats import E4M3FN
from mpkit.optimizers import LARS, Momentum

ADAM = "params, learning_rate=1e-3, beta1=0.9, beta2=0.999, eps=1e-8"
LOCKS = "use_locking=False, use_nesterov=False, weight_decay=0.0, loss_scale=1.0"
DECAY = "weight_decay=0.0, loss_scale=1.0"
YACED = "loss_scale=1.0, weight_decay=0.0"
EPOCHS = "learning_rate, decay_rate, total_step, step_per_epoch, decay_epoch, is_stair=False"
STEPS = "learning_rate, decay_rate, decay_steps, is_stair=False"
CALLBACKS = "callbacks=None, dataset_sink_mode=False"
ORIGINAL = {  # what can be given by position, in order
    "optimizers.Momentum": f"params, learning_rate, momentum, {DECAY}, use_nesterov=False",
    "optimizers.SGD": "params, learning_rate=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, "
    "loss_scale=1.0",
    "optimizers.Adam": f"{ADAM}, {LOCKS}, use_amsgrad=False",
    "optimizers.LazyAdam": f"{ADAM}, {LOCKS}",
    "optimizers.AdamOffload": f"{ADAM}, {LOCKS}",
    "optimizers.AdamWeightDecay": "params, learning_rate=1e-3, beta1=0.9, beta2=0.999, eps=1e-6, weight_decay=0.0",
    "optimizers.AdaMax": f"{ADAM}, {DECAY}",
    "optimizers.RMSProp": "params, learning_rate=0.1, decay=0.9, momentum=0.0, epsilon=1e-10, use_locking=False, "
    f"centered=False, {YACED}",
    "optimizers.Adagrad": f"params, accum=0.1, learning_rate=1e-3, update_slots=True, {YACED}",
    "optimizers.Adadelta": f"params, learning_rate=1.0, rho=0.9, epsilon=1e-6, {YACED}",
    "optimizers.ASGD": "params, learning_rate=0.1, lambd=1e-4, alpha=0.75, t0=1e6, weight_decay=0.0",
    "optimizers.Rprop": "params, learning_rate=0.1, etas=(0.5, 1.2), step_sizes=(1e-6, 50.0), weight_decay=0.0",
    "optimizers.FTRL": "params, initial_accum=0.1, learning_rate=1e-3, lr_power=-0.5, l1=0.0, l2=0.0, "
    f"use_locking=False, {YACED}",
    "optimizers.ProximalAdagrad": f"params, accum=0.1, learning_rate=1e-3, l1=0.0, l2=0.0, use_locking=False, {YACED}",
    "optimizers.AdaFactor": "params, learning_rate=None, eps=(1e-30, 1e-3), clip_threshold=1.0, decay_rate=0.8, "
    "beta1=0.9, weight_decay=0.0, scale_parameter=True, relative_step=True, warmup_init=False, compression=False, "
    "loss_scale=1.0",
    "optimizers.Lamb": "params, learning_rate, beta1=0.9, beta2=0.999, eps=1e-6, weight_decay=0.0",
    "optimizers.LARS": "optimizer, epsilon=1e-5, coefficient=0.001, use_clip=False, lars_filter=...",
    "schedules.exponential_decay_lr": EPOCHS,
    "schedules.natural_exp_decay_lr": EPOCHS,
    "schedules.inverse_decay_lr": EPOCHS,
    "schedules.cosine_decay_lr": "min_lr, max_lr, total_step, step_per_epoch, decay_epoch",
    "schedules.polynomial_decay_lr": "learning_rate, end_learning_rate, total_step, step_per_epoch, decay_epoch, "
    "power, update_decay_epoch=False",
    "schedules.piecewise_constant_lr": "milestone, learning_rates",
    "schedules.warmup_lr": "learning_rate, total_step, step_per_epoch, warmup_epoch",
    "schedules.ExponentialDecayLR": STEPS,
    "schedules.NaturalExpDecayLR": STEPS,
    "schedules.InverseDecayLR": STEPS,
    "schedules.CosineDecayLR": "min_lr, max_lr, decay_steps",
    "schedules.PolynomialDecayLR": "learning_rate, end_learning_rate, decay_steps, power, update_decay_steps=False",
    "schedules.WarmUpLR": "learning_rate, warmup_steps",
    "scalers.StaticLossScaler": "scale_value",
    "scalers.DynamicLossScaler": "scale_value, scale_factor, scale_window",
    "scalers.FixedLossScaleManager": "loss_scale=128.0, drop_overflow_update=True",
    "scalers.DynamicLossScaleManager": "init_loss_scale=2**24, scale_factor=2, scale_window=2000",
    "scalers.FixedLossScaleUpdateCell": "loss_scale_value",
    "scalers.DynamicLossScaleUpdateCell": "loss_scale_value, scale_factor, scale_window",
    "casting.auto_mixed_precision": 'network, amp_level="O0", dtype=torch.float16',
    "step.WithLossCell": "backbone, loss_fn",
    "step.TrainOneStepCell": "network, optimizer, sens=None, return_grad=False",
    "step.TrainOneStepWithLossScaleCell": "network, optimizer, scale_sense",
    "step.build_train_network": 'network, optimizer, loss_fn=None, level="O0", boost_level="O0"',
    "model.Model": "network, loss_fn=None, optimizer=None, metrics=None, eval_network=None, eval_indexes=None, "
    'amp_level="O0", boost_level="O0"',
    "model.Model.train": f"self, epoch, train_dataset, {CALLBACKS}, sink_size=-1, initial_epoch=0",
    "model.Model.fit": "self, epoch, train_dataset, valid_dataset=None, valid_frequency=1, callbacks=None, "
    "dataset_sink_mode=False, valid_dataset_sink_mode=False, sink_size=-1, initial_epoch=0",
    "model.Model.eval": f"self, valid_dataset, {CALLBACKS}",
    "model.LossMonitor": "per_print_times=1",
    "boost.AutoBoost": 'level="O0", boost_config_dict=""',
    "boost.OptimizerProcess": "opt",
    "boost.ParameterProcess": "",
    "boost.BoostTrainOneStepCell": "network, optimizer, sens=1.0",
    "boost.BoostTrainOneStepWithLossScaleCell": "network, optimizer, scale_sense",
    "boost.LessBN": "network, fn_flag=False",
    "boost.GradientFreeze": "param_groups, freeze_type, freeze_p=None, total_steps=None",
    "boost.FreezeOpt": "opt, train_parameter_groups=None, train_strategy=None",
    "boost.freeze_cell": "reducer_flag, network, optimizer, sens, grad, use_grad_accumulation, mean=None, "
    "degree=None, max_accumulation_step=1",
    "boost.GradientAccumulation": "max_accumulation_step, optimizer",
    "boost.AdaSum": "rank, device_number, group_number, parameter_tuple",
    "boost.DimReduce": "network, optimizer, weight, pca_mat_local, n_components=32, rho=0.55, gamma=0.9, "
    "alpha=0.001, sigma=0.4, rank=0, rank_size=1",
    "boost.GroupLossScaleManager": "init_loss_scale, loss_scale_groups=()",
    "boost.adasum.adasum_enabled": "world_size, device_number=8",
}
SWITCHES = (
    "growth_ge", "refill_on_growth", "refill_on_finite", "refill_on_backoff", "raise_at_min", "error_at_zero",
    "error_at_inf", "clamp_both_ways", "delayed", "flush_subnormal",
)  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "boost.adasum.adasum": {"eps": 1e-12},  # for each worker of a level
    "boost.adasum.adasum_pair": {"eps": 2e-12},
    "boost.dim_reduce.read_pca_rows": {"timeout": 1800.0},
    "step.TrainOneStepCell": {
        "sens": None, "return_grad": False, "hooks": (), "clip_norm": None, "accumulation_steps": 1,
    },
    "step.TrainOneStepWithLossScaleCell": {"hooks": (), "clip_norm": None, "accumulation_steps": 1},
    "step.ScaledStep": {"skip": "all", "average": True},
    "step.build_train_network": {
        "loss_fn": None, "level": "O0", "boost_level": "O0", "hooks": (), "clip_norm": None, "accumulation_steps": 1,
    },
    "optimizers.BFloat16Weights": {"way": "stochastic", "generator": None},
    "scalers.PolicyLossScaler": {"remember": 1000},
    "scalers.check_and_unscale_": {"found_inf": None, "uniform": False},
    "model.Checkpoint": {"every": 100},
    "model.ProgressBar": {"every": 10},
    "boost.GradientFreeze": {
        "freeze_p": None, "total_steps": None, "full_step_fraction": None, "faithful": False, "seed": 0,
    },
    "boost.AdaSum": {"process_group": None, "exchange": "halving", "eps": 1e-12},
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
    "diagnose.preflight": {"level": "O2", "dtype": torch.float16, "average": None},
    "diagnose.recommend_recipe": {"histograms": None, "history_len": 1024},
    "diagnose.stale_scales": {"preset": "te_delayed"},
    "formats.FloatFormat": {"specials": "ieee", "torch_dtype": None},
    "rounding.quantize": {"grad_fmt": None, "mode": "nearest_even", "overflow": None},
    "rounding.rounding_error": {"mode": "nearest_even"},
    "rounding.round_to": {"mode": "nearest_even", "overflow": None, "generator": None, "out": None},
    "casting.ledger": {"count": False, "keep": False},
    "casting.Cast": {"granularity": None, "policy": None, "rounding": "nearest_even", "hadamard": False},
    "casting.custom_mixed_precision": {
        "white_list": None, "black_list": None, "dtype": torch.float16, "grad_dtype": None,
    },
    "boost.AutoBoost.from_json": {"level": "O0"},
    "boost.AutoBoost": {"faithful": False},
    "boost.FreezeOpt": {"faithful": False},
    "boost.LessBN": {"faithful": False, "last_fc": None, "keep_bias": False},
    "boost.ParameterProcess": {"continue_ids": False},
    "boost.dim_reduce.WeightSnapshots": {"every": 10},
    "boost.dim_reduce.pca_matrix": {"method": "randomized", "generator": 0},
    "boost.dim_reduce.prepare_pca": {
        "n_components": 32, "pca_mat_path": None, "weight_load_dir": None, "timeout": 1800.0, "rank": 0,
        "rank_size": 1, "device_number": 8,
    },
    "boost.DimReduce": {
        "n_components": 32, "rho": 0.55, "gamma": 0.9, "alpha": 0.001, "sigma": 0.4, "rank": 0, "rank_size": 1,
        "process_group": None,
    },
    "boost.OptimizerProcess": {"multiple_of": 1},
    "boost.less_bn.NormalizedLinear": {"bias": False},
    "boost.less_bn.NormalizedLinear.of": {"keep_bias": False},
    "optimizers.Adam": {"use_lazy": False, "use_offload": False, "count_skipped": False, "faithful": False},
    "optimizers.centralized": {"multiple_of": 1},
    "record.Trace": {"activations": None, "format": "fp16"},
    "record.Trace.to_frame": {"part": "steps"},
    "replay.replay_tensor_scales": {"scales": False},
    "policies.ScalePolicy": {  # PyTorch's torch.amp.GradScaler
        "init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000,
        "min_scale": 0.0, "max_scale": math.inf, "backoff_divisor": 1.0, "scale_bits": 32, "hold_at_overflow": True,
        "hysteresis": 1, "tolerance": -1.0, "stop_at": -math.inf, "max_consecutive": 2**62, "init_count": 0,
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


@pytest.mark.parametrize("name", ORIGINAL)
def test_what_is_given_by_position_stands_where_the_original_has_it(name):
    """mpkit's own options come after it, by keyword, and can be left out."""
    given = inspect.signature(named(name)).parameters.values()
    wanted = inspect.signature(eval(f"lambda {ORIGINAL[name]}: None")).parameters.values()
    by_position = [p for p in given if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in by_position] == [p.name for p in wanted]
    for p, original in zip(by_position, wanted):
        if original.default is not ...:
            assert (p.name, p.default, type(p.default)) == (p.name, original.default, type(original.default))
    assert all(p.default is not p.empty for p in given if p.kind == p.KEYWORD_ONLY)


def defaults_of(thing: Any) -> dict[str, Any]:
    parameters = inspect.signature(thing).parameters
    return {key: p.default for key, p in parameters.items() if p.default is not p.empty}


def check(given: dict[str, Any], promised: dict[str, Any]) -> None:
    held = {key: given.get(key, "no such argument") for key in promised}
    assert held == promised
    assert [type(value) for value in held.values()] == [type(value) for value in promised.values()]


@pytest.mark.parametrize("name", OWN)
def test_what_is_left_out_has_the_promised_value(name):
    check(defaults_of(named(name)), OWN[name])


def test_layer_wise_rates_leave_norms_and_biases_out():
    def moved(name: str) -> float:
        weight = torch.nn.Parameter(torch.ones(1))
        weight.grad = torch.ones(1)
        LARS(Momentum([(name, weight)], 1.0, 0.0)).step()
        return weight.item()

    assert [moved(name) for name in ("fc.bias", "LayerNorm.weight")] == [0.0, 0.0]
    assert moved("fc.weight") > 0.9
