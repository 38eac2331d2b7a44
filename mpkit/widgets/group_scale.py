"""The widget of the lesson on group loss scales."""

from __future__ import annotations

from mpkit.explorers.group_scale import GroupScaleExplorer
from mpkit.plots.group_scale import group_scale_scene
from mpkit.widgets.scene import View


def group_scale_view(**params: object) -> View:
    """One loss scale against one per group, step by step; parameters as `GroupScaleExplorer`."""
    return View(GroupScaleExplorer(**params), group_scale_scene)
