"""Every recorded loss-scale trace of every framework: by the Python run, by the vector rule, by the classes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from support import array, golden_data

from mpkit.policies import ScalePolicy, ScaleState, advance, initial, preset, run, stack
from mpkit.scalers import (
    DynamicLossScaleManager,
    DynamicLossScaler,
    DynamicLossScaleUpdateCell,
    PolicyLossScaler,
    StaticLossScaler,
    all_finite,
    check_and_unscale_,
)

FRAMEWORK_OF = {
    "apex.amp.scaler.LossScaler": "apex",
    "colossalai.amp.naive_amp.grad_scaler.DynamicGradScaler": "colossalai",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": "deepspeed",
    "fairscale.optim.layerwise_gradient_scaler.LayerwiseGradientScaler": "fairscale_layerwise",
    "fairseq.optim.dynamic_loss_scaler.DynamicLossScaler": "fairseq",
    "flax.training.dynamic_scale.DynamicScale": "flax",
    "jmp.DynamicLossScale": "jmp",
    "keras.optimizers.LossScaleOptimizer": "keras3",
    "megatron.core.optimizer.grad_scaler.DynamicGradScaler": "megatron",
    "mxnet.contrib.amp.loss_scaler.LossScaler": "mxnet",
    "paddle.amp.GradScaler": "paddle",
    "update_loss_scaling operator": "paddle_static",
    "tf.compat.v1.mixed_precision.experimental.DynamicLossScale": "tf_v1",
    "tf_keras.mixed_precision.LossScaleOptimizer": "tf_keras",
    "torch.amp.GradScaler": "torch",
}
ERROR_OF = {
    "at its floor": "Exception",
    "sank": "FloatingPointError",
    "is zero": "ZeroDivisionError",
    "is infinite": "OverflowError",
}
COUNTER = {
    "unskipped": 0,
    "growth_step": 0,
    "growth_tracker": 0,
    "step_counter": 0,
    "dynamic_counter": 0,
    "good_steps": 0,
    "incr_count": 0,
    "counter": 0,
    "fin_steps": 1,  # flax counts its lag inside
}
LONG = 3000  # steps; longer traces are cut into pieces that are stepped side by side
PIECE = 500


def policy_of(file: dict[str, Any], trace: dict[str, Any]) -> ScalePolicy:
    implementation = file["implementation"]
    framework = FRAMEWORK_OF[implementation["class"]]
    jit = {"jit": "jax.jit" in implementation["driven"]} if framework == "jmp" else {}
    return preset(framework, **trace["params"], **jit)


def decoded(rle: list[list[Any]]) -> np.ndarray:
    return np.array([float.fromhex(value) for count, value in rle for _ in range(count)])


def flags(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8) == ord(".")


def named_traces() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Every trace of every file; an id that occurs again gets a number."""
    traces: dict[str, Any] = {}
    for file in golden_data("scaler-zoo", "implementation", "traces"):
        for trace in file["traces"]:
            name = f"{file['file']}/{trace['id']}"
            name = name if name not in traces else f"{name}#{len(traces)}"
            traces[name] = file, trace
    return traces


TRACES = named_traces()


def finite_of(trace: dict[str, Any]) -> np.ndarray:
    """(steps,), or (steps, layers) of a layer-wise trace."""
    if "flags_per_layer" not in trace:
        return flags(trace["flags"])
    return np.stack([flags(trace["flags_per_layer"][name]) for name in trace["params"]["layer_scale_dict"]], 1)


def scale_of(trace: dict[str, Any]) -> np.ndarray:
    if "flags_per_layer" not in trace:
        return decoded(trace["scale_after_rle"])
    per_layer = trace["scale_after_rle_per_layer"]
    return np.stack([decoded(per_layer[name]) for name in trace["params"]["layer_scale_dict"]], 1)


@pytest.mark.parametrize("name", TRACES)
def test_python_run_equals_the_framework(name):
    file, trace = TRACES[name]
    policy = policy_of(file, trace)

    history = run(policy, finite_of(trace))

    np.testing.assert_array_equal(history.scale, scale_of(trace))
    if policy.layers:  # layers outside the dictionary overflow too, and skip the step as well
        assert set(np.flatnonzero(history.skipped)) <= set(trace["skipped_steps"])
        assert trace["skipped_steps"] == np.flatnonzero(~flags(trace["flags"])).tolist()
        return
    assert initial(policy).scale == float.fromhex(trace["init_scale"])
    if raised := trace["raised"]:
        assert history.raised_at == raised["step"]
        assert [kind for words, kind in ERROR_OF.items() if words in history.raised] == [raised["type"]]
        assert history.final.scale == float.fromhex(raised["scale_after_raise"])
    else:
        assert (history.raised_at, history.raised) == (None, "")
        for key, offset in COUNTER.items():
            assert trace.get("final_state", {}).get(key, history.final.good + offset) == history.final.good + offset
    if "skipped_steps_per_optimizer" in trace:  # one scaler, several optimizers: each skips on its own gradients
        for text, skipped in zip(trace["flags_per_optimizer"], trace["skipped_steps_per_optimizer"]):
            assert np.flatnonzero(~flags(text)).tolist() == skipped
    else:
        assert np.flatnonzero(history.skipped).tolist() == trace["skipped_steps"]


def lanes_of(long: bool) -> list[tuple[str, ScalePolicy, np.ndarray]]:
    """(id, policy, flags) of every trace of one length class, layer by layer."""
    lanes = []
    for name, (file, trace) in TRACES.items():
        if (trace["steps"] > LONG) == long:
            policy, finite = policy_of(file, trace), finite_of(trace)
            columns = finite.T if policy.layers else [finite]
            lanes += [(name, policy[i] if policy.layers else policy, column) for i, column in enumerate(columns)]
    return lanes


@cache
def short_ones() -> dict[str, list[tuple[np.ndarray, int]]]:
    """All of them as one vector of policies: id -> scales and step that raised, per layer."""
    lanes = lanes_of(long=False)
    steps = np.ones((max(len(column) for _, _, column in lanes), len(lanes)), dtype=bool)
    for i, (_, _, column) in enumerate(lanes):
        steps[: len(column), i] = column
    history = run(stack(policy for _, policy, _ in lanes), steps)
    results: dict[str, Any] = {}
    for i, (name, _, column) in enumerate(lanes):
        results.setdefault(name, []).append((history.scale[: len(column), i], int(history.raised_at[i])))
    return results


@cache
def long_ones() -> dict[str, list[tuple[np.ndarray, int]]]:
    """The same, with all pieces of all traces side by side; a piece starts where the rule on numbers was by then."""
    starts, owners = [], []
    lanes = lanes_of(long=True)
    for lane, (_, policy, column) in enumerate(lanes):
        state: Any = initial(policy)
        for step, flag in enumerate(column.tolist()):
            if step % PIECE == 0:
                starts.append(state)
                owners.append((lane, step))
            state, raised = advance(policy, state, flag)
            if raised:
                break
    vector = stack(lanes[lane][1] for lane, _ in owners)
    state = ScaleState(*(torch.tensor(v, dtype=old.dtype) for v, old in zip(zip(*starts), initial(vector))))
    flags = np.ones((PIECE, len(owners)), dtype=bool)
    for i, (lane, step) in enumerate(owners):
        piece = lanes[lane][2][step : step + PIECE]
        flags[: len(piece), i] = piece
    scales, codes = np.empty(flags.shape), np.zeros(flags.shape)
    for step, flag in enumerate(torch.from_numpy(flags).unbind()):
        state, raised = advance(vector, state, flag)
        scales[step], codes[step] = state.scale, raised
    whole = [np.full(len(column), np.nan) for _, _, column in lanes]
    ends = [-1] * len(lanes)
    for i, (lane, step) in enumerate(owners):
        stopped = np.flatnonzero(codes[: len(whole[lane]) - step, i])
        count = stopped[0] if len(stopped) else PIECE
        whole[lane][step : step + count] = scales[:count, i][: len(whole[lane]) - step]
        if len(stopped) and ends[lane] < 0:
            ends[lane] = step + int(count)
    results: dict[str, Any] = {}
    for (name, _, _), scale, end in zip(lanes, whole, ends):
        results.setdefault(name, []).append((scale, end))
    return results


@pytest.mark.parametrize("name", TRACES)
def test_vector_rule_equals_the_framework(name):
    trace = TRACES[name][1]
    lanes = (long_ones() if trace["steps"] > LONG else short_ones())[name]
    want = scale_of(trace).reshape(trace["steps"], -1).T
    for (scale, raised_at), expected in zip(lanes, want):
        np.testing.assert_array_equal(scale[: trace["steps"]], expected)
        if trace["raised"]:
            assert raised_at == trace["raised"]["step"]
            assert np.isnan(scale[raised_at:]).all()
        else:
            assert raised_at == -1 or raised_at >= trace["steps"]


SHORT = [name for name, (_, t) in TRACES.items() if t["steps"] <= 300 or "flags_per_layer" in t]


@pytest.mark.parametrize("name", SHORT)
def test_scaler_on_tensors_equals_the_framework(name):
    file, trace = TRACES[name]
    scaler = PolicyLossScaler(policy_of(file, trace))
    finite, seen = torch.from_numpy(finite_of(trace).copy()), []
    for flag in finite.unbind():
        scaler.adjust(flag)
        seen.append(scaler.scale_value.clone())
    np.testing.assert_array_equal(torch.stack(seen).double().numpy()[: trace["steps"]], scale_of(trace))
    if trace["raised"]:
        with pytest.raises(RuntimeError, match="stops here"):
            scaler.check()
    else:
        scaler.check()


# ---------------------------------------------------------------------------------------------------------------------
# MindSpore's three rules and its unscaling


RULE_FILES = golden_data("mindspore-amp", "cases", "manager_runtime_error")
RULES = [case for file in RULE_FILES for case in file["cases"]]
RULE_IDS = [f"{file['file']}-{case['name']}" for file in RULE_FILES for case in file["cases"]]


def finite_flags(case: dict[str, Any]) -> np.ndarray:
    return np.array([bit == "0" for bit in case["overflow"]])


def numbers(values: list[Any]) -> np.ndarray:
    return np.array([float(value) for value in values])


@pytest.mark.parametrize("case", RULES, ids=RULE_IDS)
@pytest.mark.parametrize("which", ["loss_scaler", "update_cell", "manager"])
def test_mindspore_rules_as_presets_one_and_vector(case, which):
    init, factor, window = case["init"], case["factor"], case["window"]
    policy = {
        "loss_scaler": lambda: preset("mindspore_scaler", scale_value=init, scale_factor=factor, scale_window=window),
        "update_cell": lambda: preset(
            "mindspore_cell", loss_scale_value=init, scale_factor=factor, scale_window=window
        ),
        "manager": lambda: preset("mindspore_manager", init_loss_scale=init, scale_factor=factor, scale_window=window),
    }[which]()
    want = numbers(case[which]["scale"])
    np.testing.assert_array_equal(run(policy, finite_flags(case)).scale, want)
    other = preset("deepspeed")  # a lane of another kind switches every part of the rule on
    np.testing.assert_array_equal(run(stack([policy, other]), finite_flags(case)).scale[:, 0], want)


@pytest.mark.parametrize("case", RULES, ids=RULE_IDS)
def test_mindspore_loss_scaler_class(case):
    scaler, seen = DynamicLossScaler(case["init"], case["factor"], case["window"]), []
    for finite in torch.tensor(finite_flags(case)).unbind():
        assert scaler.adjust(finite) is True
        seen.append((float(scaler.scale_value), int(scaler.counter)))
    want = case["loss_scaler"]
    assert seen == list(zip(numbers(want["scale"]).tolist(), want["counter"]))
    assert (scaler.scale_value.dtype, scaler.counter.dtype) == (torch.float32, torch.int32)


@pytest.mark.parametrize("case", RULES, ids=RULE_IDS)
def test_mindspore_update_cell_class(case):
    scale = torch.tensor(case["init"], dtype=torch.float32)
    cell, seen = DynamicLossScaleUpdateCell(case["init"], case["factor"], case["window"]), []
    for overflow in torch.tensor(~finite_flags(case)).unbind():
        assert cell(scale, overflow) is overflow
        seen.append((float(scale), int(cell.cur_iter), int(cell.last_overflow_iter)))
    want = case["update_cell"]
    assert seen == list(zip(numbers(want["scale"]).tolist(), want["cur_iter"], want["last_overflow_iter"]))
    assert cell.get_loss_scale() == case["init"]


@pytest.mark.parametrize("case", RULES, ids=RULE_IDS)
def test_mindspore_manager_class(case):
    manager, seen = DynamicLossScaleManager(case["init"], case["factor"], case["window"]), []
    for overflow in (~finite_flags(case)).tolist():
        manager.update_loss_scale(overflow)
        seen.append((manager.get_loss_scale(), manager.cur_iter, manager.last_overflow_iter, manager.bad_step))
    want = case["manager"]
    columns = (numbers(want["scale"]).tolist(), want["cur_iter"], want["last_overflow_iter"], want["bad_step"])
    assert seen == list(zip(*columns))


@pytest.mark.parametrize(
    "case", [file["manager_runtime_error"] for file in RULE_FILES], ids=[f["file"] for f in RULE_FILES]
)
def test_mindspore_manager_gives_up_after_a_thousand_overflows_in_a_row(case):
    manager = DynamicLossScaleManager(case["init"], case["factor"], case["window"])
    for _ in range(case["raised_at_call_index"]):
        manager.update_loss_scale(True)
    with pytest.raises(RuntimeError, match="1001 overflows in a row"):
        manager.update_loss_scale(True)
    then = (manager.bad_step, manager.get_loss_scale(), manager.cur_iter)
    assert then == (case["bad_step_then"], case["scale_then"], case["cur_iter_then"])
    with pytest.raises(RuntimeError, match="1002 overflows in a row"):
        manager.update_loss_scale(True)
    manager.update_loss_scale(False)
    assert manager.bad_step == 0


UNSCALE_FILES = golden_data("mindspore-amp", "float_cases", "int32_case", "all_finite")
UNSCALE = {
    f"{file['file']}-{i}-{case['dtype']}-{case['scale_value']}": case
    for file in UNSCALE_FILES
    for i, case in enumerate(file["float_cases"])
}
BITS = {"float16": np.uint16, "float32": np.uint32, "float64": np.uint64}


def pattern(case: dict[str, Any], key: str) -> torch.Tensor:
    words = np.array([int(word, 16) for word in case[key]], dtype=BITS[case["dtype"]])
    return torch.from_numpy(words.view(case["dtype"]))


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert torch.equal(got.isnan(), want.isnan())
    number = ~want.isnan()
    torch.testing.assert_close(got[number], want[number], rtol=0, atol=0)
    assert torch.equal(got[number].signbit(), want[number].signbit())


@pytest.mark.parametrize("case", UNSCALE.values(), ids=[*UNSCALE])
def test_scale_and_unscale_bit_for_bit(case):
    scaler, x = StaticLossScaler(case["scale_value"]), pattern(case, "x")
    assert_same_bits(scaler.scale(x), pattern(case, "scaled"))
    assert_same_bits(scaler.unscale((x,))[0], pattern(case, "unscaled"))
    grads = [x.clone(), None, x.clone()]
    assert check_and_unscale_(grads, scaler.scale_value) == 1.0  # the patterns end in inf and nan
    for grad in (grads[0], grads[2]):
        assert_same_bits(grad, pattern(case, "unscaled"))
    finite = x[x.isfinite()].clone()
    assert check_and_unscale_([finite], scaler.scale_value, uniform=True) == 0.0
    assert_same_bits(finite, pattern(case, "unscaled")[x.isfinite()])


@pytest.mark.parametrize("case", [f["int32_case"] for f in UNSCALE_FILES], ids=[f["file"] for f in UNSCALE_FILES])
def test_scale_and_unscale_integers(case):
    scaler, x = StaticLossScaler(case["scale_value"]), torch.tensor(case["x"], dtype=torch.int32)
    assert scaler.scale(x).tolist() == case["scaled"]
    assert scaler.unscale(x).tolist() == case["unscaled"]


FINITE = {f"{file['file']}-{case['name']}": case for file in UNSCALE_FILES for case in file["all_finite"]}


@pytest.mark.parametrize("case", FINITE.values(), ids=[*FINITE])
def test_all_finite(case):
    tensors = [torch.from_numpy(array(obj)) for obj in case["inputs"]]
    result = all_finite(tensors)
    assert bool(result) == case["result"]
    assert (result.dtype, list(result.shape)) == (getattr(torch, case["result_dtype"].lower()), case["result_shape"])


def test_torchs_preset_has_the_defaults_of_torchs_scaler():
    own, theirs = preset("torch"), torch.amp.GradScaler("cpu")
    assert (own.growth_factor, own.backoff_factor) == (theirs.get_growth_factor(), theirs.get_backoff_factor())
    assert (own.init_scale, own.growth_interval) == (theirs.get_scale(), theirs.get_growth_interval())
