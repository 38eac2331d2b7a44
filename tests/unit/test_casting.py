"""Levels, to_float and removal: what computes in which dtype, and what stays as it was."""

from __future__ import annotations

import copy
import operator
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import Op, Written
from torch import Tensor, nn

from mpkit.casting import (
    LEVELS,
    PRESETS,
    amp_level,
    auto_mixed_precision,
    cast_like,
    custom_mixed_precision,
    ledger,
    remove_mixed_precision,
    to_float,
)
from mpkit.formats import E4M3FN, E5M2, FP16, FP64

CASTING_LEVELS = LEVELS[1:]
LOWS = [torch.float16, torch.bfloat16]


class Functions(nn.Module):
    """The same arithmetic as layers, called as functions and symbols, with in-place steps and a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4) / 2)
        self.bias = nn.Parameter(torch.randn(4))
        self.table = nn.Embedding(7, 4)
        self.again = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, index: Tensor, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        y = F.relu(x @ self.w + self.table(index)) * 1
        y += 1
        y.mul_(0.5)
        y = torch.einsum("ij,jk->ik", y, self.w.T)
        y = torch.addmm(self.bias, y, self.w) + F.linear(y, self.w, self.bias)
        y = self.again(self.again(y))
        y = 1 * F.scaled_dot_product_attention(y[None], y[None], y[None])[0]
        y[0] = 0.5
        picked = torch.cat([y, x]).argmax(-1)
        return {"p": torch.softmax(y, -1), "both": (picked, y.mean()), "extra": extra["x"] * 2 if extra else None}


def convolutional() -> nn.Module:
    features = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten())
    return nn.Sequential(*features, nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 3, bias=False), nn.Softmax(-1))


def shared() -> nn.Module:
    """One weight used by two modules, tied."""
    inp, out = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    out.weight = inp.weight
    return Written(lambda module, x: module.out(F.gelu(module.inp(x))), inp=inp, out=out)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "convolutional": (convolutional, lambda: ((torch.randn(3, 1, 6, 6),), {})),
    "functions": (Functions, lambda: ((torch.randn(5, 4),), {"index": torch.arange(5), "extra": {"x": torch.ones(2)}})),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda: ((torch.randn(2, 5, 8),), {}),
    ),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda: ((torch.randn(2, 5, 8),) * 3, {"need_weights": True}),
    ),
    "lstm": (lambda: nn.LSTM(4, 6, 2), lambda: ((torch.randn(5, 2, 4), (torch.zeros(2, 2, 6),) * 2), {})),
    "gru": (lambda: nn.GRU(4, 6, bidirectional=True), lambda: ((torch.randn(5, 2, 4),), {})),
    "lstm cell": (lambda: nn.LSTMCell(4, 6), lambda: ((torch.randn(5, 4),), {})),
    "gru cell": (lambda: nn.GRUCell(4, 6), lambda: ((torch.randn(5, 4), torch.randn(5, 6)), {})),
    "shared": (shared, lambda: ((torch.randn(3, 4),), {})),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 3, stride=2), nn.GroupNorm(3, 3), nn.PReLU(), nn.AvgPool2d(2)),
        lambda: ((torch.randn(2, 2, 4, 4),), {}),
    ),
    "padded": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3, 1, 1, padding_mode="circular"), nn.InstanceNorm1d(3, affine=True)),
        lambda: ((torch.randn(2, 2, 6),), {}),
    ),
}


def made(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    build, inputs = NETWORKS[name]
    network = build()
    return network, *inputs()


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return [] if value is None else [x for item in value for x in tensors(item)]


def total(value: Any) -> Tensor:
    return torch.stack([x.double().square().sum() for x in tensors(value) if x.is_floating_point()]).sum()


# --- what each layer computes in --------------------------------------------------------------------------------------

OPERATIONS = ["conv2d", "batch_norm", "relu", "flatten", "linear", "layer_norm", "linear", "softmax"]
# per operation of the convolutional network what it computes in and what it gives: low or wide
COMPUTED = {
    "O0": "ww ww ww ww ww ww ww ww", "O1": "lw ww lw ww lw ww lw ww", "O2": "ll wl ll ll ll wl ll ll",
    "O3": "ll ll ll ll ll ll ll ll", "auto": "lw ww ww ww lw ww ll ww",
}  # fmt: skip


@pytest.mark.parametrize("dtype", [*LOWS, FP16, E4M3FN], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_the_dtype_in_which_each_layer_computes(level: str, dtype: Any) -> None:
    network, args, _ = made("convolutional")
    auto_mixed_precision(network, level, dtype)
    with ledger(network) as book:
        out = network(*args)
    low = str(dtype)[6:] if isinstance(dtype, torch.dtype) else dtype.name
    named = {"l": low, "w": "float32"}
    got = [(row.operation, row.compute, row.output) for row in book.rows]
    assert got == [(op, named[comp], (named[given],)) for op, (comp, given) in zip(OPERATIONS, COMPUTED[level].split())]
    assert out.dtype is torch.float32


@pytest.mark.parametrize(
    ("level", "dtype"),
    [*[(level, dtype) for level in CASTING_LEVELS for dtype in (*LOWS, E5M2)], *[(p, torch.bfloat16) for p in PRESETS]],
    ids=str,
)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_runs_and_trains_at_every_level(name: str, level: str, dtype: Any) -> None:
    network, args, kwargs = made(name)
    want = tensors(copy.deepcopy(network)(*args, **kwargs))
    keys, types = list(network.state_dict()), [type(m) for m in network.modules()]
    same = (cast_like if level in PRESETS else auto_mixed_precision)(network, level, dtype)
    out = network(*args, **kwargs)
    total(out).backward()

    assert same is network
    assert amp_level(network) == level
    assert (list(network.state_dict()), [type(m) for m in network.modules()]) == (keys, types)
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in network.parameters() if p.grad is not None} == {torch.float32}
    coarse = 0.75 if dtype is E5M2 else 0.08
    for got, exact in zip(tensors(out), want):
        if got.is_floating_point():
            assert (got.double() - exact.double()).abs().max() <= coarse * (1 + exact.abs().max())
        else:
            assert got.dtype is exact.dtype
    if level in ("O2", "O3", "apex_O2", "apex_O3"):
        assert {x.dtype for x in tensors(out) if x.is_floating_point()} == {torch.float32}


def test_bias_is_added_after_the_product_was_rounded() -> None:
    layer = nn.Linear(1, 1)
    nn.init.constant_(layer.weight, 1.0)
    nn.init.constant_(layer.bias, 2.0**-11)  # half an fp16 ulp of 1
    x = torch.tensor([[1 + 2.0**-11 + 2.0**-12]])  # rounds to 1 + 2**-10
    # rounded to 1 + 2**-10, plus half an ulp: a tie, to even: 1 + 2 * 2**-10
    assert auto_mixed_precision(copy.deepcopy(layer), "O3")(x).item() == 1 + 2 * 2.0**-10
    # at auto the sum stays float32
    assert auto_mixed_precision(layer, "auto")(x).item() == 1 + 2.0**-10 + 2.0**-11


def test_o1_casts_exact_classes_only_and_o2_protects_subclasses() -> None:
    class MyLinear(nn.Linear):
        pass

    class MyNorm(nn.LayerNorm):
        pass

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 4), MyLinear(4, 4), MyNorm(4), nn.GroupNorm(2, 4))
    x = torch.randn(3, 4)
    with ledger(auto_mixed_precision(network, "O1")) as one:
        network(x)
    remove_mixed_precision(network)
    two = computes(auto_mixed_precision(network, "O2"), x)

    assert [row.compute for row in one.rows] == ["float16", "float16", "float32", "float32"]
    biases = [cast for cast in one.casts if cast.tensor.endswith("bias")]
    assert [cast.tensor for cast in biases] == ["0.bias"]  # of the subclass only the product is cast
    assert two == ["float16", "float16", "float32", "float16"]


def test_o2_protects_children_only_and_the_norm_takes_the_networks_input_as_it_came() -> None:
    alone = auto_mixed_precision(nn.LayerNorm(4), "O2", torch.bfloat16)
    inside = auto_mixed_precision(nn.Sequential(nn.BatchNorm1d(4)), "O2", torch.bfloat16)
    with ledger(inside) as child:
        inside(torch.randn(3, 4))
    assert computes(alone) == ["bfloat16"]
    assert [(row.inputs[0], row.compute, row.output) for row in child.rows] == [("float32", "float32", ("bfloat16",))]
    assert not [cast for cast in child.casts if cast.target == "float32" and cast.module == "0"]


def test_softmax_log_and_losses_are_not_protected_by_o2() -> None:
    x = torch.tensor([[0.0, -30.0]])  # exp(-30) is below the smallest float16
    for level, want in (("O2", -torch.inf), ("O1", -30.0), ("auto", -30.0)):
        head = auto_mixed_precision(Op(lambda x: torch.log(torch.softmax(x, -1))), level)
        assert head(x)[0, 1] == pytest.approx(want)


def test_what_follows_a_child_runs_under_the_parents_rule_again() -> None:
    for level in ("O1", "O2"):
        network = nn.Sequential(Written(lambda module, x: F.relu(module.norm(x) @ x), norm=nn.LayerNorm(4)))
        low = computes(auto_mixed_precision(network, level), torch.randn(4, 4))
        assert low == ["float32", "float16", "float16"]


# --- to_float ---------------------------------------------------------------------------------------------------------


def pair() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))


def computes(network: nn.Module, x: Tensor | None = None) -> list[str]:
    with ledger(network) as book:
        network(torch.randn(2, 4) if x is None else x)
    return [row.compute for row in book.rows]


def test_the_last_to_float_wins_module_by_module() -> None:
    outer_first = to_float(pair(), torch.float16)
    to_float(outer_first[0], torch.float32)
    inner_first = pair()
    to_float(inner_first[0], torch.float32)
    assert to_float(inner_first, torch.float16) is inner_first
    assert computes(outer_first) == ["float32", "float32", "float16"]
    assert computes(inner_first) == ["float16"] * 3


def test_to_float_casts_floats_only_and_does_not_cast_back() -> None:
    add = to_float(Op(operator.add), torch.float16)
    ints, floats = torch.arange(3), torch.ones(3, dtype=torch.float64)
    assert add(ints, ints).dtype is torch.int64
    assert add(ints, floats).dtype is torch.float16
    assert add(floats, floats).dtype is torch.float16
    assert add(torch.tensor([True]), torch.tensor([True])).dtype is torch.bool
    assert to_float(Op(operator.add), torch.float32)(floats.half(), floats.half()).dtype is torch.float32
    assert to_float(nn.Linear(3, 2), torch.bfloat16)(torch.ones(1, 3)).dtype is torch.bfloat16


def test_an_uncast_layer_refuses_a_low_input_as_torch_does() -> None:
    network = nn.Sequential(to_float(nn.Linear(4, 4), torch.float16), nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="dtype"):
        network(torch.ones(1, 4))


@pytest.mark.parametrize(("level", "respects"), [("O1", True), ("auto", True), ("O2", False), ("O3", False)])
def test_levels_respect_or_override_to_float(level: str, respects: bool) -> None:
    network = pair()
    to_float(network[0], torch.float32)
    auto_mixed_precision(network, level, torch.bfloat16)
    low = "bfloat16"
    assert computes(network) == (["float32", "float32", low] if respects else [low] * 3)


def test_to_float_after_a_level_moves_one_layer_and_keeps_the_rest() -> None:
    network = auto_mixed_precision(pair(), "O2")
    to_float(network[0][1], torch.float32)
    assert computes(network) == ["float16", "float32", "float16"]
    assert network(torch.ones(1, 4)).dtype is torch.float32


# --- bad input: every row of the reference's tables -------------------------------------------------------------------


LAYER = nn.Linear(2, 2)
NO_DTYPE = (torch.float64, torch.int16, "float16", None)
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    *(
        (lambda n=n, x=x: auto_mixed_precision(n, x), TypeError, r"nn\.Module")
        for x in LEVELS
        for n in (3, None, nn.Linear)
    ),
    *((lambda x=x: auto_mixed_precision(LAYER, x), ValueError, "amp_level") for x in ("O4", "o2", None, 2, "", "AUTO")),
    *(
        (lambda x=x, d=d: auto_mixed_precision(LAYER, x, d), ValueError, r"torch\.float16, torch\.bfloat16")
        for x in LEVELS
        for d in (torch.float32, *NO_DTYPE)
    ),
    *((lambda d=d: to_float(LAYER, d), ValueError, r"torch\.float32") for d in NO_DTYPE),
    *((lambda f=f: f(3), TypeError, r"nn\.Module") for f in (remove_mixed_precision, ledger)),
    (lambda: to_float(3, torch.float16), TypeError, r"nn\.Module"),
    (lambda: auto_mixed_precision(LAYER, "O2", torch.float16, grad_dtype=E5M2), ValueError, "grad_dtype"),
    (lambda: to_float(LAYER, E4M3FN, grad_dtype=torch.float16), TypeError, "grad_dtype"),
    (lambda: auto_mixed_precision(LAYER, "O3", FP64), ValueError, r"wider; network.double\(\)"),
    (lambda: to_float(LAYER, E4M3FN, grad_dtype=FP64), ValueError, "wider"),
    (lambda: cast_like(LAYER, "apex_o1"), ValueError, "preset"),
    (lambda: custom_mixed_precision(LAYER, white_list=[torch.Tensor]), TypeError, "white_list holds"),
    (lambda: custom_mixed_precision(LAYER, white_list=[print]), TypeError, "white_list holds"),
    (lambda: custom_mixed_precision(LAYER, black_list=[torch.matmul]), TypeError, "black_list holds"),
    (lambda: cast_like(LAYER, ["x"]), TypeError, "preset"),
    (lambda: cast_like(3, "apex_O1"), TypeError, r"nn\.Module"),
]


@pytest.mark.parametrize("row", range(len(REFUSED)))
def test_bad_input_is_refused_in_words_and_changes_nothing(row: int) -> None:
    call, error, words = REFUSED[row]
    with pytest.raises(error, match=words):
        call()
    assert "forward" not in vars(LAYER)


def test_only_auto_takes_a_function() -> None:
    def product(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    low = auto_mixed_precision(product, "auto", torch.bfloat16)
    a = torch.randn(3, 3)
    assert torch.equal(low(a, a), a.bfloat16() @ a.bfloat16())
    assert amp_level(low) == "auto"
    assert remove_mixed_precision(low) is product
    for level in ("O0", "O1", "O2", "O3"):
        with pytest.raises(TypeError, match="got function"):
            auto_mixed_precision(product, level)


# --- living with a network --------------------------------------------------------------------------------------------


def test_repeating_a_level_warns_and_changes_it_and_o0_is_silent() -> None:
    network = auto_mixed_precision(pair(), "O2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert auto_mixed_precision(network, "O0") is network
    assert amp_level(network) == "O2"
    with pytest.warns(UserWarning, match="'O2'.*'O1'"):
        auto_mixed_precision(network, "O1")
    assert amp_level(network) == "O1"
    assert network(torch.ones(1, 4)).dtype is torch.float32
    with pytest.warns(UserWarning, match="'O1'.*'O1'"):
        auto_mixed_precision(network, "O1")


def test_a_forward_of_the_instance_is_kept_and_comes_back() -> None:
    network = nn.Linear(4, 4)
    original = network.forward
    network.forward = lambda x: original(x) + 1  # type: ignore[method-assign]
    patched = network.forward
    want = network(torch.ones(1, 4))
    auto_mixed_precision(network, "O2")
    assert (network(torch.ones(1, 4)) - want).abs().max() < 0.01
    assert remove_mixed_precision(network).forward is patched


@pytest.mark.parametrize("level", [*CASTING_LEVELS, *PRESETS])
def test_copies_and_pickles_carry_a_format_and_keep_it_where_the_network_gives_it_back(level: str) -> None:
    network, args, _ = made("convolutional")
    plain = network.eval()(*args)
    (cast_like if level in PRESETS else auto_mixed_precision)(network, level, E4M3FN)
    want = network(*args)
    twins = [copy.deepcopy(network), pickle.loads(pickle.dumps(network))]
    assert torch.equal(remove_mixed_precision(network)(*args), plain)
    assert amp_level(network) == ""
    assert not any("forward" in vars(module) for module in network.modules())
    for twin in twins:
        assert amp_level(twin) == level
        assert torch.equal(twin(*args), want)


def test_parameters_are_cast_once_per_forward() -> None:
    network, args, kwargs = made("functions")
    auto_mixed_precision(network, "O2")
    with ledger(network) as book:
        network(*args, **kwargs)
    parameters = [cast.tensor for cast in book.casts if cast.tensor != "activation"]
    assert len(parameters) == len(set(parameters)) > 3


def test_an_in_place_relu_at_o1_writes_into_what_it_was_given() -> None:
    network = auto_mixed_precision(nn.Sequential(nn.ReLU(inplace=True), nn.ReLU(inplace=True)), "O1")
    x = torch.tensor([-1.0, 1.0 + 2**-12])
    assert network(x) is x
    assert x.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("level", CASTING_LEVELS)
def test_attributes_out_arguments_lazy_modules_and_inference_mode_are_as_without_a_level(level: str) -> None:
    def whole(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert (module.w.dtype, module.w.detach().dtype) == (torch.float32, torch.float32)
        assert (module.w.is_leaf, module.w.requires_grad, module.w.numel()) == (True, True, 2)
        assert module.w.detach()[0].item() == 1.0
        into, kept = torch.zeros(2, 2), x * 1.0
        torch.add(x, x, out=into)
        F.relu(kept, inplace=True)
        return into, kept, module.lazy(x)

    x = torch.tensor([[-1.0, 2.0], [3.0, -4.0]])
    with torch.inference_mode():
        parts = {"w": nn.Parameter(torch.ones(2)), "lazy": nn.LazyLinear(2)}
        network = auto_mixed_precision(Written(whole, **parts), level)
        into, kept, _ = network(x)
        assert network.lazy.weight.abs().sum() > 0
    assert torch.equal(into.float(), 2 * x)
    assert torch.equal(kept.float(), x.relu())
    assert network.lazy.weight.dtype is torch.float32


def test_threads_do_not_disturb_each_other() -> None:
    networks = [auto_mixed_precision(pair(), level) for level in ("O1", "O2", "O3", "auto")]
    x = torch.randn(2, 4)
    wanted = [network(x) for network in networks]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(30):
            if not torch.equal(networks[i](x), wanted[i]):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_the_product_of_a_listed_sum_is_low_and_the_sum_float32() -> None:
    torch.manual_seed(0)
    b, x, w, into = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3, 3), torch.zeros(3, 3)
    for named in ({}, {"beta": 0.5}, {"alpha": 2.0}, {"beta": 0.5, "alpha": 2.0}):
        network = auto_mixed_precision(Op(lambda b, x, w, named=named: torch.addmm(b, x, w, **named)), "O1")
        product = (x.half() @ w.half()).float()
        assert torch.equal(network(b, x, w), named.get("beta", 1) * b + named.get("alpha", 1) * product)
    assert auto_mixed_precision(Op(lambda *args: torch.addmm(*args, out=into)), "O1")(b, x, w) is into
    assert torch.equal(into, torch.addmm(b, x, w))


def test_a_single_number_of_a_weight_stays_float32() -> None:
    network = Written(lambda module, x: x * module.w[0], w=nn.Parameter(torch.tensor([1 + 2.0**-8])))
    x = torch.tensor([1 + 2.0**-7])
    # (1 + 2**-7)(1 + 2**-8) is above the middle of 1 + 2**-7 and 1 + 2**-6
    assert auto_mixed_precision(network, "O2", torch.bfloat16)(x).item() == 1 + 2.0**-6
