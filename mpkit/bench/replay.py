"""Replaying many policies: a vector against Python loops."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from mpkit.bench._measure import Row
from mpkit.policies import ScalePolicy, advance, initial, stack
from mpkit.replay import simulate, swept

LOOP, TIGHT, EAGER = "Python loop", "Python loop by hand", "vector"
GOALS = {EAGER: 100.0}
LOOPED = (7, 1234, 4321)  # policies that the Python loops step; their pace is taken for all


def run(*, quick: bool, device: torch.device) -> list[Row]:
    """Every step of every policy by the vectors; the Python loops step a few policies and are scaled up."""
    steps, count = (400, 10_000) if quick else (10_000, 10_000)
    tops = _ceilings(steps)
    policies = [_policy(i) for i in range(count)]
    vector = stack(policies)
    seconds, skips = {}, {}
    for name, loop in ((LOOP, _loop), (TIGHT, _tight)):
        few = [_timed(partial(loop, policies[i], tops)) for i in LOOPED]
        seconds[name] = sum(spent for spent, _ in few) * count / len(LOOPED)
        skips[name] = [skipped for _, skipped in few]
    options: dict[str, Any] = {"sample": (), "device": device}
    simulate(tops[:160], vector, **options)
    seconds[EAGER], done = _timed(partial(simulate, tops, vector, **options))
    skips[EAGER] = done.skipped[list(LOOPED)].tolist()
    if any(found != skips[LOOP] for found in skips.values()):
        raise AssertionError(f"the contenders disagree about skipped steps: {skips}")
    case = f"{steps:.0e} steps x {count:.0e} policies"
    return [_row(case, name, seconds, steps * count) for name in (LOOP, TIGHT, EAGER)]


def _row(case: str, name: str, seconds: dict[str, float], policy_steps: int) -> Row:
    note = f"{policy_steps / seconds[name]:.3g} policy-steps/s, {seconds[TIGHT] / seconds[name]:.3g}x the loop by hand"
    if name in (LOOP, TIGHT):
        note = f"{policy_steps / seconds[name]:.3g} policy-steps/s; {len(LOOPED)} policies timed, scaled by their count"
    ratio, goal = seconds[LOOP] / seconds[name], GOALS.get(name)
    return Row(
        "replay", case, name, seconds[name], baseline=LOOP, ratio=ratio, goal=goal, goal_is_floor=True, note=note
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


def _tight(policy: ScalePolicy, tops: np.ndarray) -> int:
    """What somebody would write for these policies alone, without floor, cap, rounding or counters."""
    scale, factor, window = policy.init_scale, policy.growth_factor, policy.growth_interval
    good = skipped = 0
    for top in tops.tolist():
        if scale <= top:
            good += 1
            if good == window:
                scale *= factor
                good = 0
        else:
            skipped += 1
            scale /= factor
            good = 0
    return skipped


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result
