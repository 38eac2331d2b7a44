"""What each module loses beside float32: the relative error of its output, and how many of its rows stay distinct."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_ROWS, _VALUES = 2**12, 2**24  # of an output that are looked at; one with more values is left out
_ERROR = 0.1  # relative error from which an output is lost, in a format that could do better
_FEW_ROWS = 8
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


class Outputs:
    """While entered, keeps what went into and came out of every call of a module, in float32."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.calls: list[tuple[str, type[nn.Module], list[Tensor], list[Tensor]]] = []

    def __enter__(self) -> None:
        self._hooks = [
            module.register_forward_hook(self._keep(name or "(network)"), with_kwargs=True)
            for name, module in self.network.named_modules()
        ]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, kwargs: object, out: object) -> None:
            self.calls.append((name, type(module), _kept((args, kwargs)), _kept(out)))

        return hook


def module_losses(full: Outputs, low: Outputs, step: float) -> tuple[tuple[ModuleLoss, ...], ModuleLoss | None]:
    """Every call's loss, and the first that lost more than its inputs had lost; `step` is the format's eps.

    Calls are compared in order; two runs that called other modules are not compared.
    """
    if [call[0] for call in full.calls] != [call[0] for call in low.calls]:
        return (), None
    found: list[ModuleLoss] = []
    first = None
    for (name, kind, wide_in, wide_out), (_, _, low_in, low_out) in zip(full.calls, low.calls):
        loss = _loss(name, wide_out, low_out)
        if loss is None:
            continue
        found.append(loss)
        before = _loss(name, wide_in, low_in)
        error = before.error if before else 0.0
        rows_kept = before is None or 2 * before.rows >= before.rows_float32
        large = max(_ERROR, 16 * step)
        lost = loss.error > large and loss.error > _OWN * error and _length(wide_out) > 1e-3 * _length(wide_in)
        merged = loss.rows_float32 >= _FEW_ROWS and loss.rows <= loss.rows_float32 / 2 and rows_kept
        if first is None and (lost or merged) and not issubclass(kind, nn.modules.dropout._DropoutNd):
            first = loss
    return tuple(found), first


def _kept(nest: object) -> list[Tensor]:
    return [
        t.detach().float().clone()
        for t in tree_leaves(nest)
        if isinstance(t, Tensor) and t.is_floating_point() and t.layout == torch.strided and t.numel() <= _VALUES
    ]


def _pairs(wide: list[Tensor], low: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for a, b in zip(wide, low):
        if a.shape == b.shape and a.numel() and bool(a.isfinite().all()) and bool(b.isfinite().all()):
            yield a, b


def _loss(name: str, wide: list[Tensor], low: list[Tensor]) -> ModuleLoss | None:
    pairs = list(_pairs(wide, low))
    if not pairs:
        return None
    errors = [float((a - b).norm() / a.norm()) if bool(a.any()) else 0.0 for a, b in pairs]
    rows = [(_distinct(b), _distinct(a)) for a, b in pairs if a.dim() > 1 and a.shape[-1] > 1]
    left, there = min(rows, key=lambda pair: pair[0] / max(1, pair[1]), default=(0, 0))
    return ModuleLoss(name, max(errors), left, there)


def _distinct(t: Tensor) -> int:
    return len(torch.unique(t.reshape(-1, t.shape[-1])[:_ROWS], dim=0))


def _length(tensors: list[Tensor]) -> float:
    return max((float(t.norm()) for t in tensors), default=0.0)
