"""Gradient freezing: which layers stand still on which step, and what that saves.

A network is cut into stages, a freeze group is the tail of them that still trains, a strategy is a group for each step.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.arguments import Count, Index, ShareOrOne, check_count, check_kind, check_number, checked
from mpkit.boost.bn_rules import CONVOLUTIONS
from mpkit.boost.freeze_opt import FreezeOpt, freeze_cell
from mpkit.optimizers.arguments import parameters_of

__all__ = ["FreezeOpt", "GradientFreeze", "expected_saving", "freeze_cell", "stage_costs"]


def check_type(name: str, value: object) -> int:
    """Raise unless `value` is a kind of strategy."""
    if check_count(name, value, low=0) > 1:
        raise ValueError(f"{name} must be 0 (continuous) or 1 (interleaved), got {value!r}")
    return int(value)  # type: ignore[call-overload]


FreezeType = Annotated[int, check_type]


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

    @checked
    def __init__(
        self,
        param_groups: Count,
        freeze_type: int,
        freeze_p: ShareOrOne | None = None,
        total_steps: Index | None = None,
        *,
        full_step_fraction: ShareOrOne | None = None,
        faithful: bool = False,
        seed: Index = 0,
    ) -> None:
        shares = [share for share in (freeze_p, full_step_fraction) if share is not None]
        if len(shares) != 1 or total_steps is None:
            raise TypeError("need total_steps and the share of full steps, as freeze_p or as full_step_fraction")
        if param_groups > 1:  # one group never freezes, and MindSpore takes any type for it
            check_type("freeze_type", freeze_type)
        self.param_groups, self.freeze_type, self.freeze_p = param_groups, freeze_type, shares[0]
        self.total_steps, self.faithful, self.seed = total_steps, faithful, seed

    @checked
    def split_parameters_groups(self, net: nn.Module, freeze_para_groups_number: Count) -> list[list[nn.Parameter]]:
        """One list per freeze group: list i holds the parameters that are trained when the index is i."""
        stages = stages_by_name(net) if self.faithful else stages_by_module(net)
        if not stages:
            raise ValueError(f"{type(net).__name__} has no trainable parameter to freeze or train")
        groups = freeze_para_groups_number
        if not self.faithful and groups > len(stages):
            warnings.warn(
                f"{groups} freeze groups were asked for and the network has {len(stages)} stages; taking "
                f"{len(stages)} groups. Give param_groups={len(stages)} or less.",
                stacklevel=3,
            )
            groups = len(stages)
        stride = len(stages) // groups
        return [[p for stage in stages[i * stride :] for p in stage] for i in range(groups)]

    @checked
    def generate_freeze_index_sequence(
        self, parameter_groups_number: Count, freeze_strategy: int, freeze_p: ShareOrOne, total_steps: Index
    ) -> list[int]:
        """The index of every step, exactly `total_steps` long unless `faithful`.

        Edges:   freeze_p = 1 never freezes; a step count of 0 gives [].
        """
        groups, length = parameter_groups_number, int(total_steps * 1.01) if self.faithful else total_steps
        if groups <= 1 or (check_type("freeze_type", freeze_strategy) == 0 and freeze_p == 1):
            return [0] * length
        if freeze_strategy == 0:  # whole cycles of full steps and the indices 1..G-1
            cycle = [0] * full_steps(groups, freeze_p) + list(range(1, groups))
            sequence = cycle * -(-length // len(cycle))
        else:
            draw = np.random.RandomState(self.seed) if self.faithful else np.random.default_rng(self.seed)
            sequence = _interleaved(groups, freeze_p, length, draw)
        return sequence if self.faithful else sequence[:length]

    @checked
    def freeze_generate(self, network: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, FreezeOpt]:
        """The network as it came, and its optimizer wrapped into a `FreezeOpt` with groups and strategy.

        What the optimizer holds beside the network's stages, such as the parameters of a loss, is always trained.
        """
        groups = self.split_parameters_groups(network, self.param_groups)
        if not self.faithful:
            staged = {id(p) for p in groups[0]}
            others: list[Any] = [p for p in parameters_of(optimizer) if id(p) not in staged]
            groups = [group + others for group in groups]
        strategy = self.generate_freeze_index_sequence(len(groups), self.freeze_type, self.freeze_p, self.total_steps)
        return network, FreezeOpt(optimizer, groups, strategy or None, faithful=self.faithful)


def full_steps(groups: int, share: float) -> int:
    """How many full steps begin a cycle of type 0; they are whole, so their share is not quite `share` (below 1).

    MindSpore's arithmetic: G = 10 and p = 0.7 give 20 full steps because 6.3 / 0.3 is 20.999...
    """
    return int(np.floor(share * (groups - 1) / (1 - share)) + 0.5)


def _interleaved(groups: int, share: float, length: int, draw: Any) -> list[int]:
    """Frozen steps as soon as their share falls below 1 - p; index v drawn with probability ~ G - v."""
    indices, odds = range(groups - 1, 0, -1), index_probabilities(groups, 1)[::-1]
    sequence, frozen = [0], 0
    while len(sequence) < length:
        freezes = frozen / len(sequence) < 1 - share
        sequence.append(int(draw.choice(indices, p=odds)) if freezes else 0)
        frozen += freezes
    return sequence


# --- stages


def stages_by_module(net: nn.Module) -> list[list[nn.Parameter]]:
    """The trainable parameters in definition order, cut before each module that holds a weight of two axes or more."""
    stages: list[list[nn.Parameter]] = [[]]
    named = [(name.rpartition(".")[0], p) for name, p in net.named_parameters() if p.requires_grad]
    for _, of_module in groupby(named, key=lambda pair: pair[0]):
        own = [p for _, p in of_module]
        if all(any(p.ndim >= 2 for p in part) for part in (own, stages[-1])):
            stages.append([])
        stages[-1] += own
    return [stage for stage in stages if stage]


def stages_by_name(net: nn.Module) -> list[list[nn.Parameter]]:
    """MindSpore's rule: a parameter joins the stage if it is called "bn" or "bias", or the stage has under three."""
    stages: list[list[nn.Parameter]] = [[]]
    for name, p in net.named_parameters():
        if p.requires_grad:
            if "bn" not in name and "bias" not in name and len(stages[-1]) >= 3:
                stages.append([])
            stages[-1].append(p)
    return [stage for stage in stages if stage]


# --- costs


def index_probabilities(groups: int, freeze_type: int) -> list[float]:
    """P(v) of v = 1..G-1 on a frozen step: uniform for type 0, (G - v) / (G (G-1) / 2) for type 1."""
    odds = [1 if freeze_type == 0 else groups - v for v in range(1, groups)]
    return [each / sum(odds) for each in odds]


@checked
def expected_saving(
    costs: Sequence[float], groups: Count, freeze_type: FreezeType, full_step_fraction: ShareOrOne
) -> float:
    """Share of the backward work that freezing saves on average: S = (1-p) sum_v P(v) s_v.

    Args:
        costs:  backward cost of each stage, any unit, in definition order; s_v is the share of the first
                v * (stages // groups) of them.

    >>> round(expected_saving([1.0] * 10, 10, 1, 0.7), 4)   # (1 - 0.7) * (10 + 1) / (3 * 10)
    0.11
    """
    check_kind("costs", costs, (list, tuple), "a list of costs, one of each stage")
    if groups > len(costs):
        raise ValueError(f"need a stage for each group: groups must be at most {len(costs)}, the number of costs")
    total, stride = sum(check_number("each of costs", cost) for cost in costs), len(costs) // groups
    shares = [sum(costs[: v * stride]) / (total or 1.0) for v in range(1, groups)]  # nothing costs: nothing is saved
    return (1 - full_step_fraction) * sum(p * s for p, s in zip(index_probabilities(groups, freeze_type), shares))


@checked
def stage_costs(net: nn.Module, *inputs: object) -> list[float]:
    """Multiply-adds that freezing each stage saves in a backward pass: for `expected_saving`.

    A layer costs its multiply-adds once for the gradient of its weight and once for that of its input, which the
    first layer does not need. Freezing stage k also spares the input gradient of the layer after it, so that one is
    counted there. Only Linear and convolution layers count.

    Args:
        inputs:  one forward pass of a copy is run on them, without gradients.
    """
    net = copy.deepcopy(net).eval()
    stages = stages_by_module(net)
    place = {id(p): i for i, stage in enumerate(stages) for p in stage}
    work = [0.0] * (len(stages) + 1)

    def count(module: Any, _inputs: object, output: Tensor) -> None:
        outputs = output.numel() / output.shape[0] / module.weight.shape[0]  # positions of one sample
        work[place[id(module.weight)]] += outputs * module.weight.numel()

    for layer in net.modules():
        if isinstance(layer, (nn.Linear, *CONVOLUTIONS)) and id(layer.weight) in place:
            layer.register_forward_hook(count)
    with torch.no_grad():
        net(*inputs)
    return [weight + after for weight, after in pairwise(work)]
