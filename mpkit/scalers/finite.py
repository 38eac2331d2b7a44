"""Are the gradients finite, and gradients divided by the scale: in as few kernels as torch allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpkit.arguments import check_kind

_IN_KERNEL = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_NO_GRADIENTS = (
    "there is no gradient to look at: every gradient is missing. Call backward on a loss that depends on the "
    "parameters, and pass their .grad"
)


@torch.no_grad()
def all_finite(tensors: Sequence[Tensor | None]) -> Tensor:
    """True when every element of every tensor is finite: tuple or list of tensors -> 0-d bool, nothing is changed.

    Overflow and NaN are found, underflow is not. Integers and bools are finite, an empty tensor is too, a missing
    gradient (None) is passed over. The answer lies on the device of the first tensor; nothing is read on the host.

    Raises:  TypeError for a bare tensor or a nested container, ValueError when there is no tensor at all.
    Source:  MindSpore amp.all_finite; None and sparse gradients are mpkit's addition.

    >>> all_finite([torch.tensor([65504.0]).half(), torch.arange(3)])
    tensor(True)
    """
    check_kind("tensors", tensors, (list, tuple), "a tuple or list of tensors; for one x write [x]")
    present = [check_kind("each of tensors", t, Tensor, "a tensor or None") for t in tensors if t is not None]
    if not present:
        raise ValueError(f"all_finite needs at least one tensor; {_NO_GRADIENTS}")
    home = present[0].device
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for values in (_values(t) for t in present if t.is_floating_point() or t.is_complex()):
        if values.numel():
            groups.setdefault((values.device, values.dtype), []).append(values)
    # per device and dtype, since a kernel takes lists of one kind
    answers = [torch.stack(_extremes(group)).isfinite().all().to(home) for group in groups.values()]
    return torch.stack(answers).all() if answers else torch.ones((), dtype=torch.bool, device=home)


def _values(t: Tensor) -> Tensor:
    """What of a tensor can be non-finite: the summed values of a sparse one, real and imaginary parts of a complex."""
    if t.layout != torch.strided:
        t = (t.coalesce() if t.is_sparse else t).values()
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    return t.float() if t.dtype.itemsize == 1 else t  # 8-bit formats have no reductions of their own


def _extremes(group: list[Tensor]) -> list[Tensor]:
    """0-d tensors that are finite exactly when all of `group` is: extremes cannot overflow, and keep a NaN."""
    if group[0].device.type == "cpu":
        return [extreme for t in group for extreme in t.aminmax()]
    # on a GPU one launch for all of them; the largest magnitude overflows nowhere
    return list(torch._foreach_norm(group, math.inf))


def check_and_unscale_(
    grads: Sequence[Tensor | None], scale: Tensor, found_inf: Tensor | None = None, *, uniform: bool = False
) -> Tensor:
    """Divide gradients by `scale` in place and say whether any was not finite, in one kernel per dtype and device.

    Each gradient becomes g * cast(fl32(1 / scale), g.dtype): the reciprocal is rounded to float32, then to the
    gradient's dtype, then multiplied. Non-finite gradients are multiplied too.

    Args:
        grads:     gradients of any float dtypes and devices; sparse ones and None (missing) are fine.
        scale:     () or (1,) float tensor.
        found_inf: result of an earlier call to add to (several optimizers); changed in place.
        uniform:   the caller's promise that all gradients are dense and of one dtype and device: nothing is looked
                   at, which matters for a thousand small tensors.
    Returns: () float32, 1.0 or 0.0, on the scale's device. It is also 1.0 when the reciprocal is not finite (a scale
             of 0, or too small), which would turn finite gradients into inf or NaN unnoticed. What is tested are the
             gradients before the division: with a scale below 1, one that overflows by the division is not reported.
    Raises:  TypeError for a scale that is no tensor, and for gradients that are complex, integers or of 8-bit formats;
             ValueError when every gradient is missing. No gradient has been changed then.
    Source:  MindSpore amp's unscale for the rounding; the kernel is the one of torch.amp.GradScaler.
    """
    check_kind("grads", grads, (list, tuple), "a list of tensors")
    check_kind("scale", scale, Tensor, "a tensor, torch.tensor(...)")
    if scale.numel() != 1:
        raise ValueError(f"scale must be one number, got shape {tuple(scale.shape)}")
    check_kind("found_inf", found_inf, Tensor, "the result of an earlier call", optional=True)
    if found_inf is not None and not found_inf.is_floating_point():
        raise TypeError(f"found_inf must be the float32 result of an earlier call, got {found_inf.dtype}")
    # the reciprocal of a scale of another dtype is a float32 too, as MindSpore has it
    inverse = scale.detach().reciprocal().float()
    found = inverse.new_zeros(())
    try:  # most often all are dense and alike
        ((dtype, _),) = {(g.dtype, g.device) for g in (grads[:1] if uniform else grads)}  # type: ignore[union-attr]
        _divide(grads, found, _cast(inverse, dtype))
    except (AttributeError, RuntimeError, TypeError, ValueError):  # refused before anything was changed
        found = _by_group(grads, inverse)
    return found if found_inf is None else torch.maximum(found_inf, found, out=found_inf)


def _divide(grads: Any, found: Tensor, inverse: Tensor) -> None:
    """Multiply one group of gradients; `found` becomes 1 where one of them, or `inverse`, is not finite.

    The kernel that is still in the cache tests the reciprocal too, sooner than operations of its own would, and
    leaves the square of it in `inverse`.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)
    torch._amp_foreach_non_finite_check_and_unscale_([inverse], found, inverse)


def _cast(inverse: Tensor, dtype: torch.dtype) -> Tensor:
    return inverse.to(dtype).float() if dtype in (torch.float16, torch.bfloat16) else inverse


def _by_group(grads: Sequence[Tensor | None], inverse: Tensor) -> Tensor:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    summed = []
    for g in grads:
        if g is None:
            continue
        check_kind("each of grads", g, Tensor, "a tensor or None")
        if g.is_sparse:
            if not g.is_coalesced():  # entries of one index are added later, and the sum may overflow
                summed.append(g.coalesce().values())
            # only the stored values: the rest are zeros, finite at any scale
            g = g._values()
        if g.dtype not in _IN_KERNEL:
            raise TypeError(f"a gradient must be float16, bfloat16, float32 or float64, got {g.dtype}")
        groups.setdefault((g.device, g.dtype), []).append(g)
    if not groups:
        raise ValueError(_NO_GRADIENTS)
    found = [all_finite(summed).logical_not().float()] if summed else []
    for (device, dtype), group in groups.items():
        # a copy for each group, because the kernel squares what it is given
        found.append(torch.zeros((), dtype=torch.float32, device=device))
        _divide(group, found[-1], _cast(inverse, dtype).to(device, copy=True))
    return torch.stack([f.to(inverse.device) for f in found]).amax()
