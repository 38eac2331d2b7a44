"""Tensors of one device and dtype that one kernel treats together, with the arithmetic of a number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Number = float | Tensor  # a host number, or a 0-d tensor where only the device knows it
Tensors = list[Tensor] | tuple[Tensor, ...]


def _of_each(kernel: Callable[[Tensors], Tensors]) -> Callable[[Many], Many]:
    return lambda self: Many(kernel(self.xs))


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

    def times(self, x: Many | Number) -> Many:
        return Many(torch._foreach_mul(self.xs, self._fit(x)))

    def over(self, x: Many | Number) -> Many:
        return Many(torch._foreach_div(self.xs, self._fit(x)))

    def plus(self, x: Many | Number, factor: Number = 1.0) -> Many:
        """self + factor * x, rounded once where the factor is a host number."""
        if isinstance(x, float | int):
            return Many(torch._foreach_add(self.xs, x))
        if isinstance(factor, Tensor):
            x, factor = Many(torch._foreach_mul(self._fit(x), self._fit(factor))), 1.0
        return Many(torch._foreach_add(self.xs, self._fit(x), alpha=factor))  # without it torch reads a 0-d tensor

    def __sub__(self, x: Many | float) -> Many:
        return Many(torch._foreach_sub(self.xs, self._fit(x)))

    __mul__ = times
    __truediv__ = over
    __add__ = plus

    def __pow__(self, power: float) -> Many:
        return self.sqrt() if power == 0.5 else Many(torch._foreach_pow(self.xs, power))

    sqrt = _of_each(torch._foreach_sqrt)
    rsqrt = _of_each(torch._foreach_rsqrt)
    reciprocal = _of_each(torch._foreach_reciprocal)
    abs = _of_each(torch._foreach_abs)
    sign = _of_each(torch._foreach_sign)
    norms = _of_each(torch._foreach_norm)

    def add_(self, x: Many | Number, factor: float = 1.0, y: Many | None = None) -> Many:
        """self += factor * x * y."""
        if isinstance(x, Many) and y is not None:
            torch._foreach_addcmul_(self.xs, x.xs, y.xs, value=factor)
        else:
            more = {} if isinstance(x, float | int) else {"alpha": factor}
            torch._foreach_add_(self.xs, self._fit(x), **more)
        return self

    def mul_(self, x: Many | Number) -> Many:
        torch._foreach_mul_(self.xs, self._fit(x))
        return self

    def div_(self, x: Many | Number) -> Many:
        torch._foreach_div_(self.xs, self._fit(x))
        return self

    def sqrt_(self) -> Many:
        torch._foreach_sqrt_(self.xs)
        return self

    def at_least_(self, low: float) -> Many:
        torch._foreach_clamp_min_(self.xs, low)
        return self

    def at_most_(self, high: float) -> Many:
        torch._foreach_clamp_max_(self.xs, high)
        return self

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
