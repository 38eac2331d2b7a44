"""What several files of the contract draw from or compare with: exact rounding, every optimizer, any policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import torch
from hypothesis import strategies as st

from mpkit import optimizers as opt
from mpkit.blocks import BLOCK_FORMATS
from mpkit.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E3M4,
    E4M3B11FNUZ,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    FP16,
    FloatFormat,
    get_format,
)
from mpkit.policies import ScalePolicy, preset
from mpkit.rounding import MODES

# --- rounding


def exactly(x: float, fmt: FloatFormat, mode: str, overflow: str) -> float:
    """The definition in IEEE 754-2019, 4.3 and 7.4, in rational numbers."""
    if math.isnan(x):
        return x
    if math.isinf(x):
        return math.copysign({"inf": math.inf, "nan": math.nan, "saturate": fmt.max}[overflow], x)
    q = abs(Fraction(x))
    exponent = fmt.min_exponent
    while q >= Fraction(2) ** (exponent + 1):
        exponent += 1
    gap = Fraction(2) ** (exponent - fmt.fraction_bits)
    below = q // gap
    rest = q / gap - below
    if mode == "nearest_even":
        away = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and below % 2 == 1)
    elif mode == "nearest_away":
        away = rest >= Fraction(1, 2)
    else:
        away = rest > 0 and mode == ("up" if x > 0 else "down")
    result = (below + away) * gap
    if result > fmt.max:
        inward = mode == "toward_zero" or mode == ("down" if x > 0 else "up")
        if inward or overflow == "saturate":
            result = Fraction(fmt.max)
        else:
            return math.copysign({"inf": math.inf, "nan": math.nan}[overflow], x)
    return math.copysign(float(result), x) if result or fmt.has_minus_zero else 0.0


def agree(got: float, want: float) -> bool:
    return (math.isnan(got) and math.isnan(want)) or (got == want and math.copysign(1, got) == math.copysign(1, want))


EXACT_MODES = [mode for mode in MODES if mode != "stochastic"]
formats = st.builds(
    lambda e, m, s: FloatFormat("own", e, m, "ieee" if e == 8 else s),
    st.integers(2, 8),
    st.integers(1, 23),
    st.sampled_from(["ieee", "nan", "none"]),
)

ML_DTYPES = {
    FP16: np.float16,
    BF16: ml_dtypes.bfloat16,
    E5M2: ml_dtypes.float8_e5m2,
    E4M3FN: ml_dtypes.float8_e4m3fn,
    E3M2: ml_dtypes.float6_e3m2fn,
    E2M3: ml_dtypes.float6_e2m3fn,
    E2M1: ml_dtypes.float4_e2m1fn,
    get_format("e4m3"): ml_dtypes.float8_e4m3,
    E3M4: ml_dtypes.float8_e3m4,
    E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
    E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
    E4M3B11FNUZ: ml_dtypes.float8_e4m3b11fnuz,
}
SPECIAL = torch.tensor([0.0, torch.inf, torch.nan, torch.finfo(torch.float32).max, 2.0**-149, 2.0**-126])


def beside_every_tie(fmt: FloatFormat) -> torch.Tensor:
    """Every value of the format and every midpoint (overflow's too), both float32 neighbours; special values."""
    grid = fmt.values().double()
    beyond = grid[-1:] + grid[-1:] - grid[-2:-1]
    grid = torch.cat([-beyond, grid, beyond])
    points = torch.cat([grid, (grid[:-1] + grid[1:]) / 2]).float()
    beside = [torch.nextafter(points, torch.tensor(side * torch.inf)) for side in (1, -1)]
    return torch.cat([points, *beside, SPECIAL, -SPECIAL])


def random_patterns(count: int, seed: int) -> torch.Tensor:
    """Random float32 bit patterns (every exponent alike, NaN and inf among them), and numbers near those of formats."""
    rng = torch.Generator().manual_seed(seed)
    anything = torch.randint(-(2**31), 2**31, (count,), generator=rng).to(torch.int32).view(torch.float32)
    near = torch.randn(count, generator=rng) * 2 ** (50 * torch.rand(count, generator=rng) - 30)
    return torch.cat([anything, near])


def cast(x: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """The cast of numpy or ml_dtypes and back."""
    with np.errstate(over="ignore", invalid="ignore"):
        back = torch.from_numpy(x.numpy().astype(ML_DTYPES[fmt]).astype(np.float32))
    return torch.where(x.isnan(), torch.nan, back)  # the OCP MX types have no NaN to keep


def mismatches(got: torch.Tensor, want: torch.Tensor) -> int:
    """How many elements differ by bits, any NaN being equal to any NaN; -0 is not 0."""
    assert got.dtype == want.dtype
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    return int((~((got.view(ints) == want.view(ints)) | (got.isnan() & want.isnan()))).sum())


@st.composite
def near_the_grid(draw) -> tuple[FloatFormat, float]:
    """A format and a number on or around its grid, its ties, its ends."""
    fmt = draw(formats)
    significand = draw(st.integers(0, 2 ** (fmt.fraction_bits + 2) + 1))
    exponent = draw(st.integers(fmt.min_exponent - fmt.fraction_bits - 3, fmt.max_exponent - fmt.fraction_bits + 1))
    x = significand * 2.0**exponent
    x = math.nextafter(x, draw(st.sampled_from([-math.inf, 0.0, x, math.inf])))
    return fmt, draw(st.sampled_from([x, -x]))


# --- blocks

MX = [fmt for fmt in BLOCK_FORMATS.values() if fmt.name.startswith("mxfp")]
MX_RULES = ("floor", "ceil", "even", "rceil")

# --- policies

GIVEN = {  # what has no default in the framework
    "jmp": {"loss_scale": 2.0**15},
    "mindspore_scaler": {"scale_value": 2.0**15, "scale_factor": 2, "scale_window": 2000},
    "mindspore_cell": {"loss_scale_value": 2.0**15, "scale_factor": 2, "scale_window": 2000},
    "fairscale_layerwise": {"layer_scale_dict": {"a": 1024.0, "b": 16.0}},
}
"""What a framework's own class asks for."""


def policy_of(framework: str, **parameters: Any) -> ScalePolicy:
    return preset(framework, **{**GIVEN.get(framework, {}), **parameters})


FACTORS = st.sampled_from([1.001, 1.1, 1.7, 2.0, 3.0, 4.0, 10.0])
POLICIES = st.builds(
    ScalePolicy,
    init_scale=st.sampled_from([1.0, 3.0, 1000.0, 2.0**16, 2.0**120, 2.0**-120]),
    growth_factor=FACTORS,
    backoff_factor=st.sampled_from([0.25, 0.5, 0.6, 0.9, 1.0]),
    backoff_divisor=st.sampled_from([1.0, 2.0, 3.0]),
    growth_interval=st.integers(-1, 6),
    min_scale=st.sampled_from([0.0, 0.25, 1.0, 100.0]),
    max_scale=st.sampled_from([2.0**10, 2.0**24, math.inf]),
    scale_bits=st.sampled_from([16, 32, 64]),
    hold_at_overflow=st.booleans(),
    growth_ge=st.booleans(),
    first_growth_lag=st.integers(0, 1),
    next_growth_lag=st.integers(0, 1),
    hysteresis=st.integers(0, 4),
    refill_on_growth=st.booleans(),
    refill_on_finite=st.booleans(),
    refill_on_backoff=st.booleans(),
    tolerance=st.sampled_from([-1.0, 0.0, 0.1, 0.5]),
    raise_at_min=st.booleans(),
    stop_at=st.sampled_from([-math.inf, 1e-4]),
    max_consecutive=st.sampled_from([3, 2**62]),
    error_at_zero=st.booleans(),
    error_at_inf=st.booleans(),
    clamp_both_ways=st.booleans(),
    delayed=st.booleans(),
    flush_subnormal=st.booleans(),
    init_count=st.integers(0, 2),
)
RUNS = st.lists(st.booleans(), max_size=60)

# --- optimizers

Make = Callable[..., torch.optim.Optimizer]

MEMBERS: dict[str, Make] = {
    "Momentum": lambda p, lr=0.1, **kw: opt.Momentum(p, lr, 0.9, **kw),
    "Momentum-nesterov": lambda p, lr=0.1, **kw: opt.Momentum(p, lr, 0.9, use_nesterov=True, **kw),
    "SGD": lambda p, lr=0.1, **kw: opt.SGD(p, lr, **kw),
    "SGD-dampening": lambda p, lr=0.1, **kw: opt.SGD(p, lr, 0.9, 0.3, **kw),
    "Adam": lambda p, lr=0.1, **kw: opt.Adam(p, lr, **kw),
    "Adam-nesterov": lambda p, lr=0.1, **kw: opt.Adam(p, lr, use_nesterov=True, **kw),
    "Adam-amsgrad": lambda p, lr=0.1, **kw: opt.Adam(p, lr, use_amsgrad=True, **kw),
    "LazyAdam": lambda p, lr=0.1, **kw: opt.LazyAdam(p, lr, **kw),
    "AdamOffload": lambda p, lr=0.1, **kw: opt.AdamOffload(p, lr, **kw),
    "AdamWeightDecay": lambda p, lr=0.1, **kw: opt.AdamWeightDecay(p, lr, **kw),
    "AdaMax": lambda p, lr=0.1, **kw: opt.AdaMax(p, lr, **kw),
    "RMSProp": lambda p, lr=0.1, **kw: opt.RMSProp(p, lr, **kw),
    "RMSProp-centered": lambda p, lr=0.1, **kw: opt.RMSProp(p, lr, momentum=0.5, centered=True, **kw),
    "Adagrad": lambda p, lr=0.1, **kw: opt.Adagrad(p, 0.1, lr, **kw),
    "Adagrad-from-0": lambda p, lr=0.1, **kw: opt.Adagrad(p, 0.0, lr, **kw),
    "Adadelta": lambda p, lr=0.1, **kw: opt.Adadelta(p, lr, **kw),
    "ASGD": lambda p, lr=0.1, **kw: opt.ASGD(p, lr, t0=2.0, **kw),
    "Rprop": lambda p, lr=0.1, **kw: opt.Rprop(p, lr, **kw),
    "FTRL": lambda p, lr=0.1, **kw: opt.FTRL(p, 0.1, lr, l1=0.01, l2=0.01, **kw),
    "ProximalAdagrad": lambda p, lr=0.1, **kw: opt.ProximalAdagrad(p, 0.1, lr, 0.01, 0.01, **kw),
    "AdaFactor": lambda p, lr=0.1, **kw: opt.AdaFactor(p, lr, relative_step=False, **kw),
    "AdaFactor-relative": lambda p, lr=None, **kw: opt.AdaFactor(p, None, beta1=0.0, **kw),
    "Lamb": lambda p, lr=0.1, **kw: opt.Lamb(p, lr, **kw),
    "LARS": lambda p, lr=0.1, **kw: opt.LARS(opt.Momentum(p, lr, 0.9, **kw)),
    "LARS-clip": lambda p, lr=0.1, **kw: opt.LARS(opt.SGD(p, lr, **kw), use_clip=True),
}
FIXED_RATE = {"FTRL", "AdaFactor-relative"}
