"""The widget of the lesson on group loss scales."""

from mpkit.explorers.group_scale import GroupScaleExplorer
from mpkit.plots.group_scale import group_scale_scene
from mpkit.widgets.scene import plain

group_scale_view = plain(GroupScaleExplorer, group_scale_scene, "One loss scale against one per group, step by step")
