"""Pictures that topics share: a format's regions, a histogram over them, runs, a drawn prediction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mpkit.formats import FP16, FloatFormat
from mpkit.record import Trace
from mpkit.view.answers import number
from mpkit.view.sheet import Panel, Sheet, exponents, fitted, linear, log2
from mpkit.view.words import words

FATES = ("zero", "subnormal", "normal", "overflow")


def edges(fmt: FloatFormat) -> tuple[int, int, int]:
    """The powers of two below which a magnitude becomes zero, is subnormal, fits."""
    return fmt.min_subnormal_exponent - 1, fmt.min_exponent, fmt.max_exponent + 1


def zones(ends: Iterable[float]) -> list[tuple[float | None, str]]:
    """The roles of bars over an axis of powers of two, for `Panel.bars`; the ends are exponents."""
    return list(zip((*map(float, ends), None), FATES))


def regions(panel: Panel, axis: str, lost: float, normal: float, overflow: float, /, **said: str) -> None:
    """Colour and name zero, subnormal, normal and overflow along an axis of powers of two; the edges are exponents.

    `said` are other names of the four; one that is "" stands in the legend by its role.
    """
    ends = sorted((panel.given[axis]["lo"], panel.given[axis]["hi"]))
    look = {"anchor": "end"} if axis == "y" else {}  # bars begin at the left
    for role, low, high in zip(FATES, (ends[0], lost, normal, overflow), (lost, normal, overflow, ends[1])):
        name = said.get(role, role)
        panel.span(axis, low, high, f"{role}/0.14", name, **look if name else {"label": role})


def last_row(trace: Trace) -> np.ndarray:
    """(steps,) the number of the last histogram that was recorded up to each step; the first one before that."""
    return np.clip(np.searchsorted(trace.rows, np.arange(len(trace)), "right") - 1, 0, None)


def gradients(see: Sheet, where: tuple[int, int], trace: Trace, scale: np.ndarray) -> None:
    """Each step's recorded gradients times its scale (steps,), over the regions of float16."""
    part, low, rows = trace.gradients, -32.0, last_row(trace)
    share = 100 * part.total() / max(1, part.size.sum())
    ends = np.where(share > 0, part.lowest + 1 + np.arange(part.bins), low).max(axis=1)
    shift = exponents(scale, -200, 200)
    top = min(40, max(20, math.ceil((ends[rows] + shift).max())))
    x = linear("share, % (above 0)", 0, 1.75 * share.max(), 3)  # names of regions stand right of all bars
    panel = see.panel(*where, title="gradients × scale", x=x, y=log2("gradient × scale, float16", low, top))
    regions(panel, "y", *edges(FP16))
    look: dict[str, Any] = {"axis": "y", "rows": rows, "shift": shift, "zones": zones(edges(FP16))}
    shares = np.round(255 * share / share.max()).astype(np.uint8)  # a byte each
    look |= {"width": 1, "label": "share of the gradients, %", "quiet": True, "unit": share.max() / 255}
    known = int(np.flatnonzero(np.isfinite(trace.loss))[-1])
    panel.bars(shares, part.lowest + 0.5 + np.arange(part.bins), only=(0, known), **look)
    if not math.isfinite(trace.loss[-1]):
        word = "no gradients:\nthe loss is\nnot finite"
        panel.text(word, 0.5, 0.5, frame=True, halo=True, only=(known + 1, len(scale) - 1))


def loss_and_scale(see: Sheet, runs: Any, first: int, last: int, also: Sequence[float] = ()) -> tuple[Panel, Panel]:
    """Loss and scale of some runs, from step `first` to `last`: (name, run, role, dash); crosses at skipped steps.

    `also` are exponents that the axis of the scale has to hold.
    """
    scales = [np.minimum(run.scales[first:], 2.0**127) for _, run, _, _ in runs]
    low, high = fitted(*scales, np.exp2(also), room=1)
    y = linear("loss, nats", 0, 3, 3)
    y["ticks"][-1][1] = "≥ 3, NaN"  # such losses are drawn there
    loss = see.panel(title="loss", x=linear("step", first, last, 4), y=y)
    panel = see.panel(0, 1, title="loss scale", x=linear("step", first, last, 4), y=log2("loss scale", low, high))
    for name, run, color, dash in runs:
        n = min(len(run.losses), len(run.scales))
        steps = np.arange(min(first, n), n)
        look: dict[str, Any] = {"color": color, "dash": dash, "width": 2.2 if color == "own" else 1.6}
        loss.line(np.clip(np.nan_to_num(run.losses[first:n], nan=3, posinf=3), 0, 3), steps, label=name, **look)
        at = exponents(run.scales[:n], low, high)
        panel.line(at[first:], steps, step="post", label=name, **look)
        panel.crosses(at, [i for i in run.skipped if first <= i < n], f"skipped, {name}", color)
    return loss, panel


def prediction(
    see: Sheet, panel: Panel, told: str, truth: np.ndarray, /, *, first: int, ends: tuple[float, float], start: float,
    at: Sequence[int], within: float, typed: str, drawn: Mapping[int, float], shown: bool, stairs: bool = False,
) -> int:  # fmt: skip
    """The reader's line from point `first` on, with its pen until the truth is shown; -> so many points of it are told.

    Args:
        told:   topic.name of its words: `title`, `ask`, `typed`, `happened`, `near`; and what a line is told: `right`
                if nearly all of it is, else the words of the nearest one in `wrong`, or `other` where none is near.
        start:  where the line lies at the opening; in its place a number may be typed for each of the points `at`,
                joined by straight lines or, for `stairs`, each until the next.
    Raises:     ValueError for anything else that is typed, and where the truth is asked for before a prediction.
    """
    topic, _, name = told.partition(".")
    said, count = words(topic)["draw"][name], len(truth) - first
    guess, places = np.full(count, float(start)), np.array(at) - first
    if typed.strip():
        x, values = np.arange(count), _typed(typed, len(at), *ends, said["typed"])
        guess = np.take(values, places.searchsorted(x, "right") - 1) if stairs else np.interp(x, places, values)
    own = drawn.keys() - range(first)  # what is known is no prediction
    for point in own:
        guess[point - first] = drawn[point]
    if bool(typed.strip()) == bool(own) and (own or shown):
        raise ValueError("draw your prediction first, or type it, one of the two; Reset begins anew")
    see.grid(380, 900)
    see.idle |= {"shown"}  # the button shows it, once
    panel.given["title"] = "your line and what happened" if shown else said["title"]
    mine = np.concatenate([np.full(first, np.nan), guess])
    look: dict[str, Any] = {"color": "own", "label": "your line", "width": 2.4, "dash": "--"}
    away = np.abs(guess - truth[first:])
    near, right = int((away <= within).sum()), np.mean(away <= within) >= 0.8 and away.mean() <= within
    numbers: dict[str, Any] = {"guess": guess, "truth": truth[first:], "near": near, "within": within}
    if not shown:
        panel.add("pen", y=mine, name="drawn", lo=ends[0], hi=ends[1], **look)
        see.buttons["Show what happened"] = {"shown": True}
        see.say(f"{said['ask']} Draw it, or type it. Then press Show what happened.", **numbers)
        return first
    panel.line(mine, **look)
    see.idle |= {"typed"}
    mean = np.add.reduceat(guess, places) / np.diff([*places, count]) if stairs else guess[places]
    far, picture = min((float(np.abs(mean - wrong).mean()), tells) for wrong, tells in said["wrong"])
    picture = said["right"] if right else picture if far < 0.025 * (ends[1] - ends[0]) else said["other"]
    head = f"At {{near}} of {{count}} points your line is within {said['near']}."
    see.say(f"{head} {{picture}} What happened: {said['happened']}.", count=count, picture=picture, **numbers)
    return len(truth)


def _typed(text: str, count: int, low: float, high: float, asked: str) -> list[float]:
    """The numbers that a reader typed in place of a line. Raises ValueError, with an example, for anything else."""
    found = [v for word in text.replace(",", " ").replace(";", " ").split() if (v := number(word)) is not None]
    if len(found) != count or not all(low <= v <= high for v in found):
        raise ValueError(f"type {asked}, each from {low:g} to {high:g}, got {text!r}")
    return found


def tenths(shares: Any) -> np.ndarray:
    """Shares in percent for a picture: to a tenth, smaller ones to one digit, and 100 for all alone."""
    exact = 100 * np.asarray(shares, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        size = 10.0 ** np.floor(np.log10(np.maximum(exact, 1e-12)))
        small = np.round(exact / size) * size
    near = np.round(exact, 1)
    return np.where((near == 0) & (exact > 0), small, np.where((near == 100) & (exact < 100), 99.9, near))
