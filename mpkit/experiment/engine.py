"""`experiment`: a grid of runs, several seeds each, by joblib; what is finished lies in a folder at once."""

from __future__ import annotations

import contextlib
import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import joblib
from tqdm.auto import tqdm

from mpkit.arguments import check_flags, check_kind, is_whole
from mpkit.device import default_device
from mpkit.experiment.grid import baselines, cells_of, check_call, seeds_of
from mpkit.experiment.identity import Description, versions
from mpkit.experiment.results import Results, temporary
from mpkit.experiment.store import INDEX, Row, code_key, file_of, folder_at, index_text, read_rows, store
from mpkit.experiment.worker import Task, watch_parent, work
from mpkit.files import write_whole

Progress = bool | Callable[[int, int, Row], Any]
DEATHS = 3
"""How often a cell may take its worker with it, alone, before it counts as failed."""


def experiment(
    run: Callable[..., Any],
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
                   count as long as the code of `run` does, and all that it refers to.
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
    if n_jobs is not None and not (is_whole(n_jobs) and 0 < abs(n_jobs) < 2**20):
        error = ValueError if is_whole(n_jobs) else TypeError
        raise error(f"n_jobs must be a number of processes, or -1 for one per core, got {n_jobs!r:.60}")
    jobs = 1 if default_device().type == "cuda" else joblib.effective_n_jobs(n_jobs)
    place = temporary() if folder is None else folder_at(folder)
    tasks, index = _planned(run, grid, seeds, baseline, version, jobs == 1, place)
    place.mkdir(parents=True, exist_ok=True)
    write_whole(place / INDEX, lambda file: file.write(index_text(index).encode()), sync=False)
    _say_what_changed(place, tasks)
    rows = {row.stem: row for row in read_rows(place, tasks) if not (retry and row.error)}
    pending = {stem: task for stem, task in tasks.items() if stem not in rows}
    for stem in pending:
        file_of(place, stem).unlink(missing_ok=True)
    stopped = _stopped(place, pending, rows, jobs, progress)
    return Results(index, list(rows.values()), folder=place, stopped=stopped)


def _stopped(place: Path, pending: dict[str, Task], rows: dict[str, Row], jobs: int, progress: Progress) -> bool:
    """Run what is pending, and add it to the rows. Whether it was stopped before its end."""
    total = len(rows) + len(pending)
    with tqdm(total=total, initial=len(rows), unit="run", disable=progress is not True) as bar:
        try:
            for row in _ended(place, pending, jobs):
                rows[row.stem] = row
                bar.set_postfix(failed=sum(bool(row.error) for row in rows.values()))
                bar.update()
                if callable(progress) and progress(len(rows), total, row) is False:
                    return True
        except KeyboardInterrupt:  # what is finished is kept
            return True
    return False


def _planned(
    run: Callable[..., Any], grid: Any, seeds: object, baseline: object, version: str | None, alone: bool, place: Path
) -> tuple[dict[str, Task], dict[str, Any]]:
    """The tasks in the order in which they run, by the name of their file, and the index of the folder."""
    describe = Description()
    cells = cells_of(grid, describe)
    check_call(run, cells)
    chosen, against = seeds_of(seeds), baselines(cells, baseline, describe)
    code, made_by = describe.hash(run) if version is None else version, versions(describe.libraries)
    tasks: dict[str, Task] = {}
    for seed in chosen:  # the cells of one seed in an order of their own
        for cell in random.Random(str(seed)).sample(cells, len(cells)):
            row = Row(cell.described, seed, alone, made_by, code)
            tasks[row.stem] = Task(run, cell.arguments, row, place)
    told = [{"cell": c.described, "label": c.label, "baseline": b} for c, b in zip(cells, against)]
    return tasks, {"seeds": chosen, "cells": told, "code": code_key(code, made_by)}


def _answers(tasks: list[Task], jobs: int) -> Iterator[str]:
    """The tasks' stems, in the order in which they end."""
    if jobs == 1:
        yield from map(work, tasks)
        return
    watched: dict[str, Any] = {"initializer": watch_parent, "initargs": (os.getpid(),)}
    parallel = joblib.Parallel(jobs, "loky", return_as="generator_unordered", batch_size=1, **watched)
    with contextlib.closing(parallel(joblib.delayed(work)(task) for task in tasks)) as answers:
        yield from answers


def _ended(place: Path, pending: dict[str, Task], jobs: int) -> Iterator[Row]:
    """The rows of the tasks, as they end; survives the death of workers.

    When a worker dies, one of those that were running did it. The next ones then run alone, to find it.
    """
    deaths, alone = Counter[str](), 0
    while pending:
        first = next(iter(pending))
        try:
            for stem in _answers([pending[first]] if alone else list(pending.values()), jobs):
                del pending[stem]
                yield from read_rows(place, [stem])
            alone = max(alone - 1, 0)
        except BrokenExecutor:
            deaths[first] += bool(alone)
            alone = alone or 2 * jobs
            if deaths[first] == DEATHS:
                why = f"its process was killed {DEATHS} times, by the system for want of memory or by the run itself\n"
                store(place, replace(pending[first].row, error=why), {})
            there = [stem for stem in pending if file_of(place, stem).exists()]
            for stem in there:
                del pending[stem]
            yield from read_rows(place, there)


def _say_what_changed(place: Path, tasks: Mapping[str, Task]) -> None:
    """Warn of cells of this grid that the folder holds, made by other code or other libraries."""
    made = {path.stem.rpartition("-")[0]: path.stem for path in place.glob("*.npz") if path.stem not in tasks}
    old = [stem for stem in tasks if stem.rpartition("-")[0] in made and not file_of(place, stem).exists()]
    if not old:
        return
    now, changed = tasks[old[0]].row, list[str]()
    for row in read_rows(place, [made[old[0].rpartition("-")[0]]]):
        changed += ["the code of run has changed"] * (row.code != now.code)
        changed += [f"{n} {row.versions.get(n)} -> {v}" for n, v in now.versions.items() if row.versions.get(n) != v]
    said = f"{len(old)} finished cells in {place} were made by other code: {', '.join(changed)}"
    warnings.warn(f"{said}; they are kept, not used here, and run again", RuntimeWarning, stacklevel=3)
