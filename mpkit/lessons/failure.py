"""Lessons 00 and 03: a network that float16 does not train without a loss scale, recorded over five seeds."""

from functools import cache
from typing import Any

import numpy as np
from torch import nn

from mpkit.data import data_dir
from mpkit.files import read_json
from mpkit.formats import FP16
from mpkit.view import FATES, LINES, Choice, Range, Sheet, edges, linear, log2, names, regions, tenths, view

STEPS = (0, 12, 30, 60, 120, 180, 240, 300)  # of the recorded moments
LAYERS = ("first layer", "2nd", "3rd", "4th", "5th", "6th", "output layer")
FIRST, LAST = -60, 20  # powers of two on screen
SHOWN = {"float32": "float32 alone", "float16, no scale": "and float16 without a scale", "all": "and with a loss scale"}


def sigmoids(depth: int = 6, width: int = 64, inputs: int = 64) -> nn.Sequential:
    """So many layers of sigmoids, for 8x8 images of ten classes. Each sigmoid divides a gradient by four or more."""
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(depth):
        layers += [nn.Linear(inputs, width), nn.Sigmoid()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, 10))


# ---- numbers
@cache
def recorded() -> dict[str, Any]:
    """What `data/make_failure.py` made: `runs`, and `moments` of one of them, layer by layer."""
    return read_json(data_dir() / "failure.json")


def moment_at(step: int) -> dict[str, np.ndarray]:
    """Layer by layer: `counts` of magnitudes in float32 by power of two from `lowest`; at each scale, `zero overflow`.

    The last two are shares of the gradients that are not 0 in float32 (some pixels are always black): those that
    float16 computes as 0, and of all, as inf or NaN: (scales 2^0 to 2^40, layers).
    """
    found = next(m for m in recorded()["moments"] if m["step"] == step)
    counts, zero, overflow = (np.array(found[name]) for name in ("counts", "zero", "overflow"))
    black = 1 - counts.sum(1) / [m.weight.numel() for m in sigmoids() if isinstance(m, nn.Linear)]
    return {"counts": counts, "zero": np.clip((zero - black) / (1 - black), 0, 1).round(4), "overflow": overflow}


def trainings() -> dict[str, list[dict[str, Any]]]:
    """The runs of each way to train, one for each seed: `accuracy` in percent, `losses`."""
    every = recorded()["runs"]
    return {way: [run for run in every if run["way"] == way] for way in dict.fromkeys(run["way"] for run in every)}


def table() -> list[dict[str, str]]:
    """Every way to train in a line, seed by seed."""
    rows = []
    for way, runs in trainings().items():
        right = "  ".join(f"{run['accuracy']:.0f}" for run in runs)
        loss = "  ".join(f"{run['losses'][-1]:.2f}" for run in runs)
        rows.append({"trained in": way, "test digits right, %": right, "last loss, nats": loss})
    return rows


# ---- pictures
@view(
    scale=Range(0, 40, label="loss scale, 2 to the"),
    step=Choice({s: str(s) for s in STEPS}, "after training steps"),
)
def edge(see: Sheet, scale=0, step=0) -> None:
    """Gradients of every layer, dragged over the edge below which float16 has nothing but 0.

    Numbers: `zero`, the share of each layer's gradients that float16 computes as 0 at this scale, and `overflow`.
    """
    found = moment_at(step)
    shares = found["counts"] / found["counts"].sum(1, keepdims=True)
    zero, over = found["zero"][scale], found["overflow"][scale]
    see.grid(430, 900, least=680)
    title = "the gradients of seven layers, times the loss scale; height: share of the layer"
    y = names(LAYERS, down=True) | {"lo": len(LAYERS) - 0.4, "hi": -1.8}  # room for the names of the regions
    panel = see.panel(title=title, x=log2("magnitude", FIRST, LAST, 8), y=y, pad=[28, 120, 44, 110])
    ends = edges(FP16)
    regions(panel, "x", *ends, zero="becomes 0", subnormal="few bits", normal="all bits", overflow="inf")
    at = recorded()["lowest"] + np.arange(shares.shape[1]) + scale
    rows, cols = np.nonzero((shares > 0.002) & (at >= FIRST) & (at < LAST))
    at, tall = at[cols], 0.82 * shares[rows, cols] / shares.max()
    fill = np.array(FATES)[np.searchsorted(ends, at, side="right")]
    panel.boxes(at, rows + 0.42 - tall, at + 1, rows + 0.42, fill=fill.tolist(), quiet=True)
    middle = float((np.cumsum(shares[0]) < 0.5).sum() + recorded()["lowest"] + 0.5)
    panel.handle("x", "scale", scale, 0, 40, "loss scale, 2 to the", base=middle, cross=-0.95, note="drag all rows")
    lost = tenths(zero)
    told = [f"{t:g} % are 0" if not o else f"{o:g} % inf, NaN" for t, o in zip(lost, tenths(over))]
    panel.text(told, np.full(len(LAYERS), LAST), np.arange(len(LAYERS)), anchor="start", dx=8)
    see.say(
        f"After {step} steps, times 2^{scale}, float16 computes as 0: {lost[0]:g} % of the first layer's gradients, "
        f"{lost[2]:g} % of the 3rd layer's, {lost[-1]:g} % of the output layer's. {(over > 0).sum()} of 7 overflow.",
        zero=zero, overflow=over,
    )  # fmt: skip
    see.rows = [{"layer": name, "in float16": words} for name, words in zip(LAYERS, told)]


@view(shown=Choice(SHOWN, "show"))
def failing(see: Sheet, shown="float32") -> None:
    """Loss and accuracy of the recorded trainings, five seeds each, as far as the reader asks for them.

    Numbers: `right`, by way, percent of the test digits.
    """
    ways = dict([*trainings().items()][: {"float32": 1, "float16, no scale": 2, "all": 4}[shown]])
    found = {way: np.array([run["accuracy"] for run in runs]) for way, runs in ways.items()}
    see.grid(360, 900, cols=(1.5, 1))
    loss = see.panel(title="loss, five seeds", x=linear("step", 0, 1200, 4), y=linear("loss, nats", 0, 2.5, 5))
    y = names([*ways], down=True)
    right = see.panel(0, 1, title="test digits right", x=linear("%", 0, 100, 5), y=y, pad=[28, 14, 44, 120])
    for i, ((way, runs), look) in enumerate(zip(ways.items(), LINES)):
        for number, run in enumerate(runs):
            steps = recorded()["every"] * (0.5 + np.arange(len(run["losses"])))
            loss.line(np.clip(run["losses"], 0, 2.5), steps, width=1.3, label=None if number else way, **look)
        beside = i + 0.08 * (np.arange(len(runs)) - 2)  # a row of their own each: they would be one blob
        right.points(beside, found[way], look["color"], size=4.5)
    told = "; ".join(f"{way} {values.min():.0f} to {values.max():.0f} %" for way, values in found.items())
    see.say(f"Six layers of sigmoids, 1,200 steps, five seeds. Test digits right: {told}.", right=found)
    see.rows = table()[: len(ways)]
