"""What a data set holds, far down: the generators that it draws from, the data sets and samplers inside it."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

Generator = torch.Generator | np.random.BitGenerator | random.Random
LOOKED_AT = 20_000  # objects, those near the data set first
MANY = 64  # a longer list or dict holds samples: all of it is looked at when its first items hold a generator
Container = list[Any] | tuple[Any, ...] | dict[Any, Any] | deque[Any]
CONTAINERS = (list, tuple, dict, deque)  # and no sets, whose order is another one in each process
LEAVES = (Tensor, np.ndarray, str, bytes, int, float, complex, type, ModuleType, logging.Logger, type(None))
_KNOWN = (*Generator.__args__, np.random.Generator, np.random.RandomState, FunctionType, Dataset, Sampler, DataLoader)
LIBRARIES = frozenset({"builtins", "torch", "torchvision", "numpy", "random", "collections", "functools", "typing"})
"""Packages whose classes and functions hold no generator of the user's."""


def generators(dataset: object) -> list[Generator]:
    """Every generator that a data set, its samplers, transforms, functions and inner data sets hold, each once.

    NumPy's are their bit generators, which several `numpy.random.Generator`s may share.
    """
    return [value for value in held_by(dataset) if isinstance(value, Generator)]


def held_by(dataset: object) -> Iterator[object]:
    """A data set and what it holds, each once, in an order that is the same for data sets made alike."""
    seen = {id(dataset): dataset}  # the objects stay alive, and so keep their identities
    waiting: deque[tuple[object, _Long | None]] = deque([(dataset, None)])
    while waiting:
        value, within = waiting.popleft()
        yield value
        found = [(_inside(value), within)]
        if isinstance(value, CONTAINERS) and len(value) > MANY:
            found = [(islice(_inside(value), MANY), _Long(value, within))]
        while within is not None and isinstance(value, Generator):  # the rest of it holds generators too
            found.append((_inside(within.container), within.around))
            within = within.around
        for items, where in found:
            for item in items:
                if len(seen) < LOOKED_AT and id(item) not in seen and not isinstance(item, LEAVES):
                    seen[id(item)] = item
                    waiting.append((item, where))


class _Long(NamedTuple):
    """A long container of which only the first items were looked at, and the one that it stands in."""

    container: Container
    around: _Long | None


def _inside(value: Any) -> Iterable[object]:
    if isinstance(value, Generator):
        return ()
    if isinstance(value, np.random.Generator):
        return (value.bit_generator,)
    if isinstance(value, np.random.RandomState):
        return (value._bit_generator,)
    if isinstance(value, CONTAINERS):
        return value.values() if isinstance(value, dict) else value
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, BuiltinMethodType):  # `generator.normal`, say
        return (value.__self__,)
    if isinstance(value, FunctionType):
        return _of_function(value)
    return _of_object(value)


def _of_function(function: Callable[..., object]) -> Iterator[object]:
    """What a function closes over and has as defaults; the generators, data sets and functions it knows by name."""
    if _library(function.__module__):
        return
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    known = function.__globals__
    for name in _names(function.__code__):
        if isinstance(known.get(name), _KNOWN):
            yield known[name]


def _names(code: CodeType) -> Iterator[str]:
    """The names that a function looks up outside itself, those of functions inside it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _of_object(value: object) -> Iterator[object]:
    """Its attributes, and what stands in its classes: functions and generators."""
    for name, item in getattr(value, "__dict__", {}).items():
        if not (name == "_iterator" and isinstance(value, DataLoader)):  # the workers that a loader keeps
            yield item
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(value, name, None)
        if not _library(kind.__module__):
            for item in vars(kind).values():
                if isinstance(item, FunctionType | Generator | np.random.Generator | np.random.RandomState):
                    yield item


def _library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in LIBRARIES


def parts(dataset: object) -> list[Any]:
    """The data set and the data sets and samplers in it, without the loaders around them."""
    held = (value for value in held_by(dataset) if value is dataset or isinstance(value, Dataset | Sampler))
    return [value for value in held if not isinstance(value, DataLoader) and hasattr(value, "__dict__")]
