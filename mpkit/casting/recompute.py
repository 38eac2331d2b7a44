"""Checkpointed functions are computed again under the rule that they were computed under.

`torch.utils.checkpoint.checkpoint(function, ...)` calls `function` once more in the backward pass, when the forward and
its rule have long ended. So whatever enters a checkpoint inside a cast forward carries the rule with it. That is done
at the two places through which torch takes the function, once and for all: users hold `checkpoint` itself under names
of their own. Outside a cast forward nothing changes.

Both names are torch's own affair. Its public way, `context_fn`, is an argument of each call and of the form without
re-entrance only, so it cannot serve a call that somebody else wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from mpkit.casting.mode import CastMode, current, running
from mpkit.casting.rules import PLAIN
from mpkit.casting.targets import Emulated, Target, float_tensors, marked, precision

# what `checkpoint` calls without re-entrance, the function first: from torch 2.15 on, and before
WITHOUT_REENTRANCE = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")


class Carried:
    """A function that computes by the rule of `mode` whenever it is called.

    Arguments that were in an emulated format at the first call are so at the next ones, where they are other objects.
    """

    def __init__(self, function: Callable[..., Any], mode: CastMode) -> None:
        self.function = function
        self.rule, self.layer = mode.rule, mode.layer
        self.formats: list[Target] | None = None

    def __call__(self, *args: object, **kwargs: object) -> Any:
        inputs = float_tensors((args, kwargs))
        if self.formats is None:
            self.formats = [precision(x) for x in inputs]
        for x, target in zip(inputs, self.formats):
            if isinstance(target, Emulated) and precision(x) != target:
                marked(x, target)
        with running(self.rule, layer=self.layer) as mode, mode.anew():
            return self.function(*args, **kwargs)


def carrying(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the rule that this thread computes by now, or `function` itself if there is none."""
    mode = current()
    return function if mode is None or mode.rule is PLAIN else Carried(function, mode)


def install() -> None:
    """Make torch's checkpoints carry rules; again is once."""
    if getattr(torch_checkpoint, "_mpkit_carries_rules", False):
        return
    name = next(name for name in WITHOUT_REENTRANCE if hasattr(torch_checkpoint, name))
    with_graph = getattr(torch_checkpoint, name)
    without_graph = torch_checkpoint.CheckpointFunction.forward

    def generator(fn: Callable[..., Any], *args: object, **kwargs: object) -> Iterator[object]:
        # the function itself is called by whoever drives this, the first time
        carried, mode = carrying(fn), current()
        with nullcontext() if mode is None or carried is fn else mode.anew():
            yield from with_graph(carried, *args, **kwargs)

    def forward(ctx: Any, run_function: Callable[..., Any], *args: object) -> Any:
        return without_graph(ctx, carrying(run_function), *args)

    setattr(torch_checkpoint, name, generator)
    torch_checkpoint.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]
    torch_checkpoint._mpkit_carries_rules = True  # type: ignore[attr-defined]
