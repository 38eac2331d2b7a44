"""Replay: the simulation equals the rule step by step, ceilings and flushed shares equal native casts."""

import dataclasses
import importlib
from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch
from test_golden_scalers import TRACES, finite_of, policy_of, scale_of

from mpkit.bench import replay as bench
from mpkit.data import data_dir
from mpkit.formats import E5M2, FP16
from mpkit.policies import FRAMEWORKS, ScalePolicy, advance, initial, preset, run, stack
from mpkit.record import Ranges, Trace, exponent_counts
from mpkit.replay import (
    CAVEAT,
    can_compile,
    ceilings,
    flushed,
    flushed_by_current_scale,
    replay,
    simulate,
    sweep,
    swept,
)
from mpkit.replay.table import _sample

simulating = importlib.import_module("mpkit.replay.simulate")  # the package has a function of that name
LONG = 1500  # steps of every trace that the quick test replays
GIVEN = {
    "jmp": {"loss_scale": 2.0**16, "period": 20},
    "paddle_static": {"incr_every_n_steps": 20},
    "mindspore_scaler": {"scale_value": 2.0**16, "scale_factor": 2, "scale_window": 20},
    "mindspore_cell": {"loss_scale_value": 2.0**16, "scale_factor": 3, "scale_window": 20},
}


def policies_for_tests() -> list[ScalePolicy]:
    found = []
    for framework in FRAMEWORKS:
        if framework != "fairscale_layerwise":  # a vector; its layers are torch's rule
            try:
                found.append(preset(framework, **GIVEN.get(framework, {})))
            except TypeError:  # a framework without defaults that this table does not know
                pytest.fail(f"give {framework} its parameters in GIVEN")
    return found + [swept(2.0**12, f, w) for f in (1.5, 2, 3) for w in (1, 7, 40)]


def wandering_ceilings(steps: int = 300) -> np.ndarray:
    generator = np.random.default_rng(3)
    tops = np.exp2(14 + np.cumsum(generator.normal(0, 0.3, steps)) + generator.normal(0, 1, steps))
    tops[::3] = np.exp2(np.round(np.log2(tops[::3])))  # a scale may lie exactly at the ceiling
    tops[generator.random(steps) < 0.02] = -1.0
    tops[generator.random(steps) < 0.02] = np.inf
    return tops


def by_hand(policy: ScalePolicy, tops: np.ndarray) -> dict:
    """The closed loop on Python numbers: which scale was used in each step, until the policy raises."""
    state, used, skipped, first, raised_at = initial(policy), [], 0, None, -1
    for i, top in enumerate(tops.tolist()):
        used.append(state.scale)
        fits = state.scale <= top
        skipped += not fits
        first = i if fits and first is None else first
        new, raised = advance(policy, state, fits)
        if raised:
            raised_at = i
            break
        state = new
    return {"used": used, "skipped": skipped, "first": len(used) if first is None else first, "raised_at": raised_at}


@pytest.mark.parametrize("policy", policies_for_tests(), ids=lambda p: f"{p.name}-{p.growth_interval}")
def test_alone_or_in_a_vector_equal_to_the_rule_on_numbers(policy):
    tops = wandering_ceilings()
    want = by_hand(policy, tops)
    for done, lane in ((simulate(tops, policy), 0), (all_policies(), policies_for_tests().index(policy))):
        count = len(want["used"])
        np.testing.assert_array_equal(done.sampled[:count, lane], want["used"])
        assert np.isnan(done.sampled[count:, lane]).all()
        assert (done.skipped[lane], done.first_good[lane]) == (want["skipped"], want["first"])
        assert done.raised_at[lane] == want["raised_at"]
        assert done.lowest[lane] == min(want["used"])


@cache
def all_policies():
    return simulate(wandering_ceilings(), stack(policies_for_tests()))


@cache
def golden(first: int, last: int) -> dict[str, list]:
    """Steps up to `last` of every golden trace longer than `first`, in one simulation for traces of about one length.

    Returns:  id -> (used scales, raised_at) per layer.
    """
    classes: dict[int, list] = {}
    for name, (file, trace) in TRACES.items():
        if trace["steps"] > first:
            policy, finite = policy_of(file, trace), finite_of(trace)[:last]
            columns = finite.T if policy.layers else [finite]
            lanes = classes.setdefault(len(finite).bit_length(), [])
            lanes += [(name, policy[i] if policy.layers else policy, c) for i, c in enumerate(columns)]
    found: dict[str, list] = {}
    for lanes in classes.values():
        _replay_together(lanes, found)
    return found


def _replay_together(lanes: list, found: dict[str, list]) -> None:
    tops = np.full((max(len(c) for _, _, c in lanes) + 1, len(lanes)), np.inf)
    for lane, (_, _, column) in enumerate(lanes):
        tops[: len(column), lane] = np.where(column, np.inf, -1.0)  # finite at any scale, or at none
    done = simulate(tops, stack(p for _, p, _ in lanes))
    for lane, (name, _, column) in enumerate(lanes):
        found.setdefault(name, []).append((done.sampled[: len(column) + 1, lane], done.raised_at[lane]))


def same_as_golden(name: str, lanes: list, last: int) -> None:
    trace = TRACES[name][1]
    after = scale_of(trace)[:last]
    for layer, (used, raised_at) in enumerate(lanes):
        want = after[:, layer] if after.ndim == 2 else after
        if trace["raised"] and trace["raised"]["step"] < last:
            assert raised_at == trace["raised"]["step"]
        np.testing.assert_array_equal(used[1 : len(want) + 1], want)


@pytest.mark.parametrize("name", TRACES)
def test_every_golden_trace_is_replayed(name):
    same_as_golden(name, golden(-1, LONG)[name], LONG)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, trace) in TRACES.items() if trace["steps"] > LONG])
def test_long_golden_traces_are_replayed_to_their_end(name):
    same_as_golden(name, golden(LONG, 10**9)[name], 10**9)


def test_float32_arithmetic_gives_what_float64_gives():
    tops = wandering_ceilings(400)
    fast = stack([swept(2.0**i, f, w) for i in (3, 16) for f in (1.5, 2, 3, 10) for w in (1, 7, 40)])
    slow = stack([*[fast[i] for i in range(24)], preset("deepspeed")])  # another precision switches the fast path off
    np.testing.assert_array_equal(simulate(tops, fast).sampled, simulate(tops, slow).sampled[:, :24])


def test_a_ceiling_between_two_float32_numbers_is_not_rounded_up():
    just_below = float(np.nextafter(1024.0, 0))  # rounds to 1024 in float32
    assert simulate([just_below], stack([swept(1024.0, 2, 5)] * 2)).skipped.tolist() == [1, 1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what torch.compile warns of is not ours
def test_compiled_equals_eager():
    if not can_compile():
        pytest.skip("torch.compile cannot build kernels on this machine")
    tops = wandering_ceilings(75)  # four full blocks and a rest
    vector = stack([swept(2.0**i, 2, w) for i in range(4, 16) for w in (3, 10)])
    fast, slow = (simulate(tops, vector, compiled=c, sample=(0, 5, 33, 70)) for c in (True, False))
    for key in ("sampled", "final", "lowest", "skipped", "first_good", "raised_at"):
        np.testing.assert_array_equal(getattr(fast, key), getattr(slow, key))


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that leaves everything as it is, and notes what it was given."""
    given = []
    monkeypatch.setattr(torch, "compile", lambda function: given.append(function) or function)
    simulating._compiled_block.cache_clear()
    yield given
    simulating._compiled_block.cache_clear()


def test_what_is_given_to_the_compiler_is_the_same_loop(compiler):
    tops = wandering_ceilings(43)  # two full blocks and a rest
    for vector in (stack([swept(2.0**i, 2, 3) for i in range(4, 22)]), stack([preset("mxnet")] * 18)):
        fast, slow = (simulate(tops, vector, compiled=c, sample=(0, 5, 15, 40)) for c in (True, False))
        for key in ("sampled", "final", "lowest", "skipped", "first_good", "raised_at"):
            np.testing.assert_array_equal(getattr(fast, key), getattr(slow, key))
    assert len(compiler) == 2  # a block that shows its scales, and one that does not


@pytest.mark.parametrize(("can", "policies", "compiles"), [(True, 20, True), (True, 19, False), (False, 20, False)])
def test_it_is_compiled_where_that_is_worth_it_and_can_be_done(monkeypatch, compiler, can, policies, compiles):
    monkeypatch.setattr(simulating, "_WORTH_COMPILING", 400)
    monkeypatch.setattr(simulating, "can_compile", lambda: can)
    simulate(np.full(20, 8.0), stack([swept(1.0, 2, 3)] * policies))
    assert bool(compiler) == compiles


def test_the_loops_of_the_benchmark_do_the_same():
    tops = bench._ceilings(3000)
    for i in (0, 7, 15, 24, 1234):
        policy = bench._policy(i)
        assert bench._tight(policy, tops) == bench._loop(policy, tops) == by_hand(policy, tops)["skipped"]


def test_simulate_refuses_what_it_cannot_step():
    with pytest.raises(ValueError, match="without NaN"):
        simulate([1.0, np.nan], preset("torch"))
    with pytest.raises(ValueError, match="steps, 2"):
        simulate(np.ones((4, 3)), stack([preset("torch"), preset("flax")]))


def trace_of(gradients: list[torch.Tensor], scale: float = 1.0, form: str = "fp16", **columns) -> Trace:
    """A trace of one parameter with these true gradients, as a recorder would see them at `scale`."""
    rows = [exponent_counts(g) for g in gradients]
    n = len(rows)
    ranges = Ranges(
        names=("w",),
        size=np.array([gradients[0].numel()]),
        step=np.arange(n),
        lowest=-126,
        counts=np.stack([c[1:255].numpy()[None] for c, _, _ in rows]).astype(np.uint32),
        zeros=np.array([[int(z)] for _, z, _ in rows]),
        nonfinite=np.array([[int(c[255])] for c, _, _ in rows]),
        largest=np.array([[float(m)] for _, _, m in rows], dtype=np.float32),
    )
    base = {
        "step": np.arange(n),
        "loss": np.ones(n),
        "scale": np.full(n, scale),
        "overflow": ranges.nonfinite[:, 0] > 0,
        "lr": np.full(n, 0.1),
        "grad_norm": np.ones(n),
        "seconds": np.arange(n) * 1.0,
    }
    return Trace(**(base | columns), gradients=ranges, format=form)


def test_the_ceiling_is_where_the_native_cast_overflows():
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(50, generator=generator) * 2.0**e for e in range(-20, 3)]
    tops = ceilings(trace_of(gradients, form="fp32"), "fp16")
    for g, top in zip(gradients, tops):
        for scale, fits in ((top, True), (top * (1 + 1e-9), False), (top / 2, True), (top * 2, False)):
            scaled = (g.double() * scale).numpy()
            with np.errstate(over="ignore"):
                assert np.isfinite(scaled.astype(np.float16)).all() == fits


@pytest.mark.parametrize("scale", [2.0**-8, 1.0, 2.0**7, 2.0**13])
def test_the_flushed_share_is_that_of_the_native_cast(scale):
    generator = torch.Generator().manual_seed(1)
    g = torch.randn(20_000, generator=generator) * torch.exp2(
        torch.empty(20_000).uniform_(-36, -10, generator=generator)
    )
    g[::5] = 0
    lost = ((g.double() * scale).half() == 0) & (g != 0)
    want = int(lost.sum()) / int((g != 0).sum())
    got = flushed(trace_of([g]), np.array([[scale]]))[0, 0]
    assert got == pytest.approx(want, abs=1e-12)


def test_another_format_has_another_ceiling():
    trace = trace_of([torch.tensor([1.0, 2.0**-10])])
    assert ceilings(trace, E5M2)[0] == pytest.approx(61440, rel=1e-12)  # max 57344 + half of 8192
    assert ceilings(trace, FP16)[0] == pytest.approx(65520, rel=1e-12)


def test_a_recorded_outcome_overrules_the_estimate():
    good, bad = torch.tensor([1.0]), torch.tensor([np.inf])
    trace = trace_of([good, bad, good], scale=2.0**10)
    assert (ceilings(trace) >= trace.scale).tolist() == [True, False, True]
    assert ceilings(trace)[1] == 2.0**9  # known: below 2**10; its neighbours say nothing
    lost = trace_of([good, bad, good], scale=2.0**10, loss=np.array([1, np.nan, 1]))
    assert ceilings(lost)[1] < 0  # no scale repairs a forward overflow


def test_the_neighbours_ceiling_is_taken_where_it_explains_the_overflow():
    g = torch.tensor([100.0])
    trace = trace_of([g, torch.tensor([np.inf]), g], scale=2.0**10, overflow=np.array([False, True, False]))
    clean = ceilings(trace)[0]
    assert clean == 2.0**10  # 655.2 by the numbers, but the step was fine at 1024
    trace = trace_of([g, torch.tensor([np.inf]), g], scale=2.0**9)
    hotter = Trace(**(vars(trace) | {"scale": np.array([2.0**9, 2.0**15, 2.0**9])}))
    assert ceilings(hotter)[1] == pytest.approx(655.2)


def test_of_a_ceiling_at_the_scale_that_overflowed_half_is_taken():
    g = torch.tensor(
        [65520 / 2.0**10]
    )  # its ceiling is 2**10 and a little less, its neighbours' 2**10 by interpolation
    trace = trace_of([g, torch.tensor([np.inf]), g], scale=2.0**10, overflow=np.array([False, True, False]))
    assert ceilings(trace)[1] == 2.0**9


def test_replay_ranks_by_what_training_lost_and_says_what_it_cannot_know():
    generator = torch.Generator().manual_seed(2)
    gradients = [torch.randn(200, generator=generator) * 2.0**-14 for _ in range(60)]
    policies = {
        "good": swept(2.0**20, 2, 1000),
        "too high": ScalePolicy.fixed(2.0**40),
        "too low": ScalePolicy.fixed(2.0**-8),
    }
    frame = replay(trace_of(gradients), policies)
    assert frame["policy"].tolist() == ["good", "too low", "too high"]
    row = frame.set_index("policy")
    assert row.loc["good", "skipped"] == 0
    assert row.loc["too high", "skipped"] == 60
    assert row["skipped_share"].to_dict() == {"good": 0.0, "too low": 0.0, "too high": 1.0}
    assert row.loc["too high", "collapsed"]
    assert "skipped" in row.loc["too high", "why"]
    assert "below the ceiling" in row.loc["too low", "why"]
    assert row.loc["good", "scale"].shape == (60,)
    assert frame.attrs["caveat"] == CAVEAT
    assert 0 < row.loc["good", "headroom"] < 10


def test_headroom_is_the_mean_distance_to_the_ceiling():
    frame = replay(trace_of([torch.tensor([1.0]), torch.tensor([4.0])]), swept(2.0**4, 2, 1000))
    want = (np.log2(65520 / 16) + np.log2(65520 / 4 / 16)) / 2
    assert frame["headroom"][0] == pytest.approx(want)


def test_replay_takes_a_policy_a_list_a_vector_or_a_mapping():
    trace = trace_of([torch.ones(3)] * 5)
    one, two = swept(8.0, 2, 3), swept(4.0, 2, 3)
    assert len(replay(trace, one)) == 1
    assert len(replay(trace, [one, two])) == len(replay(trace, stack([one, two]))) == 2
    assert set(replay(trace, {"a": one, "b": two})["policy"]) == {"a", "b"}


def test_sweep_is_replay_of_every_combination():
    generator = torch.Generator().manual_seed(4)
    trace = trace_of([torch.randn(100, generator=generator) * 2.0**-5 for _ in range(80)])
    frame = sweep(trace, init=[2.0**8, 2.0**24], factor=[2, 4], window=[5, 50])
    assert len(frame) == 8
    changed = dataclasses.replace(trace, scale=np.linspace(8.0, 16.0, len(trace)))
    assert sweep(changed, factor=[2], window=[5])["init"].tolist() == [8.0]  # the scale that the trace began with
    for _, row in frame.iterrows():
        alone = replay(trace, swept(row["init"], row["factor"], row["window"])).iloc[0]
        for key in ("skipped", "first_good", "headroom", "flushed", "lost", "final_scale", "collapsed"):
            assert row[key] == pytest.approx(alone[key], rel=1e-12)
    assert (frame["lost"].diff().dropna() >= 0).all()
    with pytest.raises(ValueError, match="above 1"):
        sweep(trace, factor=1.0)


def test_a_policy_that_raises_is_collapsed_with_its_own_words():
    trace = trace_of([torch.full((4,), np.inf)] * 40, scale=1.0, loss=np.full(40, np.nan))
    frame = replay(trace, {"deepspeed": preset("deepspeed"), "torch": preset("torch")})
    row = frame.set_index("policy").loc["deepspeed"]
    assert row["collapsed"]
    assert row["why"].startswith(f"stopped at step {run(preset('deepspeed'), [False] * 40).raised_at}")
    assert frame["collapsed"].all()


def test_what_cannot_be_replayed_is_refused_in_words():
    trace = trace_of([torch.ones(3)] * 4)
    for policies in ("torch", None, 3):
        with pytest.raises(TypeError, match="policies are one ScalePolicy"):
            replay(trace, policies)
    with pytest.raises(TypeError, match="replay needs a Trace"):
        replay("trace.npz", preset("torch"))
    with pytest.raises(ValueError, match="no steps"):
        replay(trace.before(0), preset("torch"))
    with pytest.raises(ValueError, match="whole windows"):
        sweep(trace, window=2.5)
    with pytest.raises(ValueError, match="at least one init"):
        sweep(trace, init=[])


def test_a_long_trace_is_looked_at_from_its_first_to_its_last_step(monkeypatch):
    trace = trace_of([torch.full((4,), 2.0**-k) for k in range(40)])
    monkeypatch.setattr("mpkit.replay.table._SAMPLES", 4)
    assert _sample(trace).tolist() == [0, 13, 26, 39]
    monkeypatch.setattr("mpkit.replay.table._SAMPLES", 40)
    assert _sample(trace).tolist() == list(range(40))


def test_steps_without_a_ceiling_do_not_count_for_the_headroom():
    """A gradient of zeros fits under any scale: its distance to a ceiling is infinite and says nothing."""
    trace = trace_of([torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([2.0])])
    row = replay(trace, preset("torch", init_scale=2.0**10, growth_interval=100)).iloc[0]
    tops = ceilings(trace)
    assert np.isinf(tops[1])
    assert row["headroom"] == pytest.approx(np.mean(np.log2(tops[[0, 2]] / 2.0**10)))


def test_a_policy_that_raises_at_once_has_skipped_all_it_ran():
    trace = trace_of([torch.tensor([torch.inf])] * 3)
    policy = preset("mpkit", init_scale=1.0, min_scale=1.0)
    row = replay(trace, policy).iloc[0]
    assert (row["skipped"], row["skipped_share"], row["lost"]) == (1, 1.0, 1.0)


def test_no_sampled_step_is_an_empty_table():
    done = simulate(np.array([1.0, 2.0]), stack([preset("torch"), preset("apex")]), sample=[])
    assert done.sampled.shape == (0, 2)


@pytest.mark.parametrize(("steps", "policies", "kept"), [(40, 100_000, True), (41, 97_561, False)])
def test_every_scale_is_kept_of_up_to_four_million_policy_steps(monkeypatch, steps, policies, kept):
    asked = {}

    def simulated(tops, vector, *, sample, **_):
        asked.update(sample=sample, shape=vector.shape)
        raise InterruptedError

    monkeypatch.setattr("mpkit.replay.table.simulate", simulated)
    vector = dataclasses.replace(swept(1.0, 2, 9), init_scale=torch.ones(policies))
    with pytest.raises(InterruptedError):
        replay(trace_of([torch.ones(1)] * steps), vector)
    assert asked["shape"] == (policies,)
    assert (asked["sample"] is None) == kept


def test_a_tensor_of_zeros_or_with_a_bad_value_has_no_scale_of_its_own():
    part = trace_of([torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1e-6]), torch.tensor([1.0, np.inf])]).gradients
    assert flushed_by_current_scale(part, E5M2)[:, 0].tolist() == pytest.approx([np.nan, 0.0, np.nan], nan_ok=True)


def test_what_is_lost_is_what_is_left_of_applied_steps_and_of_their_values():
    """A share of the steps is skipped, and of the others a share of the values is 0: (1 - s)(1 - f) arrives."""
    rows = [torch.tensor([1.0, 2.0**-30, 2.0**-36])] * 10
    for step in (4, 7):
        rows[step] = torch.tensor([2.0**10, 1.0, 2.0**-36])
    row = replay(trace_of(rows), swept(2.0**10, 2, 1000), fmt="fp16").iloc[0]
    assert 0 < row["skipped_share"] < 1
    assert 0 < row["flushed"] < 1
    arrives = (1 - row["skipped_share"]) * (1 - row["flushed"])
    assert row["lost"] == pytest.approx(1 - arrives, rel=1e-15)


def test_own_ceilings_take_the_place_of_the_recorded_ones():
    trace = Trace.load(data_dir() / "traces" / "mlp_digits.npz")
    policy = swept(2.0**16, 2, 50)
    as_recorded = replay(trace, policy)
    pd.testing.assert_frame_equal(replay(trace, policy, tops=ceilings(trace)), as_recorded)
    low = replay(trace, policy, tops=np.full(len(trace), 2.0**10))
    assert low["first_good"][0] == 6
    assert low["headroom"][0] < as_recorded["headroom"][0]
    with pytest.raises(ValueError, match=r"one ceiling for each of the 400 steps, got shape \(3,\)"):
        replay(trace, policy, tops=np.ones(3))
    with pytest.raises(TypeError, match="tops must be an array with the ceiling of each step"):
        replay(trace, policy, tops=[1.0])
