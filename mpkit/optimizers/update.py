"""One call of an update rule, written once for host numbers and for numbers that only the device knows.

How a skip works. When `keep` is 0 every gradient is -0.0 and the coefficients are neutral: a running average becomes
`1 * m + c * -0.0` and a weight `w - (+0.0)`. Both return their operand bit for bit, -0.0 included, which `m + 0.0` does
not; so no copy of weights or state is needed, and nothing is read on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from mpkit.optimizers.arguments import decays_by_name

Number = float | Tensor  # a host number, or a 0-d tensor where only the device knows it
Tensors = list[Tensor] | tuple[Tensor, ...]
Value = TypeVar("Value")


@dataclass
class Update:
    """The tensors of one device and dtype, and the numbers of this step, as an optimizer's formula sees them.

    Args:
        weights:  float32 (or float64) values to change in place; the master copies where parameters have 16 bits.
        grads:    same shapes and dtype, after decay, transform and unscaling; never written to by a formula.
        state:    name -> one tensor per weight, to change in place.
        group:    the parameter group, with every hyper-parameter.
        chosen:   which of the group's parameters these are.
        lr, decay:  numbers, or 0-d tensors where a schedule is evaluated on the device.
        count:    1 at the group's first applied update; an int, or a 0-d int64 tensor.
        keep:     None when the step cannot be skipped, else 0-d float32: 1 to apply the step, 0 to skip it.
        memo:     numbers that the slices of one update share, see `once`.
    """

    weights: list[Tensor]
    grads: list[Tensor]
    state: dict[str, list[Tensor]]
    group: dict[str, Any]
    chosen: list[int]
    lr: Number
    decay: Number
    count: int | Tensor
    keep: Tensor | None
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def counted(self) -> Number:
        """`count` as an int, or as 0-d float64: arithmetic with an int64 tensor would take torch's default dtype."""
        return self.count.double() if isinstance(self.count, Tensor) else self.count

    def once(self, name: object, compute: Callable[[], Value]) -> Value:
        """What `compute` gives, computed for the first slice and kept for the others."""
        if name not in self.memo:
            self.memo[name] = compute()
        return self.memo[name]

    def slices(self, size: int) -> Iterator[Update]:
        """The same update in parts: all small tensors together, large ones as flat slices of at most `size` values.

        A tensor stays whole when it, its gradient or its state does not lie in one piece and in one shape.
        """
        if all(weight.numel() <= size for weight in self.weights):
            yield self
            return
        rows = list(zip(self.weights, self.grads, *self.state.values(), strict=True))
        # flat slices of weight, gradient and state must be the same values, so all of a row lie alike
        large = [k for k, row in enumerate(rows) if row[0].numel() > size and _one_piece(row)]
        small = [k for k in range(len(rows)) if k not in large]
        if small:
            yield self._part([rows[k] for k in small], [self.chosen[k] for k in small])
        for k in large:
            for row in zip(*(tensor.view(-1).split(size) for tensor in rows[k])):
                yield self._part([row], [self.chosen[k]])

    def _part(self, rows: list[tuple[Tensor, ...]], chosen: list[int]) -> Update:
        weights, grads, *state = map(list, zip(*rows))
        return replace(self, weights=weights, grads=grads, state=dict(zip(self.state, state)), chosen=chosen)

    def hold(self, factor: float) -> Number:
        """The factor of a running average: itself, or 1 when the step is skipped."""
        if (keep := self.keep) is None:
            return factor
        return self.once(("hold", factor), lambda: torch.add(1 - keep, keep, alpha=factor))

    def stop(self, factor: Number) -> Number:
        """The factor of a change: itself, or 0 when the step is skipped."""
        if (keep := self.keep) is None:
            return factor
        name = factor if isinstance(factor, float) else id(factor)  # the memo keeps the tensor, and so its id
        return self.once(("stop", name), lambda: (keep * factor, factor))[0]

    def decay_average_(self, averages: Tensors, factor: float) -> None:
        """averages *= factor, in place."""
        torch._foreach_mul_(averages, self.hold(factor))

    def move_(self, targets: Tensors, steps: Tensors, rate: Number) -> None:
        """targets -= rate * steps, in place; exactly nothing when the step is skipped."""
        rate = self.stop(rate)
        if not isinstance(rate, Tensor):
            torch._foreach_add_(targets, steps, alpha=-rate)
            return
        # a rate that only the device knows cannot be an `alpha`, which torch reads on the host
        change = torch._foreach_mul(steps, rate.to(targets[0].dtype))
        if self.keep is not None:
            torch._foreach_add_(change, 0.0)  # -0.0 -> +0.0, and w - (+0.0) is w for every w
        torch._foreach_sub_(targets, change)

    def move_by_ratio_(self, targets: Tensors, numerators: Tensors, denominators: Tensors, rate: Number) -> None:
        """targets -= rate * numerators / denominators, in place; nothing in a skipped step with denominators > 0."""
        rate = self.stop(rate)
        if not isinstance(rate, Tensor):
            torch._foreach_addcdiv_(targets, numerators, denominators, value=-rate)
            return
        change = torch._foreach_mul(numerators, rate.to(targets[0].dtype))
        if self.keep is not None:
            torch._foreach_add_(change, 0.0)
        torch._foreach_addcdiv_(targets, change, denominators, value=-1.0)

    def replace_(self, targets: Tensors, values: Tensors) -> None:
        """targets = values, in place; nothing when the step is skipped. For formulas without a neutral coefficient."""
        if self.keep is None:
            torch._foreach_copy_(targets, values)
            return
        # a maximum, say, has no operand that leaves it as it is
        applied = self.keep != 0
        for target, value in zip(targets, values):
            torch.where(applied, value, target, out=target)

    def shrink_(self, rate: Number) -> None:
        """weights *= 1 - rate * decay, in place, where the name rule lets decay through: decoupled weight decay."""
        if isinstance(self.decay, float) and self.decay == 0.0:
            return
        decayed = [self.weights[i] for i in decayed_positions(self.group, self.chosen)]
        if decayed:
            torch._foreach_mul_(decayed, 1.0 - self.stop(rate * self.decay))


def _one_piece(row: tuple[Tensor, ...]) -> bool:
    return all(tensor.is_contiguous() and tensor.shape == row[0].shape for tensor in row)


def unbiased(beta: float, count: int | Tensor) -> Number:
    """1 - beta ** count, without cancellation: a float, or a 0-d float64 tensor."""
    if isinstance(count, Tensor):
        return -torch.expm1(count.double() * math.log(beta))
    return -math.expm1(count * math.log(beta))


def root(x: Number) -> Number:
    """Square root of a number or a tensor."""
    return x.sqrt() if isinstance(x, Tensor) else math.sqrt(x)


def add_(targets: Tensors, number: Number) -> None:
    """targets += number, in place."""
    if isinstance(number, Tensor):  # with alpha, or torch takes the overload that reads the number on the host
        torch._foreach_add_(targets, number.to(targets[0].dtype), alpha=1.0)
    else:
        torch._foreach_add_(targets, number)


def silencer(keep: Tensor, like: Tensor) -> Callable[[list[Tensor]], list[Tensor]]:
    """A function that returns copies of gradients, or -0.0 throughout when keep is 0; `like`: a weight of theirs."""
    if like.is_cuda:  # three launches for all tensors instead of one for each
        skip = keep == 0

        def together(grads: list[Tensor]) -> list[Tensor]:
            flat = torch._utils._flatten_dense_tensors(tuple(grads)).masked_fill_(skip, -0.0)
            return list(torch._utils._unflatten_dense_tensors(flat, tuple(grads)))

        return together
    # bits are cleared and set at the speed of memory, which torch's masked fill is far from
    bits = torch.int64 if like.dtype == torch.float64 else torch.int32
    kept = keep.to(bits).neg()  # all bits, or none
    sign = kept.bitwise_not().bitwise_and(torch.iinfo(bits).min)  # that of -0.0, or none
    return lambda grads: [g.view(bits).bitwise_and(kept).bitwise_or_(sign).view(like.dtype) for g in grads]


def decayed_positions(group: dict[str, Any], chosen: list[int]) -> list[int]:
    """The positions within `chosen` of the parameters that weight decay applies to."""
    if not group["decay_by_name"] or "param_names" not in group:
        return list(range(len(chosen)))
    return [k for k, i in enumerate(chosen) if decays_by_name(group["param_names"][i])]
