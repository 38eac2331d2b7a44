"""torch.compile(fullgraph=True): no graph break at any level, and the numbers of the eager level."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import Op, Written
from test_casting import CASTING_LEVELS, made, tensors
from torch import Tensor, nn

from mpkit.casting import auto_mixed_precision, cast_like
from mpkit.formats import E4M3FN, FloatFormat

bf16 = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own compiler raises some


def eps(dtype: Any) -> float:
    return dtype.eps if isinstance(dtype, FloatFormat) else torch.finfo(dtype).eps


def run(network: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    out = network(*args, **kwargs)
    floats = [x for x in tensors(out) if x.is_floating_point()]
    torch.manual_seed(7)
    torch.stack([(x.float() * torch.randn(x.shape)).sum() for x in floats]).sum().backward()
    return floats


QUICK = {"functions": ("O1", "O2"), "convolutional": ("O3",), "attention": ("auto",)}
SLOW = {"attention": ("O1", "O2"), "functions": ("auto", "torch_autocast"), "convolutional": ("auto",)}
CASES: list[Any] = [(level, bf16, name, "aot_eager") for name, levels in QUICK.items() for level in levels]
OTHERS = [(level, bf16, name, "aot_eager") for name, levels in SLOW.items() for level in levels]
OTHERS += [("O2", E4M3FN, "shared", "aot_eager"), *((level, bf16, "shared", "inductor") for level in CASTING_LEVELS)]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS]


@pytest.mark.parametrize(("level", "dtype", "name", "backend"), CASES)
def test_a_level_compiles_without_a_graph_break_and_equals_eager(
    level: str, dtype: Any, name: str, backend: str
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # a reset keeps them, those of other tests too
    network, args, kwargs = made(name)
    if name == "convolutional":
        network[2] = nn.ReLU()
    (cast_like if level == "torch_autocast" else auto_mixed_precision)(network, level, dtype)
    twin = copy.deepcopy(network)
    want = run(network, args, kwargs)
    graphs = torch._dynamo.utils.counters["graph_break"]
    got = run(torch.compile(twin, fullgraph=True, backend=backend), args, kwargs)

    assert not graphs
    assert [x.dtype for x in got] == [x.dtype for x in want]
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=eps(dtype), atol=eps(dtype))
    # the gradient of a parameter used twice is added up in float32 here, in the low dtype in eager mode; that of a bias
    # before a norm is zero but for noise, so errors are measured against the largest gradient too
    largest = max(float(p.grad.abs().max()) for p in network.parameters() if p.grad is not None)
    for p, q in zip(network.parameters(), twin.parameters()):
        if p.grad is not None:
            assert q.grad is not None
            assert (p.grad - q.grad).abs().max() <= 4 * eps(dtype) * max(float(p.grad.abs().max()), 0.1 * largest)


def test_changing_the_level_of_a_compiled_network_compiles_it_again() -> None:
    torch._dynamo.reset()
    network = auto_mixed_precision(nn.Linear(4, 4), "O2", torch.bfloat16)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 4)
    first = compiled(x)
    with pytest.warns(UserWarning, match="to 'O3'"):
        auto_mixed_precision(network, "O3", torch.float16)
    second = compiled(x)
    assert torch.equal(second, network(x))
    assert not torch.equal(first, second)


def test_compiling_comes_before_any_eager_call_in_a_fresh_thread() -> None:
    torch._dynamo.reset()
    network = auto_mixed_precision(nn.Linear(4, 4), "O2", torch.bfloat16)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    x, results = torch.randn(2, 4), []
    thread = threading.Thread(target=lambda: results.append(compiled(x)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], network(x))


def test_a_traced_graph_is_cast_as_the_network_that_it_was_made_of() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    traced = auto_mixed_precision(torch.fx.symbolic_trace(copy.deepcopy(plain)), "O2", torch.bfloat16)
    x = torch.randn(3, 4)
    assert torch.equal(traced(x), auto_mixed_precision(plain, "O2", torch.bfloat16)(x))


# --- where torch does not compile a part ------------------------------------------------------------------------------


class Getters(nn.Module):
    """What it asks a tensor for comes by getters, in a method that cannot be compiled: no graph breaks in a `try`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 3))

    def asked(self, x: Tensor) -> Tensor:
        try:
            torch._dynamo.graph_break()
            size = torch.tensor([*x.shape, x.ndim, *x.T.shape[::-1]], dtype=x.dtype, device=x.device)
            return (x.mT @ self.weight).T.data + x.real + size.sum() + x.is_leaf
        finally:
            torch._dynamo.graph_break()

    def forward(self, x: Tensor) -> Tensor:
        return self.asked(x * 2) + self.asked(x)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_getters_in_a_part_that_is_not_compiled_are_told_apart(level: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    network, x = auto_mixed_precision(Getters(), level, torch.bfloat16), torch.rand(3, 3)
    want = network(x)
    got = torch.compile(network, backend="eager")(x)
    assert (got.dtype, got.tolist()) == (want.dtype, want.tolist())


@pytest.mark.parametrize("level", CASTING_LEVELS)
def test_a_recurrent_layer_runs_beside_the_compiler(level: str) -> None:
    """Which leaves it out, as without a level: `fullgraph=True` is refused by torch itself."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    parts, x = {"lstm": nn.LSTM(4, 5, batch_first=True), "head": nn.Linear(5, 2)}, torch.randn(2, 3, 4)
    network = auto_mixed_precision(Written(lambda m, x: m.head(m.lstm(x)[0]), **parts), level, torch.bfloat16)
    got = torch.compile(network, backend="aot_eager")(x)
    torch.testing.assert_close(got, network(x), rtol=2**-6, atol=2**-6)
    got.float().sum().backward()


def small(level: str) -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    return auto_mixed_precision(network, level, torch.bfloat16)


@pytest.mark.parametrize("level", CASTING_LEVELS)
def test_an_exported_network_computes_the_same(level: str) -> None:
    network, x = small(level).eval(), torch.randn(4, 6)
    program = torch.export.export(network, (x,))
    assert torch.equal(program.module()(x), network(x))
    assert [*program.state_dict] == [*network.state_dict()]


@pytest.mark.parametrize("level", CASTING_LEVELS)
def test_transforms_of_functions_see_the_casts(level: str) -> None:
    network, x = small(level), torch.randn(5, 6)
    weights = {name: p.detach() for name, p in network.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(network, weights, (x,)).float().square().sum()

    grads = torch.func.grad(loss)(weights, x)
    network(x).float().square().sum().backward()
    each = torch.func.vmap(torch.func.grad(lambda w, row: loss(w, row[None])), (None, 0))(weights, x)
    for name, p in network.named_parameters():
        assert grads[name].dtype is torch.float32
        torch.testing.assert_close(grads[name], p.grad, rtol=2**-6, atol=2**-8)
        torch.testing.assert_close(each[name].sum(0), grads[name], rtol=2**-4, atol=2**-4)
    value, tangent = torch.func.jvp(network, (x,), (torch.ones_like(x),))
    assert torch.equal(value, network(x))
    assert tangent.isfinite().all()


@pytest.mark.parametrize("level", CASTING_LEVELS)
def test_a_weight_that_is_used_often_is_transformed_too(level: str) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    network = auto_mixed_precision(nn.Sequential(*[layer] * 5), level, torch.bfloat16)
    func = torch.func
    torch.testing.assert_close(func.vmap(network)(x), network(x), rtol=2**-6, atol=2**-6)
    for of in (func.jacrev, func.jacfwd):
        want = torch.linalg.matrix_power(layer.weight, 5)
        torch.testing.assert_close(of(network)(x[0]).float(), want, rtol=2**-4, atol=2**-5)


@pytest.mark.parametrize("given", [(None, 0.5, "area"), (None, 2.0), (None, 2.0, "nearest")], ids=str)
def test_a_mode_that_is_given_in_order_or_left_out_is_known_to_a_compiled_list_too(given: Any) -> None:
    network = cast_like(Op(lambda x: F.interpolate(x, *given)), "torch_autocast", torch.bfloat16)
    x = torch.randn(1, 1, 4, 4, dtype=torch.bfloat16)
    torch.compiler.reset()
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")(x)
    assert compiled.dtype is network(x).dtype is (torch.bfloat16 if "area" in given else torch.float32)
