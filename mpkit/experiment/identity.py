"""What a cell and a `run` are: digests that change when something changes that they compute with."""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import importlib.metadata
import json
import math
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from hashlib import sha256
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from joblib.hashing import NumpyHasher


def canonical(value: object) -> str:
    """JSON in which equal values give equal text; nothing but finite numbers."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(text: str) -> str:
    """128 bits of SHA-256 in hex."""
    return sha256(text.encode()).hexdigest()[:32]


def described(value: Any) -> Any:
    """A value as JSON that names it completely: numbers and texts as they are, all else by name and digest.

    Raises:  TypeError for what a run would change.
    """
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, list | tuple):
        return [described(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: described(value[key]) for key in sorted(value)}
    if value is None or type(value) in (bool, int, str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, torch.nn.Module | Iterator):
        raise TypeError(f"a run would change this {type(value).__name__}; pass what builds it, say `lambda: Network()`")
    return {"is": _name(value), "hash": Hasher().hash(value)}


def _name(value: Any) -> str:
    """A few characters for a value that is neither a number nor a text: what a table or an axis shows."""
    if isinstance(value, torch.dtype | torch.device):
        return str(value).removeprefix("torch.")
    value = value.func if isinstance(value, functools.partial) else value
    named = [getattr(value, key, None) for key in ("__name__", "name")]
    return next((name for name in named if isinstance(name, str) and name), type(value).__name__)


def name_of(value: Any) -> str:
    """A few characters for a described value."""
    if isinstance(value, Mapping) and set(value) == {"is", "hash"}:
        return str(value["is"])
    return f"{value:g}" if isinstance(value, float) else str(value)


class Hasher(NumpyHasher):
    """joblib's hasher, which takes code by its name, and code of the reader's own by what it does.

    It pickles a value as an empty tuple whose state is the content: a state may lead back to the value, as code does.
    `libraries` collects the modules that count by the version of their package.
    """

    def __init__(self, libraries: set[str] | None = None) -> None:
        super().__init__("sha1")
        self.libraries = set[str]() if libraries is None else libraries

    def memoize(self, value: object) -> None:
        if not isinstance(value, tuple):  # whether equal ones are one object is Python's affair
            super().memoize(value)

    def reducer_override(self, value: object) -> Any:
        content = None if value is tuple else self.content(value)
        return NotImplemented if content is None else (tuple, (), content)

    def content(self, value: Any) -> tuple[object, ...] | None:
        """What tells a value from others; None where pickle takes it apart as it should be."""
        if isinstance(value, set | frozenset):  # whose order changes from process to process
            return type(value).__name__, sorted(Hasher(self.libraries).hash(part) for part in value)
        if isinstance(value, torch.Tensor):
            plain = torch.empty(0) if value.is_meta else value.detach().cpu().to_dense().resolve_conj().resolve_neg()
            return value.dtype, value.shape, plain.reshape(-1).contiguous().view(torch.uint8).numpy()
        if isinstance(value, ModuleType):
            return value.__name__, self.is_library(value.__name__)
        if isinstance(value, CodeType):  # not where in a file it stands
            counts = (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags)
            names = (value.co_names, value.co_varnames, value.co_freevars)
            return value.co_code, value.co_exceptiontable, value.co_consts, counts, names
        if isinstance(value, FunctionType | type):
            value = vars(value).get("_torchdynamo_orig_callable", value)  # what torch.compile made changes in use
            if self.is_library(value.__module__) and "<" not in value.__qualname__:
                return value.__module__, value.__qualname__
        if isinstance(value, type):
            own = {k: v for k, v in vars(value).items() if callable(v) or not k.startswith(("__", "_abc_"))}
            return value.__bases__, own
        if isinstance(value, FunctionType):
            given = value.__defaults__, value.__kwdefaults__, vars(value)
            closed = [cell.cell_contents for cell in value.__closure__ or ()]
            return value.__code__, given, closed, self.referred(value)
        try:
            by_name = isinstance(value.__reduce_ex__(2), str)
        except Exception:  # a property, a lock, an open file
            by_name = True
        inside = {name: getattr(value, name, None) for name in ("fget", "fset", "fdel", "__wrapped__")}
        return (type(value), _name(value), inside | getattr(value, "__dict__", {})) if by_name else None

    def is_library(self, module: str | None) -> bool:
        """Whether it is of a package that counts by its version."""
        if known := is_installed(str(module).partition(".")[0]):
            self.libraries.add(str(module))
        return known

    def referred(self, function: FunctionType) -> dict[str, object]:
        """Dotted name -> what it stands for, of what is looked up outside the function and imported inside it.

        Of modules of the reader's own `helpers.deep.f` is `f`, whatever else these modules hold.
        """
        codes, todo = [function.__code__], list[tuple[str, Any]]()
        for code in codes:  # which grows, as does `todo`
            codes += [c for c in code.co_consts if isinstance(c, CodeType)]
            for step in dis.get_instructions(code):
                if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval in function.__globals__:
                    todo.append((step.argval, function.__globals__[step.argval]))
                elif step.opname == "IMPORT_NAME" and not self.is_library(step.argval):
                    with contextlib.suppress(Exception):  # the run says so itself, or does without
                        todo.append((step.argval, importlib.import_module(step.argval)))
        names = sorted({name for code in codes for name in code.co_names})
        modules = list[ModuleType]()
        for path, value in todo:
            if isinstance(value, ModuleType) and value not in modules and not self.is_library(value.__name__):
                modules.append(value)
                todo += [(f"{path}.{name}", getattr(value, name)) for name in names if hasattr(value, name)]
        return dict(todo)


@functools.cache
def is_installed(package: str) -> bool:
    """Whether a package is Python's or somebody's release, which its version describes, and not the reader's own code.

    It goes by where the package lies: a reader's own `calendar.py` is the reader's.
    """
    place = str(getattr(PathFinder.find_spec(package), "origin", None))
    homes = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))
    return package in ("mpkit", *sys.builtin_module_names) or any(home in place for home in homes)


def versions(libraries: set[str]) -> dict[str, str]:
    """Library -> version, of Python, torch, NumPy, mpkit and the packages whose modules are named.

    Of mpkit also a digest of the modules named and of those that they import: in a checkout that is worked on, an edit
    of these counts as a change, and no other.
    """
    used, releases = sorted(n for n in libraries if n.startswith("mpkit.")), importlib.metadata.packages_distributions()
    for module in used:  # which grows
        held = vars(sys.modules[module]).values()
        homes = {v.__name__ if isinstance(v, ModuleType) else getattr(v, "__module__", None) for v in held}
        used += sorted(home for home in {*map(str, homes)} - set(used) if home.startswith("mpkit."))
    code = b"".join(Path(str(sys.modules[module].__file__)).read_bytes() for module in sorted(used))
    named = {name.partition(".")[0] for name in ("numpy", "torch", *libraries)}
    found = {name: importlib.metadata.version(releases[name][0]) for name in named & releases.keys()}
    found["mpkit"] = f"{sys.modules['mpkit'].__version__}+{sha256(code).hexdigest()[:8]}"
    return {**found, "python": ".".join(map(str, sys.version_info[:2]))}
