"""The widgets of the lessons on evidence: overflow detective, what if, common mistakes."""

from __future__ import annotations

from mpkit.explorers.evidence import (
    DetectiveExplorer,
    GridExplorer,
    NaiveRuleExplorer,
    RunExplorer,
    WhatIfExplorer,
)
from mpkit.plots.evidence import detective_scene, grid_scene, naive_rule_scene, run_scene, what_if_scene
from mpkit.widgets.scene import View


def detective_view(**params: object) -> View:
    """Four broken trainings at any scale, in float16 or bfloat16; parameters as `DetectiveExplorer`."""
    return View(DetectiveExplorer(**params), detective_scene)


def run_view(**params: object) -> View:
    """A recorded run, step by step; parameters as `RunExplorer`."""
    return View(RunExplorer(**params), run_scene)


def what_if_view(**params: object) -> View:
    """A recorded run with another start, factor and window; parameters as `WhatIfExplorer`."""
    return View(WhatIfExplorer(**params), what_if_scene)


def grid_view(**params: object) -> View:
    """A heat map of factor x window; a click on a cell shows its run; parameters as `GridExplorer`."""
    return View(GridExplorer(**params), grid_scene)


def naive_rule_view(**params: object) -> View:
    """The rule that compares loss and scale; parameters as `NaiveRuleExplorer`."""
    return View(NaiveRuleExplorer(**params), naive_rule_scene)
