"""Casting: a training step at every level against torch.autocast in the same run, eager and compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from mpkit.bench._by_hand import by_hand
from mpkit.bench._measure import Row, interleaved, rebuilt
from mpkit.casting import LEVELS as ALL
from mpkit.casting import auto_mixed_precision
from mpkit.formats import dtype_name
from mpkit.networks import Network, TinyGPT, resnet18, resnet50

LEVELS = tuple(level for level in ALL if level != "O0")
CPU_GOALS = {"O1": 1.10}
GPU_GOALS = {"auto": 1.03, "O2": 1.00, "O3": 1.00}
COMPILED_GOALS = {"auto": 1.00, "O2": 1.00, "O3": 1.00}

Step = Callable[[], object]
Setting = tuple[str, nn.Module, Tensor, Tensor, float]  # name, network, inputs, labels, goal against torch.autocast


def run(*, quick: bool, device: torch.device) -> list[Row]:
    """Five networks on the CPU; ResNet-50 and a GPT-2-124M shape on a GPU."""
    cpu = torch.device("cpu")
    rows: list[Row] = []
    for dtype in (torch.bfloat16, torch.float16):
        images, labels = torch.rand(64, 1, 28, 28), torch.randint(0, 10, (64,))
        case = f"784-512-512-10 b64 {dtype_name(dtype)} cpu"
        goals = CPU_GOALS if dtype is torch.bfloat16 else {}
        eager = partial(_levels, case, Network(), images, labels, dtype, 21, cpu, goals)
        rows += rebuilt(eager, 3 if quick else 9)
        if not quick:
            rows += _levels(f"{case} compiled", Network(), images, labels, dtype, 120, cpu, COMPILED_GOALS, True)
    for setting in _small():
        rows += rebuilt(partial(_beside_hand, *setting), 3 if quick else 9)
    return rows + (_gpu(quick, device) if device.type == "cuda" else _without_gpu())


def _small() -> Iterator[Setting]:
    digits = torch.randint(0, 10, (64,))
    yield "784-512-512-10 b64", Network(), torch.rand(64, 1, 28, 28), digits, 1.05
    layers = [nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)]
    yield "MLP 64-32-32-10 b16", nn.Sequential(*layers), torch.rand(16, 1, 8, 8), digits[:16], 1.15
    yield "ResNet-18 width 8 b16", resnet18(width=8), torch.rand(16, 3, 32, 32), digits[:16], 1.05
    for width, rows, context, goal in ((64, 8, 32, 1.05), (16, 4, 16, 1.15)):
        tokens = torch.randint(0, 64, (rows, context))
        network = TinyGPT(vocabulary=64, context=context, width=width, heads=max(2, width // 16), layers=2)
        yield f"GPT d{width} b{rows} x {context}", network, tokens, tokens, goal


class _Idle(TorchFunctionMode):
    """Sees every operation and changes none: what it costs to look."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


class _Watched(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        with _Idle():
            out: Tensor = self.network(x)
            return out


def _beside_hand(case: str, network: nn.Module, inputs: Tensor, labels: Tensor, goal: float) -> list[Row]:
    """O1 and auto beside the same casts written into the layers, which is all that a level can be measured by."""
    contenders = {"torch.autocast": step(copy.deepcopy(network), inputs, labels, autocast=torch.bfloat16)}
    for level in ("O1", "auto"):
        contenders[f"{level} by hand"] = step(by_hand(network, level), inputs, labels)
        contenders[f"{level} by hand, idle mode"] = step(_Watched(by_hand(network, level)), inputs, labels)
        contenders[level] = step(auto_mixed_precision(copy.deepcopy(network), level, torch.bfloat16), inputs, labels)
    notes = {f"{level} by hand": f"the numbers of {level}, bit for bit" for level in ("O1", "auto")}
    goals = {"O1": goal, "auto": goal}
    return interleaved("casting", f"{case} bfloat16 cpu", contenders, rounds=41, warmup=5, goals=goals, notes=notes)


def _without_gpu() -> list[Row]:
    reason = "not measured on a GPU: this machine has none"
    return [Row("casting", case, "all levels", skipped=reason) for case in ("resnet50 b256", "GPT-2 124M b16 x 1024")]


def _gpu(quick: bool, device: torch.device) -> list[Row]:
    rows = []
    rounds = 10 if quick else 30
    batch = 64 if quick else 256
    images = torch.rand(batch, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
    network: nn.Module = resnet50(classes=1000, small_input=False).to(device)
    network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    labels = torch.randint(0, 1000, (batch,), device=device)
    tokens = torch.randint(0, 50257, (4 if quick else 16, 1024), device=device)
    for compiled in (False,) if quick else (False, True):
        goals = COMPILED_GOALS if compiled else GPU_GOALS
        tail = " compiled" if compiled else ""
        low = torch.float16
        rows += _levels(f"resnet50 b{batch}{tail}", network, images, labels, low, rounds, device, goals, compiled)
        gpt = TinyGPT.gpt2_124m().to(device)
        rows += _levels(f"GPT-2 124M{tail}", gpt, tokens, tokens, low, rounds, device, goals, compiled)
    return rows


def _levels(
    case: str,
    network: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    dtype: torch.dtype,
    rounds: int,
    device: torch.device,
    goals: dict[str, float],
    compiled: bool = False,
) -> list[Row]:
    """One step (forward, loss, backward, SGD with momentum) per contender; autocast is the baseline."""
    contenders: dict[str, Step] = {
        "torch.autocast": step(copy.deepcopy(network), inputs, labels, autocast=dtype, compiled=compiled),
        "float32": step(copy.deepcopy(network), inputs, labels, compiled=compiled),
    }
    for level in LEVELS:
        cast = auto_mixed_precision(copy.deepcopy(network), level, dtype)
        contenders[level] = step(cast, inputs, labels, compiled=compiled)
    notes = {"O1": "every intermediate float32"}
    return interleaved("casting", case, contenders, rounds=rounds, warmup=5, device=device, goals=goals, notes=notes)


def step(
    network: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    autocast: torch.dtype | None = None,
    compiled: bool = False,
) -> Step:
    """A training step as a callable without arguments."""
    optimizer = torch.optim.SGD(network.parameters(), 1e-3, momentum=0.9, fused=True)
    forward = torch.compile(network, fullgraph=True) if compiled else network

    def once() -> None:
        optimizer.zero_grad()
        with torch.autocast(inputs.device.type, autocast) if autocast is not None else nullcontext():
            loss = cross_entropy(forward(inputs).flatten(0, -2).float(), labels.flatten())
        (loss * 1024.0).backward()
        optimizer.step()

    return once
