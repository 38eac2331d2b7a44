"""The way out of every finding of preflight, followed: the finding is gone, and so is what it warned of."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import compat
import pytest
import torch
import torch.nn.functional as F
from test_diagnose import chain, clip_too_early, rows, sound_loop
from torch import Tensor, nn

from mpkit import optimizers
from mpkit.boost import FreezeOpt
from mpkit.casting import auto_mixed_precision, custom_mixed_precision, get_black_list
from mpkit.diagnose import Finding, preflight
from mpkit.formats import E5M2, FP16
from mpkit.schedules import CosineDecayLR


class LlamaNorm(nn.Module):
    """A root-mean-square norm as language models write it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6)).to(given)


class GemmaNorm(nn.Module):
    """The same with its arithmetic in a method of its own, and a weight around 1."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def _normed(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return (self._normed(x.float()) * (1.0 + self.weight.float())).type_as(x)


class PlainNorm(nn.Module):
    """A norm that leaves the precision to others."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def named(network: nn.Module, word: str, level: str = "O2", **options: Any) -> list[Finding]:
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(network.parameters(), 0.1)
    return [found for found in preflight(network, optimizer, level, **options) if word in str(found)]


@pytest.mark.parametrize("norm", [LlamaNorm, GemmaNorm])
def test_a_norm_that_asks_for_float32_is_found_and_protected(norm: Any) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 8), norm(8), norm(8), nn.Linear(8, 3))
    with torch.no_grad():
        network[0].weight.mul_(1e3)
    x, y = rows()

    def gradients(net: nn.Module) -> list[Tensor]:
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    (found,) = named(network, norm.__name__)  # of two modules of one class, the first
    assert found.where == "1"
    assert not named(network, "casts to float32", "O1")
    assert named(network, "casts to float32", "O3")
    low = auto_mixed_precision(copy.deepcopy(network), "O2")
    assert not all(bool(g.isfinite().all()) and bool(g.any()) for g in gradients(low))  # what was warned of
    assert f"black_list=[*get_black_list(), {norm.__name__}]" in found.way_out
    cured = custom_mixed_precision(copy.deepcopy(network), black_list=[*get_black_list(), norm])
    for got, want in zip(gradients(cured), gradients(network)):
        torch.testing.assert_close(got, want, rtol=0.05, atol=1e-3)  # 3 roundings to 11 bits around each product


class Epsilon(LlamaNorm):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size)
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).type_as(x)


def test_an_epsilon_that_is_zero_in_the_format_is_told_with_what_it_does() -> None:
    """As in Gemma 3, whose padding has an embedding of zeros."""

    def network(eps: float) -> nn.Module:
        table = nn.Embedding(4, 8, padding_idx=0)
        return nn.Sequential(table, Epsilon(8, eps))

    ids = torch.tensor([[0, 1, 2]])
    for eps, fmt in ((1e-6, E5M2), (1e-6, FP16), (1e-3, E5M2), (1e-9, FP16)):
        lost = auto_mixed_precision(network(eps), "O2", fmt)(ids).isnan().any()
        assert bool(lost) == bool(named(network(eps), f"variance_epsilon={eps:g} is zero in {fmt.name}", dtype=fmt))
    (found,) = named(network(1e-6), "row of zeros", dtype=E5M2)
    assert "Epsilon]) keeps it" in found.way_out
    cured = custom_mixed_precision(network(1e-6), black_list=[*get_black_list(), Epsilon], dtype=E5M2)
    assert cured(ids).isfinite().all()


class Rotary(nn.Module):
    """Angles of positions in float32, as language models make them."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], dtype=torch.float32)
        angles = places[:, None].float() * torch.tensor([1.0, 0.5, 0.25, 0.125]).float()
        return torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype)


def sinusoid(steps: Tensor) -> Tensor:
    return torch.sin(steps[:, None].float() * torch.tensor([1.0, 0.1]))


class Timestep(nn.Module):
    """Its arithmetic stands in a function beside it, as in diffusion models."""

    def forward(self, x: Tensor) -> Tensor:
        return sinusoid(x[0])


@pytest.mark.parametrize("kind", [Rotary, Timestep])
def test_angles_that_ask_for_float32_are_found_and_protected(kind: Any) -> None:
    network = nn.Sequential(nn.Identity(), kind())
    x = torch.arange(1000.0)[None]
    want = network(x)

    def error(net: nn.Module) -> float:
        return float((net(x) - want).abs().max())

    (found,) = named(network, f"{kind.__name__} casts to float32 itself", dtype=torch.bfloat16, optimizer=SOME)
    assert "the angle of a position lose its digits" in found.what
    assert f"black_list=[*get_black_list(), {kind.__name__}]" in found.way_out
    assert error(auto_mixed_precision(copy.deepcopy(network), "O2", torch.bfloat16)) > 0.5
    black = [*get_black_list(), kind]
    cured = custom_mixed_precision(copy.deepcopy(network), black_list=black, dtype=torch.bfloat16)
    # one rounding of a number below 1; the steps are given in bfloat16 themselves, so those below 256 are exact
    assert error(cured) <= 2.0**-8 or kind is Timestep
    assert (cured(x)[:256] - want[:256]).abs().max() <= 2.0**-8


SOME = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)


def test_the_norms_of_language_models_are_found() -> None:
    compat.declare_operators()
    hf = pytest.importorskip("transformers", reason='tiny networks of others: pip install "mpkit[compat]"')
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    small |= {"vocab_size": 64, "max_position_embeddings": 32, "num_key_value_heads": 1, "head_dim": 8}
    for kind in ("Llama", "Mistral", "Qwen2", "Gemma", "Gemma2", "Phi3"):
        config = getattr(hf, f"{kind}Config")(**small, pad_token_id=0)
        with torch.device("meta"):
            network = getattr(hf, f"{kind}Model")(config)
        assert named(network, f"{kind}RMSNorm"), kind
        assert named(network, f"{kind}RotaryEmbedding"), kind


def test_other_modules_are_not_taken_for_such_norms() -> None:
    network = nn.Sequential(PlainNorm(), nn.LayerNorm(4), nn.Softmax(-1), nn.Linear(4, 4), nn.RMSNorm(4))
    assert not named(network, "casts to float32")


def test_parameters_stored_in_16_bits() -> None:
    half = chain(nn.ReLU()).half()
    assert "network.float()" in named(half, "stored in")[0].way_out
    assert not named(half.float(), "stored in")


def test_gradients_in_16_bits() -> None:
    half = chain(nn.ReLU()).half()
    for p in half.parameters():
        p.grad = torch.ones_like(p)
    assert named(half, "gradient is float16", "O0")
    wide = half.float()
    F.cross_entropy(auto_mixed_precision(wide, "O2")(rows()[0]), rows()[1]).backward()
    assert not named(wide, "gradient is float16")


def test_an_optimizer_of_another_network_or_of_a_part() -> None:
    network = chain(nn.ReLU())
    other = torch.optim.SGD(copy.deepcopy(network).parameters(), 0.1)
    part = torch.optim.SGD([network.first.weight], 0.1)
    assert "build the optimizer from this network" in named(network, "not in this network", optimizer=other)[0].way_out
    assert named(network, "in no group", optimizer=part)
    assert preflight(network, torch.optim.SGD(network.parameters(), 0.1), "O2") == []
    part.add_param_group({"params": [p for p in network.parameters() if p is not network.first.weight]})
    assert not named(network, "in no group", optimizer=part)
    frozen = torch.optim.SGD([network.first.weight], 0.1)
    for p in network.parameters():
        p.requires_grad_(p is network.first.weight)
    assert not named(network, "in no group", optimizer=frozen)


def test_constants_that_the_format_cannot_hold() -> None:
    half = chain(nn.ReLU()).half()
    (found,) = named(half, "eps=", optimizer=torch.optim.Adam(half.parameters(), 1e-3))
    assert "eps >= 6.1e-05" in found.way_out
    assert not named(half, "eps=", optimizer=torch.optim.Adam(half.parameters(), 1e-3, eps=6.2e-5))
    assert not named(half.float(), "eps=", optimizer=torch.optim.Adam(half.float().parameters(), 1e-3))


def test_states_in_16_bits_or_not_finite() -> None:
    network = chain(nn.ReLU())
    half = copy.deepcopy(network).bfloat16()
    for net, word in ((half, "optimizer state exp_avg_sq is bfloat16"), (network, "holds inf or NaN")):
        optimizer = torch.optim.Adam(net.parameters(), 1e-3)
        for size in (1.0, float("inf") if net is network else 1.0):
            before, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict())
            for p in net.parameters():
                p.grad = torch.full_like(p, size)
            optimizer.step()
        assert named(net, word, optimizer=optimizer)
        if net is half:  # keep the states in float32
            wide = net.float()
            optimizer = torch.optim.Adam(wide.parameters(), 1e-3)
            for p in wide.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        else:  # go back to a checkpoint
            assert named(net, "the parameter holds inf", optimizer=optimizer)  # the step was taken
            net.load_state_dict(weights)
            optimizer.load_state_dict(before)
        assert not named(net, word, optimizer=optimizer)


def test_updates_that_round_away() -> None:
    for dtype, rate in ((torch.float16, 0.1), (torch.float32, 1e-6)):
        layer = nn.Linear(4, 4, bias=False).to(dtype)
        with torch.no_grad():
            layer.weight.fill_(1.0)
        layer.weight.grad = torch.full((4, 4), 1e-3).to(dtype)
        (found,) = named(layer, "half an ulp", "O0", optimizer=torch.optim.SGD(layer.parameters(), rate))
        if dtype is torch.float16:
            assert "float32" in found.way_out
            layer = layer.float()
            layer.weight.grad = torch.full((4, 4), 1e-3)
        else:
            assert "learning rate" in found.way_out
            rate = 0.1
        assert not named(layer, "half an ulp", "O0", optimizer=torch.optim.SGD(layer.parameters(), rate))


def test_a_gradient_clipped_before_it_is_unscaled() -> None:
    network = chain(nn.ReLU())
    assert "unscale_" in named(network, "clip_grad_norm_", loop=clip_too_early)[0].way_out
    assert not named(network, "clip_grad_norm_", loop=sound_loop)


def clip_without_a_scaler(network, optimizer, loss):
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()


def test_a_clip_where_nothing_is_scaled_is_sound() -> None:
    assert not named(chain(nn.ReLU()), "clip_grad_norm_", loop=clip_without_a_scaler)


TWO_STEPS = """
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
clip_grad_norm_(parameters, 1.0)
scaler.update()
clip_grad_value_(parameters, 1.0)
scaler.scale(loss).backward()
clip_grad_value_(parameters, 1.0)
scaler.unscale_(optimizer)
clip_grad_norm_(parameters, 1.0)
"""


def test_each_step_of_a_loop_is_scaled_and_unscaled_by_itself() -> None:
    assert [found.where for found in named(chain(), "multiplied by", loop=TWO_STEPS)] == ["line 8 of the loop"]


@pytest.mark.parametrize(
    "loop",
    [
        "picture = transform.scale(picture); loss(picture).backward(); clip_grad_norm_(p, 1)",
        "self.scale(x); loss.backward(); clip_grad_norm_(p, 1)",
        "grads = scaler.unscale(torch.autograd.grad(scaler.scale(loss), p)); clip_grad_norm_(p, 1)",
    ],
)
def test_what_scales_no_loss_is_no_loss_scaler(loop: str) -> None:
    assert not named(chain(), "multiplied by", loop=loop)


@pytest.mark.parametrize(
    "loop",
    [
        "self.amp.scale(loss).backward(); metric.update(loss); clip_grad_norm_(p, 1)",
        "loss = self.amp.scale(f(x)); loss.backward(); clip_grad_norm_(p, 1)",
        "(self.amp.scale(a) + self.amp.scale(b)).backward(); clip_grad_norm_(p, 1)",
        "big = self.amp.scale(loss); total = big / 4; accelerator.backward(total); clip_grad_norm_(p, 1)",
        "grads = torch.autograd.grad(self.amp.scale(loss), p); other.unscale_(opt); clip_grad_norm_(p, 1)",
    ],
)
def test_a_scaled_loss_is_followed_into_the_backward_pass(loop: str) -> None:
    (found,) = named(chain(), "multiplied by", loop=loop)
    assert found.way_out == "call self.amp.unscale_(optimizer) before it"


def constants(half: bool, level: str, **options: Any) -> list[tuple[str, str]]:
    network = chain().half() if half else chain()
    optimizer = torch.optim.Adam(network.parameters(), 1e-3, **options)
    return [(found.severity, found.what) for found in named(network, "is zero in", level, optimizer=optimizer)]


def test_a_constant_is_zero_up_to_half_of_the_smallest_value() -> None:
    what = "eps=2.98023e-08 is zero in fp16 (smallest value 5.96e-08)"
    assert constants(True, "O2", eps=2.0**-25) == [("error", what)]
    assert constants(False, "O3", eps=2.0**-25) == [("warning", what)]  # it is stored in float32, and cast
    assert constants(False, "O2", eps=2.0**-25) == []
    assert constants(True, "O2", eps=2.0**-25 * 1.01) == []  # a weight decay of 0 is meant
    ((_, what),) = constants(True, "O2", eps=1.0, weight_decay=1e-9)
    assert what.startswith("weight_decay=1e-09 is zero")


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_more_than_half_of_the_updates_that_move_must_round_away(kind: Any) -> None:
    def share(gradients: list[float], weights: list[float]) -> list[str]:
        layer = nn.Linear(len(weights), 1, bias=False)
        layer.weight = nn.Parameter(torch.tensor([weights]))
        layer.weight.grad = torch.tensor([gradients])
        optimizer = kind(layer.parameters(), lr=2.0**-10)
        return [" ".join(found.what.split()[:2]) for found in named(layer, "half an ulp", optimizer=optimizer)]

    assert share([1.0, 1.0], [2.0**14, 2.0**14]) == []  # an update of 2**-10 is half an ulp of 2**14
    assert share([1.0, 1.0, 1.0, 0.0], [2.0**15, 2.0**15, 1.0, 2.0**15]) == ["67 %"]  # a gradient of 0 moves nothing
    assert share([1.0, 1.0], [2.0**15, 1.0]) == []
    assert share([0.0], [2.0**15]) == []
    assert share([1.0], [2.0**15]) == ["100 %"]
    assert share([4.0], [2.0**15]) == (["100 %"] if kind is torch.optim.Adam else [])  # Adam moves by its rate


def test_calls_on_one_line_count_in_their_order() -> None:
    network = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    wrong = "scaler.scale(loss).backward(); clip_grad_norm_(p, 1); scaler.step(optimizer); scaler.update()"
    (found,) = preflight(network, optimizer, loop=f"    {wrong}")  # as it stands in a loop
    assert found.where == "line 1 of the loop"
    right = "scaler.scale(loss).backward(); scaler.unscale_(optimizer); clip_grad_norm_(p, 1)"
    assert preflight(network, optimizer, loop=right) == []


@pytest.mark.parametrize(
    ("loop", "kind", "says"),
    [
        ("for x in", ValueError, "loop must be Python, got a text with invalid syntax in line 1"),
        (len, TypeError, "loop must be a function or its source as a text, got <built-in function len>"),
        (
            eval(compile("lambda: 0", "<a test>", "eval")),
            ValueError,
            r"the source of loop is not at hand \(.*\); give it as a text",
        ),
    ],
    ids=["no Python", "a built-in", "made by eval"],
)
def test_a_loop_that_cannot_be_read_is_refused_in_words(loop: Any, kind: type[Exception], says: str) -> None:
    network = nn.Linear(2, 2)
    with pytest.raises(kind, match=says):
        preflight(network, torch.optim.SGD(network.parameters(), 0.1), loop=loop)


@pytest.mark.parametrize("dtype", ["float16", None, torch.int8, torch.float8_e4m3fn])
def test_a_dtype_of_another_kind_is_refused(dtype: Any) -> None:
    network = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"dtype must be torch\.float16, torch\.bfloat16 or a FloatFormat, got"):
        preflight(network, torch.optim.SGD(network.parameters(), 0.1), dtype=dtype)


def test_a_parameter_that_is_not_finite_is_an_error_and_not_a_small_update() -> None:
    network = nn.Linear(2, 2)
    with torch.no_grad():
        network.weight[0, 0] = torch.inf
    network.weight.grad = torch.ones(2, 2)
    (found,) = preflight(network, torch.optim.SGD(network.parameters(), 0.1))
    assert (found.severity, found.where, found.what) == ("error", "weight", "the parameter holds inf or NaN")
    network.reset_parameters()
    assert preflight(network, torch.optim.SGD(network.parameters(), 0.1)) == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lazy modules are new, says torch
        lazy = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2, device="meta"))
    assert preflight(lazy, torch.optim.SGD(lazy.parameters(), 0.1)) == []


def test_a_state_in_eight_bits_is_read() -> None:
    network = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    optimizer.state[network.weight]["momentum"] = torch.ones(2, 2).to(torch.float8_e4m3fn)
    assert preflight(network, optimizer) == []
    optimizer.state[network.weight]["momentum"] = torch.full((2, 2), torch.nan).to(torch.float8_e4m3fn)
    assert [found.what for found in preflight(network, optimizer)] == ["optimizer state momentum holds inf or NaN"]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optimizers.Momentum(p, CosineDecayLR(0.0, 0.1, 10), 0.9),
        lambda p: optimizers.SGD(p, [0.1, 0.2]),
        lambda p: optimizers.LARS(optimizers.Momentum(p, CosineDecayLR(0.0, 0.1, 10), 0.9)),
        lambda p: FreezeOpt(optimizers.SGD(p, [0.1, 0.2])),
        lambda p: torch.optim.Adafactor(p),
        lambda p: optimizers.AdaFactor(p),  # its relative steps use no rate, and 0 stands in the group
    ],
    ids=["schedule", "list", "LARS", "FreezeOpt", "torch's Adafactor", "AdaFactor"],
)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_any_kind_of_rate_is_looked_at_and_a_sound_one_is_no_finding(make: Any, level: str) -> None:
    network = nn.Linear(3, 2)
    network(torch.ones(1, 3)).sum().backward()
    found = preflight(network, make(list(network.parameters())), level)
    assert not [finding for finding in found if "zero in" not in finding.what]


def test_updates_of_a_schedule_that_round_away_are_found_at_the_rate_of_the_coming_step() -> None:
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(torch.tensor([[2.0**15]]))
    layer.weight.grad = torch.ones(1, 1)
    optimizer = optimizers.SGD(layer.parameters(), [1.0, 2.0**-12])
    assert not named(layer, "half an ulp", optimizer=optimizer)
    optimizer.step()
    assert len(named(layer, "half an ulp", optimizer=optimizer)) == 1
    rms = optimizers.RMSProp(layer.parameters(), 1.0)  # moves by its rate, whatever the size of the gradient
    layer.weight.grad = torch.full((1, 1), 2.0**-20)
    assert not named(layer, "half an ulp", optimizer=rms)


def test_running_statistics_that_a_skipped_step_spoiled_are_found_and_gone_once_reset() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    network.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    assert preflight(network, optimizer) == []
    network(torch.full((3, 4), torch.inf))  # its gradients are NaN, so the step would be skipped
    found = preflight(network, optimizer)
    assert [(f.severity, f.where) for f in found] == [("error", "1.running_mean"), ("error", "1.running_var")]
    network[1].reset_running_stats()  # type: ignore[operator]
    assert preflight(network, optimizer) == []
