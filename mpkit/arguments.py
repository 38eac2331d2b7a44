"""Checks of arguments where they enter: TypeError for a kind, ValueError for a range, in the same words everywhere.

A number is an int or a float, of Python or NumPy; a bool is none. What is checked comes back as Python's own kind.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial, wraps
from inspect import signature
from math import inf
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, TypeGuard, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np

Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is an int or a float; a bool is neither."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` is an int; a bool is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_number(
    name: str, value: object, *, low: float = 0.0, high: float = inf, open_low: bool = False, closed_high: bool = False
) -> float:
    """Raise unless `value` is a number in [low, high); `open_low` leaves low out, `closed_high` lets high in; -> float.

    Raises:  TypeError for what is no number, ValueError for one out of range or too large for a float.
    """
    if not is_number(value):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError(f"{name} must fit a float, got an int of {value.bit_length()} bits")
    left, right = "(" if open_low else "[", "]" if closed_high else ")"
    if not (low <= value <= high) or (open_low and value == low) or (not closed_high and value == high):
        raise ValueError(f"{name} must be in {left}{low:g}, {high:g}{right}, got {value}")
    return float(value)


def check_float(name: str, value: object, *, low: float = 0.0, high: float = inf, open_low: bool = False) -> float:
    """As `check_number`, and a TypeError for an int."""
    if not isinstance(value, float | np.floating):
        raise TypeError(f"{name} must be a float, got {value!r}")
    return check_number(name, value, low=low, high=high, open_low=open_low)


def check_count(name: str, value: object, low: int = 1) -> int:
    """Raise unless `value` is a whole number >= low; -> it as an int."""
    if not is_whole(value):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    return int(value)


def check_flags(**flags: object) -> None:
    """Raise unless every value is True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: object, choices: Collection[str]) -> str:
    """Raise unless `value` is one of the strings `choices`; -> it."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of the strings {', '.join(choices)}, got {value!r}")
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")
    return value


def check_kind(name: str, value: Value, kind: type | tuple[type, ...], what: str, *, optional: bool = False) -> Value:
    """Raise TypeError unless `value` is of `kind`, which the message calls `what` (or None where `optional`); -> it."""
    if not (isinstance(value, kind) or (optional and value is None)):
        raise TypeError(f"{name} must be {what}{' or None' if optional else ''}, got {kind_of(value)}")
    return value


def check_function(name: str, value: object, what: str, *, optional: bool = False) -> None:
    """Raise TypeError unless `value` is a function or module, called `what`; a call of a class only makes one of it."""
    if not ((callable(value) and not isinstance(value, type)) or (optional and value is None)):
        raise TypeError(f"{name} must be {what}{' or None' if optional else ''}, got {kind_of(value)}")


@cache
def checks_of(function: Callable[..., object]) -> dict[str, Callable[[str, Any], Any]]:
    """What the annotations of a function, or class, ask of its arguments but `self`: name -> `check(name, value)`.

    A check is what `Annotated` carries; True or False where the annotation is bool, one of the strings of a Literal, an
    instance where it is a class of torch or mpkit; also with `| None`. Nothing elsewhere.
    """
    hints = get_type_hints(function, include_extras=True)
    return {name: check_of(hints.get(name)) for name in signature(function).parameters if name != "self"}


def checked(function: Function) -> Function:
    """A function, or method, whose arguments are checked by its annotations, all of them, before it runs."""
    form = signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound, checks = form.bind(*args, **kwargs), checks_of(function)
        for name, value in bound.arguments.items():
            if name in checks:
                bound.arguments[name] = checks[name](name, value)
        return function(*bound.args, **bound.kwargs)

    return cast(Function, call)


def check_of(hint: Any) -> Callable[[str, Any], Any]:
    """What one annotation asks of a value: `check(name, value)`; see `checks_of`."""
    if hasattr(hint, "__metadata__"):
        return hint.__metadata__[0]
    if hint is bool:
        return check_flag
    if get_origin(hint) is Literal:
        return partial(check_choice, choices=get_args(hint))
    if NoneType in (parts := get_args(hint)) and len(parts) == 2:
        inside = check_of(next(part for part in parts if part is not NoneType))
        return lambda name, value: None if value is None else inside(name, value)
    if isinstance(hint, type) and hint.__module__.split(".")[0] in ("torch", "mpkit"):
        called = {"Module": "an nn.Module", "Tensor": "a tensor", "Optimizer": "a torch.optim.Optimizer"}
        return partial(check_kind, kind=hint, what=called.get(hint.__name__, f"a {hint.__name__}"))
    return lambda _, value: value


class Checked:
    """A base for frozen dataclasses: each field is what its annotation asks for, and kept as the check gave it back."""

    unchecked: ClassVar[tuple[type, ...]] = ()  # kinds of values that are taken as they are

    def __post_init__(self) -> None:
        for name, check in checks_of(type(self)).items():  # type: ignore[arg-type]  # a class has a hash
            if not isinstance(value := getattr(self, name), self.unchecked):
                object.__setattr__(self, name, check(name, value))


def check_flag(name: str, value: Value) -> Value:
    """Raise unless `value` is True or False; -> it."""
    check_flags(**{name: value})
    return value


def kind_of(value: object) -> str:
    """What kind of thing a value is, for a message; where it is a class, what was forgotten.

    >>> kind_of(5), kind_of(int)
    ('int', 'the class int; make one of it: int(...)')
    """
    own = value.__name__ if isinstance(value, type) else ""
    return f"the class {own}; make one of it: {own}(...)" if own else type(value).__name__


def check_alike(name: str, saved: Any, own: object) -> None:
    """Raise unless a part of a saved state is of the kind that this object saves itself: TypeError, or ValueError.

    A tensor needs a tensor of its shape and kind of number, a number a number, a dict (at least) its keys, a list its
    length; None and what else there is stand for anything.
    """
    from torch import Tensor  # a worker of an experiment starts without it

    if isinstance(own, list | tuple):
        check_kind(name, saved, (list, tuple), "a list, as it was saved")
        if len(saved) != len(own):
            raise ValueError(f"{name} needs {len(own)} entries, got {len(saved)}: it was saved by another object")
        own, saved = dict(enumerate(own)), dict(enumerate(saved))
    if isinstance(own, Mapping):
        check_kind(name, saved, Mapping, "a dict, as it was saved")
        if missing := [str(key) for key in own if key not in saved]:
            raise ValueError(f"{name} lacks {', '.join(missing)}: it was saved by another object")
        for key, value in own.items():
            check_alike(f"{name}[{key!r}]", saved[key], value)
    elif isinstance(own, Tensor):
        check_kind(name, saved, Tensor, "a tensor, as it was saved")
        if saved.shape != own.shape or saved.is_floating_point() != own.is_floating_point():
            raise ValueError(f"{name} needs shape {[*own.shape]}, {own.dtype}, got {[*saved.shape]}, {saved.dtype}")
    elif isinstance(own, bool):
        check_flags(**{name: saved})
    elif isinstance(own, numbers.Real) and not is_number(saved):
        raise TypeError(f"{name} must be a number, as it was saved, got {saved!r:.60}")


Count = Annotated[int, check_count]
"""A whole number from 1 on."""
Index = Annotated[int, partial(check_count, low=0)]
"""A whole number from 0 on."""
Real = Annotated[float, check_number]
"""A number from 0 on; inf and NaN are none, here and below."""
Float = Annotated[float, check_float]
"""The same, and no int."""
Positive = Annotated[float, partial(check_number, open_low=True)]
"""A number above 0."""
Share = Annotated[float, partial(check_number, high=1.0)]
"""A number from 0 on and below 1."""
ShareOrOne = Annotated[float, partial(check_number, high=1.0, closed_high=True)]
"""A number from 0 to 1."""
Inside = Annotated[float, partial(check_number, high=1.0, open_low=True)]
"""A number between 0 and 1, neither of them."""
