"""`experiment`: a grid of runs, several seeds each, by joblib; what is finished lies in a folder at once."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import replace
from typing import Any

import joblib
import torch

from mpkit.arguments import check_flags, check_kind, is_whole
from mpkit.device import default_device
from mpkit.experiment.grid import baselines, cells_of, check_call
from mpkit.experiment.identity import Description, run_name, versions
from mpkit.experiment.results import Results, Temporary
from mpkit.experiment.store import MOST, Folder, Row, cell_key, code_key, packed
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
        folder:    where the finished cells go; None: a temporary folder that ends with the results.
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
    plan = _Plan(run, grid, seeds, baseline, n_jobs, version)
    if folder is not None:
        return _done(plan, Folder(folder), progress, retry)
    temporary = tempfile.mkdtemp(prefix="mpkit-experiment-")
    try:
        results = _done(plan, Folder(temporary), progress, retry)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    results.held = Temporary(temporary)
    return results


def _done(plan: _Plan, place: Folder, progress: Progress, retry: bool) -> Results:
    place.create()
    place.write_index(plan.index)
    _say_what_changed(place, plan)
    stopped = _complete(place, plan, progress, retry)
    rows = [row for task in plan.tasks if (row := place.read(task.stem)) is not None]
    return Results(plan.index, rows, folder=place.path, stopped=stopped)


class _Plan:
    """What is to be run, checked: the tasks in the order in which they run, and the index of the folder."""

    def __init__(
        self, run: Any, grid: object, seeds: object, baseline: object, n_jobs: int | None, version: str | None
    ) -> None:
        describe = Description()
        cells = cells_of(grid, describe)
        check_call(run, cells)
        self.seeds = _seeds(seeds)
        against = baselines(cells, baseline, describe)
        self.code = describe.hash(run) if version is None else version
        self.versions = versions(describe.libraries)
        self.n_jobs, (self.jobs, threads, self.local) = n_jobs, _parallel(n_jobs)
        self.tasks = []
        for seed in self.seeds:  # the cells of one seed in an order of their own
            for cell in random.Random(str(seed)).sample(cells, len(cells)):
                row = Row(cell.described, seed, self.jobs == 1, self.versions, self.code)
                self.tasks.append(Task(run, cell.arguments, row, "", threads))
        self.index = {
            "run": run_name(run),
            "seeds": self.seeds,
            "cells": [{"cell": c.described, "label": c.label, "baseline": b} for c, b in zip(cells, against)],
            "jobs": self.jobs,
            "code": code_key(self.code, self.versions),
        }


def _seeds(seeds: object) -> list[int]:
    if is_whole(seeds):
        if seeds > MOST:
            raise ValueError(f"an experiment has at most {MOST} runs, got more seeds than that")
        found = list(range(seeds))
    elif isinstance(seeds, Iterable) and not isinstance(seeds, str):
        found = list(seeds)
    else:
        raise TypeError(f"seeds must be how many, or a list of them, got {seeds!r}")
    if not all(map(is_whole, found)):
        raise TypeError(f"seeds are whole numbers, got {found}")
    if not found or len(set(found)) < len(found) or min(found) < 0 or max(found) >= 2**64:
        raise ValueError(
            f"seeds must be at least 1, or a list of different whole numbers from 0 and below 2**64, got {seeds!r}"
        )
    return [int(seed) for seed in found]


def _parallel(n_jobs: int | None) -> tuple[int, int, bool]:
    """Processes, threads of each, and whether they are children of this one."""
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
    return jobs, backend.inner_max_num_threads or 1, local


def _say_what_changed(place: Folder, plan: _Plan) -> None:
    """Warn of cells of this grid that the folder holds, made by other code or other libraries."""
    made: dict[str, list[str]] = {}
    for stem in place.names():
        cell, _, code = stem.rpartition("-")
        made.setdefault(cell, []).append(code)
    keys = [cell_key(task.row.cell, task.row.seed) for task in plan.tasks]
    old = [key for key in keys if key in made and plan.index["code"] not in made[key]]
    if not old:
        return
    row = place.read(f"{old[0]}-{made[old[0]][0]}")
    changed = ["the code of run has changed"] if row is not None and row.code != plan.code else []
    before = {} if row is None else row.versions
    changed += [f"{n} {before.get(n, 'absent')} -> {v}" for n, v in plan.versions.items() if before.get(n) != v]
    warnings.warn(
        f"{len(old)} finished cells in {place.path} were made by other code: {', '.join(changed)}; they are kept, not "
        "used here, and run again",
        RuntimeWarning,
        stacklevel=4,
    )


def _complete(place: Folder, plan: _Plan, progress: Progress, retry: bool) -> bool:
    """Run every task that is not finished; -> whether it was stopped before that."""
    there, pending = place.names(), dict[str, Task]()
    gpus = torch.cuda.device_count() if plan.jobs > 1 and plan.local and torch.cuda.is_available() else 0
    for number, task in enumerate(plan.tasks):
        row = place.read(task.stem) if task.stem in there else None
        if row is None or (retry and row.error):
            place.file(task.stem).unlink(missing_ok=True)
            device = f"cuda:{number % gpus}" if gpus > 1 else ""
            pending[task.stem] = replace(task, folder=str(place.path), device=device)
    with _reported(progress, len(plan.tasks) - len(pending), len(plan.tasks)) as report:
        try:
            return _run_all(place, plan, pending, report)
        except KeyboardInterrupt:
            return True


Report = Callable[[Row | None], None]


def _run_all(place: Folder, plan: _Plan, pending: dict[str, Task], report: Report) -> bool:
    """Run tasks until all are finished; -> whether a stop was asked for. Survives the death of workers."""

    def finished(stem: str, data: bytes | None = None) -> None:
        if data is not None and not place.file(stem).exists():  # of a machine that does not see the folder
            place.write(stem, data)
        del pending[stem]
        report(place.read(stem))

    while pending:
        try:
            for stem, data in _answers(plan, list(pending.values())):
                if data is None:
                    return True
                finished(stem, data)
        except BrokenExecutor:
            for stem in [stem for stem in pending if place.file(stem).exists()]:
                finished(stem)
            # one of those that were running did it; alone, the guilty one is found
            for task in list(pending.values())[: 2 * plan.jobs]:
                finished(*_alone(plan, task))
    return False


def _alone(plan: _Plan, task: Task) -> tuple[str, bytes]:
    for _ in range(DEATHS):
        with contextlib.suppress(BrokenExecutor):
            for stem, data in _answers(plan, [task]):
                if data is None:
                    raise KeyboardInterrupt
                return stem, data
    error = f"its process was killed {DEATHS} times, by the system for want of memory or by the run itself\n"
    return task.stem, packed(replace(task.row, error=error), {})


def _answers(plan: _Plan, tasks: Sequence[Task]) -> Iterator[tuple[str, bytes | None]]:
    """What becomes of the tasks, in the order in which they end."""
    if plan.jobs == 1:
        yield from map(work, tasks)
        return
    options: dict[str, Any] = {"initializer": watch_parent, "initargs": (os.getpid(),)} if plan.local else {}
    backend = joblib.parallel.get_active_backend()[0]  # ray's can only tell of all cells at the end
    one_by_one = "generator_unordered" if backend.supports_return_generator else "list"
    parallel = joblib.Parallel(n_jobs=plan.n_jobs and plan.jobs, return_as=one_by_one, batch_size=1, **options)
    answers = parallel(joblib.delayed(work)(task) for task in tasks)
    with contextlib.closing(answers) if hasattr(answers, "close") else contextlib.nullcontext():
        yield from answers


@contextlib.contextmanager
def _reported(progress: Progress, done: int, total: int) -> Iterator[Report]:
    """What is called with each finished row."""
    bar: Any = None
    if progress is True:
        with contextlib.suppress(ImportError):
            from tqdm.auto import tqdm

            bar = tqdm(total=total, initial=done, unit="run")
    failed = 0

    def report(row: Row | None) -> None:
        nonlocal done, failed
        done, failed = done + 1, failed + bool(row and row.error)
        if callable(progress) and row is not None and progress(done, total, row) is False:
            raise KeyboardInterrupt  # what is finished is kept, as with Ctrl-C
        if bar is not None:
            if failed:
                bar.set_postfix(failed=failed)
            bar.update()

    with contextlib.nullcontext() if bar is None else bar:
        yield report
