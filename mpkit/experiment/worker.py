"""One cell in one process: run on one thread, as if it were alone, and stored."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from mpkit.experiment.store import Row, sorted_out, store
from mpkit.model.randomness import generator_states, random_state, set_generator_states, set_random_state

WATCH_EVERY = 0.25  # seconds


@dataclass(frozen=True)
class Task:
    """What is to be run: `row` describes it, the rest is what a process needs to do it."""

    run: Callable[..., Any]
    arguments: dict[str, Any]
    row: Row
    folder: Path


def work(task: Task) -> str:
    """Run a cell and store it, at once: whoever asked for it may be killed before it hears of this. The file's name."""
    row, arrays = task.row, dict[str, np.ndarray]()
    with _as_if_alone(task.run, row.seed):
        start = time.perf_counter()
        try:
            run, arguments = _copied(task)
            numbers, arrays = sorted_out(run(seed=row.seed, **arguments))
            row = replace(row, numbers=numbers)
        except (Exception, SystemExit):  # a script that gives up with sys.exit ends itself alone
            row = replace(row, error=traceback.format_exc())
    store(task.folder, replace(row, seconds=time.perf_counter() - start), arrays)
    return row.stem


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    # how what holds for a whole process, and so for the runs that come after, is read and set
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, torch.set_default_device),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
)


@contextlib.contextmanager
def _as_if_alone(run: Callable[..., Any], seed: int) -> Iterator[None]:
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


def _copied(task: Task) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The run and its arguments, which it may change without the next run seeing it; data that they are given are
    shared. Themselves where they cannot be copied."""
    given = [task.arguments, getattr(task.run, "args", ()), getattr(task.run, "keywords", {})]  # of a partial
    data = {id(v): v for v in tree_leaves(given) if isinstance(v, torch.Tensor | np.ndarray | Dataset)}
    try:
        return copy.deepcopy((task.run, task.arguments), data)
    except Exception:
        return task.run, task.arguments


def watch_parent(parent: int) -> None:
    """End this process when `parent` is gone, however it went: a killed experiment leaves no workers behind."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_EVERY)
        os._exit(1)  # nothing to clean up: a cell's file is whole or not there

    threading.Thread(target=watch, name="mpkit-watch-parent", daemon=True).start()
