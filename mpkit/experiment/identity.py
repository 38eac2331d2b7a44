"""What a cell and a `run` are: digests that change when something changes that they compute with."""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import importlib
import importlib.metadata
import json
import math
import platform
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from joblib.hashing import NumpyHasher

Plain = str | float | bool | list[Any] | dict[str, Any] | None
"""What JSON can hold."""
CODE = (types.FunctionType, staticmethod, classmethod, property)
_INSIDE = ("fget", "fset", "fdel", "__func__", "__wrapped__")  # where a property, a method or a cache holds functions


def canonical(value: object) -> str:
    """JSON in which equal values give equal text; nothing but finite numbers."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(text: str) -> str:
    """128 bits of SHA-256 in hex."""
    return sha256(text.encode()).hexdigest()[:32]


class Description:
    """Turns values into JSON that names them completely: numbers and texts as they are, all else by name and digest.

    `libraries` collects the packages that the described code refers to; their versions stand for their code.

    Raises:  TypeError for what a run would change.
    """

    def __init__(self) -> None:
        self.libraries: set[str] = set()
        self._known: dict[int, tuple[object, Plain]] = {}  # the object is kept, or its id could be given to another

    def __call__(self, value: Any) -> Plain:
        value = value.item() if isinstance(value, np.generic) else value
        if isinstance(value, list | tuple):
            return [self(item) for item in value]
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {key: self(value[key]) for key in sorted(value)}
        if value is None or type(value) in (bool, int, str) or (isinstance(value, float) and math.isfinite(value)):
            return value
        if id(value) not in self._known:
            if isinstance(value, torch.nn.Module | Iterator):
                own = f"a cell cannot hold the {type(value).__name__} object itself, which a run would change"
                raise TypeError(f"{own}; pass what builds it, such as the class or `lambda: Network(hidden=64)`")
            self._known[id(value)] = value, {"is": _name(value), "hash": self.hash(value)}
        return self._known[id(value)][1]

    def hash(self, value: object) -> str:
        """A digest of a value, and of all code of the reader's own that it refers to."""
        return _Hasher({}, self.libraries).hash(value)


class _Hasher(NumpyHasher):
    """joblib's hasher, which takes code by its name, and code of the reader's own by what it does.

    Args:    seen: functions and classes met before, each counted once and then named by its number: code may be in a
             circle.
    """

    def __init__(self, seen: dict[int, tuple[int, object]], libraries: set[str]) -> None:
        super().__init__("sha1")
        self.seen, self.libraries = seen, libraries

    def reducer_override(self, value: object) -> Any:
        content = None if value is tuple else self.content(value)
        return NotImplemented if content is None else (tuple, (content,))  # as pickle has it: function and arguments

    def part(self, value: object) -> str:
        """The digest of what code refers to, by itself: equal whether or not it is one object with another part."""
        return _Hasher(self.seen, self.libraries).hash(value)

    def content(self, value: Any) -> tuple[object, ...] | None:
        """What tells a value from others; None where pickle takes it apart as it should be."""
        if isinstance(value, set | frozenset):  # whose order changes from process to process
            return type(value).__name__, sorted(map(self.part, value))
        if isinstance(value, torch.Tensor):
            plain = torch.empty(0) if value.is_meta else value.detach().cpu().to_dense().resolve_conj().resolve_neg()
            return value.dtype, value.shape, plain.reshape(-1).contiguous().view(torch.uint8).numpy()
        if isinstance(value, types.ModuleType):
            self.is_library(value.__name__)
            return (value.__name__,)
        if isinstance(value, types.CodeType):
            return self.code(value)
        if isinstance(value, types.FunctionType | type):
            value = vars(value).get("_torchdynamo_orig_callable", value)  # what torch.compile made changes in use
            if self.is_library(value.__module__) and "<" not in value.__qualname__:
                return value.__module__, value.__qualname__
            return self.once(value, self.class_ if isinstance(value, type) else self.function)
        try:
            reduced = value.__reduce_ex__(2)
        except Exception:  # a property, a lock, an open file
            return self.once(value, self.named)
        return self.named(value) if isinstance(reduced, str) else None

    def is_library(self, module: str | None) -> bool:
        package = (module or "").partition(".")[0]
        if known := is_installed(package):
            self.libraries.add(package)
        return known

    def once(self, value: object, parts: Callable[..., tuple[object, ...]]) -> tuple[object, ...]:
        if id(value) in self.seen:
            return "again", self.seen[id(value)][0]
        self.seen[id(value)] = len(self.seen), value
        return parts(value)

    def named(self, value: object) -> tuple[object, ...]:
        """What pickle cannot take apart, or knows by its name: that, its kind, its attributes and functions inside."""
        held = {name: getattr(value, name, None) for name in _INSIDE} | getattr(value, "__dict__", {})
        return type(value).__qualname__, _name(value), [(name, self.part(held[name])) for name in sorted(held)]

    def class_(self, value: type) -> tuple[object, ...]:
        own = {k: v for k, v in vars(value).items() if isinstance(v, CODE) or not k.startswith(("__", "_abc_"))}
        return [self.part(base) for base in value.__bases__], {k: self.part(v) for k, v in own.items()}

    def function(self, value: types.FunctionType) -> tuple[object, ...]:
        cells = []
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # one that is not filled yet
                cells.append(self.part(cell.cell_contents))
        names = {name: self.part(held) for name, held in sorted(self.referred(value).items())}
        given = value.__defaults__, value.__kwdefaults__, vars(value)
        return self.code(value.__code__), [self.part(held) for held in given], cells, names

    def code(self, code: types.CodeType) -> tuple[object, ...]:
        """Instructions and constants, those of nested functions too, and not where in a file anything stands."""
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars)
        return code.co_code, code.co_exceptiontable, [self.part(c) for c in code.co_consts], counts, names

    def referred(self, function: types.FunctionType) -> dict[str, object]:
        """Dotted name -> what it stands for, of what is looked up outside the function and imported inside it.

        Of modules of the reader's own `helpers.deep.f` is `f`, whatever else these modules hold.
        """
        codes = [function.__code__]
        for code in codes:
            codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        found: dict[str, object] = {}
        modules: set[int] = set()

        def follow(name: str, value: object) -> None:
            if not isinstance(value, types.ModuleType) or self.is_library(value.__name__):
                found[name] = value
            elif id(value) not in modules:
                modules.add(id(value))
                for attribute in {name for code in codes for name in code.co_names if hasattr(value, name)}:
                    follow(f"{name}.{attribute}", getattr(value, attribute))

        for step in (step for code in codes for step in dis.get_instructions(code)):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval in function.__globals__:
                follow(step.argval, function.__globals__[step.argval])
            elif step.opname == "IMPORT_NAME" and not self.is_library(step.argval):
                with contextlib.suppress(Exception):  # the run says so itself, or does without
                    importlib.import_module(step.argval)
                    follow(name := step.argval.partition(".")[0], sys.modules[name])
        return found


@functools.cache
def is_installed(package: str) -> bool:
    """Whether a package is Python's or somebody's release, which its version describes, and not the reader's own code.

    It goes by where the package lies: a reader's own `calendar.py` is the reader's.
    """
    if package in ("mpkit", "__main__"):
        return package == "mpkit"
    try:
        spec = find_spec(package)
    except ValueError:  # no name, or a module that no file was read for
        return False
    place = str(spec and (spec.origin or spec.submodule_search_locations))
    homes = ["site-packages", "dist-packages", sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    return place in ("built-in", "frozen") or any(home in place for home in homes)


def versions(libraries: set[str]) -> dict[str, str]:
    """Library -> version, of Python, torch, NumPy, mpkit and the packages named."""
    found, releases = {}, importlib.metadata.packages_distributions()
    for name in sorted({"numpy", "torch", *libraries}):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(releases.get(name, [name])[0])
    return {**found, "python": ".".join(platform.python_version_tuple()[:2]), "mpkit": _mpkit()}


@functools.cache
def _mpkit() -> str:
    """mpkit's version and a digest of its code, so that a checkout that is worked on counts as changed."""
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py")))
    return f"{importlib.import_module('mpkit').__version__}+{sha256(code).hexdigest()[:8]}"


def _name(value: Any) -> str:
    """A few characters for a value that is neither a number nor a text: what a table or an axis shows."""
    if isinstance(value, functools.partial):
        inner = [_name(a) for a in value.args] + [f"{k}={_name(a)}" for k, a in value.keywords.items()]
        return f"{_name(value.func)}({', '.join(inner)})"
    if isinstance(value, enum.Enum | torch.dtype | torch.device | Path | str | float | int | None):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"tensor{list(value.shape)}"
    own = [getattr(value, key, None) for key in ("__name__", "name")]
    return next((name for name in own if isinstance(name, str) and name), type(value).__name__)


def name_of(value: Plain) -> str:
    """A few characters for a described value."""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{k}: {name_of(v)}" for k, v in value.items())
        return value["is"] if {"is", "hash"} == set(value) else f"{{{inner}}}"
    if isinstance(value, list):
        return f"({', '.join(map(name_of, value))})"
    return f"{value:g}" if isinstance(value, float) else str(value)
