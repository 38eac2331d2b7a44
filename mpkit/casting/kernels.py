"""Operations of which torch has no 16-bit kernel on this device: they compute in float32, on the rounded inputs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from mpkit.casting.operations import Function
from mpkit.casting.targets import Target

_LACKS = re.compile(r"\"\w+\" not implemented for '(BFloat16|Half)'|Unsupported dtype (BFloat16|Half)")


def without_kernel(
    cast_all: Callable[[Any, Target], Any],
    func: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    low: Target,
    error: RuntimeError,
) -> object:
    """What `func` gives for inputs in `low` if it is computed in float32, since `error` says that torch has no kernel.

    So do, on a processor, a distance between vectors, a Fourier transform, a product with a CSR matrix. The result is
    rounded to `low`, as that of an emulated format.

    Raises:  `error`, if that says anything else, such as a refusal of low precision by linear algebra.
    """
    if not isinstance(low, torch.dtype) or _LACKS.fullmatch(str(error)) is None:
        raise error
    out = func(*cast_all(args, torch.float32), **cast_all(kwargs, torch.float32))
    told: Any = func
    while hasattr(told, "instead"):  # the calls that open ledgers make of it
        told.instead, told = torch.float32, told.func
    return cast_all(out, low)
