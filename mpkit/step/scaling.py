"""What a step does with its loss scale: start from it, divide the gradients by it, let it move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpkit.policies import ScalePolicy
from mpkit.scalers import Scale, check_and_unscale_
from mpkit.scalers.scaler import scale_of, scale_tensor


class Scaling:
    """One scale for the whole loss.

    seed:            what the backward pass starts from, () or (1,) float32.
    checks:          whether the gradients are divided by it and looked at; else they stay multiplied.
    groups:          the manager of a scaling that has a scale for each group of layers.
    group_overflow:  (N,) bool, its groups whose gradients were not finite in the last step; None before the first.
    """

    groups: Any = None
    group_overflow: Tensor | None = None

    def __init__(self, scale: Scale, checks: bool = True) -> None:
        self.scale, self.checks = scale, checks

    @property
    def seed(self) -> Tensor:
        return self.scale.seed

    def unscale_(self, gradients: Sequence[Tensor]) -> Tensor:
        """Divide the gradients by the scale; -> () float32, 1 where one was not finite."""
        return check_and_unscale_(gradients, self.seed)

    def advance_(self, found_inf: Tensor | None) -> None:
        """Let the scale move, if the gradients were looked at."""
        if found_inf is not None:
            self.scale.advance_(found_inf)

    def shown(self) -> Tensor:
        """What the step reports as its scale, a tensor of its own."""
        return self.seed.clone()


def unscaled(sens: float, device: torch.device) -> Scaling:
    """The gradients stay multiplied by `sens`, and nobody looks at them."""
    return Scaling(Scale(ScalePolicy.fixed(1.0), scale_tensor(sens, device, "sens")), checks=False)


def scaling_of(scale_sense: object, device: torch.device) -> Scaling:
    """The scaling of what a train cell takes as `scale_sense`: as `scale_of`, or a manager of groups."""
    if callable(make := getattr(scale_sense, "scaling", None)):
        return make(scale_of(torch.ones(()), device))
    return Scaling(scale_of(scale_sense, device))
