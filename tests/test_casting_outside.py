"""Networks and tools that nobody here wrote: what they ask of a network, they find in a cast one.

torch's own behaviour is the oracle: the uncast network, `.to(dtype)` by hand, `torch.func` of explicit casts, real
autocast dispatch on a CUDA device that only exists as shapes and dtypes.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import in_processes
from test_casting import CASTING_LEVELS
from test_casting_state import Apply, trained
from torch import Tensor, nn

from mpkit.casting import PRESETS, amp_level, auto_mixed_precision, cast_like, ledger, remove_mixed_precision
from mpkit.formats import BF16, E4M3FN, E5M2, FP16
from mpkit.rounding import round_to

bf16 = torch.bfloat16
compiler = pytest.mark.filterwarnings("ignore")  # torch's own compiler warns of itself


def cast(network: nn.Module, level: str, dtype: Any = bf16) -> nn.Module:
    return cast_like(network, level, dtype) if level in PRESETS else auto_mixed_precision(network, level, dtype)


LISTED = ["auto", "apex_O1", "torch_autocast"]


# --- functions made of listed operations -----------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy")
@pytest.mark.parametrize("level", [*CASTING_LEVELS, "apex_O1", "torch_autocast"])
def test_a_fused_head_computes_as_its_two_operations_do(level: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(8, 16, generator=generator), torch.randn(10, 16, generator=generator)
    target = torch.randint(0, 10, (8,), generator=generator)
    fused = cast(Apply(lambda _, x, w: F.linear_cross_entropy(x, w, target)), level)(x, weight)
    apart = cast(Apply(lambda _, x, w: F.cross_entropy(F.linear(x, w), target)), level)(x, weight)
    assert (fused.dtype, fused.tolist()) == (apart.dtype, apart.tolist())


@pytest.mark.parametrize("level", ["auto", "apex_O1", "torch_autocast"])
@pytest.mark.parametrize(
    "function",
    [
        lambda _, x: F.lp_pool1d(x[0], 2.0, 2),
        lambda _, x: F.lp_pool2d(x, 2.0, 2),
        lambda _, x: F.lp_pool3d(x[None], 2.0, 1),
    ],
    ids=["lp_pool1d", "lp_pool2d", "lp_pool3d"],
)
def test_listed_operations_inside_of_others_are_found(function: Any, level: str) -> None:
    """The square of 300 is beyond float16, and `pow` is listed for float32."""
    x = torch.full((1, 2, 4, 4), 300.0)
    got, want = cast(Apply(function), level, torch.float16)(x.half()), function(None, x)
    assert torch.allclose(got.float(), want, rtol=2**-10, atol=0)


@pytest.mark.parametrize("level", ["O0", "O1", "auto", "apex_O1", "torch_autocast"])
def test_a_ledger_has_the_rows_of_a_function_or_of_its_parts(level: str) -> None:
    network = cast(Apply(lambda _, x: F.lp_pool2d(F.normalize(x, dim=1), 2.0, 2)), level, torch.float16)
    with ledger(network) as book:
        network(torch.rand(1, 2, 4, 4))
    rows = [row.operation for row in book.rows]
    normalize = ["normalize"] if level == "apex_O1" else ["norm", "clamp_min", "expand_as", "div"]
    pool = ["pow", "avg_pool2d", "sign", "abs", "relu", "mul", "mul", "pow"]
    assert rows == normalize + (["lp_pool2d"] if level in ("O0", "O1") else pool)


# --- safe sums --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["auto", "O1", "apex_O1", "torch_autocast"])
def test_a_loss_summed_over_many_rows_is_finite(level: str) -> None:
    """40,000 rows of log 10 each: far beyond float16, and listed as log_softmax and nll_loss."""

    def loss(_: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x, y, reduction="sum")

    rows = torch.zeros(40_000, 10, dtype=torch.float16)
    got = cast(Apply(loss), level, torch.float16)(rows if level != "O1" else rows.float(), torch.zeros(40_000).long())
    assert got.item() == pytest.approx(40_000 * torch.tensor(10.0).log().item(), rel=1e-4)


@pytest.mark.parametrize("name", ["logsumexp", "logcumsumexp"])
def test_auto_takes_functions_made_of_listed_ones_in_float32(name: str) -> None:
    x = torch.full((1, 3), 11.0, dtype=torch.float16)
    network = auto_mixed_precision(Apply(lambda _, x: getattr(torch, name)(x, 1)), "auto")
    assert torch.equal(network(x), getattr(torch, name)(x.float(), 1))


# --- what tools look at -----------------------------------------------------------------------------------------------


class Documented(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, mask: Tensor | None = None, *, labels: Tensor | None = None) -> Tensor:
        y = self.layer(input_ids)
        return y if mask is None else y * mask


@pytest.mark.parametrize("level", [*CASTING_LEVELS, "torch_autocast", "mxfp8"])
def test_a_cast_forward_keeps_signature_name_and_code(level: str) -> None:
    network, plain = Documented(), Documented()
    cast_like(network, level) if level == "mxfp8" else cast(network, level)
    assert inspect.signature(network.forward) == inspect.signature(plain.forward)
    assert inspect.signature(network.layer.forward) == inspect.signature(plain.layer.forward)
    assert network.forward.__name__ == "forward"
    assert network.forward.__qualname__ == "Documented.forward"
    assert network.forward.__code__ is Documented.forward.__code__
    assert inspect.unwrap(network.forward).__func__ is Documented.forward  # type: ignore[attr-defined]
    assert not hasattr(network.forward, "__func__")  # whoever binds that anew would lose the casts
    assert not hasattr(network.forward, "nothing_of_the_kind")


def test_a_decorated_function_keeps_its_name_and_signature() -> None:
    def product(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    low = auto_mixed_precision(product, "auto", bf16)
    assert (low.__name__, low.__wrapped__) == ("product", product)
    assert inspect.signature(low) == inspect.signature(product)


@compiler
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("level", "dtype"), [*((level, bf16) for level in CASTING_LEVELS), ("O2", E4M3FN)])
def test_a_cast_network_is_exported(level: str, dtype: Any, strict: bool) -> None:
    torch.manual_seed(0)
    network = cast(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)), level, dtype).eval()
    x = torch.randn(3, 4)
    exported = torch.export.export(network, (x,), strict=strict)
    assert torch.equal(exported.module()(x), network(x))


@pytest.mark.filterwarnings("ignore")  # tracing is on its way out of torch, and says so
def test_a_cast_network_is_traced() -> None:
    network = cast(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), "O2")
    x = torch.randn(3, 4)
    traced = torch.jit.trace(network, (x,))
    assert torch.equal(traced(x), network(x))


def test_scripted_modules_are_refused_in_words() -> None:
    with pytest.warns((DeprecationWarning, FutureWarning), match="script"):  # the second from torch 2.15 on
        scripted = torch.jit.script(nn.Linear(2, 2))
    for network in (scripted, nn.Sequential(nn.ReLU(), scripted)):
        for level in (*CASTING_LEVELS, "apex_O1"):
            with pytest.raises(TypeError, match=r"TorchScript.*cast the network before"):
                cast(network, level)
    assert amp_level(network) == ""
    assert "forward" not in vars(network)


# --- sharding ---------------------------------------------------------------------------------------------------------


def sharded_worker(rank: int, folder: str) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    found = {}
    for level in ("O1", "O2", "O3", "auto"):
        for dtype in (bf16, E5M2):
            for shard in (False, True):
                torch.manual_seed(0)
                network = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Sequential(nn.GELU(), nn.Linear(8, 8)))
                auto_mixed_precision(network, level, dtype)
                if shard:
                    for module in (network[0], network[2], network):
                        fully_shard(module, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
                out = network(x)
                out.float().square().sum().backward()
                grads = [p.grad.full_tensor() if shard else p.grad for p in network.parameters()]  # type: ignore[union-attr]
                found[level, str(dtype), shard] = [out.detach(), *grads]
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_sharded_networks_compute_and_train_as_whole_ones(tmp_path: Path) -> None:
    in_processes(sharded_worker, str(tmp_path))
    found = torch.load(tmp_path / "found.pt")
    for (level, dtype, shard), got in found.items():
        if shard:
            for a, b in zip(got, found[level, dtype, False]):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [bf16, BF16], ids=str)
@pytest.mark.parametrize("level", CASTING_LEVELS)
def test_operators_called_by_their_overload_are_called_as_they_are(level: str, dtype: Any) -> None:
    aten = torch.ops.aten

    def overloads(_: Any, x: Tensor) -> tuple[Tensor, ...]:
        into, other, y = torch.zeros_like(x), torch.zeros_like(x), torch.clone(x)
        aten.add.out(x, x, out=into)
        aten.mm.out(x, x, out=other)
        assert aten.add_.Tensor(y, x) is y
        aten.mul_.Scalar(y, 0.5)
        return into, other, y, aten.add.Tensor(x, x), aten.mm.default(x, x)

    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    with torch.no_grad():
        got = cast(Apply(overloads), level, dtype)(x)
    for a, b in zip(got, [x + x, x @ x, x, x + x, x @ x]):  # a product: two roundings in float32, nothing cancels
        torch.testing.assert_close(a, b, rtol=2 * 2.0**-23, atol=0)


def test_an_operator_of_somebody_elses_is_cast_and_writes_where_it_was_told() -> None:
    @torch.library.custom_op("mpkit_test::scaled", mutates_args=())
    def scaled(x: Tensor, w: Tensor) -> Tensor:
        assert x.dtype is w.dtype
        return x * w

    @torch.library.custom_op("mpkit_test::doubled_", mutates_args=("x",))
    def doubled_(x: Tensor) -> None:
        x.mul_(2)

    def forward(module: Any, x: Tensor) -> Tensor:
        y = scaled(x, module.w.detach())
        doubled_(y)
        return y

    network = cast(Apply(forward, w=nn.Parameter(torch.full((2,), 1 + 2.0**-9))), "O2")
    assert network(torch.ones(2)).tolist() == [2.0, 2.0]


# --- recurrent layers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("level", [*CASTING_LEVELS, *PRESETS])
def test_recurrent_layers_stack_take_16_bits_and_single_sequences(level: str, kind: type[nn.RNNBase]) -> None:
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = kind(4, 6), kind(6, 5, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)[0])[0]

    dtype = torch.float16 if level == "keras_mixed_float16" else bf16
    batch, single = torch.randn(7, 3, 4), torch.randn(7, 4)
    plain = Stacked()
    network = cast(copy.deepcopy(plain), level, dtype)
    for x in (batch, single):
        for given in (x, x.to(dtype)):
            got, want = network(given), plain(x)
            assert got.shape == want.shape
            assert (got.float() - want).abs().max() <= 0.05
    packed = nn.utils.rnn.pack_sequence([single, single[:4]])
    assert (network.first(packed)[0].data.float() - plain.first(packed)[0].data).abs().max() <= 0.05
    trained(network, batch)


# --- spectral norm and mixed operands ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*deprecated")
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
@pytest.mark.parametrize("level", [*CASTING_LEVELS, "apex_O1", "torch_autocast"])
def test_spectral_norm_runs_and_trains(level: str, norm: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(norm(nn.Linear(4, 4)), nn.ReLU(), norm(nn.Linear(4, 4)))
    x = torch.randn(3, 4)
    got, want = (trained(network, x) for network in (cast(copy.deepcopy(plain), level), plain))
    assert all((a - b).abs().max() <= 0.1 * (1 + b.abs().max()) for a, b in zip(got, want))


PROMOTED = {
    "vdot": lambda a, b: torch.vdot(a[0], b[0]),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "vecdot": lambda a, b: torch.linalg.vecdot(a, b),
    "inner": lambda a, b: torch.inner(a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.5),
    "bilinear": lambda a, b: F.bilinear(a, b, b.new_ones(1, 2, 2)),
    "scatter_add": lambda a, b: b.scatter_add(0, torch.zeros(2, 2).long(), a),
    "index_add": lambda a, b: b.index_add(0, torch.tensor([0, 1]), a),
    "index_put": lambda a, b: b.index_put((torch.tensor([0]),), a[:1]),
    "masked_scatter": lambda a, b: b.masked_scatter(b > 0, a),
}


@pytest.mark.parametrize("name", PROMOTED)
def test_auto_promotes_where_torch_has_a_form_for_equal_dtypes_only(name: str) -> None:
    a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.5, 1 + 2.0**-11], [2.0, -1.0]])
    network = auto_mixed_precision(Apply(lambda _, *ab: PROMOTED[name](*ab)), "auto")
    assert torch.equal(network(a.half(), b), PROMOTED[name](a, b))
    assert network(a.half(), b.half()).dtype is torch.float16


# --- nests ------------------------------------------------------------------------------------------------------------


class Output(collections.OrderedDict):  # type: ignore[type-arg]
    """A dict with attributes, as model libraries return."""

    kind = "output"


@dataclasses.dataclass
class Result:
    logits: Tensor
    states: tuple[Tensor, ...] = ()
    name: str = ""
    count: int = dataclasses.field(init=False, default=3)


@dataclasses.dataclass(frozen=True)
class Frozen:
    logits: Tensor


class Plain(dict):  # type: ignore[type-arg]
    def __init__(self, **items: Any) -> None:  # no mapping as its argument
        super().__init__(**items)


def nests(x: Tensor) -> Iterator[Any]:
    by_default: collections.defaultdict[str, Any] = collections.defaultdict(list, x=x)
    by_default["list"].append(x)
    output = Output(x=x)
    output.note = "kept"
    yield from (by_default, output, collections.Counter(a=1), Plain(x=x, deep=[{"x": x}]))
    yield from (Result(x, (x,), "n"), Frozen(x), {"deep": Result(x)}, collections.ChainMap({"a": 1}))


@pytest.mark.parametrize("dtype", [bf16, E4M3FN], ids=str)
@pytest.mark.parametrize("level", ["O2", "O3", "apex_O2"])
def test_nests_of_any_kind_go_in_and_come_out_as_they_are(level: str, dtype: Any) -> None:
    def same(_: Any, value: Any) -> Any:
        return value

    x = torch.tensor([0.1])
    rounded = round_to(x, E4M3FN) if dtype is E4M3FN else x.bfloat16().float()
    network = cast(Apply(same), level, dtype)
    for value, wanted in zip(nests(x), nests(rounded)):
        got = network(value)
        assert type(got) is type(value)
        assert got == wanted
        assert got.__dict__ == wanted.__dict__ if hasattr(value, "__dict__") else True
    made = collections.defaultdict(list, x=x)
    assert network(made).default_factory is list
    assert made["x"] is x  # the caller's own is left alone


@compiler
@pytest.mark.parametrize("level", ["O2", "auto"])
def test_a_dataclass_result_compiles(level: str) -> None:
    def result(module: Any, x: Tensor) -> Result:
        return Result(module.layer(x), (x @ x,))

    torch._dynamo.reset()
    network = cast(Apply(result, layer=nn.Linear(3, 3)), level)
    x = torch.randn(3, 3)
    got, want = torch.compile(network, backend="aot_eager")(x), network(x)
    assert torch.equal(got.logits, want.logits)
    assert got.states[0].dtype is want.states[0].dtype
    assert want.logits.dtype is torch.float32


# --- functions of functions -------------------------------------------------------------------------------------------


def transforms(call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    ones = torch.ones_like(x)
    return [
        torch.vmap(call)(x),
        torch.vmap(call, in_dims=1)(x),
        torch.func.grad(lambda x: call(x).float().sum())(x),
        torch.func.jvp(call, (x,), (ones,))[1],
        torch.vmap(torch.func.grad(lambda row: call(row).float().sum()))(x),
        torch.func.vjp(call, x)[1](torch.ones_like(call(x)))[0],
    ]


@compiler
@pytest.mark.parametrize("level", CASTING_LEVELS)
@pytest.mark.parametrize(("fmt", "native"), [(FP16, torch.float16), (BF16, bf16)], ids=["fp16", "bf16"])
def test_emulated_formats_go_through_function_transforms_as_native_ones(fmt: Any, native: Any, level: str) -> None:
    def forward(module: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x @ module.w)
        return y * 0.3 + y.unsqueeze(0).squeeze(0)

    torch.manual_seed(0)
    plain = Apply(forward, w=nn.Parameter(torch.randn(4, 4)))
    x = torch.randn(4, 4)
    got, want = (transforms(auto_mixed_precision(copy.deepcopy(plain), level, d), x) for d in (fmt, native))
    for a, b in zip(got, want):
        assert (a.float() - b.float()).abs().max() <= 8 * fmt.eps * max(1.0, float(b.float().abs().max()))


def test_functional_call_gives_gradients_of_every_weight() -> None:
    network = auto_mixed_precision(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)), "O2", E4M3FN)
    generator = torch.Generator().manual_seed(0)
    for p in network.parameters():  # every sum is a whole number up to 16, which E4M3 has: no last bit moves a rounding
        p.data = torch.randint(-1, 2, p.shape, generator=generator).float()
    parameters = {name: p.detach() for name, p in network.named_parameters()}
    x = torch.randint(-1, 2, (5, 3), generator=generator).float()

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(network, parameters, (row,)).sum()

    per_sample = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(5):
        network.zero_grad()
        network(x[i]).sum().backward()
        for name, p in network.named_parameters():
            torch.testing.assert_close(per_sample[name][i], p.grad, rtol=2.0**-20, atol=0)


@compiler
@pytest.mark.parametrize(("level", "dtype"), [("O2", E4M3FN), ("O3", bf16)], ids=str)
def test_a_graph_break_inside_a_forward_changes_nothing(level: str, dtype: Any) -> None:
    if dtype is E4M3FN and torch.__version__.startswith("2.11."):
        pytest.skip('torch 2.11 fails on an attribute of `y.T` with "This is a bug - please create an issue"')

    def forward(module: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x @ module.w)
        torch._dynamo.graph_break()
        return y.T + y

    torch._dynamo.reset()
    network = auto_mixed_precision(Apply(forward, w=nn.Parameter(torch.eye(3) / 2)), level, dtype)
    x = torch.randn(3, 3)
    got, want = torch.compile(copy.deepcopy(network), backend="aot_eager")(x), network(x)
    torch.testing.assert_close(got, want, rtol=2**-3 if dtype is E4M3FN else 2**-7, atol=2**-7)


def test_auto_decorates_methods() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, 2))

        @lambda function: auto_mixed_precision(function, "auto", bf16)
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w

        @lambda function: auto_mixed_precision(function, "auto", bf16)
        def encode(self, x: Tensor) -> Tensor:
            return x @ self.w

    model = Model()
    for twin in (model, copy.deepcopy(model)):
        assert twin(torch.ones(2, 2)).dtype is bf16
        assert twin.encode(torch.ones(2, 2)).dtype is bf16
    assert inspect.signature(Model.encode) == inspect.signature(remove_mixed_precision(Model.__dict__["encode"]))
