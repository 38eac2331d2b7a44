"""What each module loses beside float32: the relative error of its output, and how many of its rows stay distinct."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_ROWS, _VALUES = 2**6, 2**24  # of an output that are looked at (of more rows some are alike); one with more is left out
_ERROR = 0.1  # relative error from which an output is lost, in a format that could do better
_FEW_ROWS = 8
_CHANCE = 1e-4  # how much smaller than its inputs an output is that is left of them by chance
_OWN = 4.0  # how many times more a module must lose than came in


@dataclass(frozen=True)
class ModuleLoss:
    """What one call of a module lost: `error` relative to float32 (length of the difference by length), and `rows`
    distinct ones left of `rows_float32`."""

    module: str
    error: float
    rows: int
    rows_float32: int

    def __str__(self) -> str:
        rows = f", {self.rows} of {self.rows_float32} distinct rows" if self.rows < self.rows_float32 else ""
        return f"{self.module}: relative error {self.error:.2g}{rows}"


@dataclass(frozen=True)
class Call:
    """What went into and came out of one call of a module, in float32."""

    module: str
    kind: type[nn.Module]
    given: list[Tensor]
    made: list[Tensor]


def module_losses(full: list[Call], low: list[Call], step: float) -> tuple[tuple[ModuleLoss, ...], ModuleLoss | None]:
    """Every call's loss, and the first that lost more than its inputs had lost; `step` is the format's eps.

    Calls are compared in order; two runs that called other modules are not compared.
    """
    if [call.module for call in full] != [call.module for call in low]:
        return (), None
    found: list[ModuleLoss] = []
    first = None
    for wide, narrow in zip(full, low):
        loss = _loss(wide.module, wide.made, narrow.made)
        if loss is None:
            continue
        found.append(loss)
        before = _loss(wide.module, wide.given, narrow.given) or ModuleLoss("", 0.0, 0, 0)
        small = _length(wide.made) <= _CHANCE * _length(wide.given)
        lost = loss.error > max(_ERROR, 16 * step, _OWN * before.error) and not small
        halved = _FEW_ROWS <= loss.rows_float32 >= 4 * loss.rows and 2 * before.rows >= before.rows_float32
        if first is None and (lost or halved) and not issubclass(wide.kind, nn.modules.dropout._DropoutNd):
            first = loss
    return tuple(found), first


def kept(nest: object) -> list[Tensor]:
    return [
        t.detach().float().clone()
        for t in tree_leaves(nest)
        if isinstance(t, Tensor) and t.is_floating_point() and t.layout == torch.strided and t.numel() <= _VALUES
    ]


def _loss(name: str, wide: list[Tensor], low: list[Tensor]) -> ModuleLoss | None:
    alike = [(a, b) for a, b in zip(wide, low) if a.shape == b.shape and a.numel()]
    pairs = [(a, b) for a, b in alike if bool(a.isfinite().all() and b.isfinite().all())]
    if not pairs:
        return None
    error = max(float((a - b).norm() / a.norm()) if bool(a.any()) else 0.0 for a, b in pairs)
    rows = [(_distinct(b), _distinct(a)) for a, b in pairs if a.dim() > 1]
    return ModuleLoss(name, error, *min(rows, key=lambda pair: pair[0] / pair[1], default=(0, 0)))


def _distinct(t: Tensor) -> int:
    return len(torch.unique(t.reshape(-1, t.shape[-1])[:_ROWS], dim=0))


def _length(tensors: list[Tensor]) -> float:
    return max((float(t.norm()) for t in tensors), default=0.0)
