"""How many values of a tensor lie in each power of two, and how large they are together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpkit.arguments import check_kind

FIELDS = 256  # exponent fields of float32: 0 holds zeros and subnormals, 255 holds inf and NaN
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
    if not flat.numel():
        return flat.new_zeros(FIELDS, dtype=torch.int64), flat.new_zeros((), dtype=torch.int64), flat.new_zeros(())
    fields = (flat.view(torch.int32) >> 23).to(torch.uint8)  # eight bits: the sign is cut off
    if flat.device.type == "cpu":
        counts = torch.bincount(fields, minlength=FIELDS)
    else:
        # bincount would read the length of its result on the host; histc counts in float32: exact up to 2**24
        counts = torch.stack([torch.histc(p.float(), FIELDS, 0, FIELDS).long() for p in fields.split(2**24)]).sum(0)
    zeros = counts[0].clone()
    counts[0] = 0
    low, high = torch.aminmax(flat)
    return counts, zeros, torch.maximum(-low, high).abs()  # of zeros alone it may be -0.0


def total_norm(tensors: Sequence[Tensor]) -> float | Tensor:
    """L2 norm of floating tensors together; not finite exactly where a value is not.

    On a GPU a () float64 tensor, on the CPU a number, of float32 sums where those lose nothing.
    """
    wide = any(t.dtype == torch.float64 for t in tensors)
    if tensors[0].device.type != "cpu":
        return _norm(tensors, torch.float64)
    norm: float = _norm(tensors, torch.float64 if wide else torch.float32).numpy().item()
    return norm if wide or _SAFE[0] < norm < _SAFE[1] else _norm(tensors, torch.float64).numpy().item()


def _norm(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    same = all(t.dtype == dtype for t in tensors)
    norms = torch._foreach_norm([*tensors]) if same else torch._foreach_norm([*tensors], 2, dtype=dtype)
    return torch.linalg.vector_norm(torch.stack(norms))
