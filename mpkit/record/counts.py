"""How many values of a tensor lie in each power of two, and how large they are together: exact, and cheap."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mpkit.arguments import check_kind

FIELDS = 256  # exponent fields of float32: 0 holds zeros and subnormals, 255 holds inf and NaN
_MIN_NORMAL = 2.0**-126
_BLOCK = 2**19  # values counted at once: they stay in the cache between one pass and the next
_FEW = 2**14  # values that are counted faster one by one than in pairs
_SAFE = 1e-15, 1e15  # norms whose squares float32 adds up without overflow or loss


def exponent_counts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How many values of `x` lie in each power of two; on a GPU without a host read.

    Shapes:  x (*) floating -> (256,) int64 counts by exponent field (entry e + 127 counts 2**e <= |x| < 2**(e+1),
             entry 255 inf and NaN, entry 0 nothing), () int64 zeros, () float32 largest magnitude.
    Edges:   |x| < 2**-126, the subnormals of float32, count as zeros; float64 is rounded to float32 first.

    >>> counts, zeros, largest = exponent_counts(torch.tensor([0.0, 1.0, 1.5, -3.0]))
    >>> counts[127:130].tolist(), int(zeros), float(largest)
    ([2, 1, 0], 1, 3.0)
    """
    check_kind("x", x, Tensor, "a tensor")
    flat = x.detach().reshape(-1).to(torch.float32)
    if flat.device.type == "cpu":
        counted, zeros, largest, _ = host_counts(flat)
        return torch.from_numpy(counted), flat.new_tensor(zeros, dtype=torch.int64), flat.new_tensor(largest)
    if not flat.numel():
        return x.new_zeros(FIELDS, dtype=torch.int64), x.new_zeros((), dtype=torch.int64), flat.new_zeros(())
    fields = (flat.view(torch.int16)[1::2] >> 7 & (FIELDS - 1)).float()
    # bincount would read the length of its result on the host; histc counts in float32: exact up to 2**24
    found = torch.stack([torch.histc(p, FIELDS, 0, FIELDS).long() for p in fields.split(2**24)]).sum(0)
    none = found[0].clone()
    found[0] = 0
    low, high = torch.aminmax(flat)
    return found, none, torch.maximum(-low, high).abs()  # of zeros alone it may be -0.0


def host_counts(
    flat: Tensor, factor: float | None = None, scratch: np.ndarray | None = None
) -> tuple[np.ndarray, int, np.float32, float]:
    """The same of `flat * factor`, and the L2 norm of `flat`, for a contiguous (n,) float32 tensor on the CPU.

    Neighbours are counted in pairs, by 65,536 combinations of two exponents: half as many increments. A factor that is
    a power of two moves exponents, so nothing is multiplied.

    Args:  scratch: made by `new_scratch()`; fresh memory would cost a page fault per 4 kB.
    """
    counts, largest, values, square = np.zeros(FIELDS, dtype=np.int64), np.float32(0), flat.numpy(), 0.0
    room = new_scratch() if scratch is None else scratch
    down = _halvings(factor)
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        top, shift = _largest(block), down
        if top:
            square += float(total_norm([flat[start : start + _BLOCK]])) ** 2
        if factor is not None and (shift is None or not top < np.inf):
            block = (flat[start : start + _BLOCK] * factor).numpy()
            top, shift = _largest(block), 0
        elif factor is not None:
            top = np.float32(top * factor)
        largest = np.maximum(largest, top)
        if top < _MIN_NORMAL:
            counts[0] += len(block)
            continue
        fields = room[: len(block)]
        np.right_shift(block.view(np.uint32), 23, out=fields, casting="unsafe")  # to eight bits: the sign is cut off
        if shift:
            torch.from_numpy(fields).clamp_(min=shift).sub_(shift)
        counts += _tally(fields, below_two=bool(top < 2))
    zeros, counts[0] = int(counts[0]), 0
    return counts, zeros, largest, math.sqrt(square)


def new_scratch() -> np.ndarray:
    """Memory in which `host_counts` works."""
    return np.empty(_BLOCK, dtype=np.uint8)


def _largest(values: np.ndarray) -> np.float32:
    """Largest magnitude; NaN if there is one."""
    return np.abs(np.maximum(-values.min(), values.max()))  # of zeros alone it may be -0.0


def _halvings(factor: float | None) -> int | None:
    """k where `factor` is 2**-k with 0 <= k <= 126, else None."""
    if factor is None:
        return 0
    fraction, exponent = math.frexp(factor)
    return 1 - exponent if fraction == 0.5 and 0 <= 1 - exponent <= 126 else None


def _tally(fields: np.ndarray, below_two: bool) -> np.ndarray:
    """(n,) uint8 -> (256,) int64 counts, overwriting `fields`; `below_two` promises fields below 128."""
    if len(fields) < _FEW:
        return np.bincount(fields, minlength=FIELDS)
    whole = len(fields) // 4 * 4
    rest = np.bincount(fields[whole:], minlength=FIELDS)
    if below_two:
        # seven bits are enough: the sign stays free, and the eighth bit of every other pair leads to a counter of its
        # own, since a counter that many zeros hit in a row would wait for itself
        marked = fields[:whole].view(np.uint32)
        np.bitwise_or(marked, 0x80, out=marked)
        pairs = fields[:whole].view(np.int16)
    else:
        pairs = fields[:whole].view(np.uint16).astype(np.int32)
    # numpy would widen the pairs to int64 first
    joint = torch.bincount(torch.from_numpy(pairs), minlength=FIELDS**2 // (2 if below_two else 1)).view(-1, FIELDS)
    low, high = joint.sum(0).numpy(), joint.sum(1).numpy()
    if below_two:
        low = low[:128] + low[128:]
    rest[: len(low)] += low
    rest[: len(high)] += high
    return rest


def total_norm(tensors: Sequence[Tensor]) -> float | Tensor:
    """L2 norm of floating tensors together; not finite exactly where a value is not.

    On a GPU a () float64 tensor, on the CPU a number, of float32 sums where those lose nothing.
    """
    if tensors[0].device.type != "cpu":
        return _norm(tensors, torch.float64)
    norm: float = _norm(tensors, torch.float32).numpy().item()
    return norm if _SAFE[0] < norm < _SAFE[1] else _norm(tensors, torch.float64).numpy().item()


def _norm(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    if len(tensors) == 1:
        return torch.linalg.vector_norm(tensors[0], dtype=dtype)
    same = all(t.dtype == dtype for t in tensors)
    norms = torch._foreach_norm([*tensors]) if same else torch._foreach_norm([*tensors], 2, dtype=dtype)
    return torch.linalg.vector_norm(torch.stack(norms))
