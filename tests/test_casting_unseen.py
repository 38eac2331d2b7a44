"""What casting cannot see as it happens: writes that no version counts, the first run of what is run again, nesting.

Each test compares with a network in which nothing has to be seen: a native dtype, fresh networks, dense tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mpkit.casting import auto_mixed_precision, ledger, to_float, within
from mpkit.formats import BF16, E4M3FN, E5M2, FloatFormat
from mpkit.rounding import round_to

bf16 = torch.bfloat16
LEVELS = ("O1", "O2", "O3", "auto")


class Apply(nn.Module):
    """A forward that is one function of the module and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


@pytest.mark.parametrize("dtype", [bf16, BF16], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_written_through_data_is_cast_anew(level: str, dtype: torch.dtype | FloatFormat) -> None:
    """`w.data` shares the memory of `w` and counts its writes apart."""

    def forward(self: Any, x: Tensor) -> Tensor:
        found = []
        for value in range(5):
            self.w.data.fill_(float(value))
            found.append((x @ self.w)[0, 0])
        return torch.stack(found)

    network = auto_mixed_precision(Apply(forward, w=nn.Parameter(torch.ones(2, 2))), level, dtype)
    assert network(torch.ones(1, 2)).tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]


@pytest.mark.parametrize("dtype", [bf16, BF16], ids=str)
def test_a_block_at_a_level_keeps_no_cast_from_one_forward_to_the_next(dtype: torch.dtype | FloatFormat) -> None:
    network = auto_mixed_precision(
        Apply(lambda self, x: (x @ self.w) @ self.w, w=nn.Parameter(torch.eye(2))), "O1", dtype
    )
    values = network.w.detach().numpy()  # nobody can see what is written here
    with within(network):
        for value in range(4):
            values[...] = value * torch.eye(2).numpy()
            assert network(torch.ones(1, 2)).tolist() == [[value**2, value**2]]


@pytest.mark.parametrize(
    "shown", [lambda y: y, lambda y: y[:, :1].expand(2, 3), torch.t], ids=["whole", "expanded", "t"]
)
@pytest.mark.parametrize("way", ["data", "numpy", "inference"])
def test_what_is_written_between_networks_is_rounded_as_a_native_tensor_rounds_it(
    way: str, shown: Callable[[Tensor], Tensor]
) -> None:
    first = to_float(Apply(lambda self, x: shown(torch.relu(x))), E4M3FN)
    second = to_float(nn.ReLU(), E4M3FN)
    with torch.inference_mode(way == "inference"):
        y = first(torch.tensor([[1.0, -2.0], [0.5, 3.0]]))
        into = {"data": lambda: y.data, "numpy": lambda: torch.from_numpy(y.numpy()), "inference": lambda: y}[way]()
        into[:, 0] += 0.0123
        wanted = round_to(y.clone(), E4M3FN)
        assert torch.equal(second(y), wanted)
        assert torch.equal(y, wanted)


@pytest.mark.parametrize("dtype", [bf16, E5M2], ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("saved", [("mm",), ("mm", "_to_copy")], ids="+".join)
def test_selective_checkpoints_find_the_casts_that_the_first_run_made(
    level: str, dtype: torch.dtype | FloatFormat, saved: tuple[str, ...]
) -> None:
    """A weight is used before the checkpoint and several times in it, so some of its casts were kept."""
    kept = [getattr(torch.ops.aten, name).default for name in saved]

    def policy(_: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

    def body(self: Any, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w) @ self.w + x @ self.w

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    grads = []
    for forward in (body, lambda s, x: checkpoint(body, s, x, use_reentrant=False, context_fn=contexts)):
        torch.manual_seed(0)
        network = Apply(lambda self, x, f=forward: f(self, x @ self.w), w=nn.Parameter(torch.randn(3, 3)))  # type: ignore[misc]
        auto_mixed_precision(network, level, dtype)(torch.ones(1, 3)).sum().backward()
        grads.append(network.w.grad)
    assert torch.equal(*grads)


def test_a_ledger_stays_on_its_path_when_a_hook_before_its_own_raises() -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not today")

    def forward(self: Any, x: Tensor) -> Tensor:
        with pytest.raises(ValueError, match="not today"):
            self.a(x)
        return self.b(x * 2)

    network = Apply(forward, a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    network.a.register_forward_pre_hook(refuse)
    with ledger(network) as book:
        network(torch.ones(1, 2))
    assert [(row.module, row.operation) for row in book.rows] == [("", "mul"), ("b", "linear")]


def nested(layout: torch.layout, parts: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(parts, layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("dtype", [bf16, E4M3FN], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_nested_tensors_compute_as_their_parts_do(
    level: str, dtype: torch.dtype | FloatFormat, layout: torch.layout
) -> None:
    # small whole numbers, so that every sum of products is exact in whatever order
    parts = [torch.randint(-3, 4, (n, 4)).float() + 0.01 for n in (2, 3)]
    network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(torch.randint(-2, 3, p.shape)).add_(0.001)
    auto_mixed_precision(network, level, dtype)
    for count in (False, True):
        grads = []
        for x in (nested(layout, parts), torch.cat(parts)):
            network.zero_grad()
            with ledger(network, count=count) if count else torch.enable_grad():
                y = network(x)
            flat = torch.cat(y.unbind()) if y.is_nested else y
            flat.float().sum().backward()
            grads.append([flat, *(p.grad for p in network.parameters())])
        for ours, dense in zip(*grads):
            assert torch.equal(ours, dense)
