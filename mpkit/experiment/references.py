"""What code refers to outside itself: names of its module, parts of modules, and what it imports when it is called."""

from __future__ import annotations

import dis
import functools
import importlib
import re
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec, resolve_name
from itertools import takewhile
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

_NAMES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_PLACE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


@functools.cache
def is_installed(package: str) -> bool:
    """Whether a package is Python's or somebody's release, which its version describes, and not the reader's own code.

    It goes by where the package lies: a reader's own `calendar.py` is the reader's.
    """
    if package in ("", "__main__"):
        return False
    if package == "mpkit" or package in sys.builtin_module_names:
        return True
    try:
        spec = find_spec(package)
    except ValueError:  # a module that no file was read for
        return False
    if spec is None:
        return False
    if spec.origin in ("frozen", "built-in"):
        return True
    place = Path(spec.origin or next(iter(spec.submodule_search_locations or ()), ""))
    python = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    return not {"site-packages", "dist-packages"}.isdisjoint(place.parts) or any(map(place.is_relative_to, python))


def referred(function: FunctionType) -> tuple[dict[str, Any], set[str]]:
    """(name -> what it stands for, packages that are imported and not followed into), the names in a fixed order.

    `helpers.deep.f` of modules that are the reader's own is `f`, whatever else these modules hold.
    """
    code, space = function.__code__, function.__globals__
    found = dict(_resolved(chain, space) for chain in _chains(code) if chain[0] in space)
    libraries: set[str] = set()
    for name, parts in _imports(code, str(space.get("__package__") or "")):
        package = name.partition(".")[0]
        if is_installed(package) or not (held := dict(_own(name, parts))):
            libraries.add(package)
        else:
            found |= held
    return {name: found[name] for name in sorted(found)}, libraries


def contents(module: ModuleType) -> dict[str, Any]:
    """What a module holds, without the modules that lie in it: which of them are loaded says nothing."""
    inside = f"{module.__name__}."
    return {
        name: value
        for name, value in sorted(vars(module).items())
        if not name.startswith("__") and not (isinstance(value, ModuleType) and value.__name__.startswith(inside))
    }


def placed(text: str) -> object:
    """What "package.module:name" names in the reader's own code; None for any other text."""
    if not _PLACE.fullmatch(text):
        return None
    module, _, name = text.partition(":")
    package = module.partition(".")[0]
    if is_installed(package) or find_spec(package) is None:
        return None
    return dict(_own(module, (name,))).get(f"{module}.{name}")


def _chains(code: CodeType) -> set[tuple[str, ...]]:
    """("helpers", "f") for `helpers.f`: each name that is looked up outside, with the attributes asked of it."""
    steps = list(dis.get_instructions(code))
    found = set()
    for i, step in enumerate(steps):
        if step.opname in _NAMES:
            tail = takewhile(lambda after: after.opname in _ATTRIBUTES, steps[i + 1 : i + 9])
            found.add((str(step.argval), *(str(after.argval) for after in tail)))
    return found.union(*(_chains(c) for c in code.co_consts if isinstance(c, CodeType)))


def _resolved(chain: tuple[str, ...], space: dict[str, Any]) -> tuple[str, Any]:
    """The chain as far as it goes through modules that are the reader's own, and what stands there."""
    value, names = space[chain[0]], [chain[0]]
    for name in chain[1:]:
        own = isinstance(value, ModuleType) and not is_installed(value.__name__.partition(".")[0])
        if not own or not hasattr(value, name):
            break
        value = getattr(value, name)
        names.append(name)
    return ".".join(names), value


def _imports(code: CodeType, package: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, names taken from it) of each import in the code itself, in functions inside it too."""
    steps = list(dis.get_instructions(code))
    for level, names, step in zip(steps, steps[1:], steps[2:]):
        if step.opname == "IMPORT_NAME":
            name = str(step.argval)
            if isinstance(level.argval, int) and level.argval > 0:
                try:
                    name = resolve_name("." * level.argval + name, package)
                except ImportError:  # it says so when it is called
                    continue
            yield name, names.argval if isinstance(names.argval, tuple) else ()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _imports(constant, package)


def _own(name: str, parts: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Dotted name -> what is taken from a module of the reader's own; whole modules where no names are."""
    try:
        module = importlib.import_module(name)
    except Exception:  # the run says so itself, or does without
        return
    if not parts or "*" in parts:
        around = name.split(".")
        for i in range(len(around)):
            yield ".".join(around[: i + 1]), sys.modules[".".join(around[: i + 1])]
        return
    for part in parts:
        if not hasattr(module, part):
            yield from _own(f"{name}.{part}", ())
        else:
            yield f"{name}.{part}", getattr(module, part)
