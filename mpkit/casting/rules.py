"""Why an operation runs in the precision it runs in: what each rule does for each torch function.

A rule is a table from the name of a function to a handler, and what is done for all others. `everything` is O2, O3 and
`to_float`, `protected` a norm at O2, `white_operators` and `forced` are O1, `operator_lists` auto, apex and autocast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from mpkit.casting import operators as ops
from mpkit.casting.low import Emulated, Low, Target, float_tensors, map_tensors, precision
from mpkit.casting.mode import LOCAL, CastMode, Handler, Rule, as_is, cast, cast_all, computes
from mpkit.formats import dtype_name

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
WIDE = torch.float32

# --- handlers ---------------------------------------------------------------------------------------------------------


@cache
def computed(low: Target, result: Target | None = None) -> Handler:
    """Float inputs to `low`; the result cast to `result` (None: as computed)."""

    def run(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
        if not kwargs:
            out = func(*cast_all(args, low))
            return out if result is None else cast_all(out, result)
        # written only when the values are final: a kernel would write them before they are cast back
        into = args[0] if kwargs.get("inplace") else kwargs.get("out")
        options = {name: value for name, value in kwargs.items() if name not in ("out", "inplace")}
        out = cast_all(func(*cast_all(args, low), **cast_all(options, low)), result or low)
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

    The gradient of a row that was picked several times is so added up in float32.
    """
    return lambda func, args, kwargs: cast_all(func(*args, **kwargs), low)


@cache
def parameters_in(low: Target) -> Handler:
    """Parameters take the precision of the activations; everything else is torch's own affair."""

    def run(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
        args = tuple(_own_cast(args, low))
        if not kwargs:
            return func(*args)
        if kwargs.get("inplace"):
            LOCAL.given.clear()
        return func(*args, **dict(zip(kwargs, _own_cast(tuple(kwargs.values()), low))))

    return run


def sparing_kernels(handler: Handler) -> Handler:
    """A default that leaves alone the overloads of which a compiled graph consists: the graph holds its casts."""

    def run(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
        kernel = not is_compiling() and "." in func.__name__ and getattr(func, "namespace", "") in _KERNELS
        return (as_is if kernel else handler)(func, args, kwargs)

    return run


_KERNELS = frozenset(ops.words("aten prims c10d _c10d_functional fsdp inductor"))


def _own_cast(values: Any, low: Target) -> Any:
    """The values, in which parameters of the network and their views are cast; the very same if there are none."""
    changed = None
    for i, value in enumerate(values):
        kind = type(value)
        if kind is nn.Parameter or (kind is Tensor and value.dtype is WIDE and _is_own(value)):
            new = cast(value, low)
        elif kind is list or kind is tuple:
            new = _own_cast(value, low)
        elif isinstance(value, nn.Parameter):  # a sharded one is of a class of its own
            new = cast(value, low)
        else:
            continue
        if new is not value:
            changed = list(values) if changed is None else changed
            changed[i] = new
    return values if changed is None else type(values)(changed)


def _is_own(x: Tensor) -> bool:
    """Whether a plain tensor is a view of a parameter, or stands where one stood, as `torch.func` puts it."""
    if is_compiling() or x.dim() == 0:  # a compiler knows parameters by their class alone
        return False
    module = LOCAL.module
    return type(x._base) is nn.Parameter or (
        module is not None and any(x is p for p in nn.Module.__getattribute__(module, "_parameters").values())
    )


@cache
def viewed(low: Target) -> Handler:
    """A view stays one, so that a write into it arrives; whoever computes with it casts. A graph has no such writes."""
    inner = parameters_in(low)
    return lambda func, args, kwargs: inner(func, args, kwargs) if is_compiling() else as_is(func, args, kwargs)


def written(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
    """The tensor that is written into, or beside, decides; the other float inputs are cast to it."""
    LOCAL.given.clear()  # an input of the network may be what is written into
    if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
        return func(*args, **kwargs)
    into = precision(args[0])
    return func(args[0], *cast_all(args[1:], into), **cast_all(kwargs, into))


def written_as_it_is(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
    """Torch casts what it writes."""
    LOCAL.given.clear()
    return as_is(func, args, kwargs)


@cache
def written_back(low: Target, result: Target) -> Handler:
    """`x.relu_()` where relu is listed: computed in `low`, then written into the tensor it was asked to change."""
    new = computed(low, result)
    return lambda func, args, kwargs: args[0].copy_(new(torch.relu, args, kwargs))


def shown(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
    """Who has the memory of a tensor may write into it uncounted. All attributes have one name, `.data` is one."""
    if func is _DATA or func.__name__ != "__get__":
        LOCAL.shown = True
    return as_is(func, args, kwargs)


_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]


def filled(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
    """A finite number that 16 bits cannot hold, such as the -1e9 of a mask, stands for their largest."""
    dtype = kwargs.get("dtype") or getattr(args[0] if args else None, "dtype", None)
    if dtype not in (torch.float16, torch.bfloat16):
        return as_is(func, args, kwargs)
    largest = torch.finfo(dtype).max

    def bounded(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point():
            return torch.where(value.isfinite(), value.clamp(-largest, largest), value)
        if type(value) in (int, float) and math.isfinite(value):
            return max(-largest, min(largest, value))
        return value

    return func(*map(bounded, args), **{name: bounded(value) for name, value in kwargs.items()})


@cache
def product_then_bias(low: Target, bias_in: Target, result: Target | None) -> Handler:
    """A product in `low`, rounded once, then the bias added in `bias_in` and rounded again.

    On CUDA a bias in a native `low` stays fused in the product: one kernel, one rounding less.
    """

    def run(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
        # the parts are taken by position, whichever way they were given
        x, weight, bias, *rest = _positional(func, args, kwargs) if kwargs or len(args) < 3 else args
        x, weight = cast(x, low), cast(weight, low)
        if bias is None or (bias_in == low and bias.is_cuda and not isinstance(low, Emulated)):
            out = func(x, weight, None if bias is None else cast(bias, low), *rest)
        else:
            out = func(x, weight, None, *rest)
            if bias_in != low and result is not None:
                out = cast(out, result)
            bias = cast(bias, bias_in)
            # of a convolution one number per channel, the second axis of the result
            out = out + (bias.view(-1, *[1] * (weight.dim() - 2)) if weight.dim() > 2 else bias)
        return out if result is None else cast(out, result)

    return run


def _positional(func: ops.Function, args: Args, kwargs: Kwargs) -> Args:
    """The arguments of a linear layer or convolution in the order of its signature."""
    transposed = ("output_padding", "groups", "dilation") if "transpose" in func.__name__ else ("dilation", "groups")
    names = ("input", "weight", "bias", "stride", "padding", *transposed)
    plain = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}
    last = max([2, *(names.index(name) for name in kwargs)])
    return (*args, *(kwargs.get(name, plain.get(name)) for name in names[len(args) : last + 1]))


@cache
def product_then_sum(low: Target) -> Handler:
    """beta * input + alpha * (a @ b): the product in `low`, the sum in float32."""

    def run(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
        if len(args) != 3 or "out" in kwargs:
            return func(*args, **kwargs)
        # torch.addmm takes one dtype for all three, and this sum is in float32
        product = cast(torch.matmul(*cast_all(args[1:], low)), WIDE)
        return torch.add(kwargs.get("beta", 1) * args[0], product, alpha=kwargs.get("alpha", 1))

    return run


@cache
def attention(low: Target, result: Target | None) -> Handler:
    """Attention in a format: the mask that is added to its scores stays as it comes, since -inf may be no number."""

    def run(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
        named = {name: value if name == "attn_mask" else cast(value, low) for name, value in kwargs.items()}
        out = func(*cast_all(args[:3], low), *args[3:], **named)
        return out if result is None else cast(out, result)

    return run


def promoted(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
    """All float inputs to the widest of them; a format counts as the float32 that holds it."""
    inputs = {precision(x) for x in float_tensors((args, kwargs))}
    if len(inputs) < 2:
        return as_is(func, args, kwargs)
    wide = torch.float64 if torch.float64 in inputs else WIDE
    return func(*cast_all(args, wide), **cast_all(kwargs, wide))


@cache
def norm_with_statistics(low: Target) -> Handler:
    """Batch and instance norm in `low`. Running statistics are written in place, so they stay float32.

    In evaluation statistics and affine parameters are rounded to `low`, in training they are used as they are.
    """

    def settled(x: Tensor) -> Tensor:
        return cast(cast(x, low), WIDE) if x.is_floating_point() else x

    def run(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
        computes(low)
        if kwargs.get("training") or kwargs.get("use_input_stats"):
            return func(cast(args[0], low), *args[1:], **kwargs)
        return func(cast(args[0], low), *map_tensors(settled, args[1:]), **map_tensors(settled, kwargs))

    return run


@cache
def layer_norm_in_float32(low: Target) -> Handler:
    """A protected layer norm: computed in float32, rounded once to `low`.

    Its gamma and beta are rounded to the precision of its input, as MindSpore 2.7 was seen to do at O2 too.
    """

    def run(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
        computes(WIDE)
        # native kernels read 16-bit input as it is, so a cast of its own would only cost memory
        given = precision(args[0])
        args, kwargs = (args[0], *cast_all(args[1:], given)), cast_all(kwargs, given)
        if isinstance(given, Emulated):
            args, kwargs = cast_all(args, WIDE), cast_all(kwargs, WIDE)
        return cast_all(func(*args, **kwargs), low)

    return run


@cache
def batch_norm_in_float32(low: Target) -> Handler:
    """A protected batch norm: float32 parameters and statistics on the input as it comes, the result in `low`."""

    def run(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
        computes(WIDE)
        # the float32 kernel reads a native 16-bit input itself; a format has no kernel of its own
        x = cast(args[0], WIDE) if isinstance(args[0], Low) else args[0]
        return cast(func(x, *args[1:], **kwargs), low)

    return run


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


def unflattened(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
    """`x.unflatten`, which the compiler can follow only as a function."""
    return torch.unflatten(*args, **kwargs)


def differentiated(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
    """A backward pass inside a forward: what is computed again in it enters its levels anew, since no mode listens."""
    outer, LOCAL.on = LOCAL.on, False
    rule, LOCAL.rule = LOCAL.rule, None
    try:
        return as_is(func, args, kwargs)
    finally:
        LOCAL.on, LOCAL.rule = outer, rule


def refused(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
    """An operation that the lists ban, since its float16 result would overflow or lose all precision."""
    name = func.__name__
    raise RuntimeError(f"{name} is unsafe in 16 bits and banned here; use {name}_with_logits, or to_float")


# --- rules ------------------------------------------------------------------------------------------------------------

Part = tuple[Iterable[str], Handler]


def _table(*parts: Part) -> dict[str, Handler]:
    """Handlers by the name of the function; later parts win."""
    always: list[Part] = [
        (ops.COMPOSED, looks_inside),
        (("checkpoint", "tag_activation_checkpoint"), cast_inside),
        (("unflatten",), unflattened),
        (("backward", "grad"), differentiated),
        (("__get__", *ops.SHOWS_MEMORY), shown),
    ]
    return {name: handler for names, handler in (*always, *parts) for name in names}


def recipe_table(linear: Handler) -> dict[str, Handler]:
    """Linear layers as a recipe says, everything else as without one."""
    return _table((("linear",), linear))


def _of_one_dtype(low: Target, result: Target | None = None) -> list[Part]:
    attends: list[Part] = [((ops.ATTENTION,), attention(low, result))] if isinstance(low, Emulated) else []
    return [(ops.OF_ONE_DTYPE | ops.RECURRENT, computed(low, result)), *attends]


@cache
def everything(low: Target, entry: Target | None = None) -> Rule:
    """O2, O3, to_float: arguments, parameters and products in `low`; torch itself decides the rest.

    So a float32 constant beside low activations promotes them until the next module.
    """
    handlers = _table(
        (ops.LEFT_ALONE - ops.SHOWS_MEMORY - {"__get__"}, as_is),
        (ops.IN_PLACE, written_as_it_is),
        (ops.MAY_VIEW - {"unflatten"}, viewed(low)),
        # torch refuses several dtypes here, so its promotion decides nothing
        *_of_one_dtype(low),
        (ops.WRITTEN_BESIDE | ops.WEIGHTED_LOSSES, written),
        (ops.PRODUCT_WITH_BIAS, product_then_bias(low, low, None)),
        (ops.WITH_STATISTICS, norm_with_statistics(low)),
        (("embedding", "embedding_bag"), delivered_in(low)),
    )
    return Rule(handlers, sparing_kernels(parameters_in(low)), entry, False, (everything, (low, entry)))


@cache
def recurrent(low: Target) -> Rule:
    """A recurrent layer of torch's: its kernel takes everything in `low`.

    Around the kernel it compares the dtype of its input with that of its float32 weights.
    """
    return Rule(_table((ops.RECURRENT, computed(low))), None, WIDE, False, (recurrent, (low,)))


@cache
def protected(low: Target, entry: Target | None) -> Rule:
    """A black-listed module: everything in float32, a norm of torch's straight from its 16-bit input in one kernel."""
    norms = _table((ops.WITH_STATISTICS, batch_norm_in_float32(low)), (("layer_norm",), layer_norm_in_float32(low)))
    return Rule(norms, None, entry, True, (protected, (low, entry)))


@cache
def forced(low: Target) -> Rule:
    """A white-listed module at O1: every operation takes its float inputs in `low` and gives float32."""
    handlers = _table(
        (ops.LEFT_ALONE - ops.SHOWS_MEMORY - {"__get__"}, as_is),
        (ops.IN_PLACE, written_as_it_is),
        (ops.MAY_VIEW, as_is),
        *_of_one_dtype(low, WIDE),
        (ops.PRODUCT_WITH_BIAS, product_then_bias(low, low, WIDE)),
    )
    return Rule(handlers, sparing_kernels(computed(low, WIDE)), None, False, (forced, (low,)))


@cache
def white_operators(low: Target, operators: frozenset[str], entry: Target | None = None) -> Rule:
    """O1 outside the listed modules: listed operators compute in `low` and give float32, all others are left alone.

    A listed product inside a larger function (linear, addmm, einsum, attention and the like) is found: it is computed
    in `low`, what is added to it stays float32.
    """
    listed = ops.names_of(*operators) if operators else frozenset()
    parts: list[Part] = [(listed, computed(low, WIDE))]
    if "matmul" in operators:  # a listed product is also inside these, which torch runs as one
        parts += [(("linear",), product_then_bias(low, WIDE, WIDE)), (ops.SUM_WITH_PRODUCT, product_then_sum(low))]
        parts += [(ops.MADE_OF_PRODUCTS, computed(low, WIDE))]
        parts += [((ops.ATTENTION,), attention(low, WIDE))] if isinstance(low, Emulated) else []
    if "relu" in operators:
        parts += [(("relu_",), written_back(low, WIDE))]
    parts += [(ops.CONVOLUTIONS & listed, product_then_bias(low, WIDE, WIDE))]
    return Rule(_table(*parts), None, entry, False, (white_operators, (low, operators, entry)))


@cache
def operator_lists(
    low: Target,
    to_low: frozenset[str],
    to_wide: frozenset[str],
    to_promote: frozenset[str],
    bias_in_low: bool,
    banned: frozenset[str] = frozenset(),
    entry: Target | None = None,
    into: frozenset[str] = frozenset(),
) -> Rule:
    """Lists of operators computed in `low`, in float32, or in what their inputs promote to. Others follow their inputs.

    Args:  bias_in_low is False when the bias of a linear layer or convolution is added in float32 to the rounded
           product, as a promoted addition of its own. A `banned` operator raises a RuntimeError. What is written `into`
           a tensor takes its precision.
    """
    # torch fuses the bias, MindSpore adds it as an operator of its own that promotes
    biased = computed(low) if bias_in_low else product_then_bias(low, WIDE, None)
    parts: list[Part] = [
        (() if isinstance(low, Emulated) else ops.FILLS_WITH_NUMBERS, filled),
        (ops.COMPOSED_OF_LISTED, looks_inside),
        (ops.names_of(*to_low), computed(low)),
        # a recurrent kernel is many listed products
        (ops.RECURRENT if "linear" in to_low else (), computed(low)),
        (ops.PRODUCT_WITH_BIAS & ops.names_of(*to_low), biased),
        ((ops.ATTENTION,) if isinstance(low, Emulated) and ops.ATTENTION in to_low else (), attention(low, None)),
        (ops.names_of(*to_wide), computed(WIDE)),
        (ops.names_of(*to_promote), promoted),
        (ops.names_of(*banned) if banned else (), refused),
        (into, written),
    ]
    recipe = (operator_lists, (low, to_low, to_wide, to_promote, bias_in_low, banned, entry, into))
    return Rule(_table(*parts), None, entry, False, recipe)


_LACKS = (
    "not implemented for 'BFloat16'",
    "not implemented for 'Half'",
    "BFloat16 without overflow",
    "Half without overflow",
)


def way_out(error: Exception, module: nn.Module | None) -> Exception:
    """What torch said of a missing 16-bit kernel or range, and how to do without; any other error as it is."""
    text = str(error)
    if "to_float" in text or not any(words in text for words in _LACKS):
        return error
    return type(error)(f"{text}; to_float(module, torch.float32) computes this {type(module).__name__} in float32")


def one_dtype_said(handler: Handler | None) -> Handler:
    """What a framework lists nowhere: as it comes, and where torch refuses several dtypes, that with a way out."""

    def run(func: ops.Function, args: Args, kwargs: Kwargs) -> object:
        try:
            return (handler or as_is)(func, args, kwargs)
        except RuntimeError as error:
            dtypes = list(dict.fromkeys(dtype_name(x.dtype) for x in float_tensors((args, kwargs))))
            if len(dtypes) < 2:
                raise
            raise RuntimeError(
                f"{str(error).rstrip('.')}: {func.__name__} is on none of apex's lists, so its inputs come as they "
                f"are, here {' and '.join(dtypes)}; cast one of them (x.to(y.dtype)), or use level auto"
            ) from error

    return run
