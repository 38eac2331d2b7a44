"""What a cell and a `run` are, as data: the key under which a result is stored, and what a reader sees of it."""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import enum
import functools
import importlib
import importlib.metadata
import inspect
import math
import platform
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpkit.experiment.references import contents, is_installed, placed, referred
from mpkit.experiment.store import canonical, digest

Plain = str | float | bool | list[Any] | dict[str, Any] | None
"""What JSON can hold."""
_DRAW = ("plots", "explorers", "widgets", "check", "bench")  # parts of mpkit that no run computes with


class Description:
    """Turns values into JSON that names them completely: numbers as they are, code and arrays by a digest.

    One object describes everything of one experiment, so that a data set is read once; what else was described before
    changes nothing. `libraries` collects the top-level packages that the described code refers to and that are not
    followed into.

    Raises:  TypeError for what has no content that could be compared in another process. Among what code refers to,
             such a thing (a lock, an open file) is named by its kind, and all around it is described.
    """

    def __init__(self) -> None:
        self.libraries: set[str] = set()
        self._whole: dict[int, tuple[Any, Plain]] = {}  # the object is kept, or its id could be given to another
        self._seen: dict[tuple[int, bool, bool], tuple[Any, Any]] = {}
        self._depth = 0
        self._in_code = self._named = False  # inside code a network may stand; whether what cannot be read is named

    def __call__(self, value: object) -> Plain:
        """JSON for `value`."""
        data = isinstance(value, torch.Tensor | np.ndarray)
        if id(value) in self._whole and (data or not self._depth):
            return self._whole[id(value)][1]
        self._depth += 1
        try:
            found = self._of(value)
        finally:
            self._depth -= 1
            if not self._depth:
                self._seen = {}  # where a circle is entered depends on the value alone
        if data or not self._depth:
            self._whole[id(value)] = (value, found)
        return found

    def _of(self, value: object) -> Plain:
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, str):
            return value if (code := placed(value)) is None else {"code": value, "is": self._member(code)}
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, enum.Enum):
            return {"enum": f"{type(value).__qualname__}.{value.name}", "value": self._member(value.value)}
        if isinstance(value, torch.dtype | torch.device):
            return {"torch": str(value)}
        if isinstance(value, np.longdouble):
            return {"longdouble": np.format_float_positional(value, unique=True)}
        if isinstance(value, np.generic):
            return self(value.item())
        if isinstance(value, Path):
            return {"path": str(value)}
        key = (id(value), self._in_code, self._named)
        found = self._seen.get(key)
        if found is None:
            self._seen[key] = (value, {"loop": type(value).__qualname__})  # met again inside itself
            self._seen[key] = found = (value, self._kind_or(value))
        return found[1]

    def _kind_or(self, value: object) -> Plain:
        try:
            return self._described(value)
        except Exception as error:  # a tensor without content, a weak reference to what is gone, ...
            if not self._named or isinstance(error, RecursionError):
                raise
            return {"kind": type(value).__qualname__}

    def _described(self, value: object) -> Plain:
        if isinstance(value, list | tuple):
            return [self(item) for item in value]
        if isinstance(value, set | frozenset):
            return {"set": sorted((self(item) for item in value), key=canonical)}
        if isinstance(value, Mapping):
            if all(isinstance(key, str) for key in value):
                return {key: self(value[key]) for key in sorted(value)}
            return {"items": sorted(([self(k), self(v)] for k, v in value.items()), key=canonical)}
        if isinstance(value, bytes | bytearray):
            return {"bytes": digest(bytes(value))}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._array(value.detach().cpu()), "shape": list(value.shape)}
        if isinstance(value, np.ndarray):
            content = self(value.tolist()) if value.dtype.hasobject else digest(np.ascontiguousarray(value).tobytes())
            return {"array": content, "shape": [*value.shape, str(value.dtype)]}
        if isinstance(value, torch.Generator):
            return {"generator": digest(value.get_state().numpy().tobytes())}
        if isinstance(value, functools.partial):
            return {"partial": self(value.func), "args": self(value.args), "keywords": self(value.keywords)}
        if isinstance(value, types.ModuleType):
            package = value.__name__.split(".")[0]
            if is_installed(package):
                self.libraries.add(package)
                return {"module": value.__name__}
            return {"module": value.__name__, "holds": self._members(contents(value))}
        if (plain := _uncompiled(value)) is not value:
            return {"compiled": self(plain)}
        if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
            home = getattr(value, "__module__", None)  # a method of a class in C has none
            return {"code": f"{home}.{value.__qualname__}", "digest": self._code(value)}
        return self._object(value)

    def _object(self, value: object) -> Plain:
        if isinstance(value, torch.nn.Module) and not self._in_code:
            raise TypeError(
                f"a cell cannot hold the {type(value).__name__} object itself, whose weights would depend on what ran "
                "before; pass what builds it, such as the class or `lambda: Network(hidden=64)`"
            )
        kind = type(value)
        named, own = self._named, not is_installed(kind.__module__.split(".")[0])
        self._named = named and own  # of others' objects all or nothing: what lies inside is not the reader's business
        try:
            if dataclasses.is_dataclass(value):
                fields = {
                    f.name: self(getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)
                }
                more = {name: self(held) for name, held in getattr(value, "__dict__", {}).items() if name not in fields}
                return {"type": self(kind), "fields": fields, **({"state": more} if more else {})}
            if hasattr(value, "__dict__") and not _pickles_itself(kind):
                slots = {name: getattr(value, name) for name in _slots(kind) if hasattr(value, name)}
                return {"type": self(kind), "state": self({**slots, **vars(value)})}
            return {"type": self(kind), "made": self(_reduced(value))}
        finally:
            self._named = named

    @staticmethod
    def _array(tensor: torch.Tensor) -> str:
        parts = [tensor]
        if tensor.layout is not torch.strided:
            entries = tensor.to_sparse_coo().coalesce()
            parts = [entries.indices(), entries.values()]
        flat = [part.resolve_conj().resolve_neg().reshape(-1).contiguous() for part in parts if part.numel()]
        return digest(str(tensor.dtype).encode() + b"".join(part.view(torch.uint8).numpy().tobytes() for part in flat))

    def _code(self, value: object) -> str:
        """A digest of what code does, itself and what it refers to that is the reader's; not of layout or comments."""
        package = (getattr(value, "__module__", None) or "").split(".")[0]
        bound = getattr(value, "__self__", None)
        if isinstance(value, types.MethodType):
            return digest(canonical([self(value.__func__), self(bound)]))
        if isinstance(value, types.BuiltinMethodType) and not isinstance(bound, types.ModuleType | type | None):
            return digest(canonical([self(bound), value.__name__]))
        if is_installed(package):
            self.libraries.add(package)
            return digest("installed")
        if isinstance(value, type):
            return digest(self._class(value))
        if isinstance(value, types.FunctionType):  # a decorator's too: what it wraps is in its closure
            return digest(self._function(value))
        if callable(value) and isinstance(function := inspect.unwrap(value), types.FunctionType):
            return digest(self._function(function))
        return digest(repr(type(value)))

    def _class(self, value: type) -> str:
        own = {
            name: self._member(member)
            for name, member in vars(value).items()
            if name not in _OF_EVERY_CLASS and not name.startswith("_abc_")
        }
        return canonical([[self(base) for base in value.__bases__], own])

    def _member(self, member: object) -> Plain:
        """A part of code; what cannot be described (a slot, a descriptor of C) is named by its kind."""
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        if isinstance(member, functools.cached_property):  # it holds a lock
            member = member.func
        if isinstance(member, property):
            return [self._member(part) for part in (member.fget, member.fset, member.fdel) if part is not None]
        before = self._in_code, self._named
        self._in_code = self._named = True
        try:
            return self(member)
        finally:
            self._in_code, self._named = before

    def _members(self, members: Mapping[str, Any]) -> dict[str, Plain]:
        return {name: self._member(value) for name, value in members.items()}

    def _function(self, function: types.FunctionType) -> str:
        cells = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
        names, libraries = referred(function)
        self.libraries |= libraries
        return canonical(
            [
                self._code_text(function.__code__),
                self._member(function.__defaults__),
                self._member(function.__kwdefaults__),
                [self._member(value) for value in cells],
                self._members(names),
                self._members(vars(function)),
            ]
        )

    def _code_text(self, code: types.CodeType) -> list[Any]:
        """Instructions and constants; those of nested functions too, and not where in a file anything stands."""
        texts = [self._code_text(c) if isinstance(c, types.CodeType) else self._constant(c) for c in code.co_consts]
        counts = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags]
        caught = getattr(code, "co_exceptiontable", b"")  # what stands in a try, from Python 3.11 on
        names = [list(code.co_names), list(code.co_varnames), list(code.co_freevars)]
        return [code.co_code.hex(), caught.hex(), texts, counts, *names]

    def _constant(self, value: object) -> Plain:
        if isinstance(value, frozenset):  # its order changes from process to process
            return ["frozenset", *sorted(map(repr, value))]
        return repr(value) if not isinstance(value, str) or placed(value) is None else self(value)


_OF_EVERY_CLASS = frozenset(
    ["__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__", "__static_attributes__"]
)


def _uncompiled(value: object) -> object:
    """What `torch.compile` was given, whose own objects change as they are used; any other value is returned."""
    if isinstance(value, torch.nn.Module):
        return getattr(value, "_orig_mod", value)
    return getattr(value, "_torchdynamo_orig_callable", value) if isinstance(value, types.FunctionType) else value


def _pickles_itself(kind: type) -> bool:
    """Whether a class says what pickle is to keep of its objects: that is their content, and no cache of theirs."""
    own = [getattr(kind, name, None) is not getattr(object, name, None) for name in ("__reduce__", "__reduce_ex__")]
    state = getattr(kind, "__getstate__", None) is not getattr(object, "__getstate__", None)
    return any(own) or state or kind in copyreg.dispatch_table


def _reduced(value: object) -> list[Any]:
    """What pickle would make an object from: a function, its arguments, and what is put in afterwards.

    Raises:  TypeError where pickle could not, and for an iterator, which is another one after each use.
    """
    try:
        if isinstance(value, Iterator):
            raise TypeError("it is used up")
        made = copyreg.dispatch_table.get(type(value), lambda held: held.__reduce_ex__(4))(value)
    except Exception as error:
        raise TypeError(
            f"cannot tell whether two objects of type {type(value).__qualname__} are equal in another process; "
            "pass a function that builds the object instead"
        ) from error
    if isinstance(made, str):
        return [made]
    return [list(part) if isinstance(part, Iterator) else part for part in made]


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


def without_torch(libraries: set[str]) -> bool:
    """Whether code that refers to these packages cannot reach torch, so that a worker need not load it."""
    return libraries <= {*sys.stdlib_module_names, "numpy", "__main__", "builtins"}


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
    for name in sorted({"numpy", "torch", *libraries} - {"mpkit", *sys.stdlib_module_names}):
        if (version := _version(name)) is not None:
            found[name] = version
    return found


@functools.cache
def _version(library: str) -> str | None:
    """The version of an installed library, the same whether it was imported already or not; None where it has none."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(library)
    names = importlib.metadata.packages_distributions().get(library, [])
    if names:
        return importlib.metadata.version(names[0])
    version = getattr(sys.modules.get(library), "__version__", None)
    return version if isinstance(version, str) else None


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
