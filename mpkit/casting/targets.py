"""What a float tensor is cast to: a torch dtype, or a format emulated inside float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpkit.formats import FloatFormat
from mpkit.rounding import quantize


@dataclass(frozen=True)
class Emulated:
    """A format inside float32: every cast point rounds to `fmt` forwards and to `grad_fmt` backwards.

    A rounded tensor carries a mark, which plays the part that the dtype plays for a native cast: it says that the
    values are in the format already, and lets in-place operations round what they write.
    """

    fmt: FloatFormat
    grad_fmt: FloatFormat

    def __str__(self) -> str:
        return self.fmt.name


Target = torch.dtype | Emulated

_MARK = "_mpkit_emulated"


def target_of(dtype: Any, grad_dtype: FloatFormat | None = None, also: tuple[torch.dtype, ...] = ()) -> Target:
    """The target that an argument `dtype` (with `grad_dtype` for gradients) means.

    Raises:  ValueError unless dtype is float16, bfloat16, one of `also` or a FloatFormat of at most 32 bits, or if
             `grad_dtype` is wider or given beside a native dtype; TypeError if `grad_dtype` is no FloatFormat.
    """
    native = (torch.float16, torch.bfloat16, *also)
    if isinstance(dtype, FloatFormat):
        if not isinstance(grad_dtype, FloatFormat | None):
            raise TypeError(f"grad_dtype is a FloatFormat such as E5M2, got {grad_dtype!r}")
        if too_wide := [fmt.name for fmt in (dtype, grad_dtype) if fmt is not None and fmt.bits > 32]:
            raise ValueError(
                f"formats are emulated inside float32, {too_wide[0]} is wider; network.double() computes in it"
            )
        return Emulated(dtype, grad_dtype or dtype)
    if not isinstance(dtype, torch.dtype) or dtype not in native:
        names = ", ".join(map(str, native))
        raise ValueError(
            f"dtype is {names} or a FloatFormat to emulate (formats.E4M3FN, get_format('e4m7')), got {dtype!r}"
        )
    if grad_dtype is not None:
        raise ValueError(
            f"grad_dtype goes with an emulated format; with {dtype} gradients are {dtype} too, leave it out"
        )
    return dtype


def precision(x: Tensor) -> Target:
    """The target `x` is in: the format it was rounded to, else its dtype."""
    return getattr(x, _MARK, None) or x.dtype


def marked(x: Tensor, target: Emulated) -> Tensor:
    """The same tensor, from now on known to hold values of `target`."""
    setattr(x, _MARK, target)
    return x


def converted(x: Tensor, target: Target) -> Tensor:
    """A float tensor of any shape in `target`, differentiable; `x` itself if it is in it already."""
    if isinstance(target, Emulated):
        if precision(x) == target:
            return x
        wide = x if x.dtype is torch.float32 else x.to(torch.float32)
        return marked(quantize(wide, target.fmt, target.grad_fmt), target)
    if x.dtype is not target:
        return x.to(target)
    return x if not hasattr(x, _MARK) else x.view_as(x)  # the same numbers, no longer bound to the format


def round_in_place_(x: Tensor) -> Tensor:
    """Round what an in-place operation wrote into a tensor that is bound to an emulated format."""
    target = precision(x)
    return x.copy_(quantize(x, target.fmt, target.grad_fmt)) if isinstance(target, Emulated) else x


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`change` applied to every tensor in a nest of tuples (named too), lists and dicts; the nest keeps its types."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        items = [map_tensors(change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        changed = {key: map_tensors(change, item) for key, item in value.items()}
        return changed if type(value) is dict else type(value)(changed)
    return value


def float_tensors(value: Any) -> list[Tensor]:
    """The float tensors in a nest of tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [x for item in value for x in float_tensors(item)]
    return []
