"""A policy at work: its scale and its counters as tensors of one device, moved in place, with no host read in a step.

Whatever holds a loss scale on a device holds a `Scale`: scalers and update cells are faces of one, a scale for each
group of layers is a vector of them, and a training step sees nothing else.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Self

import torch
from torch import Tensor

from mpkit.arguments import check_alike, check_kind
from mpkit.policies import STOPS, ScalePolicy, ScaleState, Stop, advance, initial
from mpkit.policies.rule import counters

from .kernel import fused_rule


class Scale:
    """The scale of a policy, and what it counts.

    A policy that `kernel.fused_rule` covers costs two small launches in a step, any other about twenty, one that never
    moves none.

    policy:   one policy, or a vector of n.
    value:    () or (n,), the scale in the policy's own format: float32, or float64 for 64 bits. Changed in place only.
    seed:     the same in float32, what a backward pass starts from; it is `value` itself unless that is float64.
    counts:   the counters that the policy uses, by their names in `ScaleState`; none if it never moves.
    stopped:  () float32, the code of `Stop` of the first error since `check()`, 0 for none.

    Args:    value: a tensor to move in place of an own one, of any start: the policy's first scale is not looked at.
    Raises:  TypeError for anything but a ScalePolicy.

    >>> scale = Scale(ScalePolicy(init_scale=8.0, growth_interval=2))
    >>> for overflow in (0.0, 0.0, 1.0, 0.0):
    ...     scale.advance_(torch.tensor(overflow))
    >>> scale.value, int(scale.counts["good"])
    (tensor(8.), 1)
    """

    def __init__(self, policy: ScalePolicy, value: Tensor | None = None) -> None:
        check_kind("policy", policy, ScalePolicy, "a ScalePolicy; make one with preset(...)")
        check_kind("value", value, Tensor, "a tensor to move", optional=True)
        if value is None:
            narrow = not isinstance(policy.scale_bits, Tensor) and policy.scale_bits < 64
            value = initial(policy, "cpu").scale.to(torch.float32 if narrow else torch.float64)
        self.value = value
        self.stopped = torch.zeros((), dtype=torch.float32, device=value.device)
        self._show()
        self.follow(policy)

    def follow(self, policy: ScalePolicy) -> None:
        """Go on from the scale of now by another policy of the same shape, its counters at their start."""
        self.policy, self.shape = policy, policy.shape
        self.fused = fused_rule(policy)
        start = initial(policy, self.value.device)._asdict()
        self.counts = {name: start[name] for name in counters(policy)}
        if self.fused and self.counts:
            self.counts["good"] = self.counts["good"].int()  # as the kernel counts

    def advance_(self, found_inf: Tensor, part: Tensor | None = None) -> None:
        """One step from the () float32 flag of `check_and_unscale_`, or from one for each policy, unchecked.

        Args:    part: (n,) bool, which policies of a vector take part; the others stay as they are.
        """
        if not self.counts:
            return
        if found_inf.device != self.value.device:
            self.to_(found_inf.device)
        if self.fused and part is None:
            if self.policy.raise_at_min:
                at_floor = found_inf * (self.value == self.policy.min_scale)
                torch.maximum(self.stopped, at_floor, out=self.stopped)  # the lowest code, 1: an earlier one stays
            self.fused.advance_(self.value, self.counts["good"], found_inf)
        else:
            self._advance_by_rule(found_inf == 0, part)
        self._show()

    def check(self) -> None:
        """Raise RuntimeError if the policy met one of its errors since the last call (one host read)."""
        code = int(self.stopped)
        self.stopped.zero_()
        if code:
            raise RuntimeError(f"{self.policy.name or 'the policy'} stops here: {STOPS[Stop(code)]}")

    def to_(self, device: torch.device | str) -> Self:
        """Move to a device; the only call after which `value` and `seed` are other tensors."""
        self.value, self.stopped = self.value.to(device), self.stopped.to(device)
        self.counts = {name: count.to(device) for name, count in self.counts.items()}
        self.policy = self.policy.to(device) if self.shape else self.policy
        self._show()
        return self

    def state(self) -> ScaleState:
        """Where the policy stands, in Python numbers (CPU tensors for a vector); reads the device."""
        known = {"scale": self.value, "decided": self.value, **self.counts}
        start = initial(self.policy, "cpu" if self.shape else None)
        return start._replace(**{name: _number(tensor.reshape(self.shape)) for name, tensor in known.items()})

    def state_dict(self) -> dict[str, Any]:
        """Policy, scale, every counter and the error that nobody has asked for yet."""
        return {
            "policy": {field.name: getattr(self.policy, field.name) for field in fields(self.policy)},
            "scale": _number(self.value),
            **{name: _number(count) for name, count in self.counts.items()},
            "stopped": int(self.stopped),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, in place. Raises TypeError or ValueError before anything is changed."""
        self.check_state(state)
        for name, tensor in {"scale": self.value, **self.counts, "stopped": self.stopped}.items():
            tensor.copy_(torch.as_tensor(state[name], dtype=tensor.dtype))
        self._show()

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise TypeError or ValueError unless `load_state_dict` can take this over."""
        check_alike("the state of a scale", state, {"policy": None})
        if (saved := ScalePolicy(**state["policy"])) != self.policy:
            raise ValueError(f"this state belongs to another policy; build the scaler with {saved}")
        check_alike("the state of a scale", state, {**self.state_dict(), "policy": None})
        if state["stopped"] not in tuple(Stop):
            raise ValueError(f"this state is damaged: stopped is {state['stopped']}, which is no error of a policy")
        for name, tensor in {"scale": self.value, **self.counts}.items():
            try:
                torch.as_tensor(state[name], dtype=tensor.dtype)
            except (OverflowError, RuntimeError, ValueError) as error:
                raise ValueError(f"this state is damaged: {name} is {state[name]!r:.60} ({error})") from None

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


def _number(tensor: Tensor) -> float | Tensor:
    return tensor.item() if tensor.numel() == 1 else tensor.cpu().clone()
