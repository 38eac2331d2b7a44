"""The widgets of the lessons on evidence: overflow detective, what if, common mistakes."""

from mpkit.explorers.evidence import DetectiveExplorer, GridExplorer, NaiveRuleExplorer, RunExplorer, WhatIfExplorer
from mpkit.plots.evidence import detective_scene, grid_scene, naive_rule_scene, run_scene, what_if_scene
from mpkit.widgets.scene import plain

detective_view = plain(DetectiveExplorer, detective_scene, "Four broken trainings at any scale, in float16 or bfloat16")
run_view = plain(RunExplorer, run_scene, "A recorded run, step by step")
what_if_view = plain(WhatIfExplorer, what_if_scene, "A recorded run with another start, factor and window")
grid_view = plain(GridExplorer, grid_scene, "A heat map of factor x window; a click on a cell shows its run")
naive_rule_view = plain(NaiveRuleExplorer, naive_rule_scene, "The rule that compares loss and scale")
