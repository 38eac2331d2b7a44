"""What is done for operations that write: through views, into several of their arguments, or numbers out of range."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from mpkit.casting.handlers import Caster, Handler
from mpkit.casting.kernels import numbers_in_graph, numbers_in_range
from mpkit.casting.operations import Function
from mpkit.casting.targets import Emulated, Target, counted_writes, float_tensors, precision, round_in_place_

_OWN_KINDS = (Tensor, nn.Parameter)


def uncast_views(moves: Handler, low: Target) -> Handler:
    """A view of what is not in `low` yet stays a view, so that a write into it arrives; whoever computes with it casts.

    A parameter with a graph is cast before it is viewed, since its cast may be kept, and torch allows no write there.
    """

    native = isinstance(low, torch.dtype)

    def handle(mode: Caster, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        x: Any = args[0] if args else None
        if type(x) not in _OWN_KINDS or (x.dtype is low if native else precision(x) == low):
            return moves.run(mode, func, args, kwargs)
        kept = type(x) is nn.Parameter and x.requires_grad and torch.is_grad_enabled()
        return moves.run(mode, func, args, kwargs) if kept else func(*args, **kwargs)

    return Handler(handle, low, around=moves.around)


@Handler
def numbers_bounded(mode: Caster, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Called as it is; a number that 16 bits cannot hold is the largest that they can."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        args, kwargs = numbers_in_range(args, kwargs, error)
        return func(*args, **kwargs)


@Handler
def fills_bounded(mode: Caster, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """As `numbers_bounded`, also while a graph is made."""
    if is_compiling():
        args, kwargs = numbers_in_graph(func, args, kwargs)
        return func(*args, **kwargs)
    return numbers_bounded.run(mode, func, args, kwargs)


@Handler
def lists_in_place(mode: Caster, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """An optimizer's step and the like: called as it is; a format that is written into rounds what it gets.

    The fused steps of torch count no writes (torch 2.11 to 2.13), so that kept casts would stand for old weights.
    """
    given = [(x, counted_writes(x), precision(x)) for x in float_tensors((args, kwargs))]
    out = func(*args, **kwargs)
    for x, version, target in given:
        mode.expose(x)
        if isinstance(target, Emulated) and (counted_writes(x) != version or x.is_inference()):
            round_in_place_(x, target)
    return out


def beside_statistics(low: Target, result: Target | None) -> Handler:
    """Fake quantisation: the kernels take float32 only, and write into the statistics that they are given."""

    def handle(mode: Caster, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        out = mode.cast_all(func(*mode.cast_all(args[:1], torch.float32), *args[1:], **kwargs), low)
        return out if result is None else mode.cast_all(out, result)

    return Handler(handle, torch.float32)
