"""A run in float32, whatever autocast says: around the network or inside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class NoAutocast(TorchFunctionMode):
    """While entered, every function of torch runs without autocast, in a context that a network enters itself too.

    Args:  kind: type of the device, as in `torch.autocast`.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not torch.is_autocast_enabled(self.kind):
            return func(*args, **(kwargs or {}))
        with torch.autocast(self.kind, enabled=False):
            return func(*args, **(kwargs or {}))
