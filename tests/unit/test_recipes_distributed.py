"""Two gloo processes: one tensor has one delayed scale, and DistributedDataParallel averages gradients as ever."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from support import in_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpkit.casting import Cast, cast_like, end_step, uniform
from mpkit.formats import E4M3FN
from mpkit.policies import tensor_scale_preset
from mpkit.scalers import TensorScaler, update_all_

RECIPE = uniform("short", Cast(E4M3FN, "tensor", tensor_scale_preset("te_delayed", amax_history_len=4)))
LARGEST = ((1.0, 5.0), (2.0, 0.5), (0.25, 3.0))  # of the input, per step and process


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
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
    torch.save((scales, [p.detach() for p in net.parameters()]), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_all_processes_have_the_scale_of_the_largest_amax(tmp_path: Path) -> None:
    in_processes(worker, str(tmp_path))
    (scales, weights), (other_scales, other_weights) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
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


def expert_worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    patience = timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=patience)
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
    torch.save((before, [scales_of(net, i) for i in range(2)]), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def scales_of(net: Experts, i: int) -> dict[str, list[float]]:
    scalers = net.experts[i]._modules["recipe_scales"].sites["0"]
    return {name: scaler.state.history.tolist() for name, scaler in scalers.items()}


def test_layers_that_one_process_alone_ran_have_the_same_scales_in_all(tmp_path: Path) -> None:
    in_processes(expert_worker, str(tmp_path))
    (before, after), other = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert other == (before, after)
    # expert 0 saw inputs of 1 (process 0) and then of 2 (process 1), expert 1 the other way round
    assert [expert["input"] for expert in before] == [[0.0, 0.0, 1.0, 2.0], [0.0, 0.0, 2.0, 1.0]]
    assert after == before
    assert all(expert["weight"][-1] != before[1 - i]["weight"][-1] for i, expert in enumerate(before))


def unfinite_worker(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    policy = tensor_scale_preset("te_delayed", amax_history_len=3)
    scalers = [TensorScaler(policy) for _ in range(2)]
    for scaler, sick in zip(scalers, range(2)):
        scaler.observe_(torch.tensor(torch.nan if rank == sick else 3.5))
    update_all_(scalers)
    torch.save([scaler.state_dict() for scaler in scalers], f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_an_amax_that_is_no_number_in_one_process_is_none_in_all(tmp_path: Path) -> None:
    in_processes(unfinite_worker, str(tmp_path))
    for state in (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)):
        assert all(one["history"].isnan().any() and float(one["scale"]) == 1.0 for one in state)
