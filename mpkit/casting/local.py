"""What this thread runs now: which rule, in which module, watched by which ledgers."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor, nn


class _Local(threading.local):
    """What this thread runs now."""

    def __init__(self) -> None:  # all in every thread's own dict from the start, or the compiler's guards would fail
        self.rule: Any = None  # of the module that runs; None outside of every level, and while arguments are cast
        self.module: nn.Module | None = None
        self.products = 0  # how many the layer under a recipe has begun
        self.on = False  # whether a CastMode sees the operations
        self.books: tuple[Any, ...] = ()  # open ledgers; none while a cast is being made
        # id of a parameter -> itself; (id, target) -> a state of it and, from the second use on, its cast then
        self.kept: dict[object, Any] = {}
        self.given: list[tuple[Tensor, Tensor]] = []  # inputs of the network: (cast, as they came)


LOCAL = _Local()
