"""Why steps are skipped again and again: the scale, the weights, or the model and its data."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def nonfinite_parameters(network: nn.Module) -> list[str]:
    """Names of the parameters and buffers that hold inf or NaN. Reads the device once."""
    named = [
        (name, tensor)
        for name, tensor in (*network.named_parameters(), *network.named_buffers())
        if tensor.is_floating_point() and tensor.numel()
    ]
    if not named:
        return []
    bad = torch.stack([(~tensor.detach().isfinite()).any() for _, tensor in named]).tolist()
    return [name for (name, _), is_bad in zip(named, bad) if is_bad]


def why_skipped(network: nn.Module, scale: Tensor | float, floor: float = 1.0) -> str:
    """One sentence on a step that overflowed at `scale`: what is wrong and what to do. Reads the device.

    Args:
        network:  the network that was trained, weights as after the step.
        scale:    the loss scale used in the step.
        floor:    the scale below which the rule does not go.
    """
    names = nonfinite_parameters(network)
    value = float(scale)
    if names:
        return (
            f"{names[0]!r} and {len(names) - 1} more tensors of the network hold"
            if len(names) > 1
            else f"{names[0]!r} of the network holds"
        ) + (
            " inf or NaN, so every gradient does: no loss scale can repair weights; go back to a checkpoint from "
            "before, then lower the learning rate or look for a batch with inf in it"
        )
    if math.isinf(value):
        return (
            "the loss scale itself is inf, so every gradient is: its rule grew past the largest float32 and cannot "
            "come back; set a finite scale, and give the rule a cap or a longer window"
        )
    if value <= floor:
        return (
            f"gradients overflow although the loss scale is at its floor of {floor:g}: the scale is not the cause; "
            "check the batch for inf and NaN, lower the learning rate, or keep the layer that overflows in float32 "
            "(mpkit.diagnose.diagnose names it)"
        )
    return (
        f"gradients overflowed at a loss scale of {value:g}; the scale now backs off, and a few such steps while it "
        "searches its ceiling are normal"
    )
