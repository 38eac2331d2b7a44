"""The levels O0 to O3 and the manual cast, put on a network and taken off again."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mpkit.casting import operations as ops
from mpkit.casting.mode import mark, mark_of, unmark
from mpkit.casting.rules import PLAIN, Rule, Target, everything, protected, white_operators

LEVELS = ("O0", "O1", "O2", "O3", "auto")

WHITE_MODULES: tuple[type[nn.Module], ...] = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
    nn.LSTMCell,
    nn.RNNCell,
    nn.GRUCell,
)
WHITE_OPERATORS = [
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "matmul",
    "mm",
    "bmm",
    "prelu",
    "relu",
    "outer",
]
BLACK_MODULES: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm)


def auto_mixed_precision(network: nn.Module, amp_level: str = "O0", dtype: Target = torch.float16) -> nn.Module:
    """Cast the operations of `network` at a level; the same object is returned, its parameters stay float32.

    Args:
        network:   any module.
        amp_level: "O0" nothing; "O1" listed modules and operators in `dtype` with float32 results; "O2" everything but
                   BatchNorm and LayerNorm children; "O3" everything. O2 and O3 give float32 results.
        dtype:     torch.float16 or torch.bfloat16.
    Raises:  TypeError if `network` is not a module; ValueError for another dtype or level.
    Source:  MindSpore 2.7 amp.auto_mixed_precision. There O1 returns a rewritten copy and O2, O3 a wrapper; here nothing
             is wrapped or renamed. As there, O0 does nothing at all: `remove_mixed_precision` takes a level off.
    """
    if not isinstance(network, nn.Module):
        raise TypeError(
            f"auto_mixed_precision casts an nn.Module, got {type(network).__name__}; pass the network itself"
        )
    check_dtype(dtype)
    if amp_level == "O0":
        return network
    _warn_of_repetition(network, amp_level)
    if amp_level == "O1":
        _white_list(network, dtype, WHITE_MODULES, ops.spellings(*WHITE_OPERATORS))
    elif amp_level == "O2":
        _black_list(network, dtype, BLACK_MODULES)
    elif amp_level == "O3":
        _black_list(network, dtype, ())
    else:
        raise ValueError(f"amp_level is one of {', '.join(LEVELS)} (case matters), got {amp_level!r}")
    root = mark_of(network)
    assert root is not None
    root.level = amp_level
    return network


def check_dtype(dtype: Any) -> None:
    """Levels compute in a 16-bit dtype."""
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"dtype is torch.float16 or torch.bfloat16, got {dtype!r}")


def _warn_of_repetition(network: nn.Module, level: str) -> None:
    old = amp_level(network)
    if old:
        warnings.warn(
            f"this network already runs at level {old!r}; it now changes to {level!r}. "
            "Call remove_mixed_precision(network) first to change levels quietly.",
            stacklevel=3,
        )


def amp_level(network: nn.Module) -> str:
    """The level recorded on this network, "" if none."""
    root = mark_of(network)
    return root.level if root is not None else ""


def _lowered(module: nn.Module, low: Target) -> Rule:
    # torch's recurrent layers compare their input's dtype with the stored weights' before they compute
    return everything(low, None, torch.float32 if isinstance(module, nn.RNNBase) else low)


def _black_list(network: nn.Module, low: Target, black: Sequence[type[nn.Module]]) -> None:
    """O2's mechanism: everything in `low` but the children that are instances of a class in `black`."""
    for module in network.modules():
        mark(module, _lowered(module, low))
    _protect_children(network, low, tuple(black))
    root = mark_of(network)
    assert root is not None
    root.result = torch.float32


def _protect_children(module: nn.Module, low: Target, black: tuple[type[nn.Module], ...]) -> None:
    for child in module.children():
        if isinstance(child, black):
            for inner in child.modules():
                mark(inner, protected(_protected_entry(inner)), result=low if inner is child else None)
        else:
            _protect_children(child, low, black)


def _protected_entry(module: nn.Module) -> Target | None:
    takes_low = (nn.modules.batchnorm._BatchNorm.forward, nn.LayerNorm.forward)
    return None if type(module).forward in takes_low else torch.float32


def _white_list(
    network: nn.Module, low: Target, modules: Sequence[type[nn.Module]], operators: frozenset[ops.Function]
) -> None:
    """O1's mechanism: exact classes compute in `low` throughout, elsewhere listed operators do; results are float32."""
    inside, outside = everything(low, torch.float32), white_operators(low, operators)
    seen: set[int] = set()

    def descend(module: nn.Module, rule: Rule) -> None:
        found = mark_of(module)
        if id(module) in seen or (found is not None and found.by_user):
            return
        seen.add(id(module))
        rule = inside if type(module) in modules else rule
        mark(module, rule)
        for child in module.children():
            descend(child, rule)

    descend(network, outside)


def to_float(module: nn.Module, dtype: Target) -> nn.Module:
    """Make `module` and all modules in it compute in `dtype`; the last call wins, module by module.

    Float arguments are cast on entry and parameters where they are used; integers and bools are left alone, results are
    not cast back. Parameters stay float32.

    Args:    dtype is torch.float16, torch.float32 or torch.bfloat16.
    Raises:  TypeError if `module` is not a module, ValueError for another dtype.
    Source:  MindSpore 2.7 Cell.to_float (graph mode's placement of the cast on entry).
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"to_float sets the precision of an nn.Module, got {type(module).__name__}; cast a tensor with .to"
        )
    if dtype not in (torch.float16, torch.float32, torch.bfloat16):
        raise ValueError(f"to_float takes torch.float16, torch.float32 or torch.bfloat16, got {dtype!r}")
    for inner in module.modules():
        old = mark_of(inner)
        around = {"result": old.result, "level": old.level} if old is not None else {}
        mark(inner, _lowered(inner, dtype), by_user=True, **around)
    return module


def remove_mixed_precision(network: nn.Module) -> nn.Module:
    """Take every level and every `to_float` off `network` and all modules in it; the plain network is back."""
    if not isinstance(network, nn.Module):
        raise TypeError(f"remove_mixed_precision restores an nn.Module, got {type(network).__name__}")
    for module in network.modules():
        unmark(module)
    return network


__all__ = ["LEVELS", "PLAIN", "amp_level", "auto_mixed_precision", "remove_mixed_precision", "to_float"]
