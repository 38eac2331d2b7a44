"""Every public function and class against wrong input, generated from the signatures: a new one is covered unnamed.

What is allowed to happen: it works, or it raises TypeError or ValueError; what it was given is as it was before.
First every required argument is wrong at once, then one argument at a time beside right ones, where the annotations
are enough to make right ones.
"""

import importlib
import inspect
import io
import math
import os
import pickle
import pkgutil
import signal
import typing
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import pytest
import torch
from torch import Tensor, nn

import mpkit
from mpkit.formats import FP16
from mpkit.optimizers import Momentum
from mpkit.policies import preset

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
    except (TypeError, ValueError) as error:
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
    states = torch.get_rng_state(), torch.get_default_dtype()
    ends = {wrong: refused(thing, {key: make() for key in required}) for wrong, make in WRONG.items()}
    assert not {wrong: end for wrong, end in ends.items() if end}
    assert not os.listdir(), "a file was written"
    assert torch.get_default_dtype() is states[1]
    assert torch.is_grad_enabled()


# one wrong argument beside right ones


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


RIGHT = {  # annotation -> value
    "Tensor": lambda: torch.linspace(-2, 2, 6).view(2, 3),
    "nn.Module": network,
    "Optimizer": lambda: Momentum(network().parameters(), 0.1, 0.9),
    "torch.optim.Optimizer": lambda: Momentum(network().parameters(), 0.1, 0.9),
    "FloatFormat": lambda: FP16,
    "ScalePolicy": lambda: preset("torch"),
    "int": lambda: 2,
    "float": lambda: 0.5,
    "bool": lambda: True,
    "Sequence[float]": lambda: [0.1, 0.2],
    "Sequence[Tensor]": lambda: [torch.ones(2)],
    "Sequence[Tensor | None]": lambda: [torch.ones(2)],
    "Iterable[Tensor]": lambda: [nn.Parameter(torch.ones(2))],
}
NAMED = {"params": lambda: list(network().parameters()), "network": network, "optimizer": RIGHT["Optimizer"]}


def right_ones(thing) -> dict[str, typing.Any] | None:
    """A right value for each required argument, or None where the annotations do not say enough."""
    required = [p for p in given(thing) if p.default is p.empty]
    makers = [RIGHT.get(str(p.annotation).strip("'")) or NAMED.get(p.name) for p in required]
    return None if None in makers else {p.name: make() for p, make in zip(required, makers)}


def works(thing) -> bool:
    try:
        with limited(20):
            call(thing, right_ones(thing))
    except Exception:
        return False
    return True


def state_of(value) -> bytes:
    """What a bad call must leave as it was."""
    if isinstance(value, nn.Module):
        kinds = [(name, type(m).__name__, m.training, len(m._forward_hooks)) for name, m in value.named_modules()]
        flags = [(n, p.requires_grad, str(p.dtype), p.grad is None) for n, p in value.named_parameters()]
        own = [sorted(vars(m)) for m in value.modules()]
        return pickle.dumps((kinds, flags, own, {k: v.numpy().tolist() for k, v in value.state_dict().items()}))
    if isinstance(value, torch.optim.Optimizer):
        held = [[p.detach().numpy().tolist() for p in group["params"]] for group in value.param_groups]
        rest = [{k: repr(v) for k, v in g.items() if k != "params"} for g in value.param_groups]
        return pickle.dumps((held, rest, len(value.state)))
    if isinstance(value, Tensor):
        return pickle.dumps((value.detach().numpy().tolist(), str(value.dtype), value.requires_grad))
    if isinstance(value, list):
        return b"".join(map(state_of, value))
    return repr(value).encode()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PUBLIC)
def test_one_wrong_beside_right_ones(name):
    thing = PUBLIC[name]
    if right_ones(thing) is None or not works(thing):
        pytest.skip("the annotations do not say enough to make right arguments")
    ends = {}
    for p in given(thing):
        for wrong, make in WRONG.items():
            values = {**right_ones(thing), p.name: make()}
            rest = [value for key, value in values.items() if key != p.name]
            before = list(map(state_of, rest))
            failed = False
            try:
                with limited(20):
                    call(thing, values)
            except (TypeError, ValueError):
                failed = True
            except (Exception, TooLongError) as error:
                if NO_PROCESSES not in str(error):
                    ends[p.name, wrong] = f"{type(error).__name__}: {error}"[:150]
            if failed and list(map(state_of, rest)) != before:
                ends[p.name, wrong] = "what it was given has changed"
    assert not ends
    assert not os.listdir(), "a file was written"


def test_the_list_is_whole():
    assert len(PUBLIC) > 150
    assert {"rounding.round_to", "casting.auto_mixed_precision", "boost.AutoBoost"} <= set(PUBLIC)
    assert sum(right_ones(thing) is not None for thing in PUBLIC.values()) > 60
