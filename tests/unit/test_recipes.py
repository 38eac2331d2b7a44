"""Recipes on networks: what is cast, what lives from step to step, and what is refused."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import AGAIN, again, assert_same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpkit.blocks import MXFP4, MXFP8_E4M3
from mpkit.casting import (
    RECIPES,
    Cast,
    Recipe,
    amp_level,
    cast_like,
    end_step,
    ledger,
    products,
    recipe_of,
    remove_mixed_precision,
    uniform,
)
from mpkit.casting.recipe import OperandRow, amax_of
from mpkit.formats import E4M3FN, E5M2, FP16, FP32, get_format
from mpkit.policies import tensor_scale_preset

SHORT = tensor_scale_preset("te_delayed", amax_history_len=3)
DELAYED = uniform("short delayed", Cast(E4M3FN, "tensor", SHORT), Cast(E5M2, "tensor", SHORT))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 32, generator=generator) * 1.5**i for i in range(count)]


def train(net: nn.Module, data: list[Tensor], optimizer: Any = None) -> Any:
    optimizer = optimizer or torch.optim.SGD(net.parameters(), 0.01)
    for x in data:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return optimizer


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_trains_stays_near_float32_and_comes_off(name):
    net, plain = network(), network()
    keys = set(net.state_dict())
    assert cast_like(net, name) is net
    assert (amp_level(net), set(recipe_of(net).values())) == (name, {RECIPES[name]})
    new = set(net.state_dict()) - keys
    assert bool(new) == (name == "te_hybrid_delayed")  # new keys only where there is state
    x = batches(1)[0]
    error = (net(x) - plain(x)).norm() / plain(x).norm()
    # two layers, each operand within half a gap: 2^-4 of E4M3, 1/4 of E2M1 beside its smallest values
    assert 0 < error < (0.5 if "fp4" in name else 0.125)
    before = weights(net)
    train(net, batches(3))
    assert all(not torch.equal(a, b) for a, b in zip(before, weights(net)))
    remove_mixed_precision(net)
    plain.load_state_dict(net.state_dict())
    assert torch.equal(net(x), plain(x))
    assert [type(m) for m in net.modules()] == [type(m) for m in plain.modules()]


def test_a_recipe_of_nothing_is_float32():
    net = cast_like(network(), Recipe("nothing"))
    x = batches(1)[0]
    # the bias is added after the product, not within it: two more roundings in each of two layers, of sums below 10
    torch.testing.assert_close(net(x), network()(x), rtol=2.0**-20, atol=10 * 2.0**-22)


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("2", {"2"}),
        (["blocks.*.proj"], {"blocks.0.proj", "blocks.1.proj"}),
        ("lm_head", {"lm_head"}),
        ("blocks.1", {"blocks.1.proj", "blocks.1.up"}),
        (lambda path, module: module.out_features == 3, {"lm_head"}),
    ],
)
def test_layers_that_stay_high(keep, kept):
    blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 4), "proj": nn.Linear(4, 4)}) for _ in range(2))
    net = nn.ModuleDict({"blocks": blocks, "lm_head": nn.Linear(4, 3), "2": nn.Linear(4, 4)})
    cast_like(net, "mxfp8", keep=keep)
    assert {path for path, recipe in recipe_of(net).items() if recipe is None} == kept


def test_a_filter_that_matches_nothing_fails_and_changes_nothing():
    net = nn.ModuleDict({"lm_head": nn.Linear(4, 3)})
    for keep in ("output", ["lm_head", "norm"], lambda path, module: False):
        with pytest.raises(ValueError, match="lm_head"):
            cast_like(net, "mxfp8", keep=keep)
        assert recipe_of(net) == {"lm_head": None}


def test_a_kept_layer_is_released_when_a_recipe_is_changed():
    net = cast_like(network(), "te_hybrid_delayed")
    cast_like(net, "mxfp8", keep="0")
    assert recipe_of(net) == {"0": None, "2": RECIPES["mxfp8"]}
    assert set(net.state_dict()) == set(network().state_dict())


def test_attention_is_cast_inside():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    x = torch.randn(2, 5, 32)
    plain = layer(x)
    cast_like(layer, "mxfp4")
    with ledger(layer) as log:
        y = layer(x)
        y.sum().backward()
    assert {row.module for row in log.operands} == {"self_attn", "linear1", "linear2"}
    assert sum(row.product == "fprop" for row in log.operands) == 2 * (2 + 1 + 1)  # in_proj and out_proj
    assert sum(row.product == "wgrad" for row in log.operands) == 2 * 4
    assert not torch.equal(y, plain)
    with torch.no_grad():
        cast_like(layer.eval(), "te_hybrid_delayed")(x)
        layer(x)
    assert list(layer.self_attn._modules["recipe_scales"].sites) == ["0", "1"]


@pytest.mark.parametrize(
    ("cast", "top", "scale"),
    [(Cast(MXFP4), 6.0, None), (Cast(E4M3FN, "tensor", SHORT), 448.0, torch.tensor(1.0))],
    ids=["blocks", "tensor"],
)
def test_the_largest_element_and_a_last_bit_more_are_not_clipped(cast, top, scale):
    last_bit = torch.tensor(top).nextafter(torch.tensor(torch.inf)).item()
    shares = dict.fromkeys((top, -top, last_bit, top * (1 + 2.0**-22)), 0.0)
    shares |= dict.fromkeys((top * (1 + 2.0**-20), -1.1 * top), 1 / 32)
    for value, share in shares.items():
        x = torch.zeros(1, 32)
        x[0, 3] = value
        assert cast(x, 1, scale).clipped() == share
    assert Cast(E4M3FN, "tensor", SHORT)(torch.full((1, 1), 500.0), 1, torch.tensor(1.0)).clipped() == 1.0


def test_the_ledger_counts_what_a_scale_clips_and_flushes():
    net = cast_like(nn.Linear(64, 8, bias=False), uniform("floor", Cast(MXFP4)))
    x = torch.zeros(2, 64)
    x[0, :2] = torch.tensor([7.9, 0.1])  # floor: scale 1, so 7.9 is beyond 6 and 0.1 below a quarter
    x[1, 40] = 4.0
    with ledger(net) as log:
        net(x).sum().backward()
    row = log.operands[0]
    assert (row.product, row.operand, row.format) == ("fprop", "input", "mxfp4")
    assert (row.clipped, row.flushed, row.scale_max) == (1 / 128, 1 / 128, 1.0)
    frame = log.to_frame(OperandRow)
    assert frame["product"].tolist() == ["fprop", "fprop", "wgrad", "wgrad"]
    rows = len(log.operands)
    net(x).sum().backward()
    assert len(log.operands) == rows  # nothing is written outside the block


def test_delayed_scales_follow_the_rule_on_the_tensors_of_each_step():
    net, policy = cast_like(nn.Linear(32, 4, bias=False), DELAYED), replace(SHORT, element_max=448.0)
    data = batches(5)
    for step, x in enumerate(data):
        amaxes = [b.abs().max().item() for b in data[max(0, step - 3) : step]]
        with ledger(net) as log:
            train(net, [x])
        want = torch.tensor(policy.element_max / max(amaxes) if amaxes else 1.0)
        assert log.operands[0].scale_max == want.item()


def test_a_spike_is_clipped_by_a_stale_scale_and_not_by_a_current_one():
    calm = batches(1)[0]
    for recipe, clips in ((DELAYED, True), (RECIPES["te_current"], False)):
        net = cast_like(nn.Linear(32, 4), recipe)
        train(net, [calm] * 3)
        with ledger(net) as log:
            net(calm * 100)
        assert (log.operands[0].clipped > 0) == clips


def test_accumulated_micro_batches_are_one_step_with_their_largest_amax():
    net = cast_like(nn.Linear(32, 4), DELAYED)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    small, large = torch.ones(2, 32), 8 * torch.ones(2, 32)
    scales = net._modules["recipe_scales"]
    for _ in range(2):
        for x in (large, small):
            net(x).sum().backward()
            assert float(scales.sites["0"]["input"].scale) in (1.0, 56.0)
        optimizer.step()
    net(small)
    scaler = scales.sites["0"]["input"]
    assert (float(scaler.scale), scaler.state.history.tolist()) == (56.0, [0.0, 8.0, 8.0])
    assert scales.sites["0"]["grad"].state.history.tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_recomputed_forward_has_the_scale_of_the_first(reentrant, frozen):
    nets = [cast_like(network(), DELAYED) for _ in range(2)]
    for net in nets:
        net[2].weight.requires_grad_(not frozen)
    optimizers = [torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.01) for net in nets]
    for x in batches(4):
        x.requires_grad_()
        for net, optimizer, recomputes in zip(nets, optimizers, (False, True)):
            optimizer.zero_grad()
            y = checkpoint(net, x, use_reentrant=reentrant) if recomputes else net(x)
            y.square().mean().backward()
            optimizer.step()
        assert_same(weights(nets[0]), weights(nets[1]))
    assert_same(*(net[2]._modules["recipe_scales"].get_extra_state() for net in nets))


def test_evaluation_changes_no_scale():
    net = cast_like(network(), DELAYED)
    optimizer = train(net, batches(2))
    twin = copy.deepcopy(net)
    with torch.no_grad():
        net(batches(1)[0] * 1e4)
    train(net, batches(3), optimizer)
    train(twin, batches(3))
    assert_same(weights(net), weights(twin))


@pytest.mark.parametrize("how", AGAIN)
def test_a_copy_or_a_resumed_run_goes_on_bit_for_bit(how):
    net = cast_like(network(), DELAYED)
    train(net, batches(3))
    other = again(net, how, lambda: trained(DELAYED))
    for module in (net, other):
        train(module, batches(4))
    assert_same(weights(net), weights(other))
    states = [[m.get_extra_state() for m in n.modules() if isinstance(m, products.RecipeScales)] for n in (net, other)]
    assert_same(*states)


STATELESS = next(name for name, recipe in RECIPES.items() if not recipe.delayed())


def trained(recipe):
    net = network()
    if recipe is not None:
        train(cast_like(net, recipe), batches(2))
    return net


def test_the_state_of_another_policy_is_refused():
    net, other = trained(DELAYED), trained("te_hybrid_delayed")
    for own in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        before = net[0].recipe_scales.get_extra_state()
        with pytest.raises(ValueError, match="another policy"):
            own.load_state_dict(other.state_dict())
        assert str(own[0].recipe_scales.get_extra_state()) == str(before)


@pytest.mark.parametrize(
    ("saved", "loading"),
    [("te_hybrid_delayed", STATELESS), (None, "te_hybrid_delayed"), (STATELESS, "te_hybrid_delayed")],
)
def test_scales_too_many_or_too_few_are_named_by_torch(saved, loading):
    net, other = trained(loading), trained(saved)
    with pytest.raises(RuntimeError, match="recipe_scales"):
        net.load_state_dict(other.state_dict())
    net.load_state_dict(other.state_dict(), strict=False)
    assert torch.equal(net[0].weight, other[0].weight)


def test_a_loop_that_hides_its_updates_says_where_a_step_ends():
    net = cast_like(nn.Linear(32, 4), DELAYED)
    for _ in range(2):
        net(torch.full((2, 32), 7.0)).sum().backward()
        net.weight.data.mul_(0.99)
    scaler = net._modules["recipe_scales"].sites["0"]["input"]
    assert float(scaler.scale) == 1.0
    end_step(net)
    assert float(scaler.scale) == 64.0


def test_dtypes_shapes_and_autocast():
    layer = cast_like(nn.Linear(32, 8), "mxfp8").to(torch.bfloat16)
    assert layer(torch.randn(2, 3, 32, dtype=torch.bfloat16)).dtype is torch.bfloat16
    layer = cast_like(nn.Linear(32, 8), "nvfp4")
    for shape in ((32,), (0, 32), (2, 1, 5, 32)):
        x = torch.randn(shape, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert (y.shape, x.grad.shape) == ((*shape[:-1], 8), x.shape)
    x = torch.randn(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = layer(x)
    assert torch.equal(inside, layer(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mxfp8", "te_current"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own compiler raises some
def test_compiled_in_one_graph(name):
    torch._dynamo.reset()
    net, twin = (cast_like(nn.Sequential(network()[0]), name) for _ in range(2))
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    x = batches(1)[0]
    net(x).sum().backward()
    compiled(x).sum().backward()
    for p, q in zip(net.parameters(), twin.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # torch's compiler raises them
def test_delayed_scales_compile_with_breaks():
    torch._dynamo.reset()
    net, twin = cast_like(network(), DELAYED), cast_like(network(), DELAYED)
    compiled = torch.compile(twin, backend="eager")
    train(net, batches(3))
    train(compiled, batches(3))
    torch.testing.assert_close(weights(net), weights(twin))


def test_bad_input_is_refused_with_the_way_out():
    assert Cast(FP16).granularity == "tensor"  # 16 bits are the most
    block, longer = Cast(MXFP8_E4M3), Cast(E4M3FN, policy=replace(SHORT, history_len=4))
    for wrong, error, words in (
        (lambda: cast_like(nn.ReLU(), "mxfp8"), ValueError, "has none"),
        (lambda: cast_like(network(), "mxfp9"), ValueError, "mxfp8"),
        (lambda: cast_like(network(), "mxfp8", torch.bfloat16), ValueError, "every cast"),
        (lambda: cast_like(network(), "apex_O1", keep="0"), ValueError, "own lists"),
        (lambda: Cast(MXFP4, "tensor"), ValueError, "granularity must be 'block'"),
        (lambda: Cast(E4M3FN, "block"), ValueError, "'tensor' or 'axis'"),
        (lambda: Cast(MXFP4, policy=SHORT), ValueError, "scale_rounding"),
        (lambda: Cast(E4M3FN, "axis", SHORT), ValueError, "current one"),
        (lambda: Cast(E4M3FN, rounding="nearest"), ValueError, "nearest_even"),
        (lambda: Cast(FP32), ValueError, "high precision"),
        (lambda: Cast(get_format("e8m8")), ValueError, "high precision"),
        (lambda: Recipe("r", replace(block, hadamard=True), block), ValueError, "cancels"),
        (lambda: replace(DELAYED, wgrad_input=longer), ValueError, "same policy"),
    ):
        with pytest.raises(error, match=words):
            wrong()


# --- parts


@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0)])
@pytest.mark.parametrize("axis", [0, 1])
def test_largest_magnitudes_along_an_axis_stay_beside_it(shape: tuple[int, int], axis: int) -> None:
    x = torch.arange(-6.0, -6 + shape[0] * shape[1]).view(shape).bfloat16()
    got = amax_of(x, axis)
    assert got.dtype is torch.float32
    want = [max(map(abs, part.tolist()), default=0.0) for part in x.unbind(1 - axis)]
    assert got.flatten().tolist() == want
    assert got.shape == torch.Size([1 if i == axis else n for i, n in enumerate(shape)])
    assert amax_of(x).shape == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_an_operand_in_high_precision_meets_one_that_is_cast(dtype: torch.dtype) -> None:
    """Whatever it is stored in: the values of the other are float32."""
    one = Cast(E4M3FN)
    for recipe in (Recipe("input", fprop_input=one), Recipe("weight", fprop_weight=one)):
        layer = cast_like(nn.Linear(2, 2, bias=False).to(dtype), recipe)
        nn.init.eye_(layer.weight)
        x = torch.tensor([[1.0, 0.5]], dtype=dtype)  # both are values of the format: nothing rounds
        assert layer(x).flatten().tolist() == pytest.approx([1.0, 0.5], rel=2.0**-7)  # a rounding of bfloat16


def test_a_weight_that_is_computed_in_each_forward_ends_a_step_when_what_it_is_made_of_changes():
    """The scale of the input does not depend on the weight, so a plain layer has the same."""
    scales = []
    for wrap in (lambda layer: layer, nn.utils.parametrizations.weight_norm):
        torch.manual_seed(0)
        net = cast_like(wrap(nn.Linear(16, 16)), "te_hybrid_delayed")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        seen = []
        for step in range(4):
            for _ in range(2):  # two micro-batches
                with ledger(net) as log:
                    net(torch.randn(4, 16) * (step + 1)).square().mean().backward()
                seen.append(next(row.scale_max for row in log.operands if row.operand == "input"))
            optimizer.step()
            optimizer.zero_grad()
        scales.append(seen)
    assert (scales[0], len(set(scales[0]))) == (scales[1], 4)


def test_a_network_that_ran_on_the_meta_device_begins_anew_where_it_gets_memory():
    with torch.device("meta"):
        net = cast_like(nn.Linear(32, 4), DELAYED)
    net(torch.ones(2, 32, device="meta")).sum().backward()
    net.to_empty(device="cpu")
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with torch.no_grad():
        net.weight.fill_(1.0)
        net.bias.zero_()
    train(net, [torch.ones(2, 32), 2 * torch.ones(2, 32)], optimizer)
    assert net._modules["recipe_scales"].sites["0"]["input"].state.history.tolist() == [0.0, 1.0, 2.0]
