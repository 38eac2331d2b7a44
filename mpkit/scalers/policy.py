"""Any policy as a loss scaler: the state lives on the device, and what it decided can be read afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpkit.arguments import check_count
from mpkit.policies import STOPS, ScaleHistory, ScalePolicy, ScaleState, Stop, advance, initial

from .kernel import fused_rule
from .scaler import LossScaler, found_inf_of, need_flag, need_keys


class PolicyLossScaler(LossScaler):
    """A loss scaler that follows any `ScalePolicy`, without a host read in a step.

    Usable where a `LossScaler` is (`scale`, `unscale`, `adjust`), and where an update cell is:
    `scaler(loss_scale, overflow) -> overflow` writes the next scale into the caller's tensor.

    An error of the policy (overflow at the floor, say) cannot stop a device by itself: it is noted, and `check()`
    raises it when asked. `history()` tells what was decided in the last `remember` steps, and why.

    A vector of n policies, such as a layer-wise preset, has n scales: `adjust` takes (n,) flags, `scale` and `unscale`
    a tuple or list with one entry per policy (a tensor or a container of them). Whether the step of all is skipped
    is for the loop to decide: `flags.all()`.

    A policy that `kernel.fused_rule` covers costs two small launches in a step, any other about twenty.

    Args:    policy: one policy or a vector of them; remember: steps kept for `history` (0: none).
    Raises:  TypeError for anything but a ScalePolicy and an int; ValueError for a negative number of steps.

    >>> scaler = PolicyLossScaler(ScalePolicy(growth_interval=2))
    >>> _ = [scaler.adjust(torch.tensor(finite)) for finite in (True, True, False)]
    >>> scaler.history().reasons.tolist()
    ['held', 'grew', 'backed off']
    """

    def __init__(self, policy: ScalePolicy, remember: int = 1000) -> None:
        if not isinstance(policy, ScalePolicy):
            raise TypeError(f"policy must be a ScalePolicy, got {type(policy).__name__}; make one with preset(...)")
        self._policy = policy
        self.remember = remember = check_count("remember", remember, low=0)
        self._fused = fused_rule(policy)
        self._shape, self._count = policy.shape, policy.shape.numel()  # asked in every step, and not free
        wide = torch.float64 if policy.scale_bits == 64 else torch.float32
        self.scale_value = torch.as_tensor(initial(policy).scale, dtype=wide).clone()
        if self._fused:
            self._counter = torch.zeros((), dtype=torch.int32)
        else:
            self._state = initial(policy, "cpu")
        self.stopped = torch.zeros(
            (), dtype=torch.float32
        )  # the code of `STOPS`, in the dtype of the flag that it is computed from
        # a ring of the last steps; NaN where none was yet. The entries at `_index`, one per scale, are the newest
        self._index = torch.arange(self._count)
        self._scales = torch.full((remember + 1, *self._shape), math.nan, dtype=self.scale_value.dtype)
        self._scales[0] = self.scale_value
        self._found = torch.zeros(remember + 1, *self._shape, dtype=torch.float32)

    @property
    def policy(self) -> ScalePolicy:
        """The policy given, with its first scale."""
        return self._policy

    def get_loss_scale(self) -> Any:
        """The policy's first scale, as update cells answer (a list of a vector); the live one is `scale_value`."""
        first = initial(self.policy).scale
        return first.tolist() if isinstance(first, Tensor) else first

    def adjust(self, grads_finite: Tensor) -> bool:
        """One step of the policy; `grads_finite` is a bool tensor of one element, or one per policy. Returns True."""
        need_flag("grads_finite", grads_finite)
        if grads_finite.numel() != self._count:
            came = tuple(grads_finite.shape)
            raise ValueError(f"grads_finite must hold one flag per scale, {self._count}, got shape {came}")
        PolicyLossScaler.advance_(self, found_inf_of(grads_finite.reshape(self._shape)))
        return True

    def advance_(self, found_inf: Tensor) -> None:
        """`adjust` for the float32 flag of `check_and_unscale_` (or one per policy), unchecked."""
        self._follow(found_inf.device)
        if self._fused:
            if self._policy.raise_at_min:
                at_floor = found_inf * (self.scale_value == self._policy.min_scale)
                torch.maximum(self.stopped, at_floor, out=self.stopped)  # the lowest code, 1: an earlier one stays
            self._fused.advance_(self.scale_value, self._counter, found_inf)
        else:
            self._advance_by_rule(found_inf == 0)
        if self.remember:
            self._index.add_(self._count).remainder_((self.remember + 1) * self._count)
            self._scales.put_(self._index, self.scale_value)
            self._found.put_(self._index, found_inf)

    def __call__(self, loss_scale: Tensor, overflow: Tensor) -> Tensor:
        """The update-cell form: adjust, write the next scale into `loss_scale`, return `overflow`."""
        need_flag("overflow", overflow)
        self.adjust(overflow.logical_not())
        loss_scale.copy_(self.scale_value)
        return overflow

    def check(self) -> None:
        """Raise RuntimeError if the policy met one of its errors since the last call (one host read)."""
        code = int(self.stopped)
        self.stopped.zero_()
        if code:
            raise RuntimeError(f"{self.policy.name or 'the policy'} stops here: {STOPS[Stop(code)]}")

    def history(self) -> ScaleHistory:
        """What was decided in the last `remember` steps, oldest first (reads the device)."""
        turn = -1 - self._newest()
        scales = self._scales.cpu().roll(turn, 0).double().numpy()
        known = ~np.isnan(scales.reshape(len(scales), -1)).any(1)
        finite, scales = self._found.cpu().roll(turn, 0).numpy()[known][1:] == 0, scales[known]
        skipped = ~finite.all(1) if self.policy.layers else ~finite
        return ScaleHistory(self.policy, finite, scales[1:], skipped, None, "", self._numbers(), scales[0][()])

    def state_dict(self) -> dict[str, Any]:
        """Policy, every counter and the remembered steps."""
        return {
            "policy": {field.name: getattr(self.policy, field.name) for field in fields(self.policy)},
            "state": self._numbers()._asdict(),
            "stopped": int(self.stopped),
            "index": self._newest(),
            "scales": self._scales.cpu().clone(),
            "finite": self._found.cpu() == 0,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError if it belongs to another policy."""
        need_keys(state, {"policy": None, "scales": None})
        if (saved := ScalePolicy(**state["policy"])) != self.policy:
            raise ValueError(f"this state belongs to another policy; build the scaler with {saved}")
        if len(state["scales"]) != self.remember + 1:
            raise ValueError(f"this state remembers {len(state['scales']) - 1} steps, this scaler {self.remember}")
        need_keys(state, self.state_dict())
        if state["stopped"] not in tuple(Stop) or not 0 <= state["index"] <= self.remember:
            raise ValueError(f"this state is damaged: stopped is {state['stopped']}, index {state['index']}")
        self._load(ScaleState(**{key: state["state"][key] for key in ScaleState._fields}))
        self.stopped.fill_(state["stopped"])
        self._index.add_((state["index"] - self._newest()) * self._count)
        self._scales.copy_(state["scales"])
        self._found.copy_(state["finite"].logical_not())

    def _advance_by_rule(self, finite: Tensor) -> None:
        after, raised = advance(self.policy, self._state, finite)
        for old, new in zip(self._state, after):  # `scale` first: in a delayed policy its new value is old `decided`
            if new is not old:
                old.copy_(new)
        self.scale_value.copy_(self._state.scale)
        if isinstance(raised, Tensor):
            self.stopped.copy_(torch.where(self.stopped == 0, raised.amax() if self._shape else raised, self.stopped))

    def _load(self, numbers: ScaleState) -> None:
        """Take over a state of Python numbers, in place: a train cell looks at these very tensors."""
        own = [self.scale_value, self._counter] if self._fused else [self.scale_value, *self._state]
        new = [numbers.scale, numbers.good] if self._fused else [numbers.scale, *numbers]
        try:  # all of them before the first is changed
            values = [torch.as_tensor(value, dtype=tensor.dtype) for tensor, value in zip(own, new, strict=True)]
        except (OverflowError, RuntimeError, ValueError) as error:
            raise ValueError(f"this state is damaged: {numbers} does not fit its counters ({error})") from None
        for tensor, value in zip(own, values):
            tensor.copy_(value)

    def _newest(self) -> int:
        """The row of the ring that was written last."""
        return int(self._index[0]) // self._count

    def _numbers(self) -> ScaleState:
        if not self._fused:
            return ScaleState(*(value.cpu().clone() if value.dim() else value.item() for value in self._state))
        scale = float(self.scale_value)
        return initial(self.policy)._replace(scale=scale, decided=scale, good=int(self._counter))

    def _map(self, function: Callable[[Tensor, Tensor], Tensor], inputs: object, layer: int | None = None) -> Any:
        if layer is not None or not self._shape:
            return super()._map(function, inputs, layer)
        if not isinstance(inputs, tuple | list) or len(inputs) != self._count:
            came = f"{len(inputs)} entries" if isinstance(inputs, tuple | list) else type(inputs).__name__
            raise ValueError(f"{self._count} scales need a tuple or list with one entry for each, got {came}")
        return type(inputs)(super(PolicyLossScaler, self)._map(function, x, i) for i, x in enumerate(inputs))

    def _tensors(self) -> list[str]:
        return ["scale_value", "stopped", "_index", "_scales", "_found", *(["_counter"] if self._fused else [])]

    def _follow(self, device: torch.device) -> None:
        if self.scale_value.device != device:
            super()._follow(device)
            self._policy = self._policy.to(device)
            if not self._fused:
                self._state = ScaleState(*(value.to(device) for value in self._state))
