"""Gradient centralization and what OptimizerProcess and ParameterProcess do to parameter groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpkit import optimizers
from mpkit.boost import OptimizerProcess
from mpkit.boost.grad_centralization import centralize_gradients, is_centralized
from mpkit.boost.less_bn import NormalizedLinear
from mpkit.boost.process import regroup

TORCH = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"]
OWN = ["SGD", "Momentum", "Adam", "AdamWeightDecay", "RMSProp", "Adagrad", "AdaMax", "ASGD", "Rprop", "Lamb", "FTRL"]


def grad(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mean_taken(g: Tensor) -> Tensor:
    """The definition, with a loop: each output's mean goes."""
    return torch.stack([row - row.sum() / row.numel() for row in g]) if g.ndim > 1 else g


OWNERS = [
    (nn.Linear(3, 2), [True, False]), (nn.Conv2d(4, 4, 3), [True, False]), (nn.Embedding(3, 2), [True]),
    (nn.Conv2d(4, 4, 3, groups=2), [False, False]), (nn.Conv1d(4, 4, 3, groups=4), [False, False]),
    (nn.BatchNorm2d(4), [False, False]), (nn.LayerNorm((2, 2)), [False, False]), (nn.GroupNorm(2, 4), [False, False]),
    (NormalizedLinear(3, 2, bias=True), [False, False, False]),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "expected"), OWNERS, ids=lambda v: type(v).__name__ * isinstance(v, nn.Module))
def test_who_is_centralized(owner: nn.Module, expected: list[bool]) -> None:
    assert [is_centralized(owner, p) for p in owner.parameters()] == expected


DECOUPLED = {  # their decay never meets the gradient
    **{name: {"decoupled_weight_decay": True} for name in ("NAdam", "RAdam")},
    **{name: {} for name in ("AdamW", "Adafactor", "Muon")},
}


@pytest.mark.parametrize("name", [name for name in TORCH if name != "AdamW"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_centralized_step_is_a_step_on_centralized_gradients(name: str, decay: float) -> None:
    """Any torch.optim optimizer; decay that is added to the gradient is centralized with it."""
    if name == "Rprop" and decay:
        pytest.skip("Rprop has no weight decay")
    w0 = grad((3, 2, 2), 7)
    weight, by_hand = nn.Parameter(w0.clone()), nn.Parameter(w0.clone())
    options: dict[str, Any] = {"weight_decay": decay} if decay else {}
    kind = getattr(torch.optim, name)
    centralized = kind([{"params": [weight], "grad_centralization": True}], lr=0.1, **options)
    plain = kind([by_hand], lr=0.1)
    centralize_gradients(centralized)
    for seed in range(3):
        weight.grad = grad(w0.shape, seed)
        by_hand.grad = mean_taken(grad(w0.shape, seed) + decay * by_hand.detach())
        centralized.step()
        plain.step()
        torch.testing.assert_close(weight, by_hand, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", DECOUPLED)
def test_a_decay_that_never_meets_the_gradient_is_not_centralized(name: str) -> None:
    weight = nn.Parameter(grad((3, 4), 7))
    group = {"params": [weight], "grad_centralization": True}
    optimizer = getattr(torch.optim, name)([group], lr=0.1, weight_decay=0.3, **DECOUPLED[name])
    centralize_gradients(optimizer)
    weight.grad = grad((3, 4), 8)
    optimizer.step()
    torch.testing.assert_close(weight.grad, mean_taken(grad((3, 4), 8)), rtol=0, atol=4 * 2.0**-22)  # sums of 4


@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"weight_decay": 0.2, "maximize": True}])
@pytest.mark.parametrize("by_name", [False, True])
def test_what_a_closure_computes_is_centralized_too(options: dict[str, Any], by_name: bool) -> None:
    weight = nn.Parameter(grad((3, 4), 7))
    sgd = torch.optim.SGD([{"params": [weight], "grad_centralization": True}], lr=0.5, **options)
    centralize_gradients(sgd)
    before, g = weight.detach().clone(), grad((3, 4), 8)

    def closure() -> Tensor:
        weight.grad = g.clone()
        return torch.tensor(2.0)

    assert (sgd.step(closure=closure) if by_name else sgd.step(closure)) == 2.0
    direction = mean_taken((-g if "maximize" in options else g) + options.get("weight_decay", 0.0) * before)
    torch.testing.assert_close(weight.detach(), before - 0.5 * direction)


def test_asking_twice_centralizes_once_and_the_handle_takes_it_away() -> None:
    weight, not_asked = nn.Parameter(torch.zeros(1, 2)), nn.Parameter(torch.zeros(1, 2))
    sgd = torch.optim.SGD([{"params": [weight], "grad_centralization": True}, {"params": [not_asked]}], lr=1.0)
    centralize_gradients(sgd)
    handle = centralize_gradients(sgd)
    assert len(sgd._optimizer_step_pre_hooks) == 1
    for moved in ([1.0, -1.0], [0.0, -4.0]):
        weight.grad, not_asked.grad = torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 3.0]])
        sgd.step()
        assert weight.tolist() == [moved]
        handle.remove()
    assert not_asked.tolist() == [[-2.0, -6.0]]


def test_ours_centralize_where_the_width_is_a_multiple() -> None:
    """Of what the group says, and of 16 where MindSpore is followed."""
    rows = ((16, True, True, 0), (17, True, True, -1), (8, True, True, -1), (17, True, False, 0), (8, 16, False, -1))
    for width, multiple, faithful, left in rows:
        weight = nn.Parameter(torch.zeros(1, width))
        optimizer = optimizers.SGD([{"params": [weight], "grad_centralization": True}], 1.0, faithful=faithful)
        optimizer.param_groups[0]["grad_centralization"] = multiple
        weight.grad = torch.ones(1, width)
        optimizer.step()
        assert weight.tolist() == [[left] * width]


def test_an_offloaded_adam_centralizes_nothing() -> None:
    for kind, moves in ((optimizers.Adam, False), (optimizers.AdamOffload, True)):
        weight = nn.Parameter(torch.zeros(1, 16))
        weight.grad = torch.ones(1, 16)
        kind([{"params": [weight], "grad_centralization": True}]).step()
        assert bool(weight.all()) == moves


def test_the_decay_of_a_scaled_gradient_is_scaled_too() -> None:
    """torch.amp leaves gradients of fused optimizers multiplied by the scale; the step must come out the same."""
    weights = [nn.Parameter(grad((2, 3), 5)) for _ in range(2)]
    for weight, scale in zip(weights, (1.0, 1024.0)):
        sgd = torch.optim.SGD([{"params": [weight], "grad_centralization": True}], lr=0.1, weight_decay=0.1, fused=True)
        centralize_gradients(sgd)
        sgd.grad_scale = torch.tensor(scale)  # type: ignore[attr-defined]
        sgd.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
        weight.grad = grad((2, 3)) * scale
        sgd.step()
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("home", [torch.optim, optimizers])
@pytest.mark.parametrize("name", sorted({*TORCH, *OWN}))
def test_every_optimizer_keeps_class_state_and_decay(home: Any, name: str) -> None:
    """MindSpore rebuilds the optimizer, which fails for Adam and AdamWeightDecay and loses the state."""
    if name not in (TORCH if home is torch.optim else OWN):
        pytest.skip("one of the other library")
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    momentum = {"momentum": 0.9} if name == "Momentum" else {}
    optimizer = getattr(home, name)(net.parameters(), 0.01, **momentum)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = {id(p): id(s) for p, s in optimizer.state.items()}
    options = {k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "grad_centralization")}

    process = OptimizerProcess(optimizer)
    process.add_grad_centralization(net)
    assert process.generate_new_optimizer() is optimizer

    assert {id(p): id(s) for p, s in optimizer.state.items()} == state
    members = [[tuple(p.shape) for p in g["params"]] for g in optimizer.param_groups]
    assert members == [[(4, 3), (2, 4)], [(4,), (4,), (4,), (2,)]]
    for group in optimizer.param_groups:
        assert {k: v for k, v in group.items() if k in options} == options
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


def test_a_parameter_belongs_to_the_module_that_holds_it_not_to_one_around_it() -> None:
    norm = nn.LayerNorm((2, 2))
    net = nn.Sequential(norm, nn.Sequential(norm))
    owners = OptimizerProcess(torch.optim.SGD(net.parameters(), lr=0.1)).build_params_dict(net)
    assert set(owners.values()) == {norm}


def test_parameters_that_leave_take_their_state_with_them() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    sgd = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for p in parameters:
        p.grad = torch.ones_like(p)
    sgd.step()
    regroup(sgd, [{"params": parameters[:1]}, {"params": []}])
    assert len(sgd.param_groups) == 1
    assert list(sgd.state) == parameters[:1]
    assert sgd.param_groups[0]["momentum"] == 0.9
    with pytest.raises(ValueError, match="every group is empty"):
        regroup(sgd, [{"params": []}])
