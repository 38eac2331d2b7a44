"""What single lines promise: a case for each promise that a changed line broke and nothing else here noticed."""

import copy
import math

import numpy as np
import pytest
import torch
from recorded import trace_of
from torch import nn

from mpkit.blocks import MXFP8_E4M3, quantize_blocks
from mpkit.boost import GroupLossScaleManager
from mpkit.casting import auto_mixed_precision, cast_like
from mpkit.diagnose import diagnose
from mpkit.formats import BF16, E4M3FN, E5M2, FP16, get_format, p3109
from mpkit.optimizers import SGD
from mpkit.policies import preset
from mpkit.record import Recorder
from mpkit.replay import flushed
from mpkit.rounding import round_to


@pytest.mark.parametrize("name", ["fp16", "e5m2", "e4m3fn", "e4m3fnuz"])
def test_every_pattern_says_what_kind_of_number_it_is(name):
    """`fields` against `decode`: two ways to read a pattern, which share no line."""
    fmt = get_format(name)
    assert {"fp16": FP16, "e5m2": E5M2, "e4m3fn": E4M3FN}.get(name, fmt) is fmt
    for pattern, value in enumerate(fmt.decode(torch.arange(2**fmt.bits)).tolist()):
        kind = "subnormal" if abs(value) < fmt.min_normal else "normal"
        kind = "nan" if math.isnan(value) else "inf" if math.isinf(value) else "zero" if value == 0 else kind
        assert fmt.fields(pattern).kind == kind, pattern


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("above", "right"), [(2.0**-40, 1.125), (-(2.0**-40), 1.0), (0.0, 1.0)])
def test_a_block_of_float64_is_rounded_once(sign, above, right):
    """1 + 1/16 lies between two numbers of E4M3; float32 cannot hold what tells on which side x stands."""
    block = torch.zeros(1, 32, dtype=torch.float64)
    block[0, :2] = torch.tensor([448.0, sign * (1 + 2.0**-4 + above)], dtype=torch.float64)
    assert quantize_blocks(block, MXFP8_E4M3).dequantize()[0, 1].item() == sign * right


@pytest.mark.parametrize("dampening", [0.0, 0.3])
def test_the_first_velocity_is_the_whole_gradient_as_in_torch(dampening):
    ours, theirs = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimizers = SGD([ours], 0.1, momentum=0.9, dampening=dampening)
    reference = torch.optim.SGD([theirs], 0.1, momentum=0.9, dampening=dampening)
    for step in range(3):
        for weight, optimizer in ((ours, optimizers), (theirs, reference)):
            weight.grad = torch.arange(1.0, 4.0, dtype=torch.float64) * (step + 1)
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def test_a_marker_names_a_group_up_to_the_last():
    manager, x = GroupLossScaleManager(2.0**10, [[], []]), torch.ones(3)
    last = 3
    for layers in ((0, last), (last, 0), (last, last)):
        assert torch.equal(manager(x, *layers), x)
    for layers in ((0, last + 1), (-1, 0)):
        with pytest.raises(ValueError, match="group"):
            manager(x, *layers)


@pytest.mark.parametrize("name", ["fp16", "e5m2", "e4m3fn"])
@pytest.mark.parametrize("scale", [1.0, 2.0**7])
def test_what_lies_below_half_the_smallest_number_is_flushed_and_no_more(name, scale):
    """In each power of two around that half one value: a cast keeps those above, and those alone."""
    fmt = get_format(name)
    values = torch.tensor([1.5 * fmt.min_subnormal / scale * 2.0**k for k in (-4, -3, -2, -1, 0)])
    lost = (values * scale).to(fmt.torch_dtype) == 0
    assert lost.tolist() == [True, True, True, False, False]
    assert flushed(trace_of([values], form=name), np.array([[scale]])).item() == pytest.approx(0.6)


@pytest.mark.parametrize("scale", [1.0, 2.0**10])
def test_a_recorder_keeps_gradients_as_they_are_without_the_scale(scale):
    weight = torch.nn.Linear(1, 1, bias=False)
    recorder = Recorder(weight, scaler=torch.amp.GradScaler("cpu", init_scale=scale))
    (scale * weight(torch.tensor([[0.75]]))).sum().backward()
    recorder.record(torch.tensor(1.0))
    trace = recorder.trace()
    assert trace.scale.tolist() == [scale]
    assert trace.gradients.largest.tolist() == [[0.75]]
    assert trace.grad_norm.tolist() == [0.75]


def test_the_defaults_of_mpkits_own_policy():
    own = preset("mpkit")
    found = own.init_scale, own.growth_factor, own.backoff_factor, own.growth_interval, own.min_scale, own.max_scale
    assert found == (2.0**16, 2.0, 0.5, 2000, 2.0**-14, 2.0**24)
    assert own.raise_at_min


class Large(nn.Module):
    """Its first layer leaves float16 at inputs of some hundreds."""

    def __init__(self):
        super().__init__()
        self.big, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        nn.init.constant_(self.big.weight, 300.0)

    def forward(self, x):
        return self.norm(self.big(x))


def test_a_diagnosis_blames_what_is_to_blame_and_says_what_ends_it():
    x = 300 * torch.arange(1.0, 5).repeat(2, 1)
    found = diagnose(Large(), x, torch.sum, level="O2", dtype=torch.float16)
    assert (found.verdict, found.module) == ("forward_overflow", "big")
    assert "to_float(network.get_submodule('big'), torch.float32)" in str(found)
    assert diagnose(Large(), x / 0, torch.sum, level="O2", dtype=torch.float16).verdict == "bad_data"


@pytest.mark.parametrize(("bits", "precision", "signed"), [(8, 1, True), (8, 3, True), (6, 2, False), (9, 4, True)])
def test_a_format_of_p3109_has_the_values_of_its_definition(bits, precision, signed):
    """P3109: bias 2^(K-P-1), 2^(K-P) where there is no sign; +inf is the last pattern that is no NaN."""
    fmt, bias = p3109(bits, precision, signed), 2 ** (bits - precision - signed)
    last = 2 ** (bits - signed) - (1 if signed else 2)
    for pattern in range(last):
        exponent, fraction = divmod(pattern, 2 ** (precision - 1))
        value = math.ldexp(fraction + (exponent > 0) * 2 ** (precision - 1), max(exponent, 1) - bias - precision + 1)
        assert fmt.decode(torch.tensor([pattern])).item() == value, pattern
    assert fmt.decode(torch.tensor([last])).item() == math.inf


@pytest.mark.parametrize("precision", [1, 2])
def test_of_two_neighbours_in_p3109_the_even_pattern_wins_a_tie(precision):
    fmt = p3109(8, precision)
    values = fmt.decode(torch.arange(2**7 - 1)).double()[1:-1]  # the binary point of P1 moves a whole binade at once
    low, even = values[:-1], torch.where(torch.arange(1, len(values)) % 2 == 0, values[:-1], values[1:])
    assert torch.equal(round_to((low + values[1:]) / 2, fmt), even)


@pytest.mark.parametrize("kind", ["layer", "group", "batch"])
@pytest.mark.parametrize(("fmt", "dtype"), [(BF16, torch.bfloat16), (FP16, torch.float16)])
def test_a_norm_in_a_format_computes_as_in_its_dtype_statistics_in_float32(kind, fmt, dtype):
    """Forwards and backwards, bit for bit."""
    norm = {"layer": nn.LayerNorm(8), "group": nn.GroupNorm(2, 8), "batch": nn.BatchNorm1d(8)}[kind]
    found = []
    for low in (fmt, dtype):
        network = auto_mixed_precision(copy.deepcopy(norm), "O3", low)
        x = (torch.arange(40.0).view(5, 8) % 7 * 3 + 7).requires_grad_()
        y = network(x)
        (y * torch.linspace(-1, 1, 40).view(5, 8)).sum().backward()
        found.append((y, x.grad, network.weight.grad, network.bias.grad))
    for ours, native in zip(*found):
        assert torch.equal(ours, native)


@pytest.mark.parametrize("level", ["O1", "O2", "auto"])
def test_a_weight_that_is_written_into_during_a_forward_is_cast_anew(level):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Linear(2, 2, bias=False)

        def forward(self, x):
            before = [self.part(x) for _ in range(3)]
            with torch.no_grad():
                self.part.weight.mul_(2)
            return before[-1], self.part(x), self.part(x)

    before, *after = auto_mixed_precision(Twice(), level, torch.bfloat16)(torch.ones(1, 2))
    assert all(torch.equal(2 * before, y) for y in after)


@pytest.mark.parametrize("option", [{"dtype": torch.float16}, {"grad_dtype": FP16}])
def test_a_recipe_names_its_formats_itself(option):
    with pytest.raises(ValueError, match="recipe"):
        cast_like(nn.Linear(2, 2), "mxfp8", **option)
