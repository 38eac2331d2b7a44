"""AdaSum over processes on the real digits, each rank with its own part of every batch.

    torchrun --standalone --nproc-per-node 2 notebooks/more/boost/torchrun_adasum.py

Any power of two of ranks works. CPU ranks talk over gloo; with one GPU per rank they use nccl. A CPU rank that is not
answered within 60 s ends with an error that names the silent one.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from mpkit.boost.adasum import AdaSum
from mpkit.data import digits


def main(steps: int = 40, batch: int = 32) -> None:
    enough_gpus = torch.cuda.is_available() and dist.is_nccl_available()
    limit = timedelta(seconds=60)
    dist.init_process_group("nccl" if enough_gpus else "gloo", timeout=limit)
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if enough_gpus else torch.device("cpu")

    torch.manual_seed(0)  # the same weights everywhere
    images, labels = digits("train", size=8)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    merger = AdaSum(rank, 1, world, list(network.parameters()))

    if rank == 0:
        print(f"{world} ranks, AdaSum after every step")
    rows = torch.Generator().manual_seed(rank)  # other images on every rank
    for step in range(steps):
        pick = torch.randint(len(images), (batch,), generator=rows)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(images[pick].to(device)), labels[pick].to(device))
        loss.backward()
        merger.update_(optimizer.step)  # the local step, then the updates of all ranks merged
        if rank == 0 and step % 13 == 0:
            print(f"step {step:3d}: loss of rank 0 {loss.item():.3f}")

    flat = torch.cat([p.detach().reshape(-1) for p in network.parameters()])
    every = [torch.empty_like(flat) for _ in range(world)]
    dist.all_gather(every, flat)
    if rank == 0:
        print("all ranks hold the same weights:", all(torch.equal(other, flat) for other in every))
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
