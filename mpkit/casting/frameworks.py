"""The operator lists of NVIDIA apex's level O1 and of torch's autocast on CUDA, as rules.

Source:  torch 2.13, ATen/autocast_mode.h; NVIDIA apex, amp/lists and amp/wrap.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mpkit.casting import operations as ops
from mpkit.casting.handlers import Caster, Handler, computed_in, in_place
from mpkit.casting.lists import (
    APEX_PROMOTED,
    APEX_TO_LOW,
    APEX_TO_WIDE,
    APEX_UNLISTED,
    BANNED,
    TORCH_KERNELS_TO_LOW,
    TORCH_KERNELS_TO_WIDE,
    TORCH_PROMOTED,
    TORCH_TO_LOW,
    TORCH_TO_WIDE,
)
from mpkit.casting.rules import Rule, operator_lists
from mpkit.casting.targets import Target, converted, float_tensors, precision
from mpkit.formats import dtype_name

# these compute in the dtype that they are told, and only else in float32
_TOLD = ops.spellings(*ops.words("sum prod cumsum cumprod softmax log_softmax norm"))


def _names(functions: Iterable[ops.Function]) -> list[str]:
    return [function.__name__ for function in functions]


@cache
def autocast_lists(low: Target, entry: Target | None = None) -> Rule:
    """What `torch.autocast("cuda")` does at each operation. It leaves float64 tensors alone."""
    lists = operator_lists(low, TORCH_TO_LOW, TORCH_TO_WIDE, TORCH_PROMOTED, True, frozenset((BANNED,)), entry)
    handlers = {**lists.handlers}
    handlers |= {name: _unless_told(handlers[name]) for name in _names(_TOLD)}
    handlers |= dict.fromkeys(_names(ops.spellings("interpolate")), _interpolated)
    handlers[Tensor.__rtruediv__.__name__] = _IN_FLOAT32  # a reciprocal, and a product with it
    handlers |= dict.fromkeys(TORCH_KERNELS_TO_LOW, computed_in(low)) | dict.fromkeys(
        TORCH_KERNELS_TO_WIDE, _IN_FLOAT32
    )
    handlers |= {"inner": _inner(handlers["inner"]), "sum_to_size": _summed_to_size}
    handlers |= dict.fromkeys(_names(ops.spellings("matrix_power")), _matrix_power(low))
    del handlers[torch.linalg.cross.__name__]  # one operator elsewhere, but not on this list
    kept = {name: _sparing_float64(handler) for name, handler in handlers.items()}
    return Rule(kept, lists.default, entry, (autocast_lists, (low, entry)))


def _sparing_float64(handler: Handler) -> Handler:
    """An operation with a float64 among its inputs is torch's own: it widens the others, or refuses the mixture."""
    if handler.computes is None:  # the widest of its inputs is float64 then
        return handler

    def handle(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if any(x.dtype is torch.float64 for x in float_tensors((args, kwargs))):
            return func(*args, **kwargs)
        return handler.run(mode, func, args, kwargs)

    return Handler(handle, handler.computes)


_IN_FLOAT32 = _sparing_float64(computed_in(torch.float32))


def _unless_told(handler: Handler) -> Handler:
    def handle(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        return func(*args, **kwargs) if kwargs.get("dtype") is not None else handler.run(mode, func, args, kwargs)

    return Handler(handle, handler.computes)


@Handler
def _interpolated(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Every mode but "area", which is an average pool, in float32."""
    way = args[3] if len(args) > 3 else kwargs.get("mode", "nearest")
    return func(*args, **kwargs) if way == "area" else _IN_FLOAT32.run(mode, func, args, kwargs)


def _inner(of_vectors: Handler) -> Handler:
    """With a single number it is a product like any other, whose dtype a single number does not decide."""

    def handle(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        numbers = any(x.dim() == 0 for x in float_tensors((args, kwargs)))
        return func(*args, **kwargs) if numbers else of_vectors.run(mode, func, args, kwargs)

    return Handler(handle)


@Handler
def _summed_to_size(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """In float32 where anything is added up: to its own size a tensor is not summed."""
    x, size = args[0], kwargs.get("size", args[1:])
    wanted = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    own = x.dim() > 0 and tuple(wanted) == tuple(x.shape)
    return func(*args, **kwargs) if own else _IN_FLOAT32.run(mode, func, args, kwargs)


def _matrix_power(low: Target) -> Handler:
    """Repeated products in `low`; an inverse is taken before them as the input comes."""
    in_low = computed_in(low)

    def handle(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        n = args[1] if len(args) > 1 else kwargs.get("n")
        if not isinstance(n, int) or abs(n) < 2 or "out" in kwargs or not float_tensors(args[:1]):
            return func(*args, **kwargs)
        x = func(args[0], -1) if n < 0 else args[0]
        return in_low.run(mode, func, (x, abs(n)), {})

    return Handler(handle, low)


@cache
def apex_lists(low: Target, entry: Target | None = None) -> Rule:
    """What apex's `amp.initialize(opt_level="O1")` does at each operation.

    A listed operation in place keeps the precision of what it writes into; one that would have to compute in float32
    is refused on 16 bits. Batch norm is not listed: its kernel takes 16 bits with float32 statistics.
    """
    lists = operator_lists(low, APEX_TO_LOW, APEX_TO_WIDE, APEX_PROMOTED, True, entry=entry)
    handlers = {**lists.handlers, "cpu": computed_in(torch.float32)}
    refuses = {f"{name}_": _refused_in_low(low, f"x.float().{name}_()") for name in APEX_TO_WIDE}
    matches = dict.fromkeys((f"{name}_" for name in APEX_TO_LOW | APEX_PROMOTED), in_place)
    handlers |= {name: handler for name, handler in (refuses | matches).items() if hasattr(Tensor, name)}
    handlers[BANNED] = _refused_in_low(low, f"{BANNED}_with_logits")
    if isinstance(low, torch.dtype):
        handlers |= {name: _of_one_dtype(handlers.get(name)) for name in _names(ops.spellings(*APEX_UNLISTED))}
    handlers |= dict.fromkeys(_names(ops.spellings("batch_norm")), _as_its_input)
    return Rule(handlers, lists.default, entry, (apex_lists, (low, entry)))


def _refused_in_low(low: Target, way_out: str) -> Handler:
    wide = computed_in(torch.float32)

    def handle(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        given = float_tensors((args, kwargs))
        first = given[:1] if func.__name__ == BANNED else given
        if any(precision(x) in (low, torch.float16, torch.bfloat16) for x in first):
            raise NotImplementedError(
                f"{func.__name__} is unsafe in 16 bits, and apex bans it there; use {way_out}, or to_float"
            )
        return wide.run(mode, func, args, kwargs) if func.__name__ == BANNED else func(*args, **kwargs)

    return Handler(handle)


def _of_one_dtype(handler: Handler | None) -> Handler:
    """What apex lists nowhere: as it comes, and where torch refuses several dtypes, that is said with a way out."""

    def handle(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        try:
            return func(*args, **kwargs) if handler is None else handler.run(mode, func, args, kwargs)
        except RuntimeError as error:
            dtypes = list(dict.fromkeys(dtype_name(x.dtype) for x in float_tensors((args, kwargs))))
            if len(dtypes) < 2:
                raise
            raise RuntimeError(
                f"{str(error).rstrip('.')}: {func.__name__} is on none of apex's lists, so its inputs come as they "
                f"are, here {' and '.join(dtypes)}; cast one of them (x.to(y.dtype)), or use level auto"
            ) from error

    return Handler(handle)


@Handler
def _as_its_input(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    out = func(*args, **kwargs)
    return converted(out, precision(args[0])) if args and isinstance(args[0], Tensor) else out
