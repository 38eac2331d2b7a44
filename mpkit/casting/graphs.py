"""Compiled graphs hold their casts already; a mode that is on when one runs leaves its operations alone.

`torch.compile` traces a mode's casts into its graph. After a graph break in a cast forward, or where only a part of a
cast network is compiled, that graph runs while the mode is on, and backends hand operations to torch under the names
that users call, so the mode would cast twice. Nothing tells such a call from a user's but who makes it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from mpkit.compiling import compiled_with_its_caller

Mode = TypeVar("Mode", bound=TorchFunctionMode)

_TORCH = str(Path(torch.__file__).parent)
_RUNS_GRAPHS = str(Path(_TORCH, "_dynamo", "eval_frame.py"))  # its `_fn` calls what a backend made
_INDUCTOR = str(Path(_TORCH, "_inductor", "output_code.py"))  # calls the file that inductor wrote
_GRAPH = "<eval_with_key>"  # the file name of a graph's code

_seen = False


def traced_with_its_caller(mode: type[Mode]) -> type[Mode]:
    """A class of modes that the compiler follows inside of what it compiles, and never compiles by itself.

    In code that is left out, as torch's recurrent layers are, torch calls the mode from C. The compiler would take that
    call for a function of its own, and it does not guard the getter that it is called with (torch 2.11 to 2.15): what
    was compiled for `Tensor.dtype.__get__` would answer for `Tensor.device.__get__` too.
    """
    compiled_with_its_caller(mode.__torch_function__)
    return mode


def may_run() -> bool:
    """Whether anything was handed to `torch.compile` in this process; True while something is being compiled."""
    global _seen
    if is_compiling():
        return True
    if not _seen:
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        # emptied by a reset, so what was seen stays; `torch.compiler.disable` stands there with None as its backend
        _seen = any(callable(backend) for backend in getattr(dynamo, "cached_backends", {}).values())
    return _seen


def in_graph(frame: FrameType | None) -> bool:
    """Whether an operation that `frame` calls belongs to a compiled graph: no code of anybody else is between."""
    graph = False
    while frame is not None:
        name = frame.f_code.co_filename
        if name == _RUNS_GRAPHS and frame.f_code.co_name == "_fn":
            return graph
        above = frame.f_back
        if name.startswith(_GRAPH) or (above is not None and above.f_code.co_filename == _INDUCTOR):
            graph = True
        elif not name.startswith(_TORCH):
            return False
        frame = above
    return False
