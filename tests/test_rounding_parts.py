"""The ways of rounding by themselves, where one hands over to the next."""

from __future__ import annotations

import math
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from mpkit import rounding
from mpkit.formats import FloatFormat, get_format
from mpkit.rounding import MODES, OVERFLOWS, round_to


@pytest.mark.parametrize("fraction_bits", [1, 2, 4, 5, 10, 20])
@pytest.mark.parametrize("share", [0.125, 0.375, 0.75])
def test_with_few_exponent_bits_the_noise_is_one_gap_wide(fraction_bits: int, share: float) -> None:
    """As often up as the mean asks for, within four standard errors."""
    fmt, count = get_format(f"e5m{fraction_bits}"), 20_000
    x = torch.full((count,), 1 + share * fmt.eps)
    up = round_to(x, fmt, "stochastic", generator=torch.Generator().manual_seed(0)) > 1
    assert float(up.float().mean()) == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / count))


@pytest.mark.parametrize("mode", MODES)
def test_a_format_as_wide_as_float32_leaves_every_number_as_it_is(mode: str) -> None:
    """Whoever gives it another name than FP32 gets no native cast, and nothing is dropped."""
    own = FloatFormat("own", 8, 23)
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(-(2**31), 2**31, (4096,), generator=generator).to(torch.int32).view(torch.float32)
    x = x[~x.isnan()]
    assert torch.equal(round_to(x, own, mode).view(torch.int32), x.view(torch.int32))  # type: ignore[arg-type]


@pytest.mark.parametrize(("numel", "blocks"), [(rounding.BLOCK, 1), (rounding.BLOCK + 1, 2), (3, 1)])
def test_a_block_is_as_large_as_it_may_be(numel: int, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def count(x: Tensor, out: Tensor, b: Tensor, c: Tensor) -> None:
        assert x.shape == out.shape == b.shape == c.shape
        seen.append(x.numel())

    monkeypatch.setattr(rounding.torch, "get_num_threads", lambda: 1)
    x = torch.zeros(numel)
    rounding._by_blocks(x, torch.empty_like(x), count)
    assert len(seen) == blocks
    assert sum(seen) == numel


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_in_place_every_bit_is_that_of_another_tensor(mode: str, dtype: torch.dtype) -> None:
    """What rounds to zero from below keeps its sign: a way that looks at x once more must not find the result there."""
    bits = torch.int32 if dtype == torch.float32 else torch.int64
    generator = torch.Generator().manual_seed(3)
    scale = torch.randint(-45, 20, (4096,), generator=generator, dtype=torch.float64).exp2()
    edges = torch.tensor([-1e-40, 1e-40, -0.0, 0.0, -3e38, 3e38, -torch.inf, torch.inf, torch.nan], dtype=dtype)
    within = torch.randn(4096, generator=generator, dtype=torch.float64).mul(scale).to(dtype)
    for x in (within, within.clamp(-1, 1), torch.cat([within, edges])):
        for fmt in map(get_format, ("fp16", "bf16", "tf32", "e5m2", "e4m3fn", "e2m1", "e4m7", "e8m3")):
            for overflow in OVERFLOWS:
                here = x.clone()
                apart, here = (
                    round_to(v, fmt, mode, overflow=overflow, generator=torch.Generator().manual_seed(1), out=out)  # type: ignore[arg-type]
                    for v, out in ((x, torch.empty_like(x)), (here, here))
                )
                assert torch.equal(apart.isnan(), here.isnan()), (fmt, overflow)
                apart, here = (v.nan_to_num(nan=7.0).view(bits) for v in (apart, here))
                assert torch.equal(apart, here), (fmt, overflow)


def interrupted(line: int) -> bool:
    """Whether a rounding has a line of this number; there a Ctrl-C comes."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != rounding.__file__:
            return None
        left -= event == "line"
        if left == 0:
            left = -1
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with torch.enable_grad():  # an interrupt between the last line of a no_grad and its end leaves that on
            round_to(torch.ones(3), get_format("e5m2"))
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_at_any_line_leaves_no_rounding_behind() -> None:
    """Else a later diagnosis takes every operation for a step of it."""
    line = 1
    while interrupted(line):
        assert rounding.ROUNDING.get() is None, line
        assert torch.is_grad_enabled()
        line += 1
    assert line > 20  # lines that a rounding has
