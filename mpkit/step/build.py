"""From a network, an optimizer and a level to a train cell."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

import mpkit
from mpkit.arguments import Count, check_flag, check_kind, checked
from mpkit.casting import amp_level, auto_mixed_precision, get_black_list, to_float
from mpkit.casting.low import map_tensors
from mpkit.casting.marks import check_castable
from mpkit.casting.presets import MINDSPORE, Level, protect_children
from mpkit.optimizers.arguments import Trainer
from mpkit.scalers import DynamicLossScaleManager, LossScaleManager
from mpkit.step.cells import Hooks, Norm, TrainOneStepCell, TrainOneStepWithLossScaleCell, WithLossCell

AmpLevel = Literal["O0", "O1", "O2", "O3", "auto"]
STEP_OPTIONS = ("hooks", "clip_norm", "accumulation_steps")


def _dtype(name: str, value: Any) -> None:
    if value not in (torch.float16, torch.float32):
        way_out = 'for another format call auto_mixed_precision(network, level, dtype), and build with level="O0"'
        raise TypeError(f"{name} is torch.float16 or torch.float32, got {value!r}; {way_out}")


def _manager(name: str, value: Any) -> None:
    check_kind(name, value, LossScaleManager, "a LossScaleManager such as DynamicLossScaleManager()", optional=True)


# what a level sets and a keyword overrides, each with its check
OVERRIDES: dict[str, Callable[[str, Any], Any]] = {
    "cast_model_type": _dtype,
    "keep_batchnorm_fp32": check_flag,
    "loss_scale_manager": _manager,
    "boost_config_dict": lambda name, value: value,
}


class Float32Loss(WithLossCell):
    """As `WithLossCell`, with the network's output and the label cast to float32 (float tensors only) for the loss."""

    def forward(self, data: object, label: object) -> Tensor:
        return self.loss_fn(widened(self.backbone(data)), widened(label))


def widened(value: object) -> Any:
    """Float tensors, alone or in a nest of tuples (named too), lists, dicts and dataclasses, as float32."""
    return map_tensors(lambda x: x.float() if x.is_floating_point() else x, value)


@checked
def build_train_network(
    network: nn.Module,
    optimizer: Trainer,
    loss_fn: nn.Module | None = None,
    level: AmpLevel = "O0",
    boost_level: str = "O0",
    *,
    hooks: Hooks = (),
    clip_norm: Norm | None = None,
    accumulation_steps: Count = 1,
    **kwargs: Any,
) -> TrainOneStepCell:
    """Cast a network at a level, add the loss, and wrap both with the optimizer into a train cell in training mode.

    Args:
        network, optimizer, loss_fn:  without `loss_fn` the network itself returns the loss.
        level:        "O0", "O1", "O2", "O3" or "auto"; sets the defaults of the keywords below.
        boost_level:  "O0", or "O1" and "O2" for the boost train cells; O0 has them too when `boost_config_dict`
                      switches an algorithm on (in MindSpore O0 does not read it).
        cast_model_type:      torch.float16 (O2, O3) or torch.float32 (O0, O1, auto).
        keep_batchnorm_fp32:  protect the norm layers of a network cast to float16 (True for O2).
        loss_scale_manager:   a manager, or None for no loss scaling. O2 alone has one by default, a new
                      `DynamicLossScaleManager()`. One that does not drop overflowing updates
                      (`FixedLossScaleManager(s, False)`) sets `sens`; give the optimizer `loss_scale=s` then.
        boost_config_dict:    settings of the boost algorithms.
        hooks, clip_norm, accumulation_steps:  passed to the train cell.
    Raises:  TypeError for another kind, ValueError for an unknown level or keyword.
    Source:  MindSpore 2.7 amp.build_train_network. There O2's default manager is one instance per process, and an
             update cell is refused on a CPU; mpkit makes a new manager each time and trains anywhere.
    """
    if unknown := kwargs.keys() - OVERRIDES.keys():
        raise ValueError(f"unknown keyword {min(unknown)!r}; there are {', '.join([*OVERRIDES, *STEP_OPTIONS])}")
    for name, value in kwargs.items():
        OVERRIDES[name](name, value)
    row = MINDSPORE[level]
    keep = kwargs.get("keep_batchnorm_fp32", bool(row.protected))
    dtype = kwargs.get("cast_model_type", row.dtype if row.overrides else torch.float32)
    scaled = level == "O2" and "loss_scale_manager" not in kwargs
    manager = DynamicLossScaleManager() if scaled else kwargs.get("loss_scale_manager")
    boosted = _boost(boost_level, kwargs.get("boost_config_dict"))
    # at O0 the network keeps the level that it had already
    wide = row.wide_loss or (level == "O0" and MINDSPORE.get(amp_level(network), row).wide_loss)
    with_loss: Any = Float32Loss if wide else WithLossCell
    kind = _train_cell(manager, boosted)

    def cell_of(network: nn.Module, optimizer: Any) -> TrainOneStepCell:
        whole = network if loss_fn is None else with_loss(network, loss_fn)
        return kind(whole, optimizer, hooks=hooks, clip_norm=clip_norm, accumulation_steps=accumulation_steps)

    cell = cell_of(network, optimizer)  # refuses what does not go together, before anything is changed
    if boosted is not None:
        if level != "O0" or dtype == torch.float16:
            check_castable(network)  # what the level refuses, too
        network, optimizer = boosted.network_auto_process_train(network, optimizer)
        cell = cell_of(network, optimizer)
    _cast(network, row, dtype, keep)
    return cell.train()


def _cast(network: nn.Module, level: Level, cast: torch.dtype, keep: bool) -> None:
    """MindSpore's order of decisions; O2 and O3 do not go through `auto_mixed_precision` here."""
    if cast == torch.float16:
        to_float(network, torch.float16)
        if keep:
            norms = tuple(get_black_list())
            protect_children(network, torch.float16, lambda child: isinstance(child, norms))
    elif level.protected and not keep:
        to_float(network, torch.float16)  # even though cast_model_type is float32
    elif not level.overrides:
        auto_mixed_precision(network, level.name)


def _train_cell(manager: LossScaleManager | None, boosted: Any) -> Callable[..., TrainOneStepCell]:
    """What makes the cell of a network and its optimizer."""
    plain: Any = TrainOneStepCell
    scaled: Any = TrainOneStepWithLossScaleCell
    if boosted is not None or getattr(manager, "for_boost", False):
        plain = partial(mpkit.BoostTrainOneStepCell, boost=boosted)
        scaled = partial(mpkit.BoostTrainOneStepWithLossScaleCell, boost=boosted)
    if manager is None:
        return plain
    cell = manager.get_update_cell()
    return partial(plain, sens=float(manager.get_loss_scale())) if cell is None else partial(scaled, scale_sense=cell)


def _boost(level: str, config: dict[str, Any] | None) -> Any:
    """The AutoBoost of a level and its configuration, None where nothing is asked for.

    Boost stands above this module and is no part of a step: a level asks for it by name, and so it is looked up, in the
    package's table of public names.
    """
    if level == "O0" and not config:
        return None
    boosted = mpkit.AutoBoost(level, config)
    return boosted if level != "O0" or any(boosted.flags.values()) else None
