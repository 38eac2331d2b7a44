"""Listen to what a program asks of torch: stand in for functions, and say where the program is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mpkit.record.scale import scale_of as record_scale

T = TypeVar("T")


class Listening(ExitStack):
    """Functions that others stand for, until it is closed."""

    def swap(self, owner: object, name: str, watching: Callable[..., Any]) -> None:
        """Let `watching(original, *args, **kwargs)` stand for a function, until this is closed."""
        original, own = getattr(owner, name), vars(owner).get(name)

        @wraps(original)
        def watched(*args: object, **kwargs: object) -> object:
            return watching(original, *args, **kwargs)

        setattr(owner, name, watched)
        self.callback(setattr, owner, name, own) if own is not None else self.callback(delattr, owner, name)


def several(name: str, given: object, kind: type[T], what: str) -> list[T]:
    found: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    if not found or not all(isinstance(one, kind) for one in found):
        raise TypeError(f"{name} must be {what} or a list of them, got {given!r:.80}")
    return found


def tensors_in(nest: object) -> list[Tensor]:
    return [nest] if isinstance(nest, Tensor) else [t for t in tree_leaves(nest) if isinstance(t, Tensor)]


def scale_of(scaler: Any) -> float:
    """Raises TypeError for what has no loss scale to tell."""
    return float(record_scale(scaler))


def in_autocast(kind: str) -> bool:
    """kind: the type of a device."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def in_own_autocast(kind: str) -> bool:
    """Whether the reader can end it; Lightning's lies around the whole of a training_step, where it is right."""
    around = "lightning.pytorch.", "pytorch_lightning."
    return in_autocast(kind) and not any(f.f_globals.get("__name__", "").startswith(around) for f in callers())


def same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and (one is other or (one.layout == torch.strided and one.data_ptr() == other.data_ptr()))


def callers() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def line() -> str:
    """The line of the reader's own code that is running."""
    own = str(Path(__file__).parents[1])
    for frame in callers():
        name = frame.f_code.co_filename
        if "site-packages" not in name and not name.startswith(own):
            return f"line {frame.f_lineno} of {Path(name).name}"
    return ""
