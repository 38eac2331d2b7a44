"""Ctrl-C between two steps instead of in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class InterruptBetweenSteps:
    """While a step runs, Ctrl-C is kept until the step is over, so that weights, optimizer and scale belong together.

    A second Ctrl-C in the same step is not kept. Only the main thread receives signals; elsewhere this does nothing.

    `between_steps` is True when the KeyboardInterrupt on its way was kept until a step was over.

    Use: `with InterruptBetweenSteps() as guard:` around the run, `with guard.step():` around each step.
    """

    def __init__(self) -> None:
        self._inside = self._kept = self.between_steps = False
        self._previous: Any = None

    def __enter__(self) -> InterruptBetweenSteps:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    @contextmanager
    def step(self, unfinished: Callable[[], object] = bool) -> Iterator[None]:
        """The stretch that Ctrl-C may not cut; it is raised after the first that leaves nothing `unfinished`."""
        self._inside = True
        try:
            yield
        except BaseException:  # cut short by an error or a second Ctrl-C, and that goes on
            self._kept = False
            raise
        finally:
            self._inside = False
        if self._kept and not unfinished():
            self._kept, self.between_steps = False, True
            raise KeyboardInterrupt

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._inside and not self._kept:
            self._kept = True
            return
        raise KeyboardInterrupt
