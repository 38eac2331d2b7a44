"""`experiment`: a grid of runs, several seeds each, by joblib; what is finished lies in a folder at once."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import joblib
from tqdm.auto import tqdm

from mpkit.arguments import check_flags, check_kind, check_number
from mpkit.device import default_device
from mpkit.experiment.grid import baselines, cells_of, check_call, seeds_of
from mpkit.experiment.identity import Hasher, versions
from mpkit.experiment.results import Results, temporary
from mpkit.experiment.store import INDEX, Row, code_key, folder_at, index_text, read_rows
from mpkit.experiment.worker import Run, Task, ended
from mpkit.files import write_whole

Progress = bool | Callable[[int, int, Row], Any]


def experiment(
    run: Run,
    grid: Any,
    *,
    seeds: int | Iterable[int] = 5,
    folder: str | os.PathLike[str] | None = None,
    baseline: Any = None,
    n_jobs: int | None = None,
    progress: Progress = True,
    retry: bool = False,
    version: str | None = None,
) -> Results:
    """Run `run(seed=..., **cell)` for every cell of a grid and every seed; what is finished is kept and not run again.

    Args:
        run:       returns a dict of numbers and series of numbers. `train` is a ready-made one;
                   `functools.partial(train, network=..., data=...)` fixes what all cells share.
        grid:      a dict of lists (every combination), a list of dicts (these cells) or a dict of dicts (cells with
                   names). Values are numbers, strings, functions, classes, dtypes, policies, arrays: whatever has a
                   content that can be compared.
        seeds:     how many (0, 1, ...), or which.
        folder:    where the finished cells go; None: a temporary folder that ends with this process.
        baseline:  what every cell is compared with: None for the first cell, a cell's number or name, or arguments.
        n_jobs:    processes on a CPU; None: what `joblib.parallel_config` says, else 1, in this process; -1: one per
                   core. On a GPU the runs are made one at a time.
        progress:  True shows a bar with the time left; False nothing; a function is called (done, all, row),
                   and ends the experiment by returning False.
        retry:     run failed cells again, which are otherwise kept as they are.
        version:   your own word for the code of `run`: finished cells count as long as it stays the same. None: they
                   count as long as the code of `run` does, all code of your own that it refers to, and the versions of
                   packages. Of mpkit, in a checkout that is worked on, the modules count that `run` can use.
    Returns:  `Results`: `.frame`, `.summary(metric)`, `.plot()`.
    Raises:   TypeError, ValueError for arguments, before anything runs. A cell that raises is kept with its traceback
              and stops nothing.
    Warns:    RuntimeWarning where the folder holds the same cells made by other code or other versions (they are kept,
              not used, and run again), or a file that was changed or cut.

    Each cell runs on one torch thread, with random states that follow from its seed, so that its numbers do not depend
    on `n_jobs`; what it changes in its arguments, or draws from generators that they hold, the next run does not see.
    All cells of one seed run before those of the next seed, in a random order: a slow hour slows all cells alike.

    With several jobs the cells slow each other down: `Results.note` says that their times cannot be compared.

    Ctrl-C ends it: the results then hold what is finished, `.stopped` is True, and the same call goes on from there. A
    killed process loses the cells that were running, and its workers end with it. Several processes may work on one
    folder, each with seeds of its own: what one has finished when another begins is not run again.

    >>> results = experiment(lambda seed, x: {"y": x + seed}, {"x": [1, 3]}, seeds=2, progress=False)
    >>> results.frame[["x", "seed", "y"]].to_dict("list")
    {'x': [1, 1, 3, 3], 'seed': [0, 1, 0, 1], 'y': [1.0, 2.0, 3.0, 4.0]}
    """
    if not callable(progress):
        check_flags(progress=progress)
    check_flags(retry=retry)
    check_kind("version", version, str, "your own word for the code", optional=True)
    check_number("n_jobs", 1 if n_jobs is None else n_jobs, low=-(2**20), high=2**20)
    jobs = 1 if default_device().type == "cuda" else joblib.effective_n_jobs(n_jobs)
    place = temporary() if folder is None else folder_at(folder)
    cells, chosen, hasher = cells_of(grid), seeds_of(seeds), Hasher()
    check_call(run, cells)
    told = [{"cell": c.described, "label": c.label, "baseline": b} for c, b in zip(cells, baselines(cells, baseline))]
    code = hasher.hash(run) if version is None else version
    made_by = versions(hasher.libraries)
    tasks = {}
    for seed in chosen:  # the cells of one seed in an order of their own
        for cell in random.Random(str(seed)).sample(cells, len(cells)):
            row = Row(place, cell.described, seed, jobs == 1, made_by, code)
            tasks[row.path] = row, cell.arguments
    place.mkdir(parents=True, exist_ok=True)
    index = {"seeds": chosen, "cells": told, "code": code_key(code, made_by)}
    write_whole(place / INDEX, lambda file: file.write(index_text(index).encode()), sync=False)
    _say_what_changed(place, [row for row, _ in tasks.values()])
    rows = {row.path: row for row in read_rows(tasks) if not (retry and row.error)}
    pending = {path: task for path, task in tasks.items() if path not in rows}
    for path in pending:
        path.unlink(missing_ok=True)
    stopped = _stopped(run, pending, rows, jobs, progress)
    return Results(index, rows.values(), folder=place, stopped=stopped)


def _stopped(run: Run, pending: dict[Path, Task], rows: dict[Path, Row], jobs: int, progress: Progress) -> bool:
    """Run what is pending, and add it to the rows. Whether it was stopped before its end."""
    total = len(rows) + len(pending)
    with tqdm(total=total, initial=len(rows), unit="run", disable=progress is not True) as bar:
        try:
            for row in ended(run, pending, jobs):
                rows[row.path] = row
                bar.set_postfix(failed=sum(bool(row.error) for row in rows.values()))
                bar.update()
                if callable(progress) and progress(len(rows), total, row) is False:
                    return True
        except KeyboardInterrupt:  # what is finished is kept
            return True
    return False


def _say_what_changed(place: Path, rows: Sequence[Row]) -> None:
    """Warn of cells of this grid that the folder holds, made by other code or other libraries."""
    held = {path.stem.partition("-")[0]: path for path in place.glob("*.npz")}
    old = [row for row in rows if row.path.stem.partition("-")[0] in held and not row.path.exists()]
    if not old:
        return
    now, changed = old[0], list[str]()
    for before in read_rows([held[now.path.stem.partition("-")[0]]]):
        changed += ["the code of run"] * (before.code != now.code)
        changed += [
            f"{n} {before.versions.get(n)} -> {v}" for n, v in now.versions.items() if before.versions.get(n) != v
        ]
    said = f"{len(old)} finished cells in {place} were made by other code ({', '.join(changed)})"
    warnings.warn(f"{said}; they are kept, not used here, and run again", RuntimeWarning, stacklevel=3)
