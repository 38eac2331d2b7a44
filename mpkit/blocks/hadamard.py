"""The random Hadamard transform of NVFP4 training: it spreads an outlier over 16 values and cancels in a product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mpkit.arguments import check_flags
from mpkit.rounding import check_dim

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The fixed signs of TransformerEngine 2.20."""
WIDTH = len(SIGNS)
_NEGATIVE = sum((sign < 0) << place for place, sign in enumerate(SIGNS))


def hadamard(x: Tensor, dim: int = -1, *, signs: bool = True) -> Tensor:
    """Transform each run of 16 values along `dim`: multiply by the signs, then by Sylvester's matrix, then by 1/4.

    Shapes:  x (*) of a float dtype -> (*) float32 values rounded to bfloat16, since that is what is quantised; where
             the length of `dim` is no multiple of 16 it grows to the next one, filled up with zeros before.
    Edges:   orthogonal: the sum of products of two tensors along `dim` stays the same but for rounding.
    Raises:  TypeError if `x` is no float tensor; ValueError if `dim` does not exist.
    Source:  arXiv:2509.25149, 4; TransformerEngine 2.20, pytorch/custom_recipes/reference_nvfp4.py.

    >>> hadamard(torch.eye(16)[0]).abs().unique()
    tensor([0.2500])
    """
    dim = check_dim(x, dim)
    check_flags(signs=signs)
    moved = x.detach().float().movedim(dim, -1)
    moved = F.pad(moved, (0, -moved.shape[-1] % WIDTH))
    runs = moved.reshape(-1, WIDTH)
    if signs:
        places = torch.arange(WIDTH, device=x.device)  # made there: a copy from the host stops a capture
        runs = runs * (1 - 2 * (torch.bitwise_right_shift(_NEGATIVE, places) & 1))
    y = (runs / 4).unflatten(1, (2, 2, 2, 2))
    for axis in range(1, 5):  # sums and differences in a fixed order: no product that each machine adds up in its own
        a, b = y.unbind(axis)
        y = torch.stack((a + b, a - b), axis)
    return y.reshape(moved.shape).to(torch.bfloat16).float().movedim(-1, dim)
