"""Every public function and class against wrong input, generated from the signatures: a new one is covered unnamed.

Every required argument is wrong at once. What is allowed to happen: it works, or it raises TypeError or ValueError
(or FileNotFoundError);
what it was given is as it was, no file is written, and the defaults of torch stay.
"""

import importlib
import inspect
import io
import math
import os
import pkgutil
import signal
import typing
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import pytest
import torch

import mpkit

APART = {
    "bench": "its topics are measured by themselves, not called by users",
    "command": "a command line: argparse answers",
    "explorers": "their traits refuse what is wrong, see their own tests",
    "info": "prints about this machine and takes no input",
    "lab": "starts JupyterLab",
    "plots": "takes the results of explorers",
    "widgets": "takes explorers and needs Jupyter",
}
NO_PROCESSES = "init_process_group"  # what must be there before any argument matters, and a RuntimeError without
WRONG = {
    "an object": object,
    "None": lambda: None,
    "a string": lambda: "x",
    "bytes": lambda: b"x",
    "NaN": lambda: math.nan,
    "inf": lambda: math.inf,
    "a huge int": lambda: 10**400,
    "a negative": lambda: -1,
    "an empty list": list,
    "an empty dict": dict,
    "a class": lambda: int,
    "an empty tensor": lambda: torch.empty(0),
    "a tensor of NaN": lambda: torch.full((2, 3), math.nan),
    "a tensor of ints": lambda: torch.ones(2, dtype=torch.int64),
}


def public() -> dict[str, typing.Any]:
    """Name -> function or class, of every module; of a package what its `__all__` or `__init__` offers."""
    found: dict[int, tuple[str, typing.Any]] = {}
    for info in pkgutil.walk_packages(mpkit.__path__, "mpkit."):
        parts = info.name.split(".")[1:]
        if parts[0] in APART or any(part.startswith("_") for part in parts):
            continue
        module = importlib.import_module(info.name)
        names = getattr(module, "__all__", None)
        if names is None:
            names = [] if len(parts) > 1 else [name for name in vars(module) if not name.startswith("_")]
        for name in names:
            thing = getattr(module, name)
            ours = getattr(thing, "__module__", "").startswith("mpkit")
            if ours and (inspect.isfunction(thing) or inspect.isclass(thing)) and not _is_error(thing):
                found.setdefault(id(thing), (f"{info.name.removeprefix('mpkit.')}.{name}", thing))
    return dict(found.values())


def _is_error(thing) -> bool:
    return inspect.isclass(thing) and issubclass(thing, BaseException)


PUBLIC = public()
UNNAMED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def given(thing) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(thing).parameters.values() if p.kind not in UNNAMED]


def call(thing, values: dict[str, typing.Any]):
    """Call with values by name, positional-only ones included."""
    args, kwargs = [], {}
    for p in given(thing):
        if p.name in values:
            if p.kind == p.POSITIONAL_ONLY:
                args.append(values[p.name])
            else:
                kwargs[p.name] = values[p.name]
    return thing(*args, **kwargs)


class TooLongError(BaseException):
    pass


@contextmanager
def limited(seconds: float):
    """Silence, and an end to a call that would count to 10**400."""

    def stop(*_):
        raise TooLongError(f"still at work after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def refused(thing, values) -> str:
    """What is wrong with how a call ended; "" when nothing is."""
    try:
        with limited(20):
            call(thing, values)
    except (TypeError, ValueError, FileNotFoundError) as error:  # the last: "x" is the name of no file
        return "" if str(error) else f"{type(error).__name__} without a word"
    except (Exception, TooLongError) as error:
        return "" if NO_PROCESSES in str(error) else f"{type(error).__name__}: {error}"[:150]
    return ""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PUBLIC)
def test_all_wrong_at_once(name):
    thing = PUBLIC[name]
    required = [p.name for p in given(thing) if p.default is p.empty]
    if not required:
        pytest.skip("nothing is required")
    dtype = torch.get_default_dtype()
    ends = {}
    for wrong, make in WRONG.items():
        value = make()
        ends[wrong] = refused(thing, dict.fromkeys(required, value))
        if isinstance(value, list | dict):
            assert value == make()
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, make(), rtol=0, atol=0, equal_nan=True)
    assert not {wrong: end for wrong, end in ends.items() if end}
    assert not os.listdir(), "a file was written"
    assert torch.get_default_dtype() is dtype
    assert torch.is_grad_enabled()


def test_the_list_is_whole():
    assert len(PUBLIC) > 150
    assert {"rounding.round_to", "casting.auto_mixed_precision", "boost.AutoBoost"} <= set(PUBLIC)
