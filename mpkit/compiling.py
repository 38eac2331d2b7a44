"""What torch.compile makes of a function of ours, said to torch where the function stands."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

from mpkit.arguments import check_kind

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_FRAMES = torch._C._dynamo.eval_frame
_SKIP, _AS_ELSEWHERE = _FRAMES._FrameAction.SKIP, _FRAMES._FrameAction.DEFAULT
_CALLS_TOO = _FRAMES._FrameExecStrategy(_SKIP, _SKIP)
_ALONE = _FRAMES._FrameExecStrategy(_SKIP, _AS_ELSEWHERE)


def runs_as_python(function: Decorated) -> Decorated:
    """A function that is never compiled itself, while what it calls is.

    For one that counts: the compiler takes an int of a module for a constant, so it would compile anew at each count.
    """
    return _told(function, _ALONE)


def compiled_with_its_caller(function: Decorated) -> Decorated:
    """A function that the compiler follows where compiled code calls it; elsewhere it and its calls are left alone."""
    return _told(function, _CALLS_TOO)


def _told(function: Decorated, strategy: Any) -> Decorated:
    check_kind("function", function, FunctionType, "a function of Python")
    _FRAMES.set_code_exec_strategy(function.__code__, strategy)
    return function
