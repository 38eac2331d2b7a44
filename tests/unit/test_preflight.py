"""What preflight finds before the first step, and the way out of each finding, followed: the finding is gone."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_diagnose import chain, rows
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mpkit import optimizers
from mpkit.boost import FreezeOpt
from mpkit.diagnose import Finding, preflight
from mpkit.diagnose.words import WORDS
from mpkit.formats import BF16, FP16, FP32
from mpkit.optimizers import BFloat16Weights
from mpkit.schedules import CosineDecayLR


def named(network: nn.Module, word: str, level: str = "O2", optimizer: Any = None, **options: Any) -> list[Finding]:
    optimizer = optimizer or torch.optim.SGD(network.parameters(), 0.1)
    return [found for found in preflight(network, optimizer, level, **options) if word in str(found)]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "auto", "torch_autocast"])
def test_a_sound_set_up_has_no_finding(level: str) -> None:
    network = chain(nn.ReLU())
    F.cross_entropy(network(rows()[0]), rows()[1]).backward()
    assert preflight(network, torch.optim.Adam(network.parameters(), 1e-3, eps=1e-4), level) == []
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    assert preflight(table, torch.optim.SGD(table.parameters(), 0.1), level) == []


def test_an_optimizer_of_another_network_or_of_a_part() -> None:
    network = chain(nn.ReLU())
    other = torch.optim.SGD(copy.deepcopy(network).parameters(), 0.1)
    part = torch.optim.SGD([network.first.weight], 0.1)
    assert "build the optimizer from this network" in named(network, "not in this network", optimizer=other)[0].way_out
    assert named(network, "in no group", optimizer=part)
    part.add_param_group({"params": [p for p in network.parameters() if p is not network.first.weight]})
    assert preflight(network, part) == []
    for p in network.parameters():
        p.requires_grad_(p is network.first.weight)
    assert preflight(network, torch.optim.SGD([network.first.weight], 0.1)) == []


def test_a_constant_is_zero_up_to_half_of_the_smallest_value() -> None:
    def constants(half: bool, level: str, **options: Any) -> list[tuple[str, str]]:
        network = chain().half() if half else chain()
        optimizer = torch.optim.Adam(network.parameters(), 1e-3, **options)
        return [(found.severity, found.what) for found in named(network, "is zero in", level, optimizer)]

    what = "eps=2.98023e-08 is zero in fp16 (smallest value 5.96e-08)"
    assert constants(True, "O2", eps=2.0**-25) == [("error", what)]
    assert constants(False, "O3", eps=2.0**-25) == [("warning", what)]  # it is stored in float32, and cast
    assert constants(False, "O2", eps=2.0**-25) == constants(True, "O2", eps=2.0**-25 * 1.01) == []


def weights(dtype: torch.dtype, size: float = 1.0, grad: float | None = None) -> nn.Linear:
    layer = nn.Linear(4, 4, bias=False).to(dtype)
    with torch.no_grad():
        layer.weight.fill_(size)
    layer.weight.grad = None if grad is None else torch.full((4, 4), grad).to(dtype)
    return layer


def test_updates_that_round_away_and_the_way_out() -> None:
    for dtype, rate, word in ((torch.float16, 0.1, "float32"), (torch.float32, 1e-6, "learning rate")):
        layer = weights(dtype, grad=1e-3)
        optimizer = torch.optim.SGD(layer.parameters(), rate)
        (found,) = named(layer, "half an ulp", "O0", optimizer)  # nothing decays
        before = layer.weight.clone()
        optimizer.step()
        assert torch.equal(layer.weight, before)  # and so it is
        assert word in found.way_out
        sound = weights(torch.float32, grad=1e-3)
        assert not named(sound, "half an ulp", "O0", torch.optim.SGD(sound.parameters(), 0.1))


@pytest.mark.parametrize("way", ["kahan", "stochastic"])
def test_bfloat16_weights_are_the_way_out_and_are_not_scolded(way: Any) -> None:
    layer = weights(torch.bfloat16, grad=1.0)
    plain = torch.optim.AdamW(layer.parameters(), 1e-4, weight_decay=0.0)
    (found,) = named(layer, "updates are below half an ulp", "torch_autocast", plain)
    assert "BFloat16Weights(optimizer)" in found.way_out
    mended = BFloat16Weights(torch.optim.AdamW(layer.parameters(), 1e-4), way)
    assert preflight(layer, mended, "torch_autocast") == preflight(layer, mended, "O2") == []
    for _ in range(400):
        layer.weight.grad = torch.ones_like(layer.weight)
        mended.step()
    assert float(layer.weight.detach().mean()) < 0.98  # 400 updates of 1e-4, none of which bfloat16 alone would make


@pytest.mark.parametrize("kind", [torch.optim.AdamW, partial(torch.optim.Adam, decoupled_weight_decay=True)])
def test_weight_decay_that_rounds_away_is_told_apart(kind: Any) -> None:
    layer = weights(torch.bfloat16, grad=1.0)
    optimizer = kind(layer.parameters(), 0.1, weight_decay=0.01)  # updates of 0.1, decay of 0.001
    (found,) = [f for f in preflight(layer, optimizer, "O0") if "half an ulp" in f.what]
    assert "never decay" in found.what
    assert "BFloat16Weights" in found.way_out
    assert not named(layer, "decay", "O0", torch.optim.AdamW(layer.parameters(), 0.1, weight_decay=0.1))
    assert not named(layer, "decay", "O0", torch.optim.AdamW(layer.parameters(), 0.1, weight_decay=0.0))
    layer.weight.data[:2] = 1.5  # half of them decay: 0.003 * 1.5 is more than half an ulp
    assert not named(layer, "decay", "O0", torch.optim.AdamW(layer.parameters(), 0.1, weight_decay=0.03))
    wide = weights(torch.float32)
    assert not named(wide, "decay", "O0", torch.optim.AdamW(wide.parameters(), 0.1, weight_decay=0.01))


def test_an_average_of_weights_in_16_bits_never_moves() -> None:
    """d8ahazard/sd_dreambooth_extension#1415, PaddlePaddle/PaddleMIX#515, NUS-HPC-AI-Lab/VideoSys#6."""
    network = weights(torch.float32)
    for dtype, stays in ((torch.bfloat16, True), (torch.float32, False)):
        average = AveragedModel(copy.deepcopy(network).to(dtype), multi_avg_fn=get_ema_multi_avg_fn(0.999))
        average.update_parameters(network)
        moved = weights(torch.float32, 1.5).to(dtype)
        for _ in range(20):
            average.update_parameters(moved)
        assert bool((average.module.weight == 1).all()) == stays
        assert bool(named(network, "average of the weights", average=average)) == stays
        assert bool(named(network, "average of the weights", average=average.module.state_dict())) == stays


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_more_than_half_of_the_updates_that_move_must_round_away(kind: Any) -> None:
    def share(gradients: list[float], values: list[float]) -> list[str]:
        layer = nn.Linear(len(values), 1, bias=False)
        layer.weight = nn.Parameter(torch.tensor([values]))
        layer.weight.grad = torch.tensor([gradients])
        optimizer = kind(layer.parameters(), lr=2.0**-10)
        return [" ".join(found.what.split()[:2]) for found in named(layer, "half an ulp", optimizer=optimizer)]

    assert share([1.0, 1.0], [2.0**14, 2.0**14]) == []  # an update of 2**-10 is half an ulp of 2**14
    assert share([1.0, 1.0, 1.0, 0.0], [2.0**15, 2.0**15, 1.0, 2.0**15]) == ["67 %"]  # a gradient of 0 moves nothing
    assert share([1.0, 1.0, 0.0], [2.0**15, 1.0, 2.0**15]) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optimizers.Adam(p, CosineDecayLR(0.0, 1e-3, 10)),
        lambda p: optimizers.LARS(optimizers.Momentum(p, 0.1, 0.9)),
        lambda p: FreezeOpt(optimizers.Momentum(p, 0.1, 0.9)),
        lambda p: torch.optim.Adafactor(p, 1e-3),
        lambda p: torch.optim.Adagrad(p, 1e-7),
        lambda p: torch.optim.Adam(p, torch.tensor(1e-3)),
    ],
)
def test_rates_and_wrappers_of_every_kind(make: Any) -> None:
    network = chain(nn.ReLU())
    F.cross_entropy(network(rows()[0]), rows()[1]).backward()
    assert preflight(network, make(list(network.parameters()))) == []


def test_lazy_modules_meta_tensors_and_integers_hold_nothing() -> None:
    network = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3, device="meta"), nn.BatchNorm1d(3))
    assert preflight(network, torch.optim.SGD(network[2].parameters(), 0.1))[0].what.startswith("it is trainable")


def test_a_decay_that_enters_the_gradient_is_no_decay_that_is_lost() -> None:
    layer = weights(torch.bfloat16)
    found = preflight(layer, torch.optim.SGD(layer.parameters(), 1e-5, weight_decay=0.01))
    assert not [f for f in found if "decay" in f.what]


@pytest.mark.parametrize(("level", "cast"), [("O2", "level O2"), ("torch_autocast", "torch.autocast")])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_all_that_is_found_at_once_in_order(level: str, cast: str, bad: float) -> None:
    a, b, c = weights(torch.float16, 1.0, 1e-4), weights(torch.float32, bad, bad), weights(torch.bfloat16)
    network, stranger = nn.ModuleDict({"a": a, "b": b, "c": c}), weights(torch.float32, 1e4, 1.0).weight
    network.register_buffer("sums", torch.tensor([bad]))
    network.register_buffer("mask", torch.tensor([0.0, -math.inf]))  # is no fault
    groups = [{"params": [c.weight, stranger]}, {"params": [a.weight]}]
    optimizer = torch.optim.AdamW(groups, 1e-5, eps=1e-9, weight_decay=0.01)
    found = preflight(network, optimizer, level, average={"a": torch.ones(1), "b": torch.ones(1).half()})
    decay = {"lost": "100 %", "decay": 1e-7}
    wanted: list[tuple[str, str, str, dict[str, Any]]] = [
        ("error", "b.weight", "gradient_not_finite", {"count": 1}),
        ("error", "a.weight", "parameter_low", {"dtype": "float16", "cast": cast}),
        ("error", "b.weight", "parameter_not_finite", {}),
        ("error", "c.weight", "parameter_low", {"dtype": "bfloat16", "cast": cast}),
        ("error", "sums", "buffer_not_finite", {}),
        ("error", "optimizer", "strangers", {"count": 1}),
        ("warning", "b.weight", "left_out", {"count": 1}),
        ("error", "optimizer group 1", "constant_zero", {"key": "eps", "value": 1e-9, "fmt": FP16}),
        ("warning", "c.weight", "decay_lost", decay | {"fmt": BF16}),
        ("warning", "a parameter", "updates_lost", {"lost": "100 %", "fmt": FP32}),
        ("warning", "a.weight", "updates_lost", {"lost": "100 %", "fmt": FP16}),
        ("warning", "a.weight", "decay_lost", decay | {"fmt": FP16}),
        ("warning", "average", "average_low", {"dtype": "float16", "half": 2.0**-11}),
    ]
    told = [(f.severity, f.where, f.what) for f in found]
    assert told == [(s, where, WORDS["preflight"][key]["what"].format(**values)) for s, where, key, values in wanted]
    assert sum(cast in f.way_out for f in found) == 2
