"""Runs of cells, in this process or in several: each on one thread, as if it were alone, and stored at its end."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import joblib
import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from mpkit.experiment.store import Row, sorted_out
from mpkit.model.randomness import generator_states, random_state, set_generator_states, set_random_state

Run = Callable[..., Any]
Task = tuple[Row, dict[str, Any]]  # and the arguments as they are passed
DEATHS = 3  # how often a cell may take its worker with it, alone, before it counts as failed


def ended(run: Run, pending: dict[Path, Task], jobs: int) -> Iterator[Row]:
    """The finished rows of what is pending, by file: row and arguments; as they end; survives the death of workers.

    When a worker dies, one of those that were running did it. The next ones then run alone, to find it.
    """
    if jobs == 1:
        yield from (work(run, *task) for task in pending.values())
        return
    deaths, alone = Counter[Path](), 0
    while pending:
        first = next(iter(pending))
        tasks = [pending[first]] if alone else list(pending.values())
        watched: dict[str, Any] = {"initializer": watch_parent, "initargs": (os.getpid(),)}
        parallel = joblib.Parallel(jobs, "loky", return_as="generator_unordered", batch_size=1, **watched)
        try:
            with contextlib.closing(parallel(joblib.delayed(work)(run, *task) for task in tasks)) as rows:
                for row in rows:
                    del pending[row.path]
                    yield row
            alone = max(alone - 1, 0)
        except BrokenExecutor:
            deaths[first] += bool(alone)
            alone = alone or 2 * jobs
            if deaths[first] == DEATHS:
                why = f"its process was killed {DEATHS} times, by the system for want of memory or by the run itself\n"
                replace(tasks[0][0], error=why).write({})


def work(run: Run, row: Row, arguments: dict[str, Any]) -> Row:
    """Run a cell and store it, at once: whoever asked for it may be killed before it hears of this.

    One that is there is read: its worker was killed before it was heard of, or another process made it.
    """
    with contextlib.suppress(FileNotFoundError):
        return Row.read(row.path)
    series = dict[str, np.ndarray]()
    with _as_if_alone(run, row.seed):
        start = time.perf_counter()
        try:
            own_run, own = _copied(run, arguments)
            numbers, series = sorted_out(own_run(seed=row.seed, **own))
            row = replace(row, numbers=numbers)
        except (Exception, SystemExit):  # a script that gives up with sys.exit ends itself alone
            row = replace(row, error=traceback.format_exc())
    return replace(row, seconds=time.perf_counter() - start).write(series)


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    # how what holds for a whole process, and so for the runs that come after, is read and set
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    # without one torch answers "cpu", and "cpu" set in words would fetch tensors from their devices
    (torch.get_default_device, lambda device: torch.set_default_device(None if device.type == "cpu" else device)),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
)


@contextlib.contextmanager
def _as_if_alone(run: Run, seed: int) -> Iterator[None]:
    """One thread, and random states that follow from the seed alone; afterwards those of before, and torch's defaults
    too. The generators that the run names begin each run as they were given."""
    drawn, settings = random_state(), [take() for take, _ in _SETTINGS]
    named = inspect.getclosurevars(run) if isinstance(run, FunctionType) else None
    held = generator_states({**named.nonlocals, **named.globals}.values() if named else ())
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  # a run may use it
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        with np.errstate():
            yield
    finally:
        for (take, put), before in zip(_SETTINGS, settings):
            if take() != before:
                put(before)
        set_random_state(drawn)
        set_generator_states(held)


def _copied(run: Run, arguments: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    """The run and its arguments, which it may change without the next run seeing it; data that they are given are
    shared. Themselves where they cannot be copied."""
    given = [arguments, getattr(run, "args", ()), getattr(run, "keywords", {})]  # of a partial
    data = {id(v): v for v in tree_leaves(given) if isinstance(v, torch.Tensor | np.ndarray | Dataset)}
    try:
        return copy.deepcopy((run, arguments), data)
    except Exception:
        return run, arguments


def watch_parent(parent: int) -> None:
    """End this process when `parent` is gone, however it went: a killed experiment leaves no workers behind."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.25)
        os._exit(1)  # nothing to clean up: a cell's file is whole or not there

    threading.Thread(target=watch, name="mpkit-watch-parent", daemon=True).start()
