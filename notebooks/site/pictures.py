"""Views -> their pictures, computed beforehand: one classic script for all views of a kind that a lesson shows, from
which page.js answers.

A picture is what the widget gets in Jupyter for one setting of all parameters (`mpkit.view.page.Page`). Computed are
what the lesson's words ask to try, every control alone, what boxes, buttons and handles set, then pairs of controls.
Parts that are equal are stored once. A training shows a recorded one: `python notebooks/site/pictures.py` records.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from mpkit.lessons.digits import Run
from mpkit.lessons.start import live
from mpkit.view import ahead
from mpkit.view.controls import Choice
from mpkit.view.page import Page
from mpkit.view.views import View

MOST = 300
"""Pictures of one view, unless `PLANS` says otherwise."""
ALONE = 45
"""Values of one control while the others stand as the lesson has them."""
ROW = 17
"""Values of the first control of a pair."""

PLANS: dict[str, dict[str, Any]] = {  # what a lesson is about: pairs of controls, and how many pictures they are worth
    "dynamics": {
        "most": 500,
        "pairs": [("factor", "window"), *(("run", n) for n in ("window", "start", "factor", "floor"))],
    },
    "bits": {"most": 500, "pairs": [("bits", "bits"), ("fmt", "bits")]},
    "live": {"work": ({}, {"start": 30}, {"window": 5}, {"window": 100}, {"dtype": "bfloat16"}, {"level": "O0"})},
}
LIVE = {"steps": 240}
"""What a recorded training has, whatever the lesson's has."""
TRAININGS = Path(__file__).with_name("trainings.json")


class Table:
    """The pictures of views by one maker that were computed, by their parameters."""

    def __init__(self, views: Sequence[View]) -> None:
        self.views, self.maker, self.plan = views, views[0].maker, PLANS.get(views[0].maker.__name__, {})
        self.step = next((view.sheet.step["name"] for view in views if view.sheet.step), None)
        self.names = [n for n in self.maker.controls if n != self.step]
        self.line = self._line() if {"drawn", "typed", "shown"} <= set(self.names) else None
        if self.line:  # what the reader will draw is not known here
            self.names = [n for n in self.names if n not in ("drawn", "typed")]
        self.nodes, self.where, self.work = list[dict[str, Any]](), dict[str, int](), list[tuple[int, str, int]]()
        self.refused = list[tuple[list[Any], str]]()
        self.starts = [self.add(view) for view in views]

    def add(self, view: View) -> int:
        """Keep the picture of a view; its number."""
        state = [self._told(n, view.params[n]) for n in self.names]
        key = json.dumps(state)
        if key not in self.where:
            self.where[key] = len(self.nodes)
            sheet = view.sheet
            last = (sheet.step or {"count": 1})["count"] - 1
            self.nodes.append({
                "state": state,
                "spec": sheet.spec,
                "idle": sorted(sheet.idle),
                "buttons": {label: None if callable(does) else does for label, does in sheet.buttons.items()},
                "rows": sheet.table(last),
            })  # fmt: skip
        return self.where[key]

    def _told(self, name: str, value: Any) -> Any:
        """A parameter as the page knows it; what is no JSON, such as a training, by its place."""
        if isinstance(self.maker.controls[name], Choice):
            return str(value)
        return plain(value) if value is None or isinstance(value, str | int | float | list | dict) else len(self.nodes)

    def go(self, view: View, changed: Mapping[str, Any]) -> View | None:
        """The view with other parameters, its picture kept; None where they are refused, and why is kept."""
        try:
            other = self.maker(**view.params | changed)
        except ValueError as error:
            state = [self._told(n, (view.params | changed)[n]) for n in self.names]
            self.refused.append((state, str(error)))
            return None
        self.add(other)
        return other

    def places(self, view: View, name: str, most: int) -> list[dict[str, Any]]:
        """What a control, or else a handle or boxes of that name, can set."""
        row = next((r for r in Page(view).controls if r["name"] == name), {})
        if row.get("kind") in ("checkbox", "choice"):
            return (
                [{name: v} for v in (True, False)]
                if row["kind"] == "checkbox"
                else [{name: v} for _, v in row["options"]]
            )
        does, now = ahead.moves(view, name), view.params.get(name)
        if "grid" in row:  # also of what is costly
            does = {value: {name: value} for value in row["grid"]}
        elif not isinstance(now, int | float):
            now = next(iter(does), 0)  # the nearest
        return [does[value] for value in thin(sorted(does), most, now)]

    def moved(self, view: View) -> list[str]:
        """Names of all that can be moved: controls, handles, boxes; but for the step, which the page moves alone."""
        marks = [m for p in view.sheet.panels for m in p.marks if m.get("sets") or m["type"] == "handle"]
        controls = [r["name"] for r in Page(view).controls if r["kind"] != "text"]
        return [n for n in dict.fromkeys([*controls, *(m["name"] for m in marks)]) if n != self.step]

    def fill(self, most: int) -> None:
        """Compute pictures, what matters most first; views that are alike share the room for pairs."""
        if self.line:
            last = self.maker.controls["drawn"].steps - 1
            self.go(self.views[0], {"shown": True, "drawn": {last: float(self.views[0].numbers["guess"][-1])}})
            return
        for given in self.plan.get("work", ())[: max(1, most // 50)]:
            self._train(given)
        for view in self.views:
            self.alone(view, most)
        for k, view in enumerate(self.views):
            self.pairs(view, most, len(self.nodes) + max(0, most - len(self.nodes)) // (len(self.views) - k))

    def alone(self, view: View, most: int) -> None:
        """What the words ask to try, every button, every control."""
        for given in [t["set"] for t in view.tries]:
            self.go(view, given)
        for label in view.sheet.buttons:
            at: View | None = view
            for _ in range(min(20, most)):  # a button is pressed again and again
                does = at.sheet.buttons.get(label) if at else None
                at = self.go(at, does) if at and isinstance(does, Mapping) else None
        for name in self.moved(view):
            for sets in self.places(view, name, min(ALONE, most)):
                self.go(view, sets)

    def pairs(self, view: View, most: int, end: int) -> None:
        """Every combination, where there is room for all; else pairs of controls, until there are so many pictures."""
        moved = self.moved(view)
        if math.prod(len(self.places(view, name, min(ALONE, most))) for name in moved) <= most:
            return self.all(view, moved, most)
        pairs = self.plan.get("pairs") or list(combinations(moved, 2))
        for k, (one, other) in enumerate(pairs):
            room = max(0, end - len(self.nodes)) // (len(pairs) - k)
            first = self.places(view, one, ROW) if room else []
            for sets in first:
                at = self.go(view, sets)
                for more in self.places(at, other, max(2, room // len(first))) if at else []:
                    if len(self.nodes) < end:
                        self.go(at, more)

    def all(self, view: View, names: list[str], most: int) -> None:
        """Every combination of some controls."""
        for sets in self.places(view, names[0], min(ALONE, most)) if names else []:
            at = self.go(view, sets)
            if at:
                self.all(at, names[1:], most)

    def _train(self, given: Mapping[str, Any]) -> None:
        """The end of a recorded training, as the first button gives it with some parameters."""
        begun = self.go(self.views[0], given)
        if begun:
            label = next(name for name, does in begun.sheet.buttons.items() if callable(does))
            name = json.dumps(given)
            if name not in recorded():
                raise ValueError(f"no training is recorded with {name}; run python notebooks/site/pictures.py")
            done = self.maker(**begun.params | LIVE | {"run": Run(**recorded()[name])})
            self.work.append((self.add(begun), label, self.add(done)))

    def _line(self) -> dict[str, Any]:
        """How typed numbers make a line: what is asked for, and the line of each number, which add up."""
        drawn, asked = self.maker.controls["drawn"], _refused(self.maker, typed="?")
        count = len(re.findall(r"-?\d+(?:\.\d+)?", asked.partition(" such as ")[2].partition(", each")[0]))

        def line(values: Sequence[float]) -> np.ndarray:
            return np.asarray(self.maker(typed=" ".join(map(str, values))).numbers["guess"], dtype=float)

        low = line([drawn.low] * count)
        each = [line([drawn.low] * k + [drawn.high] + [drawn.low] * (count - k - 1)) - low for k in range(count)]
        parts = [np.round(part / (drawn.high - drawn.low), 6).tolist() for part in each]
        first, truth = _refused(self.maker, shown=True), self.views[0].numbers["truth"]
        right = self.maker(shown=True, drawn=dict(enumerate(truth.tolist(), drawn.steps - len(truth)))).numbers
        judged = {"truth": truth.tolist(), "within": right["within"], "right": right["picture"]}
        return {"asked": asked, "first": first, "low": drawn.low, "high": drawn.high, "parts": parts, **judged}


@cache
def recorded() -> dict[str, Any]:
    """The recorded trainings, by their settings: no machine computes the same digits as another."""
    return json.loads(TRAININGS.read_text("utf-8"))


def record() -> None:
    """Train with all settings of the plans, and record what happened."""
    runs = dict[str, Any]()
    for given in PLANS["live"]["work"]:
        done = live(**given, **LIVE)
        done.press("Train")
        done.wait(600)
        runs[json.dumps(given)] = {k: short(v) for k, v in asdict(done.params["run"]).items()}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(run)}" for name, run in runs.items())
    TRAININGS.write_text(f"{{\n{lines}\n}}\n", "utf-8")


def short(value: Any) -> Any:
    """Numbers with four digits; scales, which are powers of two, keep theirs."""
    if isinstance(value, list):
        return [short(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) and math.frexp(value)[0] != 0.5 else value


def _refused(maker: Any, **given: Any) -> str:
    """Why a view refuses some parameters."""
    try:
        maker(**given)
    except ValueError as error:
        return str(error)
    raise ValueError(f"{maker.__name__} does not refuse {given}")


def thin(values: Sequence[Any], most: int, now: float) -> list[Any]:
    """At most so many of some values: a third around the present one, the others evenly, small ones more densely."""
    if len(values) <= most:
        return list(values)
    ranks = range(len(values))
    near = sorted(ranks, key=lambda k: abs(values[k] - now))[: most // 3]
    rest, grows = most - len(near), values[0] >= 0 and len(values) > 3 * most
    far = np.geomspace(1, len(values), rest) - 1 if grows else np.linspace(0, len(values) - 1, rest)
    return [values[k] for k in sorted({*near, *(round(v) for v in far)})]


def plain(value: object) -> Any:
    """A value as JSON: inf and NaN, which that lacks, as {"float": name}, numpy's numbers as Python's."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    value = value.item() if isinstance(value, np.generic) else value
    return {"float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def pooled(value: object) -> dict[str, Any]:
    """A tree of dicts, lists, numbers, words and arrays in which {"$": k} stands for part k of its `pool`."""
    pool, where = list[Any](), dict[Any, int]()

    def kept(key: Any, part: Any) -> dict[str, int]:
        if key not in where:
            where[key] = len(pool)
            pool.append(part)
        return {"$": where[key]}

    def told(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return kept((value.dtype.str, value.tobytes()), value)
        if isinstance(value, Mapping):
            value = {str(k): told(v) for k, v in value.items()}
        elif isinstance(value, list | tuple):
            value = [told(v) for v in value]
        else:
            value = plain(value)
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
        return kept(text, value) if len(text) > 24 else value

    return {"root": told(value), "pool": pool}


def write(views: Sequence[View], path: Path, most: int | None = None) -> dict[str, Any]:
    """Compute the pictures of views by one maker and write their script; how many they are, and what they weigh in kB.

    Of 0 pictures there are those that the views open with.
    """
    table = Table(views)
    if most != 0:
        table.fill(most or table.plan.get("most", MOST))
    starts = [
        {"node": node, "controls": Page(v).controls, "tries": [[t["say"], t["set"]] for t in v.tries], "index": v.index}
        for node, v in zip(table.starts, views)
    ]
    data = ahead.packed(pooled({
        "starts": starts, "names": table.names, "step": table.step, "line": table.line, "work": table.work,
        "refused": table.refused, "nodes": table.nodes,
    }))  # fmt: skip
    path.write_text(f'mpkitTable("{path.stem}","{base64.b64encode(data).decode()}")', "ascii")
    return {"pictures": len(table.nodes), "kB": len(data) // 1000}


if __name__ == "__main__":
    record()
