"""MindSpore's loss-scale managers (host side) and the update cells (device side) that they hand to a train cell."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpkit.arguments import Count, check_alike, check_count, checked
from mpkit.policies import ScalePolicy, preset

from .scale import Face, Scale
from .scaler import AtLeast1, need_flag


class LossScaleManager(ABC):
    """What a `Model` asks about loss scaling.

    for_boost:  whether its update cell is made for the train cells of `mpkit.boost`.
    """

    for_boost = False

    @property
    def policy(self) -> ScalePolicy | None:
        """The rule, from where the scale stands now; None where a subclass has one that no policy describes."""
        return None

    @abstractmethod
    def get_loss_scale(self) -> float:
        """The scale now."""

    @abstractmethod
    def get_drop_overflow_update(self) -> bool:
        """Whether a step that overflows is skipped."""

    @abstractmethod
    def update_loss_scale(self, overflow: bool) -> None:
        """Take note of one step."""

    @abstractmethod
    def get_update_cell(self) -> nn.Module | None:
        """A new cell that does the same on the device, or None where there is nothing to do."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as Python numbers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        check_alike("the state of a manager", state, self.state_dict())


class FixedLossScaleManager(LossScaleManager):
    """A fixed scale; with `drop_overflow_update` steps that overflow are skipped.

    Without dropping, `get_update_cell()` is None, and the optimizer itself must divide: give it `loss_scale`.

    Raises:  TypeError for kinds, ValueError for a scale below 1.
    Source:  MindSpore amp.FixedLossScaleManager.
    """

    @checked
    def __init__(self, loss_scale: AtLeast1 = 128.0, drop_overflow_update: bool = True) -> None:
        self._loss_scale, self._drop = loss_scale, drop_overflow_update

    @property
    def policy(self) -> ScalePolicy:
        """A fixed scale."""
        return ScalePolicy.fixed(self._loss_scale, scale_bits=64)

    def get_loss_scale(self) -> float:
        """The scale given to the constructor."""
        return self._loss_scale

    def get_drop_overflow_update(self) -> bool:
        """As given to the constructor."""
        return self._drop

    def update_loss_scale(self, overflow: bool) -> None:
        """Nothing: the scale is fixed."""

    def get_update_cell(self) -> nn.Module | None:
        """A cell that keeps the scale; None when overflows are not dropped."""
        return FixedLossScaleUpdateCell(self._loss_scale) if self._drop else None


class DynamicLossScaleManager(Face, LossScaleManager):
    """The dynamic scale on the host, in double precision: preset "mindspore_manager".

    Counts steps (`cur_iter`, from 1), the last overflow (`last_overflow_iter`) and overflows in a row (`bad_step`).

    Args:    init_loss_scale: number >= 1; scale_factor: number > 0; scale_window: whole number >= 1.
    Raises:  TypeError, ValueError for arguments; RuntimeError from `update_loss_scale` at the 1001st overflow in a row
             (and at each further one, until a step without overflow).
    Source:  MindSpore amp.DynamicLossScaleManager.
    """

    @checked
    def __init__(self, init_loss_scale: AtLeast1 = 2**24, scale_factor: float = 2, scale_window: Count = 2000) -> None:
        given = {"init_loss_scale": init_loss_scale, "scale_factor": scale_factor, "scale_window": scale_window}
        self.live = Scale(preset("mindspore_manager", **given)).to_("cpu")
        self.cur_iter, self.last_overflow_iter = 1, 0

    @property
    def bad_step(self) -> int:
        """Overflows in a row, up to now."""
        return int(self.live.counts["streak"])

    def get_loss_scale(self) -> float:
        """The scale now."""
        return self.live.value.item()

    def get_drop_overflow_update(self) -> bool:
        """Always True."""
        return True

    def update_loss_scale(self, overflow: bool | Tensor) -> None:
        """One step of the rule; a bool tensor of one element is read on the host."""
        if not isinstance(overflow, bool | np.bool_):
            need_flag("overflow", overflow)
        self.live.advance_(torch.tensor(float(overflow), device="cpu"))
        if overflow:
            self.last_overflow_iter = self.cur_iter
        try:
            self.live.check()
        except RuntimeError as error:
            raise RuntimeError(f"{self.bad_step} overflows in a row: {error}") from None
        self.cur_iter += 1

    def get_update_cell(self) -> DynamicLossScaleUpdateCell:
        """A new cell that starts from the manager's current scale."""
        return DynamicLossScaleUpdateCell(self.get_loss_scale(), self.scale_factor, self.scale_window)

    def state_dict(self) -> dict[str, Any]:
        """Policy, scale and every counter, as Python numbers."""
        counted = {"cur_iter": self.cur_iter, "last_overflow_iter": self.last_overflow_iter}
        return {**super().state_dict(), **counted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, factor and window too."""
        check_alike("the state of a manager", state, {**self.state_dict(), "policy": None})
        counted = [check_count(name, state[name], low) for name, low in (("cur_iter", 1), ("last_overflow_iter", 0))]
        super().load_state_dict(state)
        self.cur_iter, self.last_overflow_iter = counted


class FixedLossScaleUpdateCell(nn.Module):
    """Leaves the scale alone: `cell(loss_scale, overflow) -> overflow`."""

    def __init__(self, loss_scale_value: float) -> None:
        super().__init__()
        self.loss_scale_value = loss_scale_value

    @property
    def policy(self) -> ScalePolicy:
        """A fixed scale."""
        return ScalePolicy.fixed(self.loss_scale_value)

    def get_loss_scale(self) -> float:
        """The scale given to the constructor."""
        return self.loss_scale_value

    def forward(self, loss_scale: Tensor, overflow: Tensor) -> Tensor:
        """Returns `overflow` unchanged."""
        need_flag("overflow", overflow)
        return overflow


class DynamicLossScaleUpdateCell(nn.Module):
    """The dynamic rule on the device: `cell(loss_scale, overflow) -> overflow` changes the caller's scale in place.

    The scale lives in the caller's float32 tensor; the cell counts steps (`cur_iter`, from 1) and those since the last
    change (`streak`; `last_overflow_iter` follows from both), so that nothing is read on the host. Growth has no
    guard: past the largest float32 the scale becomes inf, and stays inf for ever. Arguments are not checked (0.1, 0, 0
    are accepted), as in MindSpore; the first step raises ValueError where the factor is 0 or below.
    `get_loss_scale()` is the first value for ever; the live one is the tensor.

    Source:  MindSpore nn.DynamicLossScaleUpdateCell, preset "mindspore_cell".

    >>> scale, cell = torch.tensor(1024.0), DynamicLossScaleUpdateCell(1024.0, 2, 2)
    >>> _ = [cell(scale, torch.tensor(bad)) for bad in (False, False, True)]; scale
    tensor(1024.)
    """

    cur_iter: Tensor
    streak: Tensor

    def __init__(self, loss_scale_value: float, scale_factor: float, scale_window: int) -> None:
        super().__init__()
        self.loss_scale_value, self.scale_factor, self.scale_window = loss_scale_value, scale_factor, scale_window
        self.register_buffer("cur_iter", torch.ones((), dtype=torch.int64))
        self.register_buffer("streak", torch.zeros((), dtype=torch.int32))
        self._live: Scale | None = None

    @property
    def policy(self) -> ScalePolicy:
        """Preset "mindspore_cell" from the first scale."""
        given = {"scale_factor": self.scale_factor, "scale_window": self.scale_window}
        return preset("mindspore_cell", loss_scale_value=self.loss_scale_value, **given)

    @property
    def last_overflow_iter(self) -> Tensor:
        """() int64: the step of the last overflow or growth, 0 before the first."""
        return self.cur_iter - 1 - self.streak

    def get_loss_scale(self) -> float:
        """The scale given to the constructor."""
        return self.loss_scale_value

    def forward(self, loss_scale: Tensor, overflow: Tensor) -> Tensor:
        """One step: () or (1,) float32 `loss_scale` is changed in place, the bool tensor `overflow` returned."""
        need_flag("overflow", overflow)
        if getattr(loss_scale, "dtype", None) != torch.float32 or loss_scale.shape not in ((), (1,)):
            raise TypeError(f"loss_scale must be one float32 number, of shape () or (1,), got {loss_scale!r:.80}")
        # not made before: the first step tells of a factor out of range
        self._live = self._live or Scale(self.policy, loss_scale)
        if self.streak.device != loss_scale.device:
            self.to(loss_scale.device)
        # the scale is the caller's, and whoever moved this module has replaced its buffers
        self._live.value, self._live.counts["good"] = loss_scale, self.streak
        self._live.advance_(overflow.float())
        self.cur_iter.add_(1)
        return overflow
