"""The operator lists of NVIDIA apex's level O1 and of torch's autocast on CUDA, as rules.

Source:  torch 2.13, ATen/autocast_mode.h; NVIDIA apex, amp/lists and amp/wrap.py.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from mpkit.casting import operators as ops
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
from mpkit.casting.low import Target, float_tensors, precision
from mpkit.casting.mode import Handler, Rule, as_is, cast
from mpkit.casting.rules import WIDE, Args, Kwargs, computed, one_dtype_said, operator_lists, promoted, written

# these compute in the dtype that they are told, and only else in float32
_TOLD = ops.names_of(*ops.words("sum prod cumsum cumprod softmax log_softmax norm"))


@cache
def autocast_lists(low: Target, entry: Target | None = None) -> Rule:
    """What `torch.autocast("cuda")` does at each operation. It leaves float64 tensors alone."""
    lists = operator_lists(low, TORCH_TO_LOW, TORCH_TO_WIDE, TORCH_PROMOTED, True, frozenset((BANNED,)), entry)
    handlers = {**lists.handlers}
    handlers |= {name: _unless_told(handlers[name]) for name in _TOLD}
    handlers["interpolate"] = _interpolated
    handlers[Tensor.__rtruediv__.__name__] = computed(WIDE)  # a reciprocal, and a product with it
    handlers |= dict.fromkeys(TORCH_KERNELS_TO_LOW, computed(low)) | dict.fromkeys(
        TORCH_KERNELS_TO_WIDE, computed(WIDE)
    )
    handlers |= {"inner": _inner, "sum_to_size": _summed_to_size}
    handlers |= dict.fromkeys(ops.names_of("matrix_power"), _matrix_power(low))
    del handlers[torch.linalg.cross.__name__]  # one operator elsewhere, but not on this list
    listed = {name for name, handler in handlers.items() if handler in (computed(low), computed(WIDE))} | _TOLD
    kept = {name: _sparing_float64(handler) if name in listed else handler for name, handler in handlers.items()}
    return Rule(kept, None, entry, False, (autocast_lists, (low, entry)))


def _sparing_float64(handler: Handler) -> Handler:
    """An operation with a float64 among its inputs is torch's own: it widens the others, or refuses the mixture."""

    def run(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
        wide = any(x.dtype is torch.float64 for x in float_tensors((args, kwargs)))
        return (as_is if wide else handler)(func, args, kwargs)

    return run


def _unless_told(handler: Handler) -> Handler:
    return lambda func, args, kwargs: (as_is if kwargs.get("dtype") is not None else handler)(func, args, kwargs)


def _interpolated(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
    """Every mode but "area", which is an average pool, in float32."""
    way = args[3] if len(args) > 3 else kwargs.get("mode", "nearest")
    return (as_is if way == "area" else _sparing_float64(computed(WIDE)))(func, args, kwargs)


def _inner(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
    """With a single number it is a product like any other, whose dtype a single number does not decide."""
    numbers = any(x.dim() == 0 for x in float_tensors((args, kwargs)))
    return (as_is if numbers else promoted)(func, args, kwargs)


def _summed_to_size(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
    """In float32 where anything is added up: to its own size a tensor is not summed."""
    x, size = args[0], kwargs.get("size", args[1:])
    wanted = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    own = x.dim() > 0 and tuple(wanted) == tuple(x.shape)
    return (as_is if own else _sparing_float64(computed(WIDE)))(func, args, kwargs)


def _matrix_power(low: Target) -> Handler:
    """Repeated products in `low`; an inverse is taken before them as the input comes."""

    def run(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
        n = args[1] if len(args) > 1 else kwargs.get("n")
        if not isinstance(n, int) or abs(n) < 2 or "out" in kwargs or not float_tensors(args[:1]):
            return func(*args, **kwargs)
        x = func(args[0], -1) if n < 0 else args[0]
        return _sparing_float64(computed(low))(func, (x, abs(n)), {})

    return run


@cache
def apex_lists(low: Target, entry: Target | None = None) -> Rule:
    """What apex's `amp.initialize(opt_level="O1")` does at each operation.

    A listed operation in place keeps the precision of what it writes into; one that would have to compute in float32
    is refused on 16 bits. Batch norm is not listed: its kernel takes 16 bits with float32 statistics.
    """
    lists = operator_lists(low, APEX_TO_LOW, APEX_TO_WIDE, APEX_PROMOTED, True, entry=entry)
    handlers = {**lists.handlers, "cpu": computed(WIDE)}
    refuses = {f"{name}_": _refused_in_low(low, f"x.float().{name}_()") for name in APEX_TO_WIDE}
    matches = dict.fromkeys((f"{name}_" for name in APEX_TO_LOW | APEX_PROMOTED), written)
    handlers |= {name: handler for name, handler in (refuses | matches).items() if hasattr(Tensor, name)}
    handlers[BANNED] = _refused_in_low(low, f"{BANNED}_with_logits")
    if isinstance(low, torch.dtype):
        handlers |= {name: one_dtype_said(handlers.get(name)) for name in ops.names_of(*APEX_UNLISTED)}
    handlers["batch_norm"] = _as_its_input
    return Rule(handlers, None, entry, False, (apex_lists, (low, entry)))


def _refused_in_low(low: Target, way_out: str) -> Handler:
    def run(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
        given = float_tensors((args, kwargs))
        first = given[:1] if func.__name__ == BANNED else given
        if any(precision(x) in (low, torch.float16, torch.bfloat16) for x in first):
            raise NotImplementedError(
                f"{func.__name__} is unsafe in 16 bits, and apex bans it there; use {way_out}, or to_float"
            )
        return (computed(WIDE) if func.__name__ == BANNED else as_is)(func, args, kwargs)

    return run


def _as_its_input(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
    out = func(*args, **kwargs)
    return cast(out, precision(args[0])) if args and isinstance(args[0], Tensor) else out
