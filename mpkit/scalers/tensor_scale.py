"""The scale of one tensor, live: its state on the device, agreed on by all processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from mpkit.arguments import check_alike, check_kind
from mpkit.policies import TensorScalePolicy, TensorScaleState, advance_tensor_scale, initial_tensor_scale


class TensorScaler:
    """Follows a `TensorScalePolicy` step by step, without a host read.

    In a step `observe_` is told the amax of every tensor that was cast (accumulated micro-batches: the largest counts);
    between steps `update_` renews the scale. Several scalers of one step are updated together by `update_all_`.

    Args:    policy: one delayed policy (a current one has no state: use `advance` on the amax itself).
    Raises:  TypeError for anything but one TensorScalePolicy; ValueError if it is not delayed.

    >>> from mpkit.policies import tensor_scale_preset
    >>> scaler = TensorScaler(tensor_scale_preset("te_delayed", amax_history_len=4))
    >>> scaler.observe_(torch.tensor(3.5)); scaler.update_(); float(scaler.scale)
    128.0
    """

    def __init__(self, policy: TensorScalePolicy) -> None:
        check_kind("policy", policy, TensorScalePolicy, "a TensorScalePolicy; tensor_scale_preset(...) makes one")
        if policy.shape or not policy.delayed:
            raise ValueError(f"a TensorScaler follows one delayed policy, others have no state; got {policy!r:.80}")
        self.policy = policy
        self.state: TensorScaleState = initial_tensor_scale(policy, "cpu")
        self.amax = torch.zeros((), dtype=torch.float32, device="cpu")
        self.pending = False  # whether an amax waits for `update_`

    @property
    def scale(self) -> Tensor:
        """What the next cast multiplies by, () float32."""
        return self.state.scale

    def observe_(self, amax: Tensor) -> None:
        """Take in the largest magnitude of one tensor, one float number; NaN stays visible to the policy."""
        check_kind("amax", amax, Tensor, "a tensor of one number, such as x.abs().amax()")
        self.follow_(amax.device)
        self.amax = torch.maximum(self.amax, amax.detach().float().reshape(()))
        self.pending = True

    def update_(self) -> None:
        """End the step: the scale for the next one, from the amax seen here and in every other process."""
        update_all_([self])

    def follow_(self, device: torch.device) -> None:
        """Move the state to where the tensors are; one that stands on the meta device has no values and begins anew."""
        if self.amax.device == device:
            return
        if self.amax.is_meta:
            self.state, self.pending = initial_tensor_scale(self.policy, device), False
            self.amax = torch.zeros((), dtype=torch.float32, device=device)
        else:
            self.amax = self.amax.to(device)
            self.state = TensorScaleState(*(part.to(device) for part in self.state))

    def state_dict(self) -> dict[str, Any]:
        """Policy, scale, history, and the amax of a step that is not over."""
        parts = {"scale": self.state.scale, "history": self.state.history, "amax": self.amax}
        return {"policy": dict(vars(self.policy)), "pending": self.pending, **{k: x.clone() for k, x in parts.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError if it belongs to another policy."""
        check_alike("the state of a scaler", state, {"policy": None})
        if (saved := TensorScalePolicy(**state["policy"])) != self.policy:
            raise ValueError(f"this state belongs to another policy; build the scaler with {saved}")
        check_alike("the state of a scaler", state, {**self.state_dict(), "policy": None})
        scale, history, self.amax = (state[k].to(self.amax.device, copy=True) for k in ("scale", "history", "amax"))
        self.state, self.pending = TensorScaleState(scale, history), state["pending"]


def update_all_(scalers: Sequence[TensorScaler]) -> None:
    """`update_` of several scalers with one message between processes: one tensor has one scale on all of them.

    All processes give as many scalers, in one order. One with which no process has observed anything since its last
    update stays as it is.
    """
    check_kind("scalers", scalers, (list, tuple), "a list of TensorScaler objects")
    several = several_processes()
    if waiting := [scaler for scaler in scalers if several or scaler.pending]:
        found = torch.stack([_pattern(scaler).to(waiting[0].amax.device) for scaler in waiting])
        if several:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        for scaler, pattern in zip(waiting, found.unbind()):
            _end(scaler, pattern.to(scaler.amax.device))


def several_processes() -> bool:
    """Whether there are other processes, which must send what this one waits for."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


_NOTHING = -1  # below the pattern of every magnitude


def _pattern(scaler: TensorScaler) -> Tensor:
    """The bits of the amax, () int32, ordered as magnitudes are: NaN is above all; a maximum of floats may lose it."""
    if not scaler.pending:
        return torch.full_like(scaler.amax, _NOTHING, dtype=torch.int32)
    return scaler.amax.view(torch.int32) & 0x7FFFFFFF


def _end(scaler: TensorScaler, pattern: Tensor) -> None:
    """One step of one scaler, from the pattern of the largest amax of all processes."""
    after = advance_tensor_scale(scaler.policy, scaler.state, pattern.clamp(min=0).view(torch.float32))
    unseen = pattern == _NOTHING  # only the device knows whether any process has seen something
    scaler.state = TensorScaleState(*(torch.where(unseen, old, new) for old, new in zip(scaler.state, after)))
    scaler.amax = torch.zeros_like(scaler.amax)
    scaler.pending = False
