"""What an outside reader broke in formats, blocks, policies, scalers and replays: one test for each family."""

from __future__ import annotations

import copy
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from mpkit.blocks import (
    E8M0,
    INT8,
    MXFP4,
    MXFP8_E4M3,
    MXINT8,
    BlockFormat,
    IntFormat,
    hadamard,
    quantize_blocks,
    round_with_bits,
)
from mpkit.casting import auto_mixed_precision, cast_like, to_float
from mpkit.casting.products import recipe_linear, recipe_rule
from mpkit.casting.recipe import RECIPES
from mpkit.formats import BF16, E2M1, E4M3FN, FP16, FP32, FloatFormat
from mpkit.policies import (
    ScalePolicy,
    TensorScalePolicy,
    advance,
    initial_tensor_scale,
    preset,
    run,
    stack,
    tensor_scale_preset,
)
from mpkit.replay import replay_tensor_scales, simulate
from mpkit.rounding import round_to, rounding_error, ulp
from mpkit.scalers import (
    DynamicLossScaleManager,
    DynamicLossScaler,
    DynamicLossScaleUpdateCell,
    PolicyLossScaler,
    TensorScaler,
    all_finite,
    check_and_unscale_,
)

MX = [MXFP4, MXFP8_E4M3, MXINT8, BlockFormat("te", E4M3FN, (1, 128), E8M0, "te")]


# --- formats and rounding


def test_tables_of_values_do_not_follow_the_default_device():
    torch.set_default_device("meta")
    try:
        assert E2M1.values().tolist()[-1] == 6.0
        assert E8M0.values()[-1].item() == 2.0**127
        assert int(E2M1.encode(1.5)) == 3
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("x", [math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-9, 70000.0, -3.0])
@pytest.mark.parametrize("fmt", [FP16, E4M3FN, BF16], ids=lambda fmt: fmt.name)
def test_the_gap_of_a_number_is_that_of_a_tensor(fmt: FloatFormat, x: float):
    np.testing.assert_equal(fmt.ulp(x), ulp(torch.tensor([x], dtype=torch.float64), fmt).item())


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_tensor_is_refused_in_words(layout: torch.layout):
    x = torch.eye(3).to_sparse(layout=layout)
    for call in (
        lambda: round_to(x, FP16),
        lambda: ulp(x, FP16),
        lambda: rounding_error(x, FP16),
        lambda: quantize_blocks(x, MXFP4),
        lambda: hadamard(x),
    ):
        with pytest.raises(TypeError, match=r"need a dense tensor, got a sparse_\w+ one; give its values"):
            call()


# --- blocks


@pytest.mark.parametrize("fmt", MX, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("again", [copy.deepcopy, lambda fmt: pickle.loads(pickle.dumps(fmt))], ids=["copy", "pickle"])
def test_a_copied_block_format_is_the_same_format(fmt: BlockFormat, again):
    x = torch.randn(4, 256) * torch.logspace(-3, 3, 4)[:, None]
    one, other = quantize_blocks(x, fmt), quantize_blocks(x, again(fmt))
    assert torch.equal(one.scales, other.scales)
    assert torch.equal(one.dequantize(), other.dequantize())


def test_a_saved_network_computes_the_same_where_its_recipe_was_never_used():
    torch.manual_seed(0)
    x, net = torch.randn(8, 64), cast_like(nn.Linear(64, 32), "mxfp8")
    saved, want = pickle.dumps(net), net(x)
    recipe_rule.cache_clear()  # as in another process: no equal recipe stands ready
    assert torch.equal(pickle.loads(saved)(x), want)


def test_copied_recipes_cast_alike():
    x = torch.randn(16, 128)
    for recipe in RECIPES.values():
        for (key, cast), (_, other) in zip(recipe.casts(), copy.deepcopy(recipe).casts()):
            if cast is None or other is None or cast.rounding == "stochastic":
                continue
            scale = torch.tensor(2.0) if cast.delayed else None
            assert torch.equal(cast(x, 1, scale).values, other(x, 1, scale).values), (recipe.name, key)


@pytest.mark.parametrize("element", [INT8, IntFormat("int4", 4, 2), FloatFormat("e2m1i", 2, 1)], ids=lambda e: e.name)
def test_a_scale_below_the_normal_numbers_is_no_zero(element: FloatFormat | IntFormat):
    """The largest element over the largest float32 is subnormal; its power of two is 2**-127 and not 0."""
    fmt = BlockFormat("x", element, (1, 32), E8M0, "te")
    q = quantize_blocks(torch.full((32,), torch.finfo(torch.float32).max), fmt)
    assert q.scale_codes().tolist() == [254]
    assert q.elements.tolist() == [min(element.max, 2.0)] * 32


def test_hardware_rounding_knows_every_gap():
    """Against fractions: floor of |y| / gap + bits / 256, for subnormals of a format with 8 exponent bits too."""
    y = torch.tensor([1e-40, 3e-41, -1e-39, 1.17e-38, 2.0**-126, 1.0, -2.7, 3.39e38])
    for bits in (0, 1, 77, 255):
        got = round_with_bits(y, BF16, torch.full(y.shape, bits, dtype=torch.uint8))
        gaps = [Fraction(BF16.ulp(v)) for v in y.tolist()]
        want = [
            float(math.copysign(1, v) * ((abs(Fraction(v)) + Fraction(bits, 256) * g) // g * g))
            for v, g in zip(y.tolist(), gaps)
        ]
        assert got.tolist() == [max(-BF16.max, min(BF16.max, w)) for w in want]


def test_hardware_rounding_takes_bits_and_float32_only():
    y, bits = torch.randn(4, 5), torch.zeros(4, 5, dtype=torch.uint8)
    for other in (y.double(), y.half(), y.int()):
        with pytest.raises(TypeError, match="y is float32 and bits are uint8"):
            round_with_bits(other, E2M1, bits)
    for other in (torch.rand(4, 5), torch.full((4, 5), 1000)):
        with pytest.raises(TypeError, match="y is float32 and bits are uint8"):
            round_with_bits(y, E2M1, other)
    with pytest.raises(ValueError, match="at most 15 fraction bits, fp32 has 23"):
        round_with_bits(y, FP32, bits)
    assert not round_with_bits(y.requires_grad_(), E2M1, bits).requires_grad


def test_a_hadamard_transform_of_complex_numbers_is_refused():
    for x in (torch.ones(16, dtype=torch.complex64), torch.arange(16), torch.ones(16) > 0):
        with pytest.raises(TypeError, match=r"x must be a float tensor, got torch\.\w+"):
            hadamard(x)


@pytest.mark.parametrize("fmt", [E8M0, INT8, IntFormat("int4", 4, 2)], ids=lambda fmt: fmt.name)
def test_patterns_that_a_format_does_not_have_are_refused(fmt):
    everything = torch.arange(2**fmt.bits)
    values = fmt.decode(everything)
    assert torch.equal(fmt.encode(values), everything)
    for wrong in (-1, 2**fmt.bits):
        with pytest.raises(ValueError, match=f"patterns of {fmt.name} are 0 to"):
            fmt.decode(torch.tensor([0, wrong]))
    with pytest.raises(TypeError, match="bit patterns are a tensor of integers"):
        fmt.decode(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match="x must be a tensor of values, got float"):
        fmt.encode(2.0)


def test_integers_are_encoded_only_if_they_are_values():
    for wrong in (300.0, 0.001, math.nan, math.inf, 2.0):
        with pytest.raises(ValueError, match="is not a value of int8"):
            INT8.encode(torch.tensor([0.5, wrong]))
    for bits, fraction, kind in ((1, 0, ValueError), (8, 9, ValueError), (8, -1, ValueError), (2.5, 0, TypeError)):
        with pytest.raises(kind, match="bits must be"):
            IntFormat("x", bits, fraction)


def test_the_way_out_of_random_bits_for_integers_exists():
    bits = torch.zeros(32, dtype=torch.uint8)
    with pytest.raises(ValueError, match="bits are for"):
        quantize_blocks(torch.randn(32), MXINT8, mode="stochastic", bits=bits)


def test_a_recipe_takes_float_tensors_of_any_size():
    for recipe in (RECIPES["te_current"], RECIPES["mxfp8"]):
        for kind in (torch.int32, torch.complex64):
            with pytest.raises(TypeError, match="x and weight must be float tensors"):
                recipe_linear(torch.ones(4, 32, dtype=kind), torch.ones(16, 32), recipe)
        for rows, features, outputs in ((4, 0, 16), (4, 32, 0), (0, 32, 16)):
            x, weight = (
                torch.ones(rows, features, requires_grad=True),
                torch.ones(outputs, features, requires_grad=True),
            )
            y = recipe_linear(x, weight, recipe)
            y.sum().backward()
            assert y.shape == (rows, outputs)
            assert not y.any()
            for grad in (x.grad, weight.grad):
                assert grad is not None
                assert not grad.any()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class _Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Product.apply(x, self.weight)


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto"])
def test_the_way_out_for_an_autograd_function_of_ones_own(level: str):
    """As `auto_mixed_precision` says: in a module that `to_float` puts to float32."""
    net = auto_mixed_precision(nn.Sequential(nn.Linear(4, 4), _Own()), level, torch.bfloat16)
    to_float(net[1], torch.float32)
    net(torch.randn(3, 4)).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())


# --- policies, replays


def test_a_count_that_is_never_reached_is_one_everywhere():
    for huge in (math.inf, 10**30, 2**62):
        policy = ScalePolicy(growth_interval=huge, hysteresis=huge, max_consecutive=huge)
        flags = [True, False, True]
        assert run(policy, flags).scale.tolist() == [65536.0] * 3
        assert run(stack([policy, ScalePolicy()]), flags).scale[:, 0].tolist() == [65536.0] * 3
        assert run(stack([policy]), flags).scale[:, 0].tolist() == [65536.0] * 3
        scaler = PolicyLossScaler(policy)
        for flag in flags:
            scaler.adjust(torch.tensor(flag))
        assert scaler.scale_value == 65536.0


POLICIES = {
    "patience": [preset("paddle", decr_every_n_nan_or_inf=n % 3) for n in range(20)],
    "one patience": [preset("paddle", decr_every_n_nan_or_inf=0, init_loss_scaling=2.0**n) for n in range(20)],
    "counted far": [ScalePolicy(init_count=-(2**40), growth_interval=1, growth_factor=1.5 + n) for n in range(20)],
    "long lags": [ScalePolicy(first_growth_lag=2**32, growth_interval=1, growth_factor=1.5 + n) for n in range(20)],
    "long, or past": [ScalePolicy(growth_interval=2**32 + n, growth_ge=True) for n in range(20)],
    "long interval": [ScalePolicy(growth_interval=2**32 + 3, growth_factor=1.5 + n) for n in range(20)],
    "both far": [ScalePolicy(growth_interval=2**32 + n, init_count=2**32) for n in range(20)],
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("ceiling", [1000.0, math.inf])
def test_a_replay_of_many_counts_as_far_as_one(name: str, ceiling: float):
    tops = np.full(12, ceiling)
    many = simulate(tops, stack(POLICIES[name]))
    for i, policy in enumerate(POLICIES[name]):
        one = simulate(tops, policy)
        assert (many.final[i], many.skipped[i]) == (one.final[0], one.skipped[0]), policy


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_scale_that_is_no_number_is_counted_alike():
    """inf * 0: the steps after it are skipped ones, and not steps that did not happen."""
    policy = ScalePolicy(init_scale=math.inf, backoff_factor=0.0)
    one, many = simulate(np.full(5, 10.0), policy), simulate(np.full(5, 10.0), stack([policy] * 20))
    assert one.skipped[0] == many.skipped[0] == 5
    assert one.first_good[0] == many.first_good[0] == 5
    assert np.isnan([one.lowest[0], many.lowest[0]]).all()


def test_a_window_beyond_32_bits_is_long():
    scaler, scale = DynamicLossScaler(1024, 2, 2**32 + 5), torch.ones(())
    cell = DynamicLossScaleUpdateCell(8.0, 2, 2**40)
    for _ in range(7):
        scaler.adjust(torch.tensor(True))
        cell(scale, torch.tensor(False))
    assert (scaler.scale_value, scale) == (1024, 1)


def test_a_factor_beyond_floats_is_refused_at_once():
    with pytest.raises(ValueError, match="scale_factor must fit a float32"):
        DynamicLossScaler(1024, 10**400, 1)


TINY = {
    "margin": tensor_scale_preset("te_delayed", margin=126, power_of_two=True),
    "unfused": tensor_scale_preset("te_delayed_unfused", margin=126, power_of_two=True),
    "far apart": tensor_scale_preset("te_current", FloatFormat("e2m1i", 2, 1), power_of_two=True),
    "no float32": TensorScalePolicy(element_max=1.9, unfused=True),
    "beyond": TensorScalePolicy(element_max=3e38, margin=-126),
}


@pytest.mark.parametrize("name", TINY)
def test_numbers_tensors_and_replays_have_one_tensor_scale(name: str):
    policy = TINY[name]
    amaxes = [3e38, 1.0, 448.0, 3e38, 1e-30, 1534539969274362.0, 3e38, 2.0]
    number, tensor, want = initial_tensor_scale(policy), initial_tensor_scale(policy, "cpu"), []
    for amax in amaxes:
        before = number.scale
        number, tensor = advance(policy, number, amax), advance(policy, tensor, amax)
        assert number.scale == tensor.scale.item(), amax
        want.append(before if policy.delayed else number.scale)
    assert replay_tensor_scales(amaxes, [policy], scales=True).scales.tolist() == [want]


def test_the_power_of_a_subnormal_scale_is_no_zero():
    policy = TINY["far apart"]  # 3 over the largest float32 lies between 2**-127 and 2**-126
    assert advance(policy, initial_tensor_scale(policy), torch.finfo(torch.float32).max).scale == 2.0**-127


def test_the_largest_element_is_a_float32():
    for wrong in (1e-50, 1e39, math.inf, 10**400):
        with pytest.raises(ValueError, match="element_max must"):
            TensorScalePolicy(element_max=wrong)


# --- scalers


@pytest.mark.parametrize(
    "make",
    [
        lambda p: (p.conj() * torch.arange(1.0, 4.0)).real.sum(),
        lambda p: p.conj().resolve_conj().abs().square().sum(),
        lambda p: torch.vdot(p, torch.ones(3, dtype=torch.complex64)).abs(),
    ],
)
def test_a_gradient_that_is_a_conjugated_view_is_unscaled(make):
    p = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j, 0.5 + 0j]))
    make(p).mul(8).backward()
    assert p.grad is not None
    want, other = p.grad.resolve_conj() / 8, torch.ones(2)
    assert check_and_unscale_([p.grad, other], torch.tensor(8.0)) == 0
    assert torch.equal(p.grad.resolve_conj(), want)
    assert other[0] == 0.125
    p.grad.real[1] = math.inf
    assert check_and_unscale_([p.grad], torch.tensor(8.0)) == 1
    assert not all_finite([p.grad])


def test_a_gradient_that_is_a_negated_view_is_unscaled():
    numbers = torch.complex(torch.ones(3), torch.full((3,), 8.0))
    view, other = numbers.conj().imag, torch.full((2,), 8.0)
    assert view.is_neg()
    assert check_and_unscale_([other, view], torch.tensor(8.0)) == 0
    assert (view.tolist(), numbers.imag.tolist(), other.tolist()) == ([-1.0] * 3, [1.0] * 3, [1.0] * 2)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_compressed_sparse_gradient_is_unscaled():
    g = torch.eye(3).to_sparse_csr()
    assert check_and_unscale_([g, torch.ones(1)], torch.tensor(2.0)) == 0
    assert torch.equal(g.to_dense(), torch.eye(3) / 2)


def test_what_is_no_gradient_is_named_before_anything_changes():
    for grads, found, words in (
        (["x", torch.ones(1)], None, "each of grads must be a tensor or None, got str"),
        ([torch.ones(1)], torch.tensor(False), "found_inf must be the float32 result of an earlier call"),
    ):
        with pytest.raises(TypeError, match=words):
            check_and_unscale_(grads, torch.tensor(2.0), found)
        assert grads[-1].item() == 1.0


SCALERS = {
    "scaler": (lambda: DynamicLossScaler(1024, 2, 3), {"scale": 8.0}),
    "manager": (lambda: DynamicLossScaleManager(1024, 2, 3), {"scale": 8.0}),
    "fused policy": (lambda: PolicyLossScaler(preset("torch", init_scale=1024.0)), {"scale": 8.0}),
    "policy": (lambda: PolicyLossScaler(preset("deepspeed", init_scale=1024.0)), {"scale": 8.0}),
}
WRONG = {
    "scaler": [{"good": 2**40}, {"policy": {"growth_factor": 0}}, {"scale": -4.0}],
    "manager": [{"policy": {"growth_factor": -2}}, {"cur_iter": 0}, {"last_overflow_iter": -1}, {"scale": 0.5}],
    "fused policy": [{"good": 2**40}],
    "policy": [{"good": 2**70}, {"left": 2**70}],
}


@pytest.mark.parametrize(("kind", "wrong"), [(kind, wrong) for kind in SCALERS for wrong in WRONG[kind]])
def test_a_state_that_cannot_be_leaves_the_scaler_as_it_was(kind: str, wrong: dict[str, object]):
    make, changed = SCALERS[kind]
    scaler = make()
    before = copy.deepcopy(scaler.state_dict())
    state = copy.deepcopy(before)
    state.get("state", state).update({**changed, **wrong})
    with pytest.raises(ValueError, match=r"must be at|must be in|damaged"):
        scaler.load_state_dict(state)
    after = scaler.state_dict()
    assert {k: v for k, v in after.items() if not isinstance(v, torch.Tensor)} == {
        k: v for k, v in before.items() if not isinstance(v, torch.Tensor)
    }


def test_an_amax_is_one_number():
    scaler = TensorScaler(tensor_scale_preset("te_delayed", amax_history_len=2))
    scaler.observe_(torch.tensor([2.0]))
    assert scaler.amax.shape == ()
    with pytest.raises(ValueError, match=r"got shape \(2,\); take amax"):
        scaler.observe_(torch.tensor([1.0, 2.0]))
    with pytest.raises(TypeError, match="amax must be a tensor of one number"):
        scaler.observe_(2.0)
