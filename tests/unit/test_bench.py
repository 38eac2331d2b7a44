"""How benchmarks are timed: every contender alike, whatever its place in the order."""

import pytest
import torch

from mpkit.bench import Row, measure, rebuilt
from mpkit.bench.cases import TOPICS, Case, cases


def test_every_contender_warms_up_and_every_turn_begins_untimed(monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    calls: list[str] = []
    contenders = {name: (lambda name=name: calls.append(name)) for name in ("base", "twin", "third")}
    rows = measure("g", "c", contenders, rounds=8, warmup=2, inner=3, goals={"twin": 0.5}, notes={"third": "n"})
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


CPU = torch.device("cpu")
CASES = list(cases(True, CPU))


def test_every_topic_has_cases():
    assert {case.topic for case in CASES} == set(TOPICS)


@pytest.mark.parametrize("case", [c for c in CASES if c.topic != "experiment"], ids=lambda c: f"{c.topic} {c.name}")
def test_the_contenders_of_every_case_run_and_its_goals_are_among_them(case: Case):
    made = case.build(CPU)
    assert set(case.goals) <= set(made)
    assert len(made) > 1
    for call in made.values():
        call()
