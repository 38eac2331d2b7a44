"""What a training step does with gradients, as functions."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from mpkit.arguments import check_number
from mpkit.optimizers.arguments import parameters_of


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of the parameters that the loss reached; none where a whole optimizer rests."""
    return [p.grad for p in parameters if p.grad is not None]


def need_gradients(optimizers: Iterable[Optimizer]) -> None:
    """Raise RuntimeError, with their names, if the loss reached no parameter of these optimizers."""
    names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
    raise RuntimeError(
        f"no parameter of the optimizer received a gradient ({names}), so nothing would be trained; build the "
        "optimizer from the parameters of the network that this step runs, not of an earlier one"
    )


def checked_loss(loss: object) -> Tensor:
    """`loss` when a backward pass can start from it.

    Raises:  TypeError if it is no tensor of real numbers; ValueError if it is not a scalar or depends on no parameter.
    """
    if not isinstance(loss, Tensor):
        came = f"a training step needs the loss as one tensor, got {type(loss).__name__}"
        raise TypeError(f"{came}; wrap the network with WithLossCell(network, loss_fn) or return the loss alone")
    if loss.is_complex():
        raise TypeError(f"a training step needs a real loss, got {loss.dtype}; take loss.abs() or loss.real")
    if loss.dim() != 0:
        raise ValueError(f"a training step needs a scalar loss, got shape {tuple(loss.shape)}; take loss.mean()")
    if not loss.requires_grad:
        raise ValueError(
            "the loss has no gradient: it depends on no parameter with requires_grad=True; check that the parameters "
            "are not all frozen and that the forward pass is not under torch.no_grad() or detached"
        )
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
    if not any(g.dtype.itemsize < 4 for g in grads):
        return nn.utils.clip_grad_norm_(held, max_norm)
    wide = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in grads]
    total = torch.linalg.vector_norm(torch.stack([norm.to(wide[0].device) for norm in wide]))
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
    which makes the first applied step the same; with dampening it would not be, and that step is decided on the host.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if type(optimizer) is not SGD:
        return True
    ready = True
    for group in optimizer.param_groups:
        for p in group["params"] if group["momentum"] else ():
            if p.grad is not None and optimizer.state[p].get("momentum_buffer") is None:
                if group["dampening"] == 0:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
                else:
                    ready = False
    return ready


def apply_(optimizer: Optimizer, found_inf: Tensor | None) -> None:
    """Run `optimizer.step()` unless `found_inf` says that a gradient was not finite; None: nobody looked.

    No host read when the optimizer can skip on the device; else `found_inf` is read once.
    Raises:  RuntimeError if there is no gradient at all.
    """
    if all(p.grad is None for p in parameters_of(optimizer)):
        need_gradients([optimizer])
    if found_inf is None or not skips_on_device(optimizer):
        if found_inf is None or not found_inf.item():
            optimizer.step()
        return
    optimizer.grad_scale = None  # type: ignore[attr-defined]  # the gradients are unscaled already
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


def check_norm(name: str, value: object) -> float:
    """Raise unless `value` is a number above 0; inf is a norm that clips nothing."""
    if isinstance(value, float) and value == math.inf:
        return value
    return check_number(name, value, open_low=True)


def device_of(parameters: Iterable[Tensor]) -> torch.device:
    """Where the parameters live: the device of the first."""
    return next((p.device for p in parameters), torch.device("cpu"))
