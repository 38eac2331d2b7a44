"""*Your own experiment*: choose cells, watch runs arrive, stop and go on."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from mpkit.data import data_dir
from mpkit.experiment import Results, experiment, train
from mpkit.experiment.results import temporary
from mpkit.networks import LeNet5, Network, resnet18
from mpkit.view import Choice, Range, Sheet, counted, names, view
from mpkit.view.intervals import axis, beside, intervals

_CELLS = {  # level, dtype, scaler, boost; formats are emulated, so that any machine can compute in them
    "float32": ("O0", "float16", None, "O0"), "fp16 O2": ("O2", "fp16", None, "O0"),
    "fp16 O2, scaled": ("O2", "fp16", "torch", "O0"), "bf16 O2": ("O2", "bf16", None, "O0"),
    "e5m2 O2, scaled": ("O2", "e5m2", "torch", "O0"), "e5m1 O2, scaled": ("O2", "e5m1", "torch", "O0"),
    "freezing": ("O0", "float16", None, "grad_freeze"), "centralized": ("O0", "float16", None, "grad_centralization"),
}  # fmt: skip
CELLS = {name: dict(zip(("level", "dtype", "scaler", "boost"), cell)) for name, cell in _CELLS.items()}


# ---- networks and runs
perceptron = partial(Network, inputs=64, hidden=32)  # the quickest network that is worth a question
residual = partial(resnet18, width=4, in_channels=1)
NETWORKS: dict[str, Any] = {  # name -> how it is trained, small enough for a minute of several cells and seeds
    "perceptron": partial(train, perceptron, "digits8", lr=0.1, epochs=2, batch=64),
    "LeNet-5": partial(train, LeNet5, "digits", lr=0.05, epochs=1, batch=64),
    "ResNet-18, width 4": partial(train, residual, "digits8", lr=0.05, epochs=1, batch=64),
}


@cache
def recorded() -> Results:
    """The experiment in `data/experiments`: the perceptron, eight cells, ten seeds, six epochs."""
    return Results.load(data_dir() / "experiments" / "digits_levels.zip")


own_folder = cache(temporary)  # the runs of this kernel lie there until it ends
finished = defaultdict[Path, set[tuple[str, int]]](set)  # cell and seed of the runs in a folder


def chosen(left_out: list[int]) -> dict[str, dict[str, Any]]:
    """The cells that are ticked. Raises ValueError without float32 or without another one."""
    cells = {name: cell for i, (name, cell) in enumerate(CELLS.items()) if i not in left_out}
    if "float32" not in cells or len(cells) < 2:
        raise ValueError("choose float32, with which the others are compared, and at least one other setting")
    return cells


def running(now: Callable[[], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Make what is missing of the chosen cells, one run after the other; what was made before is kept."""
    given = now()
    name, cells, seeds = given["network"], chosen(given["left_out"]), given["seeds"]
    asked: dict[str, Any] = {"baseline": "float32", "folder": own_folder() / name, "progress": lambda *_: False}
    while True:
        found = experiment(NETWORKS[name], cells, seeds=seeds, **asked)
        finished[found.folder] |= ended(found)
        yield {"results": found, "made": name, "progress": len(ended(found)) / len(cells) / seeds}
        if not found.stopped:
            return


def ended(results: Results | None) -> set[tuple[str, int]]:
    """Cell and seed of the runs that ended well."""
    return {(name, seed) for name in CELLS for seed in accuracies(results, name)}


def accuracies(results: Results | None, name: str) -> dict[int, float]:
    """The accuracy of each seed, in percent; none for a cell that was not run."""
    return results.values(name, "accuracy") if results and name in results.labels else {}


# ---- the view
@view(
    network=Choice({name: name for name in NETWORKS}, "network"),
    recorded_seeds=Range(1, 10, label="recorded seeds"),
    seeds=Range(1, 10, label="your seeds"),
)
def own_experiment(
    see: Sheet, network="perceptron", recorded_seeds=10, seeds=5, left_out=[], results=None, made=None
) -> None:
    """Recorded runs until Run is pressed; then the reader's own, as they arrive.

    A press on a row chooses its cell or leaves it out. Stop ends after the current run, and Run goes on with the
    missing runs; a run is made once, whatever cells and seeds are chosen later. Of the recorded runs the first
    `recorded_seeds` are shown, of the reader's own the first `seeds`. `left_out` are the numbers of the cells that are
    not ticked. Numbers: `results`, and `left`, the runs that Run would make: those made since the kernel started are
    not made again.
    """
    cells, most = chosen(left_out), min(seeds, len(results.seeds)) if results else recorded_seeds
    shown = (results or recorded()).first(most)
    asked = {(name, seed) for name in cells for seed in range(seeds)}
    left = len(asked - finished[own_folder() / network])
    press = "Run" if left else "" if made == network and asked <= ended(results) else "Show your runs"
    see.idle = {"recorded_seeds"} if results else set()
    back = {"Show recorded runs": {"results": None}} if results and not see.busy else {}
    see.buttons = ({press: running} if press else {}) | back
    values = {name: accuracies(shown, name) if name in cells else {} for name in CELLS}
    ends = {name: shown.interval(name, "accuracy") if runs else (math.nan,) * 3 for name, runs in values.items()}
    see.grid(398)
    title = f"{f'your runs: {made}' if results else 'recorded: perceptron'}, {counted(most, 'seed')}"
    told, every = [f"{'☑' if name in cells else '☐'} {name}" for name in CELLS], np.arange(len(CELLS))
    x = axis("accuracy on the test digits, percent", [v for n in CELLS for v in (*values[n].values(), *ends[n])])
    panel = see.panel(title=title, x=x, y=names(told, down=True, bare=False), pad=beside(told))
    sets = [{"left_out": sorted({*left_out} ^ {i})} for i in range(len(told))]
    panel.boxes([x["lo"]], every - 0.45, [x["hi"]], every + 0.45, name="cell", sets=sets, names=told, quiet=True)
    intervals(panel, [[*runs.values()] for runs in values.values()], [*ends.values()])
    if values["float32"]:
        panel.rule("x", ends["float32"][1], "reference", dash=":", label="mean of float32")
    verdicts = shown.summary("accuracy")["verdict"]
    found = "; ".join(f"{n} {ends[n][1]:.1f}, {verdicts[n]}" if values[n] else f"{n} not yet" for n in cells)
    many = counted(left, "network")
    say = f"Press Run to train {many} ({network}, {len(cells)} settings, {counted(seeds, 'seed')})."
    say = f"At work, {many} to go. Stop ends after the one that trains." if see.busy else say
    say = say if left or see.busy else f"All runs of {network} are made.{f' Press {press}.' * bool(press)}"
    see.say(f"{title}. Accuracy in percent: {found}. {say}", results=shown, left=left)
    see.rows = [
        {"setting": name, "runs": len(values[name])}
        | {f"{k}, %": None if math.isnan(v) else round(v, 1) for k, v in zip(("from", "accuracy", "to"), ends[name])}
        for name in cells
    ]
