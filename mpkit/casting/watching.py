"""Methods that compute with a network's own parameters: called past its level, they say so.

A level is put on `forward`. A method that calls a module is noticed by that module (`entrances`); one that only uses
parameters, such as `def project(self, x): return x @ self.weight`, is noticed by nobody. Its code names the parameter,
though. So such methods and properties are replaced in their class by ones that watch: called on a network that runs at
a level, outside of any cast forward, the operations are looked at until one is met that the level would have cast.
Called on any other instance, or in a forward, they do what they did; `remove_mixed_precision` ends the watch.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from types import CodeType, CoroutineType, GeneratorType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from mpkit.casting.entrances import codes, methods, passed_by
from mpkit.casting.mode import LOCAL
from mpkit.casting.operations import Function
from mpkit.casting.rules import Rule
from mpkit.casting.steps import in_steps
from mpkit.casting.targets import float_tensors, precision

_WATCHES = "_mpkit_watches"
_BY_NAME = frozenset(("getattr", "get_parameter"))
# what the methods of a class name: their attributes and globals, by (class that defines it, name)
_NAMED: WeakKeyDictionary[type, dict[str, frozenset[str]]] = WeakKeyDictionary()


class Marked(Protocol):
    """What is asked of the mark on a module."""

    rule: Rule | None
    level: str


MarkOf = Callable[[Any], Marked | None]


def watch_methods(module: nn.Module, mark_of: MarkOf) -> tuple[str, ...]:
    """Make the methods of the class of `module` watch that name a parameter of it; their names come back."""
    named = _named_in(type(module))
    if not named:
        return ()
    own = [{name} for name in module._parameters]
    for name, child in module.named_children():
        # a tied layer: the weight of a child is used without a call of it
        lists = isinstance(child, nn.ParameterList | nn.ParameterDict)
        own += [{name}] if lists else [{name, parameter} for parameter in child._parameters]
    found = tuple(name for name, names in named.items() if any(needed <= names for needed in own))
    watch(type(module), found, mark_of)
    return found


def watch(kind: type, names: Iterable[str], mark_of: MarkOf) -> None:
    """Make these methods and properties of a class of modules, and of its bases, watch; again is once."""
    wanted = frozenset(names)
    for base, name, attribute in methods(kind) if wanted else ():
        if name not in wanted or next(codes(attribute), None) is None:
            continue
        if not isinstance(attribute, property):
            if not hasattr(attribute, _WATCHES):
                setattr(base, name, _watching(attribute, mark_of))
        elif not hasattr(attribute.fget, _WATCHES):
            setattr(base, name, attribute.getter(_watching(attribute.fget, mark_of)))


def _named_in(kind: type) -> dict[str, frozenset[str]]:
    named = _NAMED.get(kind)
    if named is None:
        named = _NAMED[kind] = {}
        for _, name, attribute in methods(kind):
            # a static or class method has no network; a forward is where the level is
            ours = name != "forward" and not (name.startswith("__") and name.endswith("__"))
            if ours and (inspect.isfunction(attribute) or isinstance(attribute, property)):
                names = {found for code in codes(attribute) for found in _names_in(code)}
                named[name] = named.get(name, frozenset()) | names
    return named


def _names_in(code: CodeType) -> set[str]:
    """What code names, also as `getattr(self, "weight")` and `self.get_parameter("inner.weight")`."""
    names = set(code.co_names)
    if names & _BY_NAME:
        names.update(part for text in code.co_consts if isinstance(text, str) for part in text.split("."))
    return names


def _watching(method: Any, mark_of: MarkOf) -> Callable[..., Any]:
    @functools.wraps(method)
    def watching(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or LOCAL.mode is not None:  # in a cast forward, or within the level
            return method(self, *args, **kwargs)
        mark = mark_of(self)
        if mark is None or mark.rule is None or type(_get_current_function_mode()) is Watch:
            return method(self, *args, **kwargs)
        with (seeing := Watch(self, mark.rule, mark.level, method)):
            result = method(self, *args, **kwargs)
        if type(result) in (GeneratorType, CoroutineType):  # its body has yet to run
            return in_steps(result, lambda: seeing, lambda value: value)
        return result

    setattr(watching, _WATCHES, True)
    return watching


class Watch(TorchFunctionMode):
    """Sees the operations of a method, and warns of the first one that the level of its network would have cast.

    That is one of the network's own tensors with another: a sum over weights, such as a penalty, is better off in
    float32, and so is a loss that a single number of the network weights.
    """

    def __init__(self, network: nn.Module, rule: Rule, level: str, method: Any) -> None:
        super().__init__()
        self.network, self.level, self.method = network, level, method
        self.rule: Rule | None = rule
        # attributes, and what came of nothing else; an id alone is given again when its owner dies
        self.own = {id(x): x for x in (*float_tensors(vars(network)), *network.buffers())}

    def __torch_function__(
        self, func: Function, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **kwargs or {})
        # a module that the method calls computes at the level, and a compiled one is traced through this
        if self.rule is not None and not is_compiling() and LOCAL.mode is None:
            self._look(self.rule, func, _tensors((args, kwargs)), out)
        return out

    def _look(self, rule: Rule, func: Function, inputs: list[Tensor], out: object) -> None:
        own = [x for x in inputs if isinstance(x, nn.Parameter) or id(x) in self.own]
        if len(own) == len(inputs):  # made of nothing else, or of nothing at all
            self.own |= {id(x): x for x in _tensors(out)}
            return
        handler = rule.handlers.get(getattr(func, "__name__", ""), rule.default)
        low = None if handler is None else handler.computes
        floats = [x for x in inputs if x.is_floating_point() and x.dim()]
        mine = {id(x) for x in own}
        mixed = len({id(x) in mine for x in floats}) == 2
        if low is not None and mixed and any(precision(x) != low for x in floats):
            self.rule = None  # once a call
            self._warn()

    def _warn(self) -> None:
        inside = {id(code) for code in codes(self.method)}
        frame, depth = sys._getframe(1), 2
        while frame.f_back is not None and id(frame.f_code) not in inside:
            frame, depth = frame.f_back, depth + 1
        passed_by(self.network, self.method.__name__, self.level, depth, calls_modules=False)


def _tensors(value: object) -> list[Tensor]:
    """The tensors of any dtype in arguments or a result."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [x for item in value for x in _tensors(item)] if isinstance(value, tuple | list) else []
