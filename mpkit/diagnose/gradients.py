"""What backward passes tell: the gradients of one optimizer between the calls of a training loop, what reached them
and what changed them; the graph of a loss, the means it is a sum of, and the numbers it is multiplied by."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.autograd.graph import Node
from torch.optim import Optimizer

from mpkit.diagnose.listening import scale_of
from mpkit.optimizers.arguments import parameters_of

_PASSED = "Add", "Sub", "Neg", "Clone", "ToCopy", "Alias", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze"
_MEAN = 1  # what torch stores as the reduction of a loss
alike = partial(math.isclose, rel_tol=1e-5)  # up to what float32 rounds
_VALUES = 2**12  # of a gradient that are looked at: enough for a change of all, at a price that no step notices


@dataclass(frozen=True)
class Pass:
    """A backward pass.

    site:    where the program stood, with all callers: the micro-batches of one loop have the same.
    scaler:  whose product the loss was, if any.
    factor:  by which number the reader multiplied the loss.
    means:   the factors of the means in the loss; () if they say nothing about micro-batches.
    low:     it was computed in float16.
    """

    site: int
    scaler: GradScaler | None
    factor: float
    means: tuple[float, ...]
    low: bool


class Watched:
    """The gradients of one optimizer, and what happened to them since they were cleared."""

    def __init__(self, optimizer: Optimizer, name: str, scaler: GradScaler | None) -> None:
        self.optimizer, self.name, self.first_scaler = optimizer, name, scaler
        self.told: set[str] = set()  # its mistakes
        self.applied: bool  # whether its own step ran in the last one of a scaler
        self.waits_for: GradScaler | None = None  # the scaler that stepped it, until its update
        self.life: list[set[str]] = []  # for each step, whether it was "skipped" and a "schedule" moved after it
        self.rates, self.device = rates(optimizer), self.params[0].device.type
        # looked at between the calls: all, until it is known which have a gradient, then two of those; what a loop does
        # it does to all
        self.few = [p for p in self.params if p.requires_grad] or self.params
        self.marks: list[tuple[int, int]] = []
        self.untouched: bool  # when the optimizer's own step began, the gradients were those of the last pass
        self.start_over()

    def start_over(self) -> None:
        """The gradients were cleared."""
        self.passes: list[Pass] = []  # since then
        self.used = 0  # passes of them that a step has used
        self.unscaled = False
        self.norms: list[Tensor] = []  # of the gradients after the last pass, or after unscale_

    @property
    def steps(self) -> int:
        return len(self.life)

    @property
    def params(self) -> list[Tensor]:
        return parameters_of(self.optimizer)

    @property
    def fresh(self) -> list[Pass]:
        """The passes since the last step."""
        return self.passes[self.used :]

    @property
    def scaler(self) -> GradScaler | None:
        """The one that the gradients are multiplied by the scale of; None if they are not, or not any more."""
        return next((p.scaler for p in self.fresh if p.scaler is not None and not self.unscaled), None)

    def remember(self) -> None:
        if len(self.few) > 2 and (there := [p for p in self.few if p.grad is not None]):
            self.few = [there[0], there[-1]]
        self.marks, self.norms, self.untouched = look(self.few), lengths(self.few), False

    def cleared(self) -> bool:
        """Mostly the last says no, a bias or a weight of a norm, which is small."""
        return not any(p.grad is not None and bool(_values(p.grad).any()) for p in reversed(self.params))

    def divided_by(self, number: float) -> bool:
        """Whether the gradients were so many times larger after the last pass, or after `unscale_`."""
        return bool(self.norms) and alike(length(self.norms) / (length(lengths(self.few)) or math.nan), number)

    def changes(self) -> dict[str, bool]:
        """Whether the gradients of scaled passes were limited, or their NaN taken out, before they are unscaled."""
        if self.scaler is None or not self.norms:
            return {}
        changed = [old != new for old, new in zip(self.marks, look(self.few)) if any(new)]
        if not changed or (any(changed) and not all(changed)):
            return {}  # they were cleared, or a part of them was set
        before, now = length(self.norms), length(lengths(self.few))
        ratio = before / now if now else math.nan
        shared = ratio < 1024 and alike(ratio, round(ratio))  # a mean over so many
        divided = shared or alike(ratio, scale_of(self.scaler))
        return {
            "nan_hidden": not math.isfinite(before) and math.isfinite(now),
            "clip_before_unscale": math.isfinite(before) and ratio > 1 and not divided,
        }

    def see_rates(self) -> None:
        """A schedule is whatever changes the learning rate."""
        if self.life and rates(self.optimizer) != self.rates:
            self.life[-1].add("schedule")

    def stepped(self) -> None:
        self.used, self.unscaled = len(self.passes), False
        self.life.append(set())
        self.rates = rates(self.optimizer)

    def divided_later(self) -> bool:
        """Whether the reader divided the sum of gradients by the number of micro-batches, or by all that their losses
        were multiplied by; clipping it perhaps after."""
        pairs = zip(self.marks, look(self.few))
        edits = [new[1] - old[1] for old, new in pairs if old[0] == new[0]]  # none where others took their place
        whole = len(self.fresh), sum(max(p.means, default=0.0) for p in self.fresh)
        return not edits or max(edits) > 1 or any(map(self.divided_by, whole))


def rates(optimizer: Optimizer) -> list[object]:
    given = [group.get("lr") for group in optimizer.param_groups]
    return [float(lr) if isinstance(lr, Tensor) else lr for lr in given]


def look(params: list[Tensor]) -> list[tuple[int, int]]:
    """Identity and version of every gradient: one of them changes with the gradient."""
    return [(0, 0) if (grad := p.grad) is None else (id(grad), _local(grad)._version) for p in params]


def _local(grad: Tensor) -> Tensor:
    """What this process holds of a sharded gradient (FSDP2)."""
    local: Tensor = grad if type(grad) is Tensor else getattr(grad, "to_local", lambda: grad)()
    return local


def lengths(params: list[Tensor]) -> list[Tensor]:
    """Length of the first values of each gradient that there is; nothing is read on the host."""
    values = [_values(p.grad).reshape(-1)[:_VALUES] for p in params if p.grad is not None]
    return [torch.linalg.vector_norm(v.float()) for v in values]


def length(parts: list[Tensor]) -> float:
    """Of all of them as one vector: not finite if one is not."""
    return math.hypot(*map(float, parts))


def _values(grad: Tensor) -> Tensor:
    grad = _local(grad).detach()
    return grad if grad.layout == torch.strided else grad.coalesce().values()


def undivided(passes: list[Pass]) -> bool:
    """Whether several passes from one place each had a mean that nothing divided by their number."""
    for site, count in Counter(p.site for p in passes).items():
        shares = [max(p.means, default=0.0) for p in passes if p.site == site]
        divided = any(math.isclose(m * count, 1, rel_tol=1e-3) for m in shares) or sum(shares) <= 1.01
        if count > 1 and not divided and all(shares):
            return True
    return False


# --- the graph of a loss


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
    return by is not None and alike(by * number, 1)


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
