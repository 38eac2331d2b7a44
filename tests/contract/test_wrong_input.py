"""Every public function and class against wrong input, generated from the signatures: a new one is covered unnamed.

First every required argument is wrong at once, then one argument at a time, optional ones too, beside right ones.
What is allowed to happen: it works, or it raises TypeError or ValueError (or FileNotFoundError);
what it was given is as it was, no file is written, and the defaults of torch stay.
"""

import dataclasses
import importlib
import inspect
import io
import math
import os
import signal
import typing
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mpkit import optimizers, schedules
from mpkit.blocks import MXFP8_E4M3
from mpkit.boost import FreezeOpt
from mpkit.casting import RECIPES
from mpkit.data import data_dir
from mpkit.formats import E2M1, FP16
from mpkit.model import Model
from mpkit.policies import TensorScalePolicy, initial, initial_tensor_scale, preset
from mpkit.record import AmaxTrace, Ranges, Trace
from mpkit.scalers import DynamicLossScaleUpdateCell, TensorScaler

MODULES = (
    *("formats", "rounding", "blocks", "casting", "policies", "scalers", "schedules", "optimizers", "step", "model"),
    *("boost", "boost.dim_reduce", "boost.grad_freeze"),
    *("record", "replay", "diagnose", "experiment", "data", "device"),
)
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
    """Name -> function or class of every `__all__`."""
    found: dict[int, tuple[str, typing.Any]] = {}
    for home in MODULES:
        module = importlib.import_module(f"mpkit.{home}")
        for name in module.__all__:
            thing = getattr(module, name)
            ours = (getattr(thing, "__module__", None) or "").startswith("mpkit")
            function = inspect.isfunction(inspect.unwrap(thing)) if callable(thing) else False  # also behind a cache
            if ours and (function or inspect.isclass(thing)) and not _is_error(thing):
                found.setdefault(id(thing), (f"{home}.{name}", thing))
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
        with limited(120):
            call(thing, values)
    except (TypeError, ValueError, FileNotFoundError) as error:
        # "x" is the name of no file
        return "" if str(error) else f"{type(error).__name__} without a word", True
    except (Exception, TooLongError) as error:
        return "" if NO_PROCESSES in str(error) else f"{type(error).__name__}: {error}"[:150], True
    return "", False


FILES = Path()
"""A folder beside the one that a test runs in: what right arguments read and write there is no trace of wrong ones."""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, tmp_path_factory, monkeypatch):
    global FILES
    FILES = tmp_path_factory.mktemp("files")
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


def frozen() -> FreezeOpt:
    params = list(network().parameters())
    return FreezeOpt(torch.optim.SGD(params, 0.1), [params, params[2:]])


@cache
def trace() -> Trace:
    """A short one: its arguments are looked at before and after each of hundreds of calls."""
    return Trace.load(data_dir() / "traces" / "rare_outliers.npz").before(8)


def amaxes() -> AmaxTrace:
    return AmaxTrace(("0.input", "0.weight", "0.grad"), np.ones((4, 3), np.float32))


def on_disk(name: str, content: object) -> Path:
    """A file of this name, as NumPy, torch, or json would write it."""
    path = FILES / name
    if path.suffix in (".npy", ".npz"):
        np.save(path, content) if path.suffix == ".npy" else np.savez(path, content)
    elif path.suffix == ".ckpt":
        torch.save(content, path)
    else:
        path.write_text(str(content))
    return path


class Alone(nn.Sequential):
    """A network that is called without an input."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 2))

    def forward(self):
        return self[0](torch.ones(2, 3))


def dim_reduce() -> dict[str, typing.Any]:
    net = network()
    weights, rows = list(net.parameters()), components()
    optimizer = torch.optim.SGD(weights, 1.0)
    return {"network": net, "optimizer": optimizer, "weight": weights, "pca_mat_local": rows, "n_components": 2}


def components() -> np.ndarray:
    """Rows of a PCA of the weights of `network()`."""
    weights = sum(p.numel() for p in network().parameters())
    return np.eye(2, weights, dtype=np.float32)


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
    "Trace": trace,
    "AmaxTrace": amaxes,
    "Ranges": lambda: trace().gradients,
    "FreezeOpt": frozen,
    "Model": lambda: Model(network()),
    "np.ndarray | Tensor": components,
    "torch.device | str | int": lambda: "cpu",
    "torch.dtype": lambda: torch.float16,
    "Decorated": lambda: lambda: None,
    "Callable[[Tensor, Tensor], Tensor]": lambda: lambda output, label: output.sum(),
    "Sequence[TensorScaler]": lambda: [TensorScaler(TensorScalePolicy())],
    "Policies": lambda: preset("torch"),
    "Cast": lambda: RECIPES["mxfp8"].fprop_input,
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
    "blocks.BlockFormat": {"element": lambda: E2M1},
    "boost.GradientFreeze": {"freeze_type": lambda: 0, "freeze_p": lambda: 0.5, "total_steps": lambda: 8},
    "boost.freeze_cell": {"grad": lambda: None, "reducer_flag": lambda: False},
    "boost.dim_reduce.WeightSnapshots": {"directory": lambda: FILES},
    "boost.dim_reduce.pca_matrix": {"data": lambda: np.random.default_rng(0).normal(size=(5, 7))},
    "boost.dim_reduce.prepare_pca": {
        "weight_load_dir": lambda: on_disk("a.ckpt", network().state_dict()).parent,
        "n_components": lambda: 1,
    },
    "boost.dim_reduce.read_pca_rows": {
        "full_path": lambda: (on_disk("pca_rank_0.npy", components()), on_disk("save_pca_end.txt", ""))[0].with_name(
            "pca.npy"
        ),
        "rank": lambda: 0,
    },
    "boost.dim_reduce.read_snapshots": {"directory": lambda: on_disk("a.ckpt", network().state_dict()).parent},
    "boost.dim_reduce.write_pca_files": {"full_path": lambda: FILES / "pca.npy", "matrix": components},
    "boost.grad_freeze.expected_saving": {"freeze_type": lambda: 1},
    "boost.grad_freeze.index_probabilities": {"freeze_type": lambda: 1},
    "boost.grad_freeze.stage_costs": {"net": Alone},
    "casting.custom_mixed_precision": {"white_list": lambda: [nn.Linear]},
    "diagnose.Watch": {"leaves": lambda: {"x": torch.ones(2)}},
    "diagnose.watch_loop": {"optimizer": lambda: torch.optim.SGD(network().parameters(), 0.1), "scaler": lambda: None},
    "experiment.experiment": {
        "run": lambda: lambda a, seed: {"loss": 1.0},
        "grid": lambda: {"a": [1]},
        "progress": lambda: False,
    },
    "model.Checkpoint": {"path": lambda: FILES / "a.ckpt"},
    "optimizers.BFloat16Weights": {"optimizer": lambda: torch.optim.SGD(network().bfloat16().parameters(), 0.1)},
    "policies.advance": {
        "policy": lambda: preset("torch"),
        "state": lambda: initial(preset("torch")),
        "news": lambda: True,
    },
    "policies.explain": {"before": lambda: [2.0], "after": lambda: [1.0], "finite": lambda: [False]},
    "policies.tensor_scale_preset": {"name": lambda: "te_delayed"},
    "record.AmaxTrace": {"tensors": lambda: ("a",), "amax": lambda: np.ones((2, 1), np.float32)},
    "record.Ranges": {f.name: lambda key=f.name: getattr(trace().gradients, key) for f in dataclasses.fields(Ranges)},
    "record.Trace": {f.name: lambda key=f.name: getattr(trace(), key) for f in dataclasses.fields(Trace)},
    "replay.flushed": {"scales": lambda: np.ones((len(trace().gradients.step), 1))},
    "replay.simulate": {"ceilings": lambda: [1.0, 2.0]},
    "replay.swept": {"factor": lambda: 2.0},
    "formats.p3109": {"bits": lambda: 8, "precision": lambda: 3},
    "blocks.round_with_bits": {"bits": lambda: torch.zeros(2, 16, dtype=torch.uint8), "element": lambda: E2M1},
    "scalers.check_and_unscale_": {"scale": lambda: torch.tensor(2.0)},
    "diagnose.diagnose": {"batch": lambda: (torch.ones(4, 3), torch.ones(4, 2))},
    "policies.advance_tensor_scale": {
        "state": lambda: initial_tensor_scale(TensorScalePolicy()),
        "amax": lambda: 2.0,
    },
}
TOGETHER = {"boost.DimReduce": dim_reduce}
"""All right arguments at once, where they belong to each other."""
LEFT_OUT = {  # of one wrong beside right ones
    "experiment.train": "a training for each argument; its own tests refuse wrong ones",
    "experiment.Results": "what an experiment returns; its own tests load damaged ones",
    "policies.Stop": "an enumeration: its call is Python's",
}
ALONE = ("an object", "None", "a string", "NaN", "a huge int", "a negative", "an empty list", "a tensor of NaN")


def is_record(thing) -> bool:
    """A tuple or dataclass that only holds what a function of ours has found, and checks nothing."""
    return inspect.isclass(thing) and (
        hasattr(thing, "_fields") or (dataclasses.is_dataclass(thing) and not hasattr(thing, "__post_init__"))
    )


def checked_kind(thing: typing.Any, p: inspect.Parameter) -> str:
    """What is annotated, where the annotation carries a check: `float` of `Annotated[float, check_float]`."""
    if not {"schedules", "optimizers", "boost", "step", "model"} & {*thing.__module__.split(".")}:
        return ""
    hint = typing.get_type_hints(thing.__init__ if inspect.isclass(thing) else thing, include_extras=True).get(p.name)
    if not hasattr(hint, "__metadata__"):
        return ""
    return hint.__origin__.__name__ if isinstance(hint.__origin__, type) else str(hint.__origin__)


def right_ones(name: str) -> dict[str, typing.Any]:
    """A right value for each required argument, and for the optional ones that cannot be left out.

    Raises:  KeyError for an argument that neither its annotation nor a table above knows.
    """
    if name in TOGETHER:
        return TOGETHER[name]()
    own, values = RIGHT_FOR.get(name, {}), {}
    for p in given(PUBLIC[name]):
        kind = checked_kind(PUBLIC[name], p) or str(getattr(p.annotation, "__forward_arg__", p.annotation)).strip("'")
        make = own.get(p.name) or (None if p.default is not p.empty else NAMED.get(p.name) or RIGHT.get(kind))
        if make is None and is_record(PUBLIC[name]) and p.default is p.empty:
            make = object
        if make is not None:
            values[p.name] = make()
        elif p.default is p.empty:
            raise KeyError(f"{name}: which value is right for {p.name}: {kind}? Add it to RIGHT, NAMED or RIGHT_FOR")
    return values


def state_of(value: typing.Any) -> typing.Any:
    """What a refused call must leave as it was."""
    if isinstance(value, nn.Module):
        kinds = [(n, type(m).__name__, m.training, sorted(vars(m))) for n, m in value.named_modules()]
        flags = [(n, p.requires_grad, str(p.dtype), p.grad is None) for n, p in value.named_parameters()]
        return repr((kinds, flags)), [state_of(v) for v in value.state_dict().values()]
    if isinstance(value, torch.optim.Optimizer):
        rest = [{k: repr(v) for k, v in g.items() if k != "params"} for g in value.param_groups]
        return repr((rest, len(value.state))), [state_of(p) for g in value.param_groups for p in g["params"]]
    if isinstance(value, torch.Tensor):
        return repr((value.tolist(), value.dtype, value.requires_grad))
    return [state_of(v) for v in value] if isinstance(value, list) else repr(value)


def need_to_work(name: str) -> None:
    """Raise unless right arguments are; what needs several processes may say so."""
    try:
        with limited(120):
            call(PUBLIC[name], right_ones(name))
    except FileNotFoundError:  # MNIST, which is not here
        return
    except RuntimeError as error:
        if NO_PROCESSES not in str(error):
            raise


def ends_beside_right_ones(name: str) -> dict[str, str]:
    """Argument -> what is wrong with how the calls ended in which it alone was wrong."""
    thing, ends = PUBLIC[name], {}
    for p in given(thing):
        for wrong in ALONE if p.name != "compiled" else ():  # a wrong one that is true compiles for minutes
            if wrong == "a string" and "Path" in str(p.annotation):  # the right name of a file
                continue
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
    if {name, name.split(".")[0]} & set(LEFT_OUT):
        pytest.skip(LEFT_OUT.get(name) or LEFT_OUT[name.split(".")[0]])
    if inspect.isabstract(PUBLIC[name]) or not given(PUBLIC[name]):
        pytest.skip("takes no argument")
    need_to_work(name)
    assert ends_beside_right_ones(name) == {}
    assert not os.listdir(), "a file was written"


METHODS = [  # of classes whose methods users call with values of their own; others take what only the library makes
    (name, method)
    for name in ("boost.OptimizerProcess", "boost.ParameterProcess", "boost.AutoBoost", "scalers.StaticLossScaler")
    for method, thing in inspect.getmembers(PUBLIC[name], inspect.isroutine)
    if not method.startswith("_") and given(thing)
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "method"), METHODS)
def test_methods_with_all_wrong_at_once(name, method):
    ends = {}
    for wrong, make in WRONG.items():
        bound = getattr(call(PUBLIC[name], right_ones(name)), method)
        required = [p.name for p in given(bound) if p.default is p.empty]
        ends[wrong] = refused(bound, dict.fromkeys(required, make()))[0] if required else ""
    assert not {wrong: end for wrong, end in ends.items() if end}
    assert not os.listdir(), "a file was written"


def test_the_list_is_whole():
    assert len(PUBLIC) > 150
    assert {"rounding.round_to", "casting.auto_mixed_precision", "boost.AutoBoost"} <= set(PUBLIC)
