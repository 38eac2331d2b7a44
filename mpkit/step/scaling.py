"""What a step does with its loss scale: start from it, divide the gradients by it, let it move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpkit.scalers import Scale, check_and_unscale_
from mpkit.scalers.scaler import scale_of


class Scaling:
    """One scale for the whole loss.

    seed:            what the backward pass starts from, () or (1,) float32.
    groups:          the manager of a scaling that has a scale for each group of layers.
    group_overflow:  (N,) bool, its groups whose gradients were not finite in the last step; None before the first.
    """

    groups: Any = None
    group_overflow: Tensor | None = None
    checks = True

    def __init__(self, scale: Scale) -> None:
        self.scale = scale

    @property
    def seed(self) -> Tensor:
        return self.scale.seed

    def to_(self, device: torch.device) -> Tensor:
        """Move to a device; -> the seed there."""
        return self.scale.to_(device).seed

    def covers(self, parameters: Sequence[Tensor]) -> None:
        """Raise ValueError unless all these parameters get a scale; one scale for the loss is one for all."""
        if self.groups is not None:
            self.groups.covers(parameters)

    def unscale_(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """Divide the gradients by the scale; -> () float32, 1 where one was not finite, or None if nobody looks."""
        return check_and_unscale_(gradients, self.seed)

    def advance_(self, found_inf: Tensor | None) -> None:
        """Let the scale move."""
        assert found_inf is not None
        self.scale.advance_(found_inf)

    def shown(self) -> Tensor:
        """What the step reports as its scale, a tensor of its own."""
        return self.seed.clone()

    def check(self) -> None:
        """Raise RuntimeError if the policy met one of its errors since the last call; one host read."""
        self.scale.check()


class Unscaled(Scaling):
    """The gradients stay multiplied by the seed, and nobody looks at them."""

    checks = False
    seed: Tensor = None  # type: ignore[assignment]  # set at once

    def __init__(self, seed: Tensor) -> None:
        self.seed = seed

    def to_(self, device: torch.device) -> Tensor:
        self.seed = self.seed.to(device)
        return self.seed

    def unscale_(self, gradients: Sequence[Tensor]) -> None:
        return None

    def advance_(self, found_inf: Tensor | None) -> None:
        pass

    def shown(self) -> Tensor:
        return self.seed

    def check(self) -> None:
        pass


def scaling_of(scale_sense: object, device: torch.device) -> Scaling:
    """The scaling of what a train cell takes as `scale_sense`: as `scale_of`, or a manager of groups."""
    if callable(make := getattr(scale_sense, "scaling", None)):
        return make(scale_of(torch.ones(()), device))
    return Scaling(scale_of(scale_sense, device))
