"""AdaFactor: the second moment of a matrix kept as one row and one column."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mpkit.optimizers.arguments import Pair, Positive, Rate, Share
from mpkit.optimizers.base import Group, Optimizer
from mpkit.optimizers.many import Many, Number
from mpkit.optimizers.update import Update, root


class AdaFactor(Optimizer):
    """Adam with a factored second moment, steps clipped by their size and scaled by the weight's.

    `r = lr`, or `min(1e-2, 1 / sqrt(t))` with relative_step (`1e-6 t` for 1e-2 with warmup_init);
    `r *= max(eps2, rms(w))` with scale_parameter;  `b2 = 1 - t^-decay_rate`;
    two axes or more: `row, col = b2 (row, col) + (1-b2) (mean over the last, last but one axis of g^2 + eps1)` and
    `s = g / sqrt(row / mean(row)) / sqrt(col)`; fewer: `v = b2 v + (1-b2) (g^2 + eps1)` and `s = g / sqrt(v)`;
    `s *= r / max(1, rms(s) / clip_threshold)`;  `m = b1 m + (1-b1) s`;  `w = w - weight_decay r w - m`.

    Args:
        learning_rate:   None with relative_step, else a rate; never per group.
        eps:             (eps1, eps2), numbers > 0.
        clip_threshold:  number > 0.
        decay_rate:      number > 0.
        beta1:           number in [0, 1); 0 keeps no m.
        weight_decay:    number in [0, 1); reaches every parameter.
        compression:     accepted for MindSpore's sake, without effect; state is float32.
        loss_scale:      stored, but the gradients are not divided by it, as in MindSpore.
    Against torch:  `torch.optim.Adafactor` has no m, decays by lr and not by r, and clips eps differently.
    Raises:  ValueError for a rate together with relative_step, neither of both, or warmup_init without relative_step.
    Source:  Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 and 5; MindSpore 2.7 nn.AdaFactor.
    """

    slots = {"moment1": 0.0, "square": 0.0, "row": 0.0, "column": 0.0}
    switched = {"moment1": "beta1"}
    refused = {
        "give either a learning rate or relative_step=True, got {learning_rate!r} and {relative_step}": lambda given: (
            (given["learning_rate"] is not None) == given["relative_step"]
        ),
        "warmup_init needs relative_step=True": lambda given: given["warmup_init"] and not given["relative_step"],
    }
    decays_itself = by_axes = True
    decay_filter = rate_by_group = sliced = False

    learning_rate: Rate | None = None
    eps: Pair = (1e-30, 1e-3)
    clip_threshold: Positive = 1.0
    decay_rate: Positive = 0.8
    beta1: Share = 0.9
    weight_decay: Share = 0.0
    scale_parameter: bool = True
    relative_step: bool = True
    warmup_init: bool = False
    compression: bool = False
    loss_scale: Positive = 1.0

    def needed(self, p: Tensor, group: Group) -> list[str]:
        unused = {"square"} if p.ndim > 1 else {"row", "column"}
        return [slot for slot in super().needed(p, group) if slot not in unused]

    def first(self, slot: str, weight: Tensor, group: Group) -> Tensor:
        mean_over = {"row": -1, "column": -2}
        return torch.zeros_like(weight.sum(mean_over[slot]) if slot in mean_over else weight)

    def update(self, u: Update) -> None:
        step, sizes = self._normalized(u), [math.sqrt(w.numel()) for w in u.w.xs]
        r = self._rates(u, sizes)
        limit = Many(torch._foreach_div(step.norms().xs, [n * u["clip_threshold"] for n in sizes])).at_least_(1.0)
        step.mul_(r / limit)
        m = u.mix("moment1", u["beta1"], step) if u["beta1"] else step
        u.shrink(r)
        u.descend(m, 1.0)

    @staticmethod
    def _normalized(u: Update) -> Many:
        """Gradients over the root of their second moment, which is brought up to date."""
        squares = u.g * u.g
        if "square" in u.state:
            return _averaged(u, "square", squares).rsqrt().mul_(u.g)
        row = _averaged(u, "row", squares.map(lambda x: x.mean(-1)))
        column = _averaged(u, "column", squares.map(lambda x: x.mean(-2))).rsqrt()
        row = (row / row.map(lambda r: r.mean(-1, keepdim=True))).rsqrt()
        return (u.g * row.map(lambda r: r.unsqueeze(-1))).mul_(column.map(lambda c: c.unsqueeze(-2)))

    @staticmethod
    def _rates(u: Update, sizes: list[float]) -> Many:
        """r, a 0-d tensor for each weight."""
        rate = u.lr
        if u["relative_step"]:
            most, slow = 1e-6 * u.t if u["warmup_init"] else 1e-2, 1 / root(u.t)
            rate = slow.clamp(max=most) if isinstance(slow, Tensor) else min(slow, most)
        if not u["scale_parameter"]:
            return Many([w.new_ones(()) for w in u.w.xs]).times(rate)
        return Many(torch._foreach_div(u.w.norms().xs, sizes)).at_least_(u["eps"][1]).mul_(rate)


def _averaged(u: Update, slot: str, means: Many) -> Many:
    """The new average of squares; a skipped step computes it from zeros all the same: what follows stays finite."""
    mix: Number = u.t ** -u["decay_rate"]  # 1 - b2
    new = u.state[slot].times(1 - mix).add_(means.add_(u["eps"][0]).mul_(mix))
    u.put(u.state[slot], new)
    return new
