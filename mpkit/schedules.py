"""Learning rate as a pure function of the step.

Two families, as in the API they reproduce (MindSpore 2.7 `nn.dynamic_lr` and `nn.learning_rate_schedule`): functions
that return the whole list, changing once per *epoch*, and schedules called with a *step*. A schedule is an immutable
value, so it can be shared, compared, pickled and evaluated anywhere: on a number it returns a number, on a tensor of
steps (one step or many, on any device) a float32 tensor, with no host read. A list is a schedule of the epochs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from mpkit.arguments import Checked, Float, check_count, check_float, check_kind, check_number, is_whole

__all__ = [
    "Chained", "CosineDecayLR", "ExponentialDecayLR", "InverseDecayLR", "LearningRateSchedule", "ListedLR",
    "NaturalExpDecayLR", "PolynomialDecayLR", "WarmUpLR", "cosine_decay_lr", "exponential_decay_lr", "inverse_decay_lr",
    "lambda_lr", "natural_exp_decay_lr", "piecewise_constant_lr", "polynomial_decay_lr", "warmup_lr",
]  # fmt: skip


def _counted(name: str, value: object) -> int:
    if (count := check_count(name, value)) >= 2**63:
        raise ValueError(f"{name} counts steps and must be below 2**63, got an int of {count.bit_length()} bits")
    return count


Above0 = Annotated[float, partial(check_float, open_low=True)]
Count = Annotated[int, _counted]


At = float | Tensor
"""A place in a training: one as a number, or as many as a tensor holds. Rates come in the same kind."""


# --- schedules, functions of the step


@dataclass(frozen=True)
class LearningRateSchedule:
    """A learning rate for every step: `schedule(step)`.

    Write your own by subclassing and overriding `rate(at)` in arithmetic that works on float64 tensors.

    Shapes:  step int -> float; step () or (*) integer tensor -> float32 tensor of that shape on the same device.
    Units:   `step` counts optimizer updates from 0, so the first update uses `schedule(0)`.
    Edges:   a negative step is not refused; the formulas are extended to it. A rate too large for a float is inf.
    Raises:  TypeError for a step that is neither a number nor a tensor.
    Source:  MindSpore 2.7 nn.learning_rate_schedule. It computes in float32; mpkit computes in float64 and rounds a
             tensor result once, which agrees to 1e-6 of max(lr, 0.1).
    """

    def __call__(self, step: At) -> At:
        if isinstance(step, Tensor):
            return torch.as_tensor(self.rate(step.double()), dtype=torch.float64, device=step.device).float()
        return self.number(int(step) if is_whole(step) else check_number("step", step, low=-math.inf))

    def rate(self, at: Tensor) -> At:
        """Steps as a float64 tensor -> their rates."""
        raise NotImplementedError(f"{type(self).__name__} must define rate(at)")

    def number(self, step: float) -> float:
        """The rate of one step that the host knows."""
        return float(np.asarray(self.rate(torch.tensor(step, dtype=torch.float64, device="cpu"))))

    def then(self, after: LearningRateSchedule, at: int) -> Chained:
        """This schedule for the steps before `at`, then `after`, which counts its own steps from 0 there.

        >>> schedule = WarmUpLR(0.1, 4).then(CosineDecayLR(0.0, 0.1, 10), at=4)
        >>> [round(schedule(step), 3) for step in (0, 2, 4, 9, 14)]
        [0.0, 0.05, 0.1, 0.05, 0.0]
        """
        return Chained(self, after, at)


@dataclass(frozen=True)
class Chained(Checked, LearningRateSchedule):
    """`before` for the steps below `at`, then `after`, counted from 0 there; made by `schedule.then(after, at)`."""

    before: LearningRateSchedule
    after: LearningRateSchedule
    at: Count

    def rate(self, at: Tensor) -> Tensor:
        rates = self.before.rate(at), self.after.rate((at - self.at).clamp(min=0))
        early, late = (torch.as_tensor(rate, dtype=torch.float64, device=at.device) for rate in rates)
        return torch.where(at < self.at, early, late)

    def number(self, step: float) -> float:
        return self.before.number(step) if step < self.at else self.after.number(step - self.at)


@dataclass(frozen=True)
class _Decay(Checked, LearningRateSchedule):
    learning_rate: Above0
    decay_rate: Above0
    decay_steps: Count
    is_stair: bool = False

    def _stair(self, x: Tensor) -> Tensor:
        return x.floor() if self.is_stair else x


class ExponentialDecayLR(_Decay):
    """`lr * rate ** (step / decay_steps)`; `is_stair` floors the exponent.

    Raises:  TypeError for an int rate, a float count or a flag that is no bool; ValueError for values not above 0.
    Source:  MindSpore 2.7 nn.learning_rate_schedule.ExponentialDecayLR.
    """

    def rate(self, at: Tensor) -> Tensor:
        return self.learning_rate * self.decay_rate ** self._stair(at / self.decay_steps)


class NaturalExpDecayLR(_Decay):
    """`lr * exp(-rate * step)`; `decay_steps` matters only with `is_stair`, which moves every `decay_steps` steps.

    Raises:  as `ExponentialDecayLR`.
    Source:  MindSpore 2.7 nn.learning_rate_schedule.NaturalExpDecayLR.
    """

    def rate(self, at: Tensor) -> Tensor:
        passed = (at / self.decay_steps).floor() * self.decay_steps if self.is_stair else at
        return self.learning_rate * (-self.decay_rate * passed).exp()


class InverseDecayLR(_Decay):
    """`lr / (1 + rate * step / decay_steps)`; `is_stair` floors the quotient.

    Raises:  as `ExponentialDecayLR`.
    Source:  MindSpore 2.7 nn.learning_rate_schedule.InverseDecayLR.
    """

    def rate(self, at: Tensor) -> Tensor:
        return self.learning_rate / (1.0 + self.decay_rate * self._stair(at / self.decay_steps))


@dataclass(frozen=True)
class CosineDecayLR(Checked, LearningRateSchedule):
    """Half a cosine from `max_lr` at step 0 to `min_lr` at `decay_steps`, `min_lr` from there on.

    Raises:  TypeError for an int rate or a float count; ValueError for min_lr < 0, min_lr >= max_lr or decay_steps < 1.
    Source:  MindSpore 2.7 nn.learning_rate_schedule.CosineDecayLR.
    """

    min_lr: Float
    max_lr: Above0
    decay_steps: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_lr >= self.max_lr:
            raise ValueError(f"need min_lr < max_lr, got min_lr={self.min_lr}, max_lr={self.max_lr}")

    def rate(self, at: Tensor) -> Tensor:
        turn = math.pi * (at.clamp(max=self.decay_steps) / self.decay_steps)
        return self.min_lr + 0.5 * (self.max_lr - self.min_lr) * (1.0 + turn.cos())


@dataclass(frozen=True)
class PolynomialDecayLR(Checked, LearningRateSchedule):
    """`(lr - end) * (1 - step / decay_steps) ** power + end`, then `end`; rises where `end` is above `lr`.

    With `update_decay_steps` the span grows to the next multiple of `decay_steps` that covers the step, so the rate is
    `end` exactly at `decay_steps` and jumps up again one step later.

    Raises:  TypeError for an int rate or power, a float count or a flag that is no bool; ValueError for lr <= 0,
             end < 0, power <= 0, decay_steps < 1.
    Source:  MindSpore 2.7 nn.learning_rate_schedule.PolynomialDecayLR.

    >>> schedule = PolynomialDecayLR(learning_rate=0.1, end_learning_rate=0.01, decay_steps=4, power=0.5)
    >>> schedule(torch.tensor(2))
    tensor(0.0736)
    """

    learning_rate: Above0
    end_learning_rate: Float
    decay_steps: Count
    power: Above0
    update_decay_steps: bool = False

    def rate(self, at: Tensor) -> Tensor:
        span, end = self.decay_steps, self.end_learning_rate
        if self.update_decay_steps:
            done = at / (span * (at / span).ceil().clamp(min=1))
        else:
            done = at.clamp(max=span) / span
        return (self.learning_rate - end) * (1.0 - done) ** self.power + end


@dataclass(frozen=True)
class WarmUpLR(Checked, LearningRateSchedule):
    """`lr * min(step, warmup_steps) / warmup_steps`: 0 at step 0, `lr` from `warmup_steps` on.

    Raises:  TypeError for an int rate or a float count; ValueError for a negative rate or warmup_steps < 1.
    Source:  MindSpore 2.7 nn.learning_rate_schedule.WarmUpLR.
    """

    learning_rate: Float
    warmup_steps: Count

    def rate(self, at: Tensor) -> Tensor:
        return self.learning_rate * at.clamp(max=self.warmup_steps) / self.warmup_steps


def _listed(name: str, values: Iterable[float]) -> tuple[float, ...]:
    if not (rates := tuple(check_number("a learning rate", rate) for rate in values)):
        raise ValueError("a list of learning rates needs at least one entry")
    return rates


@dataclass(frozen=True)
class ListedLR(Checked, LearningRateSchedule):
    """One rate per step, from a list such as the `*_lr` functions return.

    Edges:   past the end a number raises (a list must cover every step); a tensor cannot raise without a host read, so
             it keeps the last rate.
    Raises:  TypeError for entries that are no numbers; ValueError for an empty list or a negative rate; RuntimeError
             past the end.
    """

    values: Annotated[tuple[float, ...], _listed]
    _tables: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def rate(self, at: Tensor) -> Tensor:
        if at.device not in self._tables:  # the rates on the device, copied there once and not once per step
            self._tables[at.device] = torch.tensor(self.values, dtype=torch.float64, device=at.device)
        return torch.take(self._tables[at.device], at.long().clamp(0, len(self.values) - 1))

    def number(self, step: float) -> float:
        if not 0 <= step < len(self.values):
            raise RuntimeError(f"the list has {len(self.values)} rates, none for step {step}; make it longer")
        return self.values[int(step)]


# --- lists, one rate per step, constant inside an epoch


def piecewise_constant_lr(milestone: Sequence[int], learning_rates: Sequence[float]) -> list[float]:
    """`learning_rates[k]` up to, but not including, step `milestone[k]`; the list ends at the last milestone.

    Edges:   equal milestones give that rate zero steps; two empty lists give an empty list; a rate may be negative.
    Raises:  TypeError for a milestone that is no int or a rate that is no float; ValueError for unequal lengths, a
             milestone below 1, or decreasing milestones.
    Source:  MindSpore 2.7 nn.dynamic_lr.piecewise_constant_lr.

    >>> piecewise_constant_lr([2, 5, 10], [0.1, 0.05, 0.01])
    [0.1, 0.1, 0.05, 0.05, 0.05, 0.01, 0.01, 0.01, 0.01, 0.01]
    """
    for name, given in (("milestone", milestone), ("learning_rates", learning_rates)):
        check_kind(name, given, Collection, "a list")
    if len(milestone) != len(learning_rates):
        raise ValueError(f"need one rate per milestone, got {len(milestone)} milestones, {len(learning_rates)} rates")
    rates: list[float] = []
    for step, rate in zip(milestone, learning_rates):
        if (end := _counted("milestone", step)) < len(rates):
            raise ValueError(f"milestones must not decrease, got {list(milestone)}")
        rates += [check_float("learning_rates", rate, low=-math.inf)] * (end - len(rates))
    return rates


def _by_epoch(schedule: LearningRateSchedule, total_step: int, step_per_epoch: int) -> list[float]:
    steps = torch.arange(_counted("total_step", total_step), device="cpu")
    epochs = steps.div(_counted("step_per_epoch", step_per_epoch), rounding_mode="floor")
    return torch.as_tensor(schedule.rate(epochs.double())).tolist()


def exponential_decay_lr(
    learning_rate: float,
    decay_rate: float,
    total_step: int,
    step_per_epoch: int,
    decay_epoch: int,
    is_stair: bool = False,
) -> list[float]:
    """`lr * rate ** (epoch / decay_epoch)` for each of `total_step` steps; `is_stair` floors the exponent.

    Raises:  TypeError for an int rate or a float count; ValueError for a rate or count that is not positive.
    Source:  MindSpore 2.7 nn.dynamic_lr.exponential_decay_lr.
    """
    return _by_epoch(ExponentialDecayLR(learning_rate, decay_rate, decay_epoch, is_stair), total_step, step_per_epoch)


def natural_exp_decay_lr(
    learning_rate: float,
    decay_rate: float,
    total_step: int,
    step_per_epoch: int,
    decay_epoch: int,
    is_stair: bool = False,
) -> list[float]:
    """`lr * exp(-rate * epoch)`: `decay_epoch` matters only with `is_stair`, which moves every `decay_epoch` epochs.

    Raises:  as `exponential_decay_lr`.
    Source:  MindSpore 2.7 nn.dynamic_lr.natural_exp_decay_lr.
    """
    return _by_epoch(NaturalExpDecayLR(learning_rate, decay_rate, decay_epoch, is_stair), total_step, step_per_epoch)


def inverse_decay_lr(
    learning_rate: float,
    decay_rate: float,
    total_step: int,
    step_per_epoch: int,
    decay_epoch: int,
    is_stair: bool = False,
) -> list[float]:
    """`lr / (1 + rate * epoch / decay_epoch)`; `is_stair` floors the quotient.

    Raises:  as `exponential_decay_lr`.
    Source:  MindSpore 2.7 nn.dynamic_lr.inverse_decay_lr.
    """
    return _by_epoch(InverseDecayLR(learning_rate, decay_rate, decay_epoch, is_stair), total_step, step_per_epoch)


def cosine_decay_lr(
    min_lr: float, max_lr: float, total_step: int, step_per_epoch: int, decay_epoch: int
) -> list[float]:
    """Half a cosine from `max_lr` at epoch 0 to `min_lr` at `decay_epoch`, `min_lr` from there on.

    Raises:  TypeError for an int rate or a float count; ValueError for min_lr < 0, min_lr >= max_lr or a count below 1.
    Source:  MindSpore 2.7 nn.dynamic_lr.cosine_decay_lr.
    """
    return _by_epoch(CosineDecayLR(min_lr, max_lr, decay_epoch), total_step, step_per_epoch)


def polynomial_decay_lr(
    learning_rate: float,
    end_learning_rate: float,
    total_step: int,
    step_per_epoch: int,
    decay_epoch: int,
    power: float,
    update_decay_epoch: bool = False,
) -> list[float]:
    """`(lr - end) * (1 - epoch / decay_epoch) ** power + end`, then `end`; rises where `end` is above `lr`.

    With `update_decay_epoch` the span grows to the next multiple of `decay_epoch` that covers the epoch.

    Raises:  TypeError for an int rate or power, or a float count; ValueError for lr <= 0, end < 0, power <= 0 or a
             count below 1.
    Source:  MindSpore 2.7 nn.dynamic_lr.polynomial_decay_lr.
    """
    schedule = PolynomialDecayLR(learning_rate, end_learning_rate, decay_epoch, power, update_decay_epoch)
    return _by_epoch(schedule, total_step, step_per_epoch)


def warmup_lr(learning_rate: float, total_step: int, step_per_epoch: int, warmup_epoch: int) -> list[float]:
    """`lr * min(epoch, warmup_epoch) / warmup_epoch`: zero throughout the first epoch.

    Raises:  TypeError for an int rate or a float count; ValueError for a negative rate or a count below 1.
    Source:  MindSpore 2.7 nn.dynamic_lr.warmup_lr.
    """
    return _by_epoch(WarmUpLR(learning_rate, warmup_epoch), total_step, step_per_epoch)


def lambda_lr(
    optimizer: torch.optim.Optimizer, schedule: LearningRateSchedule | Sequence[LearningRateSchedule]
) -> LambdaLR:
    """Let a schedule (or one per parameter group) drive any torch optimizer, replacing the groups' rates.

    The caller advances it with `.step()` after each update, and so decides whether a step that the loss scaler skipped
    counts: leave `.step()` out after a skip to keep MindSpore's rule, under which nothing advances.

    Raises:  TypeError for something that is no schedule; ValueError when the number of schedules is not that of groups.
    Source:  torch.optim.lr_scheduler.LambdaLR with the base rate 1, so that the factor is the rate.
    """
    check_kind("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
    groups = optimizer.param_groups
    schedules = list(schedule) if isinstance(schedule, Sequence) else [schedule] * len(groups)
    for each in schedules:
        check_kind("schedule", each, LearningRateSchedule, "a LearningRateSchedule; wrap a list in ListedLR(values)")
        each(0)  # one that cannot answer raises before a rate is written
    if len(schedules) != len(groups):
        raise ValueError(f"need one schedule per group, got {len(schedules)} for {len(groups)} groups")
    for group in groups:
        rate = group["lr"]
        group["lr"] = torch.ones_like(rate) if isinstance(rate, Tensor) else 1.0
        group["initial_lr"] = 1.0
    return LambdaLR(optimizer, [each.__call__ for each in schedules])  # type: ignore[misc]
