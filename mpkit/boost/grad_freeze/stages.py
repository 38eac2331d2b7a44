"""The stages of a network, in the order of its layers, and what freezing the first of them saves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from mpkit.arguments import check_count, check_kind, check_number


def stages_by_module(net: nn.Module) -> list[list[nn.Parameter]]:
    """The trainable parameters in definition order, cut before each module that holds a weight of two axes or more."""
    check_kind("net", net, nn.Module, "an nn.Module")
    stages: list[list[nn.Parameter]] = []
    seen: set[int] = set()
    closed = True  # the stage at the end has its weight, so another weight opens a new one
    for module in net.modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        seen.update(map(id, own))
        weighty = any(p.ndim >= 2 for p in own)
        if own and (not stages or (weighty and closed)):
            stages.append([])
            closed = False
        if own:
            stages[-1] += own
        closed = closed or weighty
    return stages


def stages_by_name(net: nn.Module) -> list[list[nn.Parameter]]:
    """MindSpore's rule: "bn" or "bias" in the name joins the stage, any other closes it once it holds three."""
    check_kind("net", net, nn.Module, "an nn.Module")
    stages: list[list[nn.Parameter]] = [[]]
    for name, p in net.named_parameters():
        if not p.requires_grad:
            continue
        if "bn" not in name and "bias" not in name and len(stages[-1]) >= 3:
            stages.append([])
        stages[-1].append(p)
    return [stage for stage in stages if stage]


MOST_GROUPS = 2**20


def index_probabilities(groups: int, freeze_type: int) -> list[float]:
    """P(v) of v = 1..G-1 on a frozen step: uniform for type 0, (G - v) / (G (G-1) / 2) for type 1."""
    if check_count("groups", groups, low=2) > MOST_GROUPS:
        raise ValueError(f"groups must be at most {MOST_GROUPS}, got an int of {groups.bit_length()} bits")
    if check_count("freeze_type", freeze_type, low=0) > 1:
        raise ValueError(f"freeze_type must be 0 (continuous) or 1 (interleaved), got {freeze_type!r}")
    if freeze_type == 0:
        return [1 / (groups - 1)] * (groups - 1)
    return [(groups - v) / (groups * (groups - 1) / 2) for v in range(1, groups)]


def expected_saving(costs: Sequence[float], groups: int, freeze_type: int, full_step_fraction: float) -> float:
    """Share of the backward work that freezing saves on average: S = (1-p) sum_v P(v) s_v.

    Args:
        costs:  backward cost of each stage, any unit, in definition order; s_v is the share of the first
                v * (stages // groups) of them.

    >>> round(expected_saving([1.0] * 10, 10, 1, 0.7), 4)   # (1 - 0.7) * (10 + 1) / (3 * 10)
    0.11
    """
    check_kind("costs", costs, (list, tuple), "a list of costs, one of each stage")
    check_count("groups", groups)
    check_number("full_step_fraction", full_step_fraction, high=1.0 + 2.0**-52)
    total = sum(check_number("each of costs", cost) for cost in costs)
    chances = index_probabilities(max(groups, 2), freeze_type)
    if groups < 2 or not total:  # nothing stands still, or nothing costs anything
        return 0.0
    stride = len(costs) // groups
    shares = (sum(costs[: v * stride]) / total for v in range(1, groups))
    return (1 - full_step_fraction) * sum(p * s for p, s in zip(chances, shares))


def stage_costs(net: nn.Module, *inputs: object) -> list[float]:
    """Multiply-adds that freezing each stage saves in a backward pass: for `expected_saving`.

    A layer costs its multiply-adds once for the gradient of its weight and once for that of its input, which the
    first layer does not need. Freezing stage k also spares the input gradient of the layer after it, so that one is
    counted there. Only Linear and convolution layers count.

    Args:
        inputs:  one forward pass is run on them, without gradients.
    """
    check_kind("net", net, nn.Module, "an nn.Module")
    stages = stages_by_module(net)
    place = {id(p): i for i, stage in enumerate(stages) for p in stage}
    work = [0.0] * (len(stages) + 1)

    def count(module: nn.Linear | _ConvNd, _inputs: object, output: Tensor) -> None:
        outputs = output.numel() / output.shape[0] / module.weight.shape[0]  # positions of one sample
        work[place[id(module.weight)]] += outputs * module.weight.numel()

    layers = [m for m in net.modules() if isinstance(m, nn.Linear | _ConvNd) and id(m.weight) in place]
    handles = [layer.register_forward_hook(count) for layer in layers]
    training = net.training
    try:
        with torch.no_grad():
            net.eval()(*inputs)
    finally:
        net.train(training)
        for handle in handles:
            handle.remove()
    return [weight + after for weight, after in pairwise(work)]
