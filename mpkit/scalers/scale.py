"""A policy at work: its scale and its counters as tensors of one device, moved in place, with no host read in a step.

Whatever holds a loss scale on a device holds a `Scale`: scalers, managers and update cells are faces of one, a scale
for each group of layers is a vector of them, and a training step sees nothing else.

A `Scale` moves by `policies.advance`, which costs twenty small launches on tensors, or by torch's fused kernel, two
launches, where that does the same. The kernel knows one scale in float32 and one counter; it computes `scale * factor`
in double precision and rounds once, as `advance` does, and it refuses a growth that is not finite. Everything else that
a policy may ask for has to be absent, or follow from that: `fused_rule` knows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from mpkit.arguments import check_alike, check_count, check_kind
from mpkit.policies import STOPS, ScalePolicy, ScaleState, Stop, advance, initial
from mpkit.policies.rule import FLOAT32_MAX, SMALLEST_NORMAL, counters

_ROOM = 64  # powers of two by which a scale is moved down where growth past the largest float32 must give inf
# 0-d CPU tensors are arguments of a kernel on any device, and cheaper than Python numbers, which torch wraps each time
_DOWN, _UP = (torch.tensor(factor, dtype=torch.float32) for factor in (2.0**-_ROOM, 2.0**_ROOM))


class Scale:
    """The scale of a policy, what it counts, and, where asked for, what it did in its last steps.

    policy:   one policy, or a vector of n.
    value:    () or (n,), the scale in the policy's own format: float32, or float64 for 64 bits. Changed in place only.
    seed:     the same in float32, what a backward pass starts from; it is `value` itself unless that is float64.
    counts:   the counters that the policy uses, by their names in `ScaleState`; none if it never moves.
    stopped:  () float32, the code of `Stop` of the first error since `check()`, 0 for none.
    ring:     `scales` and `found`, (remember + 1, *shape): scales after the last steps and their flags, NaN where none
              was yet; `row`, (1,) int64: the row written last. Empty without `remember`.

    Args:    value: a tensor to move in place of an own one, of any start: the policy's first scale is not looked at;
             remember: steps kept in `ring`.
    Raises:  TypeError for anything but a ScalePolicy.

    >>> scale = Scale(ScalePolicy(init_scale=8.0, growth_interval=2))
    >>> for overflow in (0.0, 0.0, 1.0, 0.0):
    ...     scale.advance_(torch.tensor(overflow))
    >>> scale.value, int(scale.counts["good"])
    (tensor(8.), 1)
    """

    def __init__(self, policy: ScalePolicy, value: Tensor | None = None, *, remember: int | None = None) -> None:
        check_kind("policy", policy, ScalePolicy, "a ScalePolicy; make one with preset(...)")
        check_kind("value", value, Tensor, "a tensor to move", optional=True)
        if value is None:
            narrow = not isinstance(policy.scale_bits, Tensor) and policy.scale_bits < 64
            value = initial(policy, "cpu").scale.to(torch.float32 if narrow else torch.float64)
        self.value = value
        self.stopped = torch.zeros((), dtype=torch.float32, device=value.device)
        self._show()
        self.follow(policy)
        self.ring: dict[str, Tensor] = {}
        if remember is not None:
            rows = check_count("remember", remember, low=0) + 1, *self.shape
            self.ring = {"row": torch.zeros(1, dtype=torch.int64), "found": torch.zeros(rows, dtype=torch.float32)}
            self.ring["scales"] = torch.full(rows, math.nan, dtype=value.dtype)
            self.ring["scales"][0] = value

    def follow(self, policy: ScalePolicy) -> None:
        """Go on from the scale of now by another policy of the same shape, its counters at their start."""
        self.policy, self.shape = policy, policy.shape
        self.fused = fused_rule(policy)
        start = initial(policy, self.value.device)._asdict()
        self.counts = {name: start[name] for name in counters(policy)}
        if self.counts and not self.shape and policy.growth_interval < 2**31:
            self.counts["good"] = self.counts["good"].int()  # as the kernel counts

    def advance_(self, found_inf: Tensor, part: Tensor | None = None) -> None:
        """One step from the () float32 flag of `check_and_unscale_`, or from one for each policy, unchecked.

        Args:    part: (n,) bool, which policies of a vector take part; the others stay as they are.
        """
        if (self.counts or self.ring) and found_inf.device != self.value.device:
            self.to_(found_inf.device)
        if self.counts:
            if self.fused and part is None:
                self._advance_by_kernel(self.fused, found_inf)
            else:
                self._advance_by_rule(found_inf == 0, part)
            self._show()
        if self.ring and len(self.ring["found"]) > 1:
            row = self.ring["row"].add_(1).remainder_(len(self.ring["found"]))
            self.ring["scales"].index_copy_(0, row, self.value[None])
            self.ring["found"].index_copy_(0, row, found_inf.expand(self.shape)[None])

    def check(self) -> None:
        """Raise RuntimeError if the policy met one of its errors since the last call (one host read)."""
        code = int(self.stopped)
        self.stopped.zero_()
        if code:
            raise RuntimeError(f"{self.policy.name or 'the policy'} stops here: {STOPS[Stop(code)]}")

    def to_(self, device: torch.device | str) -> Self:
        """Move to a device; the only call after which `value` and `seed` are other tensors."""
        self.value, self.stopped = self.value.to(device), self.stopped.to(device)
        self.counts, self.ring = ({k: x.to(device) for k, x in held.items()} for held in (self.counts, self.ring))
        self.policy = self.policy.to(device) if self.shape else self.policy
        self._show()
        return self

    def state(self) -> ScaleState:
        """Where the policy stands, in Python numbers (CPU tensors for a vector); reads the device."""
        known = {"scale": self.value, "decided": self.value, **self.counts}
        start = initial(self.policy, "cpu" if self.shape else None)
        return start._replace(**{name: _number(tensor.reshape(self.shape)) for name, tensor in known.items()})

    def _parts(self) -> dict[str, Tensor]:
        return {"scale": self.value, **self.counts, "stopped": self.stopped, **self.ring}

    def state_dict(self) -> dict[str, Any]:
        """Policy, scale, every counter, the error that nobody has asked for yet, and the remembered steps."""
        policy = {**vars(self.policy), "layers": [*self.policy.layers]}  # a list, as a JSON file has it
        return {"policy": policy, **{name: _number(tensor) for name, tensor in self._parts().items()}}

    def load_state_dict(self, state: dict[str, Any], *, adopt: bool = False) -> None:
        """Take over what `state_dict` gave, in place, with `adopt` another policy of the same preset too.

        Raises:  TypeError or ValueError before anything is changed.
        """
        check_alike("the state of a scale", state, {"policy": None})
        saved, own = ScalePolicy(**state["policy"]), self.policy
        if (saved.name, counters(saved)) != (own.name, counters(own)) if adopt else saved != own:
            raise ValueError(f"this state belongs to another policy; build the scaler with {saved}")
        check_alike("the state of a scale", state, {**self.state_dict(), "policy": None})
        if adopt and not state["scale"] >= saved.min_scale:
            raise ValueError(f"this state is damaged: a scale of {state['scale']} is below its floor {saved.min_scale}")
        taken = {name: torch.as_tensor(state[name], dtype=own.dtype) for name, own in self._parts().items()}
        if adopt:
            self.follow(saved)
        for name, tensor in self._parts().items():
            tensor.copy_(taken[name])
        self._show()

    def _advance_by_kernel(self, rule: tuple[Any, ...], found_inf: Tensor) -> None:
        value, good, (growth, backoff, interval, floor, cap, room) = self.value, self.counts["good"], rule
        if self.policy.raise_at_min:
            at_floor = found_inf * (value == self.policy.min_scale)
            torch.maximum(self.stopped, at_floor, out=self.stopped)  # the lowest code, 1: an earlier one stays
        if room:
            value.mul_(_DOWN)
        # torch has no public name for the kernel of its GradScaler
        torch._amp_update_scale_(value, good, found_inf, growth, backoff, interval)
        if room:
            value.mul_(_UP)
        if floor == 1.0 and cap == math.inf:
            torch.maximum(value, found_inf, out=value)  # the flag is the floor, and only where the scale was lowered
        elif floor or cap < math.inf:
            value.clamp_(floor, cap)

    def _advance_by_rule(self, finite: Tensor, part: Tensor | None) -> None:
        wide = self.value.double().reshape(self.shape)
        before = ScaleState(wide, wide, *(0,) * 5)._replace(**self.counts)  # what is not used is not looked at
        before = before._replace(good=before.good.long())  # an interval may need it
        after, raised = advance(self.policy, before, finite if self.shape else finite.reshape(()))
        for name in ("scale", *self.counts):  # `scale` first: in a delayed policy it is the old `decided`
            old, new = getattr(before, name), getattr(after, name)
            if new is not old:
                target = self.value if name == "scale" else self.counts[name]
                new = new if part is None else torch.where(part, new, old)
                target.copy_(new.reshape(target.shape))
        if isinstance(raised, Tensor):
            self.stopped.copy_(torch.where(self.stopped == 0, raised.amax(), self.stopped))

    def _show(self) -> None:
        if self.value.dtype == torch.float32:
            self.seed = self.value
        elif hasattr(self, "seed") and self.seed.device == self.value.device:
            self.seed.copy_(self.value)
        else:
            self.seed = self.value.float()


class Face:
    """What shows a `Scale`, `live`, under other names: its policy from where the scale stands now, and its state."""

    live: Scale

    @property
    def policy(self) -> ScalePolicy:
        """The rule, from where the scale stands now."""
        return replace(self.live.policy, init_scale=self.live.value.item())

    @property
    def scale_factor(self) -> float:
        """The factor by which the scale grows."""
        return self.live.policy.growth_factor

    @property
    def scale_window(self) -> int:
        """Finite steps before growth."""
        return self.live.policy.growth_interval

    def check(self) -> None:
        """Raise RuntimeError if the policy met one of its errors since the last call (one host read)."""
        self.live.check()

    def state_dict(self) -> dict[str, Any]:
        """Policy, scale and every counter."""
        return self.live.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, with the settings of the same preset. Raises ValueError for another one."""
        self.live.load_state_dict(state, adopt=True)


def _number(tensor: Tensor) -> float | Tensor:
    return tensor.item() if tensor.numel() == 1 else tensor.cpu().clone()


def fused_rule(p: ScalePolicy) -> tuple[float, float, int, float, float, bool] | None:
    """`p` in the numbers of the kernel, or None where the kernel does not do all that the policy asks for.

    Returns: growth, backoff and interval for the kernel; floor and cap afterwards, 0 and inf for none; and whether
             growth past the largest float32 gives inf, for which the kernel needs room.
    """
    # a division by a power of two rounds nothing; the counter of the kernel has 32 bits
    if p.shape or not p.growth_interval < 2**31 or math.frexp(p.backoff_divisor)[0] != 0.5:
        return None
    backoff, room = p.backoff_factor / p.backoff_divisor, not p.hold_at_overflow
    # a clamp acts after every step, the policy's bounds after a change of their own direction: the same inside them
    inside = backoff <= 1 <= p.growth_factor and p.min_scale <= p.init_scale <= p.max_scale
    # growth out of range: refused by the kernel, or cut to a cap that it can reach, or inf in the room below
    free = p.max_scale == math.inf
    roomy = free and p.growth_factor <= 2.0**_ROOM and p.min_scale >= 2.0 ** (_ROOM - 126)
    reached = free or p.max_scale * p.growth_factor <= FLOAT32_MAX
    # the other fields have to be those of a policy that asks for nothing more
    numbers = ("init_scale", "growth_factor", "backoff_factor", "backoff_divisor", "growth_interval", "min_scale")
    # growth_ge: counted up from 0 the interval is met and never passed, and one below 1 is met at once
    switches = ("max_scale", "name", "hold_at_overflow", "growth_ge", "raise_at_min")
    plain = ScalePolicy(
        **{key: getattr(p, key) for key in (*numbers, *switches)},
        flush_subnormal=p.flush_subnormal and p.min_scale >= SMALLEST_NORMAL,  # nothing is left to flush
    )
    if p != plain or not (inside and reached and (roomy or not room)):
        return None
    return p.growth_factor, backoff, max(p.growth_interval, 1 if p.growth_ge else 0), p.min_scale, p.max_scale, room
