"""A rule decides, per torch operation, the precision of its float inputs and of its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload

from mpkit.casting import operations as ops
from mpkit.casting.fills import FILLS, attention, numbers_in_format
from mpkit.casting.handlers import (
    Caster,
    Handler,
    computed_in,
    delivered_in,
    exactly_in,
    exposing,
    follows,
    in_place,
    layer_norm_of_low_input,
    looks_inside,
    norm_with_statistics,
    product_then_bias,
    product_then_sum,
    promoted,
    refused,
    rounded_from_float32,
    summed_rows,
    unchanged,
    unflattened,
    written_back,
)
from mpkit.casting.targets import Emulated, Target
from mpkit.casting.writes import beside_statistics, fills_bounded, lists_in_place, numbers_bounded, uncast_views


@dataclass(frozen=True, eq=False)
class Rule:
    """How the operations in one module's forward compute.

    Args:
        handlers: what to do for a torch function of this name.
        default:  what to do for any other; None calls it as it is.
        entry:    float arguments of the module are cast to this first; None leaves them.
        recipe:   (factory, arguments) that builds this rule again: rules are pickled by recipe, never copied.
        leaves:   what was found out about torch's own modules under this rule; see `leaves`.
    """

    handlers: Mapping[str, Handler] = field(default_factory=dict)
    default: Handler | None = None
    entry: Target | None = None
    recipe: tuple[Callable[..., Rule], tuple[Any, ...]] | None = None
    leaves: dict[type, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Callable[..., Rule], tuple[Any, ...]]:
        return self.recipe or (plain, ())

    def __deepcopy__(self, memo: object) -> Rule:
        return self  # immutable


_KERNELS = frozenset(ops.words("aten prims c10d _c10d_functional fsdp inductor"))


def for_overload(rule: Rule, func: OpOverload) -> Handler | None:
    """What a rule does for one overload of an operator, which somebody chose for the tensors at hand.

    torch's own are called as they are: a compiled graph consists of them, and holds its casts already. An operator of
    somebody else's that writes into its first argument leaves that its precision.
    """
    if func.namespace in _KERNELS:
        return None
    writes = rule.default is not None and func._schema.is_mutable and func._schema.arguments[0].is_write
    return in_place if writes else rule.default


def plain() -> Rule:
    """Nothing is cast."""
    return PLAIN


PLAIN = Rule()
CASTING = Rule()  # as PLAIN, while arguments or results of a module are cast


def _table(*parts: tuple[Iterable[Any], Handler], default: Handler | None = None) -> dict[str, Handler]:
    """Handlers by the name of the function: one operator has one name in all its homes. Later parts win."""
    table = {func.__name__: handler for functions, handler in parts for func in functions}
    shown = (ops.DATA_OF.__name__, *ops.SHOWS_MEMORY)  # the first is the name of every attribute
    table |= {name: exposing(table.get(name, default)) for name in shown}
    return table | {function.__name__: lists_in_place for function in ops.WRITE_INTO_LISTS}


UPDATING = Rule(_table())  # as PLAIN in an optimizer's step, which may write where nothing counts it


def _composed(listed: frozenset[str] = frozenset()) -> list[tuple[Iterable[Any], Handler]]:
    composed = {**ops.COMPOSED, **ops.composed_of(listed)}
    inside = [((func,), looks_inside(inner)) for func, inner in composed.items()]
    return [*inside, ((Tensor.unflatten,), unflattened)]


def _unless_integers(handler: Handler) -> Handler:
    """Told to give integers, an operation counts, and is left alone."""

    def handle(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        told = kwargs.get("dtype")
        counts = told is not None and not told.is_floating_point and not told.is_complex
        return func(*args, **kwargs) if counts else handler.run(mode, func, args, kwargs)

    return Handler(handle, handler.computes)


@cache
def everything(low: Target, result: Target | None = None, entry: Target | None = None) -> Rule:
    """Every operation takes its float inputs in `low`; `result` float32 makes it O1's white-listed module.

    Args:
        low:    precision of computation.
        result: precision of each operation's result, None: as computed.
        entry:  precision of the module's own float arguments, None: as given.
    """
    # a format that is only moved about needs no rounding, which would cost a pass and give the same
    moves = exactly_in(low) if isinstance(low, Emulated) and result is None else computed_in(low, result)
    handlers = _table(
        (ops.EXACT, moves),
        (ops.MAY_VIEW if result is None else (), uncast_views(moves, low)),
        *_composed(),
        (ops.IN_PLACE, in_place),
        (ops.FAKE_QUANTIZED, beside_statistics(low, result)),
        # in bfloat16 257 tokens would be 256, and offsets made of such counts point into another's rows
        (ops.COUNTS, unchanged),
        (ops.MAY_COUNT, _unless_integers(computed_in(low, result))),
        (ops.LEFT_ALONE, follows if isinstance(low, Emulated) else unchanged),
        (ops.PRODUCT_WITH_BIAS, product_then_bias(low, low, result)),
        (ops.WITH_STATISTICS, norm_with_statistics(low, result)),
        (ops.spellings("embedding"), delivered_in(low, result)),
        (ops.spellings("embedding_bag"), summed_rows(low, result)),
        *([] if isinstance(low, Emulated) else [(ops.WRONG_IN_16_BITS, rounded_from_float32(low, result))]),
    )
    default = computed_in(low, result)
    handlers |= _in_format(low, result, handlers, default, whatever=True)
    return Rule(handlers, default, entry, (everything, (low, result, entry)))


def _in_format(
    low: Target, result: Target | None, handlers: Mapping[str, Handler], default: Handler | None, *, whatever: bool
) -> dict[str, Handler]:
    """What an emulated format does for numbers and masks that it cannot hold; nothing for a native dtype."""
    if not isinstance(low, Emulated):
        return {}
    fills = {name: numbers_in_format(low, handlers.get(name, default), whatever=whatever) for name in FILLS}
    return fills if low.fmt.has_inf else fills | {F.scaled_dot_product_attention.__name__: attention(low, result)}


@cache
def recurrent(low: Target) -> Rule:
    """A recurrent layer: its kernel takes everything in `low`.

    What torch's own code does around the kernel stays as it is, since it compares the dtype of the input with that of
    the stored float32 weights.
    """
    return Rule(_table((ops.RECURRENT, computed_in(low))), None, torch.float32, (recurrent, (low,)))


@cache
def protected(low: Target, entry: Target | None) -> Rule:
    """A black-listed module: every operation in float32, a norm straight from its 16-bit input in one kernel."""
    inner = everything(torch.float32)
    # the float32 kernel reads 16-bit input as it is, so a cast of its own would only cost memory
    norms = _table(
        (ops.WITH_STATISTICS, delivered_in(low, computes=torch.float32)), (ops.LAYER_NORM, layer_norm_of_low_input(low))
    )
    return Rule({**inner.handlers, **norms}, inner.default, entry, (protected, (low, entry)))


@cache
def white_operators(low: Target, operators: frozenset[str], entry: Target | None = None) -> Rule:
    """O1 outside the listed modules: listed operators compute in `low` and give float32, all others are left alone.

    A listed product inside a larger function (linear, addmm, einsum, attention and the like) is found: it is computed
    in `low`, what is added to it stays float32.
    """
    wide = torch.float32
    listed = ops.spellings(*operators) if operators else frozenset()
    parts: list[tuple[Iterable[Any], Handler]] = [*_composed(), (listed, computed_in(low, wide))]
    # a listed product is also inside linear, addmm, einsum and attention, which torch runs as one
    if "matmul" in operators:
        parts += [(ops.LINEAR, product_then_bias(low, wide, wide)), (ops.SUM_WITH_PRODUCT, product_then_sum(low))]
        made_of_products = ops.spellings("einsum", "tensordot", "multi_dot", "scaled_dot_product_attention")
        parts += [(made_of_products, computed_in(low, wide))]
    if "relu" in operators:
        parts += [(ops.spellings("relu_"), written_back(torch.relu, low, wide))]
    parts += [(ops.CONVOLUTIONS & listed, product_then_bias(low, wide, wide))]
    if isinstance(low, Emulated) and not low.fmt.has_inf and "matmul" in operators:
        parts += [(ops.spellings("scaled_dot_product_attention"), attention(low, wide))]
    return Rule(_table(*parts), None, entry, (white_operators, (low, operators, entry)))


@cache
def operator_lists(
    low: Target,
    to_low: frozenset[str],
    to_wide: frozenset[str],
    to_promote: frozenset[str],
    bias_in_low: bool,
    banned: frozenset[str] = frozenset(),
    entry: Target | None = None,
    written: frozenset[str] = frozenset(),
) -> Rule:
    """Lists of operators computed in `low`, in float32, or in what their inputs promote to. Others follow their inputs.

    Args:  bias_in_low is False when the bias of a linear layer or convolution is added in float32 to the rounded
           product, as a promoted addition of its own. A `banned` operator raises a RuntimeError. What is `written`
           in place takes the precision of what it is written into.
    """
    biased = computed_in(low) if bias_in_low else product_then_bias(low, torch.float32, None)
    kernels = ops.RECURRENT if "linear" in to_low else ()
    parts: list[tuple[Iterable[Any], Handler]] = [
        (() if isinstance(low, Emulated) else ops.SCALED_BY_A_NUMBER, numbers_bounded),
        (() if isinstance(low, Emulated) else ops.FILL_WITH_NUMBERS, fills_bounded),
        (() if isinstance(low, Emulated) else ops.WRONG_IN_16_BITS, rounded_from_float32()),
        *_composed(to_low | to_wide | to_promote),
        (ops.spellings(*to_low), computed_in(low)),
        (kernels, computed_in(low)),
        (ops.PRODUCT_WITH_BIAS & ops.spellings(*to_low), biased),
        (ops.spellings(*to_wide), computed_in(torch.float32)),
        (ops.spellings(*to_promote), promoted),
        (ops.spellings(*banned), refused),
        (ops.spellings(*written), in_place),
    ]
    # natively what is on no list is left to torch; a format has nobody else who would round for it
    emulated = isinstance(low, Emulated)
    if emulated:
        parts.append((ops.IN_PLACE, in_place))
    recipe = (operator_lists, (low, to_low, to_wide, to_promote, bias_in_low, banned, entry, written))
    default = follows if emulated else None
    handlers = _table(*parts, default=default)
    return Rule(handlers | _in_format(low, None, handlers, default, whatever=False), default, entry, recipe)
