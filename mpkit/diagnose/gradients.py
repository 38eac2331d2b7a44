"""The gradients of one optimizer between the calls of a training loop: what reached them, and what changed them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from mpkit.optimizers.arguments import parameters_of

_FEW = 3  # parameters whose gradients are looked at between the calls,
_VALUES = 2**14  # and how many of their values: enough for a change of all, at a price that no network notices


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


class Watched:
    """The gradients of one optimizer, and what happened to them since they were cleared."""

    def __init__(self, optimizer: Optimizer, name: str) -> None:
        self.optimizer, self.name = optimizer, name
        self.steps = 0
        self.applied = False
        self.scalers: list[Any] = []
        self.life: list[str] = []  # "step", "skipped", "schedule" in order
        self.marks: list[tuple[int, int]] = []
        self.rates, self.device = rates(optimizer), next((p.device.type for p in self.params), "cpu")
        self.start_over()

    def start_over(self) -> None:
        """The gradients were cleared."""
        self.passes: list[Pass] = []  # since then
        self.used = 0  # passes of them that a step has used
        self.unscaled = False
        self.norms: list[Tensor] = []  # of the gradients after the last pass, or after unscale_

    @property
    def in_autocast(self) -> bool:
        return torch.amp.is_autocast_available(self.device) and torch.is_autocast_enabled(self.device)

    @property
    def params(self) -> list[Tensor]:
        return parameters_of(self.optimizer)

    @property
    def few(self) -> list[Tensor]:
        """Some of the parameters, the first and the last among them: what a step does it does to all."""
        params = self.params
        return [*params[:: max(1, -(-len(params) // (_FEW - 1)))], params[-1]]

    @property
    def fresh(self) -> list[Pass]:
        """The passes since the last step."""
        return self.passes[self.used :]

    @property
    def scaler(self) -> GradScaler | None:
        """The one that the gradients are multiplied by the scale of; None if they are not, or not any more."""
        return next((p.scaler for p in self.fresh if p.scaler is not None and not self.unscaled), None)

    def remember(self) -> None:
        self.marks, self.norms = look(self.few), norms(self.few)

    def cleared(self) -> bool:
        return not any(p.grad is not None and float(_values(p.grad).norm()) != 0 for p in self.params)

    def shrunk(self) -> float:
        """How many times larger the gradients were after the last pass, or after `unscale_`; NaN if nobody looked."""
        return length(self.norms) / (length(norms(self.few)) or math.nan) if self.norms else math.nan

    def see_rates(self, *, moved: bool = False) -> None:
        """A schedule is whatever changes the learning rate."""
        now = rates(self.optimizer)
        if (moved or now != self.rates) and self.life and self.life[-1] != "schedule":
            self.life.append("schedule")
        self.rates = now

    def stepped(self) -> None:
        self.steps += 1
        self.used = len(self.passes)
        self.life.append("step")
        self.rates = rates(self.optimizer)

    def skipped(self) -> None:
        """The last step turns out to have been left out."""
        last = max((i for i, event in enumerate(self.life) if event == "step"), default=None)
        if last is not None:
            self.life[last] = "skipped"

    def divided_later(self) -> bool:
        """Whether the reader divided the sum of gradients by the number of micro-batches, clipping it perhaps after."""
        pairs = zip(self.marks, look(self.few))
        edits = max((new[1] - old[1] for old, new in pairs if old[0] == new[0]), default=2)
        return edits > 1 or math.isclose(self.shrunk(), len(self.fresh), rel_tol=1e-5)


def rates(optimizer: Optimizer) -> list[object]:
    given = [group.get("lr") for group in optimizer.param_groups]
    return [float(lr) if isinstance(lr, Tensor) else lr for lr in given]


def look(params: list[Tensor]) -> list[tuple[int, int]]:
    """Identity and version of every gradient: one of them changes with the gradient."""
    return [(0, 0) if (grad := p.grad) is None else (id(grad), _local(grad)._version) for p in params]


def _local(grad: Tensor) -> Tensor:
    """What this process holds of a sharded gradient (FSDP2)."""
    local: Tensor = grad if type(grad) is Tensor else getattr(grad, "to_local", lambda: grad)()
    return local


def norms(params: list[Tensor]) -> list[Tensor]:
    """Length of the first values of each gradient that there is; nothing is read on the host."""
    few = [_values(p.grad) for p in params if p.grad is not None]
    few = [g.float() if g.numel() <= _VALUES else g.reshape(-1)[:_VALUES].float() for g in few]
    return list(torch._foreach_norm(few)) if few else []


def length(parts: list[Tensor]) -> float:
    """Of all of them as one vector: not finite if one is not."""
    return math.hypot(*map(float, parts))


def _values(grad: Tensor) -> Tensor:
    grad = _local(grad).detach()
    return grad if grad.layout == torch.strided else grad.coalesce().values()


def undivided(passes: list[Pass]) -> bool:
    """Whether several passes from one place each had a mean that nothing divided by their number."""
    for site, count in Counter(p.site for p in passes).items() if len(passes) > 1 else ():
        alike = [max(p.means, default=0.0) for p in passes if p.site == site]
        divided = any(math.isclose(m * count, 1, rel_tol=1e-3) for m in alike) or sum(alike) <= 1.01
        if count > 1 and not divided and all(alike):
            return True
    return False
