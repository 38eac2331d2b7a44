"""Gradient centralization: the mean of each output's gradient is taken away before the update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mpkit.boost.bn_rules import CONVOLUTIONS
from mpkit.boost.less_bn import NormalizedLinear
from mpkit.optimizers import Optimizer as OwnOptimizer
from mpkit.optimizers import centralized

__all__ = ["centralize_gradients", "is_centralized"]

NORMALIZATIONS = (nn.LayerNorm, nn.RMSNorm)  # those whose weights can have more than one axis


def is_centralized(owner: nn.Module | None, parameter: Tensor) -> bool:
    """Whether gradient centralization applies to `parameter`, which `owner` holds directly.

    Left out: parameters with fewer than two axes (biases, scales, shifts), everything in a normalisation layer,
    weights of grouped convolutions (depthwise or not), and the normalised last FC.
    Source:  MindSpore boost.OptimizerProcess.build_gc_params_group, by module instead of by name: a PyTorch
             BatchNorm calls its parameters `weight` and `bias`, which a rule on "gamma" and "beta" would miss.
    """
    if parameter.ndim < 2 or isinstance(owner, (*NORMALIZATIONS, NormalizedLinear)):
        return False
    return not (isinstance(owner, CONVOLUTIONS) and owner.groups > 1)


def centralize_gradients(optimizer: Optimizer) -> RemovableHandle:
    """Centralize `p.grad` before each step of any `torch.optim` optimizer, in its groups that ask for it.

    A group asks with `group["grad_centralization"]`: True, or the number that the size of axis 1 must be a multiple
    of (16 reproduces the tiling rule of MindSpore's kernel, 1 means True). mpkit's own optimizers read that key
    themselves and need no hook. As in MindSpore the weight decay that an optimizer adds to the gradient is
    centralized with it; decoupled decay (AdamW) is left alone, and so are sparse gradients.

    Returns:  a handle whose `remove()` takes the hook away again.
    Source:   Yong et al. 2020, arXiv:2004.01461, equation 1.

    >>> weight = nn.Parameter(torch.zeros(1, 2))
    >>> weight.grad = torch.tensor([[1.0, 3.0]])
    >>> sgd = torch.optim.SGD([{"params": [weight], "grad_centralization": True}], lr=1.0)
    >>> _ = centralize_gradients(sgd), sgd.step()
    >>> weight.tolist()
    [[1.0, -1.0]]
    """
    hooks = optimizer._optimizer_step_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is _centralize]:
        del hooks[key]  # asked for twice is asked for once
    return optimizer.register_step_pre_hook(_centralize)


def centralize_where_marked(optimizer: Optimizer) -> None:
    """`centralize_gradients` if a group asks for it and the optimizer does not read that key itself.

    A copied or unpickled torch optimizer has its groups, and their marks, but none of its hooks.
    """
    marked = any(group.get("grad_centralization") for group in optimizer.param_groups)
    if marked and not isinstance(optimizer, OwnOptimizer):
        centralize_gradients(optimizer)


def _centralize(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before `step()` the gradients; for `step(closure)` those that the closure makes."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return _centralize_(optimizer)

    def centralizing() -> object:
        loss = closure()
        _centralize_(optimizer)
        return loss

    return args[:1], {**kwargs, "closure": centralizing}


@torch.no_grad()
def _centralize_(optimizer: Optimizer) -> None:
    scale = getattr(optimizer, "grad_scale", None)  # torch.amp leaves the gradients of fused optimizers scaled
    for group in optimizer.param_groups:
        multiple = int(group.get("grad_centralization", 0))
        for p in group["params"] if multiple else ():
            if p.grad is None or p.grad.is_sparse:
                continue
            decay = p * (_coupled_decay(optimizer, group) * (1.0 if scale is None else scale))
            p.grad.copy_(centralized(p.grad + decay, multiple) - decay)


def _coupled_decay(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """The weight decay that `optimizer` will add to the gradient; 0 where it shrinks the weight instead.

    An optimizer that maximizes turns the gradient round first, so it takes its decay from what stands there.
    """
    decoupled = isinstance(optimizer, torch.optim.AdamW | torch.optim.Adafactor | torch.optim.Muon)
    if decoupled or group.get("decoupled_weight_decay"):
        return 0.0
    return float(group.get("weight_decay", 0.0)) * (-1 if group.get("maximize") else 1)
