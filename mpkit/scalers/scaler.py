"""`LossScaler`s: multiply a loss, divide gradients, adjust the scale."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from mpkit.arguments import check_alike, check_count, is_number
from mpkit.policies import ScalePolicy, preset

from .scale import Scale

Nest = TypeVar("Nest")
"""A tensor, or a tuple or list of nests."""


class LossScaler(ABC):
    """Multiplies losses and divides gradients by `scale_value`, which lives in a 0-d tensor.

    Every scaler has a `policy`, the rule by which it moves; `adjust` and `advance_` are one step of it. The state
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

    def advance_(self, found_inf: Tensor) -> None:
        """`adjust` for the () float32 flag of `check_and_unscale_`, unchecked: what a training step calls."""
        self.adjust(found_inf == 0)

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
        if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
            return type(inputs)(*(self._map(function, x, layer) for x in inputs))
        if isinstance(inputs, tuple | list):
            return type(inputs)(self._map(function, x, layer) for x in inputs)
        raise TypeError(f"needs a tensor or a tuple or list of tensors, got {type(inputs).__name__}; use torch.tensor")


class LiveScaler(LossScaler):
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
        need_flag("grads_finite", grads_finite)
        if grads_finite.shape != (shape := self.live.shape):
            if grads_finite.numel() != shape.numel():
                came = tuple(grads_finite.shape)
                raise ValueError(
                    f"grads_finite must hold one flag per scale, {shape.numel()}, got shape {came}; use .all()"
                )
            grads_finite = grads_finite.reshape(shape)
        self.live.advance_(found_inf_of(grads_finite))
        return bool(self.live.counts)

    def advance_(self, found_inf: Tensor) -> None:
        """`adjust` for the float32 flag of `check_and_unscale_` (or one per policy), unchecked."""
        if adjusts_itself(type(self)):
            self.adjust(found_inf == 0)  # a step must hear it
        else:
            self.live.advance_(found_inf)

    def check(self) -> None:
        """Raise RuntimeError if the policy met one of its errors since the last call (one host read)."""
        self.live.check()

    def _to(self, device: torch.device) -> None:
        self.live.to_(device)


def adjusts_itself(kind: type[LiveScaler]) -> bool:
    """Whether a subclass has a step of its own."""
    return kind.adjust is not LiveScaler.adjust or kind.advance_ is not LiveScaler.advance_


class StaticLossScaler(LiveScaler):
    """A loss scale that stays what it is; `adjust` does nothing and says so: False.

    Args:    scale_value: number >= 1 (inf and nan are accepted, as in MindSpore).
    Raises:  TypeError for a bool or anything but a number, ValueError below 1.
    Source:  MindSpore amp.StaticLossScaler.

    >>> StaticLossScaler(1024).unscale(torch.tensor([2048.0]))
    tensor([2.])
    """

    def __init__(self, scale_value: float) -> None:
        super().__init__(Scale(ScalePolicy.fixed(1.0), _checked_scale(scale_value)))

    @property
    def policy(self) -> ScalePolicy:
        """A fixed scale."""
        return ScalePolicy.fixed(float(self.scale_value))


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

    def __init__(self, scale_value: float, scale_factor: int, scale_window: int) -> None:
        value = _checked_scale(scale_value)
        self._settings = _checked_settings(scale_factor, scale_window)
        super().__init__(Scale(_policy(1.0, *self._settings), value))  # it moves any scale of 1 or more

    @property
    def scale_factor(self) -> int:
        """As given to the constructor, or loaded."""
        return self._settings[0]

    @property
    def scale_window(self) -> int:
        """As given to the constructor, or loaded."""
        return self._settings[1]

    @property
    def counter(self) -> Tensor:
        """() whole number: finite steps since the last change or overflow."""
        return self.live.counts["good"]

    @property
    def policy(self) -> ScalePolicy:
        """Preset "mindspore_scaler" from the scale of now."""
        return _policy(float(self.scale_value), *self._settings)

    def state_dict(self) -> dict[str, Any]:
        """Scale, counter and settings, as Python numbers."""
        settings = dict(zip(("scale_factor", "scale_window"), self._settings))
        return {**super().state_dict(), "counter": int(self.counter), **settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, settings too."""
        check_alike("the state of a scaler", state, self.state_dict())
        scale, counter = _checked_scale(state["scale_value"]), check_count("counter", state["counter"], low=0)
        if counter >= 2**31:
            raise ValueError(f"counter has 31 bits, got an int of {counter.bit_length()}")
        self._settings = _checked_settings(state["scale_factor"], state["scale_window"])
        self.live.follow(_policy(1.0, *self._settings))
        self.scale_value.copy_(scale)
        self.counter.fill_(counter)


def _checked_settings(scale_factor: object, scale_window: object) -> tuple[int, int]:
    factor, window = check_count("scale_factor", scale_factor), check_count("scale_window", scale_window)
    need_number("scale_factor", factor)
    return factor, window


def _policy(scale: float, factor: int, window: int) -> ScalePolicy:
    return preset("mindspore_scaler", scale_value=scale, scale_factor=factor, scale_window=window)


def _checked_scale(scale_value: float) -> Tensor:
    need_number("scale_value", scale_value)
    if scale_value < 1:
        raise ValueError(f"scale_value must be at least 1, got {scale_value}; it multiplies the loss to lift gradients")
    return torch.tensor(scale_value, dtype=torch.float32)


def found_inf_of(finite: Tensor) -> Tensor:
    """A bool tensor "all were finite" as the float32 flag of `check_and_unscale_`, in one operation."""
    return torch.logical_not(finite, out=torch.empty_like(finite, dtype=torch.float32))


def need_number(name: str, value: object) -> None:
    """TypeError unless `value` is an int or a float (a bool is neither)."""
    if not is_number(value):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    if isinstance(value, int) and abs(value) > torch.finfo(torch.float32).max:
        raise ValueError(f"{name} must fit a float32, got an int of {value.bit_length()} bits")


def need_flag(name: str, value: object) -> None:
    """TypeError unless `value` is a bool tensor."""
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        came = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a bool tensor, got {came}; for a Python bool write torch.tensor({value!r})")
