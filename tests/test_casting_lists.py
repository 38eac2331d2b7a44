"""Own lists, and the lists themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from unittest import TestCase

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.casting import (
    auto_mixed_precision,
    cast_like,
    custom_mixed_precision,
    get_black_list,
    get_white_list,
    ledger,
    to_float,
)
from mpkit.casting.frameworks import APEX_TO_WIDE, TORCH_PROMOTED, TORCH_TO_LOW, TORCH_TO_WIDE
from mpkit.casting.lists import AUTO_PROMOTED, AUTO_TO_LOW, AUTO_TO_WIDE
from mpkit.casting.operations import operator_of, spellings
from mpkit.casting.presets import PRESETS, preset_table
from mpkit.casting.table import MINDSPORE, OTHERS
from mpkit.formats import E4M3FN, dtype_name

X = torch.tensor([[0.5, 1.25], [2.0, 0.75]])


def computes(network: nn.Module, x: Tensor) -> list[tuple[str, str]]:
    with ledger(network) as book:
        network(x)
    return [(row.operation, row.compute) for row in book.rows]


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.LayerNorm(4))


def test_the_lists_are_fresh_copies() -> None:
    for get in (get_white_list, get_black_list):
        get().clear()
        assert get()
    assert get_black_list() == [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm]
    white = get_white_list()
    assert {nn.Conv3d, nn.ConvTranspose1d, nn.Linear, nn.GRUCell, F.relu, F.prelu, F.conv2d, torch.matmul} <= set(white)
    assert nn.LSTM not in white
    assert nn.ReLU not in white


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3FN], ids=str)
def test_the_built_in_lists_give_o1_and_o2(dtype: Any) -> None:
    x = torch.randn(3, 4)
    for level, lists in (("O1", {"white_list": get_white_list()}), ("O2", {"black_list": get_black_list()})):
        torch.manual_seed(0)
        want = auto_mixed_precision(small(), level, dtype)(x)
        torch.manual_seed(0)
        network = small()
        assert custom_mixed_precision(network, dtype=dtype, **lists) is network  # type: ignore[arg-type]
        assert torch.equal(network(x), want)


def test_empty_lists_are_nothing_and_everything() -> None:
    x = torch.randn(3, 4)
    white = custom_mixed_precision(small(), white_list=[])
    assert {compute for _, compute in computes(white, x)} == {"float32"}
    with TestCase().assertLogs(level=logging.WARNING) as logs:
        black = custom_mixed_precision(small(), black_list=[])
    assert {compute for _, compute in computes(black, x)} == {"float16"}
    missing = [record.getMessage().split()[0] for record in logs.records]
    assert missing == ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm"]
    assert black(x).dtype is torch.float32


def test_own_lists_decide() -> None:
    x = torch.randn(3, 4)
    white = custom_mixed_precision(small(), white_list=[nn.ReLU])
    black = custom_mixed_precision(small(), black_list=[*get_black_list(), nn.ReLU])
    assert [compute for _, compute in computes(white, x)] == ["float32", "float32", "float16", "float32"]
    assert [compute for _, compute in computes(black, x)] == ["float16", "float32", "float32", "float32"]


def test_norms_inside_a_black_listed_block_stay_float32_until_the_block_ends() -> None:
    class Block(nn.Sequential):
        pass

    network = nn.Sequential(nn.Linear(4, 4), Block(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.LayerNorm(4)), nn.Tanh())
    custom_mixed_precision(network, black_list=[*get_black_list(), Block], dtype=torch.bfloat16)
    with ledger(network) as book:
        network(torch.randn(3, 4))
    assert [(row.compute, *row.output) for row in book.rows] == [
        ("bfloat16", "bfloat16"),
        *[("float32", "float32")] * 3,
        ("bfloat16", "bfloat16"),
    ]


def test_an_operator_on_the_white_list_stands_for_all_its_spellings() -> None:
    class Spelled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(x, x) + (x @ x) + x.matmul(x) + F.linear(x, x) + torch.einsum("ij,jk->ik", x, x)

    got = computes(custom_mixed_precision(Spelled(), white_list=[torch.matmul]), X)
    assert [compute for name, compute in got if "add" not in name] == ["float16"] * 5
    assert {compute for name, compute in got if "add" in name} == {"float32"}


def test_an_operator_of_a_namespace_is_listed_and_a_setting_of_torch_is_not() -> None:
    for function in (torch.special.expit, torch.linalg.norm):
        network = custom_mixed_precision(Apply(function), white_list=[function], dtype=torch.bfloat16)
        assert computes(network, X) == [(function.__name__, "bfloat16")]
    with pytest.raises(TypeError, match="white_list holds"):
        custom_mixed_precision(nn.Linear(2, 2), white_list=[torch.manual_seed])


def test_custom_lists_record_no_level_and_respect_to_float_like_o1() -> None:
    from mpkit.casting import amp_level

    network = small()
    to_float(network[0], torch.float32)
    custom_mixed_precision(network, white_list=[nn.Linear])
    assert amp_level(network) == ""
    assert computes(network, torch.randn(3, 4))[0] == ("linear", "float32")


BAD = [
    ({"network": 3, "white_list": []}, TypeError, r"nn\.Module"),
    ({}, ValueError, "neither"),
    ({"white_list": [], "black_list": []}, ValueError, "both"),
    ({"white_list": [], "dtype": torch.float32}, ValueError, "dtype"),
    ({"black_list": [], "dtype": "float16"}, ValueError, "dtype"),
    ({"white_list": (nn.Linear,)}, TypeError, "list"),
    ({"black_list": (nn.Linear,)}, TypeError, "list"),
    ({"white_list": {nn.Linear}}, TypeError, "list"),
    ({"white_list": ["Linear"]}, TypeError, "'Linear'"),
    ({"white_list": [nn.Linear(2, 2)]}, TypeError, "Linear"),
    ({"white_list": [int]}, TypeError, "int"),
    ({"white_list": [print]}, TypeError, "print"),
    ({"black_list": [int]}, TypeError, "int"),
    ({"black_list": ["LayerNorm"]}, TypeError, "LayerNorm"),
    ({"black_list": [torch.matmul]}, TypeError, "cannot be kept"),
    # the order of checks: network, one list, dtype, elements
    ({"network": 3, "white_list": (), "black_list": ()}, TypeError, r"nn\.Module"),
    ({"white_list": (), "black_list": (), "dtype": 3}, ValueError, "both"),
    ({"white_list": (), "dtype": 3}, ValueError, "dtype"),
]


@pytest.mark.parametrize(("arguments", "error", "match"), BAD)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        custom_mixed_precision(**({"network": small()} | arguments))


def test_lists_are_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        custom_mixed_precision(small(), [])  # type: ignore[misc]


# --- the operator lists of auto and of the presets --------------------------------------------------------------------


class Apply(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


WIDE_CALLS = {
    "pow": (lambda x: x**2),
    "rpow": (lambda x: 2**x),
    "exp": torch.exp,
    "log": Tensor.log,
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "softmax": lambda x: x.softmax(-1),
    "sum": lambda x: x.sum(),
    "prod": torch.prod,
    "cumsum": lambda x: x.cumsum(0),
    "norm": lambda x: x.norm(),
    "layer_norm": lambda x: F.layer_norm(x, (2,)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group_norm": lambda x: F.group_norm(x, 2),
    "mse_loss": lambda x: F.mse_loss(x, x * 0),
    "l1_loss": lambda x: F.l1_loss(x, x * 0),
    "softplus": F.softplus,
    "rsqrt": torch.rsqrt,
}
LOW_CALLS = {
    "matmul": lambda x: x @ x,
    "mv": lambda x: torch.mv(x, x[0]),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "tensordot": lambda x: torch.tensordot(x, x, 1),
    "tensordot over two dimensions": lambda x: torch.tensordot(x, x, ([0, 1], [0, 1])),
    "multi_dot": lambda x: torch.linalg.multi_dot([x, x, x]),
    "addmm": lambda x: torch.addmm(x, x, x),
    "linear": lambda x: F.linear(x, x),
    "prelu": lambda x: F.prelu(x, x[0, :1]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
}
FOLLOWING_CALLS = {"mean": torch.mean, "relu": F.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "gelu": F.gelu}


@pytest.mark.parametrize("name", WIDE_CALLS)
def test_auto_computes_its_wide_list_in_float32(name: str) -> None:
    network = auto_mixed_precision(Apply(WIDE_CALLS[name]), "auto")
    assert network(X.half()).dtype is torch.float32
    assert torch.equal(network(X.half()), WIDE_CALLS[name](X.half().float()))


@pytest.mark.parametrize("name", LOW_CALLS)
def test_auto_computes_its_low_list_in_low(name: str) -> None:
    network = auto_mixed_precision(Apply(LOW_CALLS[name]), "auto")
    assert network(X).dtype is torch.float16
    assert torch.equal(network(X), LOW_CALLS[name](X.half()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FOLLOWING_CALLS)
def test_auto_leaves_the_others_in_the_dtype_of_their_inputs(name: str, dtype: torch.dtype) -> None:
    assert auto_mixed_precision(Apply(FOLLOWING_CALLS[name]), "auto")(X.to(dtype)).dtype is dtype


def test_auto_promotes_to_the_widest_input() -> None:
    def both(a: Tensor, b: Tensor) -> list[Tensor]:
        return [torch.cat([a, b]), torch.addcmul(a, a, b), torch.dot(a[0], b[0])]

    network = auto_mixed_precision(Apply(both), "auto")
    assert {x.dtype for x in network(X.half(), X)} == {torch.float32}
    assert {x.dtype for x in network(X.half(), X.half())} == {torch.float16}


WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_add_": lambda x, y: x.index_add_(0, torch.tensor([1, 1]), y),
    "index_copy_": lambda x, y: x.index_copy_(0, torch.tensor([1, 0]), y),
    "index_put_": lambda x, y: x.index_put_((torch.tensor([1, 0]),), y),
    "scatter_add_": lambda x, y: x.scatter_add_(0, torch.tensor([[1, 0]]), y),
    "scatter_reduce_": lambda x, y: x.scatter_reduce_(0, torch.tensor([[1, 0]]), y, "amax"),
    "masked_scatter_": lambda x, y: x.masked_scatter_(x > 1, y),
    "lerp_": lambda x, y: x.lerp_(y, 0.5),
}


@pytest.mark.parametrize("name", WRITES)
def test_auto_writes_into_a_tensor_what_it_takes(name: str) -> None:
    """As a mixture of experts does, whose sum is float32 and whose layers without a bias give 16 bits."""
    network = auto_mixed_precision(Apply(WRITES[name]), "auto")
    for into, given in ((X, X.half() * 3), (X.half(), X * 3)):
        held = into.clone()
        got = network(held, given)
        assert got is held
        assert torch.equal(got, WRITES[name](into.clone(), given.to(into.dtype)))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: x.scatter_reduce(0, torch.tensor([[1, 0]]), y, "sum"),
        lambda x, y: x.put(torch.tensor([1, 0]), y[0]),
        lambda x, y: torch.meshgrid(x[0], y[0], indexing="ij")[0],
        lambda x, y: torch.isclose(x, y).to(x.dtype) + y,
        lambda x, y: F.binary_cross_entropy(x / 4, y / 4),
        lambda x, y: torch.heaviside(x, y),
        lambda x, y: F.embedding_bag(torch.tensor([[0, 1], [1, 0]]), x, per_sample_weights=y, mode="sum"),
        lambda x, y: torch.linalg.solve(x, y),
    ],
)
def test_auto_promotes_where_torch_has_a_form_for_equal_dtypes_only(call: Callable[..., Tensor]) -> None:
    network = auto_mixed_precision(Apply(call), "auto")
    assert torch.equal(network(X, X.half()), call(X, X))
    assert torch.equal(network(X.half(), X), call(X, X))


def test_auto_returns_float32_from_a_layer_with_bias_and_low_without() -> None:
    for bias, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        for layer, x in ((nn.Linear(2, 2, bias=bias), X), (nn.Conv1d(2, 2, 1, bias=bias), X[None])):
            assert auto_mixed_precision(layer, "auto", torch.bfloat16)(x).dtype is dtype


def test_a_module_set_by_to_float_wins_over_auto() -> None:
    network = nn.Sequential(to_float(Apply(torch.exp), torch.float16))
    assert auto_mixed_precision(network, "auto")(X).dtype is torch.float16


def test_every_listed_operator_exists_in_torch() -> None:
    for names in (AUTO_TO_LOW, AUTO_TO_WIDE, AUTO_PROMOTED, TORCH_TO_LOW, TORCH_TO_WIDE, TORCH_PROMOTED, APEX_TO_WIDE):
        assert spellings(*names)
    with pytest.raises(ValueError, match="no function named"):
        spellings("matmull")


def test_operators_are_found_from_any_spelling() -> None:
    for function in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
        assert operator_of(function) == "matmul"
    special = (torch.special.expit, torch.linalg.norm, torch.special.expm1, torch.linalg.vector_norm, F.sigmoid)
    assert [operator_of(function) for function in special] == ["sigmoid", "norm", "expm1", "norm", "sigmoid"]
    for stranger in (
        print,
        nn.Linear,
        "matmul",
        None,
        3,
        len,
        [],
        torch.manual_seed,
        torch.set_num_threads,
        torch.save,
    ):
        assert operator_of(stranger) is None


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto"])
@pytest.mark.parametrize("call", [lambda x: torch.tensordot(x, x, 1), lambda x: torch.linalg.multi_dot([x, x, x])])
def test_functions_made_of_products_are_cast_at_every_level(level: str, call: Any) -> None:
    want = call(X.bfloat16())
    got = auto_mixed_precision(Apply(call), level, torch.bfloat16)(X)
    assert torch.equal(got.float(), want.float())
    assert got.dtype is (torch.bfloat16 if level == "auto" else torch.float32)


# --- presets ----------------------------------------------------------------------------------------------------------


def test_torch_autocast_on_cuda_is_reproduced_where_the_cpu_lists_agree() -> None:
    """torch's own autocast is the oracle for what its CPU lists share with the CUDA lists."""

    def shared(x: Tensor) -> list[Tensor]:
        y = x @ x
        return [
            y,
            F.linear(x, x, x[0]),
            F.mse_loss(y, y * 2),
            torch.cat([y, x]),
            F.relu(y),
            y + x,
            torch.bmm(x[None], x[None]),
            F.cross_entropy(y, torch.tensor([0, 1])),
        ]

    with torch.autocast("cpu", torch.bfloat16):
        want = shared(X)
    got = cast_like(Apply(shared), "torch_autocast", torch.bfloat16)(X)
    assert [x.dtype for x in got] == [x.dtype for x in want]
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_torch_autocast_preset_has_the_cuda_lists_that_the_cpu_lacks() -> None:
    for name in ("softmax", "sum", "exp", "layer_norm"):
        with torch.autocast("cpu", torch.float16):
            assert WIDE_CALLS[name](X.half()).dtype is torch.float16
        assert cast_like(Apply(WIDE_CALLS[name]), "torch_autocast")(X.half()).dtype is torch.float32


@pytest.mark.parametrize("preset", ["torch_autocast", "apex_O1"])
def test_rarer_products_are_on_the_lists_too(preset: str) -> None:
    calls = {
        "addr": lambda x: torch.addr(x, x[0], x[1]),
        "conv_tbc": lambda x: torch.conv_tbc(x[None], x[None], x[0]),
    }
    if preset == "torch_autocast":
        calls["chain_matmul"] = lambda x: torch.linalg.multi_dot([x, x, x])
    for name, call in calls.items():
        assert cast_like(Apply(call), preset, torch.bfloat16)(X).dtype is torch.bfloat16, name
    if preset == "torch_autocast":
        assert cast_like(Apply(lambda x: torch.vdot(x[0], x[0].half())), preset)(X).dtype is torch.float32


def test_apex_o2_keeps_affine_batch_norms_only() -> None:
    network = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False), nn.LayerNorm(2))
    got = computes(cast_like(network, "apex_O2"), X)
    assert [compute for _, compute in got] == ["float32", "float16", "float16"]


def test_keras_gives_low_results_even_from_a_final_softmax() -> None:
    assert cast_like(nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)), "keras_mixed_float16")(X).dtype is torch.float16


def test_one_table_compares_them() -> None:
    table = preset_table()
    assert {row["preset"] for row in table} == {
        *PRESETS,
        *(f"mindspore {level}" for level in ("O1", "O2", "O3", "auto")),
    }
    assert all(set(row) == set(table[0]) for row in table)


class Doing(nn.Module):
    """A network whose forward is one call; the weight is there for optimizers and levels."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner, self.call = nn.Linear(2, 2), call

    def forward(self, *args: Tensor) -> Tensor:
        return self.call(*args)


@pytest.mark.parametrize("name", ["addmm", "addmv", "baddbmm"])
@pytest.mark.parametrize("numbers", [{}, {"beta": 0.5, "alpha": 3}])
def test_a_sum_with_a_product_takes_the_product_alone_in_low(name, numbers):
    generator = torch.Generator().manual_seed(0)
    lead = (2,) if name == "baddbmm" else ()
    a, b = torch.randn(*lead, 3, 4, generator=generator), torch.randn(*lead, 4, 3, generator=generator)
    b = b[:, 0] if name == "addmv" else b
    more = torch.randn((a.half() @ b.half()).shape, generator=generator)
    net = auto_mixed_precision(Doing(lambda *args: getattr(torch, name)(*args, **numbers)), "O1")
    product = (a.half() @ b.half()).float()
    want = numbers.get("beta", 1) * more + numbers.get("alpha", 1) * product
    assert torch.equal(net(more, a, b), want)
    assert not torch.equal(want, getattr(torch, name)(more, a, b, **numbers))  # float16 leaves a trace


@pytest.mark.parametrize("name", MINDSPORE | OTHERS)
def test_the_table_says_which_levels_cast_down_what_a_module_asks_to_have_in_float32(name: str) -> None:
    row = (MINDSPORE | OTHERS)[name]
    asks = Apply(lambda x: x.float().square())
    network = auto_mixed_precision(asks, name) if name in MINDSPORE else cast_like(asks, name)
    assert dict(computes(network, X))["square"] == (dtype_name(row.dtype) if row.overrides else "float32")
