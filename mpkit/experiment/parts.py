"""The parts of a training by name: network, loss, optimizer, level, recipe, scaler, boost, and their step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit import networks, optimizers
from mpkit.arguments import check_kind, is_number
from mpkit.boost import AutoBoost, BoostTrainOneStepCell, BoostTrainOneStepWithLossScaleCell, OptimizerProcess
from mpkit.boost.config import FLAGS
from mpkit.casting import LEVELS, Recipe, auto_mixed_precision, cast_like
from mpkit.formats import FloatFormat, get_format
from mpkit.optimizers.arguments import Rate
from mpkit.policies import ScalePolicy, preset
from mpkit.scalers import DynamicLossScaleManager, LossScaleManager, LossScaler, PolicyLossScaler, StaticLossScaler
from mpkit.step import WithLossCell
from mpkit.step.build import Float32Loss

# what the arguments of `train` may be
Builds = str | Callable[[], nn.Module]
Optimizes = str | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Casts = str | Callable[[nn.Module], object]
Dtype = str | torch.dtype | FloatFormat
Scales = float | str | Mapping[str, Any] | ScalePolicy | LossScaler | LossScaleManager | nn.Module | None
Boosts = str | Mapping[str, Any] | AutoBoost


def usual_loss(output: Tensor, label: Tensor) -> Tensor:
    """Cross entropy, whose classes lie on the last axis, for whole-number labels, else the mean squared error."""
    if label.is_floating_point():
        if output.numel() == label.numel():  # (rows, 1) and (rows,), which would be compared each with all
            label = label.reshape(output.shape)
        return F.mse_loss(output, label)
    if output.dim() > 2 and output.shape[:-1] == label.shape:  # a class for every position of a sequence
        output, label = output.flatten(0, -2), label.flatten()
    return F.cross_entropy(output, label)


def network_of(network: object) -> nn.Module:
    """A network, built now: from a class, a function, or a name."""
    if isinstance(network, nn.Module):
        built = f"a {type(network).__name__} that is built already, whose weights would not follow the seed"
        raise TypeError(f"network must be what builds a network, got {built}; pass the class, or `lambda: Network()`")
    if isinstance(network, str) and network not in networks.__all__:
        raise ValueError(f"mpkit.networks has no {network!r}; pass the class, or a function that builds the network")
    network = getattr(networks, network) if isinstance(network, str) else network
    net: Any = network() if callable(network) else network
    check_kind("network", net, nn.Module, "a class or a function that makes an nn.Module, or a name")
    return net


def optimizer_of(optimizer: Any, net: nn.Module, lr: Rate | None) -> torch.optim.Optimizer:
    """An optimizer of the network's parameters: from a function of them, or a name and a learning rate."""
    if isinstance(optimizer, str):
        home: Any = torch.optim if optimizer.startswith("torch.") else optimizers
        rule = getattr(home, optimizer.removeprefix("torch."), None)
        if rule is None:
            known = ", ".join(optimizers.__all__)
            raise ValueError(f"no optimizer is called {optimizer!r}; there are {known} and torch.*")
        options = {"momentum": 0.9} if optimizer == "Momentum" else {}
        made = rule(net.parameters(), *([] if lr is None else [lr]), **options)
    else:
        made = optimizer(net.parameters()) if callable(optimizer) else optimizer
    check_kind("optimizer", made, torch.optim.Optimizer, "a name, or a function of the parameters that makes one")
    return made


def format_of(dtype: Dtype) -> torch.dtype | FloatFormat:
    """What `dtype` names: a native type, or the format that is emulated. "float16" and `torch.float16` are one.

    Raises:  ValueError for a name that no format has.
    """
    if isinstance(dtype, str):
        native = {"float16": torch.float16, "bfloat16": torch.bfloat16}
        return native[dtype] if dtype in native else get_format(dtype)
    return dtype


def cast_network(net: nn.Module, level: Casts, dtype: Dtype, recipe: str | Recipe | None) -> None:
    """Cast a network as `train` is asked to, in place."""
    if recipe is not None:
        cast_like(net, recipe)
    elif callable(level):
        level(net)
    else:
        cast = auto_mixed_precision if level in LEVELS else cast_like
        cast(net, level, format_of(dtype))


def scaler_of(scaler: Scales | Callable[[nn.Module], Scales], net: nn.Module) -> LossScaler | nn.Module | None:
    """A loss scaler for one run, None for none: from all that `train` takes."""
    if callable(scaler) and not isinstance(scaler, nn.Module | LossScaler):
        scaler = scaler(net)
    if isinstance(scaler, str):
        scaler = DynamicLossScaleManager() if scaler == "dynamic" else preset(scaler)
    if isinstance(scaler, Mapping):
        scaler = preset(**scaler)
    if isinstance(scaler, ScalePolicy):
        return PolicyLossScaler(scaler)
    if is_number(scaler):
        return StaticLossScaler(float(scaler))
    if callable(make := getattr(scaler, "get_update_cell", None)):
        return make()
    if scaler is None or isinstance(scaler, LossScaler | nn.Module):
        return copy.deepcopy(scaler)  # its state belongs to one run
    raise TypeError(f"scaler must be None, a number, a name, a policy, a LossScaler or a function, got {scaler!r}")


def boost_of(boost: Any, steps: int) -> AutoBoost | None:
    """The boost of a run of `steps` steps; None for what changes no more than the optimizer."""
    if isinstance(boost, AutoBoost) or boost in ("O0", "grad_centralization"):
        return copy.deepcopy(boost) if isinstance(boost, AutoBoost) else None
    named: dict[str, dict[str, Any]] = {level: {"level": level} for level in AutoBoost.levels}
    named["tuned"] = {"boost": {"mode": "tuned"}}
    if isinstance(boost, str) and boost not in named:
        names = boost.split("+")
        if unknown := [name for name in names if name not in FLAGS]:
            known = ", ".join((*named, "grad_centralization", *FLAGS))
            raise ValueError(f"no boost is called {unknown[0]!r}; there are {known}")
        named[boost] = {"level": "O0", "boost": {"mode": "manual", **{flag: flag in names for flag in FLAGS}}}
        if "grad_accumulation" in names:
            named[boost]["grad_accumulation"] = {"grad_accumulation_step": 2}
    sections = named[boost] if isinstance(boost, str) else boost
    check_kind("boost", sections, Mapping, "a name, a configuration or an AutoBoost")
    sections = {"level": "O1", **sections, "grad_freeze": {"total_steps": steps, **sections.get("grad_freeze", {})}}
    return AutoBoost(sections.pop("level"), sections)


def boosted(boost: object, net: nn.Module, rule: Any, steps: int) -> tuple[nn.Module, Any, AutoBoost | None]:
    """Network and optimizer as a boost makes them, and the boost that the step is told of."""
    if boost == "grad_centralization":
        process = OptimizerProcess(rule)
        process.add_grad_centralization(net)
        return net, process.generate_new_optimizer(), None
    auto = boost_of(boost, steps)
    return (net, rule, auto) if auto is None else (*auto.network_auto_process_train(net, rule), auto)


def step_of(
    net: nn.Module, loss: Callable[..., Tensor], wide: bool, rule: Any, sense: Any, **options: Any
) -> nn.Module:
    """The training step of these parts; wide: the loss is computed in float32."""
    whole = (Float32Loss if wide else WithLossCell)(net, loss)
    if sense is None:
        return BoostTrainOneStepCell(whole, rule, **options)
    return BoostTrainOneStepWithLossScaleCell(whole, rule, sense, **options)
