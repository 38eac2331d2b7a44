"""What torch does not do in 16 bits: operations without a kernel, and numbers beyond the range.

The first compute in float32, on the rounded inputs; the second, such as the -1e9 of a mask, stand for the largest.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch

from mpkit.casting.entrances import frames_to_user
from mpkit.casting.operations import Function, words
from mpkit.casting.targets import Target

# the several ways in which torch says so
_LACKS = re.compile(
    r"\"[\w.]+\" not implemented for '(BFloat16|Half)'|Unsupported dtype (BFloat16|Half)"
    r"|MKL FFT doesn't support tensors of type: (BFloat16|Half)"
    r"|view_as_complex is only supported for half, float and double tensors, but got a tensor of scalar type: BFloat16"
    r"|Expected both inputs to be Half, Float or Double tensors but got BFloat16 and BFloat16"
    r"|quantile\(\) input tensor must be either float or double dtype"
    r"|This function doesn't handle types other than float and double"
    r"|linalg.vander supports floating point, complex, and integer tensors, but got (BFloat16|Half)"
)
_BEYOND = re.compile(r"value cannot be converted to type (?:c10|at)::(BFloat16|Half) without overflow")
_LARGEST = {"BFloat16": torch.finfo(torch.bfloat16).max, "Half": torch.finfo(torch.float16).max}
_LARGEST_OF = {torch.bfloat16: _LARGEST["BFloat16"], torch.float16: _LARGEST["Half"]}
_FILL = frozenset(words("masked_fill masked_fill_ index_fill index_fill_ fill_"))


def without_kernel(
    cast_all: Callable[[Any, Target], Any],
    func: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    low: Target,
    error: RuntimeError,
) -> object:
    """What `func` gives for inputs in `low` if it is computed in float32, since `error` says that torch has no kernel.

    So do, on a processor, a distance between vectors, a Fourier transform, a product with a CSR matrix, a quantile,
    the complex numbers of a rotary embedding. The result is rounded to `low`, as that of an emulated format.

    Raises:  `error`, if that says anything else, such as a refusal of low precision by linear algebra.
    """
    if not isinstance(low, torch.dtype) or _LACKS.fullmatch(str(error)) is None:
        raise error
    out = func(*cast_all(args, torch.float32), **cast_all(kwargs, torch.float32))
    told: Any = func
    while hasattr(told, "instead"):  # the calls that open ledgers make of it
        told.instead, told = torch.float32, told.func
    return cast_all(out, low)


def numbers_in_range(
    args: tuple[Any, ...], kwargs: dict[str, Any], error: RuntimeError
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with Python's numbers in the range of the 16 bits that `error` says they leave.

    Where operations are listed, some tensors of a network are 16-bit and others float32, and it asks one for the lowest
    number there is and fills another with it. An infinity instead would make softmax give NaN where all is masked.
    A warning says so.

    Raises:  `error`, if that says anything else.
    """
    found = _BEYOND.fullmatch(str(error))
    if found is None:
        raise error
    largest = _LARGEST[found[1]]
    warnings.warn(
        f"an operation in 16 bits was given a number beyond them, and {largest:g} stands for its size; a mask that "
        "suits every precision is torch.finfo(x.dtype).min, asked of the tensor that is filled",
        RuntimeWarning,
        stacklevel=frames_to_user(),
    )
    return bounded_by(largest, args, kwargs)


def numbers_in_graph(
    func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As `numbers_in_range` while a graph is made, where there are no values and so no error yet; nobody is warned."""
    dtype = kwargs.get("dtype") or getattr(args[0] if args else None, "dtype", None)
    if dtype not in _LARGEST_OF:
        return args, kwargs
    # a number that is a tensor is refused where it fills, and computed with elsewhere
    return bounded_by(_LARGEST_OF[dtype], args, kwargs, tensors=func.__name__ in _FILL)


def bounded_by(
    largest: float, args: tuple[Any, ...], kwargs: dict[str, Any], *, tensors: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with every finite number in [-largest, largest]; those that are `tensors` too."""

    def bounded(value: object) -> object:
        if tensors and isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point():
            return torch.where(value.isfinite(), value.clamp(-largest, largest), value)
        if isinstance(value, int | float) and math.isfinite(value):
            return max(-largest, min(largest, value))
        return value

    return tuple(map(bounded, args)), {name: bounded(value) for name, value in kwargs.items()}
