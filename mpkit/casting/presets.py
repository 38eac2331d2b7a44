"""The levels of other frameworks as presets of the same mechanism; the table of all levels is in `table`."""

from __future__ import annotations

import torch
from torch import nn

from mpkit.casting.marking import refuse_scripted, settle
from mpkit.casting.products import Keep, cast_by_recipe
from mpkit.casting.recipe import RECIPES, Recipe
from mpkit.casting.table import MINDSPORE, OTHERS, Level
from mpkit.casting.targets import target_of
from mpkit.formats import FloatFormat

PRESETS: dict[str, Level] = OTHERS


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
        preset:     a key of PRESETS (see `preset_table`) or of RECIPES (see the table in `recipe`), or a Recipe.
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
    row = PRESETS[preset]
    row.put(network, target_of(row.dtype if dtype is None else dtype, grad_dtype))
    settle(network, preset)
    return network


def preset_table() -> list[dict[str, str]]:
    """What every level does, as rows: a dictionary per level, the same keys in each."""
    levels = {f"mindspore {name}": row for name, row in MINDSPORE.items() if name != "O0"} | OTHERS
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
