"""The three products of a linear layer under each recipe: casts bit for bit, results within the bounds of a sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import archives, floats
from test_golden_recipes import ELEMENT, cases, numbers, same, traces
from torch import Tensor, nn

from mpkit.blocks import E8M0
from mpkit.casting import RECIPES, Cast, Recipe, cast_like
from mpkit.formats import FP32
from mpkit.policies import tensor_scale_preset

NAMES = {
    "tensorwise": "torchao_tensorwise",
    "rowwise": "torchao_rowwise",
    "rowwise_with_gw_hp": "torchao_rowwise_with_gw_hp",
    **{name: name for name in ("mxfp8", "nvfp4", "te_current", "te_blockwise")},
}
LINEAR = {name: found for name, found in cases(*NAMES, key="recipe").items() if "shape" in found[0]}


def each(recipe: Recipe, change: Any) -> Recipe:
    return replace(recipe, **{key: change(cast) for key, cast in recipe.casts() if cast is not None})


def recipe_for(case: dict[str, Any]) -> Recipe:
    recipe = RECIPES[NAMES[case["recipe"]]]
    if case["recipe"] == "mxfp8":
        recipe = each(recipe, lambda c: replace(c, fmt=replace(c.fmt, scale_rounding=case["mode"])))
        if case["grad_weight_hp"]:
            recipe = replace(recipe, wgrad_grad=None, wgrad_input=None)
    if case["recipe"] == "te_blockwise":
        scale = E8M0 if case["pow2"] else FP32
        recipe = each(recipe, lambda c: replace(c, fmt=replace(c.fmt, scale=scale, scale_rounding="te")))
    if case["recipe"] == "nvfp4":  # TransformerEngine's reference has no stochastic rounding
        recipe = each(recipe, lambda c: replace(c, rounding="nearest_even"))
    return recipe


# product_tensor -> the names under which the frameworks' operands are stored, and whether transposed
STORED = {
    "fprop_input": [("output.input", False), ("input", False), ("input.row", False)],
    "fprop_weight": [("output.weight_t", True), ("weight", False), ("weight.row", False)],
    "dgrad_grad": [("grad_input.grad_output", False), ("grad_output", False), ("grad_output.row", False)],
    "dgrad_weight": [("grad_input.weight_t", True), ("weight_t", True), ("weight.t", True), ("weight.col", True)],
    "wgrad_grad": [
        ("grad_weight.grad_output", False),
        ("grad_output_t", True),
        ("grad_output.t", True),
        ("grad_output.col", True),
    ],
    "wgrad_input": [("grad_weight.input", False), ("input_t", True), ("input.t", True), ("input.col", True)],
}
AXES = {"fprop": {"input": 1, "weight": 1}, "dgrad": {"grad": 1, "weight": 0}, "wgrad": {"grad": 0, "input": 0}}


def given(case: dict[str, Any], z: Any) -> dict[str, Tensor]:
    dtype = getattr(torch, case["dtype"])
    names = {"input": "input", "weight": "weight", "grad": "grad_output"}
    return {name: floats(z[f"{case['id']}.{stored}"]).to(dtype) for name, stored in names.items()}


@pytest.mark.parametrize("name", LINEAR)
def test_operands_bit_for_bit(name):
    case, z = LINEAR[name]
    recipe, tensors, seen = recipe_for(case), given(case, z), 0
    for key, cast in recipe.casts():
        product, tensor = key.split("_")
        if cast is None:
            continue
        x = tensors[tensor]
        operand = cast(x.reshape(-1, x.shape[-1]), AXES[product][tensor])
        for stored, transposed in STORED[key]:
            if f"{case['id']}.{stored}.codes" not in z.files:
                continue
            seen += 1
            codes = cast.element.encode(operand.elements)
            same(
                codes.t() if transposed else codes,
                z[f"{case['id']}.{stored}.codes"].reshape(
                    operand.elements.t().shape if transposed else operand.elements.shape
                ),
            )
            scale, want = operand.scale, z[f"{case['id']}.{stored}.scale"]
            if operand.blocks is not None:
                scale = operand.blocks.scales if want.dtype == np.uint32 else operand.blocks.scale_codes()
                scale = scale.t() if transposed else scale
                if scale.shape != want.shape:  # stored once for each row of a block
                    scale = scale.repeat_interleave(cast.fmt.block[0], 0)[: len(want)]
            elif case["recipe"] == "te_current":  # stored for decoding
                scale = torch.ones(()) / scale
            same(
                scale.t().reshape(want.shape)
                if scale.dim() and operand.blocks is None and transposed
                else scale.reshape(want.shape),
                want,
            )
    assert seen == sum(cast is not None for _, cast in recipe.casts())


@pytest.mark.parametrize("name", [name for name, (case, z) in LINEAR.items() if f"{case['id']}.output" in z.files])
def test_results_of_a_layer(name):
    case, z = LINEAR[name]
    key, recipe, tensors = case["id"], recipe_for(case), given(case, z)
    x, weight, grad = (tensors[n] for n in ("input", "weight", "grad"))
    has_bias = f"{key}.bias" in z.files
    layer = nn.Linear(x.shape[-1], len(weight), bias=has_bias, dtype=x.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if has_bias:
            layer.bias.copy_(floats(z[f"{key}.bias"]))
    x.requires_grad_()
    y = cast_like(layer, recipe)(x)
    y.backward(grad)
    rows, grads = x.detach().reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    bias = floats(z[f"{key}.bias"]).abs().double() if has_bias else 0.0
    results = {"output": (y, rows, weight, 1, 1), "grad_input": (x.grad, grads, weight, 1, 0)}
    results["grad_weight"] = (layer.weight.grad, grads, rows, 0, 0)
    for (result, (got, a, b, axis_a, axis_b)), product in zip(results.items(), AXES):
        want = floats(z[f"{key}.{result}"])
        assert got.dtype is x.dtype
        got = got.detach().float().reshape(want.shape)
        settled = f"{key}.{result}.settled"
        if settled in z.files:
            mask = torch.from_numpy(z[settled]).bool()
            assert torch.equal(got[mask], want[mask])
            ulp = (2.0 ** (want.abs().clamp(min=2.0**-126).log2().floor() - 7)) * 2  # at most two roundings with a bias
            assert ((got - want).abs() <= ulp)[~mask].all()
            continue
        values = [
            t.double() if cast is None else cast(t, axis).values.double()
            for (t, axis), cast in zip(
                ((a, axis_a), (b, axis_b)), [c for k, c in recipe.casts() if k.startswith(product)]
            )
        ]
        left, right = (v if axis == 1 else v.t() for v, axis in zip(values, (axis_a, axis_b)))
        inner = left.shape[1]
        loose = (inner + 8) * 2.0**-23 if case["oracle"] == "TE" else (inner + 2) * 2.0**-24
        bound = 2 * loose * ((left.abs() @ right.abs().t()) + (bias if result == "output" else 0.0))
        if case["dtype"] == "bfloat16":  # one more rounding, of the result
            bound = bound + want.abs().double() * 2.0**-7
        assert ((got - want).abs() <= bound.reshape(want.shape) + 1e-45).all(), result


@pytest.mark.parametrize("case", traces("torchao_tensors").values(), ids=[*traces("torchao_tensors")])
def test_torchao_scales_of_tensors(case):
    x = torch.tensor(numbers(case["x"])).reshape(case["shape"]).to(getattr(torch, case["dtype"]))
    policy = tensor_scale_preset("torchao_rowwise" if case["pow2"] else "torchao_tensorwise")
    granularity = "tensor" if case["dim"] is None else "axis"
    operand = Cast(ELEMENT[case["element"]], granularity, policy)(x, case["dim"] or 0)
    same(operand.scale, torch.tensor(numbers(case["scale"])).reshape(case["scale_shape"]))


def test_every_recipe_of_the_data_is_known():
    found = {case["recipe"] for meta, _ in archives("cases") for case in meta["cases"] if "recipe" in case}
    assert found <= set(NAMES)
