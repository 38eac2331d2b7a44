"""Batches for `train`: data by name, tensors, data sets, loaders, or what makes one of these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import length_hint
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from mpkit.data import digits, mnist


class _Shuffled:
    """Batches of two tensors, in another order in every epoch."""

    def __init__(self, pair: tuple[Tensor, Tensor], batch: int, seed: int, shuffle: bool) -> None:
        self.pair, self.batch, self.shuffle = pair, batch, shuffle
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return -(-len(self.pair[0]) // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self.pair
        order = torch.randperm(len(x), generator=self.generator) if self.shuffle else torch.arange(len(x))
        for rows in order.to(x.device).split(self.batch):
            yield x[rows], y[rows]


def batches_of(
    data: object, batch: int, seed: int, device: torch.device
) -> tuple[Iterable[Any], Iterable[Any] | None, int]:
    """Batches for training and, if any, for the test, an epoch whenever they are iterated; steps of an epoch."""
    data = _named(data)
    test: object = None
    if isinstance(data, Mapping):
        if set(both := dict(data)) - {"train", "test"} or "train" not in both:
            raise ValueError(f"data as a dict has 'train' and perhaps 'test', got {sorted(both)}")
        data, test = _named(both["train"]), _named(both.get("test"))
    elif isinstance(data, tuple) and _is_pair(data) and _is_pair(data[0]):  # a list holds batches
        data, test = data
    elif _is_pair(data) and isinstance(data[0], Tensor):
        keep = len(data[0]) - max(1, len(data[0]) // 5)
        data, test = (data[0][:keep], data[1][:keep]), (data[0][keep:], data[1][keep:])
    elif isinstance(data, Dataset) and not isinstance(data, IterableDataset) and hasattr(data, "__len__"):
        rows = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
        keep = len(rows) - max(1, len(rows) // 5)
        data, test = (Subset(data, part) for part in (rows[:keep], rows[keep:]))
    batches = _batches(data, batch, seed, True, device)
    tested = None if test is None else _batches(test, 250, seed, False, device)
    steps = length_hint(batches, -1)  # of a stream nobody knows it
    return batches, tested, steps if steps >= 0 else sum(1 for _ in batches)


def _named(data: object) -> object:
    if isinstance(data, str):
        if data in ("digits", "digits8"):
            size = 8 if data == "digits8" else 28
            return digits(size=size), digits("test", size)
        if data == "mnist":
            return mnist(), mnist(split="test")
        raise ValueError(f"no data set is called {data!r}; write digits, digits8 or mnist, or pass the data themselves")
    made = data() if callable(data) and not hasattr(data, "__iter__") else data
    return tree_map_only(np.ndarray, torch.from_numpy, made)


def pair_of(batch: object) -> tuple[Any, Any]:
    """What the network takes and what the loss compares with.

    Raises:  ValueError for a batch of anything but two.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    came = f"{len(batch)} parts" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
    need = "a batch must be (x, y), what the network takes and what the loss compares with, parts that may be dicts"
    raise ValueError(f"{need}, got {came}; have the data set or collate_fn give such pairs")


def _is_pair(data: object) -> TypeGuard[tuple[Any, Any] | list[Any]]:
    return isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(d, Tensor | tuple | list) for d in data)


def _batches(data: object, batch: int, seed: int, shuffle: bool, device: torch.device) -> Iterable[Any]:
    if _is_pair(data) and all(isinstance(part, Tensor) for part in data):
        if len(data[0]) != len(data[1]) or not len(data[0]):
            raise ValueError(f"data needs as many labels as rows, got {len(data[0])} rows and {len(data[1])} labels")
        return _Shuffled((data[0].to(device), data[1].to(device)), batch, seed, shuffle)
    if isinstance(data, Dataset):  # whose items are samples, of one that is only iterated too
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(data, batch, shuffle=shuffle and not isinstance(data, IterableDataset), generator=generator)
    if not hasattr(data, "__iter__"):
        raise TypeError(f"data must be a name, tensors, a Dataset or an iterable of batches, got {type(data).__name__}")
    return data
