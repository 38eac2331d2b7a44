"""The widgets of the lessons on evidence: overflow detective, what if, common mistakes."""

from __future__ import annotations

from functools import partial
from typing import Any

import ipywidgets as w

from mpkit.explorers.evidence import (
    FACTORS,
    WINDOWS,
    DetectiveExplorer,
    NaiveRuleExplorer,
    RunExplorer,
    SweepExplorer,
    WhatIfExplorer,
)
from mpkit.plots.evidence import DetectivePicture, NaiveRulePicture, RunPicture, SweepPicture, WhatIfPicture
from mpkit.widgets.base import View


def detective_view(**params: Any) -> View:
    """Four broken trainings at any scale, in float16 or bfloat16; parameters as `DetectiveExplorer`."""
    return View(DetectiveExplorer(**params), DetectivePicture())


def run_view(**params: Any) -> View:
    """A recorded run, step by step; parameters as `RunExplorer`."""
    return View(RunExplorer(**params), RunPicture())


def what_if_view(**params: Any) -> View:
    """A recorded run with another start, factor and window; parameters as `WhatIfExplorer`."""
    return View(WhatIfExplorer(**params), WhatIfPicture())


def sweep_view(**params: Any) -> View:
    """A heat map of factor x window; a click on a cell shows its run; parameters as `SweepExplorer`."""
    model = SweepExplorer(**params)
    cells = {(f, n): w.Button(layout=w.Layout(width="84px")) for f in FACTORS for n in WINDOWS}
    for (factor, window), cell in cells.items():
        cell.on_click(lambda _, factor=factor, window=window: model.pick(factor, window))
    paint = partial(_paint, model, cells)
    model.observe(lambda _: paint(), "revision")
    paint()
    head = [w.Label("lost, factor \\ window"), *(w.Label(str(n)) for n in WINDOWS)]
    rows = [[w.Label(f"{f:g}"), *(cells[f, n] for n in WINDOWS)] for f in FACTORS]
    grid = w.VBox([w.HBox([_wide(row[0]), *row[1:]]) for row in [head, *rows]])
    for label in head[1:]:
        label.layout.width = "84px"
    view = View(model, SweepPicture(), extra=[grid])
    view.buttons |= {f"{f:g} x {n}": cell for (f, n), cell in cells.items()}
    return view


def naive_rule_view(**params: Any) -> View:
    """The rule that compares loss and scale; parameters as `NaiveRuleExplorer`."""
    return View(NaiveRuleExplorer(**params), NaiveRulePicture())


def _wide(label: w.Label) -> w.Label:
    label.layout.width = "140px"
    return label


def _paint(model: SweepExplorer, cells: dict[tuple[float, int], w.Button]) -> None:
    """Colour and text of every cell: the darker, the more is lost; the chosen one is bold."""
    with model.lock:
        worst = max(float(model.grid.max()), 1e-9)
        for (factor, window), cell in cells.items():
            lost = model.lost(factor, window)
            cell.description = f"{lost:.1%}"
            cell.tooltip = f"factor {factor:g}, window {window}: {lost:.2%} lost; click to see the run"
            cell.style.button_color = _shade(lost / worst)
            cell.style.text_color = "#FFFFFF" if lost / worst > 0.55 else "#000000"
            chosen = (factor, window) == (model.factor, model.window)
            cell.layout.border = "2px solid #D55E00" if chosen else "2px solid transparent"
            cell.style.font_weight = "bold" if chosen else "normal"


def _shade(share: float) -> str:
    """White to the dark blue of the lessons."""
    low, high = (255, 255, 255), (0, 84, 133)
    return "#" + "".join(f"{round(a + (b - a) * share):02X}" for a, b in zip(low, high))
