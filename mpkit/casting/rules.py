"""Why an operation runs in the precision it runs in: what each rule does for each torch function.

A rule is a table from the name of a function to a handler, and what is done for all others. `everything` is O2, O3 and
`to_float`, `protected` a norm at O2, `white_operators` and `forced` are O1; `listed` is auto, apex and torch's
autocast, whose lists stand in `operations.toml`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.casting import handlers as do
from mpkit.casting import operators as ops
from mpkit.casting.handlers import WIDE
from mpkit.casting.low import Emulated, Target, float_tensors, precision
from mpkit.casting.mode import Handler, Rule, as_is, cast
from mpkit.casting.operators import LISTS

Part = tuple[Iterable[str], Handler]


def rule(build: Callable[..., Rule]) -> Callable[..., Rule]:
    """Makes `build` give one rule for the same arguments, which is pickled as the call that built it."""

    @cache
    @wraps(build)
    def built(*arguments: Any) -> Rule:
        return replace(build(*arguments), origin=(built, arguments))

    return built


def table(*parts: Part) -> dict[str, Handler]:
    """Handlers by the name of the function; later parts win."""
    always: list[Part] = [
        (ops.COMPOSED, do.looks_inside),
        (("__set__",), do.assigned),
        (("checkpoint", "tag_activation_checkpoint"), do.cast_inside),
        (("unflatten",), lambda func, args, kwargs: torch.unflatten(*args, **kwargs)),  # no method for the compiler
        (("backward", "grad"), do.differentiated),
    ]
    return {name: handler for names, handler in (*always, *parts) for name in names}


def entry_of(module: nn.Module | None) -> Target | None:
    """What the arguments of a module are cast to where only its operations are listed.

    torch's recurrent layers compare the dtype of their input with that of the stored float32 weights.
    """
    return WIDE if isinstance(module, nn.RNNBase) else None


# --- MindSpore's O2, O3 and to_float ----------------------------------------------------------------------------------


def lowered(module: nn.Module, low: Target) -> Rule:
    """Everything in `low`, as a rule for `module`."""
    return recurrent(low) if isinstance(module, nn.RNNBase) else everything(low, low)


@rule
def everything(low: Target, entry: Target | None = None) -> Rule:
    """Arguments, parameters and products in `low`; torch itself decides the rest.

    So a float32 constant beside low activations promotes them until the next module.
    """
    handlers = table(
        (ops.LEFT_ALONE, as_is),
        (ops.IN_PLACE, do.written_as_it_is),
        ((ops.MAY_VIEW | {"contiguous"}) - {"unflatten"}, do.viewed(low)),
        # torch refuses several dtypes here, so its promotion decides nothing
        (ops.OF_ONE_DTYPE | ops.KINDS["recurrent"], do.computed(low)),
        (ops.KINDS["written_beside"] | ops.KINDS["weighted_losses"], do.written),
        (ops.PRODUCT_WITH_BIAS, do.product_then_bias(low, low, None)),
        (ops.KINDS["with_statistics"], do.norm_with_statistics(low)),
        (("rms_norm",) if isinstance(low, Emulated) else (), do.rounded_once(low)),
        (ops.names_of("matrix_exp"), do.rounded_once(low)),  # in 16 bits torch's overflows
        (("embedding", "embedding_bag"), do.delivered_in(low)),
    )
    return Rule(handlers, do.parameters_in(low), entry)


@rule
def recurrent(low: Target) -> Rule:
    """A recurrent layer of torch's, which compares the dtypes of input and weights: its kernel takes all in `low`."""
    return Rule(table((ops.KINDS["recurrent"], do.recurrent_kernel(low))), None, WIDE)


@rule
def protected(low: Target, entry: Target | None) -> Rule:
    """A black-listed module: everything in float32, a norm of torch's straight from its low input in one kernel."""
    norms = (ops.KINDS["with_statistics"], False), (("layer_norm",), True)
    return Rule(table(*((names, do.norm_in_float32(low, rounds)) for names, rounds in norms)), None, entry, True)


# --- MindSpore's O1 ---------------------------------------------------------------------------------------------------


@rule
def forced(low: Target) -> Rule:
    """A white-listed module: every operation takes its float inputs in `low` and gives float32."""
    handlers = table(
        (ops.LEFT_ALONE, as_is),
        (ops.IN_PLACE, do.written_as_it_is),
        (ops.MAY_VIEW, as_is),
        (ops.PRODUCT_WITH_BIAS, do.product_then_bias(low, low, WIDE)),
    )
    return Rule(handlers, do.computed(low, WIDE))


@rule
def white_operators(low: Target, operators: frozenset[str], entry: Target | None = None) -> Rule:
    """Outside the listed modules: listed operators compute in `low` and give float32, all others are left alone.

    A listed product inside a larger function (linear, addmm, einsum, attention and the like) is found: it is computed
    in `low`, what is added to it stays float32.
    """
    white = ops.names_of(*operators) if operators else frozenset()
    parts: list[Part] = [(white, do.computed(low, WIDE))]
    if "matmul" in operators:  # a listed product is also inside these, which torch runs as one
        parts += [
            (("linear",), do.product_then_bias(low, WIDE, WIDE)),
            (ops.KINDS["sum_with_product"], do.product_then_sum(low)),
            (ops.MADE_OF_PRODUCTS, do.computed(low, WIDE)),
        ]
    return Rule(table(*parts, (ops.KINDS["convolutions"] & white, do.product_then_bias(low, WIDE, WIDE))), None, entry)


# --- lists of operators: MindSpore's auto, torch's autocast on CUDA, apex O1 ------------------------------------------


@rule
def listed(name: str, low: Target, entry: Target | None = None) -> Rule:
    """Operators of the list `name` computed in `low`, in float32, or in what their inputs promote to.

    Others follow their inputs. torch fuses a bias into its product, MindSpore adds it as an operator that promotes.
    """
    lists = LISTS[name]
    compute = do.computed_but_float64 if name == "torch" else do.computed
    products = ops.names_of(*lists["low"])
    handlers = table(
        (() if isinstance(low, Emulated) else ops.names_of(*ops.KINDS["fills"]), do.filled),
        (ops.COMPOSED_OF_LISTED, do.looks_inside),
        (products, compute(low)),
        # a recurrent kernel is many listed products
        (ops.KINDS["recurrent"], compute(low) if entry is None else do.recurrent_kernel(low)),
        (ops.names_of(*lists["wide"], *lists.get("made_of_wide", ())), compute(WIDE)),
        (ops.names_of(*lists["promoted"]), do.promoted),
        *_OWN[name](low),
    )
    return Rule(handlers, None, entry)


def _in_place(*lists: Iterable[str]) -> list[str]:
    return [f"{name}_" for names in lists for name in names if hasattr(Tensor, f"{name}_")]


def _auto(low: Target) -> Iterable[Part]:
    yield ops.PRODUCT_WITH_BIAS, do.product_then_bias(low, WIDE, None)
    # written into a tensor of another dtype, what is written takes that
    yield _in_place(LISTS["auto"]["promoted"]), do.written


def _torch(low: Target) -> Iterable[Part]:
    lists, wide = LISTS["torch"], do.computed_but_float64(WIDE)
    yield ops.names_of(*lists["told"]), do.unless(lambda args, kwargs: kwargs.get("dtype") is not None, wide)
    yield lists["banned"], do.refused()
    yield lists["kernels_low"], do.computed_but_float64(low)
    yield (*lists["kernels_wide"], Tensor.__rtruediv__.__name__), wide  # 1 / x is a reciprocal
    yield (torch.linalg.cross.__name__,), as_is  # one operator elsewhere, but not on this list
    yield ("interpolate",), do.unless(_averages, wide)
    yield ("sum_to_size",), do.unless(_has_size, wide)
    # with a single number it is a product like any other, whose dtype a single number does not decide
    yield ("inner",), do.unless(lambda *given: any(x.dim() == 0 for x in float_tensors(given)), do.promoted)


def _averages(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # eager code gives the mode by its name, a compiler as it was written
    return (args[3] if len(args) > 3 else kwargs.get("mode", "nearest")) == "area"  # an average pool


def _has_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    size = args[1:] if isinstance(args[1], int) else args[1]
    return bool(size) and args[0].shape == tuple(size)  # it comes back as it is; to () it is summed


def _apex(low: Target) -> Iterable[Part]:
    """What is listed keeps, in place, the precision of what it writes into.

    Batch norm is not listed: its kernel takes 16 bits with float32 statistics.
    """
    yield _in_place(LISTS["apex"]["low"], LISTS["apex"]["promoted"]), do.written
    yield LISTS["torch"]["banned"], do.refused(low)
    yield ("batch_norm",), lambda func, args, kwargs: cast(func(*args, **kwargs), precision(args[0]))


_OWN = {"auto": _auto, "torch": _torch, "apex": _apex}

# --- what torch lacks -------------------------------------------------------------------------------------------------

_LACKS = (
    "not implemented for '(BFloat16|Half)'|(BFloat16|Half) without overflow|Low precision dtypes not supported|"
    "Unsupported dtype (BFloat16|Half)|MKL FFT doesn't support|Expected both inputs to be Half, Float or Double|"
    "view_as_complex is only supported|(must be either|types other than) float (or|and) double|float, double, cfloat"
)


def way_out(error: Exception, module: nn.Module | None) -> Exception:
    """What torch said of a missing 16-bit kernel or range, and how to do without; any other error as it is."""
    text = str(error)
    if "to_float" in text or not re.search(_LACKS, text):
        return error
    return type(error)(f"{text}; to_float(module, torch.float32) computes this {type(module).__name__} in float32")
