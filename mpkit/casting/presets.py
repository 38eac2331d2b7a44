"""The levels as rows of one table: MindSpore's, and those of other frameworks, since one letter means different things.

| level | computes | norms | result | parameters there | loss scale there |
|---|---|---|---|---|---|
| O0 | as without a level | as without a level | as computed | float32 | none |
| O1 | listed modules and operators low | float32 | float32 | float32 | none |
| O2 | all low but BatchNorm, LayerNorm | float32 inside, low result | float32 | float32 | dynamic 2^24 |
| O3 | all low | low | float32 | float32 | none |
| auto | lists: low, float32, promoted; biases in float32 | float32 | as computed | float32 | none |
| apex_O0 | float32 | float32 | float32 | float32 | 1 |
| apex_O1 | lists: low, float32, promoted | float32 but BatchNorm | as computed | float32 | dynamic |
| apex_O2 | all low but affine BatchNorm | BatchNorm float32 inside | float32 | 16 bit, float32 masters | dynamic |
| apex_O3 | all low | low | float32 | 16 bit, no masters | 1 |
| keras_float32 | float32 | float32 | float32 | float32 | none |
| keras_mixed_float16 | all low, layer by layer | float32 inside, low result | low | float32 | dynamic 2^15 |
| keras_mixed_bfloat16 | all low, layer by layer | float32 inside, low result | low | float32 | none |
| torch_autocast | CUDA's lists: low, float32, promoted | float32 but BatchNorm | as computed | float32 | GradScaler |

In mpkit parameters are float32 at every level and are their own master weights, cast at use: what apex_O2 computes is
the same; apex_O3, which updates 16-bit weights, is reproduced in its casts only. No row sets a loss scale.

Source:  MindSpore 2.7 amp; NVIDIA apex amp (frontend, lists); Keras 3 mixed_precision dtype policies; torch 2.13
         autocast on CUDA. How each was checked stands in `operations.toml`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from mpkit.casting.low import Target
from mpkit.casting.marks import mark, mark_of, root_of
from mpkit.casting.mode import Rule
from mpkit.casting.operators import LISTS, MODULES
from mpkit.casting.rules import entry_of, forced, listed, lowered, protected, white_operators

_WIDE = torch.float32

# --- how rules get onto the modules of a network ----------------------------------------------------------------------


def _spread(network: nn.Module, rule_for: Callable[[nn.Module], Rule]) -> None:
    """Mark every module by its rule; one that the user set by `to_float` keeps its subtree."""
    found = mark_of(network)
    if found is None or found.by_user is None:
        mark(network, rule_for(network))
        for child in network.children():
            _spread(child, rule_for)


def put_white_list(network: nn.Module, low: Target, modules: tuple[type, ...], operators: frozenset[str]) -> None:
    """O1's mechanism: in modules of exactly these classes everything computes in `low`, elsewhere the operators do."""
    inside = {id(inner) for module in network.modules() if type(module) in modules for inner in module.modules()}
    _spread(network, lambda m: forced(low) if id(m) in inside else white_operators(low, operators, entry_of(m)))


def put_black_list(
    network: nn.Module, low: Target, protects: Callable[[nn.Module], bool], result: Target | None = torch.float32
) -> None:
    """O2's mechanism: everything in `low`, whatever `to_float` said before, but the children that `protects` picks."""
    for module in network.modules():
        mark(module, lowered(module, low))
    protect_children(network, low, protects)
    root_of(network).result = result


def protect_children(module: nn.Module, low: Target, protects: Callable[[nn.Module], bool]) -> None:
    """Descendants that `protects` picks compute in float32 and give their result in `low`."""
    for child in module.children():
        if not protects(child):
            protect_children(child, low, protects)
            continue
        for inner in child.modules():  # only the protected module itself hands over in `low`
            takes_low = type(inner).forward in (nn.BatchNorm1d.forward, nn.LayerNorm.forward)
            result = low if inner is child else None
            mark(inner, protected(result or _WIDE, None if takes_low else _WIDE), result=result)


# --- the rows ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Level:
    """One row.

    Args:
        name:      as `auto_mixed_precision` or `cast_like` takes it.
        lists:     the table of operators that it casts, "" where it casts all.
        protected: classes of modules that stay float32 inside.
        overrides: whether `build_train_network` casts the whole network to float16 at it.
        result:    what results of the network are cast to; None: as computed.
        dtype:     the low precision where the user names none; with float32 the user has no say.
        wide_loss: whether `build_train_network` computes the loss in float32.
    """

    name: str
    lists: str = ""
    protected: tuple[type[nn.Module], ...] = ()
    overrides: bool = False
    result: torch.dtype | None = None
    dtype: torch.dtype = torch.float16
    wide_loss: bool = False

    def put(self, network: nn.Module, low: Target) -> None:
        """Mark the modules of `network`, and record the level on it."""
        if self.lists == "mindspore":
            put_white_list(network, low, MODULES["white"], frozenset(LISTS["mindspore"]["low"]))
        elif self.lists:
            _spread(network, lambda module: listed(self.lists, low, entry_of(module)))
        else:
            low = torch.float32 if self.dtype is torch.float32 else low
            put_black_list(network, low, self._protects, self.result)
        root_of(network).level = self.name

    def _protects(self, module: nn.Module) -> bool:
        return isinstance(module, self.protected) and (self.name != "apex_O2" or bool(module.affine))


def _table(*rows: Level) -> dict[str, Level]:
    return {row.name: row for row in rows}


MINDSPORE = _table(
    Level("O0"),
    Level("O1", "mindspore"),
    Level("O2", "", MODULES["black"], True, _WIDE, wide_loss=True),
    Level("O3", "", (), True, _WIDE, wide_loss=True),
    Level("auto", "auto", wide_loss=True),
)
PRESETS = _table(
    Level("apex_O0", dtype=_WIDE),
    Level("apex_O1", "apex"),
    Level("apex_O2", "", MODULES["batch_norms"], result=_WIDE),
    Level("apex_O3", result=_WIDE),
    Level("keras_float32", dtype=_WIDE),
    Level("keras_mixed_float16", "", MODULES["keras"]),
    Level("keras_mixed_bfloat16", "", MODULES["keras"], dtype=torch.bfloat16),
    Level("torch_autocast", "torch"),
)
