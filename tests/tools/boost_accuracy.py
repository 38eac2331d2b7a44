"""Accuracy of boost's configurations: whole trainings on real digits, from several seeds, beside no boost."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from mpkit import networks
from mpkit.boost import AutoBoost, BoostTrainOneStepCell
from mpkit.data import digits, mnist
from mpkit.device import default_device
from mpkit.experiment import Results, experiment
from mpkit.optimizers import Momentum
from mpkit.schedules import CosineDecayLR
from mpkit.step import WithLossCell
from mpkit.step.distributed import rank_and_size

Configuration = tuple[str, dict[str, Any]]
Score = tuple[float, float]
"""Test accuracy, percent, and the time of the training, seconds."""

PROCESSES = 2
TOGETHER = f"O2 in {PROCESSES} processes"


def configurations(steps: int) -> dict[str, Configuration]:
    """Name -> level and configuration of AutoBoost, for a training of `steps` steps."""
    freeze = {"total_steps": steps}
    off = {"mode": "manual", "less_bn": False, "grad_freeze": False, "adasum": False}
    fewer = {**off, "less_bn": True}
    return {
        "none": ("O0", {}),
        "less_bn": ("O0", {"boost": fewer}),
        "less_bn, norms only": ("O0", {"boost": fewer, "less_bn": {"fn_flag": False, "gc_flag": False}}),
        "less_bn, no centralization": ("O0", {"boost": fewer, "less_bn": {"fn_flag": True, "gc_flag": False}}),
        "less_bn, no normalised FC": ("O0", {"boost": fewer, "less_bn": {"fn_flag": False, "gc_flag": True}}),
        "freezing": ("O0", {"boost": {**off, "grad_freeze": True}, "grad_freeze": freeze}),
        "O1": ("O1", {"grad_freeze": freeze}),
        "O2": ("O2", {"grad_freeze": freeze}),
        "O1 tuned": ("O1", {"boost": {"mode": "tuned"}, "grad_freeze": freeze}),
    }


@dataclass(frozen=True)
class Study:
    """What is trained for the accuracy: real digits, so many images, a ResNet-18 of a width, so many epochs.

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
    def steps(self) -> int:
        """Updates of one training."""
        return self.epochs * -(-self.train // self.batch)

    @property
    def names(self) -> tuple[str, ...]:
        """The configurations trained, the first without boost."""
        return self.only or tuple(name for name in configurations(1) if name != "O2")

    def data(self, device: torch.device) -> tuple[Tensor, ...]:
        """Images and labels of training, images and labels of the test."""
        read = partial(digits, size=self.size) if self.source == "digits" else mnist
        pairs = [read(split=split) for split in ("train", "test")]
        return tuple(t[:n].to(device) for pair, n in zip(pairs, (self.train, self.test)) for t in pair)


STUDIES = (
    Study(),
    Study(epochs=20, only=("none", "O1", "O1 tuned"), repeats=2),
    Study("mnist", 28, 4000, 4000, epochs=5, only=("none", "O1", "O1 tuned", TOGETHER)),
)


def trained(config: Configuration, seed: int, data: tuple[Tensor, ...], study: Study) -> Score:
    """One training; the seed fixes first weights and order. Of several processes each takes its share of a batch."""
    images, labels, test_images, test_labels = data
    rank, world = rank_and_size()
    torch.manual_seed(seed)
    resnet = networks.resnet18(width=study.width, in_channels=1).to(images.device)
    boost = AutoBoost(*config)
    rate = CosineDecayLR(1e-4, 0.05, study.steps)
    net, optimizer = boost.network_auto_process_train(
        resnet, Momentum(resnet.parameters(), rate, 0.9, weight_decay=5e-4)
    )
    cell = BoostTrainOneStepCell(WithLossCell(net, nn.CrossEntropyLoss()), optimizer, boost=boost)
    start = time.process_time()
    for _ in range(study.epochs):
        for rows in torch.randperm(len(images)).split(study.batch):
            cell(images[rows[rank::world]], labels[rows[rank::world]])
    seconds = time.process_time() - start
    net.eval()
    with torch.no_grad():
        right = [(net(x).argmax(1) == y).float().sum() for x, y in zip(test_images.split(250), test_labels.split(250))]
    return 100 * float(sum(right)) / len(test_labels), seconds


def run(seed: int, name: str, study: Study) -> dict[str, float]:
    """One training of a configuration by its name, as `experiment` calls it."""
    known = configurations(study.steps)
    if name == TOGETHER:
        return {"accuracy": _in_processes(known["O2"], seed, study)}
    percent, seconds = trained(known[name], seed, study.data(default_device()), study)
    return {"accuracy": percent, "cpu_seconds": seconds}


def accuracies(study: Study, seeds: Sequence[int], folder: Path | None = None) -> list[dict[str, Any]]:
    """One row per configuration: accuracy of every seed, mean, spread, and the difference to no boost seed by seed.

    One training at a time, the configurations of a seed in random order, so that their times can be compared. With a
    folder a killed study goes on where it was.
    """
    study.data(default_device())  # raises where the images are missing, before anything is trained
    results = experiment(partial(run, study=study), {"name": study.names}, seeds=list(seeds), folder=folder)
    if results.failures:
        raise RuntimeError("\n".join(results.failures.values()))
    rows = [_row(study, results, name) for name in study.names]
    print(*(list(row.values()) for row in rows), *results.summary("accuracy")["sentence"], sep="\n", flush=True)
    return rows


def _row(study: Study, results: Results, name: str) -> dict[str, Any]:
    cell, base = study.names.index(name), study.names.index("none")
    percent = list(results.values(cell, "accuracy").values())
    difference = results.difference(cell, "accuracy", base)
    assert difference is not None
    alone = name != TOGETHER  # processes share their work, so their times are no measure of a level
    speedups = [results.values(base, "cpu_seconds")[s] / t for s, t in results.values(cell, "cpu_seconds").items()]
    return {
        "data": f"{study.source} {study.size}x{study.size}, {study.train} to train, {study.test} to test",
        "network": f"ResNet-18 width {study.width}, {study.epochs} epochs of batch {study.batch}",
        "configuration": name,
        "accuracy_percent": [round(score, 2) for score in percent],
        "mean": round(statistics.mean(percent), 2),
        "spread": round(statistics.stdev(percent), 2),
        "difference": round(difference.mean, 2),
        "difference_spread": round(difference.spread, 2),
        "speedup": round(statistics.median(speedups), 3) if alone else None,
    }


def _in_processes(config: Configuration, seed: int, study: Study) -> float:
    """The same training in `PROCESSES` processes over gloo, on a CPU; its accuracy."""
    with tempfile.TemporaryDirectory() as folder:
        level, keys = config
        config = (level, {**keys, "common": {"device_number": 1}})
        mp.spawn(_process, (folder, config, seed, study), nprocs=PROCESSES)
        return json.loads((Path(folder) / "score").read_text())


def _process(rank: int, folder: str, config: Configuration, seed: int, study: Study) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=PROCESSES)
    data = study.data(torch.device("cpu"))
    percent, _ = trained(config, seed, data, study)
    if rank == 0:
        (Path(folder) / "score").write_text(json.dumps(percent))
    dist.barrier()
    dist.destroy_process_group()
