"""One decision for all processes: a step is applied everywhere or nowhere."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpkit.optimizers.update import as_before, in_one
from mpkit.scalers.tensor_scale import several_processes

if dist.is_available():
    # The default arguments of this module keep the group that is there when it is first imported, and torch imports it
    # with the first optimizer. Imported now they keep none, so destroy_process_group really ends gloo's threads; alive
    # at the end of the interpreter, one of them can abort a process whose work is done.
    import torch.distributed.nn.functional


def rank_and_size() -> tuple[int, int]:
    """Which of how many processes this one is; (0, 1) where torch.distributed was not set up."""
    return (dist.get_rank(), dist.get_world_size()) if several_processes() else (0, 1)


def averaging_wrapper(network: nn.Module) -> DistributedDataParallel | None:
    """The part of `network` that averages gradients across processes by itself, if there is one."""
    return next((m for m in network.modules() if isinstance(m, DistributedDataParallel)), None)


def averages(replica: DistributedDataParallel, parameters: Iterable[Tensor]) -> bool:
    """Whether `replica` averages the gradients of all these, so that every process has the same ones."""
    ignored = set(replica.parameters_to_ignore)
    sent = {id(p) for name, p in replica.module.named_parameters() if name not in ignored}
    return all(id(p) in sent for p in parameters)


NONE, SPARSE, DENSE = 0, 1, 2  # what kind of gradient a parameter has; of two kinds the larger is the common one


def average_(parameters: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace every gradient by its mean over the processes (of `group`).

    One that some processes lack counts as zero there; one that all lack stays missing, so that the optimizer leaves
    its parameter alone. Sparse gradients stay sparse, with the entries of all. One message tells what kinds there are
    (read on the host only where a gradient is missing or sparse), then one goes out per dtype. Called before the
    gradients are unscaled, as DistributedDataParallel does, so that an inf or NaN of one process reaches all
    (MindSpore reduces after unscaling; for a power-of-two scale the sums agree bit for bit unless one of them leaves
    the range).
    """
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        return
    kinds = [NONE if p.grad is None else SPARSE if p.grad.is_sparse else DENSE for p in trained]
    common = torch.tensor(kinds, dtype=torch.uint8, device=trained[0].device)
    dist.all_reduce(common, op=dist.ReduceOp.MAX, group=group)
    if min(kinds) < DENSE:  # with a dense gradient for every parameter there is nothing to learn from the others
        kinds = common.tolist()
    grads: dict[torch.dtype, list[Tensor]] = {}
    for p, kind in zip(trained, kinds):
        if kind == SPARSE:
            nothing = torch.sparse_coo_tensor(torch.empty(1, 0), p.new_empty(0, *p.shape[1:]), p.shape)
            own = nothing if p.grad is None else p.grad
            mean_([own], group=group)
            p.grad = own.coalesce()
        elif kind == DENSE:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            grads.setdefault(p.grad.dtype, []).append(p.grad)
    for alike in grads.values():
        mean_([flat := in_one(alike)], group=group)
        torch._foreach_copy_(alike, as_before(flat, alike))


def mean_(tensors: Iterable[Tensor], degree: float | None = None, group: dist.ProcessGroup | None = None) -> None:
    """Replace each tensor by its mean over the processes (their sum over `degree`), in place.

    It is divided before it is summed, as DistributedDataParallel does: the sum of float16 gradients may overflow where
    their mean does not.
    """
    for tensor in tensors:
        tensor /= dist.get_world_size(group) if degree is None else degree
        dist.all_reduce(tensor, group=group)


def agree_(found_inf: Tensor) -> Tensor:
    """Set `found_inf` to the largest of all processes, in place: one overflow skips the step everywhere."""
    dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
    return found_inf
