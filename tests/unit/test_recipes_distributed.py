"""Two gloo processes: one tensor has one delayed scale, and DistributedDataParallel averages gradients as ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support import in_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpkit.casting import Cast, cast_like, end_step, uniform
from mpkit.formats import E4M3FN
from mpkit.policies import tensor_scale_preset
from mpkit.scalers import TensorScaler, update_all_

RECIPE = uniform("short", Cast(E4M3FN, "tensor", tensor_scale_preset("te_delayed", amax_history_len=4)))
LARGEST = ((1.0, 5.0), (2.0, 0.5), (0.25, 3.0))  # of the input, per step and process


def trained(rank: int) -> tuple[list[list[float]], list[torch.Tensor]]:
    torch.manual_seed(0)
    net = cast_like(nn.Sequential(nn.Linear(8, 4)), RECIPE)
    parallel = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    scales = []
    for amaxes in LARGEST:
        optimizer.zero_grad()
        parallel(torch.linspace(-1, 1, 16).view(2, 8) * amaxes[rank]).square().sum().backward()
        optimizer.step()
        sites = net[0]._modules["recipe_scales"].sites["0"]
        scales.append([float(sites[name].scale) for name in ("input", "weight", "grad")])
    return scales, [p.detach() for p in net.parameters()]


def test_all_processes_have_the_scale_of_the_largest_amax(tmp_path: Path) -> None:
    (scales, weights), (other_scales, other_weights) = in_group(trained, tmp_path)
    assert scales == other_scales
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights))
    assert [step[0] for step in scales] == [torch.tensor(448 / 5).item()] * 3


class Experts(nn.Module):
    """Each process sends its rows to one of two layers, as a mixture of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 4, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.experts[chosen](x)


def with_experts(rank: int) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(0)
    net = cast_like(Experts(), RECIPE)
    parallel = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(net.parameters(), 2.0**-4)
    for step in range(2):  # this process's expert, with this process's largest input; then the other way round
        optimizer.zero_grad()
        parallel(torch.full((2, 8), 2.0**rank), (rank + step) % 2).sum().backward()
        optimizer.step()
    if rank == 0:  # nobody answers an evaluation of one process
        net.eval()
        with torch.no_grad():
            net(torch.ones(2, 8), 0)
        net.train()
    before = [scales_of(net, i) for i in range(2)]
    end_step(net)
    return before, [scales_of(net, i) for i in range(2)]


def scales_of(net: Experts, i: int) -> dict[str, list[float]]:
    scalers = net.experts[i]._modules["recipe_scales"].sites["0"]
    return {name: scaler.state.history.tolist() for name, scaler in scalers.items()}


def test_layers_that_one_process_alone_ran_have_the_same_scales_in_all(tmp_path: Path) -> None:
    (before, after), other = in_group(with_experts, tmp_path)
    assert other == (before, after)
    # expert 0 saw inputs of 1 (process 0) and then of 2 (process 1), expert 1 the other way round
    assert [expert["input"] for expert in before] == [[0.0, 0.0, 1.0, 2.0], [0.0, 0.0, 2.0, 1.0]]
    assert after == before
    assert all(expert["weight"][-1] != before[1 - i]["weight"][-1] for i, expert in enumerate(before))


def with_nan(rank: int) -> list[dict[str, Any]]:
    policy = tensor_scale_preset("te_delayed", amax_history_len=3)
    scalers = [TensorScaler(policy) for _ in range(2)]
    for scaler, sick in zip(scalers, range(2)):
        scaler.observe_(torch.tensor(torch.nan if rank == sick else 3.5))
    update_all_(scalers)
    return [scaler.state_dict() for scaler in scalers]


def test_an_amax_that_is_no_number_in_one_process_is_none_in_all(tmp_path: Path) -> None:
    for state in in_group(with_nan, tmp_path):
        assert all(one["history"].isnan().any() and float(one["scale"]) == 1.0 for one in state)
