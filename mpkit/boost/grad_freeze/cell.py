"""One training cell per freeze group, as MindSpore has them."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn

from mpkit.arguments import Count, check_number, checked
from mpkit.boost.grad_accumulation import GradientAccumulation
from mpkit.boost.grad_freeze.optimizer import FreezeOpt
from mpkit.step.distributed import mean_
from mpkit.step.phases import gradients_of


@checked
def freeze_cell(
    reducer_flag: bool,
    network: nn.Module,
    optimizer: FreezeOpt,
    sens: Annotated[float, partial(check_number, low=-math.inf)],
    grad: object,
    use_grad_accumulation: bool,
    mean: bool | None = None,
    degree: Count | None = None,
    max_accumulation_step: Count = 1,
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

    divided = ((degree or torch.distributed.get_world_size()) if mean else 1) if reducer_flag else None
    steps = max_accumulation_step if use_grad_accumulation else 1
    return tuple(FreezeTrainCell(network, optimizer, i, sens, steps, divided) for i in range(len(optimizer.groups)))


class FreezeTrainCell(nn.Module):
    """Forward, backward for one freeze group from `sens`, reduce, update; -> the loss. See `freeze_cell`."""

    def __init__(
        self, network: nn.Module, optimizer: FreezeOpt, index: int, sens: float, steps: int, divided: int | None
    ) -> None:
        super().__init__()
        self.network, self.optimizer, self.index, self.sens, self.divided = network, optimizer, index, sens, divided
        self.accumulation = GradientAccumulation(steps, optimizer, update=self._update)

    def forward(self, *inputs: object) -> Tensor:
        self.optimizer.zero_grad()
        with self.optimizer.frozen(self.index):
            loss = self.network(*inputs)
            loss.backward(torch.full_like(loss, self.sens))
        return self.accumulation(loss.detach())

    def _update(self) -> None:
        if self.divided is not None:
            mean_(gradients_of(self.optimizer.parameters), self.divided)
        self.optimizer.step_group(self.index)
