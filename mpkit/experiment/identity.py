"""What a cell and a `run` are, as data: the key under which a result is stored, and what a reader sees of it."""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import importlib
import inspect
import math
import platform
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpkit.experiment.store import canonical, digest

Plain = str | float | bool | list[Any] | dict[str, Any] | None
"""What JSON can hold."""
_DRAW = ("plots", "explorers", "widgets", "check", "bench")  # parts of mpkit that no run computes with


class Description:
    """Turns values into JSON that names them completely: numbers as they are, code and arrays by a digest.

    One object describes everything of one experiment, so that a data set is read once. `libraries` collects the
    top-level packages that the described code refers to and that are not followed into.

    Raises:  TypeError for what has no content that could be compared in another process.
    """

    def __init__(self) -> None:
        self.libraries: set[str] = set()
        self._codes: dict[int, str] = {}
        self._seen: dict[int, tuple[Any, Any]] = {}  # the object is kept, or its id could be given to another

    def __call__(self, value: object) -> Plain:
        """JSON for `value`."""
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, enum.Enum):
            return {"enum": f"{type(value).__qualname__}.{value.name}"}
        if isinstance(value, torch.dtype | torch.device):
            return {"torch": str(value)}
        if isinstance(value, np.longdouble):
            return {"longdouble": np.format_float_positional(value, unique=True)}
        if isinstance(value, np.generic):
            return self(value.item())
        if isinstance(value, Path):
            return {"path": str(value)}
        found = self._seen.get(id(value))
        if found is None:
            self._seen[id(value)] = (value, {"loop": type(value).__qualname__})  # met again inside itself
            self._seen[id(value)] = found = (value, self._described(value))
        return found[1]

    def _described(self, value: object) -> Plain:
        if isinstance(value, list | tuple):
            return [self(item) for item in value]
        if isinstance(value, set | frozenset):
            return {"set": sorted((self(item) for item in value), key=canonical)}
        if isinstance(value, Mapping):
            if all(isinstance(key, str) for key in value):
                return {key: self(item) for key, item in value.items()}
            return {"items": sorted(([self(k), self(v)] for k, v in value.items()), key=canonical)}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._array(value.detach().cpu().contiguous()), "shape": list(value.shape)}
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return {"array": digest(np.ascontiguousarray(value).tobytes()), "shape": [*value.shape, str(value.dtype)]}
        if isinstance(value, torch.Generator):
            return {"generator": digest(value.get_state().numpy().tobytes())}
        if isinstance(value, functools.partial):
            return {"partial": self(value.func), "args": self(value.args), "keywords": self(value.keywords)}
        if isinstance(value, types.ModuleType):
            package, file = value.__name__.split(".")[0], getattr(value, "__file__", None)
            if file is None or _installed(package):
                self.libraries.add(package)
                return {"module": value.__name__}
            return {"module": value.__name__, "digest": digest(Path(file).read_bytes())}
        if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
            return {"code": f"{value.__module__}.{value.__qualname__}", "digest": self._code(value)}
        if dataclasses.is_dataclass(value):
            fields = {f.name: self(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return {"type": self(type(value)), "fields": fields}
        return self._object(value)

    def _object(self, value: object) -> Plain:
        if isinstance(value, torch.nn.Module):
            raise TypeError(
                f"a cell cannot hold the {type(value).__name__} object itself, whose weights would depend on what ran "
                "before; pass what builds it, such as the class or `lambda: Network(hidden=64)`"
            )
        try:
            state = vars(value)
        except TypeError:
            raise TypeError(
                f"cannot tell whether two objects of type {type(value).__qualname__} are equal in another process; "
                "pass a function that builds the object instead"
            ) from None
        slots = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
        return {"type": self(type(value)), "state": self({**slots, **state})}

    @staticmethod
    def _array(tensor: torch.Tensor) -> str:
        flat = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor
        return digest(str(tensor.dtype).encode() + flat.numpy().tobytes())

    def _code(self, value: object) -> str:
        """A digest of what code does, itself and what it refers to in its own package; not of layout or comments."""
        if id(value) in self._codes:
            return self._codes[id(value)]
        self._codes[id(value)] = "itself"  # recursion
        package = (getattr(value, "__module__", None) or "").split(".")[0]
        if _installed(package):
            self.libraries.add(package)
            found = "installed"
        elif isinstance(value, type):
            found = self._class(value)
        elif isinstance(value, types.FunctionType):  # a decorator's too: what it wraps is in its closure
            found = self._function(value)
        elif callable(value) and isinstance(function := inspect.unwrap(value), types.FunctionType):
            found = self._function(function)
        elif isinstance(value, types.MethodType):
            found = canonical([self(value.__func__), self(value.__self__)])
        else:
            found = repr(type(value))
        self._codes[id(value)] = short = digest(found)
        return short

    def _class(self, value: type) -> str:
        own = {
            name: self._member(member)
            for name, member in vars(value).items()
            if name not in ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__")
            and not name.startswith("_abc_")
        }
        return canonical([[self(base) for base in value.__bases__], own])

    def _member(self, member: object) -> Plain:
        """A part of a class; what cannot be described (a slot, a descriptor of C) is named by its kind."""
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        if isinstance(member, property):
            return [self._member(part) for part in (member.fget, member.fset) if part is not None]
        try:
            return self(member)
        except TypeError:
            return {"kind": type(member).__qualname__}

    def _function(self, function: types.FunctionType) -> str:
        self.libraries |= _imports(function.__code__)
        cells = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
        referred = {name: function.__globals__[name] for name in _names(function.__code__) & set(function.__globals__)}
        return canonical(
            [
                _code_text(function.__code__),
                self(function.__defaults__),
                self(function.__kwdefaults__),
                [self._member(value) for value in cells],
                {name: self._member(value) for name, value in referred.items()},
            ]
        )


def _slots(kind: type) -> set[str]:
    """The attributes of a class and its bases that `vars` does not show."""
    found = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
    names = {name for names in found for name in ([names] if isinstance(names, str) else names)}
    return {name for name in names if not name.startswith("__")}


def _filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*inner)


def _imports(code: types.CodeType) -> set[str]:
    """Top-level packages that the code itself imports when it is called."""
    own = {str(step.argval).split(".")[0] for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"}
    return own.union(*(_imports(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def without_torch(libraries: set[str]) -> bool:
    """Whether code that refers to these packages cannot reach torch, so that a worker need not load it."""
    return libraries <= {*sys.stdlib_module_names, "numpy", "__main__", "builtins"}


def _code_text(code: types.CodeType) -> list[Any]:
    """Instructions and constants; the constants of nested functions too, and not where in a file anything stands."""
    constants = [_code_text(c) if isinstance(c, types.CodeType) else _constant(c) for c in code.co_consts]
    return [code.co_code.hex(), constants, list(code.co_names), list(code.co_varnames), list(code.co_freevars)]


def _constant(value: object) -> Plain:
    if isinstance(value, frozenset):  # its order changes from process to process
        return ["frozenset", *sorted(map(repr, value))]
    return repr(value)


@functools.cache
def _installed(package: str) -> bool:
    """Whether a package is somebody's release, which its version describes, and not the reader's own code."""
    if not package or package == "__main__":
        return False
    if package == "mpkit" or package in sys.builtin_module_names or package in sys.stdlib_module_names:
        return True
    module = sys.modules.get(package)
    path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), "")
    return "site-packages" in str(path) or "dist-packages" in str(path)


@functools.cache
def _mpkit() -> str:
    """mpkit's version and a digest of what it computes with, so that a checkout that is worked on counts as changed."""
    home = Path(__file__).parents[1]
    parts = [p for p in sorted(home.rglob("*.py")) if p.relative_to(home).parts[0] not in (*_DRAW, "experiment")]
    parts += [Path(__file__).with_name(f"{name}.py") for name in ("batches", "parts", "training")]  # what `train` is
    version = importlib.import_module("mpkit").__version__
    return f"{version}+{digest(b''.join(p.read_bytes() for p in parts))[:8]}"


def versions(libraries: set[str]) -> dict[str, str]:
    """Library -> version, of Python, torch, NumPy, mpkit and the packages named."""
    found = {"python": ".".join(platform.python_version_tuple()[:2]), "mpkit": _mpkit()}
    for name in sorted({"numpy", "torch", *libraries} - {"mpkit"}):
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found


def name_of(value: object) -> str:
    """A few characters for a described or plain value: what a table or an axis shows."""
    if isinstance(value, Mapping):
        if "code" in value:
            return str(value["code"]).rsplit(".", 1)[-1]
        for key in ("torch", "enum", "path", "module", "float", "longdouble"):
            if key in value:
                return str(value[key]).removeprefix("torch.")
        if {"partial", "args", "keywords"} <= set(value):
            inner = ", ".join(
                [*map(name_of, value["args"]), *(f"{k}={name_of(v)}" for k, v in value["keywords"].items())]
            )
            return f"{name_of(value['partial'])}({inner})"
        if "fields" in value and isinstance(value["fields"], Mapping):
            named = value["fields"].get("name")
            return str(named) if named else name_of(value["type"])
        if "type" in value:
            return name_of(value["type"])
        if "shape" in value and ("tensor" in value or "array" in value):
            return f"tensor{value['shape']}"
        return "{" + ", ".join(f"{k}: {name_of(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "(" + ", ".join(map(name_of, value)) + ")"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def run_name(run: Callable[..., Any]) -> str:
    """How a run is called in what is stored."""
    return name_of(Description()(run)) if not isinstance(run, functools.partial) else run_name(run.func)
