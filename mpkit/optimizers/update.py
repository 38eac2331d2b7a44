"""What update rules are written in: tensors as one number, and five changes of a state, nothing in a skipped step.

How a step is skipped where only the device knows it (`keep` is 0): every gradient is -0.0 and the coefficients are
neutral. A running average becomes `1 * m + c * -0.0` and a weight `w - (+0.0)`: both are their operand bit for bit,
-0.0 included, which `m + 0.0` is not. So no copy of weights or state is needed, and nothing is read on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    __add__ = _of_each(torch._foreach_add)
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

    def plus(self, x: Many, factor: Number) -> Many:
        """self + factor * x, rounded once where the factor is a host number."""
        if isinstance(factor, Tensor):
            x, factor = x.times(factor), 1.0
        return Many(torch._foreach_add(self.xs, x.xs, alpha=factor))

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


@dataclass
class Update:
    """One update of tensors of one device and dtype; `u["name"]` is a hyper-parameter of their group.

    Args:
        w, g, state:    weights (float32 masters where parameters have 16 bits), final gradients, slot -> tensors.
        group, chosen:  the parameter group, and which of its parameters these are.
        lr, decay, t:   numbers of this step, 0-d tensors where only the device knows them; t is 1 at the first.
        keep:           None when the step cannot be skipped, else 0-d: 1 to apply it, 0 to skip it.
    """

    w: Many
    g: Many
    state: dict[str, Many]
    group: dict[str, Any]
    chosen: list[int]
    lr: Number
    decay: Number
    t: Number
    keep: Tensor | None

    def __getitem__(self, name: str) -> Any:
        return self.group[name]

    def slices(self, size: int) -> list[Update]:
        """This update, one tensor of a CPU about `size` values after the other."""
        w = self.w.xs[0]
        if len(self.w.xs) > 1 or w.numel() <= size or not w.is_cpu or torch.compiler.is_compiling():
            return [self]
        rows = max(1, size * len(w) // w.numel())
        parts = zip(*(many.xs[0].split(rows) for many in (self.w, self.g, *self.state.values())))
        many = [[Many([x]) for x in part] for part in parts]
        return [replace(self, w=w, g=g, state=dict(zip(self.state, states))) for w, g, *states in many]

    def mix(self, slot: str, beta: float, x: Many, y: Many | None = None) -> Many:
        """state = beta state + (1 - beta) x y, a running average."""
        return self.add(slot, x, y, hold=beta, share=1 - beta)

    def add(self, slot: str, x: Many, y: Many | None = None, *, hold: float = 1.0, share: float = 1.0) -> Many:
        """state = hold state + share x y, a sum."""
        return self._held(slot, hold).add_(x, share, y)

    def peak(self, slot: str, x: Many, *, hold: float = 1.0) -> Many:
        """state = max(hold state, x), for x of a gradient's size, which is 0 in a skipped step."""
        return self._held(slot, hold).at_least_(x)

    def _held(self, slot: str, hold: float) -> Many:
        """A state times `hold`, or times 1 in a skipped step."""
        state, keep = self.state[slot], self.keep
        if hold != 1.0:
            # exact at both ends: 1 - keep + keep * hold is hold, or 1
            state.mul_(hold if keep is None else torch.add(1 - keep, keep, alpha=hold))
        return state

    def put(self, target: Many, values: Many) -> Many:
        """target = values, for formulas without a neutral coefficient, such as a maximum."""
        if self.keep is None:
            torch._foreach_copy_(target.xs, values.xs)
        else:
            for old, new in zip(target.xs, values.xs):
                torch.where(self.keep != 0, new, old, out=old)
        return target

    def descend(self, x: Many, rate: Number, target: Many | None = None, *, over: Many | None = None) -> None:
        """target (the weights) -= rate x / over."""
        w = self.w if target is None else target
        rate = rate if self.keep is None else self.keep * rate
        if isinstance(rate, Tensor) and self.keep is over is None and rate.is_cpu:
            # a product that is rounded with the sum, as in torch's own foreach rules
            torch._foreach_addcmul_(w.xs, x.xs, [rate.to(w.xs[0].dtype)] * len(w.xs), value=-1.0)
            return
        if isinstance(rate, Tensor):
            # cannot be an `alpha`, which torch reads on the host
            x, rate = x.times(rate), 1.0
            if self.keep is not None:
                x.add_(0.0)  # -0.0 -> +0.0, and w - (+0.0) is w for every w
        if over is None:
            torch._foreach_add_(w.xs, x.xs, alpha=-rate)
        else:
            torch._foreach_addcdiv_(w.xs, x.xs, over.xs, value=-rate)

    def shrink(self, rate: Number | Many) -> None:
        """weights *= 1 - rate decay where decay reaches: decoupled weight decay; a rate for all, or one for each."""
        if where := self.decayed():
            decay = self.decay if self.keep is None else self.keep * self.decay
            left = rate.part(where).times(-decay) + 1.0 if isinstance(rate, Many) else 1.0 - rate * decay
            self.w.part(where).mul_(left)

    def decayed(self) -> list[int]:
        """Positions of the weights that decay reaches."""
        if isinstance(self.decay, float) and self.decay == 0.0:
            return []
        names = self.group.get("param_names") if self.group["decay_by_name"] else None
        # MindSpore's rule for ungrouped parameters
        return [k for k, i in enumerate(self.chosen) if not names or not ("beta" in names[i] or "gamma" in names[i])]


def unbiased(beta: float, t: Number) -> Number:
    """1 - beta ** t, without cancellation: a float, or a 0-d float64 tensor."""
    return -torch.expm1(t * math.log(beta)) if isinstance(t, Tensor) else -math.expm1(t * math.log(beta))


def root(x: Number) -> Number:
    return x.sqrt() if isinstance(x, Tensor) else math.sqrt(x)


def in_one(xs: Tensors) -> Tensor:
    return torch.cat([x.reshape(-1) for x in xs])


def as_before(flat: Tensor, xs: Tensors) -> list[Tensor]:
    return [part.view_as(x) for part, x in zip(flat.split([x.numel() for x in xs]), xs)]


def silenced(g: Many, keep: Tensor) -> Many:
    """-0.0 throughout in a skipped step, whatever stood there; three launches for all tensors."""
    return Many(as_before(in_one(g.xs).masked_fill_(keep == 0, -0.0), g.xs))


def follow_(masters: Tensors, params: Tensors) -> None:
    """Read a 16-bit parameter anew where somebody else has written to it: it no longer is its master, rounded."""
    bits = torch.int16 if params[0].dtype.itemsize == 2 else torch.int8
    master, seen = in_one(masters), in_one(params)
    # as bits: a NaN is the one that it was, and a -0.0 is no 0.0
    same = master.to(seen.dtype).view(bits) == seen.view(bits)
    torch._foreach_copy_(masters, as_before(torch.where(same, master, seen.float()), masters))
