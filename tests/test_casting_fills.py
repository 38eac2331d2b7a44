"""Numbers that fill tensors in an emulated format: a finite one stays finite, an infinity that it has not is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_casting_state import Apply
from torch import Tensor, nn

from mpkit.casting import auto_mixed_precision, cast_like, ledger, to_float
from mpkit.formats import BF16, E4M3FN, E5M2, FP16, FloatFormat

X = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
MASK = torch.tensor([[False, True, False], [True, True, True]])
LOWEST = torch.finfo(torch.float32).min

FILLS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "masked_fill": lambda x, low: x.masked_fill(MASK, low),
    "masked_fill by name": lambda x, low: torch.masked_fill(x, mask=MASK, value=low),
    "masked_fill_": lambda x, low: x.masked_fill_(MASK, low),
    "where": lambda x, low: torch.where(MASK, low, x),
    "a mask to be added": lambda x, low: x + torch.where(MASK, low, 0.0),
    "as transformers makes it": lambda x, low: x + torch.where(MASK, torch.tensor(low), torch.tensor(0.0)),
    "full_like": lambda x, low: torch.where(MASK, torch.full_like(x, low), x),
    "full": lambda x, low: x + torch.full((2, 3), low) * MASK,
    "an index": lambda x, low: _set(x, low),
}


def _set(x: Tensor, low: float) -> Tensor:
    x[MASK] = low
    return x


def attention(fill: Callable[[Tensor, float], Tensor], low: float) -> nn.Module:
    return Apply(lambda _, x: fill(x @ torch.eye(3), low).softmax(-1))


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, FP16, BF16], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto", "torch_autocast"])
@pytest.mark.parametrize("name", FILLS)
def test_the_lowest_float32_masks_in_an_emulated_format_and_where_all_is_masked(
    name: str, level: str, fmt: FloatFormat
) -> None:
    """A mask that is right without a level needs no warning: nobody can ask a format's tensor for another number."""
    network = attention(FILLS[name], LOWEST)
    cast_like(network, level, fmt) if "_" in level else auto_mixed_precision(network, level, fmt)
    got = network(X)
    want = attention(FILLS["masked_fill"], LOWEST)(X)
    assert (got[0] - want[0]).abs().max() <= 2 * fmt.eps
    # equal weights; what is added to may still be told apart beside the lowest number of a narrow format
    assert got.isfinite().all()
    if "mask" in name and "added" not in name:
        assert (got[1] - want[1]).abs().max() <= 2 * fmt.eps
    with ledger(network, count=True):
        assert torch.equal(network(X), got)


def test_another_number_beyond_the_format_is_bounded_and_told_with_the_users_line() -> None:
    fill = FILLS["masked_fill"]
    network = auto_mixed_precision(attention(lambda x, low: fill(x, low), -1e9), "O2", E4M3FN)
    with pytest.warns(RuntimeWarning, match=r"masked_fill is given -1e\+09, beyond e4m3fn: -448 stands for it") as told:
        assert network(X).isfinite().all()
    assert (told[0].filename, told[0].lineno) == (__file__, fill.__code__.co_firstlineno)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        auto_mixed_precision(attention(fill, -448.0), "O2", E4M3FN)(X)
        auto_mixed_precision(attention(fill, -1e9), "O1", E4M3FN)(X)  # filled and weighed in float32
        auto_mixed_precision(attention(fill, -torch.inf), "O2", E5M2)(X)


def test_an_infinity_in_a_format_without_is_nan_and_told_with_a_way_out_that_helps() -> None:
    class Masked(nn.Module):
        def __init__(self, low: float) -> None:
            super().__init__()
            self.scores = attention(FILLS["masked_fill"], low)

        def forward(self, x: Tensor) -> Tensor:
            return self.scores(x)[:1]

    network = auto_mixed_precision(Masked(-torch.inf), "O2", E4M3FN)
    with pytest.warns(RuntimeWarning, match="masked_fill is given -inf, and e4m3fn has no infinity: it becomes NaN;"):
        assert network(X).isnan().any()
    assert auto_mixed_precision(Masked(-E4M3FN.max), "O2", E4M3FN)(X).isfinite().all()
    to_float(network.scores, torch.float32)
    assert network(X).isfinite().all()


def test_a_mask_of_infinities_that_is_given_to_a_network_is_told() -> None:
    mask = torch.zeros(2, 3).masked_fill(MASK & torch.tensor([[True], [False]]), -torch.inf)
    network = Apply2(lambda x, m: (x + m).softmax(-1))
    auto_mixed_precision(network, "O2", E4M3FN)
    with pytest.warns(RuntimeWarning, match="an argument of Apply2 holds an infinity, which e4m3fn has not.*-448"):
        assert network(X, mask).isnan().any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert network(X, mask.clamp(min=-E4M3FN.max)).isfinite().all()
        assert auto_mixed_precision(Apply2(network.function), "O2", E5M2)(X, mask).isfinite().all()


class Apply2(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Tensor:
        return self.function(*args)


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto", "torch_autocast", "apex_O1"])
def test_attention_adds_its_mask_before_anything_is_rounded(level: str) -> None:
    q = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))

    def call(mask: Any) -> Tensor:
        network = Apply(lambda _, x: F.scaled_dot_product_attention(x, x, x, mask, 0.0))
        cast_like(network, level, E4M3FN) if "_" in level else auto_mixed_precision(network, level, E4M3FN)
        return network(q)

    allowed = torch.ones(3, 3, dtype=torch.bool).tril()
    added = torch.zeros(3, 3).masked_fill(~allowed, -torch.inf)
    assert torch.equal(call(added), call(allowed))


def test_whole_numbers_places_and_float32_tensors_keep_theirs() -> None:
    def forward(self: Any, x: Tensor) -> list[Tensor]:
        table = torch.zeros(1000)
        table[999] = 2.0
        self.count.fill_(5000.0)
        counts = torch.full((1,), 5000), torch.zeros(2, dtype=torch.long).masked_fill(MASK[0, :2], 5000)
        return [*counts, torch.where(MASK, torch.tensor(5000), 1), table[998:], self.count.long(), x]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = auto_mixed_precision(Apply(forward, count=torch.zeros(1)), "O2", E4M3FN)(X)
    assert [part.max().item() for part in got[:5]] == [5000, 5000, 5000, 2.0, 5000]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own compiler raises some
@pytest.mark.parametrize(
    "name", ["masked_fill", "masked_fill_", "where", "as transformers makes it", "an index", "sdpa"]
)
@pytest.mark.parametrize("level", ["O2", "auto"])
def test_a_graph_fills_and_masks_as_the_code_it_was_made_of(level: str, name: str) -> None:
    torch._dynamo.reset()
    network = attention(FILLS[name], LOWEST) if name in FILLS else Apply(scaled)
    auto_mixed_precision(network, level, E4M3FN)
    assert torch.equal(torch.compile(network, backend="eager", fullgraph=True)(X), network(X))


def scaled(_: Any, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[None], x[None], x[None], torch.tensor([[0.0, 1.0], [-2.0, 0.0]]))
