"""Memory that several hold: views, lists that are written into, buffers, what NumPy sees, copies that share a mark.

Each test compares with the uncast network, a native dtype, or a fresh network to which nothing happened before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_casting import CASTING_LEVELS
from test_casting_state import Apply, assert_same, trained
from torch import Tensor, nn

from mpkit.casting import auto_mixed_precision, cast_like, ledger
from mpkit.casting.targets import Emulated, precision
from mpkit.formats import BF16, E4M3FN, E5M2
from mpkit.optimizers import Lamb
from mpkit.rounding import round_to

bf16 = torch.bfloat16
LOW = ["O2", "O3"]

# --- views of what is float32 at a level that casts everything --------------------------------------------------------

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "item": lambda b: b[1],
    "item of an item": lambda b: b[1][2:],
    "view": lambda b: b.view(-1),
    "t": lambda b: b.t(),
    "unbind": lambda b: b.unbind()[0],
    "chunk": lambda b: torch.chunk(b, 2)[1],
    "narrow": lambda b: b.narrow(0, 0, 2),
    "diagonal": lambda b: b.diagonal(),
    "data": lambda b: b.data.view(-1),
    "as_strided": lambda b: b.as_strided((2,), (1,)),
    "permute": lambda b: b.permute(1, 0)[0],
    "reshape": lambda b: b.reshape(2, 8),
}


class Holds(nn.Module):
    """Writes its layer's result through a view into a buffer, a frozen or a trained parameter, or zeros made there."""

    def __init__(self, kind: str, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.kind, self.view = nn.Linear(4, 4), kind, view
        self.register_buffer("buffer", torch.zeros(4, 4))
        self.frozen = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.trained = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        into = torch.zeros(4, 4) if self.kind == "zeros" else getattr(self, self.kind)
        with torch.set_grad_enabled(self.kind == "zeros"):
            self.view(into).add_(y.mean())
            self.view(into).mul_(1.5)
        return into + y


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", ["buffer", "frozen", "trained", "zeros"])
@pytest.mark.parametrize("dtype", [bf16, BF16], ids=str)
@pytest.mark.parametrize("level", [*LOW, "keras_mixed_bfloat16", "O1", "auto"])
def test_a_write_through_a_view_of_what_is_not_cast_yet_arrives(level: str, dtype: Any, kind: str, view: str) -> None:
    if kind == "zeros" and view in ("unbind", "chunk", "data"):
        pytest.skip("torch allows no write with a graph there")
    plain, network = Holds(kind, VIEWS[view]), Holds(kind, VIEWS[view])
    cast_like(network, level, dtype) if "_" in level else auto_mixed_precision(network, level, dtype)
    x = torch.linspace(-1, 2, 16).view(4, 4)
    with torch.no_grad() if kind != "zeros" else torch.enable_grad():
        got, want = network(x), plain(x)
    assert (got - want).abs().max() <= 0.02 * want.abs().max()  # some five roundings of 2^-9
    for a, b in zip((network.buffer, network.frozen, network.trained), (plain.buffer, plain.frozen, plain.trained)):
        assert (a - b).abs().max() <= 0.02 * want.abs().max()
    if kind == "zeros":
        for a, b in zip(trained(network, x), trained(plain, x)):
            assert (a - b).abs().max() <= 0.02 * b.abs().max()


@pytest.mark.parametrize("dtype", [bf16, E5M2], ids=str)
@pytest.mark.parametrize("level", LOW)
def test_what_is_computed_with_a_view_is_cast_as_the_whole_would_be(level: str, dtype: Any) -> None:
    table = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    through = Apply(lambda m, x: x @ m.table[2:].t().contiguous(), table=table)
    whole = Apply(lambda m, x: x @ m.table, table=table[2:].t().contiguous())
    x = torch.linspace(-1, 1, 12).view(3, 4)
    outs = [auto_mixed_precision(network, level, dtype)(x) for network in (through, whole)]
    assert torch.equal(*outs)
    with ledger(through) as book:
        through(x)
    assert book.rows[-1].compute == ("bfloat16" if dtype is bf16 else "e5m2")


# --- several tensors written into at once -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [bf16, E5M2, E4M3FN], ids=str)
@pytest.mark.parametrize("level", CASTING_LEVELS)
def test_an_operation_on_lists_writes_into_the_tensors_that_it_is_given(level: str, dtype: Any) -> None:
    def forward(module: Any, x: Tensor) -> Tensor:
        torch._foreach_mul_([module.mean], [0.5])
        torch._foreach_add_([module.mean], [torch.full((3,), 0.25)])
        return x

    network = Apply(forward)
    network.register_buffer("mean", torch.ones(3))
    auto_mixed_precision(network, level, dtype)(torch.zeros(3))
    assert network.mean.tolist() == [0.75] * 3
    assert network.mean.dtype is torch.float32


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("level", CASTING_LEVELS)
def test_an_optimizer_inside_a_forward_moves_the_weights(level: str, fused: bool) -> None:
    class Adapts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            options: dict[str, Any] = {"fused": True} if fused else {"foreach": True}
            optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1, **options)
            for _ in range(3):
                optimizer.zero_grad()
                self.layer(x).float().square().mean().backward()
                optimizer.step()
            return self.layer(x)

    network, plain, x = Adapts(), Adapts(), torch.linspace(-1, 2, 12).view(3, 4)
    auto_mixed_precision(network, level, bf16)
    network(x), plain(x)
    moved = (plain.layer.weight - Adapts().layer.weight).abs().max()
    assert (network.layer.weight - plain.layer.weight).abs().max() <= 0.05 * moved


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "AdamW one by one": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, foreach=False),
    "RMSprop foreach": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True, foreach=True),
    "Adafactor foreach": lambda p: torch.optim.Adafactor(p, foreach=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "ours": lambda p: Lamb(p, 0.1),
}


@pytest.mark.parametrize("dtype", [bf16, E5M2], ids=str)
@pytest.mark.parametrize("level", CASTING_LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_inside_a_forward_computes_as_one_outside(name: str, level: str, dtype: Any) -> None:
    """On the same gradients the weights and the states are the same, bit by bit, and what comes after is cast."""
    start = torch.linspace(-1, 1, 16).reshape(4, 4)
    given = [torch.linspace(-1, 2, 16).reshape(4, 4).roll(i) for i in range(3)]

    def updated(parameter: nn.Parameter) -> torch.optim.Optimizer:
        optimizer = OPTIMIZERS[name]([parameter])
        for grad in given:
            parameter.grad = grad.clone()
            optimizer.step(lambda: torch.tensor(1.0)) if name == "LBFGS" else optimizer.step()
        return optimizer

    def forward(module: Any, x: Tensor) -> Tensor:
        module.made = updated(module.w)
        module.computed = precision(x @ module.w)
        return x @ module.w

    want = nn.Parameter(start.clone())
    states = updated(want).state[want]
    network = auto_mixed_precision(Apply(forward, w=nn.Parameter(start.clone())), level, dtype)
    x = torch.eye(4)
    y = network(x)
    assert torch.equal(network.w, want)
    for key, value in network.made.state[network.w].items():
        assert not isinstance(value, Tensor) or torch.equal(value, states[key])
    wanted = Apply(lambda _, x: x @ want)
    assert torch.equal(y, auto_mixed_precision(wanted, level, dtype)(x))
    assert network.computed == (torch.float32 if level == "O1" else dtype if dtype is bf16 else Emulated(dtype, dtype))


def test_the_closure_of_a_step_is_cast_and_a_step_that_fails_does_no_harm_to_the_next_forward() -> None:
    seen: list[Any] = []

    def forward(module: Any, x: Tensor) -> Tensor:
        def loss() -> Tensor:
            seen.append((x @ module.w).dtype)
            if module.fails:
                raise ValueError("not today")
            module.w.grad = torch.ones(2, 2)
            return torch.tensor(1.0)

        optimizer = torch.optim.SGD([module.w], lr=0.1)
        optimizer.step(loss)
        seen.append((x @ module.w).dtype)
        return x

    network = auto_mixed_precision(Apply(forward, w=nn.Parameter(torch.eye(2)), fails=False), "O2", bf16)
    network(torch.ones(1, 2))
    network.fails = True
    with pytest.raises(ValueError, match="not today"):
        network(torch.ones(1, 2))
    network.fails = False
    network(torch.ones(1, 2))
    assert seen == [bf16] * 5


@pytest.mark.parametrize("dtype", [E5M2, E4M3FN], ids=str)
def test_a_format_rounds_what_an_operation_on_lists_writes_into_it(dtype: Any) -> None:
    def forward(_: Any, x: Tensor) -> Tensor:
        y = x * 1
        torch._foreach_add_([y], 0.0123)
        return y

    for level in LOW:
        y = auto_mixed_precision(Apply(forward), level, dtype)(torch.linspace(0, 1, 7))
        assert torch.equal(y, round_to(y, dtype))


@pytest.mark.parametrize("dtype", [bf16, torch.float16, BF16], ids=str)
@pytest.mark.parametrize("level", LOW)
def test_fake_quantisation_keeps_its_statistics(level: str, dtype: Any) -> None:
    def quantised(module: Any, x: Tensor) -> Tensor:
        on = torch.ones(1, dtype=torch.long)
        statistics = (module.low, module.high, module.scale, module.zero)
        y = torch.fused_moving_avg_obs_fake_quant(x, on, on, *statistics, 0.01, 0, 255, 0)
        return torch.fake_quantize_per_channel_affine(y, torch.full((4,), 0.1), torch.zeros(4), 1, -128, 127)

    def made() -> nn.Module:
        network = Apply(quantised, low=torch.tensor(torch.inf), high=torch.tensor(-torch.inf))
        network.scale, network.zero = torch.ones(1), torch.zeros(1, dtype=torch.int)  # type: ignore[assignment]
        return network

    x = torch.tensor([[-1.0, 0.5, 1.0, 2.0]])  # all in every format
    plain, network = made(), auto_mixed_precision(made(), level, dtype)
    assert (network(x) - plain(x)).abs().max() <= 2.0**-7
    assert [network.low, network.high, network.scale] == [plain.low, plain.high, plain.scale]


# --- marks of a format ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [*LOW, "auto"])
@pytest.mark.parametrize(
    "part",
    [lambda y: torch.unsafe_split(y, 2)[0], lambda y: y.unsafe_chunk(2)[1], torch.ops.aten.alias],
    ids=["unsafe_split", "unsafe_chunk", "alias"],
)
def test_a_write_into_a_part_that_torch_counts_apart_is_rounded(part: Callable[[Tensor], Tensor], level: str) -> None:
    def forward(_: Any, x: Tensor) -> Tensor:
        y = x @ torch.eye(4)
        with torch.no_grad():
            part(y).add_(0.0123)
        return torch.cat([y, y * 3])

    x = torch.linspace(-1, 1, 16).view(4, 4)
    emulated, native = (auto_mixed_precision(Apply(forward), level, dtype)(x) for dtype in (BF16, bf16))
    assert torch.equal(emulated, native.float())


@pytest.mark.parametrize("write", [lambda v: v.fill_(0.3), lambda v: v.zero_(), lambda v: v.__setitem__(0, 0.3)])
def test_an_expanded_tensor_of_a_format_is_filled_as_torch_fills_it(write: Callable[[Tensor], Any]) -> None:
    def forward(_: Any, x: Tensor) -> Tensor:
        y = x * 1
        with torch.no_grad():
            write(y[:1].expand(3, 4))
        return y

    emulated, native = (auto_mixed_precision(Apply(forward), "O2", dtype)(torch.ones(3, 4)) for dtype in (BF16, bf16))
    assert torch.equal(emulated, native)


class Remembers(nn.Module):
    """Assigns a mean to a buffer and to an attribute in its forward, and adds both later."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.state = torch.zeros(4)

    def forward(self, x: Tensor, learns: bool = True) -> Tensor:
        if learns:
            self.mean, self.state = x.mean(0), x.amax(0)
        return x + self.mean + self.state


THIRD = torch.full((4,), 1 / 3)
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda x: setattr(x, "data", THIRD.clone()),
    "into data": lambda x: x.data.copy_(THIRD),
    "numpy": lambda x: x.numpy().fill(1 / 3),
    "storage": lambda x: x.untyped_storage().copy_(THIRD.untyped_storage()),
    "copy_": lambda x: x.copy_(THIRD),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", [E5M2, E4M3FN], ids=str)
@pytest.mark.parametrize("level", LOW)
def test_what_a_forward_left_in_a_module_may_be_written_into_between_forwards(
    level: str, dtype: Any, write: str
) -> None:
    x = torch.linspace(-1, 1, 12).view(3, 4)
    network, fresh = (auto_mixed_precision(Remembers(), level, dtype) for _ in range(2))
    network(x)
    for tensor in (network.mean, network.state):
        WRITES[write](tensor)
    fresh.mean, fresh.state = THIRD.clone(), THIRD.clone()  # type: ignore[assignment]
    assert torch.equal(network(x, False), fresh(x, False))
    assert THIRD.tolist() == torch.full((4,), 1 / 3).tolist()


@pytest.mark.parametrize("dtype", [bf16, BF16], ids=str)
@pytest.mark.parametrize("level", CASTING_LEVELS)
def test_a_weight_written_through_numpy_or_its_storage_is_cast_anew(level: str, dtype: Any) -> None:
    def forward(module: Any, x: Tensor) -> Tensor:
        found = []
        for value in (1.0, 2.0, 3.0, 4.0):
            if value % 2:
                module.w.detach().numpy().fill(value)
            else:
                module.w.detach()[1:].untyped_storage().copy_(torch.full((4,), value).data.untyped_storage())
            found += [(x @ module.w)[0, 0], (x @ module.w)[0, 0]]
        return torch.stack(found)

    network = auto_mixed_precision(Apply(forward, w=nn.Parameter(torch.ones(2, 2))), level, dtype)
    with torch.no_grad():
        assert network(torch.ones(1, 2)).tolist() == [2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 8.0, 8.0]


# --- copies that share a mark -----------------------------------------------------------------------------------------


class ByName(nn.Module):
    """Calls what it holds by `forward`, past hooks and `__call__`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.forward(x)
        return x + sum(layer.forward(x) for layer in self.layers)


def replicas(network: nn.Module) -> nn.Module:
    """As DataParallel makes them, with weights doubled in the place of another device's."""
    twins: dict[nn.Module, Any] = {m: m._replicate_for_data_parallel() for m in network.modules()}  # type: ignore[operator]
    for module, twin in twins.items():
        for name, child in module._modules.items():
            setattr(twin, name, twins[child])  # type: ignore[index]
        for name, p in module._parameters.items():
            if p is not None:
                setattr(twin, name, 2 * p.detach())
            else:
                twin._parameters[name] = None
    return twins[network]  # type: ignore[no-any-return]


@pytest.mark.parametrize("level", CASTING_LEVELS)
def test_a_replica_that_calls_forward_by_name_computes_with_its_own_weights(level: str) -> None:
    torch.manual_seed(0)
    network = auto_mixed_precision(ByName(), level, bf16)
    doubled, x = copy.deepcopy(network), torch.rand(3, 2)
    with torch.no_grad():
        for p in doubled.parameters():
            p.mul_(2)
    assert torch.equal(replicas(network)(x), doubled(x))


def test_a_forward_by_name_that_does_not_say_for_which_copy_is_refused_in_words() -> None:
    network = auto_mixed_precision(nn.Linear(2, 2), "O2", bf16)
    twin, x = copy.copy(network), torch.ones(1, 2)
    with pytest.raises(RuntimeError, match=r"2 shallow copies .* call the module: module\(x\)"):
        twin.forward(x)
    assert torch.equal(twin(x), network(x))


# --- ledgers that compute again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", *CASTING_LEVELS])
def test_counting_draws_nothing_from_a_generator_of_the_users(level: str) -> None:
    generator = torch.Generator()

    def forward(module: Any, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=generator) + torch.poisson(torch.full((2, 3), 3.0), generator=generator)
        return module.layer(x) + noise + torch.bernoulli(torch.full((2, 3), 0.5), generator=generator)

    network, x = auto_mixed_precision(Apply(forward, layer=nn.Linear(3, 3)), level, bf16), torch.ones(2, 3)
    generator.manual_seed(7)
    want = trained(network, x)
    end = generator.get_state()
    generator.manual_seed(7)
    with ledger(network, count=True):
        got = trained(network, x)
    assert_same(got, want)
    assert torch.equal(generator.get_state(), end)


def test_counting_moves_no_statistics_of_a_float64_network() -> None:
    network, plain = (nn.Sequential(nn.BatchNorm1d(3)).double() for _ in range(2))
    x = torch.randn(5, 3, dtype=torch.float64)
    plain(x)
    with ledger(network, count=True), ledger(network, count=True):
        network(x)
    assert torch.equal(network[0].running_mean, plain[0].running_mean)  # type: ignore[arg-type]


def test_counting_runs_an_operator_that_writes_once() -> None:
    calls = []

    @torch.library.custom_op("mpkit_test::counted", mutates_args=("n",))
    def counted(x: Tensor, n: Tensor) -> Tensor:
        calls.append(n.add_(1).item())
        return x * 2

    network = Apply(lambda m, x: counted(x, m.n), n=torch.zeros((), dtype=torch.long))
    with ledger(network, count=True), ledger(network, count=True) as book, torch.no_grad():
        network(torch.ones(2))
    assert calls == [1]
    assert [row.operation for row in book.rows] == ["counted"] or len(book.rows) == 1


# --- level auto -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.huber_loss(x + 300, torch.zeros_like(x), reduction="sum"),
        lambda x: F.hinge_embedding_loss(x + 3, torch.ones_like(x), reduction="sum"),
        lambda x: F.margin_ranking_loss(x, x + 3, torch.ones_like(x), reduction="sum"),
    ],
    ids=["huber", "hinge", "margin"],
)
def test_auto_sums_losses_that_are_made_of_a_sum_in_float32(loss: Callable[[Tensor], Tensor]) -> None:
    x = torch.zeros(40_000, dtype=torch.float16)
    got = auto_mixed_precision(Apply(lambda _, x: loss(x)), "auto")(x)
    assert torch.equal(got, loss(x.float()))
