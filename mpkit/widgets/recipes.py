"""The widgets of the lessons on recipes."""

from __future__ import annotations

from mpkit.explorers.recipes import AmaxExplorer, BlockExplorer, RecipeExplorer
from mpkit.plots.recipes import amax_scene, block_scene, recipe_scene
from mpkit.widgets.scene import View


def amax_view(**params: object) -> View:
    """A recorded tensor under delayed or current scaling; parameters as `AmaxExplorer`."""
    return View(AmaxExplorer(**params), amax_scene)


def block_view(**params: object) -> View:
    """A row of values in blocks with one outlier; parameters as `BlockExplorer`."""
    return View(BlockExplorer(**params), block_scene)


def recipe_view(**params: object) -> View:
    """Recorded trainings under a recipe; parameters as `RecipeExplorer`."""
    return View(RecipeExplorer(**params), recipe_scene)
