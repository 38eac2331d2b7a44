"""`experiment`: a grid of runs, several seeds each, by joblib; what is finished lies in a folder at once."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from mpkit.arguments import check_flags, is_whole
from mpkit.device import default_device
from mpkit.experiment.grid import Cell, baselines, cells_of, check_call, times_itself
from mpkit.experiment.identity import Description, run_name, versions, without_torch
from mpkit.experiment.results import Results, Temporary
from mpkit.experiment.store import MOST, Folder, Row, canonical, cell_key, code_key, digest, files_of
from mpkit.experiment.worker import DONE, STOPPED, Answer, Task, watch_parent, work

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
    Returns:  `Results`: `.frame`, `.summary(metric)`, `.plot()`.
    Raises:   TypeError, ValueError for arguments, before anything runs. A cell that raises is kept with its traceback
              and stops nothing.
    Warns:    RuntimeWarning where the folder holds the same cells made by other code or other versions (they are kept,
              not used, and run again), or a file that was changed or cut.

    Each cell runs on one torch thread (more by `joblib.parallel_config(inner_max_num_threads=...)`), with random states
    that follow from its seed, so that its numbers do not depend on `n_jobs`; what it changes in its arguments, or
    draws from generators that they hold, the next run does not see. On GPUs there is one worker a device.
    All cells of one seed run before those of the next seed, in a random order: a slow hour slows all cells alike.

    With several jobs the cells slow each other down. If `run` has an argument `only_time`, as `train` has, its times
    are measured apart, one run at a time after the others; if not, `Results.note` says that they cannot be compared.

    Ctrl-C, or a file named `stop` in the folder, ends it: the results then hold what is finished, `.stopped` is True,
    and the same call goes on from there. A killed process loses the cells that were running, and its workers end with
    it. Two processes may work on one folder; each takes cells that the other has not begun.

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
    plan = _Plan(run, grid, seeds, baseline, n_jobs)
    if folder is not None:
        return _done(plan, Folder(folder), progress, retry)
    temporary = tempfile.mkdtemp(prefix="mpkit-experiment-")
    try:
        results = _done(plan, Folder(temporary), progress, retry)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    results._held = Temporary(temporary)
    return results


def _done(plan: _Plan, place: Folder, progress: Progress, retry: bool) -> Results:
    place.create()
    place.sweep()
    place.write_index(plan.index)
    _say_what_changed(place, plan)
    stopped = _complete(place, plan, progress, retry)
    rows = [row for task in plan.tasks if (row := place.read(task.stem)) is not None]
    return Results(plan.index, rows, folder=place.path, stopped=stopped)


class _Plan:
    """What is to be run, checked: the tasks in the order in which they run, and the index of the folder."""

    def __init__(self, run: Any, grid: Any, seeds: Any, baseline: Any, n_jobs: int | None) -> None:
        describe = Description()
        self.cells = cells_of(grid, describe)
        check_call(run, self.cells)
        self.seeds = _seeds(seeds)
        described = [cell.described for cell in self.cells]
        if isinstance(baseline, str):
            baseline = _numbered(baseline, [cell.label for cell in self.cells])
        against = baselines(described, baseline, describe)
        self.run, self.code = run, digest(canonical(describe(run)))
        self.versions = versions(describe.libraries)
        self.without_torch = without_torch(describe.libraries)
        self.jobs, self.threads, self.local = _parallel(n_jobs)
        self.n_jobs = n_jobs
        self.apart = self.jobs > 1 and times_itself(run)
        rows = [self._rows(seed, timed) for timed in (False, True)[: 1 + self.apart] for seed in self.seeds]
        self.tasks = [task for group in rows for task in group]
        self.index = {
            "run": run_name(run),
            "seeds": self.seeds,
            "cells": [{"cell": c.described, "label": c.label, "baseline": b} for c, b in zip(self.cells, against)],
            "jobs": self.jobs,
            "apart": self.apart,
            "code": code_key(self.code, self.versions),
        }

    def _rows(self, seed: int, timed: bool) -> list[Task]:
        """The cells of one seed in an order of their own."""
        cells = random.Random(f"{seed} {timed}").sample(self.cells, len(self.cells))
        return [self._task(cell, seed, timed) for cell in cells]

    def _task(self, cell: Cell, seed: int, timed: bool) -> Task:
        alone = timed or self.jobs == 1
        row = Row(cell.described, seed, timed, {}, alone, 0.0, self.versions, self.code)
        return Task(self.run, cell.arguments, row, row.stem, "", "", self.threads, self.without_torch)


def _numbered(name: str, labels: list[str]) -> int:
    if name not in labels:
        raise ValueError(f"the baseline must be one of the cells {'; '.join(labels)}, got {name!r}")
    return labels.index(name)


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
    if not found or len(set(found)) < len(found) or min(found) < 0:
        raise ValueError(f"seeds must be at least 1, or a list of different whole numbers from 0, got {seeds!r}")
    if max(found) >= 2**64:
        raise ValueError(f"seeds must be below 2**64, as torch.manual_seed takes them, got {max(found)}")
    return [int(seed) for seed in found]


def _joblib() -> Any:
    try:
        import joblib
    except ImportError:
        raise ImportError("n_jobs above 1 needs joblib, which is not installed: pip install 'mpkit[lab]'") from None
    return joblib


def _parallel(n_jobs: int | None) -> tuple[int, int, bool]:
    """Processes, threads of each, and whether they are children of this one."""
    if n_jobs is not None and not is_whole(n_jobs):
        raise TypeError(f"n_jobs must be an int or None, got {n_jobs!r}")
    if n_jobs is not None and not 0 < abs(n_jobs) < 2**20:
        came = f"an int of {int(n_jobs).bit_length()} bits" if n_jobs else "0"
        raise ValueError(f"n_jobs must be a number of processes, or -1 for one per core, got {came}")
    if n_jobs in (None, 1) and find_spec("joblib") is None:
        return 1, 1, True
    joblib = _joblib()
    backend, configured = joblib.parallel.get_active_backend()
    jobs = joblib.effective_n_jobs(configured if n_jobs is None else n_jobs)
    local = type(backend).__name__ == "LokyBackend"
    device = default_device()
    if local and device.type == "cuda":
        jobs = min(jobs, torch.cuda.device_count() if device.index is None else 1)
    return jobs, backend.inner_max_num_threads or 1, local


def _say_what_changed(place: Folder, plan: _Plan) -> None:
    """Cells of this grid that the folder holds, made by other code or other libraries."""
    made: dict[str, list[str]] = {}
    for stem in place.names():
        cell, _, code = stem.rpartition("-")
        made.setdefault(cell, []).append(code)
    ours = code_key(plan.code, plan.versions)
    old = [(t, made[k]) for t in plan.tasks if (k := cell_key(t.row.cell, t.row.seed, t.row.timed)) in made]
    old = [(task, codes) for task, codes in old if ours not in codes]
    if not old:
        return
    task, codes = old[0]
    row = place.read(f"{cell_key(task.row.cell, task.row.seed, task.row.timed)}-{codes[0]}")
    why = "another version of its code or libraries"
    if row is not None:
        changed = [
            f"{n} {row.versions.get(n, 'absent')} -> {v}" for n, v in plan.versions.items() if row.versions.get(n) != v
        ]
        why = ", ".join((["the code of run has changed"] if row.code != plan.code else []) + changed) or why
    warnings.warn(
        f"{len(old)} finished cells in {place.path} were made by other code: {why}; they are kept, not used here, and "
        "run again",
        RuntimeWarning,
        stacklevel=4,
    )


def _complete(place: Folder, plan: _Plan, progress: Progress, retry: bool) -> bool:
    """Run every task that is not finished; -> whether it was stopped before that."""
    finished: dict[str, Row] = {}
    for stem in place.names() & {task.stem for task in plan.tasks}:
        row = place.read(stem)
        if row is None or not row.whole or (retry and row.error):
            if row is not None and not row.whole:
                warnings.warn(
                    f"the series of {stem} in {place.path} were changed; run again", RuntimeWarning, stacklevel=4
                )
            place.remove(stem)
        else:
            finished[stem] = row
    tasks = [replace(t, folder=str(place.path.resolve()), token=place.token) for t in plan.tasks]
    pending = {t.stem: t for t in tasks if t.stem not in finished}
    with _reported(progress, len(finished), len(tasks)) as report:
        try:
            beside = {stem: task for stem, task in pending.items() if not task.row.timed}
            stopped = _run_all(place, plan, beside, plan.jobs, report)
            apart = {stem: task for stem, task in pending.items() if task.row.timed}
            return stopped or _run_all(place, plan, apart, 1, report)
        except KeyboardInterrupt:
            return True


Report = Callable[[Row | None], None]


def _run_all(place: Folder, plan: _Plan, pending: dict[str, Task], jobs: int, report: Report) -> bool:
    """Run tasks until all are finished; -> whether a stop was asked for. Survives the death of workers."""
    deaths: Counter[str] = Counter()
    while pending:
        before = len(pending)
        try:
            for answer in _answers(plan, list(pending.values()), jobs):
                if answer.state == STOPPED:
                    return True
                _take(place, answer, pending, report)
        except BrokenExecutor:
            for stem in place.begun(list(pending)):  # one of them did it; alone, the guilty one is found
                try:
                    for answer in _answers(plan, [pending[stem]], jobs):
                        _take(place, answer, pending, report)
                except BrokenExecutor:
                    deaths[stem] += 1
                    if deaths[stem] >= DEATHS:
                        _take(place, _dead(pending[stem]), pending, report)
        if len(pending) == before:
            time.sleep(0.2)  # another process runs what is left
    return False


def _take(place: Folder, answer: Answer, pending: dict[str, Task], report: Report) -> None:
    if answer.files is not None:
        place.write(answer.stem, answer.files)
    if answer.state == DONE and pending.pop(answer.stem, None) is not None:
        report(place.read(answer.stem))


def _dead(task: Task) -> Answer:
    error = f"its process was killed {DEATHS} times, by the system for want of memory or by the run itself\n"
    return Answer(task.stem, DONE, files_of(replace(task.row, error=error), None))


def _answers(plan: _Plan, tasks: Sequence[Task], jobs: int) -> Iterator[Answer]:
    """What becomes of the tasks, in the order in which they end."""
    if jobs == 1:
        yield from map(work, tasks)
        return
    options: dict[str, Any] = {}
    if plan.local:
        options = {"initializer": watch_parent, "initargs": (os.getpid(),)}
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        tasks = [replace(task, devices=devices) for task in tasks]
    joblib = _joblib()
    backend = joblib.parallel.get_active_backend()[0]  # ray's can only tell of all cells at the end
    one_by_one = "generator_unordered" if backend.supports_return_generator else "list"
    parallel = joblib.Parallel(n_jobs=plan.n_jobs and jobs, return_as=one_by_one, batch_size=1, **options)
    answers = parallel(joblib.delayed(work)(task) for task in tasks)
    with contextlib.closing(answers) if hasattr(answers, "close") else contextlib.nullcontext():
        yield from answers


@contextlib.contextmanager
def _reported(progress: Progress, done: int, total: int) -> Iterator[Report]:
    """What is called with each finished row."""
    count = done

    if callable(progress):

        def tell(row: Row | None) -> None:
            nonlocal count
            count += 1
            if row is not None and progress(count, total, row) is False:
                raise KeyboardInterrupt  # what is finished is kept, as with Ctrl-C

        yield tell
        return
    if not progress:
        yield lambda row: None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        yield lambda row: None
        return
    with tqdm(total=total, initial=done, unit="run") as bar:
        failed = 0

        def advance(row: Row | None) -> None:
            nonlocal failed
            failed += bool(row and row.error)
            if failed:
                bar.set_postfix(failed=failed)
            bar.update()

        yield advance
