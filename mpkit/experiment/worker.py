"""One cell in one process: run on one thread, as if it were alone, and stored."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import pickle
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from mpkit.experiment.store import Folder, Outcome, Row, packed
from mpkit.model.randomness import generator_states, set_generator_states

WATCH_EVERY = 0.25  # seconds


@dataclass(frozen=True)
class Task:
    """What is to be run: `row` describes it, the rest is what a process needs to do it."""

    run: Callable[..., Any]
    arguments: dict[str, Any]
    row: Row
    folder: str
    threads: int
    device: str = ""

    @property
    def stem(self) -> str:
        return self.row.stem


def work(task: Task) -> tuple[str, bytes | None]:
    """Run a cell, and store it where this process sees the folder; (name, file), None where a stop was asked for."""
    folder = Folder(task.folder)
    if folder.stopping:
        return task.stem, None
    data = _ran(task)
    if folder.path.is_dir():  # at once: the process that asked for it may be killed before it hears of this
        folder.write(task.stem, data)
    return task.stem, data


def _ran(task: Task) -> bytes:
    row, arrays = task.row, dict[str, np.ndarray]()
    with _as_if_alone(task):
        start = time.perf_counter()
        try:
            run, arguments = _copied(task)
            outcome = Outcome(run(seed=task.row.seed, **arguments))
            row, arrays = replace(row, numbers=outcome.numbers), outcome.arrays
        except (Exception, SystemExit):  # a script that gives up with sys.exit ends itself alone
            row = replace(row, error=traceback.format_exc())
    return packed(replace(row, seconds=time.perf_counter() - start), arrays)


@contextlib.contextmanager
def _as_if_alone(task: Task) -> Iterator[None]:
    """Threads as told and random states that follow from the seed alone; afterwards those of before, and torch's
    defaults too. The generators that the run and its arguments hold begin each run as they were given."""
    seed = task.row.seed
    with contextlib.ExitStack() as after:
        if task.device:
            after.callback(os.environ.__setitem__, "MPKIT_DEVICE", os.environ.get("MPKIT_DEVICE", ""))
            os.environ["MPKIT_DEVICE"] = task.device
        after.callback(random.setstate, random.getstate())
        after.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002  # a run may use it
        after.enter_context(np.errstate())
        after.enter_context(torch.random.fork_rng())
        after.callback(_restore, [(put, take()) for take, put in _SETTINGS])
        after.callback(set_generator_states, generator_states([*_named_in(task.run), *task.arguments.values()]))
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)
        torch.set_num_threads(task.threads)
        yield


def _named_in(run: Callable[..., Any]) -> list[object]:
    """The run, and what its code names: a loader or a generator beside it."""
    if not isinstance(run, FunctionType):
        return [run]
    named = inspect.getclosurevars(run)
    return [run, *named.nonlocals.values(), *named.globals.values()]


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    # how what holds for a whole process, and so for the runs that come after, is read and set
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, torch.set_default_device),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
)


def _restore(before: list[tuple[Callable[[Any], Any], Any]]) -> None:
    for (put, value), (take, _) in zip(before, _SETTINGS):
        if take() != value:
            put(value)


class _Copier(pickle.Pickler):
    """Notes what is not to be copied: code, and what torch and NumPy hold, a data set say."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.shared: list[object] = []

    def persistent_id(self, value: object) -> int | None:
        code = isinstance(value, FunctionType | BuiltinFunctionType | ModuleType | type)
        if not code and type(value).__module__.partition(".")[0] not in ("torch", "numpy"):
            return None
        self.shared.append(value)
        return len(self.shared) - 1


def _copied(task: Task) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The run and its arguments, which it may change without the next run seeing it, as if it were alone in a process;
    themselves where pickle cannot copy them."""
    copier = _Copier(file := io.BytesIO())
    reader = pickle.Unpickler(file)
    reader.persistent_load = copier.shared.__getitem__  # type: ignore[method-assign]
    try:
        copier.dump((task.run, task.arguments))
        file.seek(0)
        run, arguments = reader.load()
    except Exception:
        return task.run, task.arguments
    return run, arguments


_watched = 0


def watch_parent(parent: int) -> None:
    """End this process when `parent` is gone, however it went: a killed experiment leaves no workers behind."""
    global _watched
    if _watched != parent:
        _watched = parent
        threading.Thread(target=_watch, args=(parent,), name="mpkit-watch-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_EVERY)
    os._exit(1)  # nothing to clean up: a cell's file is whole or not there
