"""`experiment`: a grid of runs, several seeds each, by joblib; what is finished lies in a folder at once."""

from __future__ import annotations

import contextlib
import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass, replace
from typing import Any

import joblib
import torch

from mpkit.arguments import check_flags, check_kind, is_whole
from mpkit.device import default_device
from mpkit.experiment.grid import baselines, cells_of, check_call, seeds_of
from mpkit.experiment.identity import Description, versions
from mpkit.experiment.results import Results, temporary
from mpkit.experiment.store import Folder, Row, code_key
from mpkit.experiment.worker import Task, watch_parent, work

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
        run:       returns a dict of numbers and series of numbers (and at most one `Trace`), or a `Trace`. `train` is a
                   ready-made one; `functools.partial(train, network=..., data=...)` fixes what all cells share.
        grid:      a dict of lists (every combination), a list of dicts (these cells) or a dict of dicts (cells with
                   names). Values are numbers, strings, functions, classes, dtypes, policies, arrays: whatever has a
                   content that can be compared.
        seeds:     how many (0, 1, ...), or which.
        folder:    where the finished cells go; None: a temporary folder that ends with this process.
        baseline:  what every cell is compared with: None for the first cell, a cell's number or name, or arguments.
        n_jobs:    processes; None: what `joblib.parallel_config` says, else 1, in this process. -1: one per core.
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

    Each cell runs on one torch thread (more by `joblib.parallel_config(inner_max_num_threads=...)`), with random states
    that follow from its seed, so that its numbers do not depend on `n_jobs`; what it changes in its arguments, or
    draws from generators that they hold, the next run does not see. On GPUs there is one worker a device.
    All cells of one seed run before those of the next seed, in a random order: a slow hour slows all cells alike.

    With several jobs the cells slow each other down: `Results.note` says that their times cannot be compared.

    Ctrl-C, or a file named `stop` in the folder, ends it: the results then hold what is finished, `.stopped` is True,
    and the same call goes on from there. A killed process loses the cells that were running, and its workers end with
    it. Several processes may work on one folder: what one has finished when another begins is not run again.

    For several machines, write `with joblib.parallel_config("dask")` (after making a `dask.distributed.Client`) or
    `with joblib.parallel_config("ray", n_jobs=-1)` (after `ray.util.joblib.register_ray()`) around the same call.
    Machines that do not see the folder send their cells back to be stored.

    >>> results = experiment(lambda seed, x: {"y": x + seed}, {"x": [1, 3]}, seeds=2, progress=False)
    >>> results.frame[["x", "seed", "y"]].to_dict("list")
    {'x': [1, 1, 3, 3], 'seed': [0, 1, 0, 1], 'y': [1.0, 2.0, 3.0, 4.0]}
    """
    if not callable(progress):
        check_flags(progress=progress)
    check_flags(retry=retry)
    check_kind("version", version, str, "your own word for the code", optional=True)
    pool = Pool.of(n_jobs)
    tasks, index = _planned(run, grid, seeds, baseline, version, pool)
    place = Folder(temporary() if folder is None else folder)
    place.begin(index)
    there = place.names()
    _say_what_changed(place, there, tasks)
    rows = {stem: held for stem in tasks if stem in there and (held := place.read(stem)) is not None}
    rows = {stem: row for stem, row in rows.items() if not (retry and row.error)}
    pending = {stem: replace(task, folder=str(place.path)) for stem, task in tasks.items() if stem not in rows}
    for stem in pending:
        place.file(stem).unlink(missing_ok=True)
    stopped = False
    with _reported(progress, len(rows), len(tasks)) as report:
        try:
            for row in _ended(place, pool, pending):
                rows[row.stem] = row
                report(row)
        except KeyboardInterrupt:  # what is finished is kept
            stopped = True
    return Results(index, list(rows.values()), folder=place.path, stopped=stopped)


def _planned(
    run: Callable[..., Any], grid: Any, seeds: object, baseline: object, version: str | None, pool: Pool
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
            row = Row(cell.described, seed, pool.jobs == 1, made_by, code)
            tasks[row.stem] = Task(run, cell.arguments, row, "", pool.threads)
    told = [{"cell": c.described, "label": c.label, "baseline": b} for c, b in zip(cells, against)]
    return tasks, {"seeds": chosen, "cells": told, "code": code_key(code, made_by)}


@dataclass(frozen=True)
class Pool:
    """Where runs are made: processes, as joblib was asked for them, threads of each, whether they are children."""

    jobs: int
    asked: int | None
    threads: int
    local: bool

    @classmethod
    def of(cls, n_jobs: object) -> Pool:
        """Raises TypeError, ValueError for what is no number of processes."""
        if n_jobs is not None and not is_whole(n_jobs):
            raise TypeError(f"n_jobs must be an int or None, got {n_jobs!r}")
        if n_jobs is not None and not 0 < abs(n_jobs) < 2**20:
            came = f"an int of {int(n_jobs).bit_length()} bits" if n_jobs else "0"
            raise ValueError(f"n_jobs must be a number of processes, or -1 for one per core, got {came}")
        backend, configured = joblib.parallel.get_active_backend()
        jobs = joblib.effective_n_jobs(configured if n_jobs is None else n_jobs)
        local = type(backend).__name__ == "LokyBackend"
        device = default_device()
        if local and device.type == "cuda":
            jobs = min(jobs, torch.cuda.device_count() if device.index is None else 1)
        return cls(jobs, n_jobs and jobs, backend.inner_max_num_threads or 1, local)

    def answers(self, tasks: Iterable[Task]) -> Iterator[tuple[str, bytes | None]]:
        """What becomes of the tasks, in the order in which they end."""
        if self.jobs == 1:
            yield from map(work, tasks)
            return
        gpus = torch.cuda.device_count() if self.local and torch.cuda.is_available() else 0
        if gpus > 1:
            tasks = [replace(task, device=f"cuda:{number % gpus}") for number, task in enumerate(tasks)]
        options: dict[str, Any] = {"initializer": watch_parent, "initargs": (os.getpid(),)} if self.local else {}
        backend = joblib.parallel.get_active_backend()[0]  # ray's can only tell of all cells at the end
        one_by_one = "generator_unordered" if backend.supports_return_generator else "list"
        parallel = joblib.Parallel(n_jobs=self.asked, return_as=one_by_one, batch_size=1, **options)
        answers = parallel(joblib.delayed(work)(task) for task in tasks)
        with contextlib.closing(answers) if hasattr(answers, "close") else contextlib.nullcontext():
            yield from answers


def _ended(place: Folder, pool: Pool, pending: dict[str, Task]) -> Iterator[Row]:
    """The rows of the tasks, as they end; survives the death of workers. Raises KeyboardInterrupt when it is to stop.

    When a worker dies, one of those that were running did it. The next ones then run alone, to find it.
    """
    deaths, alone = Counter[str](), 0
    while pending:
        first = next(iter(pending))
        try:
            for stem, data in pool.answers([pending[first]] if alone else list(pending.values())):
                if data is None:
                    raise KeyboardInterrupt
                if not place.file(stem).exists():  # of a machine that does not see the folder
                    place.write(stem, data)
                yield from _taken(place, pending, [stem])
            alone = max(alone - 1, 0)
        except BrokenExecutor:
            yield from _taken(place, pending, [stem for stem in pending if place.file(stem).exists()])
            deaths[first] += bool(alone)
            alone = alone or 2 * pool.jobs
            if first in pending and deaths[first] == DEATHS:
                error = (
                    f"its process was killed {DEATHS} times, by the system for want of memory or by the run itself\n"
                )
                place.write(first, replace(pending[first].row, error=error).packed({}))
                yield from _taken(place, pending, [first])


def _taken(place: Folder, pending: dict[str, Task], stems: Iterable[str]) -> Iterator[Row]:
    for stem in stems:
        del pending[stem]
        if (row := place.read(stem)) is not None:
            yield row


def _say_what_changed(place: Folder, there: set[str], tasks: Mapping[str, Task]) -> None:
    """Warn of cells of this grid that the folder holds, made by other code or other libraries."""
    made = {stem.rpartition("-")[0]: stem for stem in there - set(tasks)}
    old = [stem for stem in tasks if stem not in there and stem.rpartition("-")[0] in made]
    if not old:
        return
    now, row = tasks[old[0]].row, place.read(made[old[0].rpartition("-")[0]])
    before = {} if row is None else row.versions
    changed = ["the code of run has changed"] if row is not None and row.code != now.code else []
    changed += [f"{n} {before.get(n, 'absent')} -> {v}" for n, v in now.versions.items() if before.get(n) != v]
    warnings.warn(
        f"{len(old)} finished cells in {place.path} were made by other code: {', '.join(changed)}; they are kept, not "
        "used here, and run again",
        RuntimeWarning,
        stacklevel=3,
    )


@contextlib.contextmanager
def _reported(progress: Progress, done: int, total: int) -> Iterator[Callable[[Row], None]]:
    """What is called with each finished row."""
    bar: Any = None
    if progress is True:
        with contextlib.suppress(ImportError):
            from tqdm.auto import tqdm

            bar = tqdm(total=total, initial=done, unit="run")
    count = Counter(done=done)

    def report(row: Row) -> None:
        count.update(done=1, failed=bool(row.error))
        if callable(progress) and progress(count["done"], total, row) is False:
            raise KeyboardInterrupt
        if bar is not None:
            if count["failed"]:
                bar.set_postfix(failed=count["failed"])
            bar.update()

    with bar if bar is not None else contextlib.nullcontext():
        yield report
