"""Whole lives of what holds a loss scale, drawn at random, beside a model of a few lines written from the papers.

An object steps, is copied, pickled, saved, loaded into another one, given what it must refuse, and goes on; after every
event it must be where the model is. `make tools ARGS=fuzz` draws thirty times as many.
"""

from __future__ import annotations

import math
import pickle
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles import POLICIES, RUNS, policy_of
from support import AGAIN, again, tries

from mpkit.policies import (
    FRAMEWORKS,
    TENSOR_SCALE_PRESETS,
    ScalePolicy,
    TensorScalePolicy,
    advance,
    advance_tensor_scale,
    explain,
    initial,
    initial_tensor_scale,
    run,
    stack,
    stack_tensor_scales,
)
from mpkit.replay import replay_tensor_scales, simulate
from mpkit.scalers import (
    DynamicLossScaleManager,
    DynamicLossScaler,
    DynamicLossScaleUpdateCell,
    PolicyLossScaler,
    StaticLossScaler,
    TensorScaler,
    all_finite,
    check_and_unscale_,
    update_all_,
)

SCALES = st.sampled_from([1.0, 3.0, 1000.0, 2.0**16, 3e38])
FACTORS, WINDOWS = st.integers(1, 7), st.integers(1, 5)
EVENTS = st.lists(st.booleans() | st.sampled_from([*AGAIN, "refuse"]), max_size=25)
"""True: a finite step; False: an overflow; else what happens to the object between two steps."""


def refuses(call, *args) -> None:
    with pytest.raises((TypeError, ValueError)):
        call(*args)


@given(SCALES, FACTORS, WINDOWS, EVENTS)
@tries(0.4)
def test_a_dynamic_scaler_lives_as_five_lines_of_numpy(start, factor, window, events):
    fresh = lambda: DynamicLossScaler(7, 2, 9)  # noqa: E731  # another one altogether
    scaler, scale, count = DynamicLossScaler(start, factor, window), np.float32(start), 0
    for event in events:
        if event is True:
            count += 1
            with np.errstate(over="ignore"):
                grown = np.float32(scale * np.float32(factor))
            if count == window:
                scale, count = (grown if np.isfinite(grown) else scale), 0
        elif event is False:
            scale, count = max(np.float32(1), scale / np.float32(factor)), 0
        if isinstance(event, bool):
            assert scaler.adjust(torch.tensor(event))
        elif event == "refuse":
            refuses(scaler.adjust, torch.tensor([True, False]))
            refuses(scaler.adjust, True)
            refuses(scaler.load_state_dict, {"scale_value": 1.0})
        else:
            scaler = again(scaler, event, fresh)
        assert (float(scaler.scale_value), int(scaler.counter)) == (scale, count)
        assert (scaler.scale_factor, scaler.scale_window) == (factor, window)


@given(SCALES, FACTORS, WINDOWS, EVENTS)
@tries(0.4)
def test_an_update_cell_lives_as_five_lines_of_numpy(start, factor, window, events):
    """As the scaler, but growth has no guard, so that the scale may become infinite."""
    cell, live = DynamicLossScaleUpdateCell(start, factor, window), torch.tensor(start)
    scale, iteration, last, down = np.float32(start), 1, 0, np.float32(1) / np.float32(factor)
    for event in events:
        if isinstance(event, bool):
            assert cell(live, torch.tensor(not event)).item() is not event
            with np.errstate(over="ignore"):
                if not event:
                    scale, last = max(np.float32(1), scale * down), iteration
                elif iteration - last >= window:
                    scale, last = np.float32(scale * np.float32(factor)), iteration
            iteration += 1
        elif event == "refuse":
            refuses(cell, live, 1.0)
            refuses(cell, live, torch.tensor(0.0))
        else:
            cell = again(cell, event, lambda: DynamicLossScaleUpdateCell(start, factor, window))
        assert (float(live), int(cell.cur_iter), int(cell.last_overflow_iter)) == (scale, iteration, last)
        assert cell.get_loss_scale() == start


@given(SCALES, st.sampled_from([1, 1.5, 2, 3, 7]), WINDOWS, EVENTS)
@tries(0.4)
def test_a_manager_lives_as_five_lines_of_python(start, factor, window, events):
    manager, scale, iteration, last, bad = DynamicLossScaleManager(start, factor, window), start, 1, 0, 0
    for event in events:
        if isinstance(event, bool):
            manager.update_loss_scale(not event)
            if not event:
                scale, last, bad = max(1.0, scale * (1 / factor)), iteration, bad + 1
            else:
                bad = 0
                if (iteration - last) % window == 0:
                    scale *= factor
            iteration += 1
        elif event == "refuse":
            refuses(manager.update_loss_scale, 1)
            refuses(manager.update_loss_scale, torch.ones(2, dtype=torch.bool))
        else:
            manager = again(manager, event, DynamicLossScaleManager)
        seen = manager.get_loss_scale(), manager.cur_iter, manager.last_overflow_iter, manager.bad_step
        assert seen == (scale, iteration, last, bad)
        assert manager.get_update_cell().get_loss_scale() == scale


@given(st.integers(0, 120), st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5), EVENTS)
@tries(0.3)
def test_a_static_scaler_never_moves_and_undoes_itself(power, values, events):
    """A power of two multiplies and divides float32 without a rounding, as long as nothing leaves the range."""
    assume(all(abs(v) * 2.0**power < 3e38 for v in values))
    scaler, x = StaticLossScaler(2.0**power), torch.tensor(values)
    for event in events:
        if isinstance(event, bool):
            assert scaler.adjust(torch.tensor(event)) is False
        elif event in AGAIN:
            scaler = again(scaler, event, lambda: StaticLossScaler(3))
        assert float(scaler.scale_value) == 2.0**power
    assert torch.equal(scaler.unscale(scaler.scale(x)), x)


@given(POLICIES, EVENTS, st.integers(0, 9))
@tries(0.4)
def test_a_policy_scaler_lives_as_its_policy_runs(policy, events, remember):
    fresh = lambda: PolicyLossScaler(policy, remember)  # noqa: E731
    scaler, flags = fresh(), [event for event in events if isinstance(event, bool)]
    want, done = run(replace(policy, name="the oracle"), flags), 0
    for event in events:
        if isinstance(event, bool):
            scaler.adjust(torch.tensor(event))
            done += 1
        elif event == "refuse":
            refuses(scaler.adjust, torch.ones(2, dtype=torch.bool))
            refuses(scaler.load_state_dict, {**scaler.state_dict(), "scales": torch.zeros(40)})
        else:
            scaler = again(scaler, event, fresh)
        if want.raised_at is not None and done > want.raised_at:
            with pytest.raises(RuntimeError):
                scaler.check()
            return
        if done:
            assert float(scaler.scale_value) == want.scale[done - 1]
        known = min(remember, done)
        assert scaler.history().scale.tolist() == want.scale[done - known : done].tolist()
        assert scaler.history().reasons.tolist() == want.reasons[done - known : done].tolist()
    scaler.check()


@given(st.lists(POLICIES, min_size=2, max_size=4), st.data())
@tries(0.3)
def test_scales_of_layers_live_side_by_side(policies, data):
    """Each of a vector has its own life, and the object that holds them is copied and saved as one."""
    calm = {"raise_at_min": False, "stop_at": -math.inf, "max_consecutive": 2**62}
    policies = [replace(p, error_at_zero=False, error_at_inf=False, scale_bits=32, **calm) for p in policies]
    flags = st.lists(st.booleans(), min_size=len(policies), max_size=len(policies))
    events = data.draw(st.lists(flags | st.sampled_from(AGAIN), max_size=15))
    scaler, rows = PolicyLossScaler(stack(policies)), [event for event in events if isinstance(event, list)]
    for event in events:
        if isinstance(event, list):
            scaler.adjust(torch.tensor(event))
        else:
            scaler = again(scaler, event, lambda: PolicyLossScaler(stack(policies)))
    for i, policy in enumerate(policies):
        want = run(policy, [row[i] for row in rows])
        assert scaler.history().scale[:, i].tolist() == want.scale.tolist()


# --- finite or not, and divided


DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -3.5, 6e-8, 1e-40, 60000.0, 1e30, math.inf, -math.inf, math.nan])
TENSORS = st.lists(st.tuples(DTYPES, st.lists(NUMBERS, max_size=4)) | st.none(), min_size=1, max_size=6)


def tensors_of(rows) -> list[torch.Tensor | None]:
    return [None if row is None else torch.tensor(row[1], dtype=torch.float64).to(row[0]) for row in rows]


@given(TENSORS)
@tries(0.6)
def test_all_finite_is_what_python_says_of_each_number(rows):
    tensors = tensors_of(rows)
    assume(any(t is not None for t in tensors))
    want = all(math.isfinite(v) for t in tensors if t is not None for v in t.tolist())
    assert all_finite(tensors).item() is want


@given(TENSORS, st.sampled_from([1.0, 3.0, 1000.0, 2.0**16, 2.0**24, 2.0**-130, 0.0, math.inf]))
@tries(0.6)
def test_gradients_are_divided_as_numpy_does(rows, scale):
    """g times fl32(1 / scale), rounded to the dtype of g first; numpy has no bfloat16, so torch's cast serves there."""
    grads = tensors_of(rows)
    assume(any(t is not None for t in grads))
    kept = [None if g is None else g.clone() for g in grads]
    with np.errstate(all="ignore"):
        inverse = np.float32(1) / np.float32(scale)
    found = check_and_unscale_(grads, torch.tensor(scale))
    finite = all(math.isfinite(v) for g in kept if g is not None for v in g.tolist())
    assert found.item() == (not finite or not np.isfinite(inverse))
    for before, after in zip(kept, grads):
        if before is not None:
            factor = torch.tensor(float(inverse), dtype=torch.float64).to(before.dtype).double()
            want = (before.double() * factor).to(torch.promote_types(before.dtype, torch.float32)).to(before.dtype)
            torch.testing.assert_close(after, want, rtol=0, atol=0, equal_nan=True)


@given(st.recursive(st.lists(st.floats(-100, 100, width=16), max_size=3), lambda x: st.lists(x, max_size=3)), st.data())
@tries(0.4)
def test_scaling_keeps_the_containers(drawn, data):
    """Lists stay lists and tuples tuples, however they are nested; a leaf is a list of numbers."""

    def made(tree):
        if all(isinstance(v, float) for v in tree):
            return torch.tensor(tree)
        return data.draw(st.sampled_from([list, tuple]))(made(branch) for branch in tree)

    def leaves(tree):
        return [tree] if isinstance(tree, torch.Tensor) else [leaf for branch in tree for leaf in leaves(branch)]

    def shape(tree):
        return "leaf" if isinstance(tree, torch.Tensor) else (type(tree), [shape(branch) for branch in tree])

    tree, scaler = made(drawn), StaticLossScaler(64)
    scaled = scaler.scale(tree)
    assert shape(scaled) == shape(tree) == shape(scaler.unscale(scaled))
    for a, b in zip(leaves(tree), leaves(scaled)):
        assert b.tolist() == [64 * v for v in a.tolist()]


# --- policies


@given(st.lists(POLICIES, min_size=1, max_size=5), st.sampled_from(AGAIN[:2]))
@tries(0.4)
def test_a_vector_gives_back_the_policies_it_was_made_of(policies, how):
    policies = [replace(p, name="same") for p in policies]
    vector = again(stack(policies), how, lambda: None)
    assert vector == stack(policies)
    assert hash(vector) == hash(stack(policies))
    assert [vector[i] for i in range(len(policies))] == policies


@given(POLICIES, RUNS, st.lists(st.booleans(), max_size=20))
@tries(0.4)
def test_what_comes_later_does_not_change_what_came_before(policy, finite, later):
    short, long = run(policy, finite), run(policy, [*finite, *later])
    done = len(short.scale)
    assert long.scale[:done].tolist() == short.scale.tolist()
    if short.raised_at is not None:
        assert (long.raised_at, long.raised) == (short.raised_at, short.raised)


@given(st.integers(-126, 100), st.integers(1, 5), st.integers(1, 5), RUNS, st.integers(-20, 20))
@tries(0.4)
def test_powers_of_two_make_a_policy_a_walk_on_exponents(start, growth, window, finite, move):
    """Without bounds and roundings the logarithm of the scale is a sum, so another start moves it as a whole."""
    assume(-120 < start + move < 100)
    scales = [
        run(ScalePolicy(init_scale=2.0**s, growth_factor=2.0**growth, growth_interval=window, scale_bits=64), finite)
        for s in (start, start + move)
    ]
    assert np.log2(scales[1].scale).tolist() == (np.log2(scales[0].scale) + move).tolist()


@given(POLICIES, RUNS)
@tries(0.4)
def test_a_reason_says_which_way_the_scale_went(policy, finite):
    history = run(replace(policy, delayed=False), finite)
    before = np.concatenate([[history.start], history.scale[:-1]])
    words = explain(history.policy, before, history.scale, history.finite)
    for old, new, ok, word in zip(before, history.scale, history.finite, words):
        if new > old:
            assert word in ("grew", "lifted")
        elif new < old:
            assert word == "backed off" or (ok and word in ("lowered", "backed off"))
        else:
            assert word in (("held", "at cap") if ok else ("at floor", "tolerated"))


@given(
    st.lists(POLICIES, min_size=1, max_size=4), st.lists(st.sampled_from([-1.0, 1.0, 3.0, 1000.0, 2.0**17, math.inf]))
)
@tries(0.3)
def test_a_replay_of_ceilings_is_the_rule_in_a_loop(policies, ceilings):
    """As numbers, and as a vector long enough for the tensors: seventeen policies."""
    for count in (1, 17):
        rows = (policies * 17)[: len(policies) * count][: max(count, len(policies))]
        got = simulate(np.array(ceilings), stack(rows))
        for i, policy in enumerate(rows):
            state, used, good, raised_at = initial(policy), [], [], -1
            for step, top in enumerate(ceilings):
                used.append(state.scale)
                good.append(state.scale <= top)
                after, raised = advance(policy, state, good[-1])
                if raised:
                    raised_at = step
                    break
                state = after
            assert got.sampled[: len(used), i].tolist() == used
            assert np.isnan(got.sampled[len(used) :, i]).all()
            assert (got.skipped[i], got.raised_at[i], got.final[i]) == (good.count(False), raised_at, state.scale)
            assert got.first_good[i] == (good.index(True) if True in good else len(good))
            assert got.lowest[i] == min(used, default=math.inf)


@given(st.sampled_from([name for name in FRAMEWORKS if name != "fairscale_layerwise"]), RUNS, RUNS)
@tries(0.3)
def test_after_enough_finite_steps_the_past_is_forgotten(framework, first, second):
    """Every rule grows or stops growing on finite steps, so two pasts meet at the cap."""
    policy = replace(
        policy_of(framework), growth_interval=1, max_scale=2.0**20, max_consecutive=2**62, stop_at=-math.inf
    )
    policy = replace(policy, raise_at_min=False, error_at_zero=False, error_at_inf=False, growth_factor=2.0)
    policy = replace(policy, next_growth_lag=0, min_scale=max(policy.min_scale, 2.0**-10), init_scale=2.0**10)
    ends = {run(policy, [*past, *[True] * 80]).scale[-1] for past in (first, second)}
    assert ends == {2.0**20}


# --- the scale of a tensor


AMAXES = st.lists(st.sampled_from([0.0, 1e-30, 0.3, 1.0, 3.5, 448.0, 1e30, 3e38, math.inf]), max_size=12)


def delayed_scales(amaxes, length, limit=448.0) -> list[float]:
    """TransformerEngine's kernel in words: the largest of the last amaxes; a step without one does not count."""
    history, scale, used = deque([0.0] * length, maxlen=length), np.float32(1), []
    for amax in amaxes:
        used.append(float(scale))
        if amax != 0:
            history.append(float(np.float32(amax)))
            largest = max(history)
            if 0 < largest < math.inf:
                with np.errstate(over="ignore"):
                    scale = min(np.float32(limit) / np.float32(largest), np.finfo(np.float32).max)
    return [*used, float(scale)]


@given(AMAXES, st.integers(1, 6))
@tries(0.4)
def test_a_tensor_scale_is_the_limit_over_the_largest_of_a_window(amaxes, length):
    policy, state = TensorScalePolicy(history_len=length), None
    state, used = initial_tensor_scale(policy), []
    for amax in amaxes:
        used.append(state.scale)
        state = advance_tensor_scale(policy, state, amax)
    assert [*used, state.scale] == delayed_scales(amaxes, length)
    if amaxes:
        kept = replay_tensor_scales(amaxes, [policy], scales=True).scales[0]
        assert kept.tolist() == used


@given(
    AMAXES, st.integers(1, 6), st.lists(st.integers(1, 3), min_size=12, max_size=12), st.lists(st.sampled_from(AGAIN))
)
@tries(0.3)
def test_a_tensor_scaler_lives_as_the_rule(amaxes, length, parts, ways):
    """Micro-batches count together, and a copy between any two of them goes on as if it were the first."""
    fresh = lambda: TensorScaler(TensorScalePolicy(history_len=length))  # noqa: E731
    scaler, ways, want = fresh(), deque(ways), delayed_scales(amaxes, length)
    for i, amax in enumerate(amaxes):
        assert float(scaler.scale) == want[i]
        for part in range(parts[i]):
            scaler.observe_(torch.tensor(amax if part == 0 else min(amax, 0.1)))
            if ways:
                scaler = again(scaler, ways.popleft(), fresh)
        update_all_([scaler])
        assert not scaler.pending
    assert float(scaler.scale) == want[-1]


@given(st.lists(st.sampled_from(sorted(TENSOR_SCALE_PRESETS)), min_size=2, max_size=4), AMAXES, st.integers(-3, 3))
@tries(0.4)
def test_tensor_scales_of_a_vector_are_those_of_each(names, amaxes, margin):
    policies = [replace(TENSOR_SCALE_PRESETS[name], history_len=i + 1, margin=margin) for i, name in enumerate(names)]
    vector = stack_tensor_scales(policies)
    together, alone = initial_tensor_scale(vector, "cpu"), [initial_tensor_scale(p) for p in policies]
    for amax in amaxes:
        together = advance_tensor_scale(vector, together, torch.tensor(amax))
        alone = [advance_tensor_scale(p, state, float(np.float32(amax))) for p, state in zip(policies, alone)]
        for got, state in zip(together.scale.tolist(), alone):
            assert got == state.scale or (math.isnan(got) and math.isnan(state.scale))
    assert pickle.loads(pickle.dumps(vector)) == vector
