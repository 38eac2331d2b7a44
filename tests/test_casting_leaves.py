"""Modules of torch that run without their mode compute what they compute under it, bit for bit, or run under it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mpkit.casting import auto_mixed_precision, cast_like, leaves, ledger
from mpkit.casting import forward as forward_module
from mpkit.formats import E4M3FN

bf16 = torch.bfloat16
IMAGE, ROW, IDS = (2, 4, 8, 8), (3, 4, 8), (3, 5)
KINDS: dict[type[nn.Module], tuple[tuple[Any, ...], tuple[int, ...]]] = {
    nn.ReLU: ((), ROW),
    nn.Linear: ((8, 5), ROW),
    nn.Conv1d: ((4, 3, 3), ROW),
    nn.Conv2d: ((4, 3, 3), IMAGE),
    nn.Conv3d: ((2, 3, 2), (1, 2, 4, 4, 4)),
    nn.AdaptiveAvgPool1d: ((2,), ROW),
    nn.AdaptiveAvgPool2d: ((2,), IMAGE),
    nn.AvgPool1d: ((2,), ROW),
    nn.AvgPool2d: ((2,), IMAGE),
    nn.BatchNorm1d: ((4,), ROW),
    nn.BatchNorm2d: ((4,), IMAGE),
    nn.BatchNorm3d: ((2,), (2, 2, 3, 3, 3)),
    nn.Embedding: ((7, 4), IDS),
    nn.GroupNorm: ((2, 4), IMAGE),
    nn.LayerNorm: ((8,), ROW),
    nn.LogSoftmax: ((-1,), ROW),
    nn.MaxPool1d: ((2,), ROW),
    nn.MaxPool2d: ((2,), IMAGE),
    nn.RMSNorm: ((8,), ROW),
    nn.Softmax: ((-1,), ROW),
}
TREATMENTS = ["O1", "O2", "O3", "auto", "apex_O1", "apex_O2", "keras_mixed_bfloat16", "torch_autocast"]


class Holder(nn.Module):
    """A module of torch inside a forward: what it is given and gives is used by operations, too."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.leaf = kind(*KINDS.get(kind, ((), ROW))[0])
        for p in self.leaf.parameters():
            nn.init.normal_(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.leaf(x) * 1.01


def given(kind: type[nn.Module]) -> Tensor:
    shape = KINDS.get(kind, ((), ROW))[1]
    random = torch.Generator().manual_seed(1)
    return torch.randint(7, shape, generator=random) if shape is IDS else torch.randn(shape, generator=random) * 3


def cast(network: nn.Module, level: str, dtype: Any = bf16) -> nn.Module:
    return cast_like(network, level, dtype) if "_" in level else auto_mixed_precision(network, level, dtype)


def trained(network: nn.Module, x: Tensor) -> list[Any]:
    torch.manual_seed(2)
    x = x.clone().requires_grad_() if x.is_floating_point() else x
    y = network(x)
    if y.requires_grad:
        (y.float() * torch.arange(1.0, y.numel() + 1).view_as(y)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in network.parameters()), *network.buffers()]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        x is y is None or (x.dtype is y.dtype and torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)))
        for x, y in zip(a, b)
    )


@pytest.mark.parametrize("kind", sorted(leaves.LEAVES, key=lambda kind: kind.__name__))
def test_a_module_without_its_mode_computes_what_it_computes_under_it(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype in (bf16, torch.float16, E4M3FN):
        for level in TREATMENTS if dtype is bf16 else ("O1", "O2", "auto"):
            for evaluated in (False, True):
                network = cast(Holder(kind).train(not evaluated), level, dtype)
                twin = copy.deepcopy(network)
                got = trained(network, given(kind))
                with monkeypatch.context() as patched:
                    patched.setattr(forward_module, "LEAVES", frozenset())
                    want = trained(twin, given(kind))
                assert same(got, want), (level, dtype, evaluated)


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", sorted(leaves.LEAVES, key=lambda kind: kind.__name__))
def test_the_operation_of_a_module_is_the_one_that_a_mode_sees(kind: type[nn.Module]) -> None:
    with Seen() as seen:
        Holder(kind).leaf(given(kind))
    names = [name for name in seen.names if name not in ("dim", "add_", "__get__", "normal_", "fill_", "zero_")]
    built = names[: -1 if names else None]
    assert leaves.operation(kind) == (names[-1] if names and kind is not nn.Identity else "")
    assert not set(built) & {leaves.operation(kind)} or not leaves.operation(kind)


class Casts(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def operations(network: nn.Module, x: Tensor) -> list[str]:
    """The dtypes that the module's operation was seen to get and give, by a ledger."""
    with ledger(network) as book:
        network(x)
    return [row.compute for row in book.rows if row.module == "leaf"]


@pytest.mark.parametrize("level", ["O1", "O2", "auto"])
def test_a_ledger_still_sees_the_modules(level: str) -> None:
    for kind in (nn.Linear, nn.LayerNorm, nn.GELU, nn.BatchNorm2d):
        assert operations(cast(Holder(kind), level), given(kind))


def _patched_class(network: Any, patch: pytest.MonkeyPatch) -> None:
    original = type(network.leaf).forward
    patch.setattr(type(network.leaf), "forward", lambda module, x: torch.exp(original(module, x) * 0.1))


def _replaced_weight(network: Any, patch: pytest.MonkeyPatch) -> None:
    weight = network.leaf.weight.detach().double()
    del network.leaf._parameters["weight"]
    network.leaf.__dict__["weight"] = weight


def _wide(network: Any, patch: pytest.MonkeyPatch) -> None:
    network.leaf.double()


def _in_place(network: Any, patch: pytest.MonkeyPatch) -> None:
    network.leaf.inplace = True


def _reflected(network: Any, patch: pytest.MonkeyPatch) -> None:
    network.leaf = cast(nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"), "auto")


def _own_forward(network: Any, patch: pytest.MonkeyPatch) -> None:
    network.leaf.forward = lambda x: torch.exp(x * 0.1)


CHANGES: list[tuple[type[nn.Module], Callable[..., None]]] = [
    (nn.LayerNorm, _patched_class),
    (nn.GELU, _patched_class),
    (nn.Linear, _patched_class),
    (nn.LayerNorm, _replaced_weight),
    (nn.LayerNorm, _wide),
    (nn.BatchNorm2d, _wide),
    (nn.ReLU, _in_place),
    (nn.SiLU, _in_place),
    (nn.Conv2d, _reflected),
    (nn.GELU, _own_forward),
]


@pytest.mark.parametrize(("kind", "change"), CHANGES)
@pytest.mark.parametrize("level", ["O1", "O2", "auto"])
def test_a_module_that_somebody_changed_runs_under_its_mode(
    level: str, kind: type[nn.Module], change: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for aside in (True, False):
        network = cast(Holder(kind), level)
        network(given(kind))  # what is known of the class is found out before it changes
        with monkeypatch.context() as patch:
            change(network, patch)
            if not aside:
                patch.setattr(forward_module, "LEAVES", frozenset())
            torch.manual_seed(3)
            x = given(kind)
            try:
                results.append([network(x).detach(), x])
            except RuntimeError as error:
                results.append(str(error))  # type: ignore[arg-type]
    assert results[0] == results[1] if isinstance(results[0], str) else same(*results)


def test_a_mode_of_somebody_else_inside_sees_the_modules() -> None:
    class Logged(Holder):
        def forward(self, x: Tensor) -> Tensor:
            with Seen() as self.seen:
                return self.leaf(x)

    network = cast(Logged(nn.LayerNorm), "O1")
    network(given(nn.LayerNorm))
    assert network.seen.names == ["layer_norm"]


def test_a_weight_used_often_is_cast_twice_and_its_gradients_add_up_in_float32() -> None:
    class Often(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = nn.Linear(1, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.leaf(x) for _ in range(600)]).sum(0)

    network = cast(Often(), "auto")
    x = torch.ones(4, 1, dtype=bf16)  # so that nothing but the weight is cast
    with Casts() as casts:
        y = network.forward(x)
    assert casts.count == 2 + 1  # and one of the stack, for the sum
    y.sum().backward()
    assert network.leaf.weight.grad.item() == 2400.0  # in 16 bits the sum stays at 1024
