"""Any policy as a loss scaler, and what it decided in the last steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpkit.arguments import check_count
from mpkit.policies import ScaleHistory, ScalePolicy, initial

from .scale import Scale
from .scaler import LiveScaler, need_flag


class RememberedScale(Scale):
    """A `Scale` that keeps its last steps in a ring on the device.

    scales, found:  (remember + 1, *shape), scales after the steps and their flags; NaN where none was yet.
    index:          the entries written last, one per scale.
    """

    def __init__(self, policy: ScalePolicy, remember: int) -> None:
        self.remember = check_count("remember", remember, low=0)
        super().__init__(policy)
        self.count = self.value.numel()
        self.index = torch.arange(self.count)
        self.scales = torch.full((remember + 1, *self.shape), math.nan, dtype=self.value.dtype)
        self.scales[0] = self.value
        self.found = torch.zeros(remember + 1, *self.shape, dtype=torch.float32)

    def advance_(self, found_inf: Tensor, part: Tensor | None = None) -> None:
        """As of any `Scale`; the step is remembered."""
        super().advance_(found_inf, part)
        if self.remember:
            self.index.add_(self.count).remainder_((self.remember + 1) * self.count)
            self.scales.put_(self.index, self.value)
            self.found.put_(self.index, found_inf)

    def to_(self, device: torch.device | str) -> RememberedScale:
        """As of any `Scale`, with the ring."""
        super().to_(device)
        self.index, self.scales, self.found = (x.to(device) for x in (self.index, self.scales, self.found))
        return self

    def newest(self) -> int:
        """The row of the ring that was written last."""
        return int(self.index[0]) // self.count

    def state_dict(self) -> dict[str, Any]:
        """As of any `Scale`, with the remembered steps."""
        ring = {"index": self.newest(), "scales": self.scales.cpu().clone(), "finite": self.found.cpu() == 0}
        return {**super().state_dict(), **ring}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As of any `Scale`. Raises ValueError if it remembers another number of steps."""
        super().load_state_dict(state)
        self.index.add_((state["index"] - self.newest()) * self.count)
        self.scales.copy_(state["scales"])
        self.found.copy_(state["finite"].logical_not())

    def check_state(self, state: dict[str, Any]) -> None:
        """As of any `Scale`."""
        saved = state["scales"] if isinstance(state, dict) and isinstance(state.get("scales"), Tensor) else self.scales
        if saved.dim() and len(saved) != self.remember + 1:
            raise ValueError(f"this state remembers {len(saved) - 1} steps, this scaler {self.remember}")
        super().check_state(state)
        if not 0 <= state["index"] <= self.remember:
            raise ValueError(f"this state is damaged: index {state['index']} is not in 0..{self.remember}")


class PolicyLossScaler(LiveScaler):
    """A loss scaler that follows any `ScalePolicy`, without a host read in a step.

    Usable where a `LossScaler` is (`scale`, `unscale`, `adjust`), and where an update cell is:
    `scaler(loss_scale, overflow) -> overflow` writes the next scale into the caller's tensor.

    An error of the policy (overflow at the floor, say) cannot stop a device by itself: it is noted, and `check()`
    raises it when asked. `history()` tells what was decided in the last `remember` steps, and why.

    A vector of n policies, such as a layer-wise preset, has n scales: `adjust` takes (n,) flags, `scale` and `unscale`
    a tuple or list with one entry per policy (a tensor or a container of them). Whether the step of all is skipped
    is for the loop to decide: `flags.all()`.

    Args:    policy: one policy or a vector of them; remember: steps kept for `history` (0: none).
    Raises:  TypeError for anything but a ScalePolicy and an int; ValueError for a negative number of steps.

    >>> scaler = PolicyLossScaler(ScalePolicy(growth_interval=2))
    >>> _ = [scaler.adjust(torch.tensor(finite)) for finite in (True, True, False)]
    >>> scaler.history().reasons.tolist()
    ['held', 'grew', 'backed off']
    """

    live: RememberedScale

    def __init__(self, policy: ScalePolicy, remember: int = 1000) -> None:
        super().__init__(RememberedScale(policy, remember))

    @property
    def policy(self) -> ScalePolicy:
        """The policy given, with its first scale."""
        return self.live.policy

    @property
    def remember(self) -> int:
        """The steps kept for `history`."""
        return self.live.remember

    def get_loss_scale(self) -> Any:
        """The policy's first scale, as update cells answer (a list of a vector); the live one is `scale_value`."""
        first = initial(self.policy).scale
        return first.tolist() if isinstance(first, Tensor) else first

    def __call__(self, loss_scale: Tensor, overflow: Tensor) -> Tensor:
        """The update-cell form: adjust, write the next scale into `loss_scale`, return `overflow`."""
        need_flag("overflow", overflow)
        self.adjust(overflow.logical_not())
        loss_scale.copy_(self.scale_value)
        return overflow

    def history(self) -> ScaleHistory:
        """What was decided in the last `remember` steps, oldest first (reads the device)."""
        live, turn = self.live, -1 - self.live.newest()
        scales = live.scales.cpu().roll(turn, 0).double().numpy()
        known = ~np.isnan(scales.reshape(len(scales), -1)).any(1)
        finite, scales = live.found.cpu().roll(turn, 0).numpy()[known][1:] == 0, scales[known]
        skipped = ~finite.all(1) if self.policy.layers else ~finite
        return ScaleHistory(self.policy, finite, scales[1:], skipped, None, "", live.state(), scales[0][()])

    def state_dict(self) -> dict[str, Any]:
        """Policy, every counter and the remembered steps."""
        return self.live.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError if it belongs to another policy."""
        self.live.load_state_dict(state)

    def _map(self, function: Callable[[Tensor, Tensor], Tensor], inputs: object, layer: int | None = None) -> Any:
        if layer is not None or not self.live.shape:
            return super()._map(function, inputs, layer)
        if not isinstance(inputs, tuple | list) or len(inputs) != self.live.count:
            came = f"{len(inputs)} entries" if isinstance(inputs, tuple | list) else type(inputs).__name__
            raise ValueError(f"{self.live.count} scales need a tuple or list with one entry for each, got {came}")
        return type(inputs)(super(PolicyLossScaler, self)._map(function, x, i) for i, x in enumerate(inputs))
