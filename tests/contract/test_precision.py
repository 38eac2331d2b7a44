"""Casting beside float32 and beside torch: operators and modules of PyTorch's own databases, small real networks, and
what a level must leave as it is: copies, pickles, checkpoints, compilation, keys of a state, types of modules.

A result is right when it is as near to float32 as the format allows: sixteen times as far as rounded inputs and
weights alone lead, plus sixteen units of the format's last place at the scale of its tensor.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from mpkit.casting import (
    auto_mixed_precision,
    cast_like,
    custom_mixed_precision,
    ledger,
    remove_mixed_precision,
    to_float,
)
from mpkit.formats import BF16, E5M2, FloatFormat
from mpkit.networks import DenseNet, LeNet5, MobileNetV2, Network, TinyGPT, resnet18

LEVELS = ("O1", "O2", "O3", "auto")
BFLOAT16 = torch.bfloat16
NO_KERNEL = "not implemented for"


def trained(network: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
    """Float results, then the gradients of parameters and arguments."""
    leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    wanted = [*(p for p in network.parameters() if p.requires_grad), *leaves]
    torch.manual_seed(1)
    out = [x for x in tree_leaves(network(*args, **kwargs)) if isinstance(x, Tensor) and x.is_floating_point()]
    ends = [x.float().sum() for x in out if x.requires_grad]
    for x in wanted:
        x.grad = None
    if ends and wanted:
        torch.stack(ends).sum().backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in wanted]
    return [x.detach().float() for x in (*out, *grads)]


def rounded(value: Any) -> Any:
    def low(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype is not torch.float32:
            return x
        return x.detach().to(BFLOAT16).float().requires_grad_(x.requires_grad)

    return tree_map(low, value)


def assert_near(got: list[Tensor], want: list[Tensor], nearby: list[Tensor], eps: float) -> None:
    assert [x.shape for x in got] == [x.shape for x in want]
    for a, b, near in zip(got, want, nearby):
        known = b.isfinite() & near.isfinite() & (torch.maximum(b.abs(), near.abs()) < 1e4)
        if bool(known.any()):
            moved, scale = float((near - b)[known].abs().max()), float(b[known].abs().max())
            assert float((a - b)[known].abs().max()) <= 16 * moved + 16 * eps * scale + eps


def check(make: Callable[[], tuple[nn.Module, Any, Any]], level: str, dtype: Any = BFLOAT16) -> None:
    """The network under a level is as near to itself in float32 as the format allows."""
    want = trained(*make())
    network, args, kwargs = make()
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(rounded(p.detach()))
    nearby = trained(network, *rounded((args, kwargs)))
    network, args, kwargs = make()
    cast = auto_mixed_precision(network, level, dtype) if level in LEVELS else cast_like(network, level)
    try:
        got = trained(cast, args, kwargs)
    except RuntimeError as error:
        if NO_KERNEL not in str(error):
            raise
        pytest.skip(f"torch has no 16-bit kernel: {error}"[:150])
    assert_near(got, want, nearby, dtype.eps if isinstance(dtype, FloatFormat) else torch.finfo(dtype).eps)


# --- PyTorch's databases of operators and modules: a fixed sample


OPERATORS = (
    *("add", "sub", "mul", "div", "pow", "exp", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "erf", "matmul", "bmm"),
    *("addmm", "baddbmm", "einsum", "mv", "outer", "cumsum", "sum", "mean", "var", "logsumexp", "softmax", "cat"),
    *("stack", "where", "index_select", "gather", "scatter_add", "masked_fill", "maximum", "clamp", "lerp", "sort"),
    *("transpose", "permute", "reshape", "expand", "linalg.norm", "nn.functional.linear", "nn.functional.conv2d"),
    *("nn.functional.conv_transpose2d", "nn.functional.layer_norm", "nn.functional.group_norm"),
    *("nn.functional.gelu", "nn.functional.silu", "nn.functional.relu"),
    *("nn.functional.cross_entropy", "nn.functional.mse_loss", "nn.functional.nll_loss", "nn.functional.embedding"),
    *("nn.functional.max_pool2d", "nn.functional.avg_pool2d", "nn.functional.interpolate", "nn.functional.pad"),
    *("nn.functional.scaled_dot_product_attention", "nn.functional.bilinear", "nn.functional.cosine_similarity"),
)
MODULES = (
    *("Linear", "Bilinear", "Conv1d", "Conv2d", "ConvTranspose2d", "BatchNorm2d", "GroupNorm", "LayerNorm", "RMSNorm"),
    *("Embedding", "MultiheadAttention", "TransformerEncoderLayer", "LSTM", "GRU", "GRUCell", "RNN", "LSTMCell"),
    *("CrossEntropyLoss", "MSELoss", "BCEWithLogitsLoss", "KLDivLoss", "SmoothL1Loss", "PReLU", "GELU", "Softmax"),
    *("MaxPool2d", "AdaptiveAvgPool2d", "InstanceNorm2d", "TransformerDecoderLayer"),
)


class Call(nn.Module):
    """A network that is one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@pytest.fixture(scope="module")
def operators() -> dict[str, Any]:
    pytest.importorskip("expecttest")  # which the database imports
    from torch.testing._internal.common_methods_invocations import op_db

    return {op.name: op for op in reversed(op_db)}


@pytest.fixture(scope="module")
def modules() -> dict[str, Any]:
    pytest.importorskip("expecttest")
    from torch.testing._internal.common_modules import module_db

    return {info.name.removeprefix("nn."): info for info in reversed(module_db)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_as_near_to_float32_as_the_format_allows(operators, name, level):
    op = operators[name]

    def make() -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(0)
        sample = next(iter(op.sample_inputs("cpu", torch.float32, requires_grad=True)))
        return Call(op.op), (sample.input, *sample.args), sample.kwargs

    check(make, level)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_as_near_to_float32_as_the_format_allows(modules, name, level):
    info = modules[name]

    def make() -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(0)
        sample = info.module_inputs_func(info, "cpu", torch.float32, requires_grad=True, training=True)[0]
        network = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
        return network, sample.forward_input.args, sample.forward_input.kwargs

    check(make, level)


# --- six real networks, small


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(16, 8), nn.LSTM(8, 12, batch_first=True), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0][:, -1])


def image(*shape: int) -> Tensor:
    return torch.rand(4, *shape, generator=torch.Generator().manual_seed(1))


TOKENS = torch.arange(24).reshape(4, 6) % 16
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "lenet": (LeNet5, image(1, 28, 28)),
    "mlp": (Network, image(1, 28, 28)),
    "resnet18": (lambda: resnet18(width=4, in_channels=1), image(1, 16, 16)),
    "mobilenet": (MobileNetV2, image(3, 32, 32)),
    "densenet": (DenseNet, image(3, 32, 32)),
    "lstm": (Recurrent, TOKENS),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True),
        image(5, 16),
    ),
    "gpt": (lambda: TinyGPT(16, 6), TOKENS),
}


def made(name: str) -> tuple[nn.Module, tuple[Tensor], dict[str, Any]]:
    torch.manual_seed(0)
    make, x = NETWORKS[name]
    return make().eval(), (x,), {}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_forward_is_within_a_few_roundings_of_float32(name, level):
    """Relative to the largest result: 32 units in the last place of bfloat16, which eighteen layers do not use up."""
    network, args, _ = made(name)
    want = network(*args).detach()
    got = auto_mixed_precision(network, level, BFLOAT16)(*args).detach().float()
    assert float((got - want).abs().max()) <= 32 * 2.0**-8 * float(want.abs().max())
    assert {p.dtype for p in network.parameters()} == {torch.float32}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["lenet", "gpt", "lstm"])
def test_a_network_copied_pickled_checkpointed_or_freed_computes_the_same(name, level):
    plain, args, kwargs = made(name)
    want, keys = trained(plain, args, kwargs), [*plain.state_dict()]
    types = [type(m) for m in plain.modules()]
    network = auto_mixed_precision(plain, level, BFLOAT16)
    got = trained(network, args, kwargs)
    assert [*network.state_dict()] == keys
    assert [type(m) for m in network.modules()] == types
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert all(torch.equal(a, b) for a, b in zip(trained(other, args, kwargs), got))
    remove_mixed_precision(network)
    assert all(torch.equal(a, b) for a, b in zip(trained(network, args, kwargs), want))
    auto_mixed_precision(network, level, BFLOAT16)
    assert all(torch.equal(a, b) for a, b in zip(trained(network, args, kwargs), got))


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.reentrant is None:
            return torch.tanh(self.block(x) @ self.first.weight)
        return checkpoint(lambda y: torch.tanh(self.block(y) @ self.first.weight), x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16, E5M2], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_recomputed_in_the_backward_pass_is_cast_as_before(level, dtype, reentrant):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
    plain, again = (
        trained(auto_mixed_precision(Recomputed(kind), level, dtype), (x,), {}) for kind in (None, reentrant)
    )
    for a, b in zip(plain, again):  # a weight's gradients are added up in another order
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # torch's own compiler raises some
@pytest.mark.parametrize("level", LEVELS)
def test_a_training_step_compiles_into_one_graph(level):
    torch.compiler.reset()
    torch.manual_seed(0)
    network = auto_mixed_precision(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), level, BFLOAT16)
    twin, x = copy.deepcopy(network), torch.randn(4, 6)
    compiled = torch.compile(lambda x: twin(x).float().square().sum(), fullgraph=True, backend="aot_eager")
    for net, loss in ((network, network(x).float().square().sum()), (twin, compiled(x))):
        loss.backward()
        assert all(p.grad.dtype is torch.float32 for p in net.parameters())
    for p, q in zip(network.parameters(), twin.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=2**-6, atol=2**-6 * float(p.grad.abs().max()))


# --- what the rules say


def test_the_ledger_tells_what_ran_in_which_precision():
    network = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    for level, modules in {"O1": {"0", "2"}, "O2": {"0", "2"}, "O3": {"0", "1", "2"}}.items():
        with ledger(cast := auto_mixed_precision(copy.deepcopy(network), level, BFLOAT16)) as book:
            cast(torch.ones(2, 4))
        assert {row.module for row in book.rows if "bfloat16" in str(row.compute)} == modules
        assert len(book.to_frame()) == len(book.rows)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


def test_lists_and_to_float_decide_layer_by_layer():
    network, x = Pair(), torch.ones(1, 4)
    to_float(network.a, BFLOAT16)
    assert [y.dtype for y in network(x)] == [BFLOAT16, torch.float32]
    for lists, low in (({"white_list": [nn.Linear]}, True), ({"black_list": [nn.Linear]}, False)):
        chosen = custom_mixed_precision(Pair(), **lists, dtype=BFLOAT16)
        with ledger(chosen) as book:
            chosen(x)
        linear = [row for row in book.rows if row.module in ("a", "b")]
        assert linear
        assert all(("bfloat16" in str(row.compute)) is low for row in linear)


@pytest.mark.parametrize("name", ["lenet", "mlp", "transformer"])
def test_a_format_stands_where_a_dtype_does(name):
    """Emulated bfloat16 is as near to float32 as native bfloat16, forwards and backwards."""
    check(lambda: made(name), "O2", BF16)


def test_levels_nest_and_an_error_in_a_forward_leaves_nothing_behind():
    inner = auto_mixed_precision(nn.Sequential(nn.Linear(4, 4)), "O0")
    network = auto_mixed_precision(nn.Sequential(nn.Linear(4, 4), inner), "O3", BFLOAT16)
    with pytest.raises(RuntimeError):
        network(torch.ones(1, 5))
    plain = nn.Linear(4, 4)
    assert plain(torch.ones(1, 4)).dtype is torch.float32
    assert torch.matmul(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
    assert network(torch.ones(1, 4)).isfinite().all()
