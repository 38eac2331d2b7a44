"""One cell in one process: claimed, run on one thread, and its files written."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from mpkit.experiment.store import Folder, Outcome, Row, files_of

DONE, ELSEWHERE, STOPPED = "done", "elsewhere", "stopped"
WATCH_EVERY = 0.25  # seconds


@dataclass(frozen=True)
class Task:
    """What is to be run: `row` describes it, the rest is what a process needs to do it."""

    run: Callable[..., Any]
    arguments: dict[str, Any]
    row: Row
    stem: str
    folder: str
    token: str
    threads: int
    without_torch: bool = False
    devices: int = 0


@dataclass(frozen=True)
class Answer:
    """What became of a task; `files` where the worker does not see the folder, so that the caller writes them."""

    stem: str
    state: str
    files: dict[str, bytes] | None = None


def work(task: Task) -> Answer:
    """Run a cell unless it is finished, somebody else runs it, or a stop was asked for."""
    folder = Folder(task.folder)
    _take_device(task.devices, task.folder)
    if folder.token != task.token:  # a machine that does not share the folder
        return Answer(task.stem, DONE, _ran(task))
    if folder.stopping:
        return Answer(task.stem, STOPPED)
    with folder.claim(task.stem) as mine:
        if not mine:
            return Answer(task.stem, ELSEWHERE)
        if not folder.has(task.stem):
            folder.write(task.stem, _ran(task))
        return Answer(task.stem, DONE)


def _ran(task: Task) -> dict[str, bytes]:
    extra = {"only_time": True} if task.row.timed else {}
    outcome: Outcome | None = None
    error = ""
    with _as_if_alone(task):
        start = time.perf_counter()
        try:
            run, arguments = _copied(task)
            outcome = Outcome(run(seed=task.row.seed, **arguments, **extra))
        except (Exception, SystemExit):  # a script that gives up with sys.exit ends itself alone
            error = traceback.format_exc()
        seconds = time.perf_counter() - start
    row = replace(task.row, seconds=seconds, error=error)
    if outcome is not None:
        try:
            return files_of(replace(row, numbers=outcome.numbers), outcome)
        except Exception:  # what cannot be stored, as a trace whose meta is no JSON
            row = replace(row, error=traceback.format_exc())
    return files_of(row, None)


@contextlib.contextmanager
def _as_if_alone(task: Task) -> Iterator[None]:
    """Threads as told and random states that follow from the seed alone; afterwards those of before, and torch's
    defaults too. The generators that the run and its arguments hold begin each run as they were given."""
    seed = task.row.seed
    if not task.without_torch:
        import torch  # noqa: F401  before its threads and its generator are set
    torch_, numpy_ = sys.modules.get("torch"), sys.modules.get("numpy")
    with contextlib.ExitStack() as after:
        after.callback(random.setstate, random.getstate())
        random.seed(seed)
        if numpy_ is not None:  # a run may use the functions with one state for all
            after.callback(numpy_.random.set_state, numpy_.random.get_state())
            numpy_.random.seed(seed % 2**32)
            after.enter_context(numpy_.errstate())
        if torch_ is not None:
            after.enter_context(torch_.random.fork_rng())
            after.callback(_restore, torch_, [(put, take()) for take, put in _settings(torch_)])
            from mpkit.model.randomness import generator_states, set_generator_states

            after.callback(set_generator_states, generator_states([task.run, *task.arguments.values()]))
            torch_.manual_seed(seed)
            torch_.set_num_threads(task.threads)
        yield


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


def _settings(torch_: Any) -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """(how it is read, how it is set) of what holds for a whole process, and so for the runs that come after."""
    return [
        (torch_.get_num_threads, torch_.set_num_threads),
        (torch_.get_default_dtype, torch_.set_default_dtype),
        (torch_.get_default_device, torch_.set_default_device),
        (torch_.get_float32_matmul_precision, torch_.set_float32_matmul_precision),
        (torch_.is_grad_enabled, torch_._C._set_grad_enabled),
        (torch_.get_deterministic_debug_mode, torch_.set_deterministic_debug_mode),
    ]


def _restore(torch_: object, before: list[tuple[Callable[[Any], Any], Any]]) -> None:
    for (put, value), (take, _) in zip(before, _settings(torch_)):
        if take() != value:
            put(value)


_watched = 0


def watch_parent(parent: int) -> None:
    """End this process when `parent` is gone, however it went: a killed experiment leaves no workers behind."""
    global _watched
    if _watched == parent:
        return
    _watched = parent
    threading.Thread(target=_watch, args=(parent,), name="mpkit-watch-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_EVERY)
    os._exit(1)  # nothing to clean up: a cell's files are whole or not there


_device: Any = None  # the open lock of this process's GPU


def _take_device(devices: int, folder: str) -> None:
    """On a machine with several GPUs: the first that no other worker has, for the life of this process."""
    global _device
    if devices < 2 or _device is not None:
        return
    for number in range(devices):
        held = contextlib.ExitStack()
        if held.enter_context(Folder(folder).claim(f"cuda{number}")):
            _device = held
            os.environ["MPKIT_DEVICE"] = f"cuda:{number}"
            return
