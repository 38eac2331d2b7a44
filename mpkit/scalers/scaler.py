"""`LossScaler`s: multiply a loss, divide gradients, adjust the scale; all but a user's own are faces of a `Scale`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mpkit.arguments import Count, check_alike, check_count, check_number, checked
from mpkit.policies import ScaleHistory, ScalePolicy, preset

from .scale import Face, Scale

Nest = TypeVar("Nest")
"""A tensor, or a tuple or list of nests."""


def checked_scale(name: str, value: float) -> float:
    """A number >= 1; NaN is one, as in MindSpore. Raises TypeError or ValueError."""
    is_nan = isinstance(value, float) and math.isnan(value)
    return value if is_nan else check_number(name, value, low=1.0, closed_high=True)


AtLeast1 = Annotated[float, checked_scale]


class LossScaler(ABC):
    """Multiplies losses and divides gradients by `scale_value`, which lives in a 0-d tensor.

    Every scaler has a `policy`, the rule by which it moves; `adjust` is one step of it. The state
    follows the tensors it is used with: on first use with CUDA tensors it moves to their device.
    """

    scale_value: Tensor

    @property
    def policy(self) -> ScalePolicy | None:
        """The rule, from where the scale stands now; None where a subclass has one that no policy describes."""
        return None

    def scale(self, inputs: Nest) -> Nest:
        """x * cast(scale, x.dtype) for a tensor or a nested tuple or list of them; container and dtypes are kept.

        In float16 a scale above 65504 is inf.
        """
        return self._map(lambda x, scale: x * scale.to(x.dtype), inputs)

    def unscale(self, inputs: Nest) -> Nest:
        """x * cast(fl32(1 / scale), x.dtype), containers as in `scale`.

        The reciprocal is rounded twice before the product, so this is not a division: in float16 a scale above
        2^25 unscales everything to 0, in an integer type the reciprocal is 0.
        """
        return self._map(lambda x, scale: x * scale.reciprocal().float().to(x.dtype), inputs)

    @abstractmethod
    def adjust(self, grads_finite: Tensor) -> bool:
        """Adjust the scale after a step whose gradients were all finite, or not; True if the scaler ever adjusts."""

    def check(self) -> None:  # noqa: B027  # a scaler without errors of its own has nothing to add
        """Raise RuntimeError if the rule met one of its errors since the last call; most rules have none."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as Python numbers."""
        return {"scale_value": float(self.scale_value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        check_alike("the state of a scaler", state, self.state_dict())
        self.scale_value.fill_(state["scale_value"])

    def _to(self, device: torch.device) -> None:
        self.scale_value = self.scale_value.to(device)

    def _map(self, function: Callable[[Tensor, Tensor], Tensor], inputs: object, layer: int | None = None) -> Any:
        """`function(x, scale)` of every tensor x; `layer` picks one of several scales."""
        if isinstance(inputs, Tensor):
            if self.scale_value.device != inputs.device:
                self._to(inputs.device)
            return function(inputs, self.scale_value if layer is None else self.scale_value[layer])
        if not isinstance(inputs, tuple | list):
            raise TypeError(f"needs a tensor or a tuple or list of tensors, got {type(inputs).__name__}")
        mapped = [self._map(function, x, layer) for x in inputs]
        return type(inputs)(*mapped) if hasattr(inputs, "_fields") else type(inputs)(mapped)


class LiveScaler(Face, LossScaler):
    """A scaler that is the face of a `Scale`, `live`."""

    def __init__(self, live: Scale) -> None:
        self.live = live

    @property
    def scale_value(self) -> Tensor:  # type: ignore[override]
        """The scale now, () or one for each policy of a vector; float64 where the policy keeps 64 bits."""
        return self.live.value

    def adjust(self, grads_finite: Tensor) -> bool:
        """One step of the rule; `grads_finite` is a bool tensor of one element, or of one per scale, on the device.

        Note the sense: *finite*, the reverse of the managers' and cells' `overflow`.
        """
        need_flag("grads_finite", grads_finite, self.live.shape.numel())
        self.live.advance_(grads_finite.logical_not().float().reshape(self.live.shape))
        return bool(self.live.counts)

    def _to(self, device: torch.device) -> None:
        self.live.to_(device)


class StaticLossScaler(LiveScaler):
    """A loss scale that stays what it is; `adjust` does nothing and says so: False.

    Args:    scale_value: number >= 1 (inf and nan are accepted, as in MindSpore).
    Raises:  TypeError for a bool or anything but a number, ValueError below 1.
    Source:  MindSpore amp.StaticLossScaler.

    >>> StaticLossScaler(1024).unscale(torch.tensor([2048.0]))
    tensor([2.])
    """

    @checked
    def __init__(self, scale_value: AtLeast1) -> None:
        super().__init__(Scale(ScalePolicy.fixed(1.0), torch.tensor(scale_value, dtype=torch.float32)))


class DynamicLossScaler(LiveScaler):
    """A loss scale that grows after `scale_window` finite steps in a row and shrinks on overflow, never below 1.

    On finite gradients: after `scale_window` of them in a row the scale is multiplied by `scale_factor`, unless the
    product is not finite in float32 (then it stays). On overflow: divided by `scale_factor`, at least 1, and the
    count starts again. State is a float32 `scale_value` and a whole `counter`; `adjust` reads neither on the host.

    Args:
        scale_value:  first scale, number >= 1.
        scale_factor: whole number >= 1 (1 never moves).
        scale_window: finite steps before growth, whole number >= 1.
    Raises:  TypeError for a kind, ValueError for a range that is not the one above.
    Source:  MindSpore amp.DynamicLossScaler, preset "mindspore_scaler".

    >>> scaler = DynamicLossScaler(2**10, 2, 50)
    >>> scaler.adjust(torch.tensor(False)), scaler.scale_value
    (True, tensor(512.))
    """

    @checked
    def __init__(self, scale_value: AtLeast1, scale_factor: Count, scale_window: int) -> None:
        check_count("scale_window", scale_window)
        # the first scale of the rule is not looked at: it moves any
        rule = preset("mindspore_scaler", scale_value=1.0, scale_factor=scale_factor, scale_window=scale_window)
        super().__init__(Scale(rule, torch.tensor(scale_value, dtype=torch.float32)))

    @property
    def counter(self) -> Tensor:
        """() whole number: finite steps since the last change or overflow."""
        return self.live.counts["good"]


class PolicyLossScaler(LiveScaler):
    """A loss scaler that follows any `ScalePolicy`, without a host read in a step.

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

    def __init__(self, policy: ScalePolicy, remember: int = 1000) -> None:
        super().__init__(Scale(policy, remember=check_count("remember", remember, low=0)))

    @property
    def policy(self) -> ScalePolicy:
        """The policy given, with its first scale."""
        return self.live.policy

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError if it belongs to another policy."""
        self.live.load_state_dict(state)

    def history(self) -> ScaleHistory:
        """What was decided in the last `remember` steps, oldest first (reads the device)."""
        turn = -1 - int(self.live.ring["row"])
        scales, found = (self.live.ring[name].cpu().roll(turn, 0).numpy() for name in ("scales", "found"))
        known = ~np.isnan(scales.reshape(len(scales), -1)).any(1)
        finite, scales = found[known][1:] == 0, scales[known].astype(np.float64)
        skipped = ~finite.all(1) if self.policy.layers else ~finite
        return ScaleHistory(self.policy, finite, scales[1:], skipped, None, "", self.live.state(), scales[0][()])

    def _map(self, function: Callable[[Tensor, Tensor], Tensor], inputs: object, layer: int | None = None) -> Any:
        if layer is not None or not (shape := self.live.shape):
            return super()._map(function, inputs, layer)
        if not isinstance(inputs, tuple | list) or len(inputs) != shape.numel():
            raise ValueError(f"{shape.numel()} scales need a tuple or list with one entry for each, got {inputs!r:.80}")
        return type(inputs)(super(PolicyLossScaler, self)._map(function, x, i) for i, x in enumerate(inputs))


def need_flag(name: str, value: object, scales: int = 1) -> None:
    """TypeError unless `value` is a bool tensor, ValueError unless it has one flag for each scale."""
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        came = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a bool tensor, got {came}; for a Python bool write torch.tensor({value!r})")
    if value.numel() != scales:
        raise ValueError(f"{name} must be one flag per scale, {scales}, got shape {tuple(value.shape)}; use .all()")


def scale_of(scale_sense: object, device: torch.device | str) -> Scale:
    """`scale_sense` as a `Scale` on `device`.

    A `Scale` is itself, a tensor of shape () or (1,) a fixed one on a copy, a loss scaler gives its own. A scaler with
    an `adjust` of its own, and whatever can be called as an update cell, `cell(scale, overflow)`, moves one that
    follows it.

    Raises:  TypeError for a number or a manager; ValueError for another shape, several scales, or a scale that is 0,
             infinite or NaN.
    """
    exact = isinstance(scale_sense, LiveScaler) and type(scale_sense).adjust is LiveScaler.adjust
    owner: Any = scale_sense.live if isinstance(scale_sense, LiveScaler) and exact else scale_sense
    if isinstance(owner, Tensor | Scale | LossScaler):
        start: Any = getattr(owner, "scale_value", getattr(owner, "value", owner))
    elif callable(owner) and hasattr(owner, "get_loss_scale"):
        start = float(owner.get_loss_scale())
    else:
        what = "an update cell (a manager's get_update_cell()), a loss scaler or a tensor (torch.tensor(1024.0))"
        raise TypeError(f"scale_sense must be {what}, got {type(owner).__name__}")
    copied = scale_tensor(start, device, "scale_sense")
    if isinstance(owner, Scale):
        return owner.to_(device)
    if isinstance(owner, torch.nn.Module):
        owner.to(device)
    return Scale(ScalePolicy.fixed(1.0), copied) if isinstance(owner, Tensor) else FollowingScale(owner, copied)


class FollowingScale(Scale):
    """The scale of an object with a rule of its own: `owner` is told of each step, and its scale is taken over.

    owner:  a `LossScaler`, or a cell `owner(scale, overflow)` that writes the next scale into the tensor it is given.
    """

    def __init__(self, owner: Any, value: Tensor) -> None:
        super().__init__(ScalePolicy.fixed(1.0), value)
        self.owner = owner

    def advance_(self, found_inf: Tensor, part: Tensor | None = None) -> None:
        """Tell the owner."""
        if isinstance(self.owner, LossScaler):
            self.owner.adjust(found_inf == 0)
            self.value.copy_(self.owner.scale_value)
        else:
            self.owner(self.value, found_inf.bool())

    def check(self) -> None:
        """Ask the owner, where it can be asked."""
        getattr(self.owner, "check", lambda: None)()


def scale_tensor(value: float | Tensor, device: torch.device | str, name: str) -> Tensor:
    """A float32 tensor on `device` that holds `value` and is nobody else's.

    Raises:  TypeError if it is no number and no tensor; ValueError if a tensor's shape is neither () nor (1,), or the
             value is 0, infinite or NaN.
    """
    if not isinstance(value, Tensor):
        value = torch.tensor(check_number(name, value, low=-math.inf), dtype=torch.float64)
    if value.shape not in ((), (1,)):
        raise ValueError(f"{name} must have shape () or (1,), got {tuple(value.shape)}")
    if not value.is_floating_point():
        raise TypeError(f"{name} must be a floating tensor, got {value.dtype}; call {name}.float() first")
    if float(value) == 0 or not math.isfinite(float(value)):
        raise ValueError(f"{name} multiplies every gradient and must be finite and not 0, got {float(value)}")
    return value.detach().to(device, torch.float32, copy=True)
