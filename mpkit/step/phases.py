"""The phases of a training step as functions, for the cells and for loops written by hand."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that `optimizer` updates, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients that exist; a parameter that the loss did not reach has none."""
    return [p.grad for p in parameters if p.grad is not None]


def checked_loss(loss: object) -> Tensor:
    """`loss` when a backward pass can start from it.

    Raises:  TypeError if it is no floating tensor; ValueError if it is not a scalar or depends on no parameter.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"a training step needs the loss as one tensor, got {type(loss).__name__}; "
            "wrap the network with WithLossCell(network, loss_fn) or return the loss alone"
        )
    if loss.dim() != 0:
        raise ValueError(
            f"a training step needs a scalar loss, got shape {tuple(loss.shape)}; reduce it with loss.mean()"
        )
    if not loss.requires_grad:
        raise ValueError(
            "the loss has no gradient: it depends on no parameter with requires_grad=True; check that the parameters "
            "are not all frozen and that the forward pass is not under torch.no_grad() or detached"
        )
    return loss


def backward(loss: Tensor, scale: Tensor) -> None:
    """Add the gradients of `loss * scale` to the parameters' `grad`; the loss itself is not multiplied.

    The scale is cast to the loss's dtype first, so a float16 loss with a scale above 65504 starts from inf.
    Source:  MindSpore nn.TrainOneStepWithLossScaleCell (`sens` seeds the gradient).
    """
    loss.backward(scale.detach().to(loss.dtype).reshape(()))


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether `optimizer.step` reads `found_inf` itself, so that nobody has to wait for it on the host.

    torch's fused SGD does, but leaves its momentum buffers uninitialised when its very first step is skipped (seen in
    torch 2.13). They are therefore set to zero here, which makes the first applied step the same; with dampening it
    would not be, and the first steps are then decided on the host.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if type(optimizer) is not SGD:
        return True
    ready = True
    for group in optimizer.param_groups:
        if group["momentum"] == 0:
            continue
        for p in group["params"]:
            if p.grad is not None and optimizer.state[p].get("momentum_buffer") is None:
                if group["dampening"] == 0:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
                else:
                    ready = False
    return ready


def apply_(optimizer: Optimizer, found_inf: Tensor) -> None:
    """Run `optimizer.step()` unless `found_inf` says that a gradient was not finite.

    No host read when the optimizer can skip on the device; else `found_inf` is read once.
    """
    if not skips_on_device(optimizer):
        if not found_inf.item():
            optimizer.step()
        return
    optimizer.grad_scale = None  # type: ignore[attr-defined]  # the gradients are unscaled already
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
