"""The widgets of the lessons on recipes."""

from mpkit.explorers.recipes import AmaxExplorer, BlockExplorer, RecipeExplorer
from mpkit.plots.recipes import amax_scene, block_scene, recipe_scene
from mpkit.widgets.scene import plain

amax_view = plain(AmaxExplorer, amax_scene, "A recorded tensor under delayed or current scaling")
block_view = plain(BlockExplorer, block_scene, "A row of values in blocks with one outlier")
recipe_view = plain(RecipeExplorer, recipe_scene, "Recorded trainings under a recipe")
