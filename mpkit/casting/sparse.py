"""Sparse and nested tensors are cast value by value, and so are the sparse gradients of dense ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)


def is_dense(x: Tensor) -> bool:
    """Whether `x` has one block of memory of its own."""
    return x.layout is torch.strided and not x.is_nested


def values_of(x: Tensor) -> Tensor:
    """The stored values of a tensor of any layout, without a graph."""
    if is_dense(x):
        return x.detach()
    if x.is_nested:
        return x.detach().values()
    return x.detach()._values() if x.layout is torch.sparse_coo else x.detach().values()


def parts(x: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that a tensor of any layout consists of: itself, or its indices and its values."""
    if is_dense(x):
        return (x,)
    inner: Any = x.detach()
    if x.is_nested:
        return (inner.offsets(), inner.values()) if x.layout is torch.jagged else (inner,)
    if inner.layout is torch.sparse_coo:
        return inner._indices(), inner._values()
    rows = inner.layout in _BY_ROWS
    pointers = (inner.crow_indices(), inner.col_indices()) if rows else (inner.ccol_indices(), inner.row_indices())
    return *pointers, inner.values()


def in_parts(change: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`change`, which keeps shapes, of the tensors in a nested one, differentiable."""
    if x.layout is not torch.jagged:
        return torch.nested.as_nested_tensor([change(part) for part in x.unbind()])
    nested: Any = x
    lengths, dim = nested.lengths(), nested._ragged_idx
    return torch.nested.nested_tensor_from_jagged(change(x.values()), nested.offsets(), lengths, dim)


def by_values(change: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A tensor of the same layout and places whose stored values are `change(values)`; nothing is differentiated."""
    if is_dense(x):
        return change(x.detach())
    places, values = parts(x)[:-1], parts(x)[-1]
    if x.layout is torch.sparse_coo:
        new = torch.sparse_coo_tensor(places[0], change(values), x.shape, check_invariants=False)
        return new._coalesced_(x.is_coalesced())
    compressed, plain = places
    return torch.sparse_compressed_tensor(
        compressed, plain, change(values), x.shape, layout=x.layout, check_invariants=False
    )


class _ByValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return by_values(change, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return by_values(ctx.back, grads[0]), None, None


def cast_by_values(x: Tensor, change: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """`change` of the stored values of `x`, and `back` of those of its gradient, whatever the layouts of the two."""
    return _ByValues.apply(x, change, back)
