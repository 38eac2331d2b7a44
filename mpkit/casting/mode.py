"""The mechanism: a rule says what is done for an operation, and a mode asks the rule of the module that runs now.

While a module with a level runs, `LOCAL.rule` is its rule. The mode looks the operation up in it by name: if a handler
stands there, that casts and calls; if none does, the operation is torch's own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from mpkit.casting.local import LOCAL
from mpkit.casting.low import Low, Target, convert, map_tensors
from mpkit.casting.operators import COMPOSED, Function

Handler = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]
"""Given a torch function and its arguments, it gives the result."""


@dataclass(frozen=True, eq=False)
class Rule:
    """How the operations in one module's forward compute.

    Args:
        handlers:  what to do for a torch function of this name.
        default:   what to do for any other; None calls it as it is.
        entry:     float arguments of the module are cast to this first; None leaves them.
        protected: whether the module takes the network's own inputs as they were before the entrance cast them.
        origin:    (function, arguments) that builds this rule again: rules are pickled so, and never copied.
    """

    handlers: Mapping[str, Handler] = field(default_factory=dict)
    default: Handler | None = None
    entry: Target | None = None
    protected: bool = False
    origin: tuple[Callable[..., Rule], tuple[Any, ...]] | None = None

    def __reduce__(self) -> tuple[Callable[..., Rule], tuple[Any, ...]]:
        return self.origin or (Rule, ())


class CastMode(TorchFunctionMode):
    """Applies the rule of the module whose forward runs now."""

    def __torch_function__(self, func: Function, types: object, args: Any = (), kwargs: Any = None) -> Any:
        rule = LOCAL.rule
        # the name is the same for a function, its method and its symbol
        name = func.__name__
        handler = None if rule is None else rule.handlers.get(name, rule.default)
        if handler is not None and handler is rule.default and hasattr(func, "overloadpacket"):
            handler = None  # a kernel, as a compiled graph consists of: the graph holds its casts
        run: Callable[..., Any] = handler or as_is
        if LOCAL.books and rule is not None and name not in COMPOSED:  # told to every open ledger
            run = partial(run, func)
            for book in LOCAL.books[:-1]:
                run = partial(book.record, func, run)
            return LOCAL.books[-1].record(func, run, args, kwargs or {})
        return run(func, args, kwargs or {})


def as_is(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Called as it is."""
    return func(*args, **kwargs) if kwargs else func(*args)


def computes(target: Target) -> None:
    """Tell open ledgers what the operation that runs computes in, where its inputs do not say so."""
    for book in LOCAL.books:
        book.note_precision(target)


@contextmanager
def running(rule: Rule | None, module: nn.Module | None, given: Iterable[tuple[Tensor, Tensor]] = ()) -> Iterator[None]:
    """A block whose operations compute by `rule`, as in a forward of `module`.

    Casts of parameters are its own: what is kept of them is forgotten after it, since they may change.
    """
    outer = LOCAL.rule, LOCAL.module, LOCAL.on, LOCAL.kept, LOCAL.given
    LOCAL.rule, LOCAL.module, LOCAL.kept, LOCAL.given = rule, module, {}, [*given]
    try:
        with nullcontext() if LOCAL.on else CastMode():
            LOCAL.on = True
            yield
    finally:
        LOCAL.rule, LOCAL.module, LOCAL.on, LOCAL.kept, LOCAL.given = outer


# --- casts ------------------------------------------------------------------------------------------------------------

_SCALARS = frozenset((int, float, bool, str, type(None), torch.dtype))


def cast(x: Any, target: Target) -> Any:
    """A float tensor in `target`, differentiable, and every one in a nest; whatever else passes through."""
    kind = type(x)
    if kind is Tensor or kind is Parameter:
        dtype = x.dtype  # once: while a mode listens, it hears of every look at an attribute
        if dtype is target or not dtype.is_floating_point:
            return x
        if kind is Parameter and not is_compiling():
            return _cast_parameter(x, target)
    elif kind in _SCALARS:
        return x
    elif not isinstance(x, Tensor):
        return map_tensors(lambda part: cast(part, target), x)
    elif not isinstance(x, Low) and not x.is_floating_point():
        return x
    return _told(x, target) if LOCAL.books else convert(x, target)


def call(func: Function, args: Any, kwargs: dict[str, Any], target: Target) -> Any:
    """The function of arguments in `target`."""
    args = [cast(x, target) for x in args]
    return func(*args, **{name: cast(x, target) for name, x in kwargs.items()}) if kwargs else func(*args)


def _told(x: Tensor, target: Target) -> Tensor:
    """A cast that open ledgers are told of; they see no operation of which it is made."""
    books, LOCAL.books = LOCAL.books, ()
    try:
        y = convert(x, target)
        if y is not x:
            for book in books:
                book.note_cast(x, y)
        return y
    finally:
        LOCAL.books = books


class _Again(torch.autograd.Function):
    """One more use of a parameter that was cast before: no new copy, and a gradient of its own in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor) -> Tensor:
        # what autograd adds gradients up in
        ctx.dtype = x.dtype
        return kept.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return convert(grads[0], torch.float32).to(ctx.dtype), None


def _cast_parameter(x: Parameter, target: Target) -> Tensor:
    """The cast of a parameter, which is kept from its second use in a forward on: most are used once.

    Each use is a step of its own in the graph, so that the gradients of several uses are added up in float32.
    """
    kept = LOCAL.kept
    if id(x) not in kept:
        kept[id(x)] = x  # itself, since an id is given again when its owner dies
        if not LOCAL.books:
            return convert(x, target)
    # private: whether torch.func transforms what runs, for which a kept cast is one of another function; nothing public
    # says so
    if torch._C._are_functorch_transforms_active():
        return _told(x, target)
    # whether it was written into (private; torch has no public count of that), or given other memory
    state = None if x.is_inference() else (x._version, x.data_ptr())
    of, y = kept.get((id(x), target), (None, x))
    if of is None or of != state:
        y = _told(x, target)
        kept[id(x), target] = state, y.detach()
        return y
    return _Again.apply(x, y) if torch.is_grad_enabled() and x.requires_grad else y
