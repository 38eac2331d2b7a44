"""Checkpointed functions are computed again under the rule that they were computed under.

`torch.utils.checkpoint.checkpoint(function, ...)` calls `function` once more in the backward pass, when the forward and
its rule have long ended. So whatever enters a checkpoint inside a cast forward carries the rule with it. That is done
at the two places through which torch takes the function, once and for all: users hold `checkpoint` itself under names
of their own. Outside a cast forward nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from mpkit.casting.mode import LOCAL, running

# What `checkpoint` calls without re-entrance, the function first: from torch 2.15 on, and before. Private; the public
# way, `context_fn`, is an argument of each call, so it cannot serve a call that somebody else wrote.
_WITHOUT_REENTRANCE = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")


def _carrying(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes by the rule of this moment whenever it is called."""
    rule, module = LOCAL.rule, LOCAL.module

    def carried(*args: object, **kwargs: object) -> Any:
        with running(rule, module):
            return function(*args, **kwargs)

    return function if rule is None else carried


_name = next(name for name in _WITHOUT_REENTRANCE if hasattr(torch_checkpoint, name))
_with_graph = getattr(torch_checkpoint, _name)
_without_graph = torch_checkpoint.CheckpointFunction.forward


def _generator(fn: Callable[..., Any], *args: object, **kwargs: object) -> Iterator[object]:
    # the function itself is called by whoever drives this, the first time; it casts parameters anew, as it will again
    outer, LOCAL.kept = LOCAL.kept, {}
    yield from _with_graph(_carrying(fn), *args, **kwargs)
    LOCAL.kept = outer


def _forward(ctx: Any, run_function: Callable[..., Any], *args: object) -> Any:
    return _without_graph(ctx, _carrying(run_function), *args)


setattr(torch_checkpoint, _name, _generator)
torch_checkpoint.CheckpointFunction.forward = staticmethod(_forward)  # type: ignore[method-assign]
