"""Replaying many policies: the compiled and the plain vector against a Python loop over the same rule."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mpkit.bench._measure import Row
from mpkit.policies import ScalePolicy, advance, initial, stack
from mpkit.replay import can_compile, simulate, swept

LOOP, EAGER, COMPILED = "Python loop", "vector", "vector, compiled"


def run(*, quick: bool, device: torch.device) -> list[Row]:
    """Policy-steps per second; the Python loop runs a few policies, the vectors all of them."""
    steps, count = (1_600, 2_000) if quick else (100_000, 10_000)
    tops = _ceilings(steps)
    policies = stack([_policy(i) for i in range(count)])
    case = f"{steps:.0e} steps x {count:.0e} policies"
    pace = {LOOP: _pace(lambda: _loop(policies[7], tops), steps, rounds=3 if quick else 5)}
    short = tops[: max(160, steps // 100)]  # the plain vector is timed on a part of the steps: its pace is constant
    pace[EAGER] = _pace(
        lambda: simulate(short, policies, sample=(), compiled=False, device=device), len(short) * count, rounds=3
    )
    skipped = {}
    if can_compile():
        done = simulate(tops[:160], policies, sample=(), compiled=True, device=device)  # builds the kernel
        assert (done.skipped == simulate(tops[:160], policies, sample=(), compiled=False).skipped).all()
        pace[COMPILED] = _pace(
            lambda: simulate(tops, policies, sample=(), compiled=True, device=device),
            steps * count,
            rounds=1 if not quick else 3,
        )
    else:
        skipped[COMPILED] = "torch.compile cannot build kernels on this machine"
    return [_row(case, name, pace, skipped) for name in (LOOP, EAGER, COMPILED)]


def _row(case: str, name: str, pace: dict[str, float], skipped: dict[str, str]) -> Row:
    if name in skipped:
        return Row("replay", case, name, skipped=skipped[name])
    goal = {EAGER: 10.0, COMPILED: 100.0}.get(name)
    return Row(
        "replay",
        case,
        name,
        seconds=1 / pace[name],
        baseline=LOOP,
        ratio=pace[name] / pace[LOOP],
        goal=goal,
        goal_is_floor=True,
        note=f"{pace[name]:.3g} policy-steps/s; seconds are per policy-step, the ratio is a speed-up",
    )


def _ceilings(steps: int) -> np.ndarray:
    generator = np.random.default_rng(0)
    return np.exp2(14 + np.cumsum(generator.normal(0, 0.02, steps)) + generator.normal(0, 0.3, steps))


def _policy(i: int) -> ScalePolicy:
    return swept(2.0 ** (8 + i % 10), (1.5, 2.0, 3.0, 4.0)[i // 10 % 4], 20 + i // 40 * 10)


def _loop(policy: ScalePolicy, tops: np.ndarray) -> int:
    state, skipped = initial(policy), 0
    for top in tops.tolist():
        fits = state.scale <= top
        skipped += not fits
        state, _ = advance(policy, state, fits)
    return skipped


def _pace(work: Callable[[], Any], policy_steps: int, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return policy_steps / statistics.median(times)
