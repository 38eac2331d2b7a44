"""Where submissions run: a process of its own, limited in time, memory and files, that gets one cell at a time.

`labs.py` starts it. A test reaches the process when its answer has run, so nothing can read it before. Cells of the lab
run as they are; a student's code is read first (`problem`), is compiled with guarded reads and writes (`Guard`) and
sees a short list of built-ins. What a test calls by a name with _ stands in no namespace of an answer. Before each cell
of the lab every name of the lab, and every built-in, is put back, and so are the numbers in its tensors, arrays, lists
and dicts: an answer that changes them in place changes no later question. INSTRUCTOR.md says what this does not
protect from.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import json
import math
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from itertools import islice
from pathlib import Path
from typing import Any

MEMORY = 4 * 2**30  # bytes of a process's own data; torch takes 1 GiB of them
FILE = 2**26  # bytes of a file that it writes
GRACE = 10.0  # seconds more than a cell may take, until the process is ended
WORDS = 300  # characters of what is told of a cell

MODULES = {
    *(
        "math",
        "cmath",
        "itertools",
        "functools",
        "collections",
        "collections.abc",
        "statistics",
        "fractions",
        "decimal",
    ),
    *("numbers", "typing", "dataclasses", "copy", "random", "bisect", "heapq", "time", "__future__"),
    *("numpy", "torch", "torch.nn", "torch.nn.functional", "torch.optim"),
}
LIBRARIES = {name.partition(".")[0] for name in MODULES} | {"mpkit"}
NO_NAMES = {
    *("open", "exec", "eval", "compile", "getattr", "setattr", "delattr", "vars", "globals", "locals", "dir", "input"),
    *("breakpoint", "memoryview", "exit", "quit", "help", "get_ipython", "classmethod", "property", "copyright"),
}
# attributes through which code, files, other modules, frames or the rules of torch and NumPy can be reached
NO_ATTRIBUTES = {
    *("os", "sys", "io", "builtins", "importlib", "inspect", "ctypes", "subprocess", "types", "gc", "warnings", "re"),
    *("operator", "attrgetter", "methodcaller", "Formatter", "threading", "platform", "weakref", "copyreg", "pickle"),
    *("load", "save", "loadtxt", "savetxt", "genfromtxt", "savez", "savez_compressed", "fromfile", "tofile", "memmap"),
    *("from_file", "DataSource", "open_memmap", "dump", "dumps", "hub", "library", "ops", "classes", "overrides"),
    *("testing", "utils", "serialization", "multiprocessing", "distributed", "jit", "fx", "compiler", "package"),
    *("onnx", "export", "lib", "ctypeslib", "f2py", "core", "futures", "as_subclass", "set_default_tensor_type"),
    *("update_wrapper", "wraps", "total_ordering", "singledispatch", "singledispatchmethod", "cached_property"),
    *("make_dataclass", "namedtuple", "UserDict", "UserList", "UserString", "ForwardRef", "get_type_hints"),
    *("gi_frame", "gi_code", "cr_frame", "ag_frame", "tb_frame", "tb_next", "f_back", "f_globals", "f_locals"),
    *("f_builtins", "func_globals", "with_traceback", "format_map", "compile", "bmat", "asmatrix", "mat"),
}
GLOBAL_HOOKS = ("register_module_", "register_optimizer_")
UTILS = {"clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm", "parameters_to_vector"}
METHODS = {"__init__", "__call__", "__len__", "__iter__", "__next__", "__getitem__"}


# --- the process that grades


@dataclass(frozen=True)
class Step:
    """One cell: of the lab ("given"), a test of it ("test") or a student's ("answer", with the question's solution)."""

    kind: str
    source: str
    solution: str = ""


def run(
    steps: Iterable[Step], expected: Mapping[str, Iterable[str]], timeout: float, memory: int = MEMORY
) -> list[str | None]:
    """What went wrong in each cell, "" where nothing did, None where it did not run.

    Args:    expected: each name that an answer defines, with the names in its solution; timeout: seconds for a cell.
    """
    ends: list[str | None] = []
    with tempfile.TemporaryDirectory(prefix="mpkit-grading-") as folder:
        environment = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
        environment |= {key: os.environ[key] for key in ("MPKIT_DATA", "LD_LIBRARY_PATH") if key in os.environ}
        process = subprocess.Popen(
            [sys.executable, "-I", __file__],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            path = [str(Path(p).resolve()) for p in sys.path]
            key = secrets.token_hex()
            head = {"path": path, "timeout": timeout, "memory": memory, "key": key}
            head["expected"] = {name: sorted(names) for name, names in expected.items()}
            _send(process, head)
            for step in steps:
                ends.append(_one(process, step, key, timeout + GRACE) if None not in ends else None)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it started
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
    return ends


def _send(process: Any, message: Any) -> None:
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


def _one(process: Any, step: Step, key: str, timeout: float) -> str | None:
    """What the process answers; None where it ends, or says anything without the key that only its own code has."""
    import selectors

    with contextlib.suppress(OSError, ValueError, TypeError), selectors.DefaultSelector() as waiting:
        _send(process, vars(step))
        waiting.register(process.stdout, selectors.EVENT_READ)
        if waiting.select(timeout):
            said, end = json.loads(process.stdout.readline(20 * WORDS))
            return str(end) if said == key else None
    return None


# --- what a student's code may be


def cleaned(source: str) -> str:
    """Without the lines that only IPython reads."""
    return re.sub(r"^[%!?].*$", "", source, flags=re.M)


def names_in(tree: ast.AST) -> set[str]:
    """Every name and attribute that code mentions, and the last part of what it imports."""
    found = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    found |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    return found | {alias.name.split(".")[-1] for n in imports for alias in n.names}


def bound(tree: ast.AST) -> set[str]:
    """Names that the top level of code gives a value."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        else:
            found |= bound(node)
    return found


def problem(tree: ast.Module, imports: set[str]) -> str:
    """Why a student's code is not run, "" where nothing stands against it.

    Args:    imports: "module.name" of the lab's own imports, which an answer may repeat.
    """
    plain = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call) and len(n.args) == 1 and not n.keywords}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "type" and id(node) not in plain:
            return f"line {node.lineno}: type, other than type(x), is not allowed in an answer"
        for found in _problems(node, imports):
            if found:
                return f"line {getattr(node, 'lineno', 0)}: {found} is not allowed in an answer"
    return ""


def _problems(node: ast.AST, imports: set[str]) -> Iterator[str]:
    yield from (name for name in _given_names(node) if re.match("__" if isinstance(node, ast.arg) else "_.", name))
    if isinstance(node, ast.MatchClass):  # case object(__globals__=g)
        yield from (f".{name}" for name in node.kwd_attrs if name.startswith("_") or name in NO_ATTRIBUTES)
    if isinstance(node, ast.Import):
        yield from (_imported(alias.name, "", imports) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (_imported(node.module or ".", alias.name, imports) for alias in node.names)
    elif isinstance(node, ast.Name) and (node.id in NO_NAMES or re.match("_.", node.id)):
        yield node.id  # the hidden tests' own names begin with _
    elif isinstance(node, ast.Attribute):
        own = isinstance(node.value, ast.Name) and node.value.id == "self"
        hidden = node.attr != "__init__" and node.attr.startswith("__" if own else "_")
        barred = node.attr in NO_ATTRIBUTES or node.attr.startswith(GLOBAL_HOOKS)
        words = node.value.value if isinstance(node.value, ast.Constant) else "._"
        hidden = hidden or (node.attr == "format" and ("._" in str(words) or "[" in str(words)))  # "{0.__globals__}"
        if hidden or (barred and not own and not _is_clipping(node)):
            yield f".{node.attr}"
    elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        if node.name.startswith("__") and node.name not in METHODS:
            yield node.name
        if any(k.arg == "metaclass" for k in getattr(node, "keywords", [])):
            yield "a metaclass"
    elif isinstance(node, ast.Global):
        yield "global (pass the value, and return it)"


def _given_names(node: ast.AST) -> list[str]:
    """Names that a node gives to something without an `ast.Name`: `import x as y`, `except x as y`, `case y`, ..."""
    if isinstance(node, ast.keyword | ast.Attribute | ast.Name | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return []  # these give none, or are looked at by themselves
    fields = {key: value for key, value in ast.iter_fields(node) if key in ("name", "asname", "arg", "rest", "names")}
    if isinstance(node, ast.alias):
        fields.pop("name")  # what is imported, which `_imported` looks at
    found = [part for value in fields.values() for part in (value if isinstance(value, list) else [value])]
    return [part for part in found if isinstance(part, str)]


def _is_clipping(node: ast.Attribute) -> bool:
    """`nn.utils`, of which `problem` sees no other use than those in UTILS."""
    return node.attr == "utils" and isinstance(node.value, ast.Name | ast.Attribute) and "nn" in ast.unparse(node.value)


def _imported(module: str, name: str, imports: set[str]) -> str:
    if f"{module}.{name}" in imports:
        return ""
    known = module in MODULES and name not in NO_ATTRIBUTES | {"*"} and name[:1] != "_"
    if known and (not name or _offers(module, name)):
        return ""
    if module == "torch.nn.utils" and name in UTILS:
        return ""
    return f"import of {f'{module}.{name}'.strip('.')}"


def _offers(module: str, name: str) -> bool:
    """Whether a module of the standard library lists a name; of a larger library what its lists do not exclude."""
    if module.partition(".")[0] in ("torch", "numpy") or f"{module}.{name}" in MODULES:
        return True
    return name in getattr(importlib.import_module(module), "__all__", [name])


class Guard(ast.NodeTransformer):
    """`a.b`, `a.b = c` and `a[b] = c` ask first whether `a` is a student's to look into, or to change."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "utils":
            node.value = ast.Call(ast.Name("__only_clipping__", ast.Load()), [node.value], [])
        elif not isinstance(node.ctx, ast.Load):
            node.value = ast.Call(ast.Name("__writable__", ast.Load()), [node.value, ast.Constant(node.attr)], [])
        elif node.attr != "__init__":  # of super(), which has to stand where it is
            return ast.Call(ast.Name("__read__", ast.Load()), [node.value, ast.Constant(node.attr)], [])
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Store | ast.Del):
            node.value = ast.Call(ast.Name("__writable__", ast.Load()), [node.value], [])
        return node


def writable(thing: Any, name: str = "") -> Any:
    """The thing itself, unless it is a module, a class or a function, or the attribute is not a student's."""
    kinds = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
    if isinstance(thing, kinds) or type(thing).__module__ == "torch._ops":
        raise PermissionError(f"an answer may not change {getattr(thing, '__name__', thing)}")
    _check_own(thing, name)
    return thing


def read(thing: Any, name: str) -> Any:
    """The attribute of that name, unless it leads out of the libraries that an answer may use.

    Many a module holds others that it needs itself, which no list of names is long enough for.
    """
    _check_own(thing, name)
    kinds: tuple[type, ...] = (types.ModuleType,)
    if isinstance(thing, types.ModuleType):
        _check_home(thing)  # the lab may have imported others for itself
        if thing.__name__ in MODULES and not _offers(thing.__name__, name):
            raise PermissionError(f".{name} of {thing.__name__} is not allowed in an answer")
        kinds = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType)
    found = getattr(thing, name)
    if isinstance(found, kinds):
        _check_home(found, f".{name} leads to ")
    return found


def _check_home(thing: Any, how: str = "") -> None:
    home = thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__
    if home and home.lstrip("_").partition(".")[0] not in LIBRARIES:
        raise PermissionError(f"{how}{home}, which is not allowed in an answer")


def _check_own(thing: Any, name: str) -> None:
    """A hidden name, or one of `NO_ATTRIBUTES`, is let through for `self`, and that may be anything."""
    if (name.startswith("_") or name in NO_ATTRIBUTES) and type(thing).__module__ != "__main__":
        raise PermissionError(f".{name} of what is not the answer's own is not allowed in an answer")


class _Clipping:
    """What an answer sees of `torch.nn.utils`."""

    def __init__(self, nn: Any) -> None:
        self.utils = types.SimpleNamespace(**{name: vars(nn.utils)[name] for name in UTILS if name in vars(nn.utils)})


# --- the process that is graded


def held(thing: Any) -> Callable[[], None]:
    """A function that gives the thing the content that it has now: the thing itself, so that who knows it sees it."""
    kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
    if kind in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        content, numbers = thing.detach().clone(), thing.detach()
        return lambda: _whole(thing, numbers, content)
    if kind == "numpy.ndarray":
        values = thing.copy()
        return lambda: thing.__setitem__(..., values) if thing.flags.writeable else None
    if isinstance(thing, list | dict | set):
        parts = [held(part) for part in (thing.values() if isinstance(thing, dict) else thing)]
        kept = type(thing)(thing) if type(thing) in (list, dict, set) else None

        def back() -> None:
            if kept is not None:
                thing.clear()
                thing.extend(kept) if isinstance(thing, list) else thing.update(kept)
            for part in parts:
                part()

        return back
    inner = thing if isinstance(thing, tuple) else vars(thing).values() if is_dataclass(type(thing)) else ()
    if any(f"{c.__module__}.{c.__qualname__}" == "torch.nn.modules.module.Module" for c in type(thing).__mro__):
        inner = [*thing.parameters(), *thing.buffers()]
    parts = [held(part) for part in inner]
    return lambda: [part() for part in parts].clear()


def _whole(tensor: Any, numbers: Any, content: Any) -> None:
    """`numbers` shares the memory of the tensor as it was, `content` does not."""
    numbers.copy_(content)
    if tensor.detach().shape != content.shape or tensor.dtype != content.dtype:  # x.resize_, x.data = ...
        tensor.data = numbers


def brief(thing: Any, items: int = 6) -> str:
    """A value in a few characters, for a message. No method of a student's class is called."""
    kind, name = type(thing), type(thing).__qualname__
    with contextlib.suppress(Exception):  # an endless list, a number of 5,000 digits, a tensor without content
        if f"{kind.__module__}.{name}" in ("torch.Tensor", "torch.nn.parameter.Parameter", "numpy.ndarray"):
            few = math.prod(thing.shape) <= items
            return f"{name.lower()}({thing.tolist()})" if few else f"{name.lower()} of shape {tuple(thing.shape)}"
        if kind in (list, tuple, set, dict):
            parts = [brief(part, items // 2) for part in islice(thing, items)]
            if kind is dict:
                parts = [f"{key}: {brief(value, items // 2)}" for key, value in zip(parts, thing.values())]
            ends = {list: "[]", tuple: "()"}.get(kind, "{}")
            return f"{ends[0]}{', '.join(parts + ['...'] * (len(thing) > items))}{ends[1]}"
        if kind in (bool, int, float, complex, str, type(None)) or kind.__module__ in ("torch", "numpy"):
            return f"{thing!r}"[:40]
    return str(thing.__name__) if kind in (types.FunctionType, type) else f"<{name}>"


@dataclass
class Room:
    """The namespace in which the cells of one submission run."""

    expected: dict[str, set[str]]  # each name that an answer defines -> the names in its solution
    space: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    hidden: dict[str, Any] = field(default_factory=dict)  # that in which the tests run: no function of an answer has it
    secret: dict[str, Any] = field(default_factory=dict)  # names of the tests that begin with _
    kept: dict[str, Any] = field(default_factory=dict)  # what the lab's cells have defined
    contents: dict[str, Callable[[], None]] = field(default_factory=dict)  # name -> what puts its content back
    imports: set[str] = field(default_factory=set)  # "module.name" of the lab's own imports
    library: set[str] = field(default_factory=set)  # names through which they reach mpkit
    used: dict[str, set[str]] = field(default_factory=dict)  # a student's function -> names in it
    helpers: dict[str, set[str]] = field(default_factory=dict)  # a function of the lab -> names in it
    call: str = ""  # the last call of a student's function by the lab
    end: Any = None  # what that call returned or raised

    def __post_init__(self) -> None:
        held = {name: value for name, value in vars(builtins).items() if name not in NO_NAMES}
        self.safe = {
            **held,
            "type": lambda thing: type(thing),
            "print": lambda *_, **__: None,
            "display": lambda *_, **__: None,
        }

    def given(self, source: str, hidden: bool = False) -> None:
        """A cell of the lab or, `hidden`, one of its tests."""
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mpkit"):
                self.library |= {alias.asname or alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                self.imports |= {f"{node.module}.{alias.name}" for alias in node.names}
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        self.helpers |= {node.name: names_in(node) for node in functions if node.name not in self.expected}
        for name in [n for n in self.space if n in vars(builtins)]:  # `all = lambda _: True`
            del self.space[name]
        self.space.update(self.kept)
        for put_back in self.contents.values():
            put_back()
        self.space |= {"__builtins__": vars(builtins), "__names__": self.names, "__ask__": self.ask}
        self.space["__name__"], self.call = "__main__", ""
        ast.fix_missing_locations(_Watched(self.expected).visit(tree))
        if hidden:
            self._test(tree)
        else:
            exec(compile(tree, "<lab>", "exec"), self.space)
        names = self.hidden if hidden else self.space
        fresh = {name: names[name] for name in bound(tree) - self.expected.keys() if name in names}
        self.kept |= {name: value for name, value in fresh.items() if name in self.space}
        self.contents |= {name: held(value) for name, value in fresh.items()}

    def _test(self, tree: ast.Module) -> None:
        """Run a test among all names, in a dict that stays one for its functions.

        What it gives a name is there for answers too after each statement, unless the name begins with _.
        """
        self.hidden.clear()
        self.hidden |= self.space | self.secret
        for statement in tree.body:
            exec(compile(ast.Module([statement], []), "<lab>", "exec"), self.hidden)
            for name in bound(ast.Module([statement], [])) & set(self.hidden):
                (self.secret if name.startswith("_") else self.space)[name] = self.hidden[name]

    def answer(self, source: str, solution: str) -> None:
        """A student's cell. `solution`: that of its question; "" for a cell that the student added before an answer.

        What such a cell defines in place of an answer may use what that answer may.
        """
        self.call, tree = "", ast.parse(cleaned(source))
        if found := problem(tree, self.imports):
            raise PermissionError(found)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.used[node.name] = names_in(node)
        for node in tree.body:  # f = lambda x: ..., from torch import half as f
            for name in bound(ast.Module([node], [])) - set(self.used):
                self.used[name] = names_in(node)
        asked = bound(ast.parse(solution) if solution else tree) & self.expected.keys()
        if asked:
            solved = set().union(*(self.expected[name] for name in asked))
            allowed = self.closure(solved, self.helpers)  # also to write a helper anew
            taken = self.closure(names_in(tree) | asked, self.used) & self.library - allowed - self.expected.keys()
            if taken:
                raise PermissionError(f"{min(taken)} of the library is not for this question: write it yourself")
        self.space |= {"__builtins__": self.safe, "__writable__": writable, "__read__": read}
        self.space["__only_clipping__"] = _Clipping
        exec(compile(ast.fix_missing_locations(Guard().visit(tree)), "<answer>", "exec"), self.space)

    def closure(self, names: set[str], functions: dict[str, set[str]]) -> set[str]:
        """Names, and those in the functions that they name, and so on."""
        found, open_ = set(names), list(names)
        while open_:
            fresh = functions.get(open_.pop(), set()) - found
            found |= fresh
            open_ += fresh
        return found

    def names(self, function: str) -> set[str]:
        """What a student's function mentions, in helpers too: for tests that ask whether it is the student's own."""
        return self.closure({function}, self.used)

    def ask(self, name: str, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """What a student's function returns to the lab; the call and its end are kept for `told`."""
        parts = [*map(brief, given), *(f"{key}={brief(value)}" for key, value in named.items())]
        call = f"{name}({', '.join(parts)})"  # before the function can change what it is given
        call = call if len(call) <= 120 else f"{call[:116]}...)"
        try:
            self.end = function(*given, **named)
        except BaseException as raised:
            self.end = raised
            raise
        finally:
            self.call = call
        return self.end

    def told(self, raised: BaseException) -> str:
        """Why a cell failed: which call of a student's function raised what, where it did, or left a test helpless."""
        words = f"{type(raised).__name__}: {raised}".splitlines()[0].removesuffix(": ")
        if isinstance(raised, NameError) and raised.name in self.expected and _place(raised) == "<lab>":
            return f"no answer defines {raised.name}"
        if not self.call or (isinstance(raised, AssertionError) and _place(raised) == "<lab>"):
            return words
        late, returned = isinstance(raised, KeyboardInterrupt), brief(self.end)[:100]
        if raised is self.end:
            return f"{self.call} took too long" if late else f"{self.call} raised {words}"
        return words if late else f"{self.call} returned {returned}, and with that the test could not go on: {words}"


def _place(raised: BaseException) -> str:
    """The code in which it was raised: that of the lab, an answer, or a file."""
    frames = list(traceback.walk_tb(raised.__traceback__))
    return frames[-1][0].f_code.co_filename if frames else ""


class _Watched(ast.NodeTransformer):
    """Tests see more: `f.__code__.co_names` has the names in the helpers of f too, and `f(x)` is kept by `Room.ask`."""

    def __init__(self, expected: Iterable[str]) -> None:
        self.expected = expected

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in self.expected:
            node.args[:0] = [ast.Constant(node.func.id), node.func]
            node.func = ast.Name("__ask__", ast.Load())
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        text = re.fullmatch(r"(\w+)\.__code__\.co_names", ast.unparse(node))
        if not text:
            return self.generic_visit(node)
        return ast.Call(ast.Name("__names__", ast.Load()), [ast.Constant(text.group(1))], [])


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt("the cell took too long")


def _serve() -> None:
    """Read cells from stdin and answer each; what a cell prints goes nowhere."""
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    head = json.loads(orders.readline())
    for what, most in (("DATA", head["memory"]), ("FSIZE", FILE), ("NOFILE", 256), ("CORE", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{what}"), (most, most))
    sys.path[:] = head["path"]
    signal.signal(signal.SIGALRM, _interrupt)
    room = Room({name: set(names) for name, names in head["expected"].items()})
    for line in orders:
        step, error = json.loads(line), ""
        signal.setitimer(signal.ITIMER_REAL, head["timeout"])
        try:
            if step["kind"] == "answer":
                room.answer(step["source"], step["solution"])
            else:
                room.given(step["source"], hidden=step["kind"] == "test")
        except BaseException as raised:  # SystemExit and KeyboardInterrupt are ends of a cell like any other
            error = room.told(raised)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps([head["key"], error[:WORDS]]) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
