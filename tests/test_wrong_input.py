"""Every public function and class against wrong input, generated from the signatures: a new one is covered unnamed.

First every required argument is wrong at once, then one argument at a time, optional ones too, beside right ones.
What is allowed to happen: it works, or it raises TypeError or ValueError (or FileNotFoundError);
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
from torch import nn

import mpkit
from mpkit import optimizers, schedules
from mpkit.blocks import MXFP8_E4M3
from mpkit.casting.recipe import RECIPES
from mpkit.data import data_dir
from mpkit.formats import E2M1, FP16
from mpkit.policies import TensorScalePolicy, initial_tensor_scale, preset
from mpkit.record import Trace
from mpkit.scalers import DynamicLossScaleUpdateCell

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


def refused(thing, values) -> tuple[str, bool]:
    """What is wrong with how a call ended, "" when nothing is, and whether it was refused."""
    try:
        with limited(20):
            call(thing, values)
    except (TypeError, ValueError, FileNotFoundError) as error:  # the last: "x" is the name of no file
        return "" if str(error) else f"{type(error).__name__} without a word", True
    except (Exception, TooLongError) as error:
        return "" if NO_PROCESSES in str(error) else f"{type(error).__name__}: {error}"[:150], True
    return "", False


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MPKIT_DATA", raising=False)


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
        ends[wrong] = refused(thing, dict.fromkeys(required, value))[0]
        if isinstance(value, list | dict):
            assert value == make()
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, make(), rtol=0, atol=0, equal_nan=True)
    assert not {wrong: end for wrong, end in ends.items() if end}
    assert not os.listdir(), "a file was written"
    assert torch.get_default_dtype() is dtype
    assert torch.is_grad_enabled()


# one wrong argument beside right ones


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def momentum() -> optimizers.Optimizer:
    return optimizers.Momentum(list(network().parameters()), 0.1, 0.9)


RIGHT = {  # annotation -> value
    "Tensor": lambda: torch.linspace(-2, 2, 32).view(2, 16),
    "nn.Module": network,
    "Optimizer": momentum,
    "torch.optim.Optimizer": momentum,
    "TorchOptimizer": momentum,
    "Optimizer | Sequence[Optimizer]": momentum,
    "FloatFormat": lambda: FP16,
    "FloatFormat | IntFormat": lambda: FP16,
    "FloatFormat | BlockFormat": lambda: MXFP8_E4M3,
    "torch.dtype | FloatFormat": lambda: FP16,
    "BlockFormat": lambda: MXFP8_E4M3,
    "ScalePolicy": lambda: preset("torch"),
    "TensorScalePolicy": TensorScalePolicy,
    "Iterable[ScalePolicy]": lambda: [preset("torch")],
    "Iterable[TensorScalePolicy]": lambda: [TensorScalePolicy()],
    "Trace": lambda: Trace.load(data_dir() / "traces" / "rare_outliers.npz"),
    "str | Recipe": lambda: "mxfp8",
    "Recipe": lambda: RECIPES["mxfp8"],
    "LearningRateSchedule": lambda: schedules.CosineDecayLR(0.01, 0.1, 10),
    "LearningRateSchedule | Sequence[LearningRateSchedule]": lambda: schedules.CosineDecayLR(0.01, 0.1, 10),
    "torch.device": lambda: torch.device("cpu"),
    "bool": lambda: True,
    "int": lambda: 2,
    "float": lambda: 0.5,
    "float | Sequence[float]": lambda: [1.0, 2.0],
    "Sequence[float]": lambda: [0.1, 0.2],
    "Sequence[int]": lambda: [1, 2],
    "tuple[float, ...]": lambda: (0.1, 0.2),
    "Sequence[Tensor]": lambda: [torch.ones(2)],
    "Sequence[Tensor | None]": lambda: [torch.ones(2)],
    "Sequence[nn.Parameter]": lambda: list(network().parameters()),
    "Sequence[float] | np.ndarray": lambda: [1.0, 2.0, 4.0],
    "Mapping[str, Sequence[float]] | Sequence[float] | np.ndarray": lambda: [1.0, 2.0, 4.0],
}
NAMED = {  # where a name says more than the annotation
    "params": lambda: list(network().parameters()),
    "network": network,
    "learning_rate": lambda: 0.1,
    "momentum": lambda: 0.9,
    "scale_sense": lambda: DynamicLossScaleUpdateCell(1024.0, 2, 2),
    "loss_fn": nn.MSELoss,
    "loss_scale_value": lambda: 1024.0,
    "scale_value": lambda: 1024.0,
    "scale_factor": lambda: 2,
    "finite": lambda: [True, False],
    "framework": lambda: "torch",
    "name": lambda: "e5m2",
    "total_step": lambda: 6,
    "min_lr": lambda: 0.01,
    "end_learning_rate": lambda: 0.01,
    "power": lambda: 0.5,
    "heads": lambda: 2,
    "width": lambda: 4,
    "rank": lambda: 0,
    "exponent_bits": lambda: 5,
    "depths": lambda: (1, 1, 1, 1),
}
RIGHT_FOR = {  # one callable's own
    "casting.recipe_linear": {"weight": lambda: torch.ones(4, 16)},
    "blocks.round_with_bits": {"bits": lambda: torch.zeros(2, 16, dtype=torch.int64), "element": lambda: E2M1},
    "scalers.check_and_unscale_": {"scale": lambda: torch.tensor(2.0)},
    "diagnose.diagnose": {"batch": lambda: (torch.ones(4, 3), torch.ones(4, 2))},
    "policies.advance_tensor_scale": {
        "state": lambda: initial_tensor_scale(TensorScalePolicy()),
        "amax": lambda: 2.0,
    },
}
OPEN: dict[str, tuple[str, ...]] = {  # arguments that are not checked yet
    "casting.recipe_linear": ("x", "weight", "scalers"),
    "optimizers.Optimizer": ("hyper", "options"),
    "replay.sweep": ("factor",),
    "replay.sweep_tensor_scales": ("element",),
    "schedules.warmup_lr": ("warmup_epoch",),
}
LEFT_OUT = {  # of one wrong beside right ones
    "experiment.train": "a training for each argument; its own tests refuse wrong ones",
    "networks": "the networks of the lessons take the sizes that torch takes, and its words for wrong ones",
}
ALONE = ("an object", "None", "a string", "NaN", "a huge int", "a negative", "an empty list", "a tensor of NaN")


def right_ones(name: str) -> dict[str, typing.Any] | None:
    """A right value for each required argument, or None where the annotations do not say enough."""
    required = [p for p in given(PUBLIC[name]) if p.default is p.empty]
    own = RIGHT_FOR.get(name, {})
    makers = [own.get(p.name) or NAMED.get(p.name) or RIGHT.get(str(p.annotation).strip("'")) for p in required]
    return None if None in makers else {p.name: make() for p, make in zip(required, makers)}


def state_of(value: typing.Any) -> typing.Any:
    """What a refused call must leave as it was."""
    if isinstance(value, nn.Module):
        kinds = [
            (n, type(m).__name__, m.training, len(m._forward_hooks), sorted(vars(m))) for n, m in value.named_modules()
        ]
        flags = [(n, p.requires_grad, str(p.dtype), p.grad is None) for n, p in value.named_parameters()]
        return repr((kinds, flags)), [state_of(v) for v in value.state_dict().values()]
    if isinstance(value, torch.optim.Optimizer):
        rest = [{k: repr(v) for k, v in g.items() if k != "params"} for g in value.param_groups]
        return repr((rest, len(value.state))), [state_of(p) for g in value.param_groups for p in g["params"]]
    if isinstance(value, torch.Tensor):
        return repr((value.tolist(), value.dtype, value.requires_grad))
    return [state_of(v) for v in value] if isinstance(value, list) else repr(value)


def works(name: str) -> bool:
    try:
        with limited(20):
            call(PUBLIC[name], right_ones(name))
    except FileNotFoundError:  # MNIST, which is not here
        return True
    except Exception:
        return False
    return True


def ends_beside_right_ones(name: str) -> dict[str, str]:
    """Argument -> what is wrong with how the calls ended in which it alone was wrong."""
    thing, ends = PUBLIC[name], {}
    for p in given(thing):
        for wrong in ALONE if p.name != "compiled" else ():  # a wrong one that is true compiles for minutes
            values = right_ones(name) | {p.name: WRONG[wrong]()}
            before = {key: state_of(value) for key, value in values.items() if key != p.name}
            end, failed = refused(thing, values)
            if end:
                ends[p.name] = f"{wrong}: {end}"
            elif failed and {key: state_of(values[key]) for key in before} != before:
                ends[p.name] = f"{wrong}: what it was given has changed"
    return ends


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PUBLIC)
def test_one_wrong_beside_right_ones(name, monkeypatch):
    def no_network(*_, **__):
        raise AssertionError("a wrong argument starts a download")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    if {name, name.split(".")[0]} & set(LEFT_OUT) or right_ones(name) is None or not works(name):
        pytest.skip("the annotations do not say enough to make right arguments")
    ends = ends_beside_right_ones(name)
    assert {arg: end for arg, end in ends.items() if arg not in OPEN.get(name, ())} == {}
    assert set(OPEN.get(name, ())) <= set(ends), "mended: take it from the list"
    assert not os.listdir(), "a file was written"


def test_the_list_is_whole():
    assert len(PUBLIC) > 150
    assert {"rounding.round_to", "casting.auto_mixed_precision", "boost.AutoBoost"} <= set(PUBLIC)
