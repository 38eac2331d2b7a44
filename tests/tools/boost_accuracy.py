"""Accuracy of boost's configurations: an experiment of trainings on real digits, several seeds, beside no boost."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from mpkit import networks
from mpkit.data import digits, mnist
from mpkit.experiment import experiment, train
from mpkit.optimizers import Momentum
from mpkit.schedules import CosineDecayLR

OFF = {"mode": "manual", "less_bn": False, "grad_freeze": False, "adasum": False}
FEWER = {"level": "O0", "boost": {**OFF, "less_bn": True}}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "none": {"level": "O0"},
    "less_bn": FEWER,
    "less_bn, norms only": {**FEWER, "less_bn": {"fn_flag": False, "gc_flag": False}},
    "less_bn, no centralization": {**FEWER, "less_bn": {"fn_flag": True, "gc_flag": False}},
    "less_bn, no normalised FC": {**FEWER, "less_bn": {"fn_flag": False, "gc_flag": True}},
    "freezing": {"level": "O0", "boost": {**OFF, "grad_freeze": True}},
    "O1": {"level": "O1"},
    "O2": {"level": "O2"},
    "O1 tuned": {"level": "O1", "boost": {"mode": "tuned"}},
}
"""Name -> the `boost` of `train`."""
PROCESSES = 2
TOGETHER = f"O2 in {PROCESSES} processes"


@dataclass(frozen=True)
class Study:
    """What is trained: real digits, so many images, a ResNet-18 of a width, so many epochs.

    `only` names the configurations; empty takes all that run in one process, O2 aside, which repeats O1 there.
    `repeats` multiplies the number of seeds, where few would leave the difference inside the noise.
    """

    source: str = "digits"
    size: int = 8
    train: int = 1500
    test: int = 297
    width: int = 8
    epochs: int = 10
    batch: int = 32
    only: tuple[str, ...] = ()
    repeats: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """The configurations trained, the first without boost."""
        return self.only or tuple(name for name in CONFIGURATIONS if name != "O2")

    def data(self) -> tuple[tuple[Tensor, ...], ...]:
        """Images and labels of training, images and labels of the test."""
        read = partial(digits, size=self.size) if self.source == "digits" else mnist
        kept = ((read(split="train"), self.train), (read(split="test"), self.test))
        return tuple(tuple(t[:n] for t in pair) for pair, n in kept)

    def trained(self, name: str, seed: int, data: object) -> dict[str, Any]:
        """One training of a configuration by its name."""
        rate = CosineDecayLR(1e-4, 0.05, self.epochs * -(-self.train // self.batch))
        options = {"boost": CONFIGURATIONS[name], "seed": seed, "epochs": self.epochs, "batch": self.batch}
        network = partial(networks.resnet18, width=self.width, in_channels=1)
        return train(network, data, optimizer=lambda p: Momentum(p, rate, 0.9, weight_decay=5e-4), **options)


STUDIES = (
    Study(),
    Study(epochs=20, only=("none", "O1", "O1 tuned"), repeats=2),
    Study("mnist", 28, 4000, 4000, epochs=5, only=("none", "O1", "O1 tuned", TOGETHER)),
)


def run(seed: int, name: str, study: Study) -> dict[str, Any]:
    """What `experiment` calls: accuracy in percent, seconds of all steps."""
    if name == TOGETHER:
        return {"accuracy": _in_processes(seed, study)}
    found = study.trained(name, seed, study.data())
    return {"accuracy": found["accuracy"], "seconds": sum(found["step_seconds"])}


def accuracies(study: Study, seeds: Sequence[int], folder: Path | None = None) -> list[dict[str, Any]]:
    """One row per configuration: accuracy of every seed, mean, spread, and the difference to no boost seed by seed.

    One training at a time, the configurations of a seed in random order, so that their times can be compared. With a
    folder a killed study goes on where it was.
    """
    study.data()  # raises where the images are missing, before anything is trained
    results = experiment(partial(run, study=study), {"name": study.names}, seeds=list(seeds), folder=folder)
    if results.failures:
        raise RuntimeError("\n".join(results.failures.values()))
    rows, base = [], results.values(0, "seconds")
    for cell, (name, said) in enumerate(zip(study.names, results.summary("accuracy").itertuples())):
        difference = results.difference(cell, "accuracy")
        assert difference is not None
        # processes share their work, so their times are no measure of a level
        speedups = [base[seed] / seconds for seed, seconds in results.values(cell, "seconds").items()]
        rows.append({
            "data": f"{study.source} {study.size}x{study.size}, {study.train} to train, {study.test} to test",
            "network": f"ResNet-18 width {study.width}, {study.epochs} epochs of batch {study.batch}",
            "configuration": name,
            "accuracy_percent": [round(v, 2) for v in results.values(cell, "accuracy").values()],
            "mean": round(said.mean, 2),
            "spread": round(said.spread, 2),
            "difference": round(difference.mean, 2),
            "difference_spread": round(difference.spread, 2),
            "speedup": round(float(np.median(speedups)), 3) if speedups else None,
        })  # fmt: skip
        print(*rows[-1].values(), said.sentence, flush=True)
    return rows


class Share:
    """Batches of which each process sees its rows: all draw the same order."""

    def __init__(self, pair: tuple[Tensor, ...], batch: int) -> None:
        self.pair, self.batch = pair, batch

    def __len__(self) -> int:
        return -(-len(self.pair[0]) // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for rows in torch.randperm(len(self.pair[0])).split(self.batch):
            yield tuple(part[rows[dist.get_rank() :: PROCESSES]] for part in self.pair)


def _in_processes(seed: int, study: Study) -> float:
    """The training at O2 in `PROCESSES` processes over gloo, on a CPU; its accuracy."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, (folder, seed, study), nprocs=PROCESSES)
        return json.loads((Path(folder) / "score").read_text())


def _process(rank: int, folder: str, seed: int, study: Study) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=PROCESSES)
    train_pair, test = study.data()
    CONFIGURATIONS[TOGETHER] = {"level": "O2", "common": {"device_number": 1}}
    found = study.trained(TOGETHER, seed, {"train": Share(train_pair, study.batch), "test": test})
    if rank == 0:
        (Path(folder) / "score").write_text(json.dumps(found["accuracy"]))
    dist.barrier()
    dist.destroy_process_group()
