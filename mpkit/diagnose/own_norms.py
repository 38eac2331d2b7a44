"""Modules that ask for float32 themselves, which O2 and O3 override: found by what their forward computes."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator

from torch import nn

from mpkit.casting.operations import words

# sums and roots of squares, and the angles of positions: bfloat16 counts to 256, float16 to 2048
_DELICATE = frozenset(
    words("rsqrt sqrt pow square mean var std norm softmax log_softmax logsumexp exp log sum sin cos")
)


def own_norms(network: nn.Module, protected: tuple[type[nn.Module], ...]) -> Iterator[tuple[str, str]]:
    """(path, class) of the first module of each class whose forward casts to float32 and then adds up, takes roots or
    the sine of an angle.

    Left out are torch's own modules, those of a `protected` class, and classes without Python source.
    """
    seen: set[type] = set()
    for path, module in network.named_modules():
        kind = type(module)
        if kind in seen or kind.__module__.startswith("torch.") or isinstance(module, protected):
            continue
        seen.add(kind)
        if _asks_for_float32(kind):
            yield path or "the network", kind.__name__


def _asks_for_float32(kind: type[nn.Module]) -> bool:
    nodes = [node for tree in _trees(kind) for node in ast.walk(tree)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    widened = any(_name(call) == "float" or (_name(call) in ("to", "type") and _says_float32(call)) for call in calls)
    told = any(_name(call) in _DELICATE and _says_float32(call) for call in calls)
    powers = any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) for node in nodes)
    return told or (widened and (powers or any(_name(call) in _DELICATE for call in calls)))


def _trees(kind: type[nn.Module]) -> Iterator[ast.AST]:
    """The source of a class's forward, of the methods of the class that it calls and of the functions beside it."""
    todo, seen = ["forward"], set()
    beside = vars(sys.modules[kind.__module__]) if kind.__module__ in sys.modules else {}
    while todo:
        name = todo.pop()
        seen.add(name)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(kind, name, None) or beside[name])))
        except (OSError, TypeError, SyntaxError, KeyError):
            continue
        yield tree
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        methods = {_name(node) for node in calls if _of_self(node.func)} - set(dir(nn.Module))
        functions = {node.func.id for node in calls if isinstance(node.func, ast.Name)}
        own = {
            f
            for f in functions
            if getattr(beside.get(f), "__module__", "") == kind.__module__ and inspect.isfunction(beside[f])
        }
        todo += sorted((methods | own) - seen)


def _of_self(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self"


def _says_float32(call: ast.Call) -> bool:
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any(isinstance(value, ast.Attribute) and value.attr in ("float32", "float") for value in given)


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
