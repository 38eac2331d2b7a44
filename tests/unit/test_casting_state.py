"""What casting remembers between operations: kept casts, rules in recomputation, formats of tensors, marks on modules.

Each test compares with a network in which nothing can be remembered wrongly: casts written out by hand, a native dtype,
the same network without checkpoints, or without a ledger.
"""

from __future__ import annotations

import copy
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import Written, assert_same
from test_casting import CASTING_LEVELS, tensors
from test_casting_writes import Calls
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from mpkit.casting import LEVELS, PRESETS, auto_mixed_precision, cast_like, ledger, remove_mixed_precision, to_float
from mpkit.formats import BF16, E4M3FN, E5M2, FP16
from mpkit.rounding import round_to

bf16 = torch.bfloat16


def trained(network: nn.Module, *args: Any) -> list[Tensor]:
    """The results of a forward and the gradients of what it was trained by."""
    network.zero_grad()
    out = network(*args)
    floats = [x.float() for x in tensors(out)]
    torch.stack([(x * torch.linspace(0.5, 1.5, x.numel()).view_as(x)).sum() for x in floats]).sum().backward()
    return [*(x.detach() for x in floats), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]


# --- kept casts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [bf16, E4M3FN], ids=str)
@pytest.mark.parametrize("level", CASTING_LEVELS)
def test_a_parameter_made_in_a_forward_never_inherits_the_cast_of_a_dead_one(level: str, dtype: Any) -> None:
    def made_anew(_: nn.Module, x: Tensor) -> Tensor:
        return torch.stack([(x @ nn.Parameter(torch.full((8, 8), float(2**i))))[0, 0] for i in range(9)])

    got = auto_mixed_precision(Written(made_anew), level, dtype)(torch.eye(8))
    assert got.tolist() == [2.0**i if dtype is bf16 or i < 9 else torch.nan for i in range(9)]


def test_a_parameter_whose_memory_is_replaced_is_cast_anew() -> None:
    def swapped(module: Any, x: Tensor) -> Tensor:
        before = x @ module.w
        old, module.w.data = module.w.data, 2 * module.w.data
        between = x @ module.w
        module.w.data = old
        return torch.stack([before, between, x @ module.w])

    network = auto_mixed_precision(Written(swapped, w=nn.Parameter(torch.eye(3))), "O3", bf16)
    assert [y[0, 0].item() for y in network(torch.eye(3))] == [1.0, 2.0, 1.0]


def test_offloaded_weights_are_their_own() -> None:
    """As accelerate does: weights are put in before each module's forward and taken out after it."""
    torch.manual_seed(0)
    network = nn.Sequential(*[nn.Linear(16, 16) for _ in range(24)])
    x = torch.randn(4, 16)
    want = auto_mixed_precision(copy.deepcopy(network), "O2", bf16)(x)
    stored = {name: p.detach().clone() for name, p in network.named_parameters()}
    auto_mixed_precision(network, "O2", bf16)

    def put_in(module: nn.Module, _: Any, name: str) -> None:
        for part in ("weight", "bias"):
            module._parameters[part] = nn.Parameter(stored[f"{name}.{part}"].clone())

    def take_out(module: nn.Module, *_: Any) -> None:
        module._parameters.update(weight=None, bias=None)

    for name, module in network.named_children():
        take_out(module)
        module.register_forward_pre_hook(functools.partial(put_in, name=name))
        module.register_forward_hook(take_out)
    with torch.no_grad():
        assert torch.equal(network(x), want)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("level", CASTING_LEVELS)
def test_gradients_of_a_weight_used_many_times_add_up_in_float32(level: str, watched: bool) -> None:
    """600 gradients of 4 each: in bfloat16 the sum would stop at 1024."""

    def often(module: Any, x: Tensor) -> Tensor:
        return sum((module.linear(x).float() for _ in range(600)), torch.zeros(()))  # type: ignore[return-value]

    network = auto_mixed_precision(Written(often, linear=nn.Linear(3, 2)), level, bf16)
    x = torch.ones(4, 3)
    if watched:
        with ledger(network) as book:
            network(x).sum().backward()
        assert len([cast for cast in book.casts if cast.tensor == "linear.weight"]) == 1
    else:
        network(x).sum().backward()
    for p in network.parameters():
        assert p.grad is not None
        assert torch.equal(p.grad, torch.full_like(p, 2400.0))


@pytest.mark.parametrize("level", CASTING_LEVELS)
def test_a_weight_used_a_hundred_times_is_saved_once(level: str) -> None:
    def steps(module: Any, x: Tensor) -> Tensor:
        h = torch.zeros(4, 64)
        for row in x:
            h = module.cell(row, h)
        return h

    def saved(network: nn.Module) -> int:
        own, seen = {p.data_ptr() for p in network.parameters()}, {}

        def pack(x: Tensor) -> Tensor:
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes(), x
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            network(torch.ones(100, 4, 32)).float().sum().backward()
        return sum(size for key, (size, _) in seen.items() if key not in own)

    network = Written(steps, cell=nn.GRUCell(32, 64))
    wide = saved(network)
    assert saved(auto_mixed_precision(network, level, bf16)) < 1.3 * wide
    grad = network.cell.weight_hh.grad
    assert (grad != grad.bfloat16()).any()  # added up in float32


def test_a_frozen_weight_and_one_without_gradients_share_the_cast_too() -> None:
    def twice(module: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            first = x @ module.w
        return first + x @ module.w + x @ module.frozen + x @ module.frozen

    parts = {"w": nn.Parameter(torch.eye(2)), "frozen": nn.Parameter(torch.eye(2), requires_grad=False)}
    network = auto_mixed_precision(Written(twice, **parts), "O3", bf16)
    with ledger(network) as book:
        network(torch.ones(2, 2)).sum().backward()
    assert sorted(cast.tensor for cast in book.casts if cast.tensor != "activation") == ["frozen", "w"]
    assert network.w.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert network.frozen.grad is None


def test_higher_gradients_go_through_a_kept_cast() -> None:
    def twice(module: Any, x: Tensor) -> Tensor:
        return ((x * module.w) * module.w).sum()

    network = auto_mixed_precision(Written(twice, w=nn.Parameter(torch.tensor([3.0]))), "O3", bf16)
    (first,) = torch.autograd.grad(network(torch.tensor([2.0])), network.w, create_graph=True)
    assert first.item() == 12.0
    assert torch.autograd.grad(first, network.w)[0].item() == 4.0  # d2/dw2 of 2 w**2


# --- recomputation ----------------------------------------------------------------------------------------------------

REENTRANT = [True, False]


class Blocks(nn.Module):
    """Functions of many kinds that may be checkpointed: a lambda, a method, a nested one, a module, a chunked loss."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(6, 6) / 2)
        self.block = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 6))
        self.reentrant = reentrant

    def again(self, function: Any, *args: Any) -> Any:
        if self.reentrant is None:
            return function(*args)
        return checkpoint(function, *args, use_reentrant=self.reentrant)

    def method(self, x: Tensor) -> Tensor:
        return F.softmax(x @ self.w, -1) + self.block(x)

    def forward(self, x: Tensor) -> Tensor:
        y = self.again(lambda y: torch.tanh(y @ self.w), x)
        y = self.again(self.method, y)
        y = self.again(lambda y: self.again(self.method, y) * 2, y)
        y = self.again(self.block, y)
        return torch.stack([self.again(lambda c: F.mse_loss(c @ self.w, c * 0), c) for c in y.chunk(2)]).sum()


@pytest.mark.parametrize("reentrant", REENTRANT)
@pytest.mark.parametrize("dtype", [bf16, torch.float16, BF16], ids=str)
@pytest.mark.parametrize("level", [*CASTING_LEVELS, "apex_O1", "torch_autocast", "keras_mixed_bfloat16"])
def test_checkpointed_functions_are_recomputed_as_they_were_computed(level: str, dtype: Any, reentrant: bool) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found = []
    for kind in (None, reentrant):
        network = Blocks(kind)
        (cast_like if level in PRESETS else auto_mixed_precision)(network, level, dtype)
        found.append(trained(network, x))
    for a, b in zip(*found):  # a weight's gradients are added up in another order
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E5M2], ids=str)
def test_a_selective_checkpoint_of_a_weight_that_was_used_before(dtype: Any) -> None:
    def run(module: nn.Module, x: Tensor) -> Tensor:
        def keeps() -> Any:
            return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

        return checkpoint(module.part, module.part(module.part(x)), use_reentrant=False, context_fn=keeps)

    network = auto_mixed_precision(Calls(run, nn.Linear(4, 4)), "O2", dtype)
    network(torch.randn(3, 4)).sum().backward()
    assert network.part.weight.grad is not None


def test_checkpoint_outside_of_a_cast_forward_is_torchs_own() -> None:
    w = torch.randn(3, 3, requires_grad=True)
    checkpoint(lambda x: x * w, torch.full((3, 3), 3.0, requires_grad=True), use_reentrant=False).sum().backward()
    assert torch.equal(w.grad, torch.full((3, 3), 3.0))  # type: ignore[arg-type]
    layers = nn.Sequential(*[auto_mixed_precision(nn.Linear(3, 3), "O2", bf16) for _ in range(2)])
    out = checkpoint_sequential(layers, 2, torch.ones(1, 3, requires_grad=True), use_reentrant=False)
    out.sum().backward()
    assert torch.equal(out, layers(torch.ones(1, 3)))


def test_a_level_changed_before_the_backward_pass_does_not_change_the_recomputation() -> None:
    def part(module: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda y: torch.tanh(y @ module.w), x, use_reentrant=False)

    def run(change: bool) -> Tensor:
        network = auto_mixed_precision(Written(part, w=nn.Parameter(torch.full((2, 2), 0.3))), "O3", bf16)
        loss = network(torch.full((2, 2), 0.7)).sum()
        if change:
            remove_mixed_precision(network)
        loss.backward()
        return network.w.grad  # type: ignore[return-value]

    assert torch.equal(run(True), run(False))


@pytest.mark.parametrize("reentrant", REENTRANT)
@pytest.mark.parametrize("dtype", [bf16, E4M3FN], ids=str)
@pytest.mark.parametrize("level", CASTING_LEVELS)
def test_a_backward_pass_inside_a_ledger_recomputes_with_its_casts(level: str, dtype: Any, reentrant: bool) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    want = trained(auto_mixed_precision(Blocks(None), level, dtype), x)
    network = auto_mixed_precision(Blocks(reentrant), level, dtype)
    with ledger(network):
        got = trained(network, x)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_a_gradient_taken_inside_a_forward_recomputes_with_its_casts(level: str) -> None:
    def slope(module: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(module.net(x).sum(), x)[0]

    x = torch.randn(4, 6)
    got, want = (auto_mixed_precision(Written(slope, net=Blocks(kind)), level, bf16)(x) for kind in (False, None))
    assert torch.equal(got, want)


# --- the format of a tensor -------------------------------------------------------------------------------------------


def test_gradients_flow_through_views_and_writes_as_natively() -> None:
    def writes(_: Any, x: Tensor) -> Tensor:
        y = x * 1
        y.diagonal().mul_(0.3)
        y.T[0].tanh_()
        return y * y

    found = []
    for dtype in (FP16, torch.float16):
        x = torch.linspace(-3, 3, 16).view(4, 4).requires_grad_()
        out = auto_mixed_precision(Written(writes), "O3", dtype)(x)
        out.sum().backward()
        found.append((out, x.grad))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=2**-9, atol=2**-12)


@pytest.mark.parametrize("change", [lambda y: y.detach_().add_(0.0123), lambda y: y.data.add_(0.0123)])
def test_a_tensor_bound_to_a_format_rounds_what_is_written_into_it(change: Callable[[Tensor], Any]) -> None:
    def forward(_: Any, x: Tensor) -> Tensor:
        y = x * 1
        change(y)
        return y * 1

    x = torch.linspace(0, 1, 7)
    got = auto_mixed_precision(Written(forward), "O3", E4M3FN)(x)
    assert torch.equal(got, round_to(round_to(x, E4M3FN) + round_to(torch.tensor(0.0123), FP16), E4M3FN))


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_what_is_loaded_into_a_buffer_in_a_format_is_rounded(level: str) -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            out = x + self.seen
            self.seen = x * 1
            return out

    network = auto_mixed_precision(Remembers(), level, FP16)
    network(torch.ones(3))
    network.load_state_dict({"seen": torch.full((3,), 1 + 2.0**-12)})
    assert network(torch.zeros(3)).tolist() == [1.0] * 3


# --- ledgers ----------------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Everything that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, 2, dropout=0.5)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5)
        self.drops = nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.Dropout1d(0.5), nn.RReLU())

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        y = y + self.attention(y, y, y)[0] + F.scaled_dot_product_attention(y, y, y, dropout_p=0.5)
        y = self.drops(y) + torch.poisson(y.abs().float()) + torch.randn_like(y) + torch.bernoulli(y.float().sigmoid())
        return y + torch.empty_like(y).uniform_() + F.gumbel_softmax(y, -1)


@pytest.mark.parametrize("count", [False, True])
@pytest.mark.parametrize("dtype", [bf16, E4M3FN], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_a_ledger_draws_no_random_number(level: str, dtype: Any, count: bool) -> None:
    torch.manual_seed(0)
    network = auto_mixed_precision(Noisy(), level, dtype)
    x = torch.randn(5, 2, 4)
    torch.manual_seed(1)
    want = trained(network, x)
    end = torch.get_rng_state()
    torch.manual_seed(1)
    with ledger(network, count=count):
        got = trained(network, x)
    assert_same(got, want)
    assert torch.equal(torch.get_rng_state(), end)


def test_ledgers_inside_each_other_write_the_same_rows() -> None:
    network = auto_mixed_precision(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), "O2", bf16)
    x = torch.ones(2, 3)
    with ledger(network) as alone:
        network(x)
    with ledger(network) as outer, ledger(network, count=True) as inner:
        network(x)
    assert len(alone.rows) == 2
    assert (outer.rows, outer.casts) == (alone.rows, alone.casts)
    told = [[(row.operation, row.compute, row.casts) for row in book.rows] for book in (inner, alone)]
    assert told[0] == told[1]
    assert inner.rows[0].flushed == 0
    whole = nn.Sequential(network, nn.Tanh())
    with ledger(whole) as of_whole:
        whole(x)
        with ledger(network) as of_part:
            whole(x)
        whole(x)
    assert [row.module for row in of_part.rows] == ["0", "1"]
    assert [row.module for row in of_whole.rows] == ["0.0", "0.1", "1"] * 3


# --- marks on modules -------------------------------------------------------------------------------------------------


def wrapped_as_accelerate_does(network: Any) -> None:
    network._old_forward = network.forward

    def new_forward(module: Any, *args: Any) -> Any:
        return module._old_forward(*args)

    network.forward = functools.update_wrapper(functools.partial(new_forward, network), network._old_forward)


def test_a_forward_wrapped_after_the_level_follows_changes_and_removal() -> None:
    def computed(network: nn.Module) -> list[str]:
        with ledger(network) as book:
            network(torch.ones(1, 2))
        return [row.compute for row in book.rows]

    network = auto_mixed_precision(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), "O2", bf16)
    for module in network.modules():
        wrapped_as_accelerate_does(module)
    assert computed(network) == ["bfloat16"] * 2
    with pytest.warns(UserWarning, match="'O2'.*'O3'"):
        auto_mixed_precision(network, "O3", torch.float16)
    assert computed(network) == ["float16"] * 2
    to_float(network[1], torch.float32)
    assert computed(network) == ["float16", "float32"]
    remove_mixed_precision(network)
    assert computed(network) == ["float32"] * 2
    x = torch.rand(3, 2)
    assert torch.equal(network(x), torch.tanh(F.linear(x, network[0].weight, network[0].bias)))
    assert torch.equal(copy.deepcopy(network)(x), network(x))


class Described(nn.Module):
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x * scale


def test_forward_tells_its_arguments_as_without_a_level() -> None:
    network = auto_mixed_precision(Described(), "O2", torch.bfloat16)
    assert typing.get_type_hints(network.forward) == typing.get_type_hints(Described.forward)
    assert inspect.signature(network.forward) == inspect.signature(Described().forward)
    assert not hasattr(network.forward, "__func__")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_export_and_transforms_of_an_emulated_format_are_refused_with_the_way_out(strict: bool) -> None:
    network = auto_mixed_precision(nn.Linear(2, 2), "O2", E5M2)
    with pytest.raises(Exception, match=r"take torch\.float16"):
        torch.export.export(network, (torch.ones(1, 2),), strict=strict)
    with pytest.raises(NotImplementedError, match=r"take torch\.float16"):
        torch.func.vmap(network)(torch.ones(1, 2))
    exported = torch.export.export(auto_mixed_precision(nn.Linear(2, 2), "O2"), (torch.ones(1, 2),), strict=strict)
    assert exported.module()(torch.ones(1, 2)).dtype is torch.float32
