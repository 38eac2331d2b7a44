"""The boost benchmark on sizes that take a second: what it compares, and what it stores."""

from __future__ import annotations

import boost_study as boost
import pytest
import torch
from boost_accuracy import CONFIGURATIONS, TOGETHER, Study, accuracies, run

from mpkit import networks

CPU = torch.device("cpu")
NETWORK = boost.Setting("tiny", lambda: networks.resnet18(width=2), (2, 3, 8, 8))
TINY = Study(train=64, test=40, width=2, epochs=1, batch=16, only=("none", "O1 tuned"))


@pytest.fixture(scope="module")
def rows() -> dict[str, boost.Row]:
    return {row.contender: row for row in boost.speedups(NETWORK, CPU, 2)}


def test_every_configuration_and_every_freeze_index_is_timed(rows: dict[str, boost.Row]) -> None:
    indices = {f"{net} index {v}" for net in ("plain", "O1") for v in range(10)}
    assert set(rows) == {*CONFIGURATIONS, "freezing, type 0", *indices}
    for name in set(rows) - indices:  # whole trainings: mean against mean
        assert rows[name].ratio * rows[name].seconds == pytest.approx(rows["none"].seconds)
    assert {name for name, row in rows.items() if row.goal is not None} == {"O1", "O1 tuned"}


def test_a_step_is_taken_apart_into_blocks() -> None:
    rows = boost.blocks(NETWORK, CPU, 1)
    assert [(row["network"], row["index"]) for row in rows] == [(n, v) for n in ("plain", "O1") for v in range(10)]
    assert all(row[part] > 0 for row in rows for part in ("forward", "backward", "batch_norm", "update"))


def test_accuracy_rows_compare_seed_by_seed() -> None:
    first, tuned = accuracies(TINY, (0, 1))
    assert [row["configuration"] for row in (first, tuned)] == ["none", "O1 tuned"]
    assert (first["difference"], first["speedup"]) == (0, 1)
    assert all(row["accuracy_percent"][0] > 5 for row in (first, tuned))
    pairs = zip(tuned["accuracy_percent"], first["accuracy_percent"])
    assert tuned["difference"] == pytest.approx(sum(a - b for a, b in pairs) / 2, abs=0.01)


def test_processes_share_each_batch() -> None:
    """Two processes see the rows of one, so that O2 reaches an accuracy."""
    assert 0 <= run(0, TOGETHER, TINY)["accuracy"] <= 100
