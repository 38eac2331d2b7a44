"""How benchmarks are timed: every contender alike, whatever its place in the order."""

import pytest

from mpkit.bench import _measure
from mpkit.bench._measure import Row, interleaved, rebuilt


def test_every_contender_warms_up_and_every_turn_begins_untimed(monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr(_measure.time, "perf_counter", lambda: float(next(clock)))
    calls: list[str] = []
    contenders = {name: (lambda name=name: calls.append(name)) for name in ("base", "twin", "third")}
    rows = interleaved("g", "c", contenders, rounds=8, warmup=2, inner=3, goals={"twin": 0.5}, notes={"third": "n"})
    assert [calls.count(name) for name in contenders] == [2 + 8 * 4] * 3
    turns = [calls[i] for i in range(6, len(calls), 4)]
    assert all(sorted(turns[i : i + 3]) == sorted(contenders) for i in range(0, 24, 3))
    assert len({tuple(turns[i : i + 3]) for i in range(0, 24, 3)}) > 2  # not one order for ever
    assert [(row.ratio, row.baseline) for row in rows] == [(1.0, "base")] * 3
    assert [row.verdict for row in rows] == ["", "missed", ""]
    assert rows[2].note == "n"


def test_rows_of_several_builds_become_their_median():
    ratios = iter((1.5, 1.1, 1.2, 9.0, 1.3))
    build = lambda: [Row("g", "c", "ours", (r := next(ratios)) * 2, "base", r, (0.0, 0.0), 1.3)]  # noqa: E731
    (row,) = rebuilt(build, 5)
    assert (row.ratio, row.seconds, row.verdict) == (1.3, 2.6, "met")
    assert row.quartiles == pytest.approx((1.15, 5.25))
