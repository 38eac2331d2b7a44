"""Which names a function uses: how a lab sees that an answer was written and not called."""

from __future__ import annotations

import builtins
import inspect
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any


def names_used(function: Callable[..., Any]) -> set[str]:
    """Names in the code of a function, and of the functions that it calls and that stand beside it.

    They are names of globals, attributes and imports, texts that are a name, and the packages of the globals; for
    what stands for a dtype, as "<f2" or `torch.HalfTensor`, that dtype's name too. Some ways to a dtype have no name.
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
    found = set(code.co_names).union(*map(_dtypes, code.co_names))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant, None)
        elif isinstance(constant, str) and constant != words:
            found |= _dtypes(constant) | ({constant} if constant.isidentifier() else set())
    return found


def _dtypes(text: str) -> set[str]:
    """The dtypes that NumPy or torch, where they are loaded, know by this text."""
    found = set()
    if (numpy := sys.modules.get("numpy")) and re.fullmatch("[<>=|]?[fiuc][0-9]+", text):  # a letter alone is a word
        with suppress(TypeError):
            found.add(numpy.dtype(text).name)
    if torch := sys.modules.get("torch"):
        kind = getattr(torch, text.rpartition(".")[2], None)
        found.add(str(getattr(kind, "dtype", "")).removeprefix("torch."))
    return found
