"""What an experiment costs beside its runs: digits runs on two processes, overhead per cell, opening a folder.

A machine that other work keeps busy gives no figure for two processes against one: the note states the load.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mpkit.bench._measure import Row
from mpkit.experiment import Results, experiment, train

JOBS = 2


def run(*, quick: bool, device: torch.device) -> list[Row]:
    """200 digits runs on 2 processes against half of their serial time, the overhead per cell, 10,000 cells opened."""
    small = partial(train, data="digits8", network=_small, epochs=1)
    return [*_digits(small, 20 if quick else 200), _overhead(40 if quick else 200), _opening(500 if quick else 10_000)]


def _small() -> torch.nn.Module:
    from mpkit.networks import Network

    return Network(inputs=64, hidden=128)


def _load() -> str:
    return f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores" if hasattr(os, "getloadavg") else ""


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _digits(one: Callable[..., object], count: int) -> list[Row]:
    """Start-up is paid before: the serial runs are warm as well. Wall time, and what all processes compute for it."""
    note = _load()
    cells: dict[str, Any] = {
        "level": ["O0", "auto"],
        "lr": [0.01, 0.02, 0.05, 0.1],
        "optimizer": ["Momentum", "torch.Adam"],
    }
    seeds = -(-count // 16)
    measured = partial(_measured, one)
    both: dict[str, Any] = {"seeds": seeds, "progress": False}
    experiment(measured, cells, seeds=1, n_jobs=JOBS, progress=False)  # starts the workers
    wall, cpu = {}, {}
    for name, jobs in (("serial", 1), ("side by side", JOBS)):
        start, begun = time.perf_counter(), time.process_time()
        results = experiment(measured, cells, n_jobs=jobs, **both)
        wall[name], cpu[name] = time.perf_counter() - start, time.process_time() - begun
        cpu[name] += results.frame["cpu_seconds"].sum() if jobs > 1 else 0.0
    case, half = f"{16 * seeds} runs of a digits network", wall["serial"] / JOBS
    ratios = {"wall": wall["side by side"] / half, "cpu": cpu["side by side"] / cpu["serial"]}
    found = (
        (f"{JOBS} processes", wall["side by side"], f"serial / {JOBS}", ratios["wall"]),
        ("CPU of all processes", cpu["side by side"], "CPU, serial", ratios["cpu"]),
    )
    return [Row("experiment", case, *row, goal=1.15, note=note) for row in found]


def _measured(one: Callable[..., object], *, seed: int, **cell: object) -> dict[str, float]:
    """Without the argument `only_time`, so that the same runs are made with one process and with several."""
    start = time.process_time()
    one(seed=seed, **cell)
    return {"cpu_seconds": time.process_time() - start}


def _nothing(seed: int, x: int) -> dict[str, float]:
    return {"y": float(x)}


def _overhead(count: int) -> Row:
    grid = {"x": list(range(count))}
    note = _load()
    experiment(_nothing, {"x": [0, 1]}, seeds=1, n_jobs=JOBS, progress=False)
    seconds = _seconds(lambda: experiment(_nothing, grid, seeds=1, n_jobs=JOBS, progress=False)) / count
    return Row(
        "experiment",
        f"{count} cells that do nothing",
        f"overhead per cell, {JOBS} processes",
        seconds,
        "50 ms",
        seconds / 0.05,
        goal=1.0,
        note=note,
    )


def _opening(count: int) -> Row:
    folder = Path(tempfile.mkdtemp())
    try:
        experiment(_nothing, {"x": list(range(count))}, seeds=1, folder=folder, progress=False)
        note = _load()
        seconds = _seconds(lambda: Results.load(folder))
    finally:
        shutil.rmtree(folder)
    case = f"folder of {count} finished cells"
    return Row("experiment", case, "Results.load", seconds, "2 s", seconds / 2, goal=1.0, note=note)
