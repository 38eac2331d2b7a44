"""Calls that pass a level by: a module inside a network with a level runs, while the network's own forward does not.

A level is put on `forward`. Whoever calls another method of the network gets modules that compute at the level and,
between them, operations that do not. Nobody sees those operations, but the call of the first module is seen, and who
made it stands on the interpreter's stack.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

_OURS_AND_TORCHS = (str(Path(__file__).parent), str(Path(torch.__file__).parent))

_KINDS: WeakSet[type] = WeakSet()
# ids of the code of their methods: an id given again to other code costs one more look and nothing else
_METHODS: set[int] = set()


def know_methods(kind: type) -> None:
    """Remember the methods of a class of modules, and the functions defined in them; torch's own are left out."""
    if kind in _KINDS:
        return
    _KINDS.add(kind)
    for _, _, attribute in methods(kind):
        _METHODS.update(id(code) for code in codes(attribute))


def methods(kind: type) -> Iterator[tuple[type, str, Any]]:
    """(class, name, attribute) of what a class of modules and its bases define; torch's own are left out."""
    for base in kind.__mro__:
        if issubclass(base, nn.Module) and not base.__module__.startswith("torch."):
            yield from ((base, name, attribute) for name, attribute in list(vars(base).items()))


def codes(attribute: object) -> Iterator[CodeType]:
    """The code of a method or property, and of the functions defined in it; nothing for any other attribute."""
    function: Any = attribute.fget if isinstance(attribute, property) else attribute
    function = inspect.unwrap(function)
    todo = [getattr(function, "__code__", None)]
    while todo:
        code = todo.pop()
        if isinstance(code, CodeType):
            yield code
            todo += code.co_consts  # a thread runs a function that a method defines


def warn_if_passed_by(module: nn.Module, frame: FrameType | None, level_of: Callable[[Any], str | None]) -> None:
    """Warn if a method of a network around `module`, which has a level, called it from `frame` on.

    Args:  level_of gives the name of the level on a module, None if there is none.
    """
    depth = 3  # the caller of the forward that called this
    while frame is not None:
        if id(frame.f_code) in _METHODS:
            owner: Any = frame.f_locals.get("self")
            level = None if owner is module else level_of(owner)
            if level is not None and any(inner is module for inner in owner.modules()):
                passed_by(owner, frame.f_code.co_name, level, depth, calls_modules=True)
                return
        frame, depth = frame.f_back, depth + 1


def passed_by(owner: nn.Module, method: str, level: str, depth: int, *, calls_modules: bool) -> None:
    """Warn that a method of `owner` computes past its level; the warning names the frame `depth` above the caller."""
    kind, at = type(owner).__name__, f"level {level}" if level else "a precision of its own"
    what = "computes itself is not" if calls_modules else "computes with the parameters is not cast"
    both = "both; if only the modules shall be cast, put the level on them, not on the whole " + kind
    warnings.warn(
        f"{kind}.{method} passes {at} by, since that is put on the call of the network: "
        f"{'the modules that it calls are cast, ' if calls_modules else ''}what it {what}. "
        f"Run it inside `with within(network):` (mpkit.casting) to cast {both if calls_modules else 'it'}",
        stacklevel=depth + 1,
    )


def frames_to_user() -> int:
    """The `stacklevel` at which a warning of the function that calls this names a line of the user's.

    How many calls of casting and of torch are between depends on ledgers, on leaves, on graphs that run beside.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS_AND_TORCHS):
        frame, level = frame.f_back, level + 1
    return level
