"""The parts of a recording by themselves, where their answers turn."""

from __future__ import annotations

import pytest
import torch

from mpkit.record import Ranges, Recorder
from mpkit.record.counts import host_counts
from mpkit.record.rows import Rows, noted
from mpkit.record.trace import HIGHEST, LOWEST


def rows_of(*values: float) -> Ranges:
    rows = Rows(("a",))
    counts, zeros, largest, _ = host_counts(torch.tensor(values))[:4]
    rows.append(0, [(counts, zeros, largest, len(values))])
    return rows.ranges()


@pytest.mark.parametrize(
    ("values", "lowest", "counts"),
    [
        ([0.0, 0.0], 0, [0]),  # nothing to count: one empty bin, that of 1
        ([1.0], 0, [1]),
        ([2.0**-126], LOWEST, [1]),
        ([2.0**127], HIGHEST, [1]),
        ([0.25, 3.0, 1.5, 0.0], -2, [1, 0, 1, 1]),
        ([float("inf"), 1.0], 0, [1]),  # no bin for what is not finite
    ],
    ids=str,
)
def test_a_histogram_spans_the_exponents_that_occur(values: list[float], lowest: int, counts: list[int]) -> None:
    found = rows_of(*values)
    assert found.lowest == lowest
    assert found.counts[0, 0].tolist() == counts
    assert found.zeros.tolist() == [[values.count(0.0)]]
    assert found.nonfinite.tolist() == [[values.count(float("inf"))]]


@pytest.mark.parametrize(
    ("found", "overflow"), [([], 0.0), ([1.0], 1.0), ([1.0, 0.0], 1.0), ([0.0, 1.0], 1.0), ([0.0, 0.0], 0.0)]
)
def test_an_overflow_on_any_device_is_one(found: list[float], overflow: float) -> None:
    """As torch's GradScaler notes it: a flag for each device that has gradients."""
    flags = {f"device {i}": torch.tensor(value) for i, value in enumerate(found)}
    assert noted({"found_inf_per_device": flags}) == overflow


def test_flags_of_several_devices_meet_on_the_first() -> None:
    flags = {"first": torch.zeros(1, device="meta"), "second": torch.ones(1)}
    assert noted({"found_inf_per_device": flags}).device.type == "meta"


def test_a_complex_loss_is_refused_before_it_spoils_the_trace() -> None:
    network = torch.nn.Linear(2, 2)
    network(torch.ones(1, 2)).sum().backward()
    recorder = Recorder(network)
    with pytest.raises(TypeError, match=r"record needs a real loss, got torch\.complex64"):
        recorder.record(torch.tensor(1 + 1j))
    recorder.record(torch.tensor(1.0))
    assert recorder.trace().loss.tolist() == [1.0]
