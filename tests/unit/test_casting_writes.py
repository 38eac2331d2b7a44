"""What is written arrives at every level and format; what no level reaches is refused in words; lists as tables."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import Op, Written
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpkit.casting import auto_mixed_precision, cast_like, ledger, to_float
from mpkit.formats import BF16, E4M3FN

LEVELS = ("O1", "O2", "O3", "auto")


class Calls(Written):
    """Calls a function of its inputs, and has one weight."""

    def __init__(self, function: Callable[..., Any], part: nn.Module | None = None) -> None:
        super().__init__(function, part=part, w=nn.Parameter(torch.eye(4)))


def into_slice(y: Tensor) -> None:
    y[1:3, ::2] = 3


WRITES: dict[str, Callable[[Tensor], object]] = {
    "setitem": into_slice, "copy_": lambda y: y[0].copy_(y[1] * 2), "fill_": lambda y: y[:, 1].fill_(5),
    "zero_": lambda y: y.t()[2].zero_(), "add_": lambda y: y.view(-1)[3:9].add_(1),
    "mul_ of a chunk": lambda y: y.chunk(2)[1].mul_(2), "out=": lambda y: torch.add(y[:2], 1, out=y[:2]),
    "out= next to the last": lambda y: torch.neg(y[:2], out=y[2:]),
    "relu_": lambda y: F.relu(y.select(0, 3), inplace=True),
    "masked_fill_": lambda y: y[1:].masked_fill_(y[1:] > 2, -1),
    "index_add_": lambda y: y.index_add_(0, torch.tensor([0, 0]), y[2:4].clone()),
    "unbind": lambda y: y.unbind(1)[0].sub_(4), "diagonal": lambda y: y.diagonal().fill_(-7),
}  # fmt: skip
# a view of another shape is filled; y.unsqueeze(0) and the like are views of views
VIEWS = """
y.diagonal() y.T y.mT y.H y.mH y.real y.t() y.adjoint() y.swapdims(0,1) torch.swapaxes(y,0,1) y.ravel() y.flatten()
y.reshape(2,8) y.view(8,2) y.view_as(torch.ones(2,8)) y.moveaxis(0,1) torch.movedim(y,0,1) y.as_strided((2,2),(4,1))
torch.atleast_3d(y) torch.atleast_2d(y) y.broadcast_to(4,4) y.expand(4,4) torch.hsplit(y,2)[1] y.vsplit(2)[0]
y.unsqueeze(0).dsplit(2)[0] y.tensor_split(2)[1] y.split(2)[1] y.chunk(2,1)[1] y.unbind()[2] y.narrow(0,1,2)
y.select(0,1) y[1:3] y.unsqueeze(0).squeeze(0) y.permute(1,0) y.unflatten(1,(2,2)) y.unfold(0,2,2) y.detach() y.data
y.contiguous() y.T.diagonal()"""
WRITES |= {of: eval(f"lambda y: {of}.fill_(3)", {"torch": torch}) for of in VIEWS.split()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3FN], ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_through_a_view_arrives(write: Callable[[Tensor], object], level: str, dtype: Any) -> None:
    def run(module: Any, x: Tensor) -> Tensor:
        y = x @ module.w  # in the format, where the level says so; small integers are in every format
        write(y)
        return y * 1

    x = torch.arange(16.0).view(4, 4) - 8
    want = x.clone()
    write(want)
    with torch.no_grad():
        assert torch.equal(auto_mixed_precision(Calls(run), level, dtype)(x).float(), want)


@dataclass
class Cache:
    last: Tensor | None = None


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3FN], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_what_a_part_writes_into_a_nest_that_it_is_given_arrives(level: str, dtype: Any) -> None:
    def keep(part: Any, x: Tensor, named: dict[str, Any], many: list[Tensor], cache: Cache) -> Tensor:
        named["x"] = cache.last = x
        many.append(x)
        return x

    outer = Calls(lambda module, x, *nests: module.part(x @ module.w, *nests), Calls(keep))
    named, many, cache = {"old": 1}, [torch.tensor(1)], Cache()
    auto_mixed_precision(outer, level, dtype)(torch.eye(4), named, many, cache)
    for written in (named["x"], many[1], cache.last):
        assert torch.equal(written.float(), torch.eye(4))  # type: ignore[attr-defined, union-attr]


def test_what_a_dataclass_holds_is_cast_as_an_argument_is() -> None:
    part = Calls(lambda module, cache: cache.last)
    network = auto_mixed_precision(Calls(lambda module, x: module.part(Cache(x)).dtype, part), "O2", torch.bfloat16)
    to_float(network.part, torch.float32)
    assert network(torch.eye(4)) is torch.float32


ROWS = torch.tensor([0, 1, 2, 2])
# what torch has for one dtype only: of 16-bit activations beside float32 tensors
BESIDE: dict[str, Callable[[Any, Tensor], Any]] = {
    "a mask": lambda m, h: (out := torch.zeros(4, 4)).__setitem__(torch.eye(4) > 0, h[0]) or out,
    "addmm_": lambda m, h: torch.zeros(4, 4).addmm_(h, h),
    "addmv_": lambda m, h: torch.zeros(4).addmv_(h, h[0]),
    "baddbmm_": lambda m, h: torch.zeros(1, 4, 4).baddbmm_(h[None], h[None]),
    "addbmm_": lambda m, h: torch.zeros(4, 4).addbmm_(h[None], h[None]),
    "embedding_bag": lambda m, h: F.embedding_bag(ROWS, m.w, ROWS[:2], mode="sum", per_sample_weights=h[0]),
    "torch.embedding": lambda m, h: torch.embedding(m.w, ROWS),
    "a table of integers": lambda m, h: h * F.embedding(ROWS, ROWS[:, None]),
    "huber_loss": lambda m, h: F.huber_loss(h, torch.ones(4, 4)),
    "meshgrid": lambda m, h: torch.meshgrid(h[0], torch.ones(4), indexing="ij")[0],
    "cartesian_prod": lambda m, h: torch.cartesian_prod(h[0], torch.ones(4)),
    "fractional_max_pool": lambda m, h: F.fractional_max_pool2d(h[None], 2, 2, _random_samples=torch.ones(1, 1, 2) / 2),
    "max out": lambda m, h: torch.max(h.detach(), 0, out=(torch.zeros(4), ROWS.clone()))[0],
    "index_select out": lambda m, h: torch.index_select(h.detach(), 0, ROWS, out=torch.zeros(4, 4)),
    "a copy of a weight": lambda m, h: h * m.w[ROWS],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, BF16, E4M3FN], ids=str)
@pytest.mark.parametrize("case", BESIDE.values(), ids=BESIDE)
def test_what_torch_has_for_one_dtype_takes_float32_beside_activations(case: Callable[..., Any], dtype: Any) -> None:
    network = Calls(lambda module, x: case(module, x @ module.w))
    want = network(torch.eye(4))
    out = auto_mixed_precision(network, "O2", dtype)(torch.eye(4))
    assert torch.equal(out, want)
    if out.requires_grad:
        out.sum().backward()
        assert network.w.grad.type() == "torch.FloatTensor"  # type: ignore[union-attr]


INTO_WEIGHT: dict[str, Callable[[Tensor], object]] = {
    "mul out": lambda w: torch.mul(torch.ones(4, 4), 0.5, out=w),
    "cat out": lambda w: torch.cat([torch.ones(2, 4), torch.zeros(2, 4)], out=w),
    "_foreach_lerp_": lambda w: torch._foreach_lerp_([w], [torch.zeros(4, 4)], 0.5),
    "relu inplace": lambda w: F.relu(w.sub_(2), inplace=True), "elu_": lambda w: F.elu_(w.sub_(8)),
    "threshold_": lambda w: F.threshold_(w, 2.0, 1.5), "getitem": lambda w: w[1].fill_(3),
    "t": lambda w: w.t()[1].fill_(3), "normalize out": lambda w: F.normalize(w.add_(1), out=w),
}  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("write", INTO_WEIGHT.values(), ids=INTO_WEIGHT)
def test_a_write_into_a_weight_arrives(write: Callable[[Tensor], object], level: str) -> None:
    network, want = Calls(lambda module, x: write(module.w)), torch.eye(4)
    auto_mixed_precision(network, level, torch.bfloat16)
    with torch.no_grad():
        network(torch.ones(1)), write(want)
    assert torch.allclose(network.w, want, rtol=2**-8)
    assert not torch.equal(want, torch.eye(4))


@pytest.mark.parametrize("backend", [None, "eager"])
def test_what_is_taken_of_a_weight_is_low_eager_compiled_and_functional(backend: str | None) -> None:
    def run(m: Any, x: Tensor) -> list[Tensor]:
        of = (m.w[:3], m.w[ROWS], m.w[m.w > -1], m.w.T.reshape(16), m.w.T.contiguous(), m.w.view(2, 8), m.w[None])
        of = (*of, torch.cat([m.w, x]))
        return [x[0, 0] * part.flatten()[:4] + x[0] for part in of]

    torch._dynamo.reset()
    network = to_float(Calls(run), torch.bfloat16)
    compiled: Any = torch.compile(network, backend=backend) if backend else network
    plain = torch.func.functional_call(network, {"w": torch.eye(4)}, torch.eye(4))
    assert {y.dtype for y in (*compiled(torch.eye(4)), *plain)} == {torch.bfloat16}


class Steps(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield x


class Awaits(nn.Module):
    async def forward(self, x: Tensor) -> Any:
        return x


@pytest.mark.parametrize(
    ("network", "words"),
    [(nn.DataParallel(nn.Linear(2, 2)), "DistributedDataParallel"), (Steps(), "yield"), (Awaits(), "await")],
    ids=["DataParallel", "generator", "coroutine"],
)
def test_what_no_level_reaches_is_refused_before_anything_changes(network: nn.Module, words: str) -> None:
    outer = nn.Sequential(nn.Linear(2, 2), network)
    for level in LEVELS:
        with pytest.raises(TypeError, match=words):
            auto_mixed_precision(outer, level)
    assert "forward" not in vars(outer[0])
    for function in (Steps.forward, Awaits.forward):
        with pytest.raises(TypeError, match="yields or awaits"):
            auto_mixed_precision(function, "auto")


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3FN], ids=str)
@pytest.mark.parametrize(
    "operand",
    [torch.eye(4).to_sparse(), torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)],
    ids=["sparse", "nested"],
)
def test_operands_that_are_not_dense_are_refused_with_a_way_out(operand: Tensor, dtype: Any) -> None:
    for run in (lambda module, x: module.part(operand), lambda module, x: operand @ (x @ module.w)):
        network = auto_mixed_precision(Calls(run, nn.Identity()), "O2", dtype)
        with pytest.raises(NotImplementedError, match=r"to_float\(module, torch.float32\).*to_dense"):
            network(torch.eye(4))
    part = Calls(lambda module, x: x.to_dense() if x.is_sparse else x.unbind()[0])
    network = auto_mixed_precision(Calls(lambda module, x: module.part(operand) + x[0, 0], part), "O2", dtype)
    to_float(part, torch.float32)
    assert network(torch.eye(4)).dtype is torch.float32


# what a list says of an operation: its results for a float32 and for a bfloat16 tensor
bf16, f32 = torch.bfloat16, torch.float32
LOW, WIDE, FOLLOWS, BACK = (bf16, bf16), (f32, f32), (f32, bf16), (f32, f32)
LISTS = ("O1", "auto", "apex_O1", "torch_autocast")
LISTED: dict[str, tuple[Callable[[Tensor], Tensor], tuple[Any, ...]]] = {
    "matmul": (lambda x: x @ x, (BACK, LOW, LOW, LOW)),
    "relu": (torch.relu, (BACK, FOLLOWS, FOLLOWS, FOLLOWS)),
    "softmax": (lambda x: x.softmax(-1), (FOLLOWS, WIDE, WIDE, WIDE)),
    "gelu": (F.gelu, (FOLLOWS, FOLLOWS, WIDE, FOLLOWS)),
    "tan": (torch.tan, (FOLLOWS, WIDE, WIDE, WIDE)),
    "tanh": (torch.tanh, (FOLLOWS, FOLLOWS, FOLLOWS, FOLLOWS)),
    "sum": (torch.sum, (FOLLOWS, WIDE, WIDE, WIDE)),
}


@pytest.mark.parametrize("level", LISTS)
@pytest.mark.parametrize("name", LISTED)
def test_an_operation_computes_as_its_list_says(name: str, level: str) -> None:
    function, results = LISTED[name]
    network = Calls(lambda module, x: (function(x), function(x.to(bf16))))
    cast = cast_like if "_" in level else auto_mixed_precision
    wide, low = cast(network, level, dtype=bf16)(torch.ones(2, 2))
    assert (wide.dtype, low.dtype) == results[LISTS.index(level)]


@pytest.mark.parametrize("nest", [lambda x: {"k": x}, lambda x: [x], lambda x: (1, x)])
def test_a_black_listed_module_sees_what_came_in_a_nest_as_it_came(nest: Callable[[Tensor], Any]) -> None:
    x = torch.tensor([[1000.0, 1000.1], [1000.2, 1000.3]])
    run: Any = lambda module, x: module.part(next(reversed(x.values() if isinstance(x, dict) else x)))  # noqa: E731
    network = auto_mixed_precision(Calls(run, nn.BatchNorm1d(2)), "O2", torch.bfloat16)
    assert torch.equal(network(nest(x)), nn.BatchNorm1d(2)(x).bfloat16())


LACKS = ["linalg.inv", "fft.fft", "linalg.pinv", "linalg.qr", "fft.irfft"]


@pytest.mark.parametrize("name", LACKS)
def test_what_torch_lacks_comes_with_a_way_out(name: str) -> None:
    home, _, function = name.partition(".")
    network = Calls(lambda module, x: getattr(getattr(torch, home), function)(x @ module.w))
    with pytest.raises(RuntimeError, match="to_float"):
        auto_mixed_precision(network, "O2", torch.bfloat16)(torch.eye(4))


def test_a_black_listed_module_sees_the_networks_keyword_as_it_came() -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)) * 1000 + 0.123
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    positional = auto_mixed_precision(Calls(lambda module, x: module.part(x), norm), "O2", E4M3FN)
    named = auto_mixed_precision(Calls(lambda module, x: module.part(input=x), copy.deepcopy(norm)), "O2", E4M3FN)
    assert torch.equal(named(x=x), positional(x))


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, nn.NLLLoss])
def test_class_weights_take_the_dtype_of_the_scores(loss: Any) -> None:
    part = loss(weight=torch.tensor([0.5, 1.0, 2.0, 4.0]))
    network = auto_mixed_precision(Calls(lambda module, x, y: module.part(x, y), part), "O2", bf16)
    x, y = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 3])
    want = part.__class__(weight=part.weight)(x, y)
    torch.testing.assert_close(network(x, y), want, rtol=2**-6, atol=2**-9)
    inside = Calls(lambda module, x, y: F.cross_entropy((x @ module.w).float(), y, torch.ones(4)))
    with ledger(auto_mixed_precision(inside, "O2", bf16)) as book:
        inside(x, y)
    assert [row.compute for row in book.rows if row.operation == "cross_entropy"] == ["float32"]


def test_the_gradient_of_gamma_is_in_the_format_at_every_use() -> None:
    def run(module: Any, x: Tensor) -> Tensor:
        for _ in range(4):
            x = F.layer_norm(x @ module.w, (4,), module.part.weight) * 1.5
        return x.square().sum()

    network = auto_mixed_precision(Calls(run, nn.LayerNorm(4, bias=False)), "O3", BF16)
    again = Calls(lambda module, x: checkpoint(run, module, x, use_reentrant=True), nn.LayerNorm(4, bias=False))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for net in (network, auto_mixed_precision(again, "O3", BF16)):
        net(x.clone().requires_grad_()).backward()
    torch.testing.assert_close(network.part.weight.grad, again.part.weight.grad, rtol=1e-6, atol=1e-6)  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own compiler raises some
@pytest.mark.parametrize("dtype", [bf16, E4M3FN], ids=str)
@pytest.mark.parametrize("level", ["O2", "auto"])
def test_modules_in_a_compiled_checkpoint_are_cast(level: str, dtype: Any) -> None:
    def run(module: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda y: torch.tanh(module.part(y)), x * 1.5, use_reentrant=False).square().sum()

    torch._dynamo.reset()
    torch.manual_seed(0)
    network = auto_mixed_precision(Calls(run, nn.Linear(4, 4)), level, dtype)
    twin = copy.deepcopy(network)
    x = torch.randn(3, 4)
    network(x).backward()
    # torch's compiler asks for this where a checkpointed function changes what is outside, here which rule is on
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        torch.compile(twin, backend="aot_eager", fullgraph=True)(x).backward()
    assert torch.equal(twin.part.weight.grad, network.part.weight.grad)  # type: ignore[union-attr, arg-type]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("level", LEVELS)
def test_a_compiled_part_of_an_eager_forward_is_cast_once(level: str) -> None:
    def run(compiles: bool) -> Any:
        def forward(module: Any, x: Tensor) -> Tensor:
            part = torch.compile(module.part, backend="aot_eager") if compiles else module.part
            return part(x @ module.w).float().square().sum()

        torch.manual_seed(0)
        network = auto_mixed_precision(Calls(forward, nn.Sequential(nn.Linear(4, 4), nn.Tanh())), level, bf16)
        network(torch.linspace(-1, 1, 12).view(3, 4)).backward()
        return network.part[0].weight.grad  # type: ignore[index, union-attr]

    torch._dynamo.reset()
    assert torch.equal(run(True), run(False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, BF16], ids=str)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_parameter_that_is_the_input_is_cast_anew_in_each_forward(level: str, dtype: Any) -> None:
    """As in a style transfer, where the picture is trained and cut to its range through `.data`."""
    net, picture = auto_mixed_precision(nn.Identity(), level, dtype), nn.Parameter(torch.zeros(2))
    for value in (1.0, 2.0, 3.0):
        picture.data.fill_(value)
        assert net(picture).tolist() == [value, value]


BESIDE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "out": lambda y, c: torch.add(torch.ones_like(y), c, out=y),
    "add_": lambda y, c: y.add_(c).add_(1),
    "+=": lambda y, c: y.__iadd__(c + 1),
    "slice": lambda y, c: y[:1].add_(c[:1] + 1),
    "copy_": lambda y, c: y.copy_(c + 1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, BF16], ids=str)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("write", BESIDE)
def test_a_float32_constant_is_written_in_the_low_precision(write: str, dtype: Any, grad: bool) -> None:
    seen: list[float] = []

    def written(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        BESIDE[write](y, torch.full((2,), 0.3))
        seen.append(y[0].item())
        return y

    with torch.set_grad_enabled(grad):
        out = auto_mixed_precision(Op(written), "O2", dtype)(torch.ones(2))
    assert seen == [1.296875]
    assert out[0].item() == 1.296875
