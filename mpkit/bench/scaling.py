"""What loss scaling costs: check-and-unscale against torch's fused kernel, scale updates against GradScaler's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mpkit.policies import preset
from mpkit.scalers import (
    DynamicLossScaler,
    DynamicLossScaleUpdateCell,
    PolicyLossScaler,
    all_finite,
    check_and_unscale_,
)

from ._measure import Row, interleaved


def run(*, quick: bool, device: torch.device) -> list[Row]:
    """Gradients of 1e6 and 1e4 values in 10, 100 and 1,000 tensors, then one scale update."""
    rows = []
    for values in (1_000_000, 10_000):
        for tensors in (10, 100, 1000):
            rows += _check_and_unscale(values, tensors, rounds=21 if quick else 101, device=device)
    return rows + _update(rounds=21 if quick else 101, device=device)


def _check_and_unscale(values: int, tensors: int, rounds: int, device: torch.device) -> list[Row]:
    grads = [torch.randn(values // tensors, device=device) for _ in range(tensors)]
    one, found = torch.ones((), device=device), torch.zeros((), device=device)

    def fused() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, one)

    def item_loop() -> None:
        if all(g.isfinite().all().item() for g in grads):
            torch._foreach_mul_(grads, 1.0)

    ours: dict[str, Callable[[], object]] = {
        "torch fused kernel": fused,
        "mpkit check_and_unscale_": lambda: check_and_unscale_(grads, one),
        "mpkit check_and_unscale_, uniform": lambda: check_and_unscale_(grads, one, uniform=True),
    }
    slow: dict[str, Callable[[], object]] = {
        "torch fused kernel, among these": fused,
        "mpkit all_finite alone": lambda: all_finite(grads),
        "isfinite().item() per tensor, then multiply": item_loop,
    }
    case = f"{values:.0e} float32 gradients in {tensors} tensors"
    # what comes before the fused kernel (reciprocal, flag) is more than a handful of tiny tensors can hide
    goals = {name: 1.1 for name in ours if name.startswith("mpkit")} if values >= 1_000_000 else None
    inner = max(1, 200 // tensors) if values <= 10_000 else 1
    # apart from each other: the slow ones leave other contenders a cold cache
    close = interleaved("scaling", case, ours, rounds=rounds, inner=inner, device=device, goals=goals)
    return close + interleaved("scaling", case, slow, rounds=max(5, rounds // 5), inner=inner, device=device)


def _update(rounds: int, device: torch.device) -> list[Row]:
    finite = torch.tensor(True, device=device)
    overflow = ~finite
    scale: Tensor = torch.tensor(1024.0, device=device)
    grad_scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    weight = torch.nn.Parameter(torch.ones(1, device=device))
    weight.grad = torch.ones(1, device=device)
    optimizer = torch.optim.SGD([weight], lr=0.0, fused=True)
    grad_scaler.scale(torch.ones((), device=device))
    dynamic, cell = DynamicLossScaler(1024, 2, 2000), DynamicLossScaleUpdateCell(1024, 2, 2000)
    policies = {name: PolicyLossScaler(preset(name)) for name in ("torch", "mpkit", "deepspeed")}

    def peer() -> None:
        grad_scaler.unscale_(optimizer)
        grad_scaler.update()

    contenders: dict[str, Callable[[], object]] = {
        "GradScaler unscale_ of one gradient + update": peer,
        "mpkit check_and_unscale_ of one + update cell": lambda: cell(
            scale, check_and_unscale_([weight.grad], scale) != 0
        ),
        "mpkit, the same without bools, as in a step": lambda: cell.advance_(
            scale, check_and_unscale_([weight.grad], scale)
        ),
        "mpkit DynamicLossScaler.adjust": lambda: dynamic.adjust(finite),
        "mpkit DynamicLossScaleUpdateCell": lambda: cell(scale, overflow),
        **{f"mpkit PolicyLossScaler {n}.adjust": lambda s=s: s.adjust(finite) for n, s in policies.items()},  # type: ignore[misc]
    }
    goals = dict.fromkeys(list(contenders)[1:3], 1.0)
    return interleaved(
        "scaling", "one scale update on the device", contenders, rounds=rounds, inner=50, device=device, goals=goals
    )
