"""A rule decides, per torch operation, the dtype of its float inputs and of its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.casting import operations as ops

if TYPE_CHECKING:
    from mpkit.casting.mode import CastMode

Target = torch.dtype
Handler = Callable[["CastMode", ops.Function, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True, eq=False)
class Rule:
    """How the operations in one module's forward compute.

    Args:
        handlers: what to do for a torch function.
        default:  what to do for any other; None calls it as it is.
        entry:    float arguments of the module are cast to this first; None leaves them.
        recipe:   (factory, arguments) that builds this rule again: rules are pickled and copied by recipe.
    """

    handlers: Mapping[ops.Function, Handler] = field(default_factory=dict)
    default: Handler | None = None
    entry: Target | None = None
    recipe: tuple[Callable[..., Rule], tuple[Any, ...]] | None = None

    def __reduce__(self) -> Any:
        return self.recipe if self.recipe is not None else (plain, ())

    def __deepcopy__(self, memo: Any) -> Rule:
        return self  # immutable


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`change` applied to every tensor in a nest of tuples (named too), lists and dicts; the nest keeps its types."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        items = [map_tensors(change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        changed = {key: map_tensors(change, item) for key, item in value.items()}
        return changed if type(value) is dict else type(value)(changed)
    return value


def narrowed(low: Target, result: Target | None) -> Handler:
    """Float inputs to `low`, the result to `result` (None: as computed)."""

    def handle(mode: CastMode, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*mode.cast_all(args, low), **mode.cast_all(kwargs, low))
        if result is not None:
            out = mode.cast_all(out, result)
        if kwargs.get("inplace") and out is not args[0]:
            return args[0].copy_(out)
        return out

    return handle


def unchanged(mode: CastMode, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call it as it is."""
    return func(*args, **kwargs)


def in_place(mode: CastMode, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor written into keeps its dtype; other float inputs are cast to it."""
    into = args[0] if args else None
    if not isinstance(into, Tensor) or not into.is_floating_point():
        return func(*args, **kwargs)
    return func(into, *mode.cast_all(args[1:], into.dtype), **mode.cast_all(kwargs, into.dtype))


def product_then_bias(low: Target, bias_in: Target, result: Target | None) -> Handler:
    """A product in `low`, rounded once, then the bias added in `bias_in` and rounded again.

    On CUDA a bias in `low` stays fused in the product (one kernel, one rounding less).
    """

    def handle(mode: CastMode, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = mode.cast_all(args[:2], low) + args[2:], dict(kwargs)
        bias = args[2] if len(args) > 2 else kwargs.pop("bias", None)
        rest = args[3:]
        if bias is None or (bias_in is low and bias.is_cuda):
            out = func(*args[:2], None if bias is None else mode.cast(bias, low), *rest, **kwargs)
        else:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            out = func(*args[:2], None, *rest, **kwargs)
            if bias_in is not low:
                out = out.to(bias_in)
            out = out + mode.cast(bias, bias_in).view(-1, *[1] * (weight.dim() - 2))
        return out if result is None else mode.cast_all(out, result)

    return handle


def norm_with_statistics(low: Target | None, result: Target | None) -> Handler:
    """Batch and instance norm: running statistics are written in place and stay float32 at every level.

    `low` None keeps statistics and affine parameters float32 beside a 16-bit input: one kernel widens, normalizes and
    rounds once. Else they are rounded to `low` in evaluation, and used as they are in training.
    """

    def handle(mode: CastMode, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if low is None:
            out = func(*args, **kwargs)
        else:
            evaluates = not (kwargs.get("training", False) or kwargs.get("use_input_stats", False))

            def settle(x: Tensor) -> Tensor:
                return mode.cast(mode.cast(x, low), torch.float32) if evaluates else x

            x = mode.cast(args[0], low)
            out = func(x, *map_tensors(settle, args[1:]), **map_tensors(settle, kwargs))
        return out if result is None else mode.cast_all(out, result)

    return handle


def plain() -> Rule:
    """Nothing is cast."""
    return PLAIN


PLAIN = Rule()

_WITH_STATISTICS = (F.batch_norm, F.instance_norm)


def _table(*parts: tuple[Iterable[ops.Function], Handler]) -> dict[ops.Function, Handler]:
    return {func: handler for functions, handler in parts for func in functions}


@cache
def everything(low: Target, result: Target | None = None, entry: Target | None = None) -> Rule:
    """Every operation takes its float inputs in `low`; `result` float32 makes it MindSpore's white-listed cell.

    Args:
        low:    dtype of computation.
        result: dtype of each operation's result, None: as computed.
        entry:  dtype of the module's own float arguments, None: as given.
    """
    handlers = _table(
        (ops.LEFT_ALONE, unchanged),
        (ops.IN_PLACE, in_place),
        (ops.PRODUCT_WITH_BIAS, product_then_bias(low, low, result)),
        (_WITH_STATISTICS, norm_with_statistics(low, result)),
    )
    return Rule(handlers, narrowed(low, result), entry, (everything, (low, result, entry)))


@cache
def protected(entry: Target | None) -> Rule:
    """A black-listed module: every operation in float32, norms on a 16-bit input in one kernel."""
    inner = everything(torch.float32)
    handlers = {**inner.handlers, **_table(((*_WITH_STATISTICS, F.layer_norm), norm_with_statistics(None, None)))}
    return Rule(handlers, inner.default, entry, (protected, (entry,)))


@cache
def white_operators(low: Target, operators: frozenset[ops.Function]) -> Rule:
    """O1 in a module that is not listed: listed operators compute in `low` and give float32, the others are left alone."""
    products = ops.spellings("matmul")
    listed = set(operators)
    handlers = _table((listed, narrowed(low, torch.float32)))
    if listed & products:
        handlers |= _table((ops.spellings("linear"), product_then_bias(low, torch.float32, torch.float32)))
    handlers |= _table((ops.CONVOLUTIONS & listed, product_then_bias(low, torch.float32, torch.float32)))
    return Rule(handlers, None, None, (white_operators, (low, operators)))


def is_recurrent(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase)
