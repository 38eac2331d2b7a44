"""Copies of a network, its loss and a batch: a diagnosis runs on nothing that anybody else holds."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
DEPTH = 6  # objects inside one another that are looked through for the tensors of a batch


def _copied(what: str, given: T, copies: dict[int, Any]) -> T:
    """copies:  by the id of what is not to be copied as it is, what stands for it."""
    try:
        return copy.deepcopy(given, copies)
    except Exception as error:  # whatever its parts raise
        raise TypeError(
            f"diagnose runs copies, and this {what} cannot be copied: {error}; take off it what has no copy, as a "
            "lock, a generator or an open file"
        ) from error


def copied(network: nn.Module, loss_fn: T) -> tuple[nn.Module, T]:
    """The network and its loss, which is copied with it if it is a module or a method of one, and may share weights.

    Tensors that autograd made, as the weight of `torch.nn.utils.weight_norm` is one, are copied without their history.
    The hooks of parameters, which `copy.deepcopy` leaves behind, change the gradients of the copy too.
    Raises:  TypeError for a network that cannot be copied.
    """
    if sharded := [name for name, p in network.named_parameters() if hasattr(p, "device_mesh")]:
        raise TypeError(
            f"diagnose runs a copy of the whole network, and {sharded[0]} is sharded (FSDP2): call it before "
            "fully_shard(network), on one process"
        )
    bound = isinstance(loss_fn, nn.Module) or isinstance(getattr(loss_fn, "__self__", None), nn.Module)
    made = (t for m in network.modules() for t in vars(m).values() if isinstance(t, Tensor) and not t.is_leaf)
    both = network, loss_fn if bound else None
    own, own_loss = _copied(type(network).__name__, both, {id(t): t.detach().clone() for t in made})
    for given, parameter in zip(network.parameters(), own.parameters()):
        for hook in (given._backward_hooks or {}).values():
            parameter.register_hook(hook)
    return own, own_loss if bound else loss_fn  # type: ignore[return-value]


def copied_batch(batch: T, *, widened: bool = False) -> T:
    """The batch with copies of its tensors, in float32 if `widened`. Raises TypeError for one that has no copy."""
    own = {}
    for _, t in tensors_of("batch", batch):
        dtype = torch.float32 if widened and t.is_floating_point() else t.dtype
        own[id(t)] = t.detach().to(dtype, copy=True).requires_grad_(t.requires_grad)
    return _copied("batch", batch, own)


def tensors_of(place: str, value: object, depth: int = DEPTH) -> Iterator[tuple[str, Tensor]]:
    """(how Python reaches it from `place`, tensor) of every tensor in a nest of containers and plain objects.

    >>> [name for name, _ in tensors_of("batch", ({"x": Tensor(1)}, [0, Tensor(1)]))]
    ["batch[0]['x']", 'batch[1][1]']
    """
    parts: list[tuple[str, Any]] = []
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        parts = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, tuple | list):
        parts = [(f"[{i}]", item) for i, item in enumerate(value)]
    elif hasattr(value, "__dict__"):
        parts = [(f".{name}", item) for name, item in vars(value).items()]
    for name, item in parts if depth else ():
        yield from tensors_of(place + name, item, depth - 1)
