"""The table of what is measured: a topic, a name, and contenders of which the first is what the others are held to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit import networks, optimizers
from mpkit.bench.measure import Row, measure, rebuilt
from mpkit.blocks import MXFP4, MXFP8_E4M3, NVFP4, quantize_blocks
from mpkit.casting import auto_mixed_precision
from mpkit.experiment import experiment, parts, train
from mpkit.formats import BF16, E4M3FN, E5M2, FP16, TF32, FloatFormat
from mpkit.policies import advance, initial, preset, stack
from mpkit.record import Recorder
from mpkit.replay import simulate, swept
from mpkit.rounding import round_to
from mpkit.scalers import DynamicLossScaler, DynamicLossScaleUpdateCell, PolicyLossScaler
from mpkit.step import TrainOneStepWithLossScaleCell, WithLossCell

Contenders = dict[str, Callable[[], object]]
MINE = "mpkit, out="


@dataclass(frozen=True)
class Case:
    """One comparison.

    Args:
        build:  makes the contenders on a device; they are called without arguments.
        goals:  the ratio to the first contender that another may have.
        builds: how often all is made anew, of what lies in memory now here, now there.
        rounds, inner: turns of each contender, and calls in a turn.
    """

    topic: str
    name: str
    build: Callable[[torch.device], Contenders]
    goals: Mapping[str, float] = field(default_factory=dict)
    builds: int = 1
    rounds: int = 15
    inner: int = 1

    def rows(self, quick: bool, device: torch.device) -> list[Row]:
        """The case, measured."""

        rounds = min(self.rounds, 5) if quick else self.rounds
        options: dict[str, Any] = {"rounds": rounds, "inner": self.inner, "device": device, "goals": self.goals}

        def once() -> list[Row]:
            return measure(self.topic, self.name, self.build(device), **options)

        return once() if self.builds == 1 else rebuilt(once, 3 if quick else self.builds)


def run(topic: str, *, quick: bool, device: torch.device) -> list[Row]:
    """All cases of a topic on a device."""
    return [row for case in cases(quick, device) if case.topic == topic for row in case.rows(quick, device)]


TOPICS = ["boost", "casting", "experiment", "optimizers", "recipes", "record", "replay", "rounding", "step"]


def cases(quick: bool, device: torch.device) -> Iterator[Case]:
    """The table."""
    values = 10**6 if quick else 10**7
    for fmt, goal in ((FP16, 1.1), (BF16, 1.1), (TF32, 3.5), (E5M2, 3.5), (E4M3FN, 4.0)):
        build = partial(_rounding, fmt, "nearest_even", values)
        yield Case("rounding", f"{fmt.name} nearest_even", build, {MINE: goal})
    for fmt in (FP16, BF16, E5M2, E4M3FN):
        yield Case("rounding", f"{fmt.name} stochastic", partial(_rounding, fmt, "stochastic", values), {MINE: 1.6})
    for block in (MXFP8_E4M3, MXFP4, NVFP4):
        yield Case("recipes", block.name, partial(_blocks, block, values // 512), {"quantize_blocks": 3.0}, rounds=9)
    for name in STEPS:
        goals = {"update cell": 1.07, "DynamicLossScaler": 1.07, "torch's policy": 1.07}
        yield Case("step", f"MLP b64, {name}", partial(_steps, name), goals, builds=9, inner=5)
    for name, (_, _, goal) in PAIRS.items():
        yield Case("optimizers", f"{name}, 100 tensors", partial(_updates, name), {"mpkit": goal}, rounds=11)
    goals = {"every=1": 1.5, "every=20": 1.06}
    yield Case("record", "MLP b64, a loop with GradScaler", _recorded, goals, builds=9, rounds=11, inner=20)
    yield Case("replay", "400 steps", _replayed, {"vector of 10,000": 10_000 / 3 / 100}, rounds=5)
    runs = 20 if quick else 200
    yield Case("experiment", f"{runs} runs", partial(_runs, quick), {"two processes": 1.15 / 2}, rounds=3)
    yield Case("boost", "ResNet-18", partial(_boosted, quick), {"O1": 1 / 1.1, "O1 tuned": 1 / 1.3}, rounds=8, inner=18)
    for name, network, inputs in _networks(quick, device):
        goals = {"auto": 1.03, "O2": 1.0, "O3": 1.0} if device.type == "cuda" else {"O1": 1.1}
        yield Case("casting", name, partial(_levels, network, inputs), goals, builds=9, rounds=21)


def _rounding(fmt: FloatFormat, mode: Any, values: int, device: torch.device) -> Contenders:
    x = torch.randn(values, device=device)
    out: Tensor = torch.empty_like(x)
    peers: Contenders = {"a copy": partial(out.copy_, x)}
    if mode == "stochastic":
        peers = {"torch.rand_like": partial(torch.rand_like, x)}
    elif fmt.bits == 16:  # the cast to 8 bits is no even round
        peers = {"a cast": lambda: x.to(fmt.torch_dtype).float()}
    return {**peers, MINE: partial(round_to, x, fmt, mode, out=out)}


def _blocks(fmt: Any, rows: int, device: torch.device) -> Contenders:
    x = torch.randn(rows, 512, device=device)
    plain = partial(round_to, x, fmt.element, overflow="saturate")
    return {"round_to its elements": plain, "quantize_blocks": partial(quantize_blocks, x, fmt)}


# torch's default ones are skipped by the host, which costs one read per step; the others skip on the device
STEPS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused SGD": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, fused=True),
    "default SGD": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "fused Adam": lambda p: torch.optim.Adam(p, 1e-3, fused=True),
    "mpkit Momentum": lambda p: optimizers.Momentum(p, 0.01, 0.9),
    "mpkit Adam": lambda p: optimizers.Adam(p, 1e-3),
}


def _mlp(device: torch.device, optimizer: str = "fused SGD") -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    torch.manual_seed(0)
    network = networks.Network().to(device)
    x, y = torch.rand(64, 1, 28, 28, device=device), torch.randint(10, (64,), device=device)
    return network, STEPS[optimizer](network.parameters()), x, y


def _loop(device: torch.device, optimizer: str, scaled: bool, every: int | None = None) -> Callable[[], object]:
    """A step of a loop by hand, scaled by a GradScaler, recorded."""
    network, rule, x, y = _mlp(device, optimizer)
    scaler = torch.amp.GradScaler(device.type, enabled=scaled)
    recorder = None if every is None else Recorder(network, rule, scaler, every=every)

    def step() -> None:
        rule.zero_grad()
        loss = F.cross_entropy(network(x), y)
        scaler.scale(loss).backward()
        if recorder is not None:
            recorder.record(loss)
        scaler.step(rule)
        scaler.update()

    return step


def _steps(optimizer: str, device: torch.device) -> Contenders:
    def ours(sense: object) -> Callable[[], object]:
        network, rule, x, y = _mlp(device, optimizer)
        return partial(TrainOneStepWithLossScaleCell(WithLossCell(network, nn.CrossEntropyLoss()), rule, sense), x, y)

    return {
        "bare float32": _loop(device, optimizer, scaled=False),
        "GradScaler": _loop(device, optimizer, scaled=True),
        "update cell": ours(DynamicLossScaleUpdateCell(2.0**16, 2, 2000)),
        "DynamicLossScaler": ours(DynamicLossScaler(2.0**16, 2, 2000)),
        "torch's policy": ours(PolicyLossScaler(preset("torch"))),
    }


def _recorded(device: torch.device) -> Contenders:
    recorded = {f"every={every}": _loop(device, "fused SGD", True, every) for every in (1, 20)}
    return {"bare": _loop(device, "fused SGD", scaled=True), **recorded}


T = torch.optim
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any], float]] = {  # mpkit's, torch's with foreach, the goal
    "SGD": (partial(optimizers.SGD, learning_rate=0.01), partial(T.SGD, lr=0.01), 1.1),
    "Momentum": (lambda p: optimizers.Momentum(p, 0.01, 0.9), partial(T.SGD, lr=0.01, momentum=0.9), 1.1),
    "Adam": (optimizers.Adam, T.Adam, 1.1),
    "AdamWeightDecay": (partial(optimizers.AdamWeightDecay, weight_decay=0.01), T.AdamW, 1.1),
    "AdaMax": (optimizers.AdaMax, T.Adamax, 1.1),
    "RMSProp": (partial(optimizers.RMSProp, learning_rate=0.01), T.RMSprop, 1.1),
    "Adagrad": (optimizers.Adagrad, T.Adagrad, 1.1),
    "Adadelta": (optimizers.Adadelta, T.Adadelta, 1.1),
    "ASGD": (optimizers.ASGD, T.ASGD, 1.1),
    "Rprop": (optimizers.Rprop, T.Rprop, 1.1),
    "AdaFactor": (partial(optimizers.AdaFactor, beta1=0.0), T.Adafactor, 1.1),
    "Lamb": (lambda p: optimizers.Lamb(p, 0.01, weight_decay=0.01), T.Adam, 1.5),
    "LARS": (lambda p: optimizers.LARS(optimizers.Momentum(p, 0.01, 0.9, weight_decay=0.01)), T.Adam, 1.5),
}


def _updates(name: str, device: torch.device) -> Contenders:
    ours, peer, _ = PAIRS[name]
    params = [nn.Parameter(torch.randn(1000, 100, device=device)) for _ in range(100)]
    for p in params:
        p.grad = torch.randn_like(p) * 0.01
    skips = ours(params)
    skips.found_inf = torch.zeros((), device=device)
    return {"torch": peer(params, foreach=True).step, "mpkit": ours(params).step, "mpkit, may skip": skips.step}


def _replayed(device: torch.device) -> Contenders:
    generator = np.random.default_rng(0)
    tops = np.exp2(14 + np.cumsum(generator.normal(0, 0.02, 400)) + generator.normal(0, 0.3, 400))
    policies = [swept(2.0 ** (8 + i % 10), (1.5, 2.0, 3.0, 4.0)[i // 10 % 4], 20 + i // 40 * 10) for i in range(10_000)]
    vector = stack(policies)

    def loop() -> None:
        for policy in (policies[7], policies[1234], policies[4321]):
            state = initial(policy)
            for top in tops.tolist():
                state, _ = advance(policy, state, state.scale <= top)

    return {"a Python loop over 3": loop, "vector of 10,000": partial(simulate, tops, vector, sample=(), device=device)}


def _runs(quick: bool, device: torch.device) -> Contenders:
    one = partial(train, partial(networks.Network, inputs=64, hidden=128), "digits8", epochs=1)
    grid = {"level": ["O0", "auto"], "lr": [0.01, 0.02, 0.05, 0.1, 0.2]}
    call = partial(experiment, one, grid, seeds=2 if quick else 20, progress=False)
    return {"one process": partial(call, n_jobs=1), "two processes": partial(call, n_jobs=2)}


def _boosted(quick: bool, device: torch.device) -> Contenders:
    """Steps of trainings of 18 steps each turn, one whole cycle of what is frozen."""
    width, rows, size = (8, 8, 16) if quick else (32, 32, 32)
    x, y = torch.randn(rows, 3, size, size, device=device), torch.arange(rows, device=device) % 10
    made: Contenders = {}
    for name, boost in (("none", "O0"), ("O1", "O1"), ("O1 tuned", "tuned")):
        torch.manual_seed(0)
        network: nn.Module = networks.resnet18(width=width).to(device)
        rule = optimizers.Momentum(network.parameters(), 0.01, 0.9, weight_decay=5e-4)
        network, rule, auto = parts.boosted(boost, network, rule, 18 * 20)
        made[name] = partial(parts.step_of(network, nn.CrossEntropyLoss(), False, rule, None, boost=auto), x, y)
    return made


def _networks(quick: bool, device: torch.device) -> Iterator[tuple[str, Callable[[], nn.Module], tuple[Any, ...]]]:
    """Name, network, and what its inputs are drawn from: shape, or (rows, context, vocabulary)."""
    if device.type == "cuda":
        resnet = partial(networks.resnet50, classes=1000, small_input=False)
        yield "ResNet-50", resnet, (64 if quick else 256, 3, 224, 224)
        yield "GPT-2 124M", networks.TinyGPT.gpt2_124m, (4 if quick else 16, 1024, 50257)
    else:
        gpt = partial(networks.TinyGPT, vocabulary=64, context=32, width=64, heads=4, layers=2)
        yield "784-512-512-10", networks.Network, (64, 1, 28, 28)
        yield "ResNet-18 width 8", partial(networks.resnet18, width=8), (16, 3, 32, 32)
        yield "GPT d64", gpt, (8, 32, 64)


def _levels(network: Callable[[], nn.Module], shape: tuple[int, ...], device: torch.device) -> Contenders:
    """One step (forward, loss, backward, SGD with momentum) at each level beside `torch.autocast`."""
    net, low = network().to(device), torch.float16 if device.type == "cuda" else torch.bfloat16
    tokens = len(shape) == 3
    x = torch.randint(shape[2], shape[:2], device=device) if tokens else torch.rand(shape, device=device)
    y = x if tokens else torch.randint(10, shape[:1], device=device)

    def step(net: nn.Module, autocast: bool = False) -> Callable[[], object]:
        rule = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9, fused=True)

        def once() -> None:
            rule.zero_grad()
            with torch.autocast(device.type, low) if autocast else nullcontext():
                loss = F.cross_entropy(net(x).flatten(0, -2).float(), y.flatten())
            (loss * 1024.0).backward()
            rule.step()

        return once

    cast = {level: step(auto_mixed_precision(copy.deepcopy(net), level, low)) for level in ("O1", "O2", "O3", "auto")}
    return {"torch.autocast": step(copy.deepcopy(net), autocast=True), "float32": step(copy.deepcopy(net)), **cast}
