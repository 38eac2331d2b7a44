"""What stands in the `forward` of a cast module: it runs the class's forward under the module's rule."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, MethodType
from typing import Any

import torch
import torch.fx._symbolic_trace as fx_tracing
from torch import Tensor, nn
from torch._C import _is_torch_function_mode_enabled, _pop_torch_function_stack, _push_on_torch_function_stack
from torch.compiler import is_compiling
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import _get_current_function_mode

from mpkit.casting.entrances import know_methods, warn_if_passed_by
from mpkit.casting.fills import tell_of_infinities
from mpkit.casting.handlers import Handler
from mpkit.casting.leaves import LEAVES, leaf_of
from mpkit.casting.mode import LOCAL, CastMode, current, listens, new_mode, running
from mpkit.casting.neighbours import in_sequence, round_trip
from mpkit.casting.rules import CASTING, PLAIN, Rule
from mpkit.casting.sharded import leave_hooks_uncast, may_be_sharded
from mpkit.casting.steps import in_steps, takes_steps
from mpkit.casting.targets import Emulated, Mark, Target, round_behind_marks_
from mpkit.casting.watching import watch, watch_methods


def _uncast() -> AbstractContextManager[Any]:
    return running(CASTING) if current() is not None else nullcontext()


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
        self.watched = () if module is None else watch_methods(module, mark_of)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        mode, rule, module = LOCAL.mode, self.rule, self.module
        compiling = is_compiling()
        # a second holder is perhaps a shallow copy of the module; without one the count spares a look at the stack
        if not compiling and sys.getrefcount(self) > _HELD_BY_ONE_MODULE and module is not None:
            module = self._called_on(sys._getframe(1))
        if rule is None:
            return self._plain(module)(*args, **kwargs)
        if mode is not None and not (compiling or kwargs or mode.ledgers) and type(module) in LEAVES:
            output = self._set_aside(mode, rule, module, args)
            if output is not NotImplemented:
                return output
        if mode is not None and (compiling or _get_current_function_mode() is mode or listens(mode)):
            return self._run(mode, rule, module, args, kwargs)
        if not compiling and fx_tracing.is_fx_symbolic_tracing():
            _refuse_proxies((*args, *kwargs.values()))
        if may_be_sharded() and module is not None and not compiling:
            leave_hooks_uncast(module, _uncast)
        # perhaps called by a method of the network around it, whose own operations nobody casts
        if self.inside and mode is None and module is not None and not compiling:
            warn_if_passed_by(module, sys._getframe(1), _level_of)
        outside, mode = mode, new_mode(() if mode is None else mode.ledgers)
        try:
            LOCAL.mode = mode
            with mode:
                return self._run(mode, rule, module, args, kwargs)
        finally:
            LOCAL.mode = outside

    def _set_aside(self, mode: CastMode, rule: Rule, module: Any, args: Any) -> Any:
        """As `_run`, for a module of torch and without its mode; NotImplemented where that must see its operations."""
        if len(args) != 1 or self.inner is not None or mode.rule is PLAIN or type(self) is not Forward:
            return NotImplemented
        # whoever replaced the class's forward meant another one than the leaf stands for
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
        if outer is mode.base and (Mark.made or type(rule.entry) is Emulated) and not is_compiling():
            round_behind_marks_((args, kwargs, [] if module is None else _stored_in(module)))
            tell_of_infinities(rule.entry, (args, kwargs), type(module).__name__)
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
            if outer is mode.base:
                mode.forget()

    def delivered(self, output: object) -> Any:
        """A result with its float tensors cast as on the way out of the module."""
        if self.result is None:
            return output
        with running(CASTING) as mode:
            return mode.cast_all(output, self.result)

    def _called_on(self, caller: FrameType) -> nn.Module | None:
        """The module whose call this is: a shallow copy, such as a replica of DataParallel, shares this object.

        An instance's `forward` is called without its module, and torch has no public hook that sees a copy being made.
        """
        names = caller.f_locals
        module = names.get("self")
        if isinstance(module, nn.Module) and module.__dict__.get("forward") is self:
            return module
        # `forward` was called by its name: by a module on one inside it, or by whoever holds a network
        nearest = [module] if isinstance(module, nn.Module) else [m for m in names.values() if isinstance(m, nn.Module)]
        sharing = {id(m): m for near in nearest for m in near.modules() if m.__dict__.get("forward") is self}
        if len(sharing) > 1:
            raise RuntimeError(
                f"this {type(self.module).__name__}.forward stands in {len(sharing)} shallow copies of one cast "
                "module, and a call of it by name does not say whose weights it is for; call the module: module(x)"
            )
        return next(iter(sharing.values()), self.module)

    def _plain(self, module: nn.Module | None) -> Callable[..., Any]:
        """The forward without any cast."""
        if self.inner is not None:
            return self.inner
        assert module is not None
        return MethodType(type(module).forward, module)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a fresh process has met no class yet
        self.__dict__.update(state)
        know_methods(type(self.module))
        # the module itself may be without its parameters still
        watch(type(self.module), self.watched, mark_of)

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


def _stored_in(network: nn.Module) -> list[Tensor]:
    """Buffers and tensors that stand as attributes in `network` and the modules in it, as a forward left them there."""
    return [x for m in network.modules() for x in (*m._buffers.values(), *vars(m).values()) if isinstance(x, Tensor)]


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
