"""The numbers in the sentences of views, computed a second way, over the whole range of every control.

The second way never calls what the explorer calls: native 16-bit arithmetic, ml_dtypes, plain loops, lists of all
values of a format, closed formulas.
"""

import bisect
import math
import re
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from sentences import in_percent, power, read, swept

from mpkit.explorers.boost import CentralizeExplorer, FreezeExplorer, LessBNExplorer
from mpkit.explorers.casting import CastingExplorer, LogSoftmaxExplorer
from mpkit.explorers.formats import BitsExplorer, GradientsExplorer, RangesExplorer
from mpkit.explorers.formats import recorded as digits_trace
from mpkit.explorers.optimizers import PLACES, AdamStateExplorer, DecayExplorer, LossScaleExplorer, SchedulesExplorer
from mpkit.explorers.rounding import ModesExplorer, UpdatesExplorer
from mpkit.explorers.scaling import DynamicsExplorer, recorded
from mpkit.explorers.start import StartExplorer
from mpkit.explorers.training import OrderExplorer, UnderflowExplorer, gradients_of_digits, micro_gradients
from mpkit.explorers.zoo import STEPS, NaiveExplorer, ZooExplorer, zoo_policy
from mpkit.formats import get_format
from mpkit.policies import advance, initial
from mpkit.rounding import round_to

NARROW = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "e5m2": ml_dtypes.float8_e5m2, "e4m3": ml_dtypes.float8_e4m3}


@pytest.mark.parametrize("run", ["gpt_sums", "mlp_digits", "rare_outliers", "growing_activations"])
@pytest.mark.parametrize("step", [51, 399])
def test_dynamics(run, step):
    trace = recorded(run)[0]
    tops, part = trace.measured["fp16"], trace.gradients
    for m in swept(
        DynamicsExplorer(run=run, step=step, init_exponent=14), run=(), fmt=(), step=(), floor_exponent=(-24, -3, 10)
    ):
        scale, good, skipped = 2.0**m.init_exponent, 0, 0
        for i in range(step + 1):
            used, finite = scale, scale <= tops[i]
            good = good + 1 if finite else 0
            skipped += not finite
            if m.hold:
                continue
            if not finite:
                scale = max(scale / (m.down_factor if m.apart else m.scale_factor), 2.0**m.floor_exponent)
            elif good == m.scale_window:
                scale, good = scale * m.scale_factor, 0
            scale = float(np.float32(scale))
        told = read(r"the scale is (\S+?)[,;].* (\d+) of (\d+) steps? (?:was|were) skipped, .*called (\d+) times?\.", m)
        assert power(told[0]) == pytest.approx(used, rel=4e-3)
        assert [int(v) for v in told[1:]] == [skipped, step + 1, step + 1 - skipped]
        if tops[step] < 0:
            assert "no scale helps" in m.summary()
            continue
        ceiling, bits, zeros = read(r"the ceiling (\S+), the headroom (\S+) bits.* times?\. (.+) of this", m)
        assert power(ceiling) == pytest.approx(tops[step], rel=4e-3)
        assert float(bits) == pytest.approx(math.log2(tops[step]) - math.log2(used), abs=0.051)
        if math.log2(used).is_integer():
            at = int(np.searchsorted(trace.rows, step, "right")) - 1
            lost = sum(n for e, n in zip(part.exponents, part.total()[at]) if e + 1 <= -25 - math.log2(used))
            assert zeros.lower() == in_percent((part.zeros[at].sum() + lost) / part.size.sum())


@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_a_broken_run_is_called_broken_from_the_first_step_that_no_scale_helps(fmt):
    tops = recorded("growing_activations", fmt)[1].tolist()
    first = next(i for i, top in enumerate(tops) if top < 0)
    for step in (first - 1, first):
        told = DynamicsExplorer(run="growing_activations", fmt=fmt, step=step).summary()
        assert told.startswith(f"Broken from step {first} on")
        assert ("no scale helps" in told) == (step == first)


@pytest.mark.parametrize("situation", ["drop", "outliers", "fixed", "model", "free"])
def test_zoo(situation):
    for m in swept(ZooExplorer(situation=situation), samples=3, situation=()):
        skips = []
        for name in m.names:
            policy = zoo_policy(name, m.interval, 2.0**m.start_exponent if m.same_start else None)
            state, skipped = initial(policy), 0
            for i in range(STEPS):
                finite = bool(state.scale <= m.ceiling[i])
                skipped += not finite
                state, stop = advance(policy, state, finite)
                if stop:
                    break
            skips.append(skipped)
        if min(skips) == max(skips):
            assert f"Every rule skips {skips[0]} of" in m.summary()
        else:
            assert read(r"between (\d+) .* and (\d+) ", m) == [str(min(skips)), str(max(skips))]


@pytest.mark.parametrize("fmt", ["fp16", "bf16", "e5m2"])
def test_gradients(fmt):
    ranges, dtype = digits_trace().gradients, NARROW[fmt]
    tiny, largest = float(ml_dtypes.finfo(dtype).smallest_normal), float(ml_dtypes.finfo(dtype).max)
    for m in swept(GradientsExplorer(fmt=fmt), fmt=()):
        shares, counts = np.zeros(4), ranges.total()[m.step].astype(float)
        for e, count in zip(ranges.exponents, counts):
            with np.errstate(over="ignore"):
                value = abs(float(np.array(1.5 * 2.0 ** (int(e) + m.scale_exponent)).astype(dtype)))
            shares[0 if value == 0 else 1 if value < tiny else 2 if value <= largest else 3] += count
        told = read(
            r"Step (\d+), ([\d,]+) non[^:]*: ([^,]+) become 0, ([^,]+) sub\w+, ([^,]+) n\w+, ([^,]+) overflow", m
        )
        assert [int(told[0]), int(told[1].replace(",", ""))] == [m.step, int(counts.sum())]
        # 57344 and 65504 end inside 2^15 to 2^16, and only powers of two were counted
        last = counts[ranges.exponents + m.scale_exponent == math.floor(math.log2(largest))].sum()
        shares[2] -= last
        assert told[2:] == [in_percent(share / counts.sum(), 1) for share in shares]
        assert ("was not recorded" in m.summary()) == bool(last)
        if last:
            assert f"and {in_percent(last / counts.sum(), 1)} lie between 2^15 and 2^16, where" in m.summary()


def test_ranges():
    for m in swept(RangesExplorer(), samples=60):
        for name, told in re.findall(r"(fp16|bf16|e5m2|e4m3fn) ([^;.]+)", m.summary()):
            fmt, low = get_format(name), 2.0**m.exponent
            if low > fmt.max:
                assert told.startswith(("overflows", "becomes"))
                continue
            values = fmt.values()
            inside = int(((values >= low) & (values < 2 * low) & values.isfinite()).sum())
            if name == "e4m3fn" and inside == 7:
                inside = 8  # the eighth pattern is its NaN
            assert told.startswith(f"{int(math.log2(inside)) + 1} of" if inside else "becomes 0"), (name, m.exponent)


def test_modes():
    finite = {name: get_format(name).values() for name in ("fp16", "e5m2", "e3m2")}
    finite = {name: sorted(set(v[v.isfinite()].tolist())) for name, v in finite.items()}
    for m in swept(ModesExplorer(), lower=("0", "1", "1.5", "28", "6", "0.0625"), fmt=tuple(finite)):
        values = finite[m.fmt]
        right = values[bisect.bisect_left(values, m.x)]
        left = right if right == m.x else values[bisect.bisect_left(values, m.x) - 1]
        below, above = Fraction(m.x) - Fraction(left), Fraction(right) - Fraction(m.x)
        away = max((left, right), key=abs) if below == above else left if below < above else right
        told = read(r"nearest_away (\S+), toward_zero (\S+), up (\S+), down (\S+);", m)
        for text, want in zip(told, (away, left if m.x > 0 else right, right, left)):
            assert float(text) == pytest.approx(want, rel=1e-6), m.state()
        if left != right:
            assert float(read(r"probability (\S+)\.$", m)[0]) == pytest.approx(float(below / (below + above)), abs=6e-4)


@pytest.mark.parametrize(
    ("fmt", "top", "beyond"), [("fp16", 65504, math.inf), ("e4m3fn", 448, math.nan), ("e2m1", 6, 6), ("e3m2", 28, 28)]
)
@pytest.mark.parametrize("negative", [False, True])
def test_modes_above_the_largest_number(fmt, top, beyond, negative):
    m, sign = ModesExplorer(fmt=fmt, lower=str(top), offset=0.25, negative=negative), -1.0 if negative else 1.0
    x = torch.full((4000,), m.x, dtype=torch.float64)
    drawn = round_to(x, m.format, "stochastic", generator=torch.Generator().manual_seed(0))
    stays = (drawn == sign * top).double().mean().item()
    last, ends = m.table()[-1], (sign * top, sign * beyond)
    assert m.summary().startswith(f"{m.x:.7g} lies {'below' if negative else 'above'} {sign * top:g}, the ")
    if stays == 1:
        assert m.summary().endswith(f"stochastic gives {sign * top:g} always.")
        assert last["result"] == f"{sign * top:g}"
    else:
        chance = float(read(r"probability (\S+), else \S+\.$", m)[0])
        assert chance == pytest.approx(stays if negative else 1 - stays, abs=4 * math.sqrt(0.25 * 0.75 / 4000))
        up, down = ends if negative else ends[::-1]
        assert last["result"] == f"{up:g} with probability {chance:g}, else {down:g}"
        assert m.summary().endswith(f"stochastic gives {last['result']}.")
    assert last["error, ulp"] == ""  # inf and NaN have no mean, and of 6 and 8 only 6 is ever stored


def test_a_number_of_the_format_lies_between_no_others():
    for lower, offset in (("1", 0.0), ("1", 1.0), ("65504", 0.0)):
        m = ModesExplorer(lower=lower, offset=offset)
        x = np.float16(m.x)
        assert m.summary().startswith(f"{float(x):.7g} is a number of fp16 (")
        assert m.summary().endswith(f"stochastic gives {float(x):.7g} always.")
        assert ("(odd)" in m.summary()) == bool(x.view(np.uint16) & 1)


@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_updates(fmt):
    for m in swept(UpdatesExplorer(fmt=fmt), samples=4, fmt=()):
        small, weight = NARROW[fmt](m.update), NARROW[fmt](1)
        for _ in range(m.shown):
            weight = NARROW[fmt](weight + small)
        shown, size, half, nearest, exact = read(
            r", (\d+) updates of (\S+), .*\((\S+)\): nearest (\S+),.* exact (\S+)\.$", m
        )
        assert (int(shown), float(half)) == (
            m.progress * 20,
            float(f"{float(ml_dtypes.finfo(NARROW[fmt]).eps) / 2:.3g}"),
        )
        assert float(size) == pytest.approx(m.update, rel=5e-3)
        assert float(nearest) == pytest.approx(float(weight), abs=6e-5)
        assert float(exact) == pytest.approx(1 + int(shown) * m.update, abs=6e-5)


def test_underflow():
    for m in swept(UnderflowExplorer()):
        values, dtype = gradients_of_digits()[m.moment, m.kind], NARROW[m.format]
        tiny = float(ml_dtypes.finfo(dtype).smallest_normal)

        def shares(exponent, values=values, dtype=dtype, tiny=tiny):
            with np.errstate(over="ignore"):
                stored = (values.astype(np.float64) * 2.0**exponent).astype(np.float32).astype(dtype).astype(np.float64)
            small = (stored > 0) & (stored < tiny)
            return [in_percent(float(part.mean())) for part in (stored == 0, small, ~np.isfinite(stored))]

        *told, best, flushes = read(
            r"2\^-?\d+: (.*) flushed to zero, (.*) subnormal, (.*) overflow\. .* 2\^(-?\d+): with it, (.*) is flushed",
            m,
        )
        assert told == shares(m.exponent), m.state()
        assert flushes == shares(int(best))[0]
        assert shares(int(best))[2] == "0 %"


def test_order():
    for m in swept(OrderExplorer(), samples=5):
        micro = micro_gradients(m.parts).double().numpy()
        mean, n, scale = micro.mean(0), m.parts, 2.0**m.exponent
        norm = float(np.linalg.norm(mean))
        each = sum(g / n * scale ** -(n - 1 - k) for k, g in enumerate(micro))
        length = float(np.linalg.norm(each))
        want = (min(norm, m.max_norm), min(norm * scale, m.max_norm) / scale, min(length, m.max_norm))
        cosine = float(mean @ each / norm / length)
        told = [
            float(v)
            for v in read(r"of norm (\S+) in .* order, (\S+) when .* and (\S+) when each .* cosine of (\S+) with", m)
        ]
        assert told[:3] == pytest.approx(want, rel=6e-3)
        assert told[3] == pytest.approx(cosine, abs=6e-3)


def test_adam_state():
    for m in swept(AdamStateExplorer(), samples=8, state_format=("float16", "float32")):
        kind = {"float16": np.float16, "float32": np.float32}[m.state_format]
        with np.errstate(all="ignore"):
            g, eps = kind(2.0**m.gradient_exponent), kind(m.eps)
            v = (
                kind(kind(g * g) * kind(0.001))
                if kind is np.float32
                else kind(np.float32(kind(g * g)) * np.float32(0.001))
            )
            top = kind(np.float32(kind(np.float32(g) * np.float32(0.1))) * np.float32(math.sqrt(0.001) / 0.1))
            step = kind(top / kind(kind(np.sqrt(v)) + eps))
        told = read(r"v is (\S+), eps \S+ becomes (\S+), and the step is (\S+) times.* the step is (\S+) times", m)
        exact = 2.0**m.gradient_exponent
        assert float(read(r"= (\S+)\. In", m)[0]) == pytest.approx(exact, rel=0 if exact >= 1 else 5e-5)
        wide = 0.001**0.5 * exact / (0.001**0.5 * exact + m.eps)
        assert float(told[0]) == pytest.approx(float(v), rel=6e-5)
        for text, want in zip(told, (v, eps, step, wide)):
            assert float(text) == pytest.approx(float(want), rel=6e-3, nan_ok=True), m.state()


def test_schedules():
    for m in swept(SchedulesExplorer()):
        lr, rate, span, warm = m.learning_rate, m.decay_rate, m.decay_steps, m.warmup_steps
        t = m.step - warm
        part = math.floor(t / span) if m.is_stair else t / span
        capped = min(t, span) / span
        want = (
            [lr * m.step / warm] * 5
            if t < 0
            else [
                *(lr * rate**part, lr * math.exp(-rate * (part if m.is_stair else t / 1)), lr / (1 + rate * part)),
                *(lr * (1 + math.cos(math.pi * capped)) / 2, lr * (1 - capped) ** m.power),
            ]
        )
        told = [
            float(v)
            for v in read(r"exponential (\S+), natural exp (\S+), inverse (\S+), cosine (\S+), polynomial (\S+)\.$", m)
        ]
        for i, (got, right) in enumerate(zip(told, want)):
            if i != 1 or not m.is_stair:
                assert got == pytest.approx(right, rel=6e-3, abs=1e-8), (i, m.state())


def test_weight_decay():
    """Each optimizer's formula in float64, one weight."""
    for m in (one for place in PLACES for one in swept(DecayExplorer(place=place), place=())):
        named = "gamma" in m.parameter or "beta" in m.parameter
        told = read(r": (.+)\. The learn.* (\d+) steps .* becomes (\S+) in SGD, (\S+) in Adam, (\S+) in AdamW\S+\.$", m)
        reached = m.place == "in a group" or (m.place == "no groups" and not named)
        trained = m.place != PLACES[3]
        said = "weight decay does not reach it"
        if reached:
            said = "weight decay reaches it" if m.weight_decay else "its weight_decay is 0"
        said = said if m.learning_rate else "a learning rate of 0 moves nothing"
        assert told[0] == (said if trained else "it is not trained")
        in_turn = [float(v) for v in read(r"gradients are (\S+) and (\S+) in turn", m)]
        assert in_turn == pytest.approx([-m.size, m.size], rel=6e-3)
        rate, decay, w, adam, apart = m.learning_rate, m.weight_decay * reached, [1.0] * 3, [0.0, 0.0], [0.0, 0.0]
        for i in range(1, 1 + m.step * trained):
            g = m.size * (-1) ** i
            full = g + decay * w[1]
            adam = [0.9 * adam[0] + 0.1 * full, 0.999 * adam[1] + 0.001 * full**2]
            apart = [0.9 * apart[0] + 0.1 * g, 0.999 * apart[1] + 0.001 * g**2]
            size = math.sqrt(1 - 0.999**i) / (1 - 0.9**i)
            w = [
                w[0] - rate * (g + decay * w[0]),
                w[1] - rate * size * adam[0] / (math.sqrt(adam[1]) + 1e-8),
                w[2] - rate * (apart[0] / (math.sqrt(apart[1]) + 1e-6) + decay * w[2]),
            ]
        assert [float(v) for v in told[1:]] == pytest.approx([m.step, *w], abs=0.0051), m.state()


def test_the_rest():
    for m in swept(StartExplorer(), init_exponent=(0, 16), scale_factor=(2,)):
        grown = min(240 // m.scale_window, 127 - m.init_exponent)
        assert read(r"would be multiplied (\d+) (times?) ", m) == [str(grown), "time" if grown == 1 else "times"]
        assert read(r"in (float32|float16|bfloat16); the scale", m) == ["float32" if m.level == "O0" else m.dtype]
    for m in swept(LossScaleExplorer(), samples=3, weight_decay=()):
        ratio = 2.0**m.sens_exponent / 2.0**m.scale_exponent
        part = read(r"arrive at (?:(\S+) (?:times|of) )?their true size", m)[0]  # none where both are equal
        assert Fraction(part or 1) == Fraction(ratio)
        assert part != "1"
    for m in swept(LessBNExplorer(), network=("ResNet-18", "ResNet-50")):
        kinds = [kind for _, kind in m.layers]
        told = [int(v) for v in read(r": (\d+) of (\d+) BatchNorms are removed", m)]
        assert told == [kinds.count("removed"), kinds.count("removed") + kinds.count("kept")]
    for m in swept(CentralizeExplorer(), output=(0, 3, 5)):
        row = np.array(m.grad[m.output].tolist())
        mean, count, share = read(r"the mean (\S+) .* its (\d+) entries.*keeps (\d+) % of", m)
        rows = np.array(m.grad.tolist())
        left = rows - rows.mean(1, keepdims=True) if m.centralize else rows
        assert (float(mean), int(count)) == (pytest.approx(row.mean(), rel=0.06), len(row))
        assert int(share) == pytest.approx(100 * math.sqrt((left**2).sum() / (rows**2).sum()), abs=0.51)
    for m in swept(FreezeExplorer(step=10), samples=4):
        told = read(
            r"Step (\d+): index (\d+) freezes (none|the first(?: \d+)?) of the (\d+) .*saves (.+) of its "
            r".*In (.+) of the 120 .*saves (.+) of all",
            m,
        )
        stride, work = len(m.names) // m.groups, np.array(m.costs)
        saved = [work[: v * stride].sum() / work.sum() for v in m.sequence]
        still = m.sequence[m.step] * stride
        who = {0: "none", 1: "the first"}.get(still, f"the first {still}")
        assert told[:4] == [str(v) for v in (m.step, m.sequence[m.step], who, len(work))]
        frozen = sum(v > 0 for v in m.sequence) / len(m.sequence)
        want = [in_percent(saved[m.step]), in_percent(frozen), in_percent(float(np.mean(saved)), 1)]
        assert told[4:] == want
    last = FreezeExplorer(groups=21, full_step_fraction=0.0, freeze_type=0, step=19)
    assert "freezes the first 20 of the 21 stages and saves more than 99 % of" in last.summary()  # one trains
    last.set(step=last.sequence.index(1))
    assert "index 1 freezes the first of the 21 stages and" in last.summary()
    for m in swept(LogSoftmaxExplorer(), fmt=("fp16",)):
        z = torch.arange(0, -33.0, -1.0)
        low = m.level in ("O2", "O3")
        plain = torch.softmax(z, 0).half().log().isinf().sum() if low and not m.fused else 0
        assert int(read(r": (\d+) of 33", m)[0]) == int(plain)
    for m in swept(CastingExplorer(), samples=3, kept=(0, 1), fmt=("fp16", "e5m2")):
        low, count = read(r": (\d+) of (\d+) operations", m)
        steps = m.table()
        assert [int(low), int(count)] == [sum(s["computes in"] != "float32" for s in steps), len(steps)]
        told = read(r" (\d+) values? became zero and (\d+) overflowed", m)
        assert [int(v) for v in told] == [sum(s[key] for s in steps) for key in ("to zero", "overflow")]


def test_bits():
    for number in ("0.1", "65519", "1e-8", "6e-8", "-2.5", "1/3", "2^-14", "2049", "0", "-65504", "5.5e-5"):
        m = BitsExplorer(number=number)
        wanted = Fraction(2) ** -14 if number == "2^-14" else Fraction(number)
        value = np.float16(float(wanted))
        kind = "zero" if value == 0 else "subnormal" if abs(value) < np.float16(2.0**-14) else "normal"
        pattern = f"{int(value.view(np.uint16)):016b}"
        with np.errstate(over="ignore"):
            ends = [float(np.nextafter(value, np.float16(end))) for end in (-np.inf, np.inf)]
        told = read(
            r"is (\S+) \((exactly|off by \S+)\), .*: bits (\S+ \S+ \S+); neighbours (\S+) and (\S+), ulp (\S+)\.$", m
        )
        assert float(told[0]) == float(value)
        assert kind in m.summary()
        off = float(Fraction(float(value)) - wanted)
        assert (0.0 if told[1] == "exactly" else float(told[1][7:])) == pytest.approx(off, rel=6e-3)
        assert told[2].replace(" ", "") == pattern
        assert [float(told[3]), float(told[4])] == pytest.approx(ends, rel=1e-6)
        assert float(told[5]) == pytest.approx(float(np.spacing(min(abs(value), np.float16(65472)))), rel=1e-3)


def test_naive():
    for m in swept(NaiveExplorer()):
        scale, seen = 2.0**m.start_exponent, []
        for _ in range(m.STEPS):
            seen.append(scale)
            scale *= 1.1 if scale > 2 * m.loss else 0.9 if scale < m.loss else 1.0
        at, fate, end = read(r"At step 299 its scale is (\S+): (.*)\. At step 299 .* is (\S+)\. The", m)
        assert math.log2(power(at)) == pytest.approx(math.log2(seen[-1]), abs=0.01)
        above = [i for i, value in enumerate(seen) if value > 2.0**m.ceiling_exponent]
        assert ("inf goes into the weights" in fate) == bool(above)
        assert not above or f"from step {above[0]} on" in fate
        own, good, used = 2.0**m.start_exponent, 0, 0.0
        for _ in range(m.STEPS):
            used, finite = own, own <= 2.0**m.ceiling_exponent
            good = good + 1 if finite else 0
            own = own / 2 if not finite else own * 2 if good == 20 else own
            good = 0 if good == 20 else good
        assert power(end) == used
