"""Block formats, bit for bit those of torchao, TransformerEngine, DeepGEMM, gfloat and microxcaling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import archives, floats, golden_data
from torch import Tensor

from mpkit.blocks import (
    E8M0,
    FP8_1X128,
    FP8_128X128,
    MXINT8,
    NVFP4,
    BlockFormat,
    hadamard,
    quantize_blocks,
    round_with_bits,
)
from mpkit.formats import E2M1, E2M3, E3M2, E4M3FN, E5M2, FP32
from mpkit.optimizers import stochastic_bf16
from mpkit.policies import (
    TensorScalePolicy,
    advance,
    initial_tensor_scale,
    stack_tensor_scales,
    tensor_scale_preset,
)

ELEMENT = {"e4m3": E4M3FN, "e5m2": E5M2, "e3m2": E3M2, "e2m3": E2M3, "e2m1": E2M1}


def cases(*kinds: str, key: str = "kind", keys: tuple[str, ...] = ("cases",)) -> dict[str, tuple[dict[str, Any], Any]]:
    """Test name -> (case, arrays) of the cases of these kinds in every archive."""
    return {
        f"{meta['file']}.{case['id']}.{case.get('name', case.get('recipe', ''))}": (case, z)
        for meta, z in archives(*keys)
        for case in meta["cases"]
        if case.get(key) in kinds
    }


def same(got: Tensor, want: Any) -> None:
    """Equal bit for bit, a NaN equal to any NaN; `want` holds float32 patterns, bytes or values."""
    want = floats(want) if isinstance(want, np.ndarray) and want.dtype == np.uint32 else torch.as_tensor(want)
    got = got.float() if want.dtype == torch.float32 else got
    assert got.shape == want.shape
    if got.is_floating_point():
        both = got.isnan() & want.isnan()
        got = got.contiguous().view(torch.int32).masked_fill(both, 0)
        want = want.contiguous().view(torch.int32).masked_fill(both, 0)
    torch.testing.assert_close(got, want.to(got.dtype), rtol=0, atol=0)


MX = [
    (f"{meta['file']}.{element}.{mode}", element, mode, z)
    for meta, z in archives("modes", "agree_bits")
    for element in meta["formats"]
    for mode in meta["modes"]
]


@pytest.mark.parametrize(("element", "mode", "z"), [case[1:] for case in MX], ids=[case[0] for case in MX])
def test_mx_blocks(element, mode, z):
    q = quantize_blocks(floats(z["x"]), BlockFormat("mx", ELEMENT[element], scale_rounding=mode))
    same(q.scale_codes()[:, 0], z[f"{element}.{mode}.scale"])
    same(q.dequantize(), z[f"{element}.{mode}.decoded"])


INT8 = [
    pytest.param(z, id=meta["file"]) for meta, z in archives("modes", "agree_bits") if "int8.floor.scale" in z.files
]


@pytest.mark.parametrize("z", INT8)
def test_mxint8(z):
    q, keep = quantize_blocks(floats(z["x"]), MXINT8), z["int8.floor.keep"].astype(bool)
    same(q.scale_codes()[:, 0][keep], z["int8.floor.scale"][keep])
    same(q.dequantize()[keep], z["int8.floor.decoded"][keep])


EDGES = {
    f"{file['file']}.{case['name']}": case
    for file in golden_data("recipes", "cases")
    for case in file["cases"]
    if "results" in case
}


@pytest.mark.parametrize("name", EDGES)
def test_mx_edges_are_those_of_torchao_main(name):
    case = EDGES[name]
    x = torch.zeros(32)
    given = floats(np.array([int(v, 16) for v in case["x"]], dtype=np.uint32))
    x[: len(given)] = given
    for key, oracles in case["results"].items():
        element, mode = key.split(".")
        byte, decoded = oracles["torchao main"]
        q = quantize_blocks(x, BlockFormat("mx", ELEMENT[element], scale_rounding=mode))
        assert q.scale_codes().tolist() == [byte], key
        same(q.dequantize()[: len(decoded)], np.array([int(v, 16) for v in decoded], dtype=np.uint32))


TE4 = cases("te", "te_4over6")


@pytest.mark.parametrize("name", TE4)
def test_nvfp4_of_transformer_engine(name):
    case, z = TE4[name]
    key = case["id"]
    x = floats(z[f"{key}.x"]).to(getattr(torch, case.get("dtype", "float32")))
    rule = "te" if case["kind"] == "te" else f"4over6_{case['error'].lower()}_{case['e4m3_max']}"
    fmt = replace(NVFP4, block=tuple(case["tile"]), scale_rounding=rule)
    copies = {"row": x, "col": hadamard(x.t()) if case.get("rht") else x.t().contiguous()}
    for copy, values in copies.items():
        q = quantize_blocks(values, fmt)
        rows = len(values)
        same(q.tensor_amax.reshape(1), z[f"{key}.{copy}.amax"])
        same(q.scale_codes().repeat_interleave(case["tile"][0], 0)[:rows], z[f"{key}.{copy}.scale"])
        same(q.codes(), z[f"{key}.{copy}.codes"])


AO4 = cases("torchao")


@pytest.mark.parametrize("name", AO4)
def test_nvfp4_of_torchao(name):
    case, z = AO4[name]
    key = case["id"]
    x = floats(z[f"{key}.x"]).to(getattr(torch, case.get("dtype", "float32")))
    q = quantize_blocks(x, replace(NVFP4, scale_rounding="torchao", tensor_scale=case["two_level"]))
    same(q.scale_codes(), z[f"{key}.scale"])
    same(q.codes(), z[f"{key}.codes"])
    if case["two_level"]:
        same(q.tensor_scale.reshape(1), z[f"{key}.tensor_scale"])
    same(q.dequantize(torch.float32), z[f"{key}.decoded"])


RHT = cases("hadamard")


@pytest.mark.parametrize("name", RHT)
def test_hadamard(name):
    case, z = RHT[name]
    x = floats(z[f"{case['id']}.x"])
    same(hadamard(x), z[f"{case['id']}.with_signs"])
    same(hadamard(x, signs=False), z[f"{case['id']}.without_signs"])


STOCHASTIC = cases("stochastic_elements", "stochastic_tensor")


@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_rounding_with_given_bits(name):
    case, z = STOCHASTIC[name]
    key, r = case["id"], torch.from_numpy(z[f"{case['id']}.r"])
    if case["kind"] == "stochastic_elements":
        y = floats(z[f"{key}.y"])[:, None].expand(r.shape)
        same(E2M1.encode(round_with_bits(y, E2M1, r)), z[f"{key}.codes"])
        return
    q = quantize_blocks(floats(z[f"{key}.x"]), NVFP4, mode="stochastic", bits=r)
    same(q.tensor_amax.reshape(1), z[f"{key}.row.amax"])
    same(q.scale_codes(), z[f"{key}.row.scale"])
    same(q.codes(), z[f"{key}.row.codes"])


def test_every_nvfp4_case_is_run():
    known = {"te", "te_4over6", "torchao", "hadamard", "stochastic_elements", "stochastic_tensor"}
    kinds = {case["kind"] for meta, _ in archives("cases") for case in meta["cases"] if "kind" in case}
    assert kinds - {"Adam8bit", "AdamW8bit"} <= known


FP8 = cases("TE", "DeepGEMM", "torchao", key="oracle", keys=("cases",))
FP8 = {name: (case, z) for name, (case, z) in FP8.items() if "tile" in case}


@pytest.mark.parametrize("name", FP8)
def test_fp8_blocks(name):
    case, z = FP8[name]
    key, tile = case["id"], tuple(case["tile"])
    x = floats(z[f"{case['tensor']}.x"]).to(getattr(torch, case.get("dtype", "float32")))
    rule = {"TE": "te", "DeepGEMM": "deepgemm", "torchao": "torchao"}[case["oracle"]]
    fmt = replace(FP8_128X128 if tile == (128, 128) else FP8_1X128, element=ELEMENT[case["element"]])
    fmt = replace(fmt, scale=E8M0 if case["pow2"] else FP32, scale_rounding=rule)
    q = quantize_blocks(x, fmt, dim=0 if tile == (128, 1) else -1)
    same(q.scales, z[f"{key}.scale"])
    same(q.codes(), z[f"{key}.codes"])
    if f"{key}.codes_t" in z.files:
        q = quantize_blocks(x.t().contiguous(), fmt)
        same(q.scales, z[f"{key}.scale_t"])
        same(q.codes(), z[f"{key}.codes_t"])


def numbers(patterns: list[str]) -> list[float]:
    return floats(np.array([int(p, 16) for p in patterns], dtype=np.uint32)).tolist()


def traces(key: str) -> dict[str, Any]:
    """Test name -> case of one list in every file that has it."""
    files = golden_data("recipes", key)
    return {
        f"{f['file']}.{i}.{case.get('name', case.get('element'))}": case for f in files for i, case in enumerate(f[key])
    }


DELAYED = traces("delayed")


def delayed_policy(case: dict[str, Any], rule: str) -> TensorScalePolicy:
    return tensor_scale_preset(
        "te_delayed" if rule == "fused" else "te_delayed_unfused",
        ELEMENT[case["element"]],
        margin=case["margin"],
        amax_history_len=case["history_len"],
        amax_compute_algo=case["algorithm"],
    )


@pytest.mark.parametrize("rule", ["fused", "unfused"])
@pytest.mark.parametrize("name", DELAYED)
def test_delayed_scaling_on_numbers_and_on_tensors(name, rule):
    case = DELAYED[name]
    policy, want = delayed_policy(case, rule), numbers(case[rule])
    by_number, by_tensor = initial_tensor_scale(policy), initial_tensor_scale(policy, "cpu")
    for amax, scale in zip(numbers(case["amax"]), want):
        by_number = advance(policy, by_number, amax)
        by_tensor = advance(policy, by_tensor, torch.tensor(amax))
        assert by_number.scale == by_tensor.scale.item() == scale
    history = torch.tensor(numbers(case[f"{rule}_history"]))
    torch.testing.assert_close(torch.tensor(by_number.history), history, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(by_tensor.history, history, rtol=0, atol=0, equal_nan=True)


def test_all_delayed_traces_as_one_vector_of_policies():
    lanes = [(delayed_policy(case, rule), case, rule) for case in DELAYED.values() for rule in ("fused", "unfused")]
    if not lanes:
        pytest.skip("no delayed traces in this folder")
    policy = stack_tensor_scales(lane[0] for lane in lanes)
    state = initial_tensor_scale(policy)
    amaxes = [numbers(case["amax"]) for _, case, _ in lanes]
    wants = [numbers(case[rule]) for _, case, rule in lanes]
    for step in range(max(map(len, amaxes))):
        state = advance(policy, state, torch.tensor([a[step] if step < len(a) else 1.0 for a in amaxes]))
        scales = state.scale.tolist()
        assert all(w[step] == s for w, s in zip(wants, scales) if step < len(w))


@pytest.mark.parametrize("case", traces("current").values(), ids=[*traces("current")])
def test_current_scaling(case):
    policy = tensor_scale_preset(
        "te_current", ELEMENT[case["element"]], power_of_two=case["pow2"], amax_floor=numbers([case["eps"]])[0]
    )
    special = [numbers(pair) for pair in case["special"]]
    amax = numbers(case["amax"]) + [a for a, _ in special]
    want = numbers(case["scale"]) + [s for _, s in special]
    assert [advance(policy, initial_tensor_scale(policy), a).scale for a in amax] == want
    vector = stack_tensor_scales([policy] * len(amax))
    got = advance(vector, initial_tensor_scale(vector), torch.tensor(amax)).scale
    assert got.tolist() == want
    inverse = torch.ones(()) / got[: len(case["inverse"])]
    same(inverse, np.array([int(p, 16) for p in case["inverse"]], dtype=np.uint32))


@pytest.mark.parametrize("case", traces("torchao").values(), ids=[*traces("torchao")])
def test_torchao_scales(case):
    preset = "torchao_rowwise" if case["pow2"] else "torchao_tensorwise"
    policy = tensor_scale_preset(preset, ELEMENT[case["element"]])
    amax, want = numbers(case["amax"]), torch.tensor(numbers(case["scale"]))
    one = torch.tensor([advance(policy, initial_tensor_scale(policy), a).scale for a in amax])
    torch.testing.assert_close(one, want, rtol=0, atol=0, equal_nan=True)
    vector = stack_tensor_scales([policy] * len(amax))
    got = advance(vector, initial_tensor_scale(vector), torch.tensor(amax)).scale
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


BITS = [pytest.param(z, id=meta["file"]) for meta, z in archives("x", "r", "rounded")]


@pytest.mark.parametrize("z", BITS)
def test_bfloat16_with_given_bits(z):
    got = stochastic_bf16(floats(z["x"]), torch.from_numpy(z["r"].astype(np.int32)))
    assert np.array_equal(got.view(torch.int16).numpy().view(np.uint16), z["rounded"])
