"""The boost train cells in two processes over gloo, against the same training simulated in one."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from support import in_group
from torch import Tensor, nn

from mpkit.boost import (
    AutoBoost,
    BoostTrainOneStepCell,
    BoostTrainOneStepWithLossScaleCell,
    FreezeOpt,
    GroupLossScaleManager,
)
from mpkit.boost.adasum import adasum
from mpkit.boost.group_loss_scale import GROWTH, SHRINK
from mpkit.step import WithLossCell

WORLD, STEPS = 2, 4
SCENARIOS = [  # freezing in all of them: with each way to reduce, each scaling and each accumulation
    " ".join(filter(None, parts))
    for parts in product(("mean", "adasum", "parallel"), ("", "scaled"), ("", "accumulated", "summed"))
]


def loss_net() -> WithLossCell:
    torch.manual_seed(0)
    return WithLossCell(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 2)), nn.MSELoss())


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)


def boost_of(scenario: str) -> AutoBoost:
    flags = {"mode": "manual", "less_bn": False, "grad_freeze": True, "adasum": scenario.startswith("adasum")}
    accumulate = {"grad_accumulation_step": 2} if scenario.endswith("accumulated") else {}
    config: dict[str, Any] = {
        "boost": {**flags, "grad_accumulation": bool(accumulate)},
        "common": {"device_number": 1},
        "grad_freeze": {"param_groups": 3, "freeze_type": 0, "freeze_p": 0.5, "total_steps": 4},
        "grad_accumulation": accumulate,
    }
    return AutoBoost("O0", config)


def processed(scenario: str) -> tuple[WithLossCell, FreezeOpt, AutoBoost]:
    net, boost = loss_net(), boost_of(scenario)
    _, optimizer = boost.network_auto_process_train(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert isinstance(optimizer, FreezeOpt)
    return net, optimizer, boost


def rank_weights(rank: int, scenario: str) -> list[Tensor]:
    """What one rank holds after training with the boost cell."""
    net, optimizer, boost = processed(scenario)
    whole: nn.Module = net
    if scenario.startswith("parallel"):
        whole = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    options: dict[str, Any] = {"boost": boost, "accumulation_steps": 2 if scenario.endswith("summed") else 1}
    cell: Any = BoostTrainOneStepCell(whole, optimizer, **options)
    if "scaled" in scenario:
        cell = BoostTrainOneStepWithLossScaleCell(whole, optimizer, torch.tensor(256.0), **options)
    assert cell.check_adasum_enable() == scenario.startswith("adasum")
    for step in range(STEPS):
        cell(*batch(rank, step))
    return [p.detach() for p in net.parameters()]


def simulated(scenario: str) -> list[Tensor]:
    """The same in one process: gradients averaged, or the workers' own steps merged."""
    net, optimizer, _ = processed(scenario)
    parameters = list(net.parameters())
    micro = {"accumulated": 2, "summed": 2}.get(scenario.split()[-1], 1)
    for start in range(0, STEPS, micro):
        means = []
        for rank in range(WORLD):
            seen = [torch.autograd.grad(net(*batch(rank, start + i)), parameters) for i in range(micro)]
            means.append([sum(grads) / micro for grads in zip(*seen)])
        if not scenario.startswith("adasum"):
            for p, *grads in zip(parameters, *means):
                p.grad = sum(grads) / WORLD
            optimizer.step()
            continue
        old, deltas = [p.detach().clone() for p in parameters], []
        for mean in means:
            with torch.no_grad():
                torch._foreach_copy_(parameters, old)
            for p, g in zip(parameters, mean):
                p.grad = g
            optimizer.step_group(optimizer.index)
            deltas.append([o - p.detach() for o, p in zip(old, parameters)])
        optimizer.advance()
        with torch.no_grad():
            torch._foreach_copy_(parameters, [o - d for o, d in zip(old, adasum(deltas))])
    return [p.detach() for p in parameters]


class Marked(nn.Module):
    """Three layers in two groups; `burst` makes the gradient that layer 1 hands back infinite."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 2)])
        groups = [list(self.layers[0].parameters()), list(self.layers[1:].parameters())]
        self.manager = GroupLossScaleManager(2.0**10, groups)
        self.burst = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.manager(self.layers[0](self.manager(x, 0, 1)), 1, 2)
        if self.burst:
            x.register_hook(lambda grad: grad * torch.inf)
        return nn.functional.mse_loss(self.manager(self.layers[2](self.layers[1](x)), 2, 3), y)


def group_scales(rank: int) -> list[Tensor]:
    """Weights and scales of a rank; only on rank 0 group 2 overflows, in step 1."""
    net = Marked()
    cell = BoostTrainOneStepWithLossScaleCell(net, torch.optim.SGD(net.parameters(), lr=0.1), net.manager)
    for step in range(STEPS):
        net.burst = (step, rank) == (1, 0)
        assert cell(*batch(rank, step)).overflow == (step == 1)
    return [*(p.detach() for p in net.parameters()), net.manager.scales]


def everything(rank: int) -> dict[str, list[Tensor]]:
    return {scenario: rank_weights(rank, scenario) for scenario in SCENARIOS} | {"group scales": group_scales(rank)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Tensor]]]:
    return in_group(everything, tmp_path_factory.mktemp("ranks"), WORLD)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_processes_train_as_the_simulation_does(ranks: list[dict[str, list[Tensor]]], scenario: str) -> None:
    for one, other, want in zip(*(r[scenario] for r in ranks), simulated(scenario), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, want, rtol=1e-5, atol=1e-6)


def test_group_scales_stay_the_same_in_all_processes(ranks: list[dict[str, list[Tensor]]]) -> None:
    net = Marked()
    parameters = list(net.parameters())
    for step in range(STEPS):
        if step == 1:
            continue  # skipped everywhere
        net.manager.set_loss_scale_status(2, 1.0)
        both = [torch.autograd.grad(net(*batch(rank, step)), parameters) for rank in range(WORLD)]
        with torch.no_grad():
            for p, one, other in zip(parameters, *both):
                p -= 0.1 * (one + other) / 2
    # group 1 was only reached by the overflow: neither smaller nor larger
    scales = torch.tensor([GROWTH ** (STEPS - 1), SHRINK * GROWTH ** (STEPS - 1)]) * 2.0**10
    for seen in ranks:
        for got, want in zip(seen["group scales"], [*(p.detach() for p in parameters), scales], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
