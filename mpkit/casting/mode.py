"""The mechanism: while a module's forward runs, its rule sees every torch operation and casts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from mpkit.casting.rules import CASTING, PLAIN, Handler, Rule
from mpkit.casting.targets import Target, converted, map_tensors

if TYPE_CHECKING:
    from mpkit.casting.ledger import Ledger


_SCALARS = frozenset((int, float, bool, str, type(None), torch.dtype))


class CastMode(TorchFunctionMode):
    """Applies the rule of the module whose forward runs now, and keeps each parameter's cast until the forward ends."""

    def __init__(self) -> None:
        super().__init__()
        self.rule: Rule = PLAIN
        self.kept: dict[tuple[int, Target], tuple[Tensor, int, bool]] = {}
        self.ledger: Ledger | None = None
        self.layer: Any = None  # the mark of the layer under a recipe whose forward runs now
        self.hands_over = False  # the next result stays in 16 bits, since its only taker casts it back

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = self.rule
        handler = rule.handlers.get(func.__name__, rule.default)
        if self.ledger is not None:
            return self.ledger.run(self, handler, func, args, kwargs or {})
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(self, func, args, kwargs or {})

    def cast(self, x: Tensor, target: Target) -> Tensor:
        """A float tensor of any shape -> the same values in `target`; integers and bools pass through.

        A parameter is cast once per forward. The kept cast is used again only while the parameter is unchanged
        (an in-place update makes it stale) and gradients are asked for as when it was made.
        """
        dtype = x.dtype
        if (dtype is target and dtype is not torch.float32) or not dtype.is_floating_point:
            return x  # only float32 tensors can stand for an emulated format
        if type(x) is not nn.Parameter or torch.compiler.is_compiling() or x.is_inference():
            return self._cast(x, target)
        key = (id(x), target)
        kept = self.kept.get(key)
        grad = torch.is_grad_enabled()
        if kept is None or kept[1] != x._version or kept[2] != grad:
            kept = self.kept[key] = (self._cast(x, target), x._version, grad)
        return kept[0]

    def _cast(self, x: Tensor, target: Target) -> Tensor:
        if type(target) is torch.dtype and x.dtype is not target and self.ledger is None:
            return x.to(target)  # the common case, kept short
        y = converted(x, target)
        if self.ledger is not None and y is not x:
            self.ledger.note_cast(x, y)
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


class _Local(threading.local):
    def __init__(self) -> None:  # in every thread's own dict from the start, or the compiler's guard on it would fail
        self.mode: CastMode | None = None


_LOCAL = _Local()


class Running:
    """A `with` block in which one CastMode sees every operation of this thread."""

    def __init__(self, mode: CastMode) -> None:
        self.mode = mode

    def __enter__(self) -> CastMode:
        self.outer, _LOCAL.mode = _LOCAL.mode, self.mode
        self.mode.__enter__()
        return self.mode

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)
        _LOCAL.mode = self.outer


class Forward:
    """What stands in a module instance's `forward`: runs the class's forward under the module's rule.

    It refers to the module alone, so `copy.deepcopy` and `pickle` carry it to the copy; `state_dict`, module types and
    names stay as they are.

    Args:
        module:  the module whose forward this is; None for a plain function.
        rule:    how operations in it compute.
        result:  float results are cast to this on the way out; None leaves them.
        level:   level recorded on the root of `auto_mixed_precision`, else "".
        by_user: True when `to_float` set the rule, which O1 and auto then respect.
        inner:   a callable that stood in the instance's `forward` before, or None for the class's own.
    """

    def __init__(
        self,
        module: nn.Module | None,
        rule: Rule,
        *,
        result: Target | None = None,
        level: str = "",
        by_user: bool = False,
        inner: Callable[..., Any] | None = None,
    ) -> None:
        self.module = module
        self.rule = rule
        self.result = result
        self.level = level
        self.by_user = by_user
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode = _LOCAL.mode
        if mode is not None:
            return self._run(mode, args, kwargs)
        mode = CastMode()
        _LOCAL.mode = mode
        try:
            with mode:
                return self._run(mode, args, kwargs)
        finally:
            _LOCAL.mode = None

    def _run(self, mode: CastMode, args: Any, kwargs: Any) -> Any:
        outer, rule = mode.rule, self.rule
        try:
            if rule.entry is not None:
                mode.rule = CASTING  # a cast is no operation of the module
                args, kwargs = mode.cast_all(args, rule.entry), mode.cast_all(kwargs, rule.entry)
            mode.rule = rule
            if self.inner is not None:
                output = self.inner(*args, **kwargs)
            elif type(self.module) is nn.Sequential and len(args) == 1 and not kwargs and _unwatched(mode):
                output = _in_sequence(mode, self.module, args[0])
            else:
                output = type(self.module).forward(self.module, *args, **kwargs)  # type: ignore[union-attr]
            mode.rule = CASTING
            return output if self.result is None else mode.cast_all(output, self.result)
        finally:
            mode.rule = outer


# --- neighbours in an nn.Sequential -----------------------------------------------------------------------------------

_CONVOLUTION = ("weight", "bias", "stride", "padding", "dilation", "groups")
# modules whose forward is one operation: which, and the attributes that are its arguments after the input
_ONE_OPERATION: dict[type[nn.Module], tuple[Callable[..., Any], tuple[str, ...]]] = {
    nn.ReLU: (torch.relu, ()),
    nn.Linear: (F.linear, ("weight", "bias")),
    nn.Conv1d: (F.conv1d, _CONVOLUTION),
    nn.Conv2d: (F.conv2d, _CONVOLUTION),
    nn.Conv3d: (F.conv3d, _CONVOLUTION),
}


def _in_sequence(mode: CastMode, sequence: nn.Sequential, x: Any) -> Any:
    """`nn.Sequential.forward`, where O1's neighbours hand over in 16 bits what they would cast to float32 and back.

    Both casts are exact forwards and backwards, and nothing but the next module ever holds the tensor between them, so
    no bit of a result or a gradient changes (MindSpore 2.7 removes such pairs too). A module that somebody watches by
    a hook is called as always.
    """
    modules = list(sequence)
    handlers = [_round_trip(module) for module in modules]
    for module, handler, after in zip(modules, handlers, [*handlers[1:], None]):
        if handler is None:
            x = module(x)
            continue
        function, names = _ONE_OPERATION[type(module)]
        mode.hands_over = after is not None and after.computes is handler.computes  # type: ignore[attr-defined]
        mode.__exit__(None, None, None)  # as on the way through __torch_function__
        try:
            x = handler(mode, function, (x, *[getattr(module, name) for name in names]), {})
        finally:
            mode.__enter__()
            mode.hands_over = False
    return x


def _round_trip(module: nn.Module) -> Handler | None:
    """What a module does that is one operation from 16 bits to float32; None if it is not, or somebody watches it."""
    operation, own = _ONE_OPERATION.get(type(module)), module.__dict__
    forward = own.get("forward")
    if operation is None or type(forward) is not Forward or forward.inner is not None or forward.result is not None:
        return None
    if own.get("inplace") or own.get("padding_mode", "zeros") != "zeros":  # more than the one operation
        return None
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    if hooks or module._compiled_call_impl is not None:
        return None
    handler = forward.rule.handlers.get(operation[0].__name__)
    return handler if getattr(handler, "round_trip", False) else None


def _unwatched(mode: CastMode) -> bool:
    """Whether no ledger, compiler, hook on all modules or mode inside this one sees the single operations."""
    watched = mode.ledger is not None or torch.compiler.is_compiling() or _has_any_global_hook()
    return not watched and _get_current_function_mode() is mode


# --- marks ------------------------------------------------------------------------------------------------------------


def mark_of(module: Any) -> Forward | None:
    """The casting mark on this very module (or decorated function), if any."""
    forward = module.__dict__.get("forward") if isinstance(module, nn.Module) else module
    return forward if isinstance(forward, Forward) else None


def mark(module: nn.Module, rule: Rule, *, kind: type[Forward] = Forward, **options: Any) -> Forward:
    """Put `rule` on this one module in place of any mark it has; `kind` is the class of the mark."""
    old = module.__dict__.get("forward")
    inner = old.inner if isinstance(old, Forward) else old
    forward = kind(module, rule, inner=inner, **options)
    module.__dict__["forward"] = forward
    return forward


def unmark(module: nn.Module) -> None:
    """Take the mark off this one module; whatever stood in its `forward` before is back."""
    forward = mark_of(module)
    if forward is None:
        return
    if forward.inner is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = forward.inner
