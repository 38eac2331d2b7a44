"""Tensors of one device and dtype that one kernel treats together, with the arithmetic of a number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Number = float | Tensor  # a host number, or a 0-d tensor where only the device knows it
Tensors = list[Tensor] | tuple[Tensor, ...]


def _of_each(kernel: Callable[..., Tensors]) -> Callable[..., Many]:
    return lambda self, *operand: Many(kernel(self.xs, *map(self._fit, operand)))


def _in_place(kernel: Callable[..., object]) -> Callable[..., Many]:
    def act(self: Many, *operand: Many | Number) -> Many:
        kernel(self.xs, *map(self._fit, operand))
        return self

    return act


class Many:
    """A list of tensors; `a * b + 1` and `a.sqrt()` act on all of them in one launch (`torch._foreach_*`).

    Operators take numbers and lists of as many tensors. A number that only the device knows goes into `times`, `over`
    and `plus`, which torch.compile follows there. What ends in `_` writes to its first operand: only for the result of
    an expression, which nobody else holds.
    """

    __slots__ = ("xs",)

    def __init__(self, xs: Tensors) -> None:
        self.xs = xs

    def _fit(self, x: Many | Number) -> Any:
        """An operand as the kernels take it; a 0-d tensor in the precision of these."""
        return x.xs if isinstance(x, Many) else x.to(self.xs[0].dtype) if isinstance(x, Tensor) else x

    times = __mul__ = _of_each(torch._foreach_mul)
    over = __truediv__ = _of_each(torch._foreach_div)
    __sub__ = _of_each(torch._foreach_sub)
    sqrt = _of_each(torch._foreach_sqrt)
    rsqrt = _of_each(torch._foreach_rsqrt)
    reciprocal = _of_each(torch._foreach_reciprocal)
    abs = _of_each(torch._foreach_abs)
    sign = _of_each(torch._foreach_sign)
    norms = _of_each(torch._foreach_norm)
    mul_ = _in_place(torch._foreach_mul_)
    div_ = _in_place(torch._foreach_div_)
    sqrt_ = _in_place(torch._foreach_sqrt_)
    at_least_ = _in_place(torch._foreach_clamp_min_)
    at_most_ = _in_place(torch._foreach_clamp_max_)

    def plus(self, x: Many | Number, factor: Number = 1.0) -> Many:
        """self + factor * x, rounded once where the factor is a host number."""
        if isinstance(x, float | int):
            return Many(torch._foreach_add(self.xs, x))
        if isinstance(factor, Tensor):
            x, factor = Many(torch._foreach_mul(self._fit(x), self._fit(factor))), 1.0
        return Many(torch._foreach_add(self.xs, self._fit(x), alpha=factor))  # without it torch reads a 0-d tensor

    __add__ = plus

    def add_(self, x: Many | Number, factor: float = 1.0, y: Many | None = None) -> Many:
        """self += factor * x * y."""
        if isinstance(x, Many) and y is not None:
            torch._foreach_addcmul_(self.xs, x.xs, y.xs, value=factor)
        else:
            more = {} if isinstance(x, float | int) else {"alpha": factor}
            torch._foreach_add_(self.xs, self._fit(x), **more)
        return self

    def __pow__(self, power: float) -> Many:
        return self.sqrt() if power == 0.5 else Many(torch._foreach_pow(self.xs, power))

    def map(self, function: Callable[..., Tensor], *others: Many) -> Many:
        """What has no kernel for lists: one tensor after the other."""
        return Many([function(*row) for row in zip(self.xs, *(other.xs for other in others))])

    def part(self, where: Sequence[int]) -> Many:
        """Those at some places."""
        return Many([self.xs[k] for k in where])

    def changed(self, where: Sequence[int], part: Many) -> Many:
        """These, with others at some places."""
        xs = list(self.xs)
        for k, x in zip(where, part.xs):
            xs[k] = x
        return Many(xs)
