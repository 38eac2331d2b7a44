"""Which torch functions form one operator, however they are spelled, and what kinds of operators there are.

A framework's list names operators (MatMul, ReLU); torch spells each in several ways: `torch.matmul`, `x.matmul(w)`,
`x @ w`, `F.relu`. Here an operator is a name, and `spellings` finds every torch function behind it. A rule knows a
function by its `__name__`, which is the same in all homes, so the kinds below are sets of such names.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import get_overridable_functions

_TABLES = tomllib.loads(Path(__file__).with_name("operations.toml").read_text("utf-8"))
LISTS = {table: {name: tuple(text.split()) for name, text in rows.items()} for table, rows in _TABLES.items()}
MODULES: dict[str, tuple[type[nn.Module], ...]] = {
    name: tuple(getattr(nn, kind) for kind in kinds) for name, kinds in LISTS["modules"].items()
}
Function = Callable[..., Any]
_HOMES: tuple[Any, ...] = (torch, Tensor, F, torch.linalg, torch.special)


def spellings(*operators: str) -> frozenset[Function]:
    """Every torch function that is one of `operators`: as a function, a method, a symbol.

    >>> spellings("relu") == {torch.relu, torch.Tensor.relu, torch.nn.functional.relu}
    True
    """
    names = [name for operator in operators for name in (operator, *LISTS["spellings"].get(operator, ()))]
    return frozenset(filter(callable, (getattr(home, name, None) for home in _HOMES for name in names)))


def names_of(*operators: str) -> frozenset[str]:
    """The `__name__` of every spelling of `operators`."""
    return frozenset(function.__name__ for function in spellings(*operators))


def canonical(operator: str) -> Function:
    """The torch function that stands for an operator: F's if it has one, else torch's, else the method."""
    return next(getattr(home, operator) for home in (F, torch, Tensor) if callable(getattr(home, operator, None)))


def operator_of(function: object) -> str | None:
    """The operator that a torch function spells, None if it is no operator on tensors.

    >>> operator_of(torch.Tensor.__matmul__), operator_of(torch.ger), operator_of(print)
    ('matmul', 'outer', None)
    """
    name = getattr(function, "__name__", "")
    if not callable(function) or isinstance(function, type):
        return None
    if function not in _on_tensors() and function is not getattr(F, name, None):  # F.tanh only calls x.tanh()
        return None
    name = name.removeprefix("special_").removeprefix("linalg_")
    operator = next((key for key, others in LISTS["spellings"].items() if name in others), name)
    return operator if function in spellings(operator) else None


@cache
def _on_tensors() -> frozenset[Function]:
    """Every torch function that a mode sees, which leaves out `torch.manual_seed` and the like."""
    return frozenset(function for functions in get_overridable_functions().values() for function in functions)


# --- kinds of functions, by name: what each is stands beside its list -------------------------------------------------

KINDS = {kind: frozenset(names) for kind, names in LISTS["kinds"].items()}
# x.add_(y), F.elu_(x), x += y, x[i] = y: the tensor written into keeps its dtype, so it decides
_SINGLE = {name for home in _HOMES for name in dir(home) if name.endswith("_") and not name.endswith("__")}
IN_PLACE = _SINGLE | KINDS["in_place"]
_FILLERS = {name for name, function in vars(torch.nn.init).items() if callable(function)}
LEFT_ALONE = KINDS["conversions"] | KINDS["describes"] | _FILLERS
MAY_VIEW = names_of(*KINDS["views"]) | {"__getitem__"}
EXACT = MAY_VIEW | names_of(*KINDS["moves"])
PRODUCT_WITH_BIAS = KINDS["convolutions"] | {"linear"}  # signature (input, weight, bias=None, ...)
MADE_OF_PRODUCTS = names_of(*KINDS["made_of_products"])
OF_ONE_DTYPE = MADE_OF_PRODUCTS | names_of(*KINDS["of_one_dtype"])


def opened(function: FunctionType) -> Function:
    """A torch function written in Python, without the check that hands it over as a whole."""
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = function.__globals__ | dict.fromkeys(checks, lambda *_: False)
    inner = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    inner.__kwdefaults__ = function.__kwdefaults__
    return inner


# torch 2.11 has not all of them
COMPOSED, COMPOSED_OF_LISTED = (
    {name: opened(getattr(F, name)) for name in LISTS["kinds"][kind] if hasattr(F, name)}
    for kind in ("composed", "composed_of_listed")
)
