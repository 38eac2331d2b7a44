"""One decision for all processes: a step is applied everywhere or nowhere."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

if dist.is_available():
    # The default arguments of this module keep the group that is there when it is first imported, and torch imports it
    # with the first optimizer. Imported now they keep none, so destroy_process_group really ends gloo's threads; alive
    # at the end of the interpreter, one of them can abort a process whose work is done.
    import torch.distributed.nn.functional


def several_processes() -> bool:
    """Whether this process trains together with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def averaging_wrapper(network: nn.Module) -> DistributedDataParallel | None:
    """The part of `network` that averages gradients across processes by itself, if there is one."""
    return next((m for m in network.modules() if isinstance(m, DistributedDataParallel)), None)


def average_(parameters: Iterable[Tensor]) -> None:
    """Replace every gradient by its mean over the processes; a missing one counts as zero.

    One message per dtype. Called before the gradients are unscaled, as DistributedDataParallel does, so that an inf
    or NaN of one process reaches all (MindSpore reduces after unscaling; for a power-of-two scale the sums agree bit
    for bit unless one of them leaves the range).
    """
    grads: dict[torch.dtype, list[Tensor]] = {}
    for p in parameters:
        if not p.requires_grad:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        grads.setdefault(p.grad.dtype, []).append(p.grad)
    for group in grads.values():
        flat = torch.cat([g.reshape(-1) for g in group])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for g, part in zip(group, flat.split([g.numel() for g in group])):
            g.copy_(part.view_as(g))


def agree_(found_inf: Tensor) -> Tensor:
    """Set `found_inf` to the largest of all processes, in place: one overflow skips the step everywhere."""
    dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
    return found_inf
