"""The widgets of the lessons on evidence: overflow detective, what if, common mistakes."""

from __future__ import annotations

from typing import Any

from mpkit.explorers.evidence import (
    DetectiveExplorer,
    NaiveRuleExplorer,
    RunExplorer,
    SweepExplorer,
    WhatIfExplorer,
)
from mpkit.plots.evidence import detective_scene, naive_rule_scene, run_scene, sweep_scene, what_if_scene
from mpkit.widgets.scene import View


def detective_view(**params: Any) -> View:
    """Four broken trainings at any scale, in float16 or bfloat16; parameters as `DetectiveExplorer`."""
    return View(DetectiveExplorer(**params), detective_scene)


def run_view(**params: Any) -> View:
    """A recorded run, step by step; parameters as `RunExplorer`."""
    return View(RunExplorer(**params), run_scene)


def what_if_view(**params: Any) -> View:
    """A recorded run with another start, factor and window; parameters as `WhatIfExplorer`."""
    return View(WhatIfExplorer(**params), what_if_scene)


def sweep_view(**params: Any) -> View:
    """A heat map of factor x window; a click on a cell shows its run; parameters as `SweepExplorer`."""
    return View(SweepExplorer(**params), sweep_scene)


def naive_rule_view(**params: Any) -> View:
    """The rule that compares loss and scale; parameters as `NaiveRuleExplorer`."""
    return View(NaiveRuleExplorer(**params), naive_rule_scene)
