"""The levels as rows of one table: MindSpore's, and those of other frameworks, since one letter means different things.

A row says in words what a level does and holds the function that puts it on a network. In mpkit parameters are float32
at every level and are their own master weights, cast at use: what apex_O2 computes is the same; apex_O3, which updates
16-bit weights, is reproduced in its casts only. No row sets a loss scale; `loss_scale` says what the framework adds.

Source:  MindSpore 2.7 amp; NVIDIA apex amp (frontend, lists); Keras 3 mixed_precision dtype policies; torch 2.13
         autocast on CUDA. How each was checked stands in `lists`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from mpkit.casting.frameworks import apex_lists, autocast_lists
from mpkit.casting.lists import BLACK_MODULES, KERAS_PROTECTED, WHITE_MODULES, WHITE_OPERATORS
from mpkit.casting.marking import (
    auto_lists,
    entry_of,
    everything_in,
    protect_children,
    put_black_list,
    put_white_list,
    root_of,
    spread,
)
from mpkit.casting.targets import Target


@dataclass(frozen=True)
class Level:
    """One row.

    Args:
        name:       as `auto_mixed_precision` or `cast_like` takes it.
        framework:  whose level it is.
        put:        (network, low precision) -> nothing: marks the modules.
        dtype:      the low precision where the user names none.
        compute:    in words, what computes in which precision; `norms`, `result` and `parameters` too.
        protected:  classes of modules that stay float32 inside.
        overrides:  whether it casts down what a module asks to have in float32 (`x.float()` in its forward).
        loss_scale: what the framework scales the loss by at this level.
        wide_loss:  whether `build_train_network` computes the loss in float32.
    """

    name: str
    framework: str
    put: Callable[[nn.Module, Target], None]
    dtype: torch.dtype
    compute: str
    norms: str
    result: str
    parameters: str = "float32"
    protected: tuple[type[nn.Module], ...] = ()
    overrides: bool = False
    loss_scale: str = "none"
    wide_loss: bool = False


def _nothing(network: nn.Module, low: Target) -> None:
    """O0: the network stays as it is."""


def _wide(network: nn.Module, low: Target) -> None:
    everything_in(network, torch.float32)


def _white(network: nn.Module, low: Target) -> None:
    put_white_list(network, low, WHITE_MODULES, frozenset(WHITE_OPERATORS))


def _black(network: nn.Module, low: Target) -> None:
    put_black_list(network, low, BLACK_MODULES)


def _all_low(network: nn.Module, low: Target) -> None:
    put_black_list(network, low, ())


def _auto(network: nn.Module, low: Target) -> None:
    spread(network, lambda module: auto_lists(low, module))


def _apex_o1(network: nn.Module, low: Target) -> None:
    spread(network, lambda module: apex_lists(low, entry_of(module)))


def _apex_o2(network: nn.Module, low: Target) -> None:
    everything_in(network, low)
    protect_children(network, low, lambda m: isinstance(m, nn.modules.batchnorm._BatchNorm) and m.affine)
    root_of(network).result = torch.float32


def _keras(network: nn.Module, low: Target) -> None:
    everything_in(network, low)
    protect_children(network, low, lambda m: isinstance(m, KERAS_PROTECTED))


def _torch(network: nn.Module, low: Target) -> None:
    spread(network, lambda module: autocast_lists(low, entry_of(module)))


_HALF, _BF16, _WIDE = torch.float16, torch.bfloat16, "float32"
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
_LISTS = "lists: low, float32, promoted"
_LAYERS = "all low, layer by layer"
_INSIDE = "float32 inside, low result"


def _rows(*rows: Level) -> dict[str, Level]:
    return {row.name: row for row in rows}


MINDSPORE = _rows(
    Level("O0", "mindspore", _nothing, _HALF, "as without a level", "as without a level", "as computed"),
    Level("O1", "mindspore", _white, _HALF, "listed modules and operators low, results float32", _WIDE, _WIDE),
    Level(
        "O2",
        "mindspore",
        _black,
        _HALF,
        "all low but BatchNorm, LayerNorm",
        _INSIDE,
        _WIDE,
        protected=BLACK_MODULES,
        overrides=True,
        loss_scale="dynamic 2^24",
        wide_loss=True,
    ),
    Level("O3", "mindspore", _all_low, _HALF, "all low", "low", _WIDE, overrides=True, wide_loss=True),
    Level(
        "auto", "mindspore", _auto, _HALF, f"{_LISTS}; biases added in float32", _WIDE, "as computed", wide_loss=True
    ),
)
OTHERS = _rows(
    Level("apex_O0", "apex", _wide, _HALF, _WIDE, _WIDE, _WIDE, loss_scale="1"),
    Level("apex_O1", "apex", _apex_o1, _HALF, _LISTS, "float32 but BatchNorm", "as computed", loss_scale="dynamic"),
    Level(
        "apex_O2",
        "apex",
        _apex_o2,
        _HALF,
        "all low but affine BatchNorm",
        "BatchNorm float32 inside",
        _WIDE,
        "16 bit, float32 masters",
        protected=_BATCH_NORMS,
        overrides=True,
        loss_scale="dynamic",
    ),
    Level(
        "apex_O3",
        "apex",
        _all_low,
        _HALF,
        "all low",
        "low",
        _WIDE,
        "16 bit, no masters",
        overrides=True,
        loss_scale="1",
    ),
    Level("keras_float32", "keras", _wide, _HALF, _WIDE, _WIDE, _WIDE),
    Level(
        "keras_mixed_float16",
        "keras",
        _keras,
        _HALF,
        _LAYERS,
        _INSIDE,
        "low",
        protected=KERAS_PROTECTED,
        overrides=True,
        loss_scale="dynamic 2^15",
    ),
    Level(
        "keras_mixed_bfloat16",
        "keras",
        _keras,
        _BF16,
        _LAYERS,
        _INSIDE,
        "low",
        protected=KERAS_PROTECTED,
        overrides=True,
    ),
    Level(
        "torch_autocast",
        "torch",
        _torch,
        _HALF,
        f"CUDA's {_LISTS}",
        "float32 but BatchNorm",
        "as computed",
        loss_scale="GradScaler",
    ),
)
