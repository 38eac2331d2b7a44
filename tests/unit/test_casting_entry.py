"""Forwards that run in steps, other methods than forward, threads that a forward starts: at the level, or refused."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.casting import (
    amp_level,
    auto_mixed_precision,
    cast_like,
    custom_mixed_precision,
    to_float,
    within,
)
from mpkit.formats import BF16

X = torch.rand(3, 4)
W = torch.rand(4, 4)


def ran(coroutine: Any) -> Any:
    """In a thread of its own: Playwright keeps a running event loop in the test process's first one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


class Plain(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [x @ W, (x @ W) * 1.1]


class Generator(nn.Module):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield x @ W
        yield (x @ W) * 1.1


class Coroutine(nn.Module):
    async def forward(self, x: Tensor) -> list[Tensor]:
        y = x @ W
        await asyncio.sleep(0)
        return [y, (x @ W) * 1.1]


class Several(nn.Module):
    """Entry points other than forward, and one that computes in a thread."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) @ W)

    def forward(self, x: Tensor, *, threaded: bool = False) -> Tensor:
        found: list[Tensor] = []

        def work() -> None:
            with within(self):
                found.append(self.encode(x))

        if threaded:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        else:
            found.append(self.encode(x))
        return found[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, BF16], ids=["native", "emulated"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto"])
def test_another_entry_point_and_a_thread_compute_at_the_level_within_it(level: str, dtype: Any) -> None:
    network = auto_mixed_precision(Several(), level, dtype)
    want = network(X)
    assert torch.equal(network(X, threaded=True), want)
    with within(network):
        got = network.encode(X)
    assert torch.equal(got.float(), want)
    got.float().sum().backward()
    grad = network.inner.weight.grad.clone()
    network.zero_grad()
    network(X).sum().backward()
    assert torch.equal(network.inner.weight.grad, grad)
    assert torch.equal(X @ W, torch.mm(X, W))  # nothing is cast outside


def silent(call: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")  # torch.compile on that one version
        return call()


def past(call: Callable[[], Any]) -> None:
    """A call past the level. Where a 16-bit result of a module then meets float32, torch refuses."""
    with contextlib.suppress(RuntimeError):
        call()


class Worker(Several):
    """Its forward starts a thread that does not ask for the level; it also has an encode of its own."""

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        return super().encode(x)

    def generate(self, x: Tensor) -> Tensor:
        return self(self(x)).argmax(-1)

    def forward(self, x: Tensor, *, threaded: bool = False) -> Tensor:
        found: list[Any] = []

        def work() -> None:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self.inner(x)
            found.extend(caught)

        if threaded:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            assert "within" in str(found[0].message)
        return super().encode(x)


PUT: dict[str, Callable[[nn.Module], Any]] = {
    **{f"level {x}": lambda n, x=x: auto_mixed_precision(n, x, torch.bfloat16) for x in ("O1", "O2", "O3", "auto")},
    "level torch_autocast": lambda n: cast_like(n, "torch_autocast"),
    "own list": lambda n: custom_mixed_precision(n, white_list=[torch.matmul]),
    "own": lambda n: to_float(n, torch.bfloat16),
    "own by part": lambda n: (to_float(n.inner, torch.bfloat16), to_float(n, torch.bfloat16)),
}


class Projection(nn.Module):
    """Its methods and a property compute with parameters alone, and call no module."""

    penalty: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.rand(4, 4))
        self.more = nn.ParameterList([torch.rand(4, 4)])
        self.inner = nn.Linear(4, 4)
        self.uncertainty = nn.Parameter(torch.zeros(2))
        self.register_buffer("anchor", torch.rand(4, 4))

    @torch.no_grad()
    def listed(self, x: Tensor) -> Tensor:
        return torch.stack([x @ w.T for w in self.more])

    def tied(self, x: Tensor) -> Tensor:
        return F.linear(x, self.inner.weight)

    @property
    def scaled(self) -> Tensor:
        return W @ self.weight

    def project(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.T)

    def named(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ getattr(self, "weight", x).T)

    def dotted(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.get_parameter("inner.weight"))

    def streamed(self, x: Tensor) -> Iterator[Tensor]:
        yield x
        yield torch.tanh(x @ self.weight.T)

    async def awaited(self, x: Tensor) -> Tensor:
        await asyncio.sleep(0)
        return torch.tanh(x @ self.weight.T)

    def penalties(self) -> Tensor:
        away = ((self.weight - self.anchor) ** 2).sum() + self.weight.norm()
        return away + (self.weight.T @ self.weight - torch.eye(4)).abs().sum()

    def loss(self, y: Tensor) -> Tensor:
        return torch.exp(-self.uncertainty[0]) * F.mse_loss(y, torch.zeros_like(y)) + self.penalties()

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.project(x)) + self.listed(x).sum() + self.scaled


def driven(coroutine: Any) -> Any:
    """In this thread, where the level is, without its event loop, which may be Playwright's."""
    try:
        while True:
            coroutine.send(None)
    except StopIteration as end:
        return end.value


METHODS: dict[str, Callable[[Any], Any]] = {
    "project": lambda n: n.project(X),
    "tied": lambda n: n.tied(X),
    "listed": lambda n: n.listed(X),
    "scaled": lambda n: n.scaled,
    "named": lambda n: n.named(X),
    "dotted": lambda n: n.dotted(X),
    "streamed": lambda n: torch.stack(list(n.streamed(X))),
    "awaited": lambda n: driven(n.awaited(X)),
}


@pytest.mark.parametrize("put", PUT)
def test_forwards_penalties_and_losses_with_parameters_say_nothing(put: str) -> None:
    network = Projection()
    plain = network.penalties(), network.loss(X)
    PUT[put](network)
    silent(lambda: network(X[0] * W))
    assert plain == silent(lambda: (network.penalties(), network.loss(X)))


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))

    def project(self, x: Tensor) -> Tensor:
        return F.relu(x @ self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x)


def test_within_is_for_modules_at_a_level() -> None:
    with pytest.raises(TypeError, match=r"nn\.Module"), within(3):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="no level"), within(nn.Linear(2, 2)):
        pass
    for network in (
        to_float(nn.Linear(2, 2), torch.float16),
        cast_like(nn.Linear(2, 2), "keras_mixed_float16"),
        custom_mixed_precision(nn.Linear(2, 2), black_list=[nn.LayerNorm]),
    ):
        with within(network):
            assert (network.weight * 1.0).dtype is torch.float16
    assert amp_level(network) == ""


def test_a_traced_network_is_cast() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert auto_mixed_precision(traced, "O2", torch.bfloat16)(X).dtype is torch.float32


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto"])
def test_what_is_no_tensor_is_refused_by_torch_itself(level: str) -> None:
    for layer in (nn.Linear(2, 2), nn.ReLU(), nn.Conv1d(2, 2, 1)):
        network = auto_mixed_precision(nn.Sequential(layer, nn.ReLU()), level, torch.bfloat16)
        for nothing in (None, [1.0, 2.0]):
            with pytest.raises(TypeError, match="Tensor"):
                network(nothing)


def test_a_preset_that_is_a_list_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match="preset must be a name"):
        cast_like(nn.Linear(2, 2), ["x"])  # type: ignore[arg-type]
