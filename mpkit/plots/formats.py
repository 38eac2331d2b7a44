"""Scenes of lesson 01: a bit row over a number line, ranges on one axis, gradients over the range of a format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from mpkit.formats import FloatFormat
from mpkit.plots.scene import Panel, Scene

if TYPE_CHECKING:
    pass  # upward: the types of its arguments


FATES = ("zero", "subnormal", "normal", "overflow")


def edges(fmt: FloatFormat) -> tuple[int, int, int]:
    """The powers of two below which a magnitude becomes zero, is subnormal, fits."""
    return fmt.min_subnormal_exponent - 1, fmt.min_exponent, fmt.max_exponent + 1


def zones(ends: Iterable[float]) -> list[tuple[float | None, str]]:
    """The roles of bars over an axis of powers of two, for `Panel.bars`; the ends are exponents."""
    return list(zip((*map(float, ends), None), FATES))


def regions(panel: Panel, axis: str, lost: float, normal: float, overflow: float, /, **said: str) -> None:
    """Colour and name zero, subnormal, normal and overflow along an axis of powers of two; the edges are exponents.

    `said` are other names of the four, "" for none.
    """
    ends = sorted((panel.given[axis]["lo"], panel.given[axis]["hi"]))
    look = {"anchor": "end"} if axis == "y" else {}  # bars begin at the left
    for role, low, high in zip(FATES, (ends[0], lost, normal, overflow), (lost, normal, overflow, ends[1])):
        panel.span(axis, low, high, f"{role}/0.14", said.get(role, role), **look)


def histogram(scene: Scene, panel: Panel, shares: np.ndarray, lowest: float, fmt: FloatFormat, **look: object) -> None:
    """Percent of magnitudes in each power of two from `lowest` on, a row for each step, coloured by the format.

    They travel once, a byte each. `look` as in `Panel.bars`.
    """
    kept = scene.keep("shares", np.round(255 * shares / shares.max()).astype(np.uint8))
    at = lowest + 0.5 + np.arange(shares.shape[1])
    look = {"width": 1, "label": "share, %", "quiet": True} | look
    panel.bars(kept, at, unit=shares.max() / 255, zones=zones(edges(fmt)), **look)
