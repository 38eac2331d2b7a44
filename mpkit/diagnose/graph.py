"""What the autograd graph of a loss tells: the means it is a sum of, and the numbers it is multiplied by."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor
from torch.autograd.graph import Node

_PASSED = (
    "Add",
    "Sub",
    "Neg",
    "Clone",
    "ToCopy",
    "Alias",
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Squeeze",
    "Unsqueeze",
)
_PRODUCTS = ("Mul", "Div", "ForeachMulScalar", "ForeachDivScalar")
_MEAN = 1  # what torch stores as the reduction of a loss


def terms(loss: Tensor) -> Iterator[tuple[float, bool]]:
    """(factor in front of it, is it a mean) of every term that `loss` is a sum of, as far as only numbers multiply it.

    >>> import torch
    >>> x = torch.ones(4, requires_grad=True)
    >>> list(terms(x.mean() / 4 + 3 * torch.nn.functional.mse_loss(x, x * 0))), list(terms(x.sum() * 2))
    ([(0.25, True), (3.0, True)], [(2.0, False)])
    """
    todo: list[tuple[Node | None, float]] = [(loss.grad_fn, 1.0)]
    while todo:
        node, factor = todo.pop(0)
        name = _name(node)
        by = _number(node) if node is not None and name in _PRODUCTS else None
        if by:
            factor = factor / by if "Div" in name else factor * by
        if by or name in _PASSED:
            todo += [(before, factor) for before, _ in (node.next_functions if node else ()) if before is not None]
        else:
            yield factor, name == "Mean" or getattr(node, "_saved_reduction", None) == _MEAN


def nodes(losses: list[Tensor]) -> Iterator[Node]:
    """Every node of the graph that `losses` come from, once."""
    todo, seen = [loss.grad_fn for loss in losses], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [before for before, _ in node.next_functions]


def divides_by(node: Node | None, number: float) -> bool:
    """Whether this node divides by `number`, or multiplies by its inverse."""
    name = _name(node)
    by = _number(node) if node is not None and name in _PRODUCTS else None
    return by is not None and by != 0 and math.isclose(by if "Div" in name else 1 / by, number, rel_tol=1e-6)


def _name(node: Node | None) -> str:
    name: str = "" if node is None else node.name()
    return name.rstrip("0123456789").removesuffix("Backward")


def _number(node: Node) -> float | None:
    """The one number that went into a product or quotient, if the other operand is no part of the graph."""
    if sum(before is not None for before, _ in node.next_functions) != 1:
        return None
    for which in ("other", "self", "scalar"):
        try:
            saved = getattr(node, f"_saved_{which}", None)
        except RuntimeError:  # an earlier backward pass has freed it
            return None
        if isinstance(saved, int | float) or (isinstance(saved, Tensor) and saved.numel() == 1):
            return float(saved)
    return None
