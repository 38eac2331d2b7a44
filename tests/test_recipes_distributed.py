"""Two gloo processes: one tensor has one delayed scale, and DistributedDataParallel averages gradients as ever."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from support import in_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpkit.casting import Cast, cast_like, uniform
from mpkit.formats import E4M3FN
from mpkit.policies import tensor_scale_preset

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
    assert [step[0] for step in scales] == [1.0, torch.tensor(448 / 5).item(), torch.tensor(448 / 5).item()]
