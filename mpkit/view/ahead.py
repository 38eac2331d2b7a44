"""How pictures travel: packed, and those of the other values of a parameter ahead, so that a drag asks nothing.

These are the sheets of the same view at those values, and only what differs between them travels. The page puts the
differences into the scene that it has; it computes nothing.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpkit.arguments import is_number
from mpkit.view.controls import Range, power


def moves(view: Any, name: str) -> dict[float, dict[str, Any]]:
    """What a slider, a handle or boxes of that name can do: place -> the parameters that it sets; the nearest first.

    A place has nine digits, as the page names it. Nothing for what is costly, and for what has two numbers.
    """
    control, now = view.maker.controls.get(name), view.params.get(name)
    marks = (m for panel in view.sheet.panels for m in panel.marks if m.get("name") == name)
    mark: dict[str, Any] = next((m for m in marks if m["type"] in ("handle", "boxes")), {})
    if getattr(control, "costly", False) or mark.get("axis") == "xy":
        return {}
    if mark.get("type") == "boxes":
        return dict(enumerate(mark["sets"]))
    if mark:
        now, low, high, step = (mark[key] for key in ("at", "lo", "hi", "step"))
        places = [nine(min(low + i * step, high)) for i in range(round((high - low) / step) + 1)]
    else:
        places = [nine(v) for v in control.grid(view.maker.defaults[name])] if isinstance(control, Range) else []
    near = sorted(places, key=lambda place: abs(place - now)) if is_number(now) else places
    does = dict(zip(places, mark.get("sets", [{name: power(2, p) if mark.get("log2") else p} for p in places])))
    return {p: {name: {view.index: p}} if mark.get("gesture") else does[p] for p in near}


def nine(value: float) -> float:
    """Nine digits."""
    return float(f"{value:.9g}")


def packed(value: object) -> bytes:
    """A tree of dicts, lists, words, numbers and arrays, compressed: the length of the text, the text, the arrays.

    {"f4": [from, length in bytes]} or {"u1": ...} in the text stands for an array; equal ones travel once.
    """
    store, where = bytearray(), dict[bytes, int]()

    def told(array: np.ndarray) -> dict[str, list[int]]:
        data = array.astype(array.dtype.newbyteorder("<")).tobytes()
        if data not in where:
            where[data] = len(store)
            store.extend(data)
        return {"u1" if array.dtype == np.uint8 else "f4": [where[data], len(data)]}

    text = json.dumps(value, default=told, separators=(",", ":"), allow_nan=False).encode()
    return zlib.compress(len(text).to_bytes(4, "little") + text + store)


def differences(trees: Sequence[Any], path: Sequence[Any] = ()) -> Iterator[list[Any]]:
    """[path, the values of all trees but the first] of what is not the same in all of them."""
    first, kinds = trees[0], {type(tree) for tree in trees}
    if kinds == {dict} and all(tree.keys() == first.keys() for tree in trees):
        for key in first:
            yield from differences([tree[key] for tree in trees], [*path, key])
    elif kinds == {list} and all(len(tree) == len(first) for tree in trees):
        for i in range(len(first)):
            yield from differences([tree[i] for tree in trees], [*path, i])
    elif kinds == {np.ndarray}:
        if len({tree.tobytes() for tree in trees}) > 1:
            yield [list(path), trees[1:]]
    elif kinds & {dict, list, np.ndarray} or len(kinds) > 1 or any(tree != first for tree in trees):
        yield [list(path), trees[1:]]
