"""Parameters, gradients and bit patterns for the tests of optimizers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SHAPES = [(3, 4), (5,), (2, 3, 2, 2), (1, 1), ()]


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu") -> list[nn.Parameter]:
    """Parameters of several ranks; the first two hold a -0.0, a 0.0 and a subnormal each."""
    generator = torch.Generator().manual_seed(seed)
    params = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    for p in params[:2]:
        p.view(-1)[:3] = torch.tensor([-0.0, 0.0, -6e-8])
    return [nn.Parameter(p.to(device)) for p in params]


def give_gradients(params: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.device, p.dtype)


def bits(t: Tensor) -> Tensor:
    return t.detach().cpu().clone().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize])


def snapshot(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[Tensor]:
    """Bit patterns of weights and state."""
    state = [t for p in params for t in optimizer.state.get(p, {}).values()]
    return [bits(t) for t in [*params, *state]]


def train(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range, found: float | None = None
) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.found_inf = None if found is None else torch.full((1,), found, device=params[0].device)
        optimizer.step()


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def stepped(optimizer: torch.optim.Optimizer, gradient: float = 1.0) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, gradient)
    optimizer.step()
