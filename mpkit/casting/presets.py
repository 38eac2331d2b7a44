"""The levels of other frameworks as presets of the same mechanism, because the same letter means different things.

| preset | compute | norms | result | parameters there | default loss scale there |
|---|---|---|---|---|---|
| mindspore O1 | listed modules and operators low, results float32 | float32 | float32 | float32 | none |
| mindspore O2 | all low but BatchNorm, LayerNorm | float32 inside, low result | float32 | float32 | dynamic 2^24 |
| mindspore O3 | all low | low | float32 | float32 | none |
| mindspore auto | lists: low, float32, widest; biases added in float32 | float32 | as computed | float32 | none |
| apex_O0 | float32 | float32 | float32 | float32 | 1 |
| apex_O1 | lists: low, float32, widest | float32 but BatchNorm | as computed | float32 | dynamic |
| apex_O2 | all low but affine BatchNorm | BatchNorm float32 inside | float32 | 16 bit, float32 masters | dynamic |
| apex_O3 | all low | low | float32 | 16 bit, no masters | 1 |
| keras_float32 | float32 | float32 | float32 | float32 | none |
| keras_mixed_float16 | all low, layer by layer | float32 inside, low result | low | float32 | dynamic 2^15 |
| keras_mixed_bfloat16 | all low, layer by layer | float32 inside, low result | low | float32 | none |
| torch_autocast | CUDA's lists: low, float32, widest | float32 but BatchNorm | as computed | float32 | GradScaler |

In mpkit parameters are float32 at every preset and are their own master weights, cast at use: what apex_O2 computes
is the same; apex_O3, which updates 16-bit weights, is reproduced in its casts only. No preset sets a loss scale.

Source:  NVIDIA apex amp (frontend, lists); Keras 3 mixed_precision dtype policies; torch 2.13 autocast on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpkit.casting.frameworks import apex_lists, autocast_lists
from mpkit.casting.levels import entry_of, lowered, protect_children, refuse_scripted, settle, spread
from mpkit.casting.mode import mark, mark_of
from mpkit.casting.products import Keep, cast_by_recipe
from mpkit.casting.recipe import RECIPES, Recipe
from mpkit.casting.targets import Target, target_of
from mpkit.formats import FloatFormat


def _nothing(network: nn.Module, low: Target) -> None:
    for module in network.modules():
        mark(module, lowered(module, torch.float32))


def _apex_o1(network: nn.Module, low: Target) -> None:
    spread(network, lambda module: apex_lists(low, entry_of(module)))


def _apex_o2(network: nn.Module, low: Target) -> None:
    _apex_o3(network, low)
    protect_children(network, low, lambda m: isinstance(m, nn.modules.batchnorm._BatchNorm) and m.affine)


def _apex_o3(network: nn.Module, low: Target) -> None:
    _all_low(network, low)
    _result(network, torch.float32)


def _all_low(network: nn.Module, low: Target) -> None:
    for module in network.modules():
        mark(module, lowered(module, low))


def _keras(network: nn.Module, low: Target) -> None:
    norms = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
    _all_low(network, low)
    protect_children(network, low, lambda m: isinstance(m, norms))


def _torch(network: nn.Module, low: Target) -> None:
    spread(network, lambda module: autocast_lists(low, entry_of(module)))


def _result(network: nn.Module, target: Target) -> None:
    root = mark_of(network)
    assert root is not None
    root.result = target


PRESETS: dict[str, tuple[Callable[[nn.Module, Target], None], torch.dtype]] = {
    "apex_O0": (_nothing, torch.float16),
    "apex_O1": (_apex_o1, torch.float16),
    "apex_O2": (_apex_o2, torch.float16),
    "apex_O3": (_apex_o3, torch.float16),
    "keras_float32": (_nothing, torch.float16),
    "keras_mixed_float16": (_keras, torch.float16),
    "keras_mixed_bfloat16": (_keras, torch.bfloat16),
    "torch_autocast": (_torch, torch.float16),
}


def cast_like(
    network: nn.Module,
    preset: str | Recipe,
    dtype: torch.dtype | FloatFormat | None = None,
    *,
    grad_dtype: FloatFormat | None = None,
    keep: Keep = None,
) -> nn.Module:
    """Cast `network` as another framework does at one of its levels, or its linear layers by a recipe; it comes back.

    Args:
        preset:     a key of PRESETS (see the table above) or of RECIPES (see the table in `recipe`), or a Recipe.
        dtype:      of a preset: the low precision; None: the preset's own. A FloatFormat is emulated.
        grad_dtype: of a preset: format of the gradients of an emulated format.
        keep:       of a recipe: layers that stay in high precision, as a pattern of their paths ("lm_head",
                    "blocks.0", "blocks.*.proj"), a list of them, or a function (path, module) -> bool. Everything that
                    is no linear layer stays high anyway; an attention counts as one layer.
    Raises:  TypeError if `network` is no module; ValueError for an unknown preset or dtype, an option that is not the
             preset's, a recipe on a network without linear layers, or a `keep` that matches nothing. While the network
             runs, RuntimeError for what its framework bans: binary_cross_entropy at torch_autocast; at apex_O1 the
             same of 16 bits, and `x.exp_()` and the like on 16 bits.

    >>> net = cast_like(nn.Linear(2, 1), "keras_mixed_bfloat16")
    >>> net(torch.ones(1, 2)).dtype
    torch.bfloat16
    """
    if not isinstance(network, nn.Module):
        raise TypeError(f"cast_like casts an nn.Module, got {network!r}; pass the network object itself")
    if not isinstance(preset, str | Recipe):
        raise TypeError(f"preset is a name or a Recipe, got {preset!r}; the names are in PRESETS and RECIPES")
    refuse_scripted(network)
    if isinstance(preset, Recipe) or preset in RECIPES:
        if dtype is not None or grad_dtype is not None:
            raise ValueError("a recipe names the format of every cast; replace its casts instead of giving a dtype")
        return cast_by_recipe(network, preset if isinstance(preset, Recipe) else RECIPES[preset], keep)
    if preset not in PRESETS:
        known = f"preset is one of {', '.join(PRESETS)}, or a recipe: {', '.join(RECIPES)}"
        raise ValueError(f"{known}; got {preset!r}")
    if keep is not None:
        raise ValueError(f"keep goes with a recipe; {preset} has its own lists of what stays float32")
    put, low = PRESETS[preset]
    put(network, target_of(low if dtype is None else dtype, grad_dtype))
    settle(network, preset)
    return network


def preset_table() -> list[dict[str, Any]]:
    """The table at the top of this module as rows, one dictionary per level."""
    lines = [line.strip("| ").split(" | ") for line in (__doc__ or "").splitlines() if line.startswith("| ")]
    return [dict(zip(lines[0], line)) for line in lines[1:]]
