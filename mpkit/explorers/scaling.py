"""How a loss scale moves: over a recorded run, over a grid of settings, in a live training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np

from mpkit.data import data_dir
from mpkit.policies import ScalePolicy, explain
from mpkit.policies.rule import FLOAT32_MAX
from mpkit.record import Trace
from mpkit.replay import ceilings, simulate

RUNS = {
    "mlp_digits": "perceptron on digits, healthy",
    "gpt_sums": "small GPT on sums, healthy",
    "rare_outliers": "one huge batch in 16",
    "growing_activations": "broken from step 129 on",
}
SHOWN = 400  # steps of each recorded run
POWERS = (-60, 120)  # what a hand may set: far beyond any axis, and within float32

FORMATS = {"fp16": "float16", "bf16": "bfloat16"}


@cache
def recorded(run: str, fmt: str = "fp16") -> tuple[Trace, np.ndarray]:
    """A trace from `data/traces` and the largest scale that each of its steps can bear in `fmt` (negative: none).

    The runs were trained in float32, so that no recorded scale hides what another one would have kept, and the ceiling
    of float16 was measured in each step; that of bfloat16 follows from the largest gradient of a weight.
    """
    trace = Trace.load(data_dir() / "traces" / f"{run}_float32.npz").before(SHOWN)
    return trace, ceilings(trace, fmt)


def exponent(value: float) -> str:
    """2^n for tables and sentences: exponent(1024.0) is '2^10', exponent(1000.0) is '2^9.966', and 0, inf as they are.

    >>> exponent(1024.0), exponent(1000.0), exponent(0.0)
    ('2^10', '2^9.966', '0')
    """
    if value <= 0 or not math.isfinite(value):
        return f"{value:g}"
    if value == FLOAT32_MAX:
        return "float32 max"
    return f"2^{math.log2(value):.4g}"


def _sentence(words: str) -> str:
    """The words with a capital first letter; names such as GPT stay as they are."""
    return words[0].upper() + words[1:]


def stepped(
    policy: ScalePolicy, tops: np.ndarray, puts: Mapping[int, float] | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(scale used in each step, was it finite, what was decided after it) when step i overflows above `tops[i]`.

    `puts` are scales set by hand, by step; the count of finite steps starts again there.
    """
    starts = {0: policy.init_scale} | {k: v for k, v in (puts or {}).items() if k < len(tops)}
    ends, parts = [*sorted(starts)[1:], len(tops)], []
    for first, end in zip(sorted(starts), ends):
        own = replace(policy, init_scale=starts[first])
        done = simulate(tops[first:end], own)
        used = done.sampled[:, 0]
        finite = used <= tops[first:end]
        parts.append((used, finite, explain(own, used, np.append(used[1:], done.final[0]), finite)))
    scale, finite, reasons = (np.concatenate(column) for column in zip(*parts))
    return scale, finite, reasons
