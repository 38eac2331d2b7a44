"""What stands in the `forward` of a cast module: it casts arguments and results, and sets the rule in between."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.arguments import check_kind
from mpkit.casting.low import Target, float_tensors, left_format, map_tensors
from mpkit.casting.mode import LOCAL, Rule, cast, running
from mpkit.casting.rules import way_out


@dataclass(eq=False, repr=False)
class Forward:
    """What stands in a module instance's `forward`: runs the class's forward under the module's rule.

    It refers to the module alone, so `copy.deepcopy` and `pickle` carry it to the copy; `state_dict`, module types and
    names stay as they are. Its signature is that of the forward that it runs.

    Args:
        module:  the module whose forward this is; None for a plain function.
        rule:    how operations in it compute; None once it was taken off, while somebody's wrapper still holds it.
        inner:   a callable that stood in the instance's `forward` before, or None for the class's own.
        result:  float results are cast to this on the way out; None leaves them.
        level:   level recorded on the root of `auto_mixed_precision`, else "".
        by_user: the precision that `to_float` set, which O1 and auto then respect; None if it did not.
    """

    module: nn.Module | None
    rule: Rule | None
    inner: Callable[..., Any] | None = None
    _: KW_ONLY
    result: Target | None = None
    level: str = ""
    by_user: Target | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rule, outer = self.rule, (LOCAL.rule, LOCAL.module, LOCAL.products)
        if rule is None:
            return self.__wrapped__(*args, **kwargs)
        if rule.handlers and (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            # a level rules its own module alone; around it an autocast goes on as before, and where no rule is
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                return self(*args, **kwargs)
        LOCAL.rule, LOCAL.products = None, 0  # a cast is no operation of the module
        try:
            if rule.protected and LOCAL.given:
                args, kwargs = map_tensors(_as_it_came, args), map_tensors(_as_it_came, kwargs)
            given: Any = (*args, *kwargs.values())
            if rule.entry is not None:
                args = tuple([cast(x, rule.entry) for x in args])
                kwargs = {name: cast(x, rule.entry) for name, x in kwargs.items()} if kwargs else kwargs
            module: Any = self.module
            # no bound method: compilers do not know how to make one
            forward, own = (self.inner, ()) if self.inner is not None else (type(module).forward, (module,))
            if LOCAL.on:
                LOCAL.rule, LOCAL.module = rule, module
                out = forward(*own, *args, **kwargs)
                LOCAL.rule = None
                return out if self.result is None else cast(out, self.result)
            new = zip((*args, *kwargs.values()), given)
            came = [low for y, x in new if y is not x for low in zip(float_tensors(y), float_tensors(x))]
            with running(rule, module, came):
                out = forward(*own, *args, **kwargs)
            # whoever is outside of every level knows dtypes alone
            return map_tensors(left_format, out if self.result is None else cast(out, self.result))
        except RuntimeError as error:
            told = way_out(error, self.module)
            if told is error:
                raise
            raise told from error
        finally:  # also after an error the caller goes on as it was
            LOCAL.rule, LOCAL.module, LOCAL.products = outer
            if not LOCAL.on:  # what the border of the network has kept, where a parameter is its input or its result
                LOCAL.kept = {}

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward without any cast."""
        return self.inner or MethodType(type(self.module).forward, self.module)  # type: ignore[union-attr]

    def __getattr__(self, name: str) -> Any:
        # torch.export asks for the code, others for the names and kinds of arguments
        if name in ("__code__", "__name__", "__annotations__") and "inner" in self.__dict__:
            return getattr(self.__wrapped__, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


Forward.__annotations__ = property(lambda self: self.__wrapped__.__annotations__)  # type: ignore[assignment]


class Decorated(Forward):
    """A function decorated at a level; in the body of a class a method, as any other function.

    The mark of a module has no `__get__`: it stands in the instance, where torch 2.11 would compile that all the same.
    """

    def __get__(self, owner: object, kind: type | None = None) -> Callable[..., Any]:
        return self if owner is None else MethodType(self, owner)


def _as_it_came(x: Tensor) -> Tensor:
    """An input of the network before its entrance cast it, if `x` is what became of one; else `x`."""
    return next((original for low, original in LOCAL.given if low is x), x)


# --- marks ------------------------------------------------------------------------------------------------------------

_MARK = "_mpkit_forward"  # where a module's mark is found when somebody wrapped its `forward` afterwards
_SCRIPT = "TorchScript, which runs in an interpreter of its own; cast the network before torch.jit.trace"
_NO_REPLICAS = (
    "nn.DataParallel, which copies modules without their forwards, so that a level does not reach its replicas; use "
    "nn.parallel.DistributedDataParallel, one process for each device"
)
_NO_STEPS = (
    "a module whose forward runs in steps (yield or await), in which a level cannot stay; put the level on the modules "
    "that it calls, or give a result in one piece"
)


def mark_of(module: object) -> Forward | None:
    """The casting mark on this very module (or decorated function), if any."""
    forward = module.__dict__.get(_MARK) if isinstance(module, nn.Module) else module
    return forward if isinstance(forward, Forward) else None


def mark(module: nn.Module, rule: Rule, **options: Any) -> Forward:
    """Put `rule` on this one module in place of any mark it has."""
    unmark(module)
    forward = Forward(module, rule, module.__dict__.get("forward"), **options)
    module.__dict__.update({"forward": forward, _MARK: forward})
    return forward


def remark(module: nn.Module, rule: Rule, **options: Any) -> Forward:
    """As `mark`; what a level put around the module (its result, the level recorded there) stays around it."""
    old = mark_of(module) or Forward(None, None)
    return mark(module, rule, result=old.result, level=old.level, **options)


def root_of(network: nn.Module) -> Forward:
    """The mark on the network itself, made if there is none."""
    return mark_of(network) or mark(network, Rule())


def unmark(module: nn.Module) -> None:
    """Take the mark off this one module; whatever stood in its `forward` before is back.

    A mark that somebody wrapped stays inside the wrapper and does nothing any more.
    """
    forward = mark_of(module)
    if forward is not None:
        forward.rule, inner = None, forward.inner
        del module.__dict__[_MARK]
        if module.__dict__.get("forward") is forward:
            del module.__dict__["forward"]
            module.__dict__.update({} if inner is None else {"forward": inner})


IN_STEPS = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def check_castable(network: nn.Module) -> None:
    """Raise TypeError unless `network` is a module, or if a part of it is what no level can reach, and say why."""
    check_kind("network", network, nn.Module, "an nn.Module (a tensor is cast by x.to(dtype))")
    for name, module in network.named_modules():
        in_steps = any(kind(getattr(type(module), "forward", None)) for kind in IN_STEPS)
        reasons = {torch.jit.ScriptModule: _SCRIPT, nn.DataParallel: _NO_REPLICAS, nn.Module: in_steps and _NO_STEPS}
        if why := next(text for kind, text in reasons.items() if isinstance(module, kind)):
            raise TypeError(f"{name or 'the network'} is {why}")
