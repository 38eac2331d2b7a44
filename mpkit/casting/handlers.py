"""What is done for one torch operation: its float inputs cast, the operation, its result cast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload

from mpkit.casting import operations as ops
from mpkit.casting.kernels import without_kernel
from mpkit.casting.sparse import in_parts
from mpkit.casting.targets import (
    MARK,
    Emulated,
    Target,
    converted,
    converted_by_values,
    float_tensors,
    is_expanded,
    map_tensors,
    marked,
    marked_as_part,
    precision,
    promoted_precision,
    round_in_place_,
    still,
    unmarked,
)


class Caster(Protocol):
    """What a handler asks of the mode that calls it."""

    ledgers: tuple[Book, ...]
    layer: Any

    def cast(self, x: Tensor, target: Target) -> Tensor:
        """One float tensor in `target`; whatever else passes through."""

    def cast_all(self, values: Any, target: Target) -> Any:
        """Every float tensor in a nest of tuples, lists and dicts."""

    def expose(self, x: Tensor) -> None:
        """Somebody may write into `x` uncounted."""

    def __enter__(self) -> object:
        """From here on the mode sees the operations of this thread."""

    def __exit__(self, *error: Any) -> object:
        """To here."""


class Book(Protocol):
    """What is told of each operation, cast and operand while it is open: a ledger."""

    def run(
        self, mode: Any, handler: Handler | None, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object:
        """Do what `handler` says, and write it down."""

    def note_cast(self, x: Tensor, y: Tensor) -> None:
        """`x` was cast to `y`."""

    def operand_notes(self) -> Callable[..., None]:
        """What a product under a recipe calls for each operand."""


Run = Callable[[Caster, ops.Function, tuple[Any, ...], dict[str, Any]], object]


@dataclass(frozen=True, eq=False)
class Handler:
    """What is done for one torch operation.

    Args:
        run:        (mode, function, arguments, keyword arguments) -> the result.
        computes:   what the operation computes in; None: as its inputs decide.
        round_trip: stands where `run` casts its input to a native `computes` and its result back to float32: the same
                    with the result left in `computes`, for a neighbour that would cast it down again.
        around:     stands where `run` does nothing but cast all float inputs to the first of these native dtypes and
                    all float results to the second (None: no cast).
        inside:     whether `run` lets the rule see the operations of which the function is made, instead of it.
    """

    run: Run
    computes: Target | None = None
    round_trip: Run | None = None
    around: tuple[torch.dtype | None, torch.dtype | None] | None = None
    inside: bool = False


@Handler
def unchanged(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Call it as it is."""
    return func(*args, **kwargs)


@Handler
def follows(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """In the precision of its inputs. Native dtypes do so by themselves; a format does if all inputs are in it."""
    inputs = {precision(x) for x in float_tensors((args, kwargs))}
    out = func(*args, **kwargs)
    # several precisions, or no float input at all: torch has decided already
    if len(inputs) != 1:
        return out
    (target,) = inputs
    if not isinstance(target, Emulated):
        return out
    if func in ops.GIVE_NEW_MEMORY:
        unmarked(args[0])
        return out
    if func in ops.SEEN_AS:
        return still(out, target)
    if func.__name__ in ops.EXACT_NAMES or func in ops.VIEWED_AS:
        return moved(out, args, target, apart=func in ops.COUNTED_APART)
    return map_tensors(lambda x: mode.cast(x, target) if x.dtype is torch.float32 else x, out)


def moved(out: object, args: tuple[Any, ...], target: Emulated, *, apart: bool = False) -> object:
    """What an operation gave that only moves values of `target`: in `target` too, and bound to what it is a view of.

    Args:  apart says that torch counts writes into the two apart.
    """
    whole = args[0] if args else None

    def part(x: Tensor) -> Tensor:
        if x.dtype is not torch.float32 or x is whole:
            return x
        return marked_as_part(x, whole, target) if isinstance(whole, Tensor) and not apart else marked(x, target)

    return map_tensors(part, out)


def exposing(handler: Handler | None) -> Handler:
    """A tensor's attribute or memory is asked for, as `handler` says; who has that can write where no version counts.

    All attributes are called by one name, and only `.data` is such a one.
    """

    def handle(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if func == ops.DATA_OF or func.__name__ in ops.SHOWS_MEMORY:
            mode.expose(args[0])
            if func.__name__ in ops.TO_NUMPY and args[0].dtype is torch.bfloat16:
                args = (args[0].float(), *args[1:])  # NumPy has no such numbers
        return func(*args, **kwargs) if handler is None else handler.run(mode, func, args, kwargs)

    return Handler(handle)


def computed_in(low: Target, result: Target | None = None) -> Handler:
    """Float inputs to `low`; the result rounded to `low`, then cast to `result` (None: as computed).

    Where torch has no kernel for a native `low`, the rounded inputs are computed with in float32.
    """

    def handle(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if type(low) is Emulated and not float_tensors((args, kwargs)):
            return func(*args, **kwargs)  # torch.zeros and the like: a float32 tensor, as natively
        if not kwargs:  # the common case, kept short
            inputs = mode.cast_all(args, low)
            try:
                out = func(*inputs)
            except RuntimeError as error:
                out = without_kernel(mode.cast_all, func, inputs, {}, low, error)
            if result is None and type(low) is not Emulated:
                return out
            return _finished(mode, out, low, result)
        inputs = mode.cast_all(args, low)
        if type(low) is Emulated and kwargs.get("inplace") and inputs[0] is args[0]:
            inputs = (args[0].clone(), *inputs[1:])  # backward may need what is written over
        options = mode.cast_all(_without_out(func, kwargs, low), low)
        try:
            out = func(*inputs, **options)
        except RuntimeError as error:
            out = without_kernel(mode.cast_all, func, inputs, options, low, error)
        # `out=` gets the finished values: a kernel would write them before they are rounded or cast back
        return _delivered(_finished(mode, out, low, result), args, kwargs)

    around = None if isinstance(low, Emulated) or isinstance(result, Emulated) else (low, result)
    return Handler(handle, low, _left(computed_in, low, result), around)


def rounded_from_float32(low: torch.dtype | None = None, result: Target | None = None) -> Handler:
    """Inputs in `low` (None: as they come), computed with in float32, the result rounded to their precision."""

    def handle(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if low is not None:
            args, kwargs = mode.cast_all(args, low), mode.cast_all(kwargs, low)
        given = next((x.dtype for x in float_tensors((args, kwargs))), None)
        if given not in (torch.float16, torch.bfloat16):
            return func(*args, **kwargs)
        out = func(*mode.cast_all(args, torch.float32), **mode.cast_all(kwargs, torch.float32))
        return mode.cast_all(mode.cast_all(out, given), result or given)

    return Handler(handle, torch.float32)


def _left(factory: Callable[..., Handler], *precisions: Target | None) -> Run | None:
    """What `factory` makes if the result, the last precision, is left native instead of cast to float32."""
    *others, result = precisions
    # only a native result is bit for bit what its neighbour would cast down again
    trip = result is torch.float32 and isinstance(others[0], torch.dtype)
    return factory(*others, None).run if trip else None


def exactly_in(low: Emulated) -> Handler:
    """An operation that only moves values: inputs in the format give results in the format, with nothing to round."""

    def handle(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        inputs = mode.cast_all(args, low)
        out = func(*inputs, **mode.cast_all(_without_out(func, kwargs, low), low))
        return _delivered(moved(out, inputs, low, apart=func in ops.COUNTED_APART), args, kwargs)

    return Handler(handle, low)


def _finished(mode: Caster, out: object, low: Target, result: Target | None) -> Any:
    if type(low) is Emulated:  # a native kernel has rounded by itself
        out = mode.cast_all(out, low)
    if result is None:
        return out
    return mode.cast(out, result) if type(out) is Tensor else mode.cast_all(out, result)


def _without_out(func: ops.Function, kwargs: dict[str, Any], low: Target) -> dict[str, Any]:
    """What is written where it was asked for only when it has its final values: `out=`, and `inplace=` in a format."""
    later = ("out", "inplace") if type(low) is Emulated else ("out",)
    given = {name: value for name, value in kwargs.items() if name not in later}
    if type(func) is OpOverload and "out" in kwargs:  # it cannot do without
        native = low if isinstance(low, torch.dtype) else torch.float32
        given["out"] = map_tensors(
            lambda x: torch.empty_like(x, dtype=native if x.is_floating_point() else x.dtype), kwargs["out"]
        )
    return given


def _delivered(out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """The result, written where `out=` or `inplace=True` asked for it."""
    into = args[0] if kwargs.get("inplace") else kwargs.get("out")
    if into is None or into is out:
        return out
    if not isinstance(into, Tensor):  # a pair such as max gives
        return type(into)(_delivered(part, (), {"out": place}) for part, place in zip(out, into))
    # a cast of its own: `into` may have another dtype, and keeps it
    bound = precision(into)
    into.copy_(out)
    return still(into, bound) if isinstance(bound, Emulated) and precision(out) == bound else into


@Handler
def in_place(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """The tensor written into keeps its precision; other float inputs are cast to it."""
    into = args[0] if args else None
    if not isinstance(into, Tensor) or not into.is_floating_point():
        return func(*args, **kwargs)
    target = precision(into)
    args, kwargs = mode.cast_all(args[1:], target), mode.cast_all(kwargs, target)
    # natively the kernel rounds as it writes
    if not isinstance(target, Emulated):
        return func(into, *args, **kwargs)
    compute = ops.OUT_OF_PLACE.get(func.__name__)
    if func.__name__ in ops.WRITE_EXPANDED and is_expanded(into):
        compute = None
    if compute is not None:  # rounding in place what an operation saved for backward would spoil the gradient
        return still(into.copy_(mode.cast(compute(into.clone(), *args, **kwargs), target)), target)
    out = func(into, *args, **kwargs)
    round_in_place_(into, target)
    return out


def written_back(compute: ops.Function, low: Target, result: Target | None) -> Handler:
    """A listed operator in place (`relu_`): computed in `low`, then written into the tensor it was asked to change."""
    handle_new = computed_in(low, result)

    def handle(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        return _delivered(handle_new.run(mode, compute, args, kwargs), args, {"inplace": True})

    return Handler(handle)


def product_then_bias(low: Target, bias_in: Target, result: Target | None) -> Handler:
    """A product in `low`, rounded once, then the bias added in `bias_in` and rounded again.

    On CUDA a bias in a native `low` stays fused in the product: one kernel, one rounding less.
    """

    def handle(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        # the parts are taken by position below, whichever way they were given
        if kwargs:
            args = _positional(func, args, kwargs)
        x, weight = mode.cast(args[0], low), mode.cast(args[1], low)
        bias = args[2] if len(args) > 2 else None
        if bias is None or (bias_in is low and bias.is_cuda and not isinstance(low, Emulated)):
            out = func(x, weight, None if bias is None else mode.cast(bias, low), *args[3:])
            return _finished(mode, out, low, result)
        out = _finished(mode, func(x, weight, None, *args[3:]), low, None if bias_in is low else result)
        bias = mode.cast(bias, bias_in)
        if weight.dim() > 2:
            # one number per channel, the second axis of the result
            bias = bias.view(-1, *[1] * (weight.dim() - 2))
        # torch adds a dense tensor to a nested one in some layouts only
        out = in_parts(lambda part: part + bias, out) if out.is_nested else out + bias
        return _finished(mode, out, low, result) if bias_in is low else out

    return Handler(handle, low, _left(product_then_bias, low, low, result) if bias_in is low else None)


def _positional(func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a linear layer or convolution in the order of its signature."""
    transposed = ("output_padding", "groups", "dilation") if "transpose" in func.__name__ else ("dilation", "groups")
    names = ("input", "weight", "bias", "stride", "padding", *transposed)
    plain = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}
    last = max(names.index(name) for name in kwargs)
    return (*args, *(kwargs.get(name, plain.get(name)) for name in names[len(args) : last + 1]))


def product_then_sum(low: Target) -> Handler:
    """beta * input + alpha * (a @ b): the product in `low` with a float32 result, the sum in float32."""

    def handle(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if len(args) != 3 or "out" in kwargs:
            return func(*args, **kwargs)
        # torch.addmm takes one dtype for all three, and this sum is in float32
        product = torch.matmul(*mode.cast_all(args[1:], low))
        product = _finished(mode, product, low, torch.float32)
        return torch.add(kwargs.get("beta", 1) * args[0], product, alpha=kwargs.get("alpha", 1))

    return Handler(handle, low)


@Handler
def promoted(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """All float inputs to what torch promotes them to."""
    inputs = {precision(x) for x in float_tensors((args, kwargs))}
    if len(inputs) < 2:
        return follows.run(mode, func, args, kwargs)
    wide = promoted_precision(inputs)
    return func(*mode.cast_all(args, wide), **mode.cast_all(kwargs, wide))


def norm_with_statistics(low: Target, result: Target | None) -> Handler:
    """Batch and instance norm in `low`. Running statistics are written in place, so they stay float32 at every level.

    In evaluation statistics and affine parameters are rounded to `low`, in training they are used as they are.
    """

    def handle(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        def settled(x: Tensor) -> Tensor:
            return converted(mode.cast(x, low), torch.float32)

        rest, options = args[1:], kwargs
        if not (kwargs.get("training") or kwargs.get("use_input_stats")):
            rest, options = map_tensors(settled, rest), map_tensors(settled, kwargs)
        return _finished(mode, func(mode.cast(args[0], low), *rest, **options), low, result)

    return Handler(handle, low)


def layer_norm_of_low_input(low: Target) -> Handler:
    """A protected layer norm: the kernel takes its input as it comes, computes in float32, rounds once to `low`.

    It rounds gamma and beta to the precision of its input, as MindSpore 2.7 was seen to do at O2 too.
    """

    def handle(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        given = precision(args[0])
        args, kwargs = (args[0], *mode.cast_all(args[1:], given)), mode.cast_all(kwargs, given)
        return mode.cast_all(func(*args, **kwargs), low)

    return Handler(handle, torch.float32)


def delivered_in(low: Target, result: Target | None = None, computes: Target | None = None) -> Handler:
    """Called as it is, with its result rounded to `low`, then cast to `result`.

    A protected batch norm uses its float32 parameters and statistics on the input as it comes. The rows that an
    embedding picks have the same values as those of a cast table; the gradient of a row that was picked several times
    is so added up in float32, and `max_norm` finds the table itself.
    """

    def handle(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        out = mode.cast_all(func(*args, **kwargs), low)
        return out if result is None else mode.cast_all(out, result)

    around = (None, low) if isinstance(low, torch.dtype) and result is None else None
    return Handler(handle, computes or low, around=around)


def summed_rows(low: Target, result: Target | None) -> Handler:
    """`embedding_bag` in `low`. With `sparse=True` the gradient of its table is sparse, which torch's casts refuse."""
    in_low = computed_in(low, result)

    def handle(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        table = args[1] if len(args) > 1 else kwargs.get("weight")
        if (args[7] if len(args) > 7 else kwargs.get("sparse")) and isinstance(table, Tensor):
            table = table if precision(table) == low else converted_by_values(table, low)
            args = (args[0] if args else kwargs["input"], table, *args[2:])
            kwargs = {name: value for name, value in kwargs.items() if name not in ("input", "weight")}
        return in_low.run(mode, func, args, kwargs)

    return Handler(handle, low)


def looks_inside(inner: ops.Function) -> Handler:
    """A composed function: run it so that the rule sees its inner operations."""

    def handle(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        with mode:
            return inner(*args, **kwargs)

    return Handler(handle, inside=True)


@Handler
def unflattened(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """`x.unflatten`, which the compiler can follow only as a function."""
    if hasattr(args[0], MARK):
        return follows.run(mode, torch.unflatten, args, kwargs)
    return torch.unflatten(*args, **kwargs)


@Handler
def refused(mode: Caster, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """An operation that the lists ban, since its float16 result would overflow or lose all precision."""
    name = getattr(func, "__name__", func)
    raise RuntimeError(f"{name} is unsafe in 16 bits and banned here; use {name}_with_logits, or to_float")
