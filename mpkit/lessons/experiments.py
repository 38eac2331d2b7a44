"""*Your own experiment*: choose cells, watch runs arrive, stop, go on, and compare two runs."""

from __future__ import annotations

import atexit
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from mpkit.data import data_dir
from mpkit.experiment import Results, experiment, train
from mpkit.networks import LeNet5, Network, resnet18
from mpkit.view import Choice, Range, Sheet, view
from mpkit.view.intervals import axis, beside, intervals
from mpkit.view.sheet import LINES, linear, names
from mpkit.view.words import counted

CELLS: Mapping[str, Mapping[str, Any]] = {
    name: {"level": level, "dtype": dtype, "scaler": scaler, "boost": boost}
    for name, level, dtype, scaler, boost in (
        ("float32", "O0", "float16", None, "O0"),
        ("fp16 O2", "O2", "fp16", None, "O0"),
        ("fp16 O2, scaled", "O2", "fp16", "torch", "O0"),
        ("bf16 O2", "O2", "bf16", None, "O0"),
        ("e5m2 O2, scaled", "O2", "e5m2", "torch", "O0"),
        ("e5m1 O2, scaled", "O2", "e5m1", "torch", "O0"),
        ("freezing", "O0", "float16", None, "grad_freeze"),
        ("centralized", "O0", "float16", None, "grad_centralization"),
    )
}
"""What the lesson compares: formats are emulated, so that any machine can compute in them."""


# ---- networks and runs
def perceptron() -> nn.Module:
    """64-32-10, the quickest network that is worth a question."""
    return Network(inputs=64, hidden=32)


def residual() -> nn.Module:
    """A ResNet-18 of width 4 for 8x8 digits."""
    return resnet18(width=4, in_channels=1)


NETWORKS: dict[str, Any] = {  # name -> how it is trained, small enough for a minute of several cells and seeds
    "perceptron": partial(train, perceptron, "digits8", lr=0.1, epochs=2, batch=64),
    "LeNet-5": partial(train, LeNet5, "digits", lr=0.05, epochs=1, batch=64),
    "ResNet-18, width 4": partial(train, residual, "digits8", lr=0.05, epochs=1, batch=64),
}


@cache
def recorded() -> Results:
    """The experiment in `data/experiments`: the perceptron, eight cells, ten seeds, six epochs."""
    return Results.load(data_dir() / "experiments" / "digits_levels.zip")


@cache
def own_folder() -> str:
    """Where the runs of this kernel lie until it ends."""
    path = tempfile.mkdtemp(prefix="mpkit-own-experiment-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def chosen(left_out: list[int]) -> dict[str, Mapping[str, Any]]:
    """The cells that are ticked. Raises ValueError without float32 or without another one."""
    cells = {name: cell for i, (name, cell) in enumerate(CELLS.items()) if i not in left_out}
    if "float32" not in cells or len(cells) < 2:
        raise ValueError("choose float32, with which the others are compared, and at least one other cell")
    return cells


def running(now: Callable[[], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Make what is missing of the chosen cells, one run after the other; what was made before is kept."""
    given = now()
    name, cells, seeds = given["network"], chosen(given["left_out"]), given["seeds"]
    asked: dict[str, Any] = {"baseline": "float32", "folder": Path(own_folder()) / name, "progress": lambda *_: False}
    while True:
        found = experiment(NETWORKS[name], cells, seeds=seeds, **asked)
        yield {"results": found, "made": name, "progress": 1 - missing(found, list(cells), seeds) / len(cells) / seeds}
        if not found.stopped:
            return


def missing(results: Results | None, cells: list[str], seeds: int) -> int:
    """Runs that are not finished."""
    there = [seed for name in cells for seed in _values(results, name)] if results else []
    return len(cells) * seeds - sum(seed < seeds for seed in there)


# ---- the view
@view(
    network=Choice({name: name for name in NETWORKS}, "network"),
    recorded_seeds=Range(1, 10, label="recorded seeds"),
    seeds=Range(1, 10, label="your seeds"),
    one=Choice({name: name for name in CELLS}, "compare"),
    other=Choice({name: name for name in CELLS}, "with"),
    seed=(0, 9),
    step=(1, 144),
)
def own_experiment(
    see: Sheet, network="perceptron", recorded_seeds=10, seeds=5, one="float32", other="fp16 O2, scaled", seed=0,
    step=100, left_out=[], results: Results | None = None, made: str | None = None,
) -> None:  # fmt: skip
    """Recorded runs until Run is pressed; then the reader's own, as they arrive.

    Stop ends after the current run, and Run goes on with the missing runs; a run is made once, whatever cells and seeds
    are chosen later. Of the recorded runs the first `recorded_seeds` are shown. `left_out` are the numbers of the cells
    that are not ticked. Numbers: `results losses` (of the two that are compared), `left`, the runs that Run would make.
    """
    cells, shown = chosen(left_out), results or recorded().first(recorded_seeds)
    losses = {name: loss for name in dict.fromkeys((one, other)) if len(loss := _loss(shown, name, seed))}
    left = missing(results if made == network else None, list(cells), seeds)
    see.idle = {"recorded_seeds"} if results else set()
    see.buttons = ({"Run": running} if left else {}) | ({"Show recorded runs": {"results": None}} if results else {})
    title = f"your runs: {made}" if results else f"recorded: perceptron, {counted(recorded_seeds, 'seed')}"

    see.grid(420, 900, cols=(1.25, 1))
    steps = max(map(len, losses.values()), default=0)
    if steps:
        see.play("step", "step", steps, every=80, first=1)
    _accuracies(see, shown, cells, left_out, title)
    _two_losses(see, losses, seed, steps)

    at: Any = [_at(i, losses, seed) for i in range(steps)] or f"From seed {seed} there is no run of {one} or {other}."
    verdicts = shown.summary("accuracy")["verdict"]
    ends = {label: _interval(shown, label) for label in cells}
    found = "; ".join(f"{n} {ends[n][1]:.1f}, {verdicts[n]}" if n in verdicts else f"{n} not yet" for n in cells)
    many = f"{network}, {len(cells)} settings, {counted(seeds, 'seed')}"
    make = f"Press Run to train {counted(left, 'network')} ({many})." if left else f"All runs of {network} are made."
    see.say(f"{title}. Accuracy in percent: {found}. {{at}} {make}", at=at, results=shown, left=left, losses=losses)
    see.rows = [
        {"cell": label, "runs": len(_values(shown, label))}
        | {f"{k}, %": None if math.isnan(v) else round(v, 1) for k, v in zip(("from", "accuracy", "to"), ends[label])}
        for label in cells
    ]


def _values(results: Results, name: str) -> dict[int, float]:
    """The accuracy of each seed."""
    return results.values(name, "accuracy") if name in results.labels else {}


def _interval(results: Results, name: str) -> tuple[float, float, float]:
    return results.interval(name, "accuracy") if name in results.labels else (math.nan,) * 3


def _loss(results: Results, name: str, seed: int) -> np.ndarray:
    try:
        return np.asarray(results.series(name, "loss", seed), dtype=float)
    except ValueError:  # not chosen or not there yet
        return np.empty(0)


def _accuracies(see: Sheet, results: Results, cells: Mapping[str, Any], left_out: list[int], title: str) -> None:
    """Every chosen cell as its runs arrive; a press on a row chooses it or leaves it out."""
    values = [[*_values(results, name).values()] if name in cells else [] for name in CELLS]
    ends = [_interval(results, name) if name in cells else (math.nan,) * 3 for name in CELLS]
    told, every = [f"{'☑' if name in cells else '☐'} {name}" for name in CELLS], np.arange(len(CELLS))
    x = axis("accuracy on the test digits, percent", [v for a, b in zip(values, ends) for v in (*a, *b)])
    panel = see.panel(title=title, x=x, y=names(told, down=True, bare=False), pad=beside(told))
    sets = [{"left_out": sorted({*left_out} ^ {i})} for i in range(len(told))]
    panel.boxes([x["lo"]], every - 0.45, [x["hi"]], every + 0.45, name="cell", sets=sets, names=told, quiet=True)
    intervals(panel, values, ends)
    if math.isfinite(ends[0][1]):
        panel.rule("x", ends[0][1], "reference", dash=":")


def _two_losses(see: Sheet, losses: Mapping[str, np.ndarray], seed: int, steps: int) -> None:
    high = max((float(loss[np.isfinite(loss)].max(initial=0)) for loss in losses.values()), default=0) or 2.5
    x, y = linear("step", 0, max(steps, 1), 4), linear("loss, nats", 0, 1.05 * high, 5)
    panel = see.panel(0, 1, title=f"{('no run', 'one run', 'two runs')[len(losses)]} from seed {seed}", x=x, y=y)
    for (name, loss), look in zip(losses.items(), LINES):
        panel.line(loss, np.arange(1, len(loss) + 1), width=2, label=name, ghost=True, tag=True, **look)
    if steps:
        panel.rule("x", "index", "muted")


def _at(i: int, losses: Mapping[str, np.ndarray], seed: int) -> str:
    told = [f"{name} {loss[i]:.3f}" for name, loss in losses.items() if i < len(loss)]
    return f"Loss at step {i + 1} from seed {seed}: {', '.join(told)}."
