"""What results say: every verdict by numbers that are worked by hand, missing and failed runs, several comparisons."""

import math

import pytest
import torch

from mpkit.experiment import experiment

TABLE = {  # metric by cell and seed; what is made of them the contract says
    "base": [90.0, 91.0, 92.0, 93.0], "better": [92.0, 93.1, 93.9, 95.0], "noisy": [95.0, 87.0, 97.0, 90.0],
    "gone": [math.nan] * 4, "broken": [90.0, None, 92.0, 93.0],
}  # fmt: skip


def run(seed, name):
    if TABLE[name][seed] is None:
        raise ValueError("broken")
    return {"accuracy": TABLE[name][seed], "count": -TABLE[name][seed]}


def made(*names, seeds=4, **options):
    return experiment(run, {name: {"name": name} for name in names}, seeds=seeds, progress=False, **options)


def test_a_failed_run_gives_no_number_and_one_seed_no_verdict():
    row = made("base", "broken").summary("accuracy").loc["broken"]
    assert (row["n"], "1 of 4 runs gave no finite number" in row["sentence"]) == (3, True)
    assert made("base", "better", seeds=1).summary("accuracy")["verdict"].tolist() == ["baseline", "one seed"]


def test_a_difference_that_holds_alone_and_not_among_many_is_said_to_be_so():
    def near(seed, name):
        if name == "base":
            return {"accuracy": 90.0}
        return {"accuracy": 90.0 + (1.0, 1.4, 0.3, 0.9)[seed] * (1 if name == "x" else (-1) ** seed)}

    def said(names):
        grid = {name: {"name": name} for name in names}
        return experiment(near, grid, seeds=4, progress=False).summary("accuracy").loc["x"]

    alone, among = said(["base", "x"]), said(["base", "x", *"abcdef"])
    assert (alone.verdict, among.verdict) == ("better", "not distinguishable")
    assert alone.p == among.p < 0.05
    assert among.p_holm == pytest.approx(7 * alone.p)
    assert "better if it were the only comparison, but not after the correction for 7 (Holm)" in among.sentence


def test_names_that_do_not_tell_the_direction_are_higher_and_lower():
    table = made("base", "better").summary("count")
    assert table["verdict"].iloc[1] == "lower"
    assert made("base", "better").summary("count", higher_is_better=False)["verdict"].iloc[1] == "better"


def test_the_first_seeds_are_what_fewer_seeds_would_have_said():
    every, few = made("base", "better", "noisy"), made("base", "better", "noisy", seeds=2)
    assert every.first(2).summary("accuracy").equals(few.summary("accuracy"))
    for wrong in (0, 5):
        with pytest.raises(ValueError, match="seeds must be"):
            every.first(wrong)


def test_each_cell_has_its_own_baseline_where_the_baseline_names_an_argument():
    def two(seed, level, network):
        return {"y": {"a": 1, "b": 10}[network] * (2 if level == "O2" else 1) + seed}

    grid = {"level": ["O0", "O2"], "network": ["a", "b"]}
    results = experiment(two, grid, seeds=2, baseline={"level": "O0"}, progress=False)
    assert results.summary("y")["difference"].tolist()[2:] == [1, 10]
    assert results.summary("y")["verdict"].tolist()[:2] == ["baseline", "baseline"]
    with pytest.raises(ValueError, match="level=O0"):
        experiment(two, [*({"level": "O0", "network": n} for n in "ab"), {"level": "O2", "network": "c"}],
                   baseline={"level": "O0"}, progress=False)  # fmt: skip


def test_intervals_of_means_by_hand():
    # 90, 91, 92, 93: mean 91.5, spread sqrt(5/3), t(3) = 3.1824463, half t * sqrt(5/3) / 2
    low, mean, high = made("base").interval(0, "accuracy")
    assert (mean, mean - low) == (91.5, pytest.approx(high - mean))
    assert high - mean == pytest.approx(3.1824463 * math.sqrt(5 / 3) / 2)
    assert all(math.isnan(v) for v in made("gone").interval(0, "accuracy"))


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda r: r.summary("speed"), "no run returned 'speed'; there are accuracy, count"),
        (lambda r: r.values("O2", "accuracy"), "no cell 'O2'; there are base"),
        (lambda r: r.series(3, "loss"), "no cell 3"),
        (lambda r: r.series(0, "loss"), "no series 'loss'; there are none"),
        (lambda r: r.series(0, "loss", 9), "has no run from seed 9"),
    ],
)
def test_wrong_questions_are_refused(ask, said):
    with pytest.raises(ValueError, match=said):
        ask(made("base", seeds=1))


def test_numbers_that_are_equal_but_for_rounding_are_equal():
    equal = experiment(lambda seed, x: {"y": x}, {"x": [0.3, 0.1 * 3]}, seeds=3, progress=False).summary("y")
    assert equal.p.iloc[1] == 1.0
    assert equal.sentence.iloc[1] == "x=0.3 #2: equal to x=0.3 #1 in every one of 3 seeds."


def test_a_series_may_hold_tensors_and_none():
    weight = torch.ones((), requires_grad=True)
    values = [[weight * 2, None], [torch.ones((), dtype=torch.bfloat16), 3], (torch.ones(2), torch.zeros(2))]
    results = experiment(lambda seed: {"s": values[seed]}, [{}], seeds=3, progress=False)
    found = [results.series(0, "s", seed).tolist() for seed in range(3)]
    assert found[0][0] == 2.0
    assert math.isnan(found[0][1])
    assert found[1:] == [[1.0, 3.0], [[1.0, 1.0], [0.0, 0.0]]]
