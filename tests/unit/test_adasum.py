"""AdaSum over simulated workers: limits of the pair formula, the tree, and what enters it."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from mpkit.boost.adasum import AdaSum, adasum, adasum_coefficients, adasum_pair, halves


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact_pair(a: Tensor, b: Tensor) -> list[Fraction]:
    """The formula without epsilon in rational arithmetic."""
    x, y = ([Fraction(v) for v in t.flatten().tolist()] for t in (a, b))
    dot, aa, bb = (sum(p * q for p, q in zip(u, v)) for u, v in ((x, y), (x, x), (y, y)))
    return [(1 - dot / (2 * aa)) * p + (1 - dot / (2 * bb)) * q for p, q in zip(x, y)]


@pytest.mark.parametrize("seed", range(5))
def test_the_pair_equals_exact_arithmetic(seed: int) -> None:
    a, b = random(4, 3, seed=seed), random(4, 3, seed=100 + seed)
    want = torch.tensor([float(v) for v in exact_pair(a, b)], dtype=torch.float64).view(4, 3)
    torch.testing.assert_close(adasum_pair(a, b, eps=0.0), want, rtol=1e-14, atol=1e-14)


def test_limits_orthogonal_equal_scaled_and_opposite() -> None:
    a, b = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 3.0])
    assert adasum_pair(a, b, eps=0).tolist() == [2.0, 3.0]
    assert adasum_pair(a, a, eps=0).tolist() == [2.0, 0.0]
    assert adasum_pair(a, 3 * a, eps=0).tolist() == [4.0, 0.0]  # -1/2 a + 5/6 * 3a = 2a
    assert adasum_coefficients(a, 3 * a, eps=0).tolist() == pytest.approx([-0.5, 5 / 6])
    assert adasum_pair(a, -a, eps=0).tolist() == [0.0, 0.0]
    assert adasum_coefficients(a, -a, eps=0).tolist() == [1.5, 1.5]


def test_zero_and_tiny_vectors() -> None:
    a, zero = torch.tensor([2.0, 1.0]), torch.zeros(2)
    assert adasum_pair(a, zero, eps=0).tolist() == [2.0, 1.0]
    assert adasum_pair(zero, zero, eps=0).tolist() == [0.0, 0.0]
    tiny = torch.tensor([1e-9, -1e-9])
    torch.testing.assert_close(adasum_pair(tiny, zero), tiny / 2)  # the epsilon dominates: the mean


def test_half_precision_updates_get_wide_inner_products() -> None:
    # 300 * 300 > 65504: in float16 the products would be inf and the result nan
    a = torch.tensor([300.0, 0.0], dtype=torch.float16)
    merged = adasum_pair(a, a)
    assert merged.dtype == torch.float16
    assert merged.tolist() == [300.0, 0.0]


@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16])
def test_the_tree_is_the_pair_formula_level_by_level(workers: int) -> None:
    deltas = [[random(3, 4, seed=r), random(7, seed=100 + r)] for r in range(workers)]
    for i, merged in enumerate(adasum(deltas, eps=0.0)):
        level = [d[i] for d in deltas]
        while len(level) > 1:
            level = [adasum_pair(a, b, eps=0.0) for a, b in zip(level[::2], level[1::2])]
        torch.testing.assert_close(merged, level[0], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("workers", [0, 3, 6, 12])
def test_other_numbers_of_workers_are_refused(workers: int) -> None:
    with pytest.raises(ValueError, match=f"1, 2, 4, 8, ... workers, got {workers}"):
        adasum([[torch.ones(2)]] * workers)


@pytest.mark.parametrize("shape", [(7,), (1, 9), (1, 1, 2), (4, 3), (2, 8, 3)])
def test_halves_put_the_whole_together_again(shape: tuple[int, ...]) -> None:
    left, right = halves(shape)
    assert math.prod(left) + math.prod(right) == math.prod(shape)
    flat = torch.arange(math.prod(shape))
    axis = next(i for i, n in enumerate(shape) if n > 1)
    joined = torch.cat([flat[: math.prod(left)].view(left), flat[math.prod(left) :].view(right)], axis)
    assert torch.equal(joined, flat.view(shape))


def test_the_class_says_how_to_start_processes() -> None:
    with pytest.raises(RuntimeError, match="start the script with torchrun"):
        AdaSum(0, 1, 2, [nn.Parameter(torch.zeros(1))])


@pytest.mark.gpu
def test_the_gpu_merges_like_the_cpu() -> None:
    deltas = [[random(64, 33, seed=r).float(), random(7, seed=50 + r).float()] for r in range(8)]
    for got, want in zip(adasum([[t.cuda() for t in d] for d in deltas]), adasum(deltas)):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)


def test_devices_of_a_node_share_the_parameters_and_the_last_takes_the_rest() -> None:
    cell = AdaSum.__new__(AdaSum)
    vars(cell).update(weights=[torch.zeros(1)] * 5, device_number=2)
    assert [cell.slot(0), cell.slot(1)] == [slice(0, 2), slice(2, 5)]


def test_the_epsilon_grows_with_the_ranks_below_a_level() -> None:
    a, b, c, d = (torch.tensor([v, 0.0], dtype=torch.float64) for v in (1.0, 2.0, 3.0, 5.0))

    def pair(x: Tensor, y: Tensor, eps: float) -> Tensor:
        dot, xx, yy = (float(u @ v) + eps for u, v in ((x, y), (x, x), (y, y)))
        return (1 - dot / (2 * xx)) * x + (1 - dot / (2 * yy)) * y

    want = pair(pair(a, b, 2.0), pair(c, d, 2.0), 4.0)
    torch.testing.assert_close(adasum([[a], [b], [c], [d]], eps=1.0)[0], want, rtol=1e-14, atol=0)
    torch.testing.assert_close(adasum_pair(1e-6 * a, 1e-6 * b), pair(1e-6 * a, 1e-6 * b, 2e-12), rtol=1e-12, atol=0)
