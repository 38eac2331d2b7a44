"""One training cell per freeze group, as MindSpore has them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mpkit.arguments import check_flags, check_kind, check_number
from mpkit.boost.grad_accumulation import GradientAccumulation
from mpkit.boost.grad_freeze.optimizer import FreezeOpt
from mpkit.step.distributed import mean_


def freeze_cell(
    reducer_flag: bool,
    network: nn.Module,
    optimizer: FreezeOpt,
    sens: float,
    grad: object,
    use_grad_accumulation: bool,
    mean: bool | None = None,
    degree: int | None = None,
    max_accumulation_step: int = 1,
) -> tuple[FreezeTrainCell, ...]:
    """One training cell per freeze group; cell i trains the parameters of group i.

    Args:
        reducer_flag:           sum gradients over the processes of torch.distributed after each backward pass.
        network:                returns the loss.
        optimizer:              a `FreezeOpt`.
        sens:                   the backward pass starts from this number; it is not divided out.
        grad:                   unused: autograd needs no gradient function. Kept for the signature.
        use_grad_accumulation:  each cell updates with the mean of `max_accumulation_step` of its calls.
        mean, degree:           divide the sum by `degree` (None: the number of processes) when `mean`.
    Raises:  TypeError if `optimizer` is no FreezeOpt or `sens` no number.
    Source:  MindSpore boost.grad_freeze.freeze_cell.
    """
    if not isinstance(optimizer, FreezeOpt):
        raise TypeError(f"optimizer must be a FreezeOpt, got {type(optimizer).__name__}; wrap it: FreezeOpt(optimizer)")
    check_kind("network", network, nn.Module, "an nn.Module that returns the loss")
    check_number("sens", sens, low=-math.inf)
    check_flags(reducer_flag=reducer_flag, use_grad_accumulation=use_grad_accumulation)
    steps = max_accumulation_step if use_grad_accumulation else 1
    cells = (
        FreezeTrainCell(network, optimizer, i, float(sens), reducer_flag, mean, degree, steps)
        for i in range(len(optimizer.groups))
    )
    return tuple(cells)


class FreezeTrainCell(nn.Module):
    """Forward, backward for one freeze group from `sens`, reduce, update; -> the loss. See `freeze_cell`."""

    def __init__(
        self,
        network: nn.Module,
        optimizer: FreezeOpt,
        index: int,
        sens: float,
        reducer_flag: bool,
        mean: bool | None,
        degree: int | None,
        max_accumulation_step: int,
    ) -> None:
        super().__init__()
        self.network, self.optimizer, self.index, self.sens = network, optimizer, index, sens
        self.reducer_flag, self.mean, self.degree = reducer_flag, mean, degree
        self.accumulation = GradientAccumulation(
            max_accumulation_step, optimizer, update=lambda: optimizer.step_group(index), reduce=self._reduce
        )

    def forward(self, *inputs: object) -> Tensor:
        self.optimizer.zero_grad()
        with self.optimizer.frozen(self.index):
            loss = self.network(*inputs)
            loss.backward(torch.full_like(loss, self.sens))
        return self.accumulation(loss.detach())

    def _reduce(self, grads: list[Tensor]) -> None:
        if self.reducer_flag:
            reduce_(grads, mean=bool(self.mean), degree=self.degree)


def reduce_(grads: Sequence[Tensor], *, mean: bool = True, degree: int | None = None) -> None:
    """Sum each tensor over all processes in place, and divide by `degree` (None: their number) when `mean`.

    Raises:  RuntimeError when torch.distributed has not been set up.
    """
    check_kind("grads", grads, (list, tuple), "a list of tensors")
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise RuntimeError("reducing gradients needs torch.distributed.init_process_group(...) in every process")
    mean_(grads, (degree or torch.distributed.get_world_size()) if mean else 1)
