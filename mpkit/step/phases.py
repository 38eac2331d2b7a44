"""What a training step does with gradients, as functions."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of the parameters that the loss reached; none where a whole optimizer rests."""
    return [p.grad for p in parameters if p.grad is not None]


def checked_loss(loss: object) -> Tensor:
    """`loss` when a backward pass can start from it.

    Raises:  TypeError if it is no tensor of real numbers; ValueError if it is not a scalar or depends on no parameter.
    """
    if not isinstance(loss, Tensor) or loss.is_complex():
        came = f"a training step needs the loss as one real tensor, got {getattr(loss, 'dtype', type(loss).__name__)}"
        raise TypeError(f"{came}; wrap the network with WithLossCell(network, loss_fn) or return the loss alone")
    if loss.dim() != 0:
        raise ValueError(f"a training step needs a scalar loss, got shape {tuple(loss.shape)}; take loss.mean()")
    if not loss.requires_grad:
        raise ValueError("the loss has no gradient: all parameters are frozen, or it is under no_grad() or detached")
    return loss


def widen_(parameters: Iterable[Tensor]) -> None:
    """Let autograd sum the gradients of 16-bit parameters in float32; they must have none yet.

    Sharded ones (FSDP's) stay as they are: it is FSDP that gives them their gradients, in their own dtype.
    """
    for p in parameters:
        if p.dtype.itemsize < 4 and type(p) in (Tensor, nn.Parameter):
            p.grad_dtype = torch.float32


def narrow_(parameters: Iterable[Tensor]) -> None:
    """The reverse of `widen_`: each sum is rounded once, to what its parameter is."""
    for p in parameters:
        if p.dtype.itemsize < 4 and p.grad_dtype != p.dtype:
            grad, p.grad = p.grad, None
            p.grad_dtype = p.dtype
            p.grad = None if grad is None else grad.to(p.dtype)


def clip_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the unscaled gradients so that their joint L2 norm is at most `max_norm`; returns the norm before.

    No host read; with a non-finite gradient the result is NaN, and the step is skipped anyway. The norm of 16-bit
    gradients is computed in float32: in float16 it could be inf, and they would all become 0. Sparse gradients count
    with the values of their rows.
    """
    held = [_strided(p) for p in parameters if p.grad is not None]
    grads = gradients_of(held)
    # where the norm of one is taken first, it counts by that
    total = nn.utils.get_total_norm([g.norm(dtype=torch.float32) if g.dtype.itemsize < 4 else g for g in grads])
    nn.utils.clip_grads_with_norm_(held, max_norm, total)
    return total


def _strided(p: Tensor) -> Tensor:
    """`p`, or a stand-in whose gradient is the values of p's sparse one."""
    if p.grad is None or not p.grad.is_sparse:
        return p
    p.grad = p.grad.coalesce()
    stand_in = torch.empty_like(p.grad._values())
    stand_in.grad = p.grad._values()
    return stand_in


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether `optimizer.step` reads `found_inf` itself, so that nobody has to wait for it on the host.

    torch's fused SGD does, but leaves its momentum buffers uninitialised when its very first step is skipped (seen in
    torch 2.13): the next step then adds memory garbage to the weights. The buffers are therefore set to zero here,
    which makes the first applied step the same; with dampening it would not be, and the host decides.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if type(optimizer) is not SGD:
        return True
    if any(group["dampening"] for group in optimizer.param_groups):
        return False
    for group in optimizer.param_groups:
        for p in group["params"] if group["momentum"] else ():
            if p.grad is not None and optimizer.state[p].get("momentum_buffer") is None:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return True


def device_of(parameters: Iterable[Tensor]) -> torch.device:
    """Where the parameters live: the device of the first."""
    return next((p.device for p in parameters), torch.device("cpu"))
