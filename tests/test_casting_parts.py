"""The parts of casting by themselves, where their answers turn: what a rule leaves alone, and what a format binds."""

from __future__ import annotations

import runpy
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.casting import (
    auto_mixed_precision,
    calls,
    cast_like,
    custom_mixed_precision,
    entrances,
    forward,
    frameworks,
    graphs,
    handlers,
    ledger,
    operations,
    remove_mixed_precision,
    rules,
    watching,
    within,
)
from mpkit.casting.handlers import _delivered
from mpkit.casting.mode import LOCAL, CastMode
from mpkit.casting.table import MINDSPORE, OTHERS
from mpkit.casting.targets import MARK, Emulated, float_tensors, marked, precision, target_of
from mpkit.formats import E5M2, FP64, FloatFormat

BIT = 2.0**-12  # beside 1 it is in float32, and in no narrower format


class Apply(nn.Module):
    """A network whose forward is a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


class Listed(Apply):
    """A class to stand on a white list."""


def grown(x: Tensor) -> Tensor:
    return x.relu().add_(BIT)


@pytest.mark.parametrize(
    ("cast", "after"),
    [
        (lambda net: custom_mixed_precision(net, white_list=[Listed], dtype=E5M2), 1 + BIT),
        (lambda net: auto_mixed_precision(net, "O3", E5M2), 1.0),
    ],
    ids=["white list", "O3"],
)
def test_what_only_moves_values_gives_float32_in_a_listed_module_and_the_format_at_o3(cast: Any, after: float) -> None:
    """The result of `relu` decides what the sum written into it is rounded to."""
    assert cast(Listed(grown))(torch.ones(1)).item() == after


@pytest.mark.parametrize(("listed", "after"), [([F.relu], 1.0), ([torch.tanh], 1 + BIT)])
def test_relu_in_place_computes_in_low_where_relu_is_listed(listed: list[Any], after: float) -> None:
    x = torch.tensor([1 + BIT, -1.0])
    y = custom_mixed_precision(Apply(torch.relu_), white_list=listed, dtype=torch.bfloat16)(x)
    assert y is x
    assert x.tolist() == [after, 0.0]


@pytest.mark.parametrize(("level", "dtype"), [("O1", torch.float32), ("O2", torch.bfloat16), ("O3", torch.bfloat16)])
def test_a_module_without_an_operation_casts_its_input_where_the_level_does(level: str, dtype: torch.dtype) -> None:
    seen = []
    net = nn.Sequential(nn.Identity(), nn.Tanh())
    net[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    wide = torch.ones(1)  # no argument of the network, which would be cast on its way in
    outer = Apply(lambda x: net[1](net[0](wide)))
    outer.net = net
    auto_mixed_precision(outer, level, torch.bfloat16)(torch.ones(1))
    assert seen == [dtype]


def test_a_sparse_tensor_made_from_another_is_bound_to_the_format_by_itself() -> None:
    """It has no one block of memory, so no write into the other is a write into it."""

    def thrice(x: Tensor) -> Tensor:
        first = x * 1
        second = first.neg()
        first.mul_(2)
        return second.mul_(1.1).mul_(1.1).to_dense()  # each rounded to 1, where 1.21 by itself rounds to 1.25

    assert auto_mixed_precision(Apply(thrice), "O3", E5M2)(torch.eye(2).to_sparse()).tolist() == [[-1, 0], [0, -1]]


class OwnLinear(nn.Linear):
    """torch's code, under another name."""


def wrapped(layer: nn.Linear) -> nn.Linear:
    layer.forward = lambda x: F.linear(x, layer.weight, layer.bias)  # type: ignore[method-assign]
    return layer


LAYER, IMAGE = torch.ones(2, 4), torch.ones(1, 2, 4, 4)


@pytest.mark.parametrize(
    ("leaf", "x", "by_name", "seen"),
    [
        (nn.Linear(4, 3), LAYER, False, False),
        (nn.Softmax(-1), LAYER, False, False),
        (nn.Conv2d(2, 3, 3), IMAGE, False, False),
        (nn.Linear(4, 3), LAYER, True, True),
        (OwnLinear(4, 3), LAYER, False, True),
        (wrapped(nn.Linear(4, 3)), LAYER, False, True),
        (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), IMAGE, False, True),
        (nn.ReLU(inplace=True), LAYER, False, True),
    ],
    ids=lambda value: "" if isinstance(value, Tensor) else str(value),
)
def test_a_mode_looks_only_into_modules_whose_operation_is_not_known(
    leaf: nn.Module, x: Tensor, by_name: bool, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look costs more than a small kernel."""
    looks: list[str] = []
    plain = CastMode.__torch_function__

    def look(mode: CastMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        looks.append(func.__name__)
        return plain(mode, func, types, args, kwargs)

    net = Apply(lambda x: leaf(input=x) if by_name else leaf(x))
    net.leaf = leaf
    auto_mixed_precision(net, "O2", torch.bfloat16)
    monkeypatch.setattr(CastMode, "__torch_function__", look)
    net(x.clone())
    inside = {"linear", "softmax", "layer_norm", "conv2d", "relu", "relu_"} & {*looks}
    assert bool(inside) == seen


@pytest.fixture
def own_operators() -> Iterator[Any]:
    """Operators of somebody else's, called by their overloads: one result is new, one is written where it is asked."""
    made = torch.library.Library("mpkit_parts", "DEF")
    made.define("scaled(Tensor x, *, float by) -> Tensor")
    made.define("twice(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
    made.impl("scaled", lambda x, *, by: x * by, "CompositeExplicitAutograd")
    made.impl("twice", lambda x, *, out: out.copy_(x + x), "CompositeExplicitAutograd")
    yield torch.ops.mpkit_parts
    made._destroy()


@pytest.mark.parametrize("dtype", [torch.bfloat16, E5M2], ids=str)
def test_an_overload_of_somebody_else_computes_in_low_and_writes_where_it_was_asked_to(
    dtype: torch.dtype | FloatFormat, own_operators: Any
) -> None:
    wide, out = torch.tensor([1 + BIT, 3.0]), torch.zeros(2)  # no argument, which would be cast on its way in
    y = auto_mixed_precision(Apply(lambda x: own_operators.scaled.default(wide, by=0.5)), "O3", dtype)(wide)
    assert y.tolist() == [0.5, 1.5]
    y = auto_mixed_precision(Apply(lambda x: own_operators.twice.default(wide, out=out)), "O3", dtype)(wide)
    assert out.tolist() == y.tolist() == [2.0, 6.0]
    assert out.dtype is torch.float32


def test_an_overload_that_writes_is_in_place_under_a_rule_that_casts_and_alone_under_none() -> None:
    def overload(namespace: str, *, writes: bool) -> Any:
        arguments = (SimpleNamespace(is_write=writes),)
        return SimpleNamespace(namespace=namespace, _schema=SimpleNamespace(is_mutable=writes, arguments=arguments))

    casts = rules.everything(torch.bfloat16)
    assert rules.for_overload(casts, overload("somebody", writes=True)) is handlers.in_place
    assert rules.for_overload(casts, overload("somebody", writes=False)) is casts.default
    assert rules.for_overload(casts, overload("aten", writes=True)) is None
    for writes in (True, False):
        assert rules.for_overload(rules.plain(), overload("somebody", writes=writes)) is None


def test_a_summary_counts_the_casts_of_each_module() -> None:
    net = auto_mixed_precision(nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1), nn.Linear(4, 2, bias=False)), "O2")
    with ledger(net) as book:
        net(torch.ones(2, 3))
    counts = Counter(cast.module for cast in book.casts)
    assert len({counts[name] for name in "012"}) == 3
    assert {line.module: line.casts for line in book.summary()} == {name: counts[name] for name in "012"}
    assert all(type(row.bytes) is type(row.saved) is int for row in book.rows)  # bytes are whole
    assert type(book.predicted_bytes) is type(book.measured_bytes) is int


@pytest.mark.parametrize(("way", "dtype"), [("area", torch.bfloat16), ("nearest", torch.float32)])
def test_autocast_knows_the_way_of_an_interpolation_given_in_order(way: str, dtype: torch.dtype) -> None:
    """So the compiler hands it over; outside of it torch gives all but the input by name."""
    image = torch.ones(1, 1, 4, 4, dtype=torch.bfloat16)
    spelled: list[tuple[Any, Any]] = [
        ((image, None, 0.5, way), {}),
        ((image, None, 0.5), {"mode": way}),
        ((image,), {"scale_factor": 0.5, "mode": way}),
    ]
    for args, kwargs in spelled:
        assert frameworks._interpolated.run(CastMode(), F.interpolate, args, kwargs).dtype is dtype
    plain = frameworks._interpolated.run(CastMode(), F.interpolate, (image,), {"scale_factor": 0.5})
    assert plain.dtype is torch.float32  # "nearest" where no way is given


def test_a_mode_keeps_the_casts_of_parameters_alone_until_the_forward_ends() -> None:
    """What the forward itself made would be held for as long."""
    weight, wide = nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    held: list[set[int]] = []

    def forward(x: Tensor) -> Tensor:
        for _ in range(3):
            x = x @ weight + x @ wide
        assert LOCAL.mode is not None
        held.append({key for key, _ in LOCAL.mode.kept})
        return x

    net = auto_mixed_precision(Apply(forward), "O2", torch.bfloat16)
    net(torch.ones(2, 2))
    assert held == [{id(weight)}]
    assert LOCAL.mode is None


# --- beside compiled graphs

TORCH, DYNAMO, INDUCTOR = (graphs._TORCH + "/nn/modules/module.py", graphs._RUNS_GRAPHS, graphs._INDUCTOR)


@pytest.mark.parametrize(
    ("files", "inside"),
    [
        (["<eval_with_key>.1", DYNAMO], True),
        (["<eval_with_key>.1", TORCH, TORCH, DYNAMO], True),
        ([TORCH, "<eval_with_key>.1", DYNAMO], True),
        (["/tmp/cxyz.py", INDUCTOR, TORCH, DYNAMO], True),  # the file that inductor wrote, and who called it
        ([TORCH, DYNAMO], False),  # torch's own code, but no graph
        (["/home/me/hook.py", "<eval_with_key>.1", DYNAMO], False),
        (["<eval_with_key>.1", "/home/me/hook.py", DYNAMO], False),
        (["<eval_with_key>.1", TORCH], False),  # nobody runs it
        (["<eval_with_key>.1", "/home/me/hook.py _fn", DYNAMO], False),  # nobody else's function of that name
        (
            ["<eval_with_key>.1", f"{DYNAMO} set_up", "/home/me/train.py"],
            False,
        ),  # torch's own code, which runs no graph
        ([], False),
    ],
)
def test_an_operation_is_a_graphs_own_if_nobody_elses_code_is_between(files: list[str], inside: bool) -> None:
    frame: Any = None
    for file in reversed(files):
        place, _, name = file.partition(" ")
        code = SimpleNamespace(co_filename=place, co_name=name or ("_fn" if file == DYNAMO else "forward"))
        frame = SimpleNamespace(f_code=code, f_back=frame)
    assert graphs.in_graph(frame) == inside


def test_graphs_are_looked_for_from_the_first_thing_that_was_compiled_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at who calls costs too much where no graph can run; once seen, a graph is remembered."""
    dynamo = SimpleNamespace(cached_backends={})
    monkeypatch.setitem(sys.modules, "torch._dynamo.eval_frame", dynamo)
    fresh = runpy.run_path(graphs.__file__)["may_run"]
    dynamo.cached_backends[0] = None  # what was kept from the compiler by `torch.compiler.disable`
    assert [fresh(), fresh()] == [False, False]
    dynamo.cached_backends[1] = print
    assert fresh()
    dynamo.cached_backends.clear()
    assert fresh()


def test_nothing_looks_for_graphs_before_somebody_compiles() -> None:
    """Whoever imported a recipe or a boost was taken for somebody who compiles, and each operation cost a look more."""
    code = """if True:
        import sys, torch, mpkit.casting
        assert "torch._dynamo" not in sys.modules, "the compiler takes a second to import"
        import mpkit.boost
        from mpkit.casting import graphs
        net = torch.nn.Linear(2, 2)
        torch.optim.SGD(net.parameters(), 0.1)
        print(graphs.may_run())
        torch.compile(net, backend="eager")
        print(graphs.may_run())
    """
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False", "True"]


def test_counting_what_an_operation_loses_leaves_what_it_writes_into_alone() -> None:
    """It is computed again in float64, and a float64 tensor is its own copy there."""
    x = torch.tensor([-1.0, 2.0], dtype=torch.float64)
    net = Apply(lambda x: F.elu(x, inplace=True))
    with ledger(net, count=True) as book:
        net(x)
    assert x.tolist() == torch.tensor([-1.0, 2.0], dtype=torch.float64).expm1().where(x < 0, 2.0).tolist()
    assert (book.rows[0].flushed, book.rows[0].overflowed) == (0, 0)


class Spelled(nn.Linear):
    """A layer that calls its product in its own words."""

    def __init__(self, words: Callable[..., Tensor], bias: bool) -> None:
        super().__init__(16, 16, bias=bias)
        self.words = words

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x, self.weight, self.bias)


@pytest.mark.parametrize("recipe", ["te_hybrid_delayed", "te_current"])
@pytest.mark.parametrize(
    ("words", "bias"),
    [
        (lambda x, w, b: F.linear(x, w, bias=b), True),
        (lambda x, w, b: F.linear(x, weight=w, bias=b), True),
        (lambda x, w, b: F.linear(bias=b, weight=w, input=x), True),
        (lambda x, w, b: F.linear(x, w), False),
        (lambda x, w, b: F.linear(input=x, weight=w), False),
    ],
)
def test_a_product_under_a_recipe_is_the_same_however_it_is_called(words: Any, bias: bool, recipe: str) -> None:
    torch.manual_seed(0)
    plain, spelled, x = nn.Linear(16, 16, bias=bias), Spelled(words, bias), torch.randn(16, 16)
    spelled.load_state_dict(plain.state_dict())
    want = cast_like(nn.Sequential(plain), recipe)(x)
    assert torch.equal(cast_like(nn.Sequential(spelled), recipe)(x), want)
    assert not torch.equal(want, F.linear(x, plain.weight, plain.bias))  # rounded, so it was seen


class Helped(nn.Module):
    """A network whose forward calls another method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def helper(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.helper(x)


def test_a_method_is_watched_only_outside_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the forward, and within the level, it computes at the level: there is nothing to warn of."""
    entered: list[str] = []
    plain = watching.Watch.__enter__
    monkeypatch.setattr(watching.Watch, "__enter__", lambda watch: entered.append("") or plain(watch))
    net, x = auto_mixed_precision(Helped(), "O2", torch.bfloat16), torch.ones(2, 2)
    net(x)
    with within(net):
        net.helper(x)
    assert entered == []
    with pytest.warns(UserWarning, match="helper"):
        net.helper(x)
    assert entered == [""]
    Helped().helper(x)  # of the same class, and at no level
    remove_mixed_precision(net).helper(x)
    assert entered == [""]


@pytest.mark.parametrize("level", ["O3", "auto"])
@pytest.mark.parametrize(
    ("product", "shape", "words"),
    [
        (F.conv1d, (4, 4, 3), {"dilation": 2}),
        (F.conv2d, (4, 2, 3, 3), {"groups": 2}),
        (F.conv2d, (4, 4, 3, 3), {"padding": 2, "dilation": 2}),
        (F.conv_transpose2d, (4, 4, 3, 3), {"dilation": 2}),
        (F.conv_transpose2d, (4, 4, 3, 3), {"groups": 2}),
        (F.conv_transpose1d, (4, 4, 3), {"stride": 2, "output_padding": 1}),
    ],
)
def test_what_a_convolution_is_not_told_is_as_in_torch(level: str, product: Any, shape: Any, words: Any) -> None:
    """A word given by name leaves the words before it at torch's own values."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randint(-2, 3, shape, generator=generator).float()
    x = torch.randint(-2, 3, (1, 4, *[7] * (len(shape) - 2)), generator=generator).float()  # small whole numbers: exact
    network = auto_mixed_precision(Apply(lambda v: product(v, weight, **words)), level, torch.bfloat16)
    # only another processor's way to a whole number may end beside it, by a rounding of float32
    torch.testing.assert_close(network(x).float(), product(x, weight, **words), rtol=2.0**-22, atol=2.0**-22)


def test_hooks_of_sharding_run_without_casts_and_those_of_others_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What gathers a module's parameters inside a cast forward must not get rounded ones."""
    monkeypatch.setattr(forward, "may_be_sharded", lambda: True)
    seen: list[torch.dtype] = []

    def gather(module: nn.Module, args: Any) -> None:
        seen.append((torch.eye(2) @ torch.eye(2)).dtype)

    def other(module: nn.Module, args: Any) -> None:
        gather(module, args)

    gather.__module__ = "torch.distributed.fsdp._fully_shard"
    network = auto_mixed_precision(nn.Sequential(nn.Linear(2, 2)), "O3", torch.bfloat16)
    for hook in (gather, other):
        network[0].register_forward_pre_hook(hook)
    network(torch.ones(1, 2))
    assert seen == [torch.float32, torch.bfloat16]


def test_the_loss_is_computed_in_float32_at_the_levels_of_mindspore_that_cast_results() -> None:
    assert {row.name for row in (*MINDSPORE.values(), *OTHERS.values()) if row.wide_loss} == {"O2", "O3", "auto"}


@pytest.mark.parametrize("listed", [True, False])
def test_the_rows_of_a_table_come_in_float32_from_a_listed_module_and_in_low_at_o3(listed: bool) -> None:
    network: Any = nn.Sequential(nn.Embedding(4, 3))
    nn.init.constant_(network[0].weight, 1 + BIT)
    if listed:
        custom_mixed_precision(network, white_list=[nn.Embedding], dtype=torch.bfloat16)
    else:
        auto_mixed_precision(network, "O3", torch.bfloat16)
    inside: list[torch.dtype] = []
    network[0].register_forward_hook(lambda module, args, out: inside.append(out.dtype))
    rows = network(torch.tensor([1, 2]))
    assert inside == [torch.float32 if listed else torch.bfloat16]
    assert rows.eq(1).all()  # rounded either way


def test_the_rows_of_a_table_inside_a_listed_module_come_in_float32_too() -> None:
    """The mode of the module around it is one that casts, so the table runs without it."""
    table = nn.Embedding(4, 3)
    nn.init.constant_(table.weight, 1 + BIT)
    inside: list[Tensor] = []
    network = Listed(lambda ids: inside.append(table(ids)) or inside[0])
    network.table = table
    custom_mixed_precision(network, white_list=[Listed], dtype=torch.bfloat16)(torch.tensor([1, 2]))
    assert [rows.dtype for rows in inside] == [torch.float32]
    assert inside[0].eq(1).all()  # rounded


def test_only_a_part_of_a_network_asks_who_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network's own forward is its front door; the look costs as much as a small layer."""
    asked: list[object] = []
    monkeypatch.setattr(forward, "warn_if_passed_by", lambda module, *_: asked.append(module))
    network = auto_mixed_precision(nn.Sequential(nn.Linear(2, 2)), "O1", torch.bfloat16)
    network(torch.ones(1, 2))
    assert asked == []
    network[0](torch.ones(1, 2))
    assert asked == [network[0]]


@pytest.mark.parametrize("first", [torch.bfloat16, torch.float32])
def test_operands_of_two_kinds_are_computed_in_the_promoted_one(first: torch.dtype) -> None:
    last = torch.float32 if first is torch.bfloat16 else torch.bfloat16
    assert calls._common([torch.ones(1, dtype=first), torch.ones(1, dtype=last)]) is torch.float32
    assert calls._common([torch.ones(1, dtype=first)] * 2) is first
    assert calls._common([]) is None


@pytest.mark.parametrize("count", [2, 7, 8])
def test_a_bag_of_rows_takes_its_arguments_in_order_or_by_name(count: int) -> None:
    """In order as the compiler hands them over; the eighth says whether the gradient is sparse."""
    table = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).bfloat16().float().requires_grad_()
    names = ("offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse")
    more = (None, None, 2.0, False, "sum", True)
    args = (torch.tensor([[0, 2]]), table, *more[: count - 2])
    kwargs = dict(zip(names[count - 2 :], more[count - 2 :]))
    out: Any = handlers.summed_rows(torch.bfloat16, None).run(CastMode(), F.embedding_bag, args, kwargs)
    assert torch.equal(out, (table[0] + table[2]).bfloat16()[None])
    out.sum().backward()
    assert table.grad is not None
    assert table.grad.is_sparse


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inner", ["O1", "O2", "O3", "auto"])
@pytest.mark.parametrize("outer", ["O1", "auto"])
def test_a_level_on_the_whole_takes_the_place_of_one_on_a_part(inner: str, outer: str) -> None:
    """Only what `to_float` set is the user's own, which O1 and auto leave as it is."""
    part, whole = (nn.Sequential(nn.Sequential(nn.LayerNorm(2)), nn.Linear(2, 2)) for _ in range(2))
    auto_mixed_precision(part[0], inner, torch.bfloat16)
    for network in (part, whole):
        auto_mixed_precision(network, outer, torch.float16)
    inside: list[torch.dtype] = []
    for network in (part, whole):
        network[0][0].register_forward_hook(lambda module, args, out: inside.append(out.dtype))
        network(torch.ones(1, 2))
    assert inside[0] is inside[1]


def test_a_module_that_one_holder_has_is_not_looked_for_on_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look costs as much as a small layer."""
    looked: list[object] = []
    monkeypatch.setattr(forward.Forward, "_called_on", lambda self, frame: looked.append(frame) or self.module)
    network = auto_mixed_precision(nn.Sequential(nn.Linear(2, 2)), "O1", torch.bfloat16)
    network(torch.ones(1, 2))
    assert looked == []


@dataclass
class Pair:
    x: Tensor
    number: int = 3


def test_the_tensors_of_a_dataclass_are_found_and_its_class_holds_none() -> None:
    x, y = torch.ones(1), torch.ones(2, dtype=torch.float16)
    assert [id(t) for t in float_tensors({"a": Pair(x), "b": [y, Pair, torch.ones(1, dtype=torch.int64)]})] == [
        id(x),
        id(y),
    ]


def test_float32_itself_can_be_emulated_and_float64_cannot() -> None:
    within, beyond = FloatFormat("e8m23", 8, 23), FP64
    assert target_of(within) == target_of(within, within) == Emulated(within, within)
    for formats in ((beyond, None), (within, beyond)):
        with pytest.raises(ValueError, match=r"emulated inside float32, .* is wider"):
            target_of(*formats)


def test_of_what_an_operation_moves_only_its_new_float32_results_are_bound_to_the_format() -> None:
    """As of a sort: the places are whole numbers. A tensor that was only handed on stays what it was."""
    target, x = Emulated(E5M2, E5M2), torch.tensor([2.0, 1.0])
    values, places = handlers.moved(tuple(x.sort()), (x,), target)  # type: ignore[misc]
    assert (precision(values), values.tolist()) == (target, [1.0, 2.0])
    assert not hasattr(places, MARK)
    assert handlers.moved(x, (x,), target) is x
    assert not hasattr(x, MARK)


def test_what_is_written_beside_a_format_is_not_in_it() -> None:
    """`out=` of a result that was rounded to no format, or to another one."""
    target = Emulated(E5M2, E5M2)
    place = marked(torch.zeros(1), target)
    assert precision(_delivered(torch.tensor([1 + BIT]), (), {"out": place})) == torch.float32
    assert place.item() == 1 + BIT
    place = marked(torch.zeros(1), target)
    assert precision(_delivered(marked(torch.ones(1), target), (), {"out": place})) == target
    plain = torch.zeros(1)
    assert _delivered(torch.ones(1), (), {"out": plain}) is plain
    assert precision(plain) == torch.float32
    assert not hasattr(plain, MARK)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_activations_are_kept_for_a_backward_pass_that_may_come(trained: bool, graph: bool) -> None:
    net = nn.Linear(2, 2).requires_grad_(trained)
    with torch.set_grad_enabled(graph), ledger(net) as book:
        net(torch.ones(1, 2))
    assert sum(row.saved for row in book.rows) == (8 if trained and graph else 0)  # the input, two float32


def test_a_name_that_ends_in_an_underscore_writes_in_place_unless_it_begins_with_one() -> None:
    assert {Tensor.add_, Tensor.relu_, torch.relu_, Tensor.__iadd__, Tensor.__setitem__} <= operations.IN_PLACE
    others = {"__init__", "__add__", "requires_grad_", "share_memory_", "squeeze_", "detach_", "_foreach_add_"}
    assert not others & {f.__name__ for f in operations.IN_PLACE}


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)

    def encode(self, x: Tensor) -> Tensor:
        return self.layer(x) + 1


def test_a_warning_names_the_line_where_a_method_passes_its_level_by() -> None:
    net = auto_mixed_precision(Encoder(), "O1")
    with pytest.warns(UserWarning, match=r"Encoder\.encode passes level O1 by") as told:
        net.encode(torch.ones(1, 2))  # type: ignore[operator]
    line = Encoder.encode.__code__.co_firstlineno + 1  # what calls the layer
    assert [(w.filename, w.lineno) for w in told] == [(__file__, line)]
    assert "the modules that it calls are cast, what it computes itself is not" in str(told[0].message)


def test_a_method_passes_by_the_level_of_its_own_network_alone() -> None:
    class Calls(Encoder):
        def on(self, other: nn.Module, x: Tensor) -> Tensor:
            return other(x)

    net, other = auto_mixed_precision(Calls(), "O1"), auto_mixed_precision(Encoder(), "O1")
    without = Calls()  # its layer has a level, it has none
    without.layer = other.layer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.on(other.layer, torch.ones(1, 2))  # type: ignore[operator]
        without.encode(torch.ones(1, 2))


def test_the_methods_that_torch_gives_to_every_module_are_not_watched() -> None:
    assert not list(entrances.methods(nn.Linear))
    assert {base for base, _, _ in entrances.methods(Encoder)} == {Encoder}
