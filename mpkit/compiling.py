"""What torch.compile makes of a function of ours, said to torch where the function stands."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

from mpkit.arguments import check_kind

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_FRAMES = torch._C._dynamo.eval_frame
_SKIP = _FRAMES._FrameAction.SKIP
_CALLS_TOO = _FRAMES._FrameExecStrategy(_SKIP, _SKIP)


def compiled_with_its_caller(function: Decorated) -> Decorated:
    """A function that the compiler follows where compiled code calls it; elsewhere it and its calls are left alone."""
    check_kind("function", function, FunctionType, "a function of Python")
    _FRAMES.set_code_exec_strategy(function.__code__, _CALLS_TOO)
    return function
