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
from mpkit.casting.lists import (
    AUTO_MADE_OF_WIDE,
    AUTO_PROMOTED,
    AUTO_TO_LOW,
    AUTO_TO_WIDE,
    AUTO_WRITTEN,
    BATCH_NORMS,
    BLACK_MODULES,
    KERAS_PROTECTED,
    WHITE_MODULES,
    WHITE_OPERATORS,
)
from mpkit.casting.low import Target
from mpkit.casting.marks import Forward, mark, mark_of
from mpkit.casting.mode import Rule
from mpkit.casting.rules import everything, forced, operator_lists, protected, recurrent, white_operators

# --- how a rule gets onto the modules of a network --------------------------------------------------------------------


def root_of(network: nn.Module) -> Forward:
    """The mark on the network itself, made if there is none."""
    return mark_of(network) or mark(network, Rule())


def settle(network: nn.Module, level: str = "") -> None:
    """Record the level on a network whose modules were marked."""
    root_of(network).level = level


def lowered(module: nn.Module, low: Target) -> Rule:
    """Everything in `low`, as a rule for `module`."""
    return recurrent(low) if isinstance(module, nn.RNNBase) else everything(low, low)


def _entry_of(module: nn.Module | None) -> Target | None:
    """What the arguments of a module are cast to where only its operations are listed.

    torch's recurrent layers compare the dtype of their input with that of the stored float32 weights.
    """
    return torch.float32 if isinstance(module, nn.RNNBase) else None


def auto_lists(low: Target, module: nn.Module | None = None) -> Rule:
    """The rule of level auto."""
    wide = AUTO_TO_WIDE | AUTO_MADE_OF_WIDE
    return operator_lists(low, AUTO_TO_LOW, wide, AUTO_PROMOTED, False, entry=_entry_of(module), into=AUTO_WRITTEN)


def _spread(network: nn.Module, rule_for: Callable[[nn.Module], Rule]) -> None:
    """Mark every module by its rule; one that the user set by `to_float` keeps its subtree."""
    seen: set[int] = set()

    def descend(module: nn.Module) -> None:
        found = mark_of(module)
        if id(module) in seen or (found is not None and found.by_user is not None):
            return
        seen.add(id(module))
        mark(module, rule_for(module))
        for child in module.children():
            descend(child)

    descend(network)


def put_white_list(network: nn.Module, low: Target, modules: tuple[type, ...], operators: frozenset[str]) -> None:
    """O1's mechanism: in modules of exactly these classes everything computes in `low`, elsewhere the operators do."""
    inside = {id(inner) for module in network.modules() if type(module) in modules for inner in module.modules()}

    def rule(module: nn.Module) -> Rule:
        return forced(low) if id(module) in inside else white_operators(low, operators, _entry_of(module))

    _spread(network, rule)


def _everything_in(network: nn.Module, low: Target) -> None:
    """Mark every module: all in `low`, whatever `to_float` said before."""
    for module in network.modules():
        mark(module, lowered(module, low))


def put_black_list(network: nn.Module, low: Target, black: tuple[type[nn.Module], ...]) -> None:
    """O2's mechanism: everything in `low` but the children that are instances of a class in `black`."""
    _everything_in(network, low)
    protect_children(network, low, lambda child: isinstance(child, black))
    root_of(network).result = torch.float32


def protect_children(module: nn.Module, low: Target, protects: Callable[[nn.Module], bool]) -> None:
    """Descendants that `protects` picks compute in float32 and give their result in `low`."""
    for child in module.children():
        if not protects(child):
            protect_children(child, low, protects)
            continue
        for inner in child.modules():  # only the protected module itself hands over in `low`
            takes_low = type(inner).forward in (nn.BatchNorm1d.forward, nn.LayerNorm.forward)
            result = low if inner is child else None
            mark(inner, protected(result or torch.float32, None if takes_low else torch.float32), result=result)


# --- the rows ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Level:
    """One row.

    Args:
        name:       as `auto_mixed_precision` or `cast_like` takes it.
        framework:  whose level it is.
        put:        (network, low precision) -> nothing: marks the modules.
        compute:    in words, what computes in which precision; `norms`, `result` and `parameters` too.
        dtype:      the low precision where the user names none.
        protected:  classes of modules that stay float32 inside.
        overrides:  whether it casts down what a module asks to have in float32 (`x.float()` in its forward).
        loss_scale: what the framework scales the loss by at this level.
        wide_loss:  whether `build_train_network` computes the loss in float32.
    """

    name: str
    framework: str
    put: Callable[[nn.Module, Target], None]
    compute: str
    norms: str
    result: str
    parameters: str = "float32"
    dtype: torch.dtype = torch.float16
    protected: tuple[type[nn.Module], ...] = ()
    overrides: bool = False
    loss_scale: str = "none"
    wide_loss: bool = False


def _nothing(network: nn.Module, low: Target) -> None:
    """O0: the network stays as it is."""


def _wide(network: nn.Module, low: Target) -> None:
    _everything_in(network, torch.float32)


def _white(network: nn.Module, low: Target) -> None:
    put_white_list(network, low, WHITE_MODULES, frozenset(WHITE_OPERATORS))


def _black(network: nn.Module, low: Target) -> None:
    put_black_list(network, low, BLACK_MODULES)


def _all_low(network: nn.Module, low: Target) -> None:
    put_black_list(network, low, ())


def _auto(network: nn.Module, low: Target) -> None:
    _spread(network, lambda module: auto_lists(low, module))


def _apex_o1(network: nn.Module, low: Target) -> None:
    _spread(network, lambda module: apex_lists(low, _entry_of(module)))


def _apex_o2(network: nn.Module, low: Target) -> None:
    _everything_in(network, low)
    protect_children(network, low, lambda m: isinstance(m, BATCH_NORMS) and bool(m.affine))
    root_of(network).result = torch.float32


def _keras(network: nn.Module, low: Target) -> None:
    _everything_in(network, low)
    protect_children(network, low, lambda m: isinstance(m, KERAS_PROTECTED))


def _torch(network: nn.Module, low: Target) -> None:
    _spread(network, lambda module: autocast_lists(low, _entry_of(module)))


_W, _ALL, _LISTS, _LAYERS = "float32", "all low", "lists: low, float32, promoted", "all low, layer by layer"
_AS_IT_WAS, _AS_COMPUTED, _INSIDE = "as without a level", "as computed", "float32 inside, low result"


def _rows(*rows: Level) -> dict[str, Level]:
    return {row.name: row for row in rows}


MINDSPORE = _rows(
    Level("O0", "mindspore", _nothing, _AS_IT_WAS, _AS_IT_WAS, _AS_COMPUTED),
    Level("O1", "mindspore", _white, "listed modules and operators low, results float32", _W, _W),
    Level(
        *("O2", "mindspore", _black, "all low but BatchNorm, LayerNorm", _INSIDE, _W),
        protected=BLACK_MODULES,
        overrides=True,
        loss_scale="dynamic 2^24",
        wide_loss=True,
    ),
    Level("O3", "mindspore", _all_low, _ALL, "low", _W, overrides=True, wide_loss=True),
    Level("auto", "mindspore", _auto, f"{_LISTS}; biases added in float32", _W, _AS_COMPUTED, wide_loss=True),
)
PRESETS = _rows(
    Level("apex_O0", "apex", _wide, _W, _W, _W, loss_scale="1"),
    Level("apex_O1", "apex", _apex_o1, _LISTS, "float32 but BatchNorm", _AS_COMPUTED, loss_scale="dynamic"),
    Level(
        *("apex_O2", "apex", _apex_o2, "all low but affine BatchNorm", "BatchNorm float32 inside", _W),
        parameters="16 bit, float32 masters",
        protected=BATCH_NORMS,
        overrides=True,
        loss_scale="dynamic",
    ),
    Level("apex_O3", "apex", _all_low, _ALL, "low", _W, "16 bit, no masters", overrides=True, loss_scale="1"),
    Level("keras_float32", "keras", _wide, _W, _W, _W),
    Level(
        *("keras_mixed_float16", "keras", _keras, _LAYERS, _INSIDE, "low"),
        protected=KERAS_PROTECTED,
        overrides=True,
        loss_scale="dynamic 2^15",
    ),
    Level(
        *("keras_mixed_bfloat16", "keras", _keras, _LAYERS, _INSIDE, "low"),
        dtype=torch.bfloat16,
        protected=KERAS_PROTECTED,
        overrides=True,
    ),
    Level(
        *("torch_autocast", "torch", _torch, f"CUDA's {_LISTS}", "float32 but BatchNorm", _AS_COMPUTED),
        loss_scale="GradScaler",
    ),
)


def preset_table() -> list[dict[str, str]]:
    """What every level does, as rows: a dictionary per level, the same keys in each."""
    levels = {f"mindspore {name}": row for name, row in MINDSPORE.items() if name != "O0"} | PRESETS
    return [_in_words(name, row) for name, row in levels.items()]


def _in_words(name: str, row: Level) -> dict[str, str]:
    return {
        "preset": name,
        "compute": row.compute,
        "norms": row.norms,
        "result": row.result,
        "parameters there": row.parameters,
        "default loss scale there": row.loss_scale,
    }
