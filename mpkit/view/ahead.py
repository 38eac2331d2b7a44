"""Pictures sent ahead: those of the other values of one parameter, so that dragging it asks the kernel nothing.

They are the sheets of the same view at those values, and only what differs between them travels, compressed. The
page puts the differences into the scene that it has; it computes nothing.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

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


def nearest(places: Sequence[float], now: float) -> list[float]:
    """Those to compute, the nearest first."""
    return sorted(places, key=lambda place: abs(place - now))[:AT_MOST]


def packed(base: object, trees: Sequence[Any]) -> bytes:
    """What differs between a tree of dicts, lists, numbers, words and bytes and others: [path, values], compressed.

    The text comes first, after its length in four bytes; {"b": [from, length]} in it stands for a part of the bytes
    behind it.
    """
    store, where = bytearray(), dict[bytes, int]()

    def told(value: object) -> object:
        if isinstance(value, bytes):
            if value not in where:
                where[value] = len(store)
                store.extend(value)
            return {"b": [where[value], len(value)]}
        if isinstance(value, dict):
            return {k: told(v) for k, v in value.items()}
        return [told(v) for v in value] if isinstance(value, list | tuple) else value

    columns = [[path, told(values[1:])] for path, values in _differences([base, *trees], [])]
    text = json.dumps(columns, separators=(",", ":")).encode()
    return zlib.compress(len(text).to_bytes(4, "little") + text + store, 6)


def _differences(trees: Sequence[Any], path: list[Any]) -> Iterator[tuple[list[Any], Sequence[Any]]]:
    first = trees[0]
    if all(tree == first for tree in trees):
        return
    if isinstance(first, dict) and all(isinstance(t, dict) and t.keys() == first.keys() for t in trees):
        for key in first:
            yield from _differences([t[key] for t in trees], [*path, key])
    elif isinstance(first, list) and all(isinstance(t, list) and len(t) == len(first) for t in trees):
        for i in range(len(first)):
            yield from _differences([t[i] for t in trees], [*path, i])
    else:
        yield path, trees
