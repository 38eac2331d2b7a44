"""What can be done for an operation: a handler takes a torch function and its arguments, casts, and calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from mpkit.casting import operators as ops
from mpkit.casting.low import Emulated, Low, Target, bounded, float_tensors, left_format, map_tensors, precision
from mpkit.casting.mode import LOCAL, CastMode, Handler, as_is, call, cast, computes

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
WIDE = torch.float32

# --- computed in a precision ------------------------------------------------------------------------------------------


@cache
def computed(low: Target, result: Target | None = None) -> Handler:
    """Float inputs to `low`; the result cast to `result` (None: as computed)."""

    def run(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
        # written only when the values are final: a kernel would write them before they are cast back
        into = kwargs.pop("out", None)
        if kwargs.pop("inplace", False):
            into = args[0]
        out = call(func, args, kwargs, low)
        if result is not None or kwargs:
            out = cast(out, result or low)
        return out if into is None else _delivered(out, into)

    return run


def _delivered(out: Any, into: Any) -> Any:
    """The result, written where `out=` or `inplace=True` asked for it, which keeps its dtype."""
    if isinstance(into, Tensor):
        return into.copy_(out)
    return type(into)(_delivered(part, place) for part, place in zip(out, into))  # a pair, such as max gives


@cache
def delivered_in(low: Target) -> Handler:
    """As it comes, with its result in `low`: the rows that an embedding picks are those of a cast table.

    The gradient of a row that was picked several times is so added up in float32, also beside
    weights of samples in `low`.
    """
    return lambda func, args, kwargs: cast(promoted(func, args, kwargs), low)


def promoted(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
    """All float inputs to the widest of them; a format counts as the float32 that holds it."""
    inputs = {precision(x) for x in float_tensors((args, kwargs))}
    if len(inputs) < 2:
        return as_is(func, args, kwargs)
    return call(func, args, kwargs, torch.float64 if torch.float64 in inputs else WIDE)


# --- parameters alone -------------------------------------------------------------------------------------------------


@cache
def parameters_in(low: Target) -> Handler:
    """Parameters take the precision of the activations; everything else is torch's own affair."""

    def own(value: Any) -> Any:
        kind = type(value)
        if kind is list or kind is tuple:
            return kind([own(x) for x in value])
        if kind is Tensor:
            return cast(value, low) if value.dtype is WIDE and _is_own(value) else value
        # a sharded parameter is of a class of its own
        return cast(value, low) if isinstance(value, Tensor) and isinstance(value, nn.Parameter) else value

    def run(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
        if kwargs.get("inplace"):
            return written_as_it_is(func, args, kwargs)
        # torch itself moves values into their own dtype alone
        into = kwargs.pop("out") if "out" in kwargs and func.__name__ in ops.EXACT else None
        out = func(*[own(x) for x in args], **{name: x if name == "out" else own(x) for name, x in kwargs.items()})
        return out if into is None else _delivered(out, into)

    return run


def _is_own(x: Tensor) -> bool:
    """Whether a plain tensor is a view of a parameter, or stands where one stood, as `torch.func` puts it."""
    if is_compiling() or x.dim() == 0:  # a compiler knows parameters by their class alone
        return False
    module = LOCAL.module
    base = x if x._base is None else x._base
    return type(base) is nn.Parameter or (
        module is not None
        and any(p is x or p is base for p in nn.Module.__getattribute__(module, "_parameters").values())
    )


@cache
def viewed(low: Target) -> Handler:
    """A view stays one, so that a write into it arrives; whoever computes with it casts. A graph has no such writes.

    What came out a copy of a parameter is cast here, since nobody will know it for one.
    """
    inner = parameters_in(low)

    def run(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
        if is_compiling():
            return inner(func, args, kwargs)
        out = as_is(func, args, kwargs)
        copied = type(out) is Tensor and out._base is None and args and _is_own(args[0])
        return cast(out, low) if copied else out

    return run


# --- writes -----------------------------------------------------------------------------------------------------------


def written(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
    """The tensor that is written into, or beside, decides; the other float inputs are cast to it."""
    LOCAL.given.clear()  # an input of the network may be what is written into
    if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
        return func(*args, **kwargs)
    return call(partial(func, args[0]), args[1:], kwargs, precision(args[0]))


def written_as_it_is(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
    """Torch casts what it writes."""
    LOCAL.given.clear()
    return as_is(func, args, kwargs)


def assigned(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
    """`x.data = y`: torch does not ask for y's class, and a tensor in a format has no memory that x could take over."""
    if isinstance(args[0], Low) and func == Tensor.data.__set__:  # type: ignore[attr-defined]
        return args[0].detach().copy_(args[1])
    return func(args[0], *map_tensors(left_format, args[1:]), **kwargs)


def filled(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
    """A finite number that 16 bits cannot hold, such as the -1e9 of a mask, stands for their largest."""
    dtype = kwargs.get("dtype") or getattr(args[0] if args else None, "dtype", None)
    if dtype not in (torch.float16, torch.bfloat16):
        return as_is(func, args, kwargs)
    largest = torch.finfo(dtype).max
    given = [bounded(x, largest) for x in args]
    return func(*given, **{name: bounded(x, largest) for name, x in kwargs.items()})


# --- products ---------------------------------------------------------------------------------------------------------


@cache
def product_then_bias(low: Target, bias_in: Target, result: Target | None) -> Handler:
    """A product in `low`, rounded once, then the bias added in `bias_in` and rounded again.

    On CUDA a bias in a native `low` stays fused in the product: one kernel, one rounding less.
    """

    def run(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
        if len(args) < 3:  # the parts are taken by position, whichever way they were given
            args = (*args, *(kwargs.pop(name, None) for name in ("input", "weight", "bias")[len(args) :]))
        x, weight, bias, *rest = args
        x, weight = cast(x, low), cast(weight, low)
        if bias is None or (bias_in == low and bias.is_cuda and not isinstance(low, Emulated)):
            out = func(x, weight, None if bias is None else cast(bias, low), *rest, **kwargs)
        else:
            out = func(x, weight, None, *rest, **kwargs)
            if bias_in != low:
                out = left_format(out) if result is None else cast(out, result)
            bias = cast(bias, bias_in)
            # of a convolution one number per channel, the second axis of the result
            out = out + (bias.view(-1, *[1] * (weight.dim() - 2)) if weight.dim() > 2 else bias)
        return out if result is None else cast(out, result)

    return run


@cache
def product_then_sum(low: Target) -> Handler:
    """beta * input + alpha * (a @ b): the product in `low`, the sum in float32."""

    def run(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
        if len(args) != 3 or "out" in kwargs:
            return func(*args, **kwargs)
        # torch.addmm takes one dtype for all three, and this sum is in float32
        product = cast(call(torch.matmul, args[1:], {}, low), WIDE)
        return torch.add(kwargs.get("beta", 1) * args[0], product, alpha=kwargs.get("alpha", 1))

    return run


# --- norms ------------------------------------------------------------------------------------------------------------


@cache
def norm_with_statistics(low: Target) -> Handler:
    """Batch and instance norm in `low`. Running statistics are written in place, so they stay float32.

    In evaluation statistics and affine parameters are rounded to `low`, in training they are used as they are.
    """

    def settled(x: Tensor) -> Tensor:
        return cast(cast(x, low), WIDE) if x.is_floating_point() else x

    def run(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
        computes(low)
        if not (kwargs.get("training") or kwargs.get("use_input_stats")):
            args, kwargs = (args[0], *map_tensors(settled, args[1:])), map_tensors(settled, kwargs)
        return func(cast(args[0], low), *args[1:], **kwargs)

    return run


@cache
def norm_in_float32(low: Target, rounds: bool) -> Handler:
    """A protected norm: the kernel computes in float32 on the input as it comes, the result is cast to `low`.

    With `rounds`, as a layer norm, gamma and beta take the precision of the input, as MindSpore 2.7 was seen to do at
    O2 too; else, as a batch norm, parameters and statistics are used as they are.
    """

    def run(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
        computes(WIDE)
        own = call(partial(func, args[0]), args[1:], kwargs, precision(args[0])) if rounds else func(*args, **kwargs)
        return cast(own, low)

    return run


@cache
def recurrent_kernel(low: Target) -> Handler:
    """What the compiler does not look into, as it does not look into torch's own recurrent layers."""
    inner = computed(low)

    def run(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
        return (torch.compiler.disable(inner) if is_compiling() else inner)(func, args, kwargs)

    return run


@cache
def rounded_once(low: Target) -> Handler:
    """What torch makes of operators in float32, rounding their last result alone, as a root mean square norm."""
    wide = computed(WIDE, low)
    return lambda func, args, kwargs: call(lambda *low, **named: wide(func, low, named), args, kwargs, low)


# --- functions of functions -------------------------------------------------------------------------------------------


def looks_inside(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
    """A function that Python makes of others: run so that the rule sees these."""
    inner = ops.COMPOSED.get(func.__name__) or ops.COMPOSED_OF_LISTED[func.__name__]
    with CastMode():
        return inner(*args, **kwargs)


def cast_inside(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
    """A checkpoint, which the compiler alone takes for one operation: the function in it is cast."""

    def function(*inner: Any, **named: Any) -> object:
        with CastMode():
            return args[0](*inner, **named)

    return func(function, *args[1:], **kwargs)


def differentiated(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
    """A backward pass inside a forward: what is computed again in it enters its levels anew, since no mode listens."""
    outer, LOCAL.on, LOCAL.rule = (LOCAL.on, LOCAL.rule), False, None
    try:
        return as_is(func, args, kwargs)
    finally:
        LOCAL.on, LOCAL.rule = outer


# --- as other frameworks have it --------------------------------------------------------------------------------------


@cache
def computed_but_float64(low: Target) -> Handler:
    """As `computed`; with a float64 among its inputs an operation is torch's own: it widens the others or refuses."""
    return unless(lambda *given: any(x.dtype is torch.float64 for x in float_tensors(given)), computed(low))


def unless(own: Callable[[Args, Kwargs], bool], handler: Handler) -> Handler:
    """`handler`, but where `own(args, kwargs)` the operation is torch's own affair."""
    return lambda func, args, kwargs: (as_is if own(args, kwargs) else handler)(func, args, kwargs)


def refused(low: Target | None = None) -> Handler:
    """An operation that a framework bans on 16 bits, which would overflow or lose all precision (None: on any)."""

    unsafe = {low, torch.float16, torch.bfloat16}

    def run(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
        if low is not None and not {precision(x) for x in float_tensors(args[:1])} & unsafe:
            return computed(WIDE)(func, args, kwargs)
        kind, name = (RuntimeError if low is None else NotImplementedError), func.__name__
        raise kind(f"{name} is unsafe in 16 bits, and banned there; use {name}_with_logits, or to_float")

    return run
