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

AT_MOST = 40
"""Values around the present one."""
PATIENCE = 0.05
"""Seconds of work for one message; the page then wishes for the next, and a question in between is not kept waiting."""


def positions(spec: dict[str, Any], controls: Sequence[dict[str, Any]], name: str) -> tuple[Any, list[Any]]:
    """(the mark that moves it or None, all places it can go to, ascending); a control without a mark has its grid."""
    costly = {c["name"] for c in controls if c.get("costly")}
    for mark in (m for panel in spec["panels"] for m in panel["marks"]):
        if mark.get("name") == name and mark["type"] == "handle" and mark["axis"] != "xy" and name not in costly:
            count = round((mark["hi"] - mark["lo"]) / mark["step"])
            return mark, [nine(min(mark["lo"] + i * mark["step"], mark["hi"])) for i in range(count + 1)]
        if mark.get("name") == name and mark["type"] == "boxes":
            return mark, list(range(len(mark["sets"])))
    grid: list[float] = next(
        (c["grid"] for c in controls if c["name"] == name and "grid" in c and name not in costly), []
    )
    return None, [nine(v) for v in grid]


def change(mark: Any, name: str, place: float, index: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the page asks for when something is moved to a place: parameters to set, strokes to add."""
    if mark and mark.get("sets"):
        first, step = mark.get("lo", 0), mark.get("step", 1)
        return mark["sets"][round((place - first) / step)], {}
    if mark and mark.get("gesture"):
        return {}, {name: {index: place}}
    return {name: 2.0**place if mark and mark.get("log2") else place}, {}


def nine(value: float) -> float:
    """Nine digits: as the page names a place."""
    return float(f"{value:.9g}")


def nearest(places: Sequence[float], now: Any) -> list[float]:
    """Those to compute, the nearest first."""
    return sorted(places, key=lambda place: abs(place - now) if isinstance(now, int | float) else place)[:AT_MOST]


def packed(value: object) -> bytes:
    """A tree of dicts, lists, words, numbers and arrays, compressed: the length of the text, the text, the arrays.

    {"f4": [from, length in bytes]} or {"u1": ...} in the text stands for an array; equal ones travel once.
    """
    store, where = bytearray(), dict[bytes, int]()

    def told(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            data = value.astype(value.dtype.newbyteorder("<")).tobytes()
            if data not in where:
                where[data] = len(store)
                store.extend(data)
            return {"u1" if value.dtype == np.uint8 else "f4": [where[data], len(data)]}
        if isinstance(value, dict):
            return {k: told(v) for k, v in value.items()}
        return [told(v) for v in value] if isinstance(value, list | tuple) else value

    text = json.dumps(told(value), separators=(",", ":"), allow_nan=False).encode()
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
    elif not all(_same(tree, first) for tree in trees):
        yield [list(path), trees[1:]]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray | dict | list):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.tobytes() == b.tobytes()
    return type(a) is type(b) and a == b
