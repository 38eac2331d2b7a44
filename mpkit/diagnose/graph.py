"""What the autograd graph of a loss tells: the means it is a sum of, and the numbers it is multiplied by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

_PASSED = "Add", "Sub", "Neg", "Clone", "ToCopy", "Alias", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze"
_MEAN = 1  # what torch stores as the reduction of a loss


def terms(loss: Tensor) -> Iterator[tuple[float, bool]]:
    """(factor in front of it, is it a mean) of every term that `loss` is a sum of, as far as only numbers multiply it.

    >>> import torch
    >>> x = torch.ones(4, requires_grad=True)
    >>> list(terms(x.mean() / 4 + 3 * torch.nn.functional.mse_loss(x, x * 0))), list(terms(x.sum() * 2))
    ([(0.25, True), (3.0, True)], [(2.0, False)])
    """
    todo = [(loss.grad_fn, 1.0)]
    for node, factor in todo:  # it grows
        name = _name(node)
        by = 1.0 if name in _PASSED else _factor(node)
        if node is not None and by is not None:
            todo += [(before, factor * by) for before, _ in node.next_functions if before is not None]
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


def note(key: str, value: object, tensors: Iterable[Tensor]) -> None:
    """Write into the metadata of the nodes that made these tensors, for `noted`."""
    for t in tensors:
        if t.grad_fn is not None:
            t.grad_fn.metadata[key] = value  # type: ignore[index]  # a dict, which torch annotates as a method


def noted(key: str, graph: Iterable[Node]) -> Any:
    """What stands in the metadata of the first of these nodes that has it, else None."""
    return next((node.metadata[key] for node in graph if key in node.metadata), None)  # type: ignore[index, operator]


def divides_by(node: Node | None, number: float) -> bool:
    """Whether this node divides by `number`, or multiplies by its inverse."""
    by = _factor(node)
    return by is not None and math.isclose(by * number, 1, rel_tol=1e-6)


def _name(node: Node | None) -> str:
    name: str = "" if node is None else node.name()
    return name.rstrip("0123456789").removesuffix("Backward")


def _factor(node: Node | None) -> float | None:
    """What a product or quotient with one number multiplies by, not 0; None if it is none."""
    name = _name(node).removeprefix("Foreach").removesuffix("Scalar")
    if node is None or name not in ("Mul", "Div") or sum(before is not None for before, _ in node.next_functions) != 1:
        return None
    for which in ("other", "self", "scalar"):
        try:
            saved = getattr(node, f"_saved_{which}", None)
        except RuntimeError:  # an earlier backward pass has freed it
            return None
        if (isinstance(saved, int | float) or (isinstance(saved, Tensor) and saved.numel() == 1)) and saved:
            return 1 / float(saved) if name == "Div" else float(saved)
    return None
