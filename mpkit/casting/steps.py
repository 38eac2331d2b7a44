"""What torch's CPU kernels round between their steps in 16 bits, so that a format of 16 bits computes as they do.

Most kernels compute in float32 and round their result once, and so does every format narrower than 16 bits, which has
no kernel. Those below are made of others, or keep statistics and sums in the dtype of their input. Each takes the
rounding, then what the operator takes, as float32 values; its result is rounded by whoever calls it.

Source:  torch 2.13, ATen/native: Loss.cpp, GatedLinearUnit.cpp, cpu/SoftMaxKernel.cpp, cpu/PowKernel.cpp, cpu/*norm*,
         found by comparing every element of random tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Round = Callable[[Tensor], Tensor]
MEAN = 1  # the number of a reduction


def _share(r: Round, x: Tensor, reduction: int, of: float = 1.0) -> Tensor:
    """`of` over the number of elements that a mean is taken of."""
    return r(torch.full((), of / (x.numel() if reduction == MEAN else 1), device=x.device))


def _mse(r: Round, grad: Tensor, x: Tensor, y: Tensor, reduction: int) -> Tensor:
    return r(_share(r, x, reduction, 2.0) * r(x - y)) * grad


def _huber(r: Round, grad: Tensor, x: Tensor, y: Tensor, reduction: int, delta: float) -> Tensor:
    share, apart = _share(r, x, reduction), r(x - y)
    return torch.where(apart.abs() < delta, r(share * apart) * grad, r(share * grad) * (delta * apart.sign()))


def _cross_entropy(r: Round, grad: Tensor, p: Tensor, y: Tensor, weight: Any = None, reduction: int = MEAN) -> Tensor:
    grad = r(r(grad * r(p - y)) / r(r(1 - p) * p).clamp(min=1e-12))
    grad = grad if weight is None else r(grad * weight)
    return grad / p.numel() if reduction == MEAN else grad


def _soft_margin(r: Round, grad: Tensor, x: Tensor, y: Tensor, reduction: int) -> Tensor:
    z = r(torch.exp(r(-y * x)))
    return r(r(r(-_share(r, x, reduction) * y) * z) / r(z + 1)) * grad


def _glu(r: Round, grad: Tensor, x: Tensor, dim: int) -> Tensor:
    a, b = x.chunk(2, dim)
    gate = r(b.sigmoid())
    return torch.cat([gate * grad, (1 - gate) * gate * a * grad], dim)


def _log_softmax(r: Round, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    if x.dim() and dim % x.dim() != x.dim() - 1:
        return torch.log_softmax(x, dim)
    apart = x - x.amax(dim, keepdim=True)
    return apart - r(r(apart.exp().sum(dim, keepdim=True)).log())


def _batch_norm(r: Round, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    weight, _, mean, _, training, _, eps = rest
    if not training or weight is not None or mean is not None:
        return torch.ops.aten.native_batch_norm(x, *rest)
    dims, shape = [i for i in range(x.dim()) if i != 1], [1, -1, *[1] * (x.dim() - 2)]
    variance, mean = torch.var_mean(x, dims, correction=0)
    count = x.numel() // max(1, x.shape[1])
    mean, inverse = r(mean), r(1 / (r(r(variance * count) / count) + eps).sqrt())
    return (x - mean.view(shape)) * inverse.view(shape), mean, inverse


def _rounded_statistics(kernel: Any) -> Callable[..., tuple[Tensor, ...]]:
    def run(r: Round, *args: Any) -> tuple[Tensor, ...]:
        out, *statistics = kernel(*args)
        return out, *map(r, statistics)

    return run


STEPS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.mse_loss_backward.default: _mse,
    torch.ops.aten.huber_loss_backward.default: _huber,
    torch.ops.aten.binary_cross_entropy_backward.default: _cross_entropy,
    torch.ops.aten.soft_margin_loss_backward.default: _soft_margin,
    torch.ops.aten.glu_backward.default: _glu,
    torch.ops.aten.pow.Tensor_Scalar: lambda r, x, exponent: x.pow(r(torch.tensor(float(exponent))).item()),
    torch.ops.aten._log_softmax.default: _log_softmax,
    torch.ops.aten.native_batch_norm.default: _batch_norm,
    torch.ops.aten.native_layer_norm.default: _rounded_statistics(torch.ops.aten.native_layer_norm),
    torch.ops.aten.native_group_norm.default: _rounded_statistics(torch.ops.aten.native_group_norm),
}
"""By operator, for operands of which none is plain float32."""
