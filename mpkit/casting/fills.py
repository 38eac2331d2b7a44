"""Numbers that fill tensors, such as those of a mask, in an emulated format, whose range no dtype tells.

A network asks a tensor's dtype for its lowest number, and of an emulated one that is float32's. In the format it would
become an infinity, and softmax gives NaN where everything is masked; or a NaN, where the format has no infinity. So a
finite number beyond the format stands for its largest, as the lowest number of float16 would in float16. An infinity
stays one: in a format without it is NaN, and a warning says so.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.compiler import is_compiling

from mpkit.casting.entrances import frames_to_user
from mpkit.casting.handlers import Caster, Handler, computed_in
from mpkit.casting.kernels import bounded_by
from mpkit.casting.operations import Function
from mpkit.casting.targets import Emulated, Target, float_tensors, precision
from mpkit.formats import FloatFormat

# from which argument on a function is given the numbers that it fills with, and their names
FILLS: dict[str, int] = {
    "masked_fill": 2,
    "masked_fill_": 2,
    "__setitem__": 2,
    "index_fill": 3,
    "index_fill_": 3,
    "fill_": 1,
    "full_like": 1,
    "new_full": 2,
    "full": 1,
    "tensor": 0,
    "where": 1,
    "pad": 3,
    "scatter": 3,
    "scatter_": 3,
}
_IN_PLACE = frozenset(name for name in FILLS if name.endswith("_"))
_NAMES = frozenset(("value", "fill_value", "input", "other"))
_EXTREME = torch.finfo(torch.float32).max
_WAYS_OUT = "fill with {lowest:g}, its lowest number, or keep that module in float32: to_float(module, torch.float32)"


def numbers_in_format(low: Emulated, handler: Handler | None, *, whatever: bool) -> Handler:
    """`handler` for a function in FILLS, its numbers in the range of `low`.

    Args:  whatever says that tensors are cast to `low` wherever they come from; else it counts where they are in it.
    """
    largest = low.fmt.max

    def handle(mode: Caster, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        at = FILLS[func.__name__]
        numbers = [
            x for x in (*args[at:], *(kwargs[name] for name in kwargs if name in _NAMES)) if type(x) in (int, float)
        ]
        if any(abs(x) > largest for x in numbers) and _is_in(low, func, numbers, (args, kwargs), whatever):
            if not is_compiling():
                _tell(low.fmt, func.__name__, numbers)
            after, named = bounded_by(largest, args[at:], {n: x for n, x in kwargs.items() if n in _NAMES})
            args, kwargs = (*args[:at], *after), kwargs | named
        return func(*args, **kwargs) if handler is None else handler.run(mode, func, args, kwargs)

    return Handler(handle, None if handler is None else handler.computes)


def _is_in(low: Emulated, func: Function, numbers: list[Any], given: tuple[Any, Any], whatever: bool) -> bool:
    """Whether what is filled is in `low`, or will be where it is used."""
    args, kwargs = given
    told = kwargs.get("dtype")
    if told is not None:
        return whatever and told is torch.float32
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dtype is not torch.bool]
    filled = tensors if func.__name__ == "where" else tensors[:1]
    floats = float_tensors(filled)
    # written into in place, a float32 tensor stays one
    if not whatever or func.__name__ in _IN_PLACE:
        return bool(floats) and all(precision(x) == low for x in floats)
    return bool(floats) or (not filled and all(type(x) is float for x in numbers))


def _tell(fmt: FloatFormat, name: str, numbers: list[float]) -> None:
    for x in numbers:
        if math.isinf(x) and not fmt.has_inf:
            what = f"{name} is given {x:g}, and {fmt.name} has no infinity: it becomes NaN"
        elif fmt.max < abs(x) < _EXTREME:
            what = f"{name} is given {x:g}, beyond {fmt.name}: {math.copysign(fmt.max, x):g} stands for it"
        else:
            continue
        warnings.warn(f"{what}; {_WAYS_OUT.format(lowest=-fmt.max)}", RuntimeWarning, stacklevel=frames_to_user())


def tell_of_infinities(low: Target | None, values: object, kind: str) -> None:
    """Warn if an argument of a network, a module of class `kind`, holds an infinity that `low` has not."""
    if not isinstance(low, Emulated) or low.fmt.has_inf or peek_interpreter_stack() is not None:
        return
    if any(x.layout is torch.strided and not x.is_nested and bool(x.isinf().any()) for x in float_tensors(values)):
        warnings.warn(
            f"an argument of {kind} holds an infinity, which {low.fmt.name} has not: it becomes NaN; mask with "
            f"{-low.fmt.max:g}, its lowest number, or with True and False",
            RuntimeWarning,
            stacklevel=frames_to_user(),
        )


def attention(low: Emulated, result: Target | None = None) -> Handler:
    """Attention in a format without infinities: the mask that is added to its scores stays as it comes."""
    inner = computed_in(low, result)

    def handle(mode: Caster, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        if not isinstance(mask, Tensor) or not mask.is_floating_point():
            return inner.run(mode, func, args, kwargs)
        others = {name: x for name, x in kwargs.items() if name != "attn_mask"}

        def masked(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> object:
            return func(query, key, value, mask, *rest, **options)

        return inner.run(mode, masked, (*args[:3], *args[4:]), others)

    return Handler(handle, low)
