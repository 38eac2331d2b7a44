"""One loss scale per group of layers, applied inside the backward pass by markers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from mpkit.arguments import Real, check_count, check_kind, check_number, checked
from mpkit.policies import ScalePolicy
from mpkit.policies.rule import in_float32
from mpkit.scalers import LossScaleManager, Scale, all_finite, check_and_unscale_
from mpkit.scalers.tensor_scale import several_processes
from mpkit.step.distributed import agree_
from mpkit.step.phases import device_of
from mpkit.step.scaling import Scaling

SHRINK = 2.0**-0.5  # two overflows halve the scale
GROWTH = 2.0 ** (1 / 1000)  # a thousand clean steps double it


class _ScaleGradient(torch.autograd.Function):
    """Identity forwards; backwards the gradient times table[before] / table[after], read when it passes.

    `passed` (2, N + 2) bool notes whether finite gradients came into group `before` and left group `after`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, passed: Tensor, before: int, after: int) -> Tensor:
        ctx.table, ctx.passed, ctx.before, ctx.after = table, passed, before, after
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        finite = all_finite(grads)
        ctx.passed[0, ctx.before] &= finite
        ctx.passed[1, ctx.after] &= finite
        return grads[0] * (ctx.table[ctx.before] / ctx.table[ctx.after]), None, None, None, None


class GroupLossScaleManager(nn.Module, LossScaleManager):
    """A dynamic loss scale for each group of layers: S[1..N], with S[0] = S[N+1] = 1 outside.

    The author of a network places markers: `x = manager(x, i, j)` between the layers of group i and those of group j
    (0 before the first group, N + 1 after the last). A marker passes x on unchanged and multiplies the gradient that
    comes back by S[i] / S[j], so that the gradients of group i are S[i] times the true ones, whatever the others are.
    The loss itself is not scaled: `loss.backward()`.

    After the backward pass `unscale_and_update_()` tests each group, divides its gradients by the scale that was used,
    and moves the scales: times 2**-0.5 for a group that overflowed, times 2**(1/1000) for the others. The caller skips
    the whole update when any group overflowed.

    An overflow in a late group reaches all earlier ones through the chain rule. The markers see where it began: a
    group whose incoming gradient was not finite already is not to blame, and its scale stays.

    Args:
        init_loss_scale:   first scale of every group, or a list with one per group (dimensionless, > 0).
        loss_scale_groups: lists of parameters, one list per group; may be assigned later, when the network exists.
        shrink, growth:    factors of a step with and without overflow (0 < shrink < 1 <= growth).
        min_scale, max_scale: bounds of every scale; MindSpore has none (`0.0` and `inf` give that).
        blame:             "first" shrinks the scale only where an overflow began; "every" also those that it reached,
                           which keeps early groups from ever growing once a late one is at its limit.
        faithful:          False divides by the scale of this backward pass. True reproduces MindSpore, which divides by
                           the next one: every gradient is then too small by 2**(-1/1000).
    Units:   scales are float32, in the buffer `table` of N + 2 entries, on the device of the network.
    Edges:   a loss that is not finite itself is blamed on the last group.
    Raises:  TypeError for kinds, ValueError for ranges and for a parameter listed in two groups.
    Source:  MindSpore boost.GroupLossScaleManager. Departures: groups are matched by identity of the parameters, any
             optimizer works, scales have bounds, a group overflows when one of its gradients is not finite.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> manager = GroupLossScaleManager(8.0, [[weight]])
    >>> x = torch.tensor([3.0, 5.0])
    >>> manager(weight * manager(x, 0, 1), 1, 2).sum().backward()
    >>> weight.grad  # 8 times x
    tensor([24., 40.])
    """

    for_boost = True

    @checked
    def __init__(
        self,
        init_loss_scale: float | Sequence[float],
        loss_scale_groups: Sequence[Iterable[nn.Parameter]] = (),
        *,
        shrink: Real = SHRINK,
        growth: Real = GROWTH,
        min_scale: Real = 1.0,
        max_scale: Annotated[float, partial(check_number, closed_high=True)] = 2.0**24,
        blame: Literal["first", "every"] = "first",
        faithful: bool = False,
    ) -> None:
        super().__init__()
        if not (0 < shrink < 1 <= growth and min_scale <= max_scale):
            came = f"{shrink}, {growth}, {min_scale} and {max_scale}"
            raise ValueError(f"need 0 < shrink < 1 <= growth and min_scale <= max_scale, got {came}")
        self.shrink, self.growth = shrink, growth
        self.min_scale, self.max_scale = min_scale, max_scale
        self.blame, self.faithful = blame, faithful
        self._init = init_loss_scale
        self._groups: list[list[nn.Parameter]] = []
        self.table: Tensor = nn.Buffer(torch.ones(2, dtype=torch.float32))
        self.passed: Tensor = nn.Buffer(torch.ones(2, 2, dtype=torch.bool), persistent=False)
        if len(loss_scale_groups):
            self.loss_scale_groups = loss_scale_groups

    @property
    def loss_scale_groups(self) -> list[list[nn.Parameter]]:
        """The parameters of each group; assigning them starts every scale anew."""
        return self._groups

    @loss_scale_groups.setter
    def loss_scale_groups(self, groups: Sequence[Iterable[nn.Parameter]]) -> None:
        lists = [list(group) for group in groups]
        listed = [p for group in lists for p in group]
        for p in listed:
            check_kind("each of a group of loss_scale_groups", p, nn.Parameter, "an nn.Parameter")
        if len(set(map(id, listed))) < len(listed):
            raise ValueError("a parameter stands twice in the groups; list it once")
        self.set_loss_scale_status(len(lists), self._init)  # which may refuse them
        self._groups = lists
        self.to(device_of([*listed, self.table]))

    @property
    def scales(self) -> Tensor:
        """(N,) float32: the scale of each group now (a view of `table`)."""
        return self.table[1:-1]

    def set_loss_scale_status(self, loss_scale_number: int, init_loss_scale: float | Sequence[float]) -> None:
        """Make the table of `loss_scale_number` groups: a number starts all of them, a list one each."""
        low, high, init = self.min_scale, self.max_scale, init_loss_scale
        listed = list(init) if isinstance(init, Sequence) else [init] * check_count("groups", loss_scale_number, low=0)
        scales = [check_number("each of init_loss_scale", each, open_low=True) for each in listed]
        if len(scales) != loss_scale_number or not all(low <= scale <= high for scale in scales):
            raise ValueError(f"need a scale in {low}..{high} for each of {loss_scale_number} groups, got {scales}")
        device = device_of([*(p for group in self._groups for p in group), self.table])
        self.table = torch.tensor([1.0, *scales, 1.0], dtype=torch.float32, device=device)
        self.passed = torch.ones(2, len(self.table), dtype=torch.bool, device=device)

    def _live(self) -> Scale:
        """The scales at work, by the factors and bounds of now; they move the buffer."""
        policy = ScalePolicy(
            init_scale=torch.ones(len(self.scales), dtype=torch.float64, device=self.table.device),
            growth_factor=in_float32(self.growth),
            backoff_factor=in_float32(self.shrink),
            growth_interval=1,
            min_scale=self.min_scale,
            max_scale=self.max_scale,
            clamp_both_ways=True,
            hold_at_overflow=False,
        )
        return Scale(policy, value=self.scales)

    def update_loss_scale_status(self, layer: int, update_ratio: float) -> Tensor:
        """Multiply the scale of group `layer` (from 0) by `update_ratio`; -> () its new value, within the bounds."""
        if not 0 <= layer < len(self.scales):
            raise ValueError(f"layer must be in 0..{len(self.scales) - 1} (groups count from 0), got {layer}")
        ratio = check_number("update_ratio", update_ratio)
        return self.scales[layer].mul_(ratio).clamp_(self.min_scale, self.max_scale).clone()

    def get_loss_scale(self) -> Any:
        """The initial scale, as it was given."""
        return self._init

    def get_drop_overflow_update(self) -> bool:
        """True: a step in which a group overflows is skipped."""
        return True

    def update_loss_scale(self, overflow: bool) -> None:
        """Nothing: the scales have moved with the step itself."""

    def get_update_cell(self) -> GroupLossScaleManager:
        """This object: it keeps the scales and updates them."""
        return self

    def scaling(self, scale: Scale) -> GroupScaling:
        """The scaling of a train cell whose network holds this manager's markers; `scale` is 1, and stays."""
        return GroupScaling(self, scale)

    def forward(self, x: Tensor, layer1: int, layer2: int) -> Tensor:
        """The marker between group `layer1` (nearer the input) and group `layer2`; -> x, same values."""
        last = len(self.table) - 1
        if not (0 <= layer1 <= last and 0 <= layer2 <= last):
            raise ValueError(f"a marker names groups 0..{last} (the outer two are none), got {layer1} and {layer2}")
        return _ScaleGradient.apply(x, self.table, self.passed, layer1, layer2)

    @torch.no_grad()
    def unscale_and_update_(self) -> Tensor:
        """Test and unscale every `p.grad` in place, then move the scales; -> (N,) bool, where gradients are not finite.

        Nothing is read on the host. Gradients are multiplied by the float32 reciprocal of the scale.
        """
        if not self._groups:
            raise ValueError("there is no group to unscale: assign loss_scale_groups, a list of parameters per group")
        used = self.scales.clone()
        grads = [[p.grad for p in group if p.grad is not None] for group in self._groups]
        clean = torch.zeros((), dtype=torch.float32, device=used.device)  # what a group without gradients shows
        found = torch.stack([check_and_unscale_(g, s) if g else clean for g, s in zip(grads, used)]).bool()
        came, left = self.passed[:, 1:-1]
        found |= ~left
        came[-1] = True  # behind the last group there is only the loss
        guilty = found & came if self.blame == "first" else found
        self._live().advance_(guilty.float(), part=guilty | ~found)
        self.passed.fill_(True)
        if self.faithful:
            for group, ratio in zip(grads, used / self.scales):
                for grad in group:
                    grad.mul_(ratio)
        return found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GroupLossScaleManager:
        """Follow the network to another device, but stay float32 when it is cast."""
        table = self.table
        super()._apply(fn, recurse)
        self.table = table.to(self.table.device)
        return self


class GroupScaling(Scaling):
    """A scale for each group of a manager; the loss itself is seeded with 1, the markers apply the scales."""

    def __init__(self, manager: GroupLossScaleManager, scale: Scale) -> None:
        super().__init__(scale)
        self.groups = manager

    def unscale_(self, gradients: Sequence[Tensor]) -> Tensor:
        """Divide each group's gradients by its scale and move the scales of all.

        Raises:  ValueError if one of `gradients` belongs to no group, such as that of a parameter added later.
        """
        manager = self.groups
        known = {id(p.grad) for group in manager.loss_scale_groups for p in group}
        if missing := [tuple(g.shape) for g in gradients if id(g) not in known]:  # their scale would be unknown
            raise ValueError(f"{len(missing)} trained parameters stand in no loss scale group: {missing[:3]}; add them")
        if several_processes():  # an overflow that one process sees moves the scales of all alike
            manager.passed.copy_(agree_((~manager.passed).float()) == 0)
        self.group_overflow = found = manager.unscale_and_update_()
        return found.any().float()

    def advance_(self, found_inf: Tensor | None) -> None:
        """Nothing: the scales have moved when the gradients were divided by them."""

    def shown(self) -> Tensor:
        """The scale of the first group."""
        return self.groups.scales[0].clone()
