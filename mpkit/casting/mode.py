"""The mechanism: while a module's forward runs, its rule sees every torch operation and casts."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch._C._functorch import peek_interpreter_stack
from torch._ops import OpOverload
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from mpkit.casting import graphs
from mpkit.casting.handlers import Book, Caster, Handler
from mpkit.casting.operations import Function
from mpkit.casting.rules import PLAIN, Rule, for_overload
from mpkit.casting.targets import Target, converted, map_tensors, memory, taken_again

_SCALARS = frozenset((int, float, bool, str, type(None), torch.dtype))
_F32, _STRIDED, _OWN_KINDS = torch.float32, torch.strided, frozenset((Tensor, nn.Parameter))
# torch reads the arguments of these faster than those of `x.to(dtype)`
_TO: dict[Target, Callable[[Tensor], Tensor]] = {
    torch.bfloat16: Tensor.bfloat16,
    torch.float16: Tensor.half,
    torch.float32: Tensor.float,
}


@graphs.traced_with_its_caller
class CastMode(TorchFunctionMode):
    """Applies the rule of the module whose forward runs now, and keeps each parameter's cast until the forward ends."""

    def __init__(self, ledgers: tuple[Book, ...] = ()) -> None:
        super().__init__()
        self.rule: Rule = PLAIN
        # the cast of a parameter, and of which state of which parameter: an id is given again when its owner dies, and
        # `x.data = other` changes no version
        self.kept: dict[tuple[int, Target], tuple[Tensor, weakref.ref[Tensor], tuple[int, int]]] = {}
        self.used: set[int] = set()  # ids of parameters that were cast once; one that is given again costs a look
        self.exposed: set[int | None] = set()  # memory that somebody may write into uncounted: casts of it are not kept
        self.base: Rule = PLAIN  # the rule outside of every forward
        self.ledgers = ledgers
        self.layer: Any = None  # the mark of the layer under a recipe whose forward runs now

    def __torch_function__(
        self, func: Function, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        rule = self.rule
        handler = rule.handlers.get(func.__name__, rule.default)
        if handler is rule.default and type(func) is OpOverload:
            handler = for_overload(rule, func)
        if self.ledgers:
            for ledger in self.ledgers:
                handler = _written_down(ledger, handler)
        if handler is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return handler.run(self, func, args, kwargs or {})

    def cast(self, x: Tensor, target: Target) -> Tensor:
        """A float tensor of any shape -> the same values in `target`; whatever else passes through.

        The first cast of a parameter in a forward is not kept, since most are used once; that of its second use is,
        until the parameter changes. Each use is a step of its own in the graph, so the gradients of several uses are
        added up in float32.
        """
        try:
            dtype = x.dtype
        except AttributeError:  # no tensor: torch itself will say what it needs
            return x
        if (dtype is target and dtype is not _F32) or not dtype.is_floating_point:
            return x  # only float32 tensors can stand for an emulated format
        if dtype is target or x.layout is not _STRIDED or type(x) not in _OWN_KINDS:
            return self._cast(x, target)
        # an open ledger is told of every cast, and an emulated format has no conversion of torch's
        to = None if self.ledgers else _TO.get(target)
        if type(x) is Tensor or is_compiling():
            return self._cast(x, target) if to is None else to(x)
        if to is not None and id(x) not in self.used:
            self.used.add(id(x))
            return to(x)
        return self._kept(x, target)

    def _kept(self, x: Tensor, target: Target) -> Tensor:
        # what vmap or grad cast belongs to their world; inference counts no writes, nor does `.data`
        if peek_interpreter_stack() is not None or x.is_inference() or (self.exposed and memory(x) in self.exposed):
            return self._cast(x, target)
        # an id alone is not enough: it is given again when its owner dies, so the reference is asked too
        key, state = (id(x), target), (x._version, x.data_ptr())
        kept = self.kept.get(key)
        if kept is not None and kept[1]() is x and kept[2] == state:
            return taken_again(x, kept[0], target)
        y = self._cast(x, target)
        self.kept[key] = (y, weakref.ref(x), state)
        return y

    def expose(self, x: Tensor) -> None:
        """From now on the memory of `x` may be written into through `x.data` or NumPy, which changes no version."""
        if not is_compiling():
            self.exposed.add(memory(x))

    def forget(self) -> None:
        """Drop what was found out about parameters: they may change before the next forward."""
        self.kept.clear()
        self.used.clear()

    @contextmanager
    def anew(self) -> Iterator[None]:
        """A block in which no cast of a parameter is kept from before, as when it is computed again."""
        outside, self.kept, self.used = (self.kept, self.used), {}, set()
        try:
            yield
        finally:
            self.kept, self.used = outside

    def _cast(self, x: Tensor, target: Target) -> Tensor:
        y = converted(x, target)
        if y is not x:
            for ledger in self.ledgers:
                ledger.note_cast(x, y)
        return y

    def cast_all(self, values: Any, target: Target) -> Any:
        """Every float tensor in a nest of tuples, lists and dicts, cast."""
        if type(values) is tuple:  # the two common cases, kept short: arguments and keyword arguments of an operation
            return tuple([value if type(value) in _SCALARS else self._cast_any(value, target) for value in values])
        if type(values) is dict:
            return {k: v if type(v) in _SCALARS else self._cast_any(v, target) for k, v in values.items()}
        return self._cast_any(values, target)

    def _cast_any(self, value: Any, target: Target) -> Any:
        if type(value) is Tensor or type(value) is nn.Parameter:
            return self.cast(value, target)
        return map_tensors(lambda x: self.cast(x, target), value)


@graphs.traced_with_its_caller
class ModeBesideGraphs(CastMode):
    """As CastMode, where compiled graphs may run: looking who calls costs too much where none can."""

    def __torch_function__(
        self, func: Function, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if is_compiling() or not graphs.in_graph(sys._getframe(1)):
            return super().__torch_function__(func, types, args, kwargs)
        rule, self.rule = self.rule, PLAIN  # an open ledger still writes it down
        try:
            return super().__torch_function__(func, types, args, kwargs)
        finally:
            self.rule = rule


def new_mode(ledgers: tuple[Book, ...]) -> CastMode:
    """A mode for the outermost forward of a cast network."""
    return (ModeBesideGraphs if graphs.may_run() else CastMode)(ledgers)


def _written_down(ledger: Book, handler: Handler | None) -> Handler:
    def handle(mode: Caster, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        return ledger.run(mode, handler, func, args, kwargs)

    return Handler(handle, handler.computes if handler is not None else None)


# --- the mode of this thread ------------------------------------------------------------------------------------------


class _Local(threading.local):
    def __init__(self) -> None:  # in every thread's own dict from the start, or the compiler's guard on it would fail
        self.mode: CastMode | None = None
        self.steps: dict[int, tuple[CastMode, Rule]] = {}  # of optimizers: whose rule each set aside


LOCAL = _Local()


def listens(mode: CastMode) -> bool:
    """Whether `mode` sees the operations of this thread now. Inside a torch function it does not.

    There user code may run all the same: a backward pass recomputes what was checkpointed.
    """
    if is_compiling():
        return True
    return any(_get_function_stack_at(i) is mode for i in range(_len_torch_function_stack()))


def current() -> CastMode | None:
    """The mode that sees the operations of this thread now, if any."""
    mode = LOCAL.mode
    return mode if mode is not None and listens(mode) else None


@contextmanager
def running(rule: Rule | None = None, *, layer: Any = None, ledger: Book | None = None) -> Iterator[CastMode]:
    """A block whose operations compute by `rule` (None: as it is), in `layer`, and are written down by `ledger` too."""
    mode, idle = current(), LOCAL.mode
    if mode is None:
        mode = new_mode(() if idle is None else idle.ledgers)
        try:
            LOCAL.mode = mode
            with mode, running(rule, layer=layer, ledger=ledger):
                yield mode
        finally:
            LOCAL.mode = idle
        return
    outer, outer_layer, ledgers = mode.rule, mode.layer, mode.ledgers
    mode.rule = outer if rule is None else rule
    mode.layer = outer_layer if layer is None else layer
    mode.ledgers = ledgers if ledger is None else (*ledgers, ledger)
    try:
        yield mode
    finally:
        mode.rule, mode.layer, mode.ledgers = outer, outer_layer, ledgers
