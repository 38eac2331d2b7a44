"""Timing by interleaving: every contender once per round, ratios within a round, medians over the rounds."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Row:
    """One measured contender, or one that could not be measured.

    Args:
        group:      topic, e.g. "rounding".
        case:       what was done, with sizes, e.g. "fp16 nearest_even 1e7 out=".
        contender:  who did it.
        seconds:    median time of one call, seconds; None when skipped.
        baseline:   the contender that the ratio is taken against.
        ratio:      median over rounds of (this / baseline in the same round), dimensionless.
        quartiles:  first and third quartile of that ratio.
        goal:       the ratio aimed at (an upper limit unless `goal_is_floor`), None without one.
        goal_is_floor: the ratio should be at least the goal (a speed-up) instead of at most.
        note:       anything a reader must know, units of other figures included.
        skipped:    why there is no figure; empty when there is one.
    """

    group: str
    case: str
    contender: str
    seconds: float | None = None
    baseline: str = ""
    ratio: float | None = None
    quartiles: tuple[float, float] | None = None
    goal: float | None = None
    goal_is_floor: bool = False
    note: str = ""
    skipped: str = ""

    @property
    def verdict(self) -> str:
        """ "met", "missed", "skipped", or "" without a goal."""
        if self.skipped:
            return "skipped"
        if self.goal is None or self.ratio is None:
            return ""
        return "met" if (self.ratio >= self.goal if self.goal_is_floor else self.ratio <= self.goal) else "missed"


def measure(
    group: str,
    case: str,
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 21,
    warmup: int = 3,
    inner: int = 1,
    device: torch.device | None = None,
    goals: Mapping[str, float] | None = None,
    notes: Mapping[str, str] | None = None,
) -> list[Row]:
    """Time every contender `inner` calls at a time, in turn, `rounds` times; the first one is the baseline.

    Every round has another order, so that a drift of the machine hits all alike, and every turn begins with one call
    that is not timed, so that a contender meets its own data in the cache, whoever was before it. (With the order
    only reversed in turn, the first and the last one ran twice in a row and looked up to 10 % faster than the rest.)
    """
    names = list(contenders)
    shuffled = random.Random(0)
    for name in names:
        for _ in range(warmup):
            contenders[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in shuffled.sample(names, len(names)):
            contenders[name]()
            times[name].append(_timed(contenders[name], inner, device))
    rows = []
    for name in names:
        ratios = [t / b for t, b in zip(times[name], times[names[0]])]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        seconds, goal, note = statistics.median(times[name]), (goals or {}).get(name), (notes or {}).get(name, "")
        rows.append(Row(group, case, name, seconds, names[0], ratio, (low, high), goal, note=note))
    return rows


class HostReads(TorchDispatchMode):
    """Counts the reads of a tensor's value on the host, each of which waits for the device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name() == "aten::_local_scalar_dense"
        return func(*args, **(kwargs or {}))


def rebuilt(build: Callable[[], list[Row]], builds: int) -> list[Row]:
    """`build` makes its contenders anew every time; the median of each contender's ratio over the builds.

    Where a network happens to lie in memory decides which of its tensors fight for the same cache lines. That moves
    a step of a millisecond by up to 10 %, in favour of any contender, and no number of rounds averages it out.
    Quartiles are then over the builds.
    """
    sizes = random.Random(0)
    apart: list[torch.Tensor] = []
    runs: list[list[Row]] = []
    for _ in range(builds):
        apart.append(torch.empty(sizes.randrange(1, 400) * 1024))  # or the next build would get the same memory
        runs.append(build())
    rows = []
    for same in zip(*runs, strict=True):
        low, ratio, high = statistics.quantiles([row.ratio or 0.0 for row in same], n=4)
        seconds = statistics.median(row.seconds or 0.0 for row in same)
        rows.append(replace(same[0], seconds=seconds, ratio=ratio, quartiles=(low, high)))
    return rows


def _timed(call: Callable[[], object], inner: int, device: torch.device | None) -> float:
    wait = torch.cuda.synchronize if device is not None and device.type == "cuda" else bool
    wait(device)
    start = time.perf_counter()
    for _ in range(inner):
        call()
    wait(device)
    return (time.perf_counter() - start) / inner
