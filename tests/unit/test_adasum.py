"""AdaSum over simulated workers: limits of the pair formula, the tree, and what enters it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mpkit.boost.adasum import AdaSum, adasum, adasum_coefficients, adasum_pair


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_zero_and_tiny_vectors() -> None:
    a, zero = torch.tensor([2.0, 1.0]), torch.zeros(2)
    assert adasum_pair(a, zero, eps=0).tolist() == [2.0, 1.0]
    assert adasum_pair(zero, zero, eps=0).tolist() == [0.0, 0.0]
    assert adasum_pair(1e-200 * a.double(), zero.double(), eps=0).tolist() == [2e-200, 1e-200]  # its square is 0
    tiny = torch.tensor([1e-9, -1e-9])
    torch.testing.assert_close(adasum_pair(tiny, zero), tiny / 2)  # the epsilon dominates: the mean


def test_half_precision_updates_get_wide_inner_products() -> None:
    # 300 * 300 > 65504: in float16 the products would be inf and the result nan
    a = torch.tensor([300.0, 0.0], dtype=torch.float16)
    merged = adasum_pair(a, a)
    # float64 on a CPU
    assert torch.equal(adasum_coefficients(b := a.float() / 2**28, a), adasum_coefficients(b, a, eps=2e-12).double())
    assert merged.dtype == torch.float16
    assert merged.tolist() == [300.0, 0.0]


@pytest.mark.parametrize(("weights", "slots"), [(5, [(0, 2), (2, 5)]), (4, [(0, 2), (2, 4)]), (1, [(0, 0), (0, 1)])])
def test_devices_of_a_node_share_the_parameters_and_the_last_takes_the_rest(weights: int, slots: Any) -> None:
    cell = SimpleNamespace(weights=(torch.zeros(1),) * weights, device_number=2)
    assert [AdaSum.slot(cell, i) for i in (0, 1)] == [slice(*slot) for slot in slots]  # type: ignore[arg-type]


@pytest.mark.gpu
def test_the_gpu_merges_like_the_cpu() -> None:
    deltas = [[random(64, 33, seed=r).float(), random(7, seed=50 + r).float()] for r in range(8)]
    for got, want in zip(adasum([[t.cuda() for t in d] for d in deltas]), adasum(deltas)):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)


def test_the_epsilon_grows_with_the_ranks_below_a_level() -> None:
    a, b, c, d = (torch.tensor([v, 0.0], dtype=torch.float64) for v in (1.0, 2.0, 3.0, 5.0))

    def pair(x: Tensor, y: Tensor, eps: float) -> Tensor:
        dot, xx, yy = (float(u @ v) + eps for u, v in ((x, y), (x, x), (y, y)))
        return (1 - dot / (2 * xx)) * x + (1 - dot / (2 * yy)) * y

    with pytest.raises(ValueError, match="got 3"):
        adasum([[a], [b], [c]])
    want = pair(pair(a, b, 2.0), pair(c, d, 2.0), 4.0)
    torch.testing.assert_close(adasum([[a], [b], [c], [d]], eps=1.0)[0], want, rtol=1e-14, atol=0)
    torch.testing.assert_close(adasum_pair(1e-6 * a, 1e-6 * b), pair(1e-6 * a, 1e-6 * b, 2e-12), rtol=1e-12, atol=0)
