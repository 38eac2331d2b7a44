"""Which names a function uses: how a lab sees that an answer was written and not called."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any


def names_used(function: Callable[..., Any]) -> set[str]:
    """Names in the code of a function, and of the functions that it calls and that stand beside it.

    They are names of globals, attributes and imports, texts that are a name, and the packages of the globals.
    Raises:  TypeError if it is no function.

    >>> def third(x): return round(x / 3)
    >>> sorted(names_used(third))
    ['builtins', 'round']
    """
    if not callable(function):
        raise TypeError(f"names_used needs a function, got {function!r:.60}: leave its parentheses out")
    found, waiting, seen = set[str](), [inspect.unwrap(function)], set[int]()
    while waiting:
        one = waiting.pop()
        if not isinstance(one, FunctionType) or id(one) in seen:
            continue
        seen.add(id(one))
        space = vars(builtins) | one.__globals__
        for name in _names(one.__code__, one.__doc__):
            thing = space.get(name)
            if isinstance(thing, FunctionType) and thing.__globals__ is one.__globals__:
                waiting.append(thing)
            home = thing.__name__ if inspect.ismodule(thing) else getattr(thing, "__module__", None) or ""
            found |= {name} | {part.strip("_") for part in f"{name}.{home}".split(".")}
    return found - {""}


def _names(code: CodeType, words: str | None) -> set[str]:
    """Names in the code and in what is defined inside it; a docstring, `words`, names nothing."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant, None)
        elif isinstance(constant, str) and constant.isidentifier() and constant != words:
            found.add(constant)
    return found
