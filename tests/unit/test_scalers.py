"""Loss scalers, managers, update cells: exact unscaling, no host read, every counter saved, bad input."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from frameworks import SINGLE, of, short
from hypothesis import example, given
from hypothesis import strategies as st
from support import assert_same, tries, without_a_wait

from mpkit.policies import ScalePolicy, initial, preset, run, stack, tensor_scale_preset
from mpkit.scalers import (
    DynamicLossScaleManager,
    DynamicLossScaler,
    DynamicLossScaleUpdateCell,
    FixedLossScaleManager,
    FixedLossScaleUpdateCell,
    LossScaler,
    PolicyLossScaler,
    Scale,
    StaticLossScaler,
    TensorScaler,
    all_finite,
    check_and_unscale_,
)
from mpkit.scalers.scaler import scale_of


def bits(x: torch.Tensor) -> list[int]:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]).tolist()


# --- check and unscale -----------------------------------------------------------------------------------------------


def sparse(indices: list[int], values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of five entries; an index may come twice."""
    return torch.sparse_coo_tensor([indices], torch.tensor(values, dtype=dtype), (5,), check_invariants=True)


def gradients() -> list[torch.Tensor | None]:
    """Several dtypes, a missing one, an empty one, a sparse one with one index twice."""
    twice = sparse([1, 1, 3], [4.0, 8.0, 16.0])
    return [torch.full((3, 2), 8.0), None, torch.full((4,), 6.0).half(), torch.empty(0), twice, torch.ones(2).double()]


def test_mixed_missing_sparse_and_empty_gradients():
    grads = gradients()
    assert check_and_unscale_(grads, torch.tensor(2.0)) == 0.0
    assert grads[0].unique().tolist() == [4.0]
    assert (grads[2].dtype, grads[2].unique().tolist()) == (torch.float16, [3.0])
    assert (grads[4].to_dense().tolist(), grads[5].tolist()) == ([0, 6, 0, 8, 0], [0.5, 0.5])


@pytest.mark.parametrize("where", [0, 2, 4, 5])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_bad_value_is_found_wherever_it_is(where, value):
    grads = gradients()
    target = grads[where]._values() if grads[where].is_sparse else grads[where].view(-1)
    target[1] = value
    assert check_and_unscale_(grads, torch.tensor(2.0)) == 1.0
    assert not all_finite([g for g in grads if g is None or not g.is_sparse] if where != 4 else grads)


def test_sparse_entries_whose_sum_overflows_are_found():
    twice = sparse([0, 0], [60000.0, 60000.0], torch.float16)
    assert not all_finite([twice])
    assert check_and_unscale_([twice], torch.tensor(4.0)) == 1.0


def test_a_reciprocal_that_is_not_finite_is_found():
    """Below 2^-128 torch's own kernel turns finite gradients into inf, at 0 into nan, and reports nothing."""
    for scale, dtype in [(2.0**-128, torch.float32), (0.0, torch.float32), (2.0**-17, torch.float16)]:
        assert check_and_unscale_([torch.ones(3, dtype=dtype)], torch.tensor(scale)) == 1.0
    assert check_and_unscale_([torch.ones(3, dtype=torch.float16)], torch.tensor(2.0**-15)) == 0.0
    assert check_and_unscale_([torch.ones(3), torch.ones(3).double()], torch.tensor(0.0)) == 1.0
    assert check_and_unscale_([torch.ones(3), torch.ones(3).half()], torch.tensor(2.0**-17)) == 1.0


def test_several_optimizers_add_to_one_verdict():
    scale, found = torch.tensor(2.0), None
    for value in (1.0, math.inf, 1.0):
        found = check_and_unscale_([torch.tensor([value])], scale, found)
    assert (found, found.dtype, found.shape) == (torch.tensor(1.0), torch.float32, ())
    assert check_and_unscale_([torch.tensor([1.0])], torch.tensor([2.0])).shape == ()  # a (1,) scale


def test_all_finite_of_large_sums_and_other_kinds():
    top = torch.finfo(torch.float32).max
    assert all_finite([torch.full((1000,), top), torch.full((1000,), torch.finfo(torch.bfloat16).max).bfloat16()])
    assert all_finite((torch.full((1000,), 65504.0).half(), torch.full((9,), 1.7e308, dtype=torch.float64)))
    assert all_finite([torch.arange(3), torch.empty(0), None, torch.tensor(True), torch.tensor(1j)])
    assert not all_finite([torch.tensor([1.0, complex(0, math.inf)])])
    assert not all_finite([torch.tensor([math.inf, -math.inf])])
    x = torch.ones(3, requires_grad=True)
    assert not all_finite([x / 0]).requires_grad


# --- the MindSpore classes -------------------------------------------------------------------------------------------


def test_a_cell_follows_its_scale_to_another_device():
    cell = DynamicLossScaleUpdateCell(8.0, 2, 3)
    cell(torch.tensor(8.0, device="meta"), torch.tensor(False, device="meta"))
    assert {cell.streak.device.type, cell.cur_iter.device.type} == {"meta"}


def test_managers_and_their_cells():
    assert isinstance(FixedLossScaleManager().get_update_cell(), FixedLossScaleUpdateCell)
    assert FixedLossScaleManager(64.0, False).get_update_cell() is None
    manager = DynamicLossScaleManager()
    manager.update_loss_scale(True)
    assert manager.get_update_cell() is not manager.get_update_cell()
    assert manager.get_update_cell().get_loss_scale() == 2.0**23
    overflow, scale = torch.tensor(True), torch.tensor([64.0])
    assert FixedLossScaleUpdateCell(64.0)(scale, overflow) is overflow
    assert scale == 64
    DynamicLossScaleUpdateCell(0.1, 0, 0)  # its arguments are not checked, as in MindSpore
    eager, live = DynamicLossScaleUpdateCell(8, 2, 0), torch.tensor(8.0)
    for _ in range(3):
        eager(live, torch.tensor(False))
    assert (live, eager.last_overflow_iter) == (64, 3)  # a window of 0 is always over


# --- any policy as a scaler ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [False, True])
def test_mpkit_policy_reports_its_floor_on_the_device(rule):
    policy = preset("mpkit", init_scale=4.0, min_scale=1.0, hysteresis=2 if rule else 1)
    scaler = PolicyLossScaler(policy)
    for _ in range(2):
        scaler.adjust(torch.tensor(False))
    scaler.check()
    for _ in range(4):
        scaler.adjust(torch.tensor(False))
    with pytest.raises(RuntimeError, match="mpkit stops here: overflow although the scale is at its floor"):
        scaler.check()
    scaler.check()  # told once


def layerwise(**parameters) -> PolicyLossScaler:
    return PolicyLossScaler(short("fairscale_layerwise", **parameters), remember=5)


POLICIES = st.builds(
    ScalePolicy,
    init_scale=st.sampled_from([2.0**16, 1000.0, 3.3, 2.0**127, 1e-38, 1.0]),
    growth_factor=st.sampled_from([2.0, 1.5, 3.0, 1.1, 0.5]),
    backoff_factor=st.sampled_from([0.5, 1.0, 0.8, 1 / 3]),
    growth_interval=st.sampled_from([1, 2, 3, 0, -1, 2**31]),
    min_scale=st.sampled_from([0.0, 1.0, 2.0**-126, 2.0**-127, 0.3, 6e-5]),
    max_scale=st.sampled_from([math.inf, 2.0**24, 1e38]),
    backoff_divisor=st.sampled_from([1.0, 2.0, 3.0, 0.5, 2.0**30]),
    growth_ge=st.booleans(),
    flush_subnormal=st.booleans(),
    raise_at_min=st.booleans(),
    hold_at_overflow=st.booleans(),
)


@given(policy=POLICIES, flags=st.lists(st.booleans(), min_size=5, max_size=40))
# growth has no floor, and a backoff by less than 1 no cap
@example(ScalePolicy(init_scale=1.0, growth_factor=0.5, growth_interval=1, min_scale=1.0), [True] * 5)
@example(ScalePolicy(init_scale=2.0**24, backoff_factor=1.0, backoff_divisor=0.5, max_scale=2.0**24), [False] * 5)
@example(ScalePolicy(backoff_factor=1.0, backoff_divisor=4.0), [False] * 5)
@example(ScalePolicy(init_scale=2.0**-125, hold_at_overflow=True, flush_subnormal=True), [False] * 5)
@tries(3)
def test_one_kernel_or_twenty_a_scaler_follows_the_rule(policy, flags):
    """A third of these policies are simple enough for torch's own kernel; all must do what Python numbers do."""
    scaler, want, got = PolicyLossScaler(policy, remember=0), run(policy, flags), []
    for flag in flags:
        scaler.adjust(torch.tensor(flag))
        got.append(float(scaler.scale_value))
    end = len(flags) if want.raised_at is None else want.raised_at
    assert got[:end] == want.scale[:end].tolist()
    assert (int(scaler.live.stopped) == 0) == (want.raised_at is None)


SCALERS = {
    "static": StaticLossScaler(64.0), "dynamic": DynamicLossScaler(1000, 3, 4),
    "fixed manager": FixedLossScaleManager(64.0), "manager": DynamicLossScaleManager(1000.0, 3, 4),
    "fixed cell": FixedLossScaleUpdateCell(64.0), "cell": DynamicLossScaleUpdateCell(1000.0, 3, 4),
    "policy": PolicyLossScaler(preset("deepspeed", init_scale=1000.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALERS)
def test_every_scaler_tells_its_policy(name):
    scaler, flags = SCALERS[name], [False, True, True, True, True, True, False]
    want, scale = run(scaler.policy, flags), torch.tensor(float(initial(scaler.policy).scale))
    assert [stepped(scaler, flag, scale) for flag in flags] == want.scale.tolist()


def test_a_floor_and_a_cap_are_numbers_of_the_scales_format():
    flags = [False] * 3 + [True] * 20
    for bits, kind in ((16, np.float16), (32, np.float32), (64, np.float64)):
        policy = ScalePolicy(init_scale=1.0, growth_interval=1, min_scale=0.3, max_scale=1000.1, scale_bits=bits)
        scales = run(policy, flags).scale
        assert (scales.min(), scales.max()) == (kind(0.3), kind(1000.1))
        assert (scales.astype(kind) == scales).all()


# --- resume ----------------------------------------------------------------------------------------------------------


def stepped(scaler, finite: bool, scale: torch.Tensor) -> float | list[float]:
    """One step of whatever it is; returns the scale after it. The second layer of two is always finite."""
    if isinstance(scaler, LossScaler):
        scaler.adjust(torch.tensor([finite, True]) if scaler.scale_value.dim() else torch.tensor(finite))
        return scaler.scale_value.tolist()
    if isinstance(scaler, torch.nn.Module):
        scaler(scale, torch.tensor(not finite))
        return float(scale)
    scaler.update_loss_scale(not finite)
    return scaler.get_loss_scale()


def test_state_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="belongs to another policy"):
        DynamicLossScaler(2, 2, 2).load_state_dict(StaticLossScaler(2).state_dict())
    with pytest.raises(ValueError, match="belongs to another policy"):
        PolicyLossScaler(preset("torch")).load_state_dict(PolicyLossScaler(preset("apex")).state_dict())
    with pytest.raises(ValueError, match="needs shape"):
        PolicyLossScaler(preset("torch")).load_state_dict(PolicyLossScaler(preset("torch"), 7).state_dict())
    fixed = StaticLossScaler(2)
    with pytest.raises(ValueError, match="belongs to another policy"):
        fixed.load_state_dict(PolicyLossScaler(ScalePolicy()).state_dict())
    assert not fixed.adjust(torch.tensor(False))


def test_an_update_cell_leaves_alone_what_it_cannot_move():
    cell, scale, flag = DynamicLossScaleUpdateCell(8.0, 2, 1), torch.tensor([8.0]), torch.tensor([True])
    for wrong in ((scale, torch.tensor([True, False])), (torch.ones(2), flag), (scale.double(), flag), (8.0, flag)):
        with pytest.raises((TypeError, ValueError), match="must be one f"):
            cell(*wrong)
    assert (scale.item(), int(cell.cur_iter), int(cell.streak)) == (8.0, 1, 0)


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        *((lambda v=v: StaticLossScaler(v), ValueError, r"in \[1, inf\]") for v in (0.5, 0, -math.inf)),
        (lambda: DynamicLossScaler(8, 2.0, 2), TypeError, "scale_factor must be an int"),
        (lambda: DynamicLossScaler(8, 0, 2), ValueError, "scale_factor must be at least 1"),
        (lambda: DynamicLossScaler(8, 2, 0), ValueError, "scale_window must be at least 1"),
        (lambda: DynamicLossScaler(8, 2, 2).adjust(True), TypeError, r"torch.tensor\(True\)"),
        (lambda: DynamicLossScaler(8, 2, 2).adjust(torch.tensor([True, False])), ValueError, "one flag per scale"),
        (lambda: all_finite(torch.ones(2)), TypeError, r"write \[x\]"),
        (lambda: all_finite([None]), ValueError, "no gradient"),
        (lambda: check_and_unscale_([None, None], torch.tensor(2.0)), ValueError, "Call backward"),
        (lambda: FixedLossScaleManager(0.5), ValueError, "loss_scale must be in"),
        (lambda: DynamicLossScaleManager(8, 0), ValueError, r"scale_factor must be in \(0, inf\]"),
        (lambda: DynamicLossScaleManager().update_loss_scale(torch.tensor(0.5)), TypeError, "overflow must be a bool"),
        (lambda: PolicyLossScaler(preset("torch"), -1), ValueError, "remember must be at least 0"),
        (lambda: PolicyLossScaler("torch"), TypeError, "make one with preset"),
        (lambda: layerwise().adjust(torch.tensor(True)), ValueError, r"one flag per scale, 2, got shape \(\)"),
        (lambda: layerwise().unscale([torch.ones(2)]), ValueError, "one entry for each, got"),
    ],
)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_growth_beyond_float32_reaches_its_cap():
    policy = ScalePolicy(init_scale=2.0**126, growth_factor=4.0, growth_interval=1, max_scale=2.0**127)
    scaler = PolicyLossScaler(policy)
    scaler.adjust(torch.tensor(True))
    assert scaler.scale_value.item() == run(policy, [True]).final.scale == 2.0**127


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_gpu_equals_cpu_without_a_wait():
    grads = [torch.randn(1000), torch.randn(1000).half(), torch.randn(10).bfloat16()]
    there = [g.cuda() for g in grads]
    assert check_and_unscale_([*grads, *(g.cuda() for g in grads)], torch.tensor(3.0, device="cuda")) == 0.0
    finite = [torch.tensor(flag, device="cuda") for flag in (True, True, False, True, False, True, True)]
    pairs = [(PolicyLossScaler(of(name)), PolicyLossScaler(of(name))) for name in SINGLE]
    for _, gpu in pairs:
        gpu.live.to_("cuda:0")
    scale = torch.tensor(3.0, device="cuda")
    with without_a_wait():
        check_and_unscale_(there, scale)
        verdict = all_finite(there)
        for flag in finite:
            for _, gpu in pairs:
                gpu.adjust(flag)
    assert verdict
    for a, b in zip(grads, there):
        assert bits(a) == bits(b.cpu())
    for flag in finite:
        for cpu, _ in pairs:
            cpu.adjust(flag.cpu())
    for cpu, gpu in pairs:
        assert cpu.history().scale.tolist() == gpu.history().scale.tolist()
    for bad in (math.inf, -math.inf, math.nan):
        assert not all_finite([torch.tensor([1.0, bad], device="cuda")])


def test_unscaling_refuses_what_it_cannot_divide():
    for bad in (torch.ones(2, dtype=torch.int64), torch.ones(2).to(torch.float8_e5m2), torch.ones(2) * 1j):
        fine = torch.full((2,), 8.0)
        with pytest.raises(TypeError, match=f"got {bad.dtype}"):
            check_and_unscale_([fine, bad], torch.tensor(4.0))
        assert fine.tolist() == [8.0, 8.0]
    with pytest.raises(TypeError, match="scale must be a tensor"):
        check_and_unscale_([torch.ones(2)], 4.0)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_all_finite_looks_into_compressed_and_8_bit_tensors():
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    assert all_finite([dense.to_sparse_csr(), dense.to(torch.float8_e5m2)])
    assert not all_finite([(dense * math.inf).nan_to_num(0.0, posinf=math.inf).to_sparse_csr()])


@pytest.mark.parametrize(
    "sent",
    [
        lambda scaler, shape: scaler.scale(tuple(torch.ones(2).to("meta")) if shape else torch.ones(()).to("meta")),
        lambda scaler, shape: scaler.adjust(torch.ones(shape, dtype=torch.bool, device="meta")),
    ],
    ids=["a loss", "a verdict"],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda: DynamicLossScaler(1024.0, 2, 3),
        lambda: PolicyLossScaler(preset("torch")),
        lambda: PolicyLossScaler(preset("deepspeed")),
        lambda: PolicyLossScaler(stack([ScalePolicy(), ScalePolicy(init_scale=2.0)])),
    ],
    ids=["dynamic", "fused", "by the rule", "several"],
)
def test_a_scaler_goes_where_the_loss_is_with_all_that_it_counts(make: Any, sent: Any) -> None:
    scaler = make()
    live = scaler.live
    sent(scaler, live.shape)
    held = [v for v in vars(live).values() if isinstance(v, torch.Tensor)]
    assert {t.device.type for t in [*held, *live.counts.values()]} == {"meta"}
    if live.shape:
        assert live.policy.init_scale.device.type == "meta"
        first, second = make().scale((torch.tensor(1.0), torch.ones(3)))
        assert (first.tolist(), second.tolist()) == (2.0**16, [2.0] * 3)


# --- a scale by itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [ScalePolicy(growth_interval=2), preset("deepspeed", scale_window=2)], ids=["kernel", "rule"]
)
def test_a_scale_moves_the_tensor_that_it_is_given(policy):
    """In place, a view too; what the backward pass starts from is always float32."""
    value = torch.full((3,), 64.0, dtype=torch.float64 if policy.scale_bits == 64 else torch.float32)
    scale = Scale(policy, value[1:2])
    seed, want = scale.seed, run(replace(policy, init_scale=64.0), [True, True, True, False, False]).scale
    for flag in (0.0, 0.0, 0.0, 1.0, 1.0):
        scale.advance_(torch.tensor(flag))
    assert value.tolist() == [64.0, want[-1], 64.0]
    assert scale.seed is seed
    assert (seed.dtype, seed.item()) == (torch.float32, want[-1])


def test_policies_of_a_vector_take_part_or_stay_as_they_are():
    scale = Scale(ScalePolicy(init_scale=torch.full((3,), 8.0, dtype=torch.float64), growth_interval=2))
    scale.advance_(torch.zeros(3))
    scale.advance_(torch.tensor([0.0, 1.0, 1.0]), part=torch.tensor([True, True, False]))
    assert (scale.value.tolist(), scale.counts["good"].tolist()) == ([16.0, 4.0, 8.0], [0, 0, 1])


def test_a_step_sees_one_kind_of_scale_whatever_it_is_given_and_a_subclass_is_heard():
    heard = []

    class Own(DynamicLossScaler):
        def adjust(self, grads_finite):
            heard.append(bool(grads_finite))
            return super().adjust(grads_finite)

    senses = [
        *(DynamicLossScaler(64, 2, 3), Own(64, 2, 3), DynamicLossScaleUpdateCell(64, 2, 3)),
        *(PolicyLossScaler(preset("deepspeed", init_scale=64.0, delayed_shift=1)), Scale(ScalePolicy(init_scale=64.0))),
    ]
    for sense in senses:
        scale = scale_of(sense, "cpu")
        scale.advance_(torch.ones(()))
        assert scale.seed == 32, sense
    assert heard == [False]
    assert scale_of(senses[0], "cpu") is senses[0].live
    fixed = scale_of(torch.tensor([64.0]), "cpu")
    fixed.advance_(torch.ones(()))
    assert fixed.seed.tolist() == [64.0]


def test_what_is_no_gradient_is_named_before_anything_changes():
    for grads, found, words in (
        (["x", torch.ones(1)], None, "each of grads must be a tensor or None, got str"),
        ([torch.ones(1)], torch.tensor(False), "found_inf must be the float32 result of an earlier call"),
    ):
        with pytest.raises(TypeError, match=words):
            check_and_unscale_(grads, torch.tensor(2.0), found)
        assert grads[-1].item() == 1.0


DAMAGED = [
    (lambda: DynamicLossScaler(1024, 2, 3), [{"policy": {"growth_factor": 0}}, {"scale": -4.0}]),
    (lambda: DynamicLossScaleManager(1024, 2, 3), [{"cur_iter": 0}, {"last_overflow_iter": -1}, {"scale": 0.5}]),
]


@pytest.mark.parametrize(("make", "wrong"), [(make, wrong) for make, each in DAMAGED for wrong in each])
def test_a_state_that_cannot_be_leaves_the_scaler_as_it_was(make, wrong):
    scaler = make()
    state = scaler.state_dict()
    state.get("state", state).update({"scale": 8.0, **wrong})
    with pytest.raises(ValueError, match=r"must be at|must be in|damaged"):
        scaler.load_state_dict(state)
    assert_same(scaler.state_dict(), make().state_dict())


def test_an_amax_is_one_number():
    scaler = TensorScaler(tensor_scale_preset("te_delayed", amax_history_len=2))
    scaler.observe_(torch.tensor([2.0]))
    assert scaler.amax.shape == ()
    with pytest.raises(TypeError, match="amax must be a tensor of one number"):
        scaler.observe_(2.0)


def test_a_scaler_shares_no_tensor_with_what_it_was_given():
    scaler = TensorScaler(tensor_scale_preset("te_delayed", amax_history_len=2))
    scaler.load_state_dict(state := scaler.state_dict())
    want = float(scaler.scale)
    state["scale"].fill_(7.0)
    assert float(scaler.scale) == want != 7.0
