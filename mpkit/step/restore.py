"""All or nothing: several objects take over a saved state together, and a failed set-up leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.arguments import check_count, check_kind
from mpkit.optimizers.saved import check_saved

_SUMS = "gradients of a begun step"


def load_all(pairs: Sequence[tuple[Any, Any]]) -> None:
    """`part.load_state_dict(saved)` for each (part, saved); when one refuses, all are as they were.

    Raises:  ValueError for the state of another kind of optimizer, and what the parts raise.
    """
    for part, saved in pairs:
        if isinstance(part, torch.optim.Optimizer) and "param_groups" in part.state_dict():
            check_saved(part, saved)
    done: list[tuple[Any, Any]] = []
    try:
        for part, saved in pairs:
            before = part.state_dict()
            if isinstance(part, nn.Module):  # which loads into the very tensors that its state names
                before = {name: x.clone() if isinstance(x, Tensor) else x for name, x in before.items()}
            done.append((part, before))
            part.load_state_dict(saved)
    except BaseException:
        for part, before in done:
            part.load_state_dict(before)
        raise


def saved_count(name: str, own: int, count: object, steps: object, *, whole: bool = False) -> int:
    """How many micro-batches a saved accumulation had summed; each of them was divided by `steps`.

    Args:    own: the number for one update here, the argument `name`; whole: that many may be there without an update.
    Raises:  TypeError; ValueError for a begun accumulation of another number.
    """
    count, steps = check_count("the count of an accumulation", count, low=0), check_count(name, steps)
    if count and (steps != own or (count >= own and not whole)):
        raise ValueError(
            f"the saved accumulation had {count} of {steps} micro-batches, and this one updates after {own}; make it "
            f"with the {name} that it was saved with"
        )
    return count


def saved_sum(p: Tensor, saved: Any) -> Tensor:
    """A copy, where `p` is, of what was saved as a sum of its gradients. Raises TypeError, ValueError."""
    check_kind("each of the saved sums of gradients", saved, Tensor, "a tensor")
    if saved.shape != p.shape:
        raise ValueError(f"a saved sum of gradients has shape {tuple(saved.shape)}, its parameter {tuple(p.shape)}")
    return saved.to(p.device, copy=True)


def saved_gradients(parameters: Sequence[Tensor], saved: Any) -> list[Tensor | None]:
    """The saved sum, or None, for each parameter. Raises TypeError, ValueError."""
    check_kind("gradients", saved, (list, tuple), "a list of tensors, as it was saved")
    if len(saved) != len(parameters):
        raise ValueError(f"the saved step had gradients of {len(saved)} parameters, this one has {len(parameters)}")
    return [None if grad is None else saved_sum(p, grad) for p, grad in zip(parameters, saved)]


def carrying(state: Mapping[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """The state of an object to copy or pickle, with the gradients of a begun step, which torch would leave behind."""
    return {**state, _SUMS: [p.grad for p in parameters]}


def carried(state: dict[str, Any], parameters: Callable[[], Sequence[Tensor]]) -> dict[str, Any]:
    """The state without the gradients that `carrying` put in; they are put back into the (copied) parameters."""
    if gradients := state.get(_SUMS):
        for p, grad in zip(parameters(), gradients):
            p.grad = grad
    return {key: value for key, value in state.items() if key != _SUMS}


@contextmanager
def unchanged_on_error(*objects: object) -> Iterator[None]:
    """Leave modules (with all their parts) and optimizers as they were when the block raises.

    Restored is what they hold: layers, parameters, hooks, options and groups. What is inside a tensor is not copied.
    """
    owners = [x for top in objects for x in (_layers(top) if isinstance(top, nn.Module) else _wrapped(top))]
    kept = [_Kept(vars(owner), depth=4) for owner in owners]
    required = [(p, p.requires_grad) for top in objects if isinstance(top, nn.Module) for p in top.parameters()]
    try:
        yield
    except BaseException:
        for containers in kept:
            containers.put_back()
        for p, before in required:
            p.requires_grad_(before)
        raise


def _layers(network: nn.Module) -> Iterator[Any]:
    """Its modules, and what stands in place of their `forward`: a cast that is taken off changes itself too."""
    for module in network.modules():
        yield module
        forward = vars(module).get("forward")
        while hasattr(forward, "__dict__"):
            yield forward
            forward = vars(forward).get("inner")


def _wrapped(optimizer: object) -> list[Any]:
    """An optimizer and those inside it."""
    own = vars(optimizer).get("optimizer")
    return [optimizer, *_wrapped(own)] if isinstance(own, torch.optim.Optimizer) else [optimizer]


class _Kept:
    """What a dict or list held, and the dicts and lists in it down to a depth."""

    def __init__(self, container: Any, depth: int) -> None:
        self.container = container
        items = container.items() if isinstance(container, dict) else enumerate(container)
        self.items = {key: self._of(item, depth - 1) for key, item in items}

    @classmethod
    def _of(cls, item: object, depth: int) -> object:
        return cls(item, depth) if depth and isinstance(item, dict | list) else item

    def put_back(self) -> Any:
        """The very same containers, with what they held."""
        items = {key: item.put_back() if isinstance(item, _Kept) else item for key, item in self.items.items()}
        if isinstance(self.container, dict):
            self.container.clear()
            self.container.update(items)
        else:
            self.container[:] = items.values()
        return self.container
