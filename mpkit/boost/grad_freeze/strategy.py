"""Which layers stand still on which step: freeze groups and the sequence of their indices."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer

from mpkit.arguments import check_count, check_flags, check_kind, check_number
from mpkit.boost.grad_freeze.optimizer import FreezeOpt
from mpkit.boost.grad_freeze.stages import stages_by_module, stages_by_name
from mpkit.optimizers.arguments import parameters_of

TYPES = {0: "continuous", 1: "interleaved"}


class GradientFreeze:
    """Decide which layers stand still on which step.

    The network is cut into stages in definition order. With G groups, index v = 1..G-1 freezes the first
    v * (stages // G) stages, index 0 trains everything. The forward pass always runs in full, so BatchNorm statistics
    of frozen layers keep moving.

    Args:
        param_groups:        G, number of freeze groups (>= 1; 1 never freezes).
        freeze_type:         0 "continuous": full steps, then indices 1, 2, .., G-1 in a row; 1 "interleaved": frozen
                             steps spread evenly, their index drawn, small ones more often.
        freeze_p:            share of steps *without* freezing, in [0, 1]. MindSpore calls it the probability of
                             freezing; it is the opposite.
        total_steps:         length of the strategy, steps (>= 0); afterwards it starts again.
        full_step_fraction:  a clear name for `freeze_p`; give one of them.
        faithful:            False: a stage is one layer with a weight matrix and what follows until the next one.
                             True reproduces MindSpore: stages by parameter name ("bn" or "bias" joins the stage, three
                             fill it), which does nothing at all when G exceeds their number; strategies bit for bit
                             as after `numpy.random.seed(seed)`, int(1.01 * total_steps) long, for type 0 rounded up
                             to whole cycles; and a `FreezeOpt` that is faithful.
        seed:                of the own generator that draws the indices (>= 0; below 2**32 if faithful).
    Raises:  TypeError for kinds, ValueError for ranges. Warns when G exceeds the number of stages, and takes that.
    Source:  MindSpore boost.GradientFreeze.

    >>> GradientFreeze(3, 0, 0.5, 8).generate_freeze_index_sequence(3, 0, 0.5, 8)
    [0, 0, 1, 2, 0, 0, 1, 2]
    """

    def __init__(
        self,
        param_groups: int,
        freeze_type: int,
        freeze_p: float | None = None,
        total_steps: int | None = None,
        *,
        full_step_fraction: float | None = None,
        faithful: bool = False,
        seed: int = 0,
    ) -> None:
        share = full_step_fraction if freeze_p is None else freeze_p
        if share is None or None not in (freeze_p, full_step_fraction):
            raise TypeError("give freeze_p or full_step_fraction (one of them): the share of steps without freezing")
        if total_steps is None:
            raise TypeError("GradientFreeze needs total_steps, the length of the strategy in steps")
        check_flags(faithful=faithful)
        if check_count("seed", seed, low=0) >= 2**32 and faithful:
            raise ValueError(f"the generator of faithful strategies takes seeds below 2**32, got {seed}")
        self.param_groups = param_groups
        self.freeze_type = freeze_type
        self.freeze_p = share
        self.total_steps = total_steps
        self.faithful, self.seed = faithful, seed
        _check_strategy(param_groups, freeze_type, self.freeze_p, total_steps)

    def split_parameters_groups(self, net: nn.Module, freeze_para_groups_number: int) -> list[list[nn.Parameter]]:
        """One list per freeze group: list i holds the parameters that are trained when the index is i."""
        check_kind("net", net, nn.Module, "an nn.Module")
        check_count("freeze_para_groups_number", freeze_para_groups_number)
        stages = stages_by_name(net) if self.faithful else stages_by_module(net)
        if not stages:
            raise ValueError(f"{type(net).__name__} has no trainable parameter to freeze or train")
        groups = freeze_para_groups_number
        if not self.faithful and groups > len(stages):
            warnings.warn(
                f"{groups} freeze groups were asked for and the network has {len(stages)} stages; taking "
                f"{len(stages)} groups. Give param_groups={len(stages)} or less.",
                stacklevel=2,
            )
            groups = len(stages)
        stride = len(stages) // groups
        return [[p for stage in stages[i * stride :] for p in stage] for i in range(groups)]

    def generate_freeze_index_sequence(
        self, parameter_groups_number: int, freeze_strategy: int, freeze_p: float, total_steps: int
    ) -> list[int]:
        """The index of every step, exactly `total_steps` long unless `faithful`.

        Edges:   freeze_p = 1 never freezes; a step count of 0 gives [].
        """
        _check_strategy(parameter_groups_number, freeze_strategy, freeze_p, total_steps)
        groups, length = parameter_groups_number, int(total_steps * 1.01) if self.faithful else total_steps
        if groups <= 1 or (freeze_strategy == 0 and freeze_p == 1):
            return [0] * length
        if freeze_strategy == 0:
            sequence = _continuous(groups, freeze_p, length)
        else:
            draw = np.random.RandomState(self.seed) if self.faithful else np.random.default_rng(self.seed)
            sequence = _interleaved(groups, freeze_p, length, draw)
        return sequence if self.faithful else sequence[:length]

    def freeze_generate(self, network: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, FreezeOpt]:
        """The network as it came, and its optimizer wrapped into a `FreezeOpt` with groups and strategy.

        What the optimizer holds beside the network's stages, such as the parameters of a loss, is always trained.
        """
        check_kind("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
        groups = self.split_parameters_groups(network, self.param_groups)
        if not self.faithful:
            staged = {id(p) for p in groups[0]}
            others: list[Any] = [p for p in parameters_of(optimizer) if id(p) not in staged]
            groups = [group + others for group in groups]
        strategy = self.generate_freeze_index_sequence(len(groups), self.freeze_type, self.freeze_p, self.total_steps)
        return network, FreezeOpt(optimizer, groups, strategy or None, faithful=self.faithful)


def _check_strategy(groups: int, kind: int, share: float, steps: int) -> None:
    check_count("param_groups", groups)
    check_count("total_steps", steps, low=0)
    if groups > 1 and kind not in TYPES:
        raise ValueError(f"freeze_type must be 0 (continuous) or 1 (interleaved), got {kind!r}")
    check_number("freeze_p", share, low=-math.inf)
    if not 0 <= share <= 1:
        raise ValueError(f"freeze_p is the share of steps without freezing and must be in [0, 1], got {share}")


def full_steps(groups: int, share: float) -> int:
    """How many full steps begin a cycle of type 0; they are whole, so their share is not quite `share` (below 1).

    MindSpore's arithmetic: G = 10 and p = 0.7 give 20 full steps because 6.3 / 0.3 is 20.999...
    """
    return int(np.floor(share * (groups - 1) / (1 - share)) + 0.5)


def _continuous(groups: int, share: float, length: int) -> list[int]:
    """Whole cycles of z full steps and the indices 1..G-1, at least `length` steps."""
    cycle = [0] * full_steps(groups, share) + list(range(1, groups))
    return cycle * -(-length // len(cycle))


def _interleaved(
    groups: int, share: float, length: int, draw: np.random.RandomState | np.random.Generator
) -> list[int]:
    """Frozen steps as soon as their share falls below 1 - p; index v drawn with probability ~ G - v."""
    indices = list(range(groups - 1, 0, -1))
    odds = np.arange(1, groups) / sum(range(1, groups))
    sequence, full, frozen = [0], 1, 0
    while len(sequence) < length:
        if frozen / (full + frozen) < 1 - share:
            sequence.append(int(draw.choice(indices, p=odds)))
            frozen += 1
        else:
            sequence.append(0)
            full += 1
    return sequence
