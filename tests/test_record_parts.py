"""The parts of a recording by themselves, where their answers turn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from recorded import trace_of

from mpkit.record import Ranges, Recorder, counts
from mpkit.record import recorder as recorder_module
from mpkit.record.counts import exponent_counts, host_counts
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


def test_a_state_without_seconds_begins_to_count_them(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(torch.nn.Linear(1, 1))
    monkeypatch.setattr(recorder_module.time, "perf_counter", lambda: 100.0)
    recorder.load_state_dict({"index": 3})
    assert recorder.state_dict() == {"index": 3, "seconds": 0.0, "seen": {}}


@pytest.mark.parametrize(("numel", "parts"), [(2**24, [2**24]), (2**24 + 1, [2**24, 1]), (5, [5])])
def test_no_count_in_float32_may_pass_what_it_holds(
    numel: int, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere than on a CPU one bin counts by ones, in float32: at 2**24 that ends."""
    sizes = []

    def histc(x: torch.Tensor, bins: int, low: int, high: int) -> torch.Tensor:
        sizes.append(x.numel())
        assert (bins, low, high) == (256, 0, 256)
        return torch.zeros(bins, device=x.device)

    monkeypatch.setattr(torch, "histc", histc)
    exponent_counts(torch.empty(numel, device="meta"))
    assert sizes == parts


@pytest.mark.parametrize("factor", [None, 1.0, 2.0**-3, 2.0**-126, 2.0**-127, 0.75, 2.0])
def test_values_are_counted_alike_one_by_one_in_pairs_and_in_blocks(
    factor: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    for most in (2.0, 2.0**100):  # below 2 seven bits of the exponent are enough
        x = torch.randn(1037, generator=generator) * torch.logspace(-44, 0, 1037)
        x = (x / x.abs().max() * most).clamp(-most * (1 - 2.0**-24), most * (1 - 2.0**-24))
        x[::7], x[5], x[6] = 0.0, 2.0**-126, 2.0**-140
        fields = ((x * (1.0 if factor is None else factor)).view(torch.int32) >> 23 & 255).numpy()
        wanted = np.bincount(fields, minlength=256)
        for few, block in ((2**14, 2**19), (0, 2**19), (0, 64), (2**14, 100)):
            monkeypatch.setattr(counts, "_FEW", few)
            monkeypatch.setattr(counts, "_BLOCK", block)
            found, zeros, largest, norm = host_counts(x, factor)
            assert zeros == wanted[0]
            assert found[1:].tolist() == wanted[1:].tolist()
            assert largest == (x * (1.0 if factor is None else factor)).abs().max()
            assert norm == pytest.approx(float(x.double().norm()), rel=1e-6)  # a thousand sums of float32 squares


def test_the_smallest_exponent_of_nothing_is_zero() -> None:
    for values, smallest in (([0.0, 0.0], 0), ([4.0, 1.0, 0.25], -2), ([math.nan], 0)):
        trace = trace_of([torch.tensor(values)], form="fp32")
        assert trace.to_frame("gradients").smallest_exponent.tolist() == [smallest]


@pytest.mark.parametrize(("halvings", "normal"), [(1, 0), (16, 0), (126, 0), (127, 1)])
def test_a_power_of_two_moves_exponents_and_rounds_nothing(halvings: int, normal: int) -> None:
    """The largest float32 below 2**(halvings - 126): times 2**-halvings it lies below 2**-126, and would be rounded up.

    2**-127 is no normal number: by that and smaller ones float32 multiplies.
    """
    x = torch.nextafter(torch.tensor([2.0 ** (halvings - 126)]), torch.tensor(0.0))
    counts, zeros, _, _ = host_counts(torch.cat([x, 4 * x]), 2.0**-halvings)
    assert (int(counts.sum()), zeros) == (1 + normal, 1 - normal)
