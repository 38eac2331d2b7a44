"""The parts of a training by name: network, optimizer, level, scaler, boost, recipe, and the step that they make."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit import networks, optimizers
from mpkit.arguments import is_number
from mpkit.boost import AutoBoost, BoostTrainOneStepCell, BoostTrainOneStepWithLossScaleCell, OptimizerProcess
from mpkit.boost.config import FLAGS
from mpkit.casting import LEVELS, Recipe, auto_mixed_precision, cast_like
from mpkit.experiment.batches import found
from mpkit.formats import FloatFormat, get_format
from mpkit.optimizers.arguments import Rate
from mpkit.policies import ScalePolicy, preset
from mpkit.policies.presets import FRAMEWORKS
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


@dataclass
class Parts:
    """What a training is made of, put together in the order in which each part must see the others."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    loss: nn.Module
    scaler: LossScaler | nn.Module | None
    boost: AutoBoost | None
    wide: bool

    @classmethod
    def built(
        cls,
        network: Builds,
        optimizer: Optimizes,
        lr: Rate | None,
        loss: Callable[[Tensor, Tensor], Tensor] | None,
        level: Casts,
        dtype: Dtype,
        scaler: Scales | Callable[[nn.Module], Scales],
        boost: Boosts,
        recipe: str | Recipe | None,
        steps: int,
        device: torch.device,
    ) -> Parts:
        """The parts for `steps` steps, from the arguments of `train`.

        Raises:  TypeError, ValueError for what names nothing, or is of another kind.
        """
        net = network_of(network).to(device)
        rule = optimizer_of(optimizer, net, lr)
        boosted = boost_of(boost, steps)
        if boost == "grad_centralization":
            process = OptimizerProcess(rule)
            process.add_grad_centralization(net)
            rule = process.generate_new_optimizer()
        elif boosted is not None:
            net, rule = boosted.network_auto_process_train(net, rule)
        _cast(net, level, dtype, recipe)
        wide = recipe is not None or level != "O0"
        return cls(net, rule, _Loss(loss), scaler_of(scaler, net), boosted, wide)

    def cell(self, hooks: list[Any]) -> nn.Module:
        """One training step of these parts."""
        whole = (Float32Loss if self.wide else WithLossCell)(self.network, self.loss)
        if self.scaler is None:
            return BoostTrainOneStepCell(whole, self.optimizer, boost=self.boost, hooks=hooks).train()
        sense = self.scaler
        return BoostTrainOneStepWithLossScaleCell(whole, self.optimizer, sense, boost=self.boost, hooks=hooks).train()


class _Loss(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor] | None) -> None:
        super().__init__()
        self.function = _usual if loss is None else loss

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        return self.function(output, label)


def is_usual(loss: nn.Module) -> bool:
    """Whether a loss of `Parts` is the one that stands for None, which takes the last axis for the classes."""
    return isinstance(loss, _Loss) and loss.function is _usual


def _usual(output: Tensor, label: Tensor) -> Tensor:
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
        raise TypeError(
            f"network must be what builds a network, got a {type(network).__name__} that is built already, whose "
            "weights would not follow the seed; pass the class, or `lambda: Network(hidden=64)`"
        )
    if isinstance(network, str):
        known = getattr(networks, network, None)
        if known is None and ":" not in network:
            raise ValueError(f"mpkit.networks has no {network!r}; give a class, a function, or 'package.module:name'")
        network = known if known is not None else found(network)
    if not callable(network):
        raise TypeError(f"network must be a class, a function or a name, got {network!r}")
    net = network()
    if not isinstance(net, nn.Module):
        raise TypeError(f"network() must return an nn.Module, got {type(net).__name__}")
    return net


def optimizer_of(optimizer: object, net: nn.Module, lr: Rate | None) -> torch.optim.Optimizer:
    """An optimizer of the network's parameters: from a function of them, or a name and a learning rate."""
    if isinstance(optimizer, str):
        home: Any = torch.optim if optimizer.startswith("torch.") else optimizers
        rule = getattr(home, optimizer.removeprefix("torch."), None)
        if rule is None:
            raise ValueError(
                f"no optimizer is called {optimizer!r}; there are {', '.join(optimizers.__all__)} and torch.*"
            )
        needs = inspect.signature(rule).parameters
        options = (
            {"momentum": 0.9} if "momentum" in needs and needs["momentum"].default is inspect.Parameter.empty else {}
        )
        made = rule(net.parameters(), *([] if lr is None else [lr]), **options)
    elif callable(optimizer):
        made = optimizer(net.parameters())
    else:
        raise TypeError(f"optimizer must be a name or a function of the parameters, got {type(optimizer).__name__}")
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"optimizer(parameters) must return a torch.optim.Optimizer, got {type(made).__name__}")
    return made


def format_of(dtype: Dtype) -> torch.dtype | FloatFormat:
    """What `dtype` names: a native type, or the format that is emulated. "float16" and `torch.float16` are one.

    Raises:  ValueError for a name that no format has.
    """
    if isinstance(dtype, str):
        native = {"float16": torch.float16, "bfloat16": torch.bfloat16}
        return native[dtype] if dtype in native else get_format(dtype)
    return dtype


def low_format(level: Casts, dtype: Dtype, recipe: str | Recipe | None) -> str:
    """The name of the format whose range bounds the scaled gradients."""
    if recipe is not None or level == "O0":
        return "fp32"
    low = format_of(dtype)
    return low.name if isinstance(low, FloatFormat) else {torch.bfloat16: "bf16"}.get(low, "fp16")


def _cast(net: nn.Module, level: Casts, dtype: Dtype, recipe: str | Recipe | None) -> None:
    if recipe is not None:
        cast_like(net, recipe)
    elif callable(level):
        level(net)
    elif level in LEVELS:
        auto_mixed_precision(net, level, format_of(dtype))
    else:
        cast_like(net, level, format_of(dtype))


def scaler_of(scaler: Scales | Callable[[nn.Module], Scales], net: nn.Module) -> LossScaler | nn.Module | None:
    """A loss scaler for one run, None for none: from all that `train` takes."""
    if callable(scaler) and not isinstance(scaler, nn.Module | LossScaler):
        scaler = scaler(net)
    if isinstance(scaler, str):
        if scaler == "dynamic":
            return DynamicLossScaleManager().get_update_cell()
        if scaler not in FRAMEWORKS:
            raise ValueError(f"no loss scaler is called {scaler!r}; there are dynamic, {', '.join(FRAMEWORKS)}")
        scaler = {"framework": scaler}
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


def boost_of(boost: object, steps: int) -> AutoBoost | None:
    """The boost of a run of `steps` steps; None for what changes no more than the optimizer."""
    freeze = {"total_steps": steps}
    if isinstance(boost, AutoBoost):
        return copy.deepcopy(boost)
    if isinstance(boost, Mapping):
        sections = dict(boost)
        named = sections.pop("level", "O1")
        return AutoBoost(named, {**sections, "grad_freeze": {**freeze, **sections.get("grad_freeze", {})}})
    if not isinstance(boost, str):
        raise TypeError(f"boost must be a name, a configuration or an AutoBoost, got {type(boost).__name__}")
    if boost in ("O0", "grad_centralization"):
        return None
    if boost in AutoBoost.levels:
        return AutoBoost(boost, {"grad_freeze": freeze})
    if boost == "tuned":
        return AutoBoost("O1", {"boost": {"mode": "tuned"}, "grad_freeze": freeze})
    names = boost.split("+")
    unknown = [name for name in names if name not in FLAGS]
    if unknown:
        raise ValueError(
            f"no boost is called {unknown[0]!r}; there are "
            + ", ".join((*AutoBoost.levels, "tuned", "grad_centralization", *FLAGS))
        )
    sections = {"boost": {"mode": "manual", **{flag: flag in names for flag in FLAGS}}}
    if "grad_freeze" in names:
        sections["grad_freeze"] = freeze
    if "grad_accumulation" in names:
        sections["grad_accumulation"] = {"grad_accumulation_step": 2}
    return AutoBoost("O0", sections)
