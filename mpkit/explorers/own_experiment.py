"""An experiment of one's own: choose cells, watch them arrive, stop, go on, and compare two runs step by step."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from traitlets import Bool, Enum, Int

from mpkit.data import data_dir
from mpkit.experiment import Results, experiment, train
from mpkit.explorers.base import Explorer, counted
from mpkit.networks import LeNet5, Network, resnet18

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


def perceptron() -> nn.Module:
    """64-32-10, the quickest network that is worth a question."""
    return Network(inputs=64, hidden=32)


def lenet() -> nn.Module:
    """LeNet-5 for 28x28 digits."""
    return LeNet5()


def residual() -> nn.Module:
    """A ResNet-18 of width 4 for 8x8 digits."""
    return resnet18(width=4, in_channels=1)


NETWORKS: Mapping[str, Any] = {  # name -> how it is trained, small enough for a minute of several cells and seeds
    "perceptron": partial(train, perceptron, "digits8", lr=0.1, epochs=2, batch=64),
    "LeNet-5": partial(train, lenet, "digits", lr=0.05, epochs=1, batch=64),
    "ResNet-18, width 4": partial(train, residual, "digits8", lr=0.05, epochs=1, batch=64),
}


@cache
def recorded() -> Results:
    """The experiment in `data/experiments`: the perceptron, eight cells, ten seeds, six epochs."""
    return Results.load(data_dir() / "experiments" / "digits_levels.zip")


@cache
def recorded_seeds(count: int) -> Results:
    """What the recorded experiment would have said with its first `count` seeds."""
    return recorded().first(count)


@dataclass(frozen=True)
class Shown:
    """One row of the picture: the finished accuracies of a cell, percent, and (low, mean, high) of their mean."""

    name: str
    values: tuple[float, ...]
    interval: tuple[float, float, float]


class OwnExperimentExplorer(Explorer):
    """Recorded runs until Run is pressed; then the reader's own, as they arrive.

    Stop ends after the current run, and Run goes on with the missing runs; a run is made once, whatever cells and seeds
    are chosen later. Of the recorded runs the first `recorded_seeds` are shown, as if no others had been made. `run`
    is a function of the reader's own, in place of the three networks.
    """

    controls = ("network", *(f"cell_{i}" for i in range(len(CELLS))), "recorded_seeds", "seeds")
    controls = (*controls, "one", "other", "seed", "step")
    gestures = ("choose",)
    labels = tuple(CELLS)
    actions = {"Run": "run", "Stop": "stop", "Show recorded runs": "show_recorded"}
    network = Enum(list(NETWORKS), "perceptron").tag(label="network")
    cell_0, cell_1, cell_2, cell_3, cell_4, cell_5, cell_6, cell_7 = (
        Bool(True).tag(label=name, hidden=True) for name in CELLS
    )
    recorded_seeds = Int(10, min=1, max=10).tag(label="recorded seeds")
    seeds = Int(5, min=1, max=10).tag(label="your seeds")
    one = Enum(list(CELLS), "float32").tag(label="compare")
    other = Enum(list(CELLS), "fp16 O2, scaled").tag(label="with")
    seed = Int(0, min=0, max=9).tag(label="seed")
    step = Int(1, min=1, max=144).tag(label="step")

    def __init__(self, run: Any = None, **params: object) -> None:
        self._own_run = run
        self.results: Results | None = None
        self._trained = ""  # the network of these results
        self._folder = tempfile.mkdtemp(prefix="mpkit-own-experiment-")
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        super().__init__(**params)

    @property
    def chosen(self) -> dict[str, Mapping[str, Any]]:
        """The cells that are ticked."""
        return {name: cell for i, (name, cell) in enumerate(CELLS.items()) if getattr(self, f"cell_{i}")}

    def choose(self, number: int) -> None:
        """Choose a cell, or leave it out; float32 and one other cell always stay."""
        name = f"cell_{number}"
        self.set(**{name: not getattr(self, name, False)})

    def compute(self) -> None:
        if "float32" not in self.chosen or len(self.chosen) < 2:
            raise ValueError("choose float32, with which the others are compared, and at least one other cell")
        self._read()

    @property
    def shown(self) -> Results:
        """The results on screen: the reader's own, or the recorded ones."""
        return self.results or recorded_seeds(self.recorded_seeds)

    def idle(self) -> tuple[str, ...]:
        now = "show_recorded" if self.results is None else "recorded_seeds"
        return (now, "network") if self._own_run else (now,)

    def _read(self) -> None:
        """The rows and the two losses on screen, from the results at hand."""
        results = self.shown
        self.rows = []
        for name in self.chosen:
            if name in results.labels and "accuracy" in results.metrics:
                numbers = results.values(name, "accuracy").values()
                self.rows.append(Shown(name, tuple(numbers), results.interval(name, "accuracy")))
            else:
                self.rows.append(Shown(name, (), (np.nan,) * 3))
        self.losses = [self._loss(results, name) for name in (self.one, self.other)]

    def _loss(self, results: Results, name: str) -> np.ndarray:
        try:
            return np.asarray(results.series(name, "loss", self.seed), dtype=float)
        except ValueError:  # not chosen or not there yet
            return np.empty(0)

    @property
    def title(self) -> str:
        """What is on screen."""
        if self.results is not None:
            return f"your runs: {self._trained}"
        return f"recorded: perceptron, {counted(self.recorded_seeds, 'seed')}"

    @property
    def compared(self) -> dict[str, np.ndarray]:
        """The losses of the one or two cells that are compared, as far as there are runs from this seed."""
        return {name: run for name, run in zip((self.one, self.other), self.losses) if len(run)}

    def run(self) -> None:
        """Run what is missing of the chosen cells, in the background."""
        self.start(self._running)

    def show_recorded(self) -> None:
        """Back to the recorded runs."""
        if self.busy:
            raise ValueError("it is still at work; press Stop first")
        with self.lock:
            self.results = None
            self._read()
            self.touch()

    def _running(self) -> Iterator[float]:
        with self.lock:
            cells, seeds, name = self.chosen, self.seeds, "your network" if self._own_run else self.network
        run, folder = self._own_run or NETWORKS[name], str(Path(self._folder) / name)

        def arrived(done: int, total: int, row: Any) -> bool:
            with self.lock:
                self.results, self._trained = Results.load(folder), name
                self._read()
                self.progress = done / total
                self.touch()
            return not self._stop.is_set()

        results = experiment(run, cells, seeds=seeds, baseline="float32", folder=folder, progress=arrived)
        with self.lock:
            self.results, self._trained = results, name
            self._read()
        yield 1.0

    def summary(self) -> str:
        network = "your network" if self._own_run else self.network
        return f"{self.stored()} Run would now make the missing runs of {network} from {counted(self.seeds, 'seed')}."

    def stored(self) -> str:
        results = self.shown
        if "accuracy" not in results.metrics:
            why = "no run has returned an accuracy" if len(results) else "no run is finished yet"
            failed = next(iter(results.failures.values()), why).strip().splitlines()[-1]
            return f"{self.title}: {failed}."
        verdicts = results.summary("accuracy")["verdict"]
        told = "; ".join(f"{name} {self._found(results, name, verdicts.get(name))}" for name in self.chosen)
        return f"{self.title}. Accuracy in percent: {told}. {self._at_step()}"

    @staticmethod
    def _found(results: Results, name: str, verdict: str | None) -> str:
        """Mean and verdict of a cell, and what became of its runs without a number."""
        if verdict is None:
            return "not among these runs"
        runs, mean = results.values(name, "run_seconds"), results.interval(name, "accuracy")[1]
        failed = sum(label == name for label, _ in results.failures)
        strange = len(runs) - int(np.isfinite([*results.values(name, "accuracy").values()]).sum())
        done = counted(failed + len(runs), "run")
        lost = [f"{n} of {done} {what}" for n, what in ((failed, "failed"), (strange, "gave no finite number")) if n]
        if np.isnan(mean):
            return " and ".join(lost) or "none yet"
        return f"{mean:.1f}, {verdict}" + (f" ({' and '.join(lost)})" if lost else "")

    def _at_step(self) -> str:
        at = min(self.step, max(map(len, self.losses)))  # the runs of another network can be shorter
        shown = {name: run[at - 1] for name, run in self.compared.items() if at <= len(run)}
        told = [f"{name} {loss:.3f}" if np.isfinite(loss) else f"{name} not finite" for name, loss in shown.items()]
        if not told:
            return f"From seed {self.seed} there is no run of {' or '.join(dict.fromkeys((self.one, self.other)))}."
        return f"Loss at step {at} from seed {self.seed}: {', '.join(told)}."

    def table(self) -> list[dict[str, Any]]:
        return [
            {
                "cell": row.name,
                "runs": len(row.values),
                "accuracy, %": None if np.isnan(row.interval[1]) else round(row.interval[1], 1),
                "from, %": None if np.isnan(row.interval[0]) else round(row.interval[0], 1),
                "to, %": None if np.isnan(row.interval[2]) else round(row.interval[2], 1),
            }
            for row in self.rows
        ]
