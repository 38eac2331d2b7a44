"""What a step does with its loss scale: divide the gradients by it, and let it move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpkit.scalers import Scale, check_and_unscale_
from mpkit.scalers.sense import scale_of


class Scaling:
    """One scale for the whole loss.

    scale:           what the backward pass starts from, and what moves it.
    groups:          the manager of a scaling that has a scale for each group of layers.
    group_overflow:  (N,) bool, its groups whose gradients were not finite in the last step; None before the first.
    """

    groups: Any = None
    group_overflow: Tensor | None = None

    def __init__(self, scale: Scale) -> None:
        self.scale = scale

    def covers(self, parameters: Sequence[Tensor]) -> None:
        """Raise ValueError unless all these parameters get a scale; one scale for the loss is one for all."""

    def unscale_(self, gradients: Sequence[Tensor], scale: Tensor) -> Tensor:
        """Divide the gradients by the scale that was used; -> () float32, 1 where one was not finite."""
        return check_and_unscale_(gradients, scale)

    def shown(self) -> Tensor:
        """What the step reports as its scale, a tensor of its own."""
        return self.scale.seed.clone()


def scaling_of(scale_sense: object, device: torch.device) -> Scaling:
    """The scaling of what a train cell takes as `scale_sense`: as `scale_of`, or a manager of groups."""
    if callable(make := getattr(scale_sense, "scaling", None)):
        return make(scale_of(torch.ones(()), device))
    return Scaling(scale_of(scale_sense, device))
