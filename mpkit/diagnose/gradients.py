"""The gradients of one optimizer between the calls of a training loop: what reached them, and what changed them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

_FEW = 5  # parameters whose gradients are looked at between the calls


@dataclass(frozen=True)
class Pass:
    """A backward pass that reached an optimizer's gradients.

    site:    where the program stood, with all callers: the micro-batches of one loop have the same.
    scaler:  whose product the loss was, if any.
    factor:  by which number the reader multiplied the loss.
    means:   the factors of the means in the loss; () if they say nothing about micro-batches.
    low:     it was computed in float16.
    """

    site: int
    scaler: GradScaler | None
    factor: float
    means: tuple[float, ...]
    low: bool


Marks = list[tuple[int, int]]


class Watched:
    """The gradients of one optimizer, and what happened to them since they were cleared."""

    def __init__(self, optimizer: Optimizer, name: str) -> None:
        self.optimizer, self.name = optimizer, name
        self.steps = self.stepped_passes = 0  # steps; passes since the gradients were cleared that a step has used
        self.passes: list[Pass] = []  # since they were cleared
        self.unscaled = self.applied = False
        self.scalers: list[Any] = []
        self.life: list[str] = []  # "step", "skipped", "schedule" in order
        self.norm: Tensor | None = None  # of the gradients after the last pass, or after unscale_
        self.marks: Marks = []
        self.rates = rates(optimizer)

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def few(self) -> list[Tensor]:
        """Some of the parameters, the first and the last among them: what a step does it does to all."""
        params = self.params
        return [*params[:: -(-len(params) // _FEW)], params[-1]]

    def remember(self) -> None:
        self.marks, self.norm = look(self.few), norm(self.few)

    def cleared(self) -> bool:
        return not any(p.grad is not None and bool(_dense(p.grad).any()) for p in self.params)

    def start_over(self) -> None:
        self.passes, self.stepped_passes, self.unscaled, self.norm = [], 0, False, None

    @property
    def fresh(self) -> list[Pass]:
        """The passes since the last step."""
        return self.passes[self.stepped_passes :]

    def schedule_moved(self) -> None:
        if self.life and self.life[-1] != "schedule":
            self.life.append("schedule")
        self.rates = rates(self.optimizer)

    @property
    def scaler(self) -> GradScaler | None:
        """The one that the gradients are multiplied by the scale of; None if they are not, or not any more."""
        return next((p.scaler for p in self.fresh if p.scaler is not None and not self.unscaled), None)

    def shrunk(self) -> float:
        """How many times larger the gradients were after the last pass, or after `unscale_`; NaN if nobody looked."""
        now = norm(self.few)
        return float(self.norm / now) if self.norm is not None and now is not None else math.nan


def rates(optimizer: Optimizer) -> list[object]:
    given = [group.get("lr") for group in optimizer.param_groups]
    return [float(lr) if isinstance(lr, Tensor) else lr for lr in given]


def look(params: list[Tensor]) -> Marks:
    """Identity and version of every gradient: one of them changes with the gradient."""
    return [(0, 0) if (grad := p.grad) is None else (id(grad), grad._version) for p in params]


def norm(params: list[Tensor]) -> Tensor | None:
    """Length of the gradients as one vector, not finite if one of them is not; None if there are none."""
    grads = [_dense(p.grad) for p in params if p.grad is not None]
    return get_total_norm(grads) if grads else None


def _dense(grad: Tensor) -> Tensor:
    return grad.detach() if grad.layout == torch.strided else grad.detach().coalesce().values()


def undivided(passes: list[Pass]) -> bool:
    """Whether several passes from one place each had a mean that nothing divided by their number."""
    for site, count in Counter(p.site for p in passes).items():
        alike = [max(p.means, default=0.0) for p in passes if p.site == site]
        divided = any(math.isclose(m * count, 1, rel_tol=1e-3) for m in alike) or sum(alike) <= 1.01
        if count > 1 and not divided and all(alike):
            return True
    return False
