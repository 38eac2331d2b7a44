"""Optimizers: one update of 100 tensors against torch's foreach namesake, with and without the skip on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpkit import optimizers as own
from mpkit.bench._measure import Row, interleaved
from mpkit.bench.rounding import _Live

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
T = torch.optim
ADAM: Make = partial(T.Adam, foreach=True)

PAIRS: dict[str, tuple[Make, str, Make, float]] = {  # case: mpkit's, torch's name and maker, the goal
    "SGD": (lambda p: own.SGD(p, 0.01), "torch SGD", partial(T.SGD, lr=0.01, foreach=True), 1.1),
    "Momentum": (
        lambda p: own.Momentum(p, 0.01, 0.9),
        "torch SGD, momentum",
        partial(T.SGD, lr=0.01, momentum=0.9, foreach=True),
        1.1,
    ),
    "Adam": (own.Adam, "torch Adam", ADAM, 1.1),
    "Adam, weight decay": (
        partial(own.Adam, weight_decay=0.01),
        "torch Adam",
        partial(T.Adam, weight_decay=0.01, foreach=True),
        1.1,
    ),
    "AdamWeightDecay": (
        partial(own.AdamWeightDecay, weight_decay=0.01),
        "torch AdamW",
        partial(T.AdamW, foreach=True),
        1.1,
    ),
    "AdaMax": (own.AdaMax, "torch Adamax", partial(T.Adamax, foreach=True), 1.1),
    "RMSProp": (partial(own.RMSProp, learning_rate=0.01), "torch RMSprop", partial(T.RMSprop, foreach=True), 1.1),
    "Adagrad": (own.Adagrad, "torch Adagrad", partial(T.Adagrad, foreach=True), 1.1),
    "Adadelta": (own.Adadelta, "torch Adadelta", partial(T.Adadelta, foreach=True), 1.1),
    "ASGD": (own.ASGD, "torch ASGD", partial(T.ASGD, foreach=True), 1.1),
    "Rprop": (own.Rprop, "torch Rprop", partial(T.Rprop, foreach=True), 1.1),
    "AdaFactor, no first moment": (
        partial(own.AdaFactor, beta1=0.0),
        "torch Adafactor",
        partial(T.Adafactor, foreach=True),
        1.1,
    ),
    "Lamb": (lambda p: own.Lamb(p, 0.01, weight_decay=0.01), "torch Adam", ADAM, 1.5),
    "LARS of Momentum": (
        lambda p: own.LARS(own.Momentum(p, 0.01, 0.9, weight_decay=0.01)),
        "torch Adam",
        ADAM,
        1.5,
    ),
}


def run(*, quick: bool, device: torch.device) -> list[Row]:
    """Per optimizer: torch's namesake, mpkit's, and mpkit's when the step may be skipped; peak memory as a note."""
    width, rounds = (100, 5) if quick else (1000, 11)
    rows: list[Row] = []
    for name, (ours, peer_name, peer, goal) in PAIRS.items():
        params = _parameters(width, device)
        may_skip: Any = ours(params)
        may_skip.found_inf = torch.zeros((), device=device)
        contenders = {peer_name: peer(params).step, "mpkit": ours(params).step, "mpkit, found_inf": may_skip.step}
        notes = {key: _memory(step, params) for key, step in contenders.items()}
        rows += interleaved(
            "optimizers",
            f"{name}, 100 tensors, {100 * width * 100:.0e} values".replace("+0", ""),
            contenders,
            rounds=rounds,
            warmup=1,
            device=device,
            goals={"mpkit": goal},
            notes=notes,
        )
    return rows


def _parameters(width: int, device: torch.device) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(width, 100, generator=generator).to(device)) for _ in range(100)]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(device) * 0.01
    return params


def _memory(step: Callable[[], object], params: list[nn.Parameter]) -> str:
    """Peak memory of a second update beside weights, gradients and state, as a share of the weights."""
    step()
    weights: list[Tensor] = list(params)
    total = sum(p.nbytes for p in weights)
    device = weights[0].device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        with _Live() as live:
            step()
        peak = int(live.peak)
    return f"{peak / total:.2f} of the weights as intermediate memory"
