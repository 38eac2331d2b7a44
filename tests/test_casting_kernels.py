"""Operations that 16 bits do not serve: those without a kernel, whose oracle is the emulated format, and counts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_casting_state import Apply, trained
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from mpkit.casting import auto_mixed_precision, cast_like, graphs, ledger
from mpkit.formats import BF16, E5M2, FP16

UPPER = torch.eye(4) + torch.diag(torch.tensor([0.5, 0.25, 2.0]), 1)
CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "distances": lambda m, x: torch.cdist(x, m.w),
    "distances as in VQ": lambda m, x: torch.cdist(x.float(), m.w.float()).min(-1)[0],
    "Fourier": lambda m, x: torch.fft.irfft(torch.fft.rfft(x * m.w, n=8) * 0.5, n=8) @ torch.ones(8, 1),
    "Fourier by name": lambda m, x: torch.fft.rfft(input=x * m.w, n=4).abs(),
    "quantile": lambda m, x: (x * m.w).quantile(0.3, dim=0),
    "quantile as written": lambda m, x: torch.nanquantile((x * m.w).float(), torch.tensor([0.2, 0.7]), dim=1),
    "rotary": lambda m, x: torch.view_as_real(
        torch.view_as_complex((x * m.w).float().reshape(4, 2, 2)) * torch.polar(torch.ones(2), torch.arange(2.0))
    ),
    "rotary by angles": lambda m, x: torch.polar(x.abs(), x * m.w).real,
    "complex": lambda m, x: torch.complex(x, x * m.w).abs(),
    "spectrogram": lambda m, x: torch.stft(
        (x * m.w).flatten(), 4, window=torch.ones(4), return_complex=True, center=False
    ).abs(),
    "exponential of a matrix": lambda m, x: torch.matrix_exp(x * m.w / 4),
    "exponential of linalg": lambda m, x: torch.linalg.matrix_exp((x @ m.w) / 4),
    "CSR": lambda m, x: m.sparse @ (x @ m.w),
    "sparse.mm": lambda m, x: torch.sparse.mm(m.sparse, x * m.w),
}


def made(call: Callable[[Any, Tensor], Any]) -> nn.Module:
    torch.manual_seed(0)
    return Apply(call, w=nn.Parameter(torch.randn(4, 4)), sparse=UPPER.to_sparse_csr())


@pytest.mark.filterwarnings("ignore:.*[Ss]parse")
@pytest.mark.parametrize("pair", [(torch.bfloat16, BF16), (torch.float16, FP16)], ids=str)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto", "keras_mixed_float16", "apex_O2"])
def test_what_has_no_kernel_in_16_bits_gives_the_numbers_of_the_emulated_format(
    level: str, name: str, pair: Any
) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    results = []
    for dtype in pair:
        network = made(CALLS[name])
        cast_like(network, level, dtype) if "_" in level else auto_mixed_precision(network, level, dtype)
        results.append(trained(network, x))
        if name == "CSR" and level == "O1":
            with ledger(network, count=True) as book, ledger(network):
                network(x)
            assert [row.compute for row in book.rows][-1] == ("float32" if dtype is pair[0] else pair[1].name)
    for native, emulated in zip(*results):
        assert (native - emulated).abs().max() <= 4 * pair[1].eps * emulated.abs().max()  # another order of roundings


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto", "torch_autocast", "apex_O1", "keras_mixed_bfloat16"])
def test_an_orthogonal_layer_keeps_its_columns_and_its_gradients(level: str, dtype: torch.dtype) -> None:
    """torch 2.13 gives inf for the exponential of a 16-bit matrix, and says nothing."""
    torch.manual_seed(0)
    network = orthogonal(nn.Linear(4, 4, bias=False), orthogonal_map="matrix_exp")
    cast_like(network, level, dtype) if "_" in level else auto_mixed_precision(network, level, dtype)
    y = network(torch.eye(4)).float()
    torch.testing.assert_close(y @ y.mT, torch.eye(4), rtol=0, atol=8 * torch.finfo(dtype).eps)
    y[0, 1].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    low = Apply(lambda _, x: torch.matrix_exp(x))
    cast_like(low, level, dtype) if "_" in level else auto_mixed_precision(low, level, dtype)
    if level != "O1":  # which leaves what it does not list to torch
        want = torch.matrix_exp(0.5 * torch.eye(2))
        torch.testing.assert_close(low(0.5 * torch.eye(2, dtype=dtype)).float(), want, rtol=2**-8, atol=0)


@pytest.mark.parametrize("level", ["O2", "O3", "auto", "keras_mixed_bfloat16"])
def test_numpy_is_given_float32_where_it_has_no_such_numbers(level: str) -> None:
    """As in a sampler that makes its schedule in a forward."""
    given: list[Any] = []

    def forward(_: Any, x: Tensor) -> Tensor:
        y = x @ torch.eye(2)
        given.extend((y.numpy(), np.asarray(y), np.interp(0.5, [0, 1], y[0].numpy())))
        return y

    network = Apply(forward)
    cast_like(network, level, torch.bfloat16) if "_" in level else auto_mixed_precision(network, level, torch.bfloat16)
    x = torch.tensor([[1.0, 1 / 3]])
    low = x.bfloat16().float().numpy()
    network(x)
    assert given[0].dtype == given[1].dtype == np.float32
    assert (given[0] == low).all()
    assert (given[1] == low).all()


def test_a_refusal_of_low_precision_stays_torchs_own() -> None:
    with pytest.raises(RuntimeError, match="Low precision dtypes not supported"):
        auto_mixed_precision(Apply(lambda _, x: torch.linalg.inv(x)), "O3")(torch.eye(2))
    with pytest.raises(RuntimeError, match="must match"):
        auto_mixed_precision(Apply(lambda _, x: x + torch.ones(3)), "O3")(torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, BF16, E5M2], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto"])
def test_counts_that_sort_tokens_by_their_expert_are_exact(level: str, dtype: Any) -> None:
    """As transformers does for a mixture of experts: a group that ends too early leaves memory that nobody wrote."""
    experts = torch.arange(3000).remainder(7) % 3

    def ends(_: Any, x: Tensor) -> Tensor:
        counts = torch.histc(experts.float(), bins=3, min=0, max=2)
        assert torch.bincount(experts, weights=torch.ones(3000)).tolist() == counts.tolist()
        assert int(counts.sum(dtype=torch.long)) == 3000
        return torch.cumsum(counts, dim=0, dtype=torch.int32)

    network = auto_mixed_precision(Apply(ends), level, dtype)
    assert network(torch.ones(1)).tolist() == experts.bincount().cumsum(0).tolist()
    with ledger(network, count=True):
        assert network(torch.ones(1)).tolist() == experts.bincount().cumsum(0).tolist()


FILLS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "masked_fill": lambda x, mask, low: x.masked_fill(mask, low),
    "a tensor": lambda x, mask, low: x.masked_fill(mask, torch.tensor(low)),
    "masked_fill_": lambda x, mask, low: (x * 1).masked_fill_(mask, low),
    "full_like": lambda x, mask, low: torch.where(mask, torch.full_like(x, low), x),
    "fill by name": lambda x, mask, low: torch.masked_fill(x, mask=mask, value=low),
    "clamp": lambda x, mask, low: torch.where(mask, x * 0 - 2, x).clamp(min=low),
}


@pytest.mark.filterwarnings("ignore:an operation in 16 bits was given a number beyond them")
@pytest.mark.parametrize("name", FILLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", ["auto", "torch_autocast", "apex_O1"])
def test_a_mask_for_another_tensor_s_float32_masks_in_16_bits(level: str, dtype: torch.dtype, name: str) -> None:
    """Also where everything is masked: there the lowest number gives equal weights, and an infinity NaN."""
    mask = torch.tensor([[False, True, False], [True, True, True]])
    lowest = torch.finfo(torch.float32).min

    def attention(_: Any, x: Tensor) -> Tensor:
        return FILLS[name](x @ torch.eye(3), mask, lowest).float().softmax(-1)

    x = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    network = Apply(attention)
    cast_like(network, level, dtype) if "_" in level else auto_mixed_precision(network, level, dtype)
    want = attention(None, x) if name != "clamp" else network(x)
    assert (network(x) - want).abs().max() <= 2.0**-8
    with ledger(network, count=True):
        assert torch.equal(network(x), network(x))


def test_a_number_that_16_bits_cannot_hold_is_told() -> None:
    def masked(low: Callable[[Tensor], float]) -> nn.Module:
        network = Apply(lambda _, x: (y := x @ torch.eye(2)).masked_fill(y > 0, low(y)))
        return auto_mixed_precision(network, "auto", torch.float16)

    with pytest.warns(RuntimeWarning, match="beyond them, and 65504 stands for its size"):
        assert masked(lambda _: -1e9)(torch.ones(1, 2)).tolist() == [[-65504.0] * 2]
    assert masked(lambda y: torch.finfo(y.dtype).min)(torch.ones(1, 2)).tolist() == [[-65504.0] * 2]


def line_of(function: Callable[..., Any]) -> int:
    return function.__code__.co_firstlineno


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "graphs beside"])
@pytest.mark.parametrize("opened", [0, 1, 2], ids="{} ledgers".format)
@pytest.mark.parametrize(
    "fill",
    [
        lambda _, x: (x @ torch.eye(2)).masked_fill(x > 0, -1e9),
        lambda _, x: F.pad(x @ torch.eye(2), (1, 1), value=-1e9),
        lambda _, x: nn.ConstantPad1d(1, -1e9)(x @ torch.eye(2)),
    ],
    ids=["masked_fill", "a function of Python's", "a module"],
)
def test_the_warning_of_a_number_names_the_line_that_gives_it(
    fill: Callable[..., Tensor], opened: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "may_run", lambda: beside)
    network = auto_mixed_precision(nn.Sequential(Apply(fill)), "auto", torch.float16)
    with contextlib.ExitStack() as stack:
        for _ in range(opened):
            stack.enter_context(ledger(network))
        with pytest.warns(RuntimeWarning, match="beyond them") as told:
            network(torch.ones(1, 2))
    assert [(one.filename, one.lineno) for one in told] == [(__file__, line_of(fill))]


@pytest.mark.parametrize(
    "fill",
    [
        lambda y: y.masked_fill(y > 0, -1e9),
        lambda y: y.masked_fill(y > 0, torch.tensor(-1e9)),
        lambda y: y.masked_fill(y > 0, -torch.inf),
        lambda y: y.clamp(min=-1e9, max=torch.inf),
        lambda y: torch.full_like(y, -1e9),
        lambda y: y - 1e9,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.filterwarnings("ignore:an operation in 16 bits was given a number beyond them")
def test_a_graph_holds_the_numbers_that_stand_without_one(dtype: torch.dtype, fill: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    network = auto_mixed_precision(Apply(lambda _, x: fill(x @ torch.eye(2))), "auto", dtype)
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(1, 2)), network(torch.ones(1, 2)))


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_a_number_beyond_the_range_stays_an_error_where_all_tensors_have_one_dtype(level: str) -> None:
    network = auto_mixed_precision(Apply(lambda _, x: x.masked_fill(x > 0, -1e9)), level)
    with ledger(network), pytest.raises(RuntimeError, match="without overflow"):
        network(torch.ones(2, dtype=torch.float16))
