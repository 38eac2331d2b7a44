"""The mechanism: while a module's forward runs, its rule sees every torch operation and casts."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType, MethodType
from typing import Any

import torch
import torch.fx._symbolic_trace as fx_tracing
from torch import Tensor, nn
from torch._C import (
    _get_function_stack_at,
    _is_torch_function_mode_enabled,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch._C._functorch import peek_interpreter_stack
from torch._ops import OpOverload
from torch.compiler import is_compiling
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from mpkit.casting.entrances import know_methods, warn_if_passed_by
from mpkit.casting.handlers import Book, Caster, Handler
from mpkit.casting.leaves import LEAVES, leaf_of
from mpkit.casting.neighbours import in_sequence, round_trip
from mpkit.casting.operations import Function
from mpkit.casting.rules import CASTING, PLAIN, Rule, for_overload
from mpkit.casting.sharded import leave_hooks_uncast, may_be_sharded
from mpkit.casting.steps import in_steps, takes_steps
from mpkit.casting.targets import Target, converted, map_tensors, taken_again

_SCALARS = frozenset((int, float, bool, str, type(None), torch.dtype))
_F32, _STRIDED, _OWN_KINDS = torch.float32, torch.strided, frozenset((Tensor, nn.Parameter))
# torch reads the arguments of these faster than those of `x.to(dtype)`
_TO: dict[Target, Callable[[Tensor], Tensor]] = {
    torch.bfloat16: Tensor.bfloat16,
    torch.float16: Tensor.half,
    torch.float32: Tensor.float,
}


class CastMode(TorchFunctionMode):
    """Applies the rule of the module whose forward runs now, and keeps each parameter's cast until the forward ends."""

    def __init__(self, ledgers: tuple[Book, ...] = ()) -> None:
        super().__init__()
        self.rule: Rule = PLAIN
        # the cast of a parameter, and of which state of which parameter: an id is given again when its owner dies, and
        # `x.data = other` changes no version
        self.kept: dict[tuple[int, Target], tuple[Tensor, weakref.ref[Tensor], tuple[int, int]]] = {}
        self.used: set[int] = set()  # ids of parameters that were cast once; one that is given again costs a look
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
        if peek_interpreter_stack() is not None or x.is_inference():
            return self._cast(x, target)  # what vmap or grad cast belongs to their world; inference counts no writes
        # an id alone is not enough: it is given again when its owner dies, so the reference is asked too
        key, state = (id(x), target), (x._version, x.data_ptr())
        kept = self.kept.get(key)
        if kept is not None and kept[1]() is x and kept[2] == state:
            return taken_again(x, kept[0], target)
        y = self._cast(x, target)
        self.kept[key] = (y, weakref.ref(x), state)
        return y

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


def _written_down(ledger: Book, handler: Handler | None) -> Handler:
    def handle(mode: Caster, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        return ledger.run(mode, handler, func, args, kwargs)

    return Handler(handle, handler.computes if handler is not None else None)


# --- the mode of this thread ------------------------------------------------------------------------------------------


class _Local(threading.local):
    def __init__(self) -> None:  # in every thread's own dict from the start, or the compiler's guard on it would fail
        self.mode: CastMode | None = None


_LOCAL = _Local()


def _listens(mode: CastMode) -> bool:
    """Whether `mode` sees the operations of this thread now. Inside a torch function it does not.

    There user code may run all the same: a backward pass recomputes what was checkpointed.
    """
    if is_compiling():
        return True
    return any(_get_function_stack_at(i) is mode for i in range(_len_torch_function_stack()))


def current() -> CastMode | None:
    """The mode that sees the operations of this thread now, if any."""
    mode = _LOCAL.mode
    return mode if mode is not None and _listens(mode) else None


@contextmanager
def running(rule: Rule | None = None, *, layer: Any = None, ledger: Book | None = None) -> Iterator[CastMode]:
    """A block whose operations compute by `rule` (None: as it is), in `layer`, and are written down by `ledger` too."""
    mode, idle = current(), _LOCAL.mode
    if mode is None:
        mode = CastMode(() if idle is None else idle.ledgers)
        _LOCAL.mode = mode
        try:
            with mode, running(rule, layer=layer, ledger=ledger):
                yield mode
        finally:
            _LOCAL.mode = idle
        return
    outer, outer_layer, ledgers = mode.rule, mode.layer, mode.ledgers
    mode.rule = outer if rule is None else rule
    mode.layer = outer_layer if layer is None else layer
    mode.ledgers = ledgers if ledger is None else (*ledgers, ledger)
    try:
        yield mode
    finally:
        mode.rule, mode.layer, mode.ledgers = outer, outer_layer, ledgers


def _uncast() -> AbstractContextManager[Any]:
    return running(CASTING) if current() is not None else nullcontext()


# --- what stands in a module's `forward` ------------------------------------------------------------------------------

_OF_A_FUNCTION = frozenset(
    ("__name__", "__qualname__", "__code__", "__defaults__", "__kwdefaults__", "__annotations__")
)


class Forward:
    """What stands in a module instance's `forward`: runs the class's forward under the module's rule.

    It refers to the module alone, so `copy.deepcopy` and `pickle` carry it to the copy; `state_dict`, module types and
    names stay as they are. Its signature, name and code are those of the forward that it runs.

    Args:
        module:  the module whose forward this is; None for a plain function.
        rule:    how operations in it compute; None once it was taken off, while somebody's wrapper still holds it.
        result:  float results are cast to this on the way out; None leaves them.
        level:   level recorded on the root of `auto_mixed_precision`, else "".
        by_user: True when `to_float` set the rule, which O1 and auto then respect.
        inside:  True when a network around this module was cast with it: its forward is the way in.
        inner:   a callable that stood in the instance's `forward` before, or None for the class's own.
    """

    def __init__(
        self,
        module: nn.Module | None,
        rule: Rule | None,
        *,
        result: Target | None = None,
        level: str = "",
        by_user: bool = False,
        inside: bool = False,
        inner: Callable[..., Any] | None = None,
    ) -> None:
        self.module = module
        self.rule = rule
        self.result = result
        self.level = level
        self.by_user = by_user
        self.inside = inside
        self.inner = inner
        know_methods(type(module))

    def __call__(self, *args: object, **kwargs: object) -> Any:
        mode, rule, module = _LOCAL.mode, self.rule, self.module
        compiling = is_compiling()
        if not compiling and sys.getrefcount(self) > _HELD_BY_ONE_MODULE and module is not None:
            module = self._called_on(sys._getframe(1))
        if rule is None:
            return self._plain(module)(*args, **kwargs)
        if mode is not None and not (compiling or kwargs or mode.ledgers) and type(module) in LEAVES:
            output = self._set_aside(mode, rule, module, args)
            if output is not NotImplemented:
                return output
        if mode is not None and (compiling or _get_current_function_mode() is mode or _listens(mode)):
            return self._run(mode, rule, module, args, kwargs)
        if not compiling and fx_tracing.is_fx_symbolic_tracing():
            _refuse_proxies((*args, *kwargs.values()))
        if may_be_sharded() and module is not None and not compiling:
            leave_hooks_uncast(module, _uncast)
        # perhaps called by a method of the network around it, whose own operations nobody casts
        if self.inside and mode is None and module is not None and not compiling:
            warn_if_passed_by(module, sys._getframe(1), _level_of)
        outside, mode = mode, CastMode(() if mode is None else mode.ledgers)
        _LOCAL.mode = mode
        try:
            with mode:
                return self._run(mode, rule, module, args, kwargs)
        finally:
            _LOCAL.mode = outside

    def _set_aside(self, mode: CastMode, rule: Rule, module: Any, args: Any) -> Any:
        """As `_run`, for a module of torch and without its mode; NotImplemented where that must see its operations."""
        if len(args) != 1 or self.inner is not None or mode.rule is PLAIN or type(self) is not Forward:
            return NotImplemented
        leaf = rule.leaves.get(type(module)) or leaf_of(rule, type(module))
        if leaf.run is None or leaf.forward is not type(module).forward or not _is_torch_function_mode_enabled():
            return NotImplemented
        top = _pop_torch_function_stack()
        try:
            # a mode that somebody put inside this one is to see the operations first
            if top is not mode:
                return NotImplemented
            (x,) = args if rule.entry is None else mode.cast_all(args, rule.entry)
            output = leaf.run(mode, module, x)
            return output if self.result is None else mode.cast_all(output, self.result)
        finally:
            _push_on_torch_function_stack(top)

    def _run(
        self, mode: CastMode, rule: Rule, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        outer = mode.rule
        try:
            if rule.entry is not None:
                mode.rule = CASTING  # a cast is no operation of the module
                args, kwargs = mode.cast_all(args, rule.entry), mode.cast_all(kwargs, rule.entry)
            mode.rule = rule
            if self.inner is not None:
                output = self.inner(*args, **kwargs)
            elif type(module) is nn.Sequential and len(args) == 1 and not kwargs and _unwatched(mode):
                output = in_sequence(mode, module, [_trip(inner) for inner in module], args[0])
            else:
                output = type(module).forward(module, *args, **kwargs)  # type: ignore[union-attr]
            mode.rule = CASTING
            if type(output) is not Tensor and takes_steps(output):
                return in_steps(output, functools.partial(running, rule, layer=mode.layer), self.delivered)
            return output if self.result is None else mode.cast_all(output, self.result)
        finally:
            # also after an error: the mode lives on in the caller
            mode.rule = outer
            if outer is PLAIN:
                mode.kept.clear()
                mode.used.clear()

    def delivered(self, output: Any) -> Any:
        """A result with its float tensors cast as on the way out of the module."""
        if self.result is None:
            return output
        with running(CASTING) as mode:
            return mode.cast_all(output, self.result)

    def _called_on(self, caller: FrameType) -> nn.Module | None:
        """The module whose call this is: a shallow copy, such as a replica of DataParallel, shares this object.

        An instance's `forward` is called without its module, and torch has no public hook that sees a copy being made.
        """
        module = caller.f_locals.get("self")
        shares = isinstance(module, nn.Module) and module.__dict__.get("forward") is self
        return module if shares else self.module

    def _plain(self, module: nn.Module | None) -> Callable[..., Any]:
        """The forward without any cast."""
        if self.inner is not None:
            return self.inner
        assert module is not None
        return MethodType(type(module).forward, module)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        know_methods(type(self.module))

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._plain(self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._plain(self.module))

    def __getattr__(self, name: str) -> Any:
        if name in _OF_A_FUNCTION and "inner" in self.__dict__:
            return getattr(self._plain(self.module), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class Decorated(Forward):
    """A function decorated at a level; in the body of a class a method, as any other function.

    The mark of a module has no `__get__`: it stands in the instance, where torch 2.11 would compile that all the same.
    """

    def __get__(self, owner: object, kind: type | None = None) -> Callable[..., Any]:
        return self if owner is None else MethodType(self, owner)


def _refuse_proxies(values: tuple[Any, ...]) -> None:
    if any(isinstance(value, torch.fx.Proxy) for value in values):
        raise RuntimeError(
            "torch.fx cannot trace a network through its casts; take the level off with "
            "remove_mixed_precision(network), trace it, and cast what the tracing gives"
        )


class _Probe(Forward):
    """Counts who refers to a mark while its module calls it."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return sys.getrefcount(self)


def _trip(module: nn.Module) -> Handler | None:
    """The one operation that a module with a plain mark does; None if its call does anything else."""
    forward = module.__dict__.get("forward")
    if type(forward) is not Forward or forward.inner is not None or forward.result is not None or forward.rule is None:
        return None
    return round_trip(module, forward.rule)


def _unwatched(mode: CastMode) -> bool:
    """Whether no ledger, compiler, hook on all modules or mode inside this one sees the single operations."""
    watched = bool(mode.ledgers) or is_compiling() or _has_any_global_hook()
    return not watched and _get_current_function_mode() is mode


# --- marks ------------------------------------------------------------------------------------------------------------

_MARK = "_mpkit_forward"  # where a module's mark is found when somebody wrapped its `forward` afterwards


def mark_of(module: object) -> Forward | None:
    """The casting mark on this very module (or decorated function), if any."""
    forward = module.__dict__.get(_MARK) if isinstance(module, nn.Module) else module
    return forward if isinstance(forward, Forward) else None


def _level_of(module: object) -> str | None:
    found = mark_of(module) if isinstance(module, nn.Module) else None
    return None if found is None or found.rule is None else found.level


def mark(module: nn.Module, rule: Rule, *, kind: type[Forward] = Forward, **options: Any) -> Forward:
    """Put `rule` on this one module in place of any mark it has; `kind` is the class of the mark."""
    unmark(module)
    forward = kind(module, rule, inner=module.__dict__.get("forward"), **options)
    module.__dict__["forward"] = module.__dict__[_MARK] = forward
    return forward


def unmark(module: nn.Module) -> None:
    """Take the mark off this one module; whatever stood in its `forward` before is back.

    A mark that somebody wrapped stays inside the wrapper and does nothing any more.
    """
    forward = mark_of(module)
    if forward is None:
        return
    del module.__dict__[_MARK]
    forward.rule = None
    stands_there: object = module.__dict__.get("forward")
    if stands_there is forward and forward.inner is not None:
        module.__dict__["forward"] = forward.inner
    elif stands_there is forward:
        del module.__dict__["forward"]


def _held_by_one_module() -> int:
    """References to a mark while its module calls it and nobody else holds it (how many is up to the interpreter)."""
    module = nn.Module()
    module.__dict__["forward"] = module.__dict__[_MARK] = _Probe(module, PLAIN)
    return int(module())


_HELD_BY_ONE_MODULE = _held_by_one_module()
