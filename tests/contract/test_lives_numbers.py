"""Formats, roundings, blocks, schedules and optimizers drawn at random, beside fractions, float64 and laws."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles import EXACT_MODES, FIXED_RATE, MEMBERS, MX, MX_RULES, agree, exactly, formats
from support import AGAIN, again, assert_same, tries
from torch import nn

from mpkit import optimizers, schedules
from mpkit.blocks import BLOCK_FORMATS, E8M0, INT8, MXINT8, hadamard, quantize_blocks
from mpkit.formats import E2M1, FORMATS, FloatFormat, get_format
from mpkit.optimizers import Optimizer, centralized, stochastic_bf16
from mpkit.record import Ranges, Trace, exponent_counts
from mpkit.replay import ceilings, flushed, replay, swept
from mpkit.rounding import OVERFLOWS, quantize, round_to, ulp

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ANY = st.floats(width=32)
ROWS = st.lists(ANY, min_size=1, max_size=12)

# --- formats and rounding


@given(
    formats,
    st.lists(FINITE, min_size=2, max_size=12),
    st.sampled_from(EXACT_MODES),
    st.sampled_from(["inf", "saturate"]),
)
@tries(0.6)
def test_rounding_keeps_the_order(fmt, values, mode, overflow):
    rounded = round_to(torch.tensor(sorted(values)), fmt, mode, overflow=overflow).tolist()
    assert all(a <= b for a, b in itertools.pairwise(rounded))


@given(formats, ROWS, st.sampled_from([("up", "down"), *[(m, m) for m in EXACT_MODES if m not in ("up", "down")]]))
@tries(0.6)
def test_a_rounding_and_its_mirror_image(fmt, values, modes):
    x = torch.tensor(values)
    mirrored, plain = -round_to(-x, fmt, modes[0]), round_to(x, fmt, modes[1])
    assert all(agree(a, b) for a, b in zip(mirrored.tolist(), plain.tolist()))


@given(formats, FINITE)
@tries(0.6)
def test_the_nearest_lies_between_down_and_up(fmt, value):
    x = torch.tensor([value], dtype=torch.float64)
    low, near, high = (round_to(x, fmt, m, overflow="inf").item() for m in ("down", "nearest_even", "up"))
    assert low <= value <= high
    assert near in (low, high)
    if math.isfinite(low) and math.isfinite(high):
        to_low, to_high = Fraction(value) - Fraction(low), Fraction(high) - Fraction(value)
        assert near == low or to_high <= to_low
        assert near == high or to_low <= to_high


@given(formats, st.integers(0, 3), st.integers(1, 4), st.integers(1, 5), st.sampled_from(EXACT_MODES), st.data())
@tries(0.4)
def test_how_a_tensor_lies_in_memory_does_not_matter(fmt, start, step, rows, mode, data):
    values = data.draw(st.lists(ANY, min_size=rows * step * 2 + start, max_size=rows * step * 2 + start))
    whole = torch.tensor(values)
    view = whole[start:].view(2, -1).t()[::step]
    want = round_to(view.contiguous(), fmt, mode)
    got = round_to(view, fmt, mode)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    kept = whole.clone()
    inside = round_to(view, fmt, mode, out=view)
    torch.testing.assert_close(inside, want, rtol=0, atol=0, equal_nan=True)
    outside = torch.ones_like(whole, dtype=torch.bool)
    outside[start:].view(2, -1).t()[::step] = False
    torch.testing.assert_close(whole[outside], kept[outside], rtol=0, atol=0, equal_nan=True)


@given(formats, ROWS, st.sampled_from(OVERFLOWS), st.integers(0, 2**31))
@tries(0.6)
def test_chance_picks_a_neighbour_and_the_same_one_for_a_seed(fmt, values, overflow, seed):
    x = torch.tensor(values)
    first, second = (
        round_to(x, fmt, "stochastic", overflow=overflow, generator=torch.Generator().manual_seed(seed)) for _ in "ab"
    )
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    for value, got in zip(values, first.tolist()):
        assert any(agree(got, exactly(value, fmt, mode, overflow)) for mode in ("down", "up", "nearest_even"))


@given(formats, st.none() | formats, ROWS, ROWS)
@tries(0.4)
def test_a_gradient_passes_a_rounding_straight(fmt, grad_fmt, values, seeds):
    size = min(len(values), len(seeds))
    x, seed = torch.tensor(values[:size], requires_grad=True), torch.tensor(seeds[:size])
    quantize(x, fmt, grad_fmt).backward(seed)
    want = seeds if grad_fmt is None else [exactly(v, grad_fmt, "nearest_even", grad_fmt.overflow) for v in seeds]
    assert all(agree(got, w) for got, w in zip(x.grad.tolist(), want))


@given(formats, FINITE)
@tries(0.4)
def test_an_ulp_is_the_power_of_two_of_its_binade(fmt, value):
    exponent = fmt.min_exponent
    while abs(Fraction(value)) >= Fraction(2) ** (exponent + 1) and exponent < fmt.max_exponent:
        exponent += 1
    want = Fraction(2) ** (exponent - fmt.fraction_bits)
    assert Fraction(fmt.ulp(value)) == want
    assert Fraction(ulp(torch.tensor([value], dtype=torch.float64), fmt).item()) == want


@given(formats, st.sampled_from(AGAIN[:2]))
@tries(0.3)
def test_a_format_is_a_value(fmt, how):
    other = again(fmt, how, lambda: None)
    assert other == fmt
    assert hash(other) == hash(fmt)
    assert (other.max, other.min_subnormal, other.overflow_edge) == (fmt.max, fmt.min_subnormal, fmt.overflow_edge)
    if fmt.specials == "ieee":
        named = get_format(f"e{fmt.exponent_bits}m{fmt.fraction_bits}")
        assert named.max == fmt.max or named in FORMATS.values()


@given(st.integers(2, 5), st.integers(1, 5), st.sampled_from(["ieee", "nan", "none"]))
@tries(0.4)
def test_the_values_of_a_format_are_all_that_rounding_leaves(exponent_bits, fraction_bits, specials):
    fmt = FloatFormat("own", exponent_bits, fraction_bits, specials)
    values = fmt.values()
    assert torch.equal(values, values.sort().values)
    assert len(set(values.tolist())) == len(values)
    assert torch.equal(round_to(values, fmt), values)
    middle = (values[1:] + values[:-1]) / 2
    assert set(round_to(middle, fmt).tolist()) <= set(values.tolist())
    per_sign = 2 ** (fmt.bits - 1) - 1 - {"ieee": 2**fraction_bits, "nan": 1, "none": 0}[specials]
    assert len(values) == 2 * per_sign + 1


@given(st.lists(ANY, max_size=40), st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]))
@tries(0.5)
def test_a_histogram_counts_by_frexp(values, dtype):
    x = torch.tensor(values).to(dtype)
    counts, zeros, largest = exponent_counts(x)
    single = x.float().tolist()
    counted = [v for v in single if math.isfinite(v) and abs(v) >= 2.0**-126]
    found = {e - 127: n for e, n in enumerate(counts[:255].tolist()) if n}
    assert found == {
        e: sum(math.frexp(v)[1] - 1 == e for v in counted) for e in {math.frexp(v)[1] - 1 for v in counted}
    }
    assert int(counts[255]) == sum(not math.isfinite(v) for v in single)
    assert int(zeros) == len(single) - len(counted) - int(counts[255])
    want = math.nan if any(map(math.isnan, single)) else max(map(abs, single), default=0.0)
    assert agree(float(largest), want)


@given(ROWS, st.integers(0, 2**16 - 1))
@tries(0.5)
def test_bfloat16_by_chance_is_the_pattern_cut_or_one_more(values, bits):
    """The law of the rounding in integers: up where the random bits are below what is cut off."""
    x = torch.tensor(values)
    got = stochastic_bf16(x, torch.full(x.shape, bits, dtype=torch.int32)).float()
    for value, result in zip(values, got.tolist()):
        if math.isfinite(value):
            pattern = int(np.float32(value).view(np.uint32))
            pattern = (pattern & ~0xFFFF) + ((bits < (pattern & 0xFFFF)) << 16)
            assert agree(result, float(np.uint32(pattern).view(np.float32)))
        else:
            assert agree(result, value)


# --- blocks

BLOCK = st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=40)


@given(st.sampled_from(MX), st.sampled_from(MX_RULES), BLOCK)
@tries(0.5)
def test_what_came_out_of_blocks_stays(fmt, rule, values):
    """Under the rule that never moves a maximum to another power of two; the others may, when it is rounded up."""
    assume(rule == "floor")
    fmt = replace(fmt, scale_rounding=rule)
    once = quantize_blocks(torch.tensor(values), fmt).dequantize()
    assert torch.equal(quantize_blocks(once, fmt).dequantize(), once)


@given(st.sampled_from([*MX, MXINT8]), BLOCK, st.integers(-20, 20))
@tries(0.5)
def test_blocks_do_not_see_a_power_of_two(fmt, values, power):
    x = torch.tensor(values)
    assume(bool((x.abs() > 2.0**-40).any()))  # else the smallest scale binds
    assert torch.equal(
        quantize_blocks(x * 2.0**power, fmt).dequantize(), quantize_blocks(x, fmt).dequantize() * 2.0**power
    )


@given(st.sampled_from(MX), st.sampled_from(MX_RULES), st.permutations(range(32)), st.data())
@tries(0.4)
def test_a_block_has_no_order(fmt, rule, order, data):
    fmt = replace(fmt, scale_rounding=rule)
    x = torch.tensor(data.draw(st.lists(FINITE, min_size=32, max_size=32)))
    whole, mixed = quantize_blocks(x, fmt), quantize_blocks(x[list(order)], fmt)
    torch.testing.assert_close(mixed.dequantize(), whole.dequantize()[list(order)], rtol=0, atol=0, equal_nan=True)


@given(st.sampled_from(MX), BLOCK)
@tries(0.5)
def test_an_element_errs_by_half_a_gap_of_its_scale(fmt, values):
    """Unless it is clipped: the scale by ceiling holds the maximum."""
    q = quantize_blocks(torch.tensor(values), replace(fmt, scale_rounding="ceil"))
    for i, (value, got) in enumerate(zip(values, q.dequantize().tolist())):
        scale = Fraction(q.scales[i // 32].item())
        scaled = Fraction(value) / scale
        if abs(scaled) <= Fraction(fmt.element.max):
            gap = Fraction(fmt.element.ulp(float(scaled)))
            assert abs(Fraction(got) / scale - scaled) <= gap / 2


@given(st.sampled_from(list(BLOCK_FORMATS.values())), st.integers(1, 3), st.integers(1, 70))
@tries(0.4)
def test_blocks_are_their_codes(fmt, rows, columns):
    """Elements and scales come back from their bit patterns, and a copy stands for the same numbers.

    Not a pickle: torch 2.13 cannot unpickle its own 8-bit tensors, only load what torch.save wrote.
    """
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 100 + columns))
    q = quantize_blocks(x, fmt)
    assert torch.equal(fmt.element.decode(q.codes().long()), q.elements)
    if fmt.scale.bits == 8:
        assert torch.equal(fmt.scale.decode(q.scale_codes().long()), q.scales)
    assert torch.equal(copy.deepcopy(q).dequantize(), q.dequantize())


@given(st.integers(0, 255), st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=9))
@tries(0.4)
def test_powers_and_integers_are_what_their_bytes_say(byte, values):
    power = E8M0.decode(torch.tensor([byte]))
    assert int(E8M0.encode(power)) == byte
    assert power.isnan().item() if byte == 255 else Fraction(power.item()) == Fraction(2) ** (byte - 127)
    rounded = INT8.rounded(torch.tensor(values))
    want = [max(-128, min(127, round(Fraction(v) * 64))) for v in values]  # Python rounds half to even
    assert [Fraction(v) * 64 for v in rounded.tolist()] == want
    assert torch.equal(INT8.decode(INT8.encode(rounded)), rounded)


@given(st.lists(st.integers(-8, 8), min_size=1, max_size=40), st.booleans())
@tries(0.4)
def test_a_hadamard_transform_is_a_product_with_its_matrix(numbers, signs):
    """Small whole numbers: the sums are exact, and so is the rounding to bfloat16 of the oracle."""
    row = np.zeros(-(-len(numbers) // 16) * 16)
    row[: len(numbers)] = numbers
    matrix = np.array([[(-1) ** bin(i & j).count("1") for j in range(16)] for i in range(16)])
    turned = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]) if signs else np.ones(16)
    want = (row.reshape(-1, 16) * turned) @ matrix / 4
    got = hadamard(torch.tensor([float(n) for n in numbers]), signs=signs)
    assert torch.equal(got, torch.tensor(want).reshape(-1).to(torch.bfloat16).float())


# --- schedules

RATES, COUNTS = st.floats(1e-4, 2.0), st.integers(1, 12)
LISTS = {
    "exponential": (schedules.exponential_decay_lr, lambda e, lr, r, s: lr * math.exp(math.log(r) * e / s)),
    "natural": (schedules.natural_exp_decay_lr, lambda e, lr, r, s: lr * math.exp(-r * e)),
    "inverse": (schedules.inverse_decay_lr, lambda e, lr, r, s: lr / (1 + r * e / s)),
}
CLASSES = {
    "exponential": schedules.ExponentialDecayLR,
    "natural": schedules.NaturalExpDecayLR,
    "inverse": schedules.InverseDecayLR,
}


@given(st.sampled_from(sorted(LISTS)), RATES, RATES, st.integers(1, 40), COUNTS, COUNTS, st.booleans())
@tries(0.5)
def test_a_decay_in_epochs_is_its_formula(name, lr, rate, total, per_epoch, span, stair):
    function, formula = LISTS[name]
    rates = function(lr, rate, total, per_epoch, span, stair)
    epochs = [step // per_epoch for step in range(total)]
    at = [e // span * span for e in epochs] if stair else epochs
    assert rates == pytest.approx([formula(e, lr, rate, span) for e in at], rel=1e-12)
    steps = CLASSES[name](lr, rate, span, stair)
    assert rates == [steps(e) for e in epochs]


@given(RATES, RATES, st.integers(1, 40), COUNTS, COUNTS, st.floats(0.1, 3), st.booleans())
@tries(0.5)
def test_cosine_and_polynomial_are_their_formulas(low, more, total, per_epoch, span, power, update):
    high, epochs = low + more, [step // per_epoch for step in range(total)]
    cosine = schedules.cosine_decay_lr(low, high, total, per_epoch, span)
    angles = [math.pi * min(e / span, 1) for e in epochs]
    assert cosine == pytest.approx(
        [(high + low) / 2 + (high - low) / 2 * math.cos(a) for a in angles], rel=1e-12, abs=1e-15
    )
    curve = schedules.polynomial_decay_lr(high, low, total, per_epoch, span, power, update)
    spans = [max(1, -(-e // span)) * span if update else span for e in epochs]
    share = [Fraction(max(s - e, 0), s) for e, s in zip(epochs, spans)]
    assert curve == pytest.approx([low + (high - low) * float(s) ** power for s in share], rel=1e-12)


@given(RATES, st.integers(1, 40), COUNTS, COUNTS, st.lists(st.integers(1, 20), min_size=1, max_size=4))
@tries(0.5)
def test_warm_up_and_milestones_are_their_definitions(lr, total, per_epoch, warm, steps):
    rates = schedules.warmup_lr(lr, total, per_epoch, warm)
    want = [lr * min(step // per_epoch, warm) / warm for step in range(total)]
    assert rates == pytest.approx(want, rel=1e-12)
    ends = list(itertools.accumulate(steps))
    listed = [lr / (i + 1) for i in range(len(ends))]
    made = schedules.piecewise_constant_lr(ends, listed)
    assert made == [next(rate for end, rate in zip(ends, listed) if step < end) for step in range(ends[-1])]


@given(st.lists(st.tuples(RATES, COUNTS), min_size=1, max_size=4), st.integers(0, 60), st.sampled_from(AGAIN[:2]))
@tries(0.5)
def test_a_chain_is_each_schedule_in_its_time(parts, step, how):
    pieces = [(schedules.WarmUpLR(rate, length), length) for rate, length in parts]
    chain = pieces[-1][0]
    for piece, length in reversed(pieces[:-1]):
        chain = piece.then(chain, length)
    chain, at = again(chain, how, lambda: None), step
    now = 0
    while now < len(pieces) - 1 and at >= pieces[now][1]:
        at -= pieces[now][1]
        now += 1
    want = pieces[now][0](at)
    assert chain(step) == want
    assert chain(torch.tensor([step]))[0].item() == np.float32(want)


@given(st.lists(RATES, min_size=1, max_size=6), st.lists(st.booleans(), max_size=9))
@tries(0.4)
def test_a_list_of_rates_counts_applied_updates_only(rates, applied):
    """With rate r a gradient of 1 moves a weight by r; a skipped step uses up no rate, and past the end it says so."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer, want, done = optimizers.SGD([weight], rates), 0.0, 0
    for flag in applied:
        weight.grad = torch.ones_like(weight)
        optimizer.found_inf = torch.tensor(0.0 if flag else 1.0)
        if flag and done == len(rates):
            with pytest.raises(RuntimeError, match="make it longer"):
                optimizer.step()
            break
        optimizer.step()
        want, done = (want - rates[done], done + 1) if flag else (want, done)
        assert weight.item() == want
        assert optimizer.global_step == done


# --- optimizers

MEMBER = st.sampled_from(sorted(MEMBERS))
SEEDS = st.lists(st.integers(0, 5), max_size=6)


def weights(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,), (2, 2, 2))]


def moved(optimizer, params, seed: int, skip: bool | None = None) -> None:
    """One step from seeded gradients; with `skip` under the protocol of a loss scaler."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    if skip is not None:
        optimizer.found_inf = torch.tensor(float(skip))
    optimizer.step()
    if skip is not None:
        del optimizer.found_inf


@given(MEMBER, st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=6))
@tries(0.6)
def test_a_skipped_step_is_no_step(name, steps):
    first, second = weights(), weights()
    skipping, plain = MEMBERS[name](first), MEMBERS[name](second)
    for seed, skip in steps:
        moved(skipping, first, seed, skip)
    for seed, skip in steps:
        if not skip:
            moved(plain, second, seed)
    for a, b in zip(first, second):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert skipping.global_step == plain.global_step == sum(not skip for _, skip in steps)


@given(MEMBER, st.lists(st.integers(0, 5) | st.sampled_from(AGAIN), max_size=8))
@tries(0.6)
def test_an_optimizer_lives_on_in_its_copies(name, events):
    """Network and optimizer are copied together, as a trainer holds them; the steady pair never is."""

    class Trainer(nn.Module):
        def __init__(self):
            super().__init__()
            self.params = nn.ParameterList(weights())
            self.optimizer = MEMBERS[name](list(self.params))

        def get_extra_state(self):
            return self.optimizer.state_dict()

        def set_extra_state(self, state):
            self.optimizer.load_state_dict(state)

    trainer, steady = Trainer(), Trainer()
    for event in events:
        if isinstance(event, int):
            for one in (trainer, steady):
                moved(one.optimizer, list(one.params), event)
        elif event == "pickle" and name.startswith("LARS"):
            continue  # its filter is a function of this test's
        elif event == "file":
            other = Trainer()
            other.load_state_dict(copy.deepcopy(trainer.state_dict()))
            trainer = other
        elif event == "copy":
            trainer = copy.deepcopy(trainer)
        else:
            kept = trainer.params.state_dict(), copy.deepcopy(trainer.optimizer.state_dict())
            trainer = Trainer()
            trainer.params.load_state_dict(kept[0])
            trainer.optimizer.load_state_dict(pickle.loads(pickle.dumps(kept[1])))
    assert_same(trainer.state_dict(), steady.state_dict())


@given(st.sampled_from(sorted(set(MEMBERS) - FIXED_RATE)), SEEDS, st.integers(-8, 8))
@tries(0.5)
def test_a_static_loss_scale_divides_out(name, seeds, power):
    """A power of two moves exponents only, so not a bit of a weight may differ."""
    assume("W8bit" not in name and "AdamWeightDecay" not in name and not name.startswith(("Lamb", "AdaFactor")))
    assume(name not in ("ASGD", "Rprop", "Adadelta", "LARS-clip") or power == 0)
    first, second = weights(), weights()
    scale = {"loss_scale": 2.0**power} if power else {}
    scaled, plain = MEMBERS[name](first, **scale), MEMBERS[name](second)
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for a, b in zip(first, second):
            b.grad = torch.randn(b.shape, generator=generator)
            a.grad = b.grad * 2.0**power
        scaled.step()
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@given(MEMBER, SEEDS, st.permutations(range(3)))
@tries(0.5)
def test_groups_and_their_order_change_nothing(name, seeds, order):
    first, second = weights(), weights()
    together = MEMBERS[name](first)
    apart = MEMBERS[name]([{"params": [second[i]]} for i in order])
    for seed in seeds:
        for optimizer, params in ((together, first), (apart, second)):
            moved(optimizer, params, seed)
    for a, b in zip(first, second):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@given(st.floats(0, 0.99), st.floats(1e-3, 0.5), st.booleans(), SEEDS)
@tries(0.5)
def test_momentum_is_its_recurrence_in_float64(momentum, rate, nesterov, seeds):
    params = [nn.Parameter(p.detach().double()) for p in weights()]
    optimizer = optimizers.Momentum(params, rate, momentum, use_nesterov=nesterov)
    want, velocity = [p.detach().numpy().copy() for p in params], [0.0] * len(params)
    for seed in seeds:
        moved_by = []
        generator = torch.Generator().manual_seed(seed)
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            g = p.grad.numpy()
            velocity[i] = momentum * velocity[i] + g
            moved_by.append(g + momentum * velocity[i] if nesterov else velocity[i])
        optimizer.step()
        want = [w - rate * step for w, step in zip(want, moved_by)]
    for p, w in zip(params, want):
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-12, atol=1e-13)


@given(st.floats(0.01, 0.99), st.floats(0.5, 0.9999), st.floats(1e-4, 0.1), SEEDS)
@tries(0.5)
def test_adam_is_its_paper_in_float64(beta1, beta2, rate, seeds):
    params = [nn.Parameter(p.detach().double()) for p in weights()]
    optimizer = optimizers.Adam(params, rate, beta1, beta2, 1e-8)
    state = [(p.detach().numpy().copy(), 0.0, 0.0) for p in params]
    for t, seed in enumerate(seeds, 1):
        generator = torch.Generator().manual_seed(seed)
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            w, m, v = state[i]
            g = p.grad.numpy()
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            w = w - rate * math.sqrt(1 - beta2**t) / (1 - beta1**t) * m / (np.sqrt(v) + 1e-8)
            state[i] = w, m, v
        optimizer.step()
    for p, (w, _, _) in zip(params, state):
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-10, atol=1e-12)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 99))
@tries(0.4)
def test_centralized_gradients_have_no_mean_and_keep_their_differences(rows, columns, seed):
    g = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    c = centralized(g, 1)
    np.testing.assert_allclose(c.mean(1).numpy(), 0, atol=1e-15)
    np.testing.assert_allclose((c - c[:, :1]).numpy(), (g - g[:, :1]).numpy(), atol=1e-14)


@given(st.sampled_from(["parameter", "again", "rate", "decay", "key", "empty", "mark"]), MEMBER)
@tries(0.4)
def test_a_group_that_is_refused_leaves_the_others(kind, name):
    params = weights()
    optimizer = MEMBERS[name](params)
    assume(isinstance(optimizer, Optimizer) and not name.startswith("LARS"))
    new = nn.Parameter(torch.zeros(2))
    wrong = {
        "parameter": {"params": ["x"]},
        "again": {"params": [params[0]]},
        "rate": {"params": [new], "lr": -1.0},
        "decay": {"params": [new], "weight_decay": "x"},
        "key": {"params": [new], "momentun": 0.9},
        "empty": {"params": []},
        "mark": {"params": [new], "grad_centralization": "yes"},
    }[kind]
    before, count = copy.deepcopy(optimizer.state_dict()), len(optimizer.param_groups)
    with pytest.raises((TypeError, ValueError, KeyError, RuntimeError)):
        optimizer.add_param_group(wrong)
    assert len(optimizer.param_groups) == count
    assert_same(optimizer.state_dict(), before)


# --- traces and what a replay makes of them


@st.composite
def traces(draw) -> Trace:
    """A run of up to 8 steps over two tensors whose values are powers of two, some of them not finite."""
    steps = draw(st.integers(1, 8))
    values = [
        [
            draw(st.lists(st.sampled_from([0.0, 2.0**-30, 1.0, 8.0, 2.0**20, math.inf]), min_size=1, max_size=3))
            for _ in "ab"
        ]
        for _ in range(steps)
    ]
    counted = [[exponent_counts(torch.tensor(v)) for v in row] for row in values]
    counts = np.stack([[c.numpy()[1:255] for c, _, _ in row] for row in counted]).astype(np.uint32)
    gradients = Ranges(
        names=("a", "b"),
        size=np.array([3, 3]),
        step=np.arange(steps),
        lowest=-126,
        counts=counts,
        zeros=np.array([[int(z) for _, z, _ in row] for row in counted]),
        nonfinite=np.array([[int(c[255]) for c, _, _ in row] for row in counted]),
        largest=np.array([[float(most) for _, _, most in row] for row in counted], np.float32),
    )
    bad = gradients.nonfinite.sum(1) > 0
    numbers = np.linspace(1, 2, steps)
    return Trace(
        step=np.arange(steps),
        loss=numbers,
        scale=np.full(steps, 2.0**6),
        overflow=bad,
        lr=numbers,
        grad_norm=np.where(bad, math.nan, numbers),
        seconds=numbers,
        gradients=gradients,
        meta={"made": "by a test"},
    )


def counted(ranges: Ranges) -> dict[tuple[int, ...], int]:
    """(row, parameter, exponent) -> count, wherever there is one: a file may leave empty bins out."""
    rows, parameters, bins = np.nonzero(ranges.counts)
    exponents = (int(b) + ranges.lowest for b in bins)
    return dict(zip(zip(rows.tolist(), parameters.tolist(), exponents), ranges.counts[rows, parameters, bins].tolist()))


def same_traces(a: Trace, b: Trace) -> None:
    for key in ("step", "loss", "scale", "overflow", "lr", "grad_norm", "seconds"):
        np.testing.assert_array_equal(getattr(a, key), getattr(b, key))
    for key in ("size", "step", "zeros", "nonfinite", "largest"):
        np.testing.assert_array_equal(getattr(a.gradients, key), getattr(b.gradients, key))
    assert counted(a.gradients) == counted(b.gradients)
    assert (a.format, a.meta) == (b.format, b.meta)


def rows_of(trace: Trace, keep: np.ndarray) -> Trace:
    """The steps of a trace for which `keep` (steps,) is True."""
    part, columns = trace.gradients, ("step", "loss", "scale", "overflow", "lr", "grad_norm", "seconds")
    counted = {key: getattr(part, key)[keep] for key in ("step", "counts", "zeros", "nonfinite", "largest")}
    return replace(trace, **{k: getattr(trace, k)[keep] for k in columns}, gradients=replace(part, **counted))


@given(traces(), st.integers(0, 8))
@tries(0.4)
def test_a_trace_is_its_file_and_its_pieces(tmp_path_factory, trace, cut):
    path = tmp_path_factory.getbasetemp() / "drawn.npz"
    trace.save(path)
    same_traces(Trace.load(path), trace)
    later = rows_of(trace, trace.step >= cut)
    joined = trace.before(cut) + later
    same_traces(replace(joined, seconds=trace.seconds), trace)
    same_traces(again(trace, "pickle", lambda: None), trace)


@given(traces(), st.sampled_from(["fp16", "e5m2", "e4m3fn", "bf16"]))
@tries(0.4)
def test_a_ceiling_is_where_the_largest_gradient_overflows(trace, name):
    """Beside the rounding itself: at the ceiling it is finite, at twice the ceiling it is not."""
    fmt = get_format(name)
    tops = ceilings(trace, fmt)
    largest = np.where(np.isfinite(trace.gradients.largest), trace.gradients.largest, 0).max(1)
    clean = (trace.gradients.nonfinite.sum(1) == 0) & (largest > 0)
    for top, most, ok, bad in zip(tops, largest, clean, trace.overflow):
        if ok and name != "fp16":  # in the trace's own format the recorded outcome overrules the estimate
            at, beyond = (torch.tensor([float(most) * top * k], dtype=torch.float64) for k in (1, 2))
            assert round_to(at, fmt, overflow="inf").isfinite()
            assert not round_to(beyond, fmt, overflow="inf").isfinite() or name == "bf16"
        if name == "fp16":
            assert (top < 2.0**6) == bad


@given(traces(), st.integers(-10, 20))
@tries(0.4)
def test_the_flushed_share_counts_what_a_cast_makes_zero(trace, power):
    fmt, scale = E2M1, 2.0**power
    share = flushed(trace, np.full((len(trace), 1), scale), fmt)[:, 0]
    for row in range(len(trace)):
        total = trace.gradients.total()[row]
        values = torch.tensor(np.exp2(trace.gradients.exponents.astype(float)))
        # a bin holds [2^e, 2^(e+1)): below half the smallest value all of it is lost, at it (a tie) nothing but 2^e
        lost = (values * scale * 2 <= fmt.zero_up_to).numpy()
        assert share[row] == pytest.approx((total * lost).sum() / max(total.sum(), 1), abs=1e-12)


@given(
    traces(), st.lists(st.tuples(st.sampled_from([1.0, 2.0**10, 2.0**16]), st.integers(1, 4)), min_size=1, max_size=4)
)
@tries(0.15)
def test_a_replay_ranks_and_counts_as_the_rule_does(trace, cells):
    policies = {f"{i}": swept(init, 2.0, window) for i, (init, window) in enumerate(cells)}
    frame = replay(trace, policies)
    tops = ceilings(trace)
    for _, row in frame.iterrows():
        scale, good, skipped = cells[int(row["policy"])][0], 0, 0
        for top in tops:
            if scale <= top:
                good += 1
                if good == cells[int(row["policy"])][1]:
                    scale, good = scale * 2, 0
            else:
                scale, good, skipped = scale / 2, 0, skipped + 1
        assert (row["skipped"], row["final_scale"]) == (skipped, scale)
    ranks = list(zip(frame["collapsed"], frame["lost"].fillna(0)))
    assert ranks == sorted(ranks)
