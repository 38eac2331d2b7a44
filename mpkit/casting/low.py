"""A number format as a dtype: float32 values of a format, whose every result is rounded, forwards and backwards.

Torch asks a tensor class what an operation on it gives, below autograd. `Low` computes it on its float32 values and
rounds what comes out, so that gradients are rounded too and what is saved for backward is the rounded result, as on
hardware. What an operation views and what it writes into stands in its schema.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from mpkit.arguments import check_kind
from mpkit.casting.local import LOCAL
from mpkit.casting.operators import IN_PLACE, LISTS
from mpkit.formats import FloatFormat, dtype_name
from mpkit.rounding import round_to


@dataclass(frozen=True, eq=False)
class Emulated:
    """A format inside float32: results are rounded to `fmt` forwards and to `grad_fmt` backwards; one object for each.

    `kind` is the class of its tensors.
    """

    fmt: FloatFormat
    grad_fmt: FloatFormat
    kind: type[Low]

    def __str__(self) -> str:
        return self.fmt.name

    def __reduce__(self) -> tuple[Callable[..., Emulated], tuple[FloatFormat, FloatFormat]]:
        return known, (self.fmt, self.grad_fmt)


Target = torch.dtype | Emulated


def target_of(dtype: object, grad_dtype: FloatFormat | None = None, also: tuple[torch.dtype, ...] = ()) -> Target:
    """The target that an argument `dtype` (with `grad_dtype` for gradients) means.

    Raises:  ValueError unless dtype is float16, bfloat16, one of `also` or a FloatFormat of at most 32 bits, or if
             `grad_dtype` is wider or given beside a native dtype; TypeError if `grad_dtype` is no FloatFormat.
    """
    if isinstance(dtype, FloatFormat):
        check_kind("grad_dtype", grad_dtype, FloatFormat, "a FloatFormat such as E5M2", optional=True)
        grad_fmt = grad_dtype or dtype
        if max(dtype.bits, grad_fmt.bits) > 32:
            raise ValueError("formats are emulated inside float32, this one is wider; network.double() computes in it")
        return known(dtype, grad_fmt)
    native = dict.fromkeys((torch.float16, torch.bfloat16, *also))
    if not isinstance(dtype, torch.dtype) or dtype not in native:
        names = ", ".join(map(str, native))
        raise ValueError(f"dtype is {names} or a FloatFormat to emulate (E4M3FN, get_format('e4m7')), got {dtype!r}")
    if grad_dtype is not None:
        raise ValueError(f"grad_dtype goes with an emulated format; gradients of {dtype} are {dtype}, leave it out")
    return dtype


# --- what an operator does to its arguments ---------------------------------------------------------------------------

_STATISTICS, _FILLS, _IN_STEPS = (LISTS["aten"][kind] for kind in ("statistics", "fills", "in_steps"))


@cache
def _facts(func: Any) -> SimpleNamespace:
    """What the schema of an operator says, and its name."""
    schema = func._schema  # torch's own subclasses read it; there is no public way to ask what an operator writes into
    name = schema.name.split("::")[1]
    views = bool(schema.returns) and schema.returns[0].alias_info is not None
    writes = tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.is_write)
    return SimpleNamespace(
        views=views,
        writes=writes,  # place and name of what it writes into
        promotes=torch.Tag.pointwise in func.tags or name in ("cat", "stack"),
        # statistics after the first result, in float32 at every precision. A backward gives gradients there; those of a
        # batch norm are of its float32 parameters
        statistics=name.startswith(_STATISTICS) and ("batch_norm" in name or not name.endswith("_backward")),
        fills=name.startswith(_FILLS),
        steps=name.startswith(_IN_STEPS) and not views and not writes,  # its 16-bit kernel rounds between its steps
    )


class Low(Tensor):
    """Stands for a tensor of a dtype that torch has not; each format is a class of its own, as compilers need."""

    target: Emulated
    native: torch.dtype | None  # a 16-bit dtype of these very values, whose kernels round as hardware's do
    values: Tensor  # type: ignore[assignment]
    __slots__ = ["values"]

    @staticmethod
    def __new__(cls, values: Tensor) -> Low:
        like: dict[str, Any] = {"dtype": values.dtype, "layout": values.layout, "device": values.device}
        where: dict[str, Any] = {"strides": values.stride(), "storage_offset": values.storage_offset()}
        # private, and the only way to make such a class; torch's own documents on subclasses use it
        return torch.Tensor._make_wrapper_subclass(cls, values.size(), **where, **like)

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self.values!r} in {self.target}"

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., Low], tuple[Emulated, Tensor]]:
        return _restored, (self.target, self.values)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], meta: object, size: object, stride: object) -> Low:
        return cls(inner["values"])

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        if name in _LEAVES and _leaves(name, args, kwargs):
            args = (convert(args[0], torch.float32), *args[1:])
        elif torch.is_grad_enabled() and _beside(cls, (*args, *kwargs.values())):  # a gradient may come in float32
            first = int(name in IN_PLACE)  # what is written into is the tensor itself
            taken, kwargs = map_tensors(_take, (args[first:], kwargs))
            args = (*args[:first], *taken)
        # private; the public default of Tensor would make results that are plain into this class
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        does, options = _facts(func), kwargs or {}
        if torch.is_inference_mode_enabled() and (parts := func.decompose(*args, **options)) is not NotImplemented:
            return parts  # in that mode what torch makes of operators comes here in one piece
        native = cls.native if does.steps else None

        def bare(value: Any) -> Any:
            if type(value) is cls:
                return value.values if native is None else value.values.to(native)
            if isinstance(value, list | tuple):
                return [bare(x) for x in value]
            if isinstance(value, Low):
                return value.values
            if native is not None and value is torch.float32:  # what autograd takes a format for
                return native
            return bounded(value, cls.target.fmt.max) if does.fills else value

        inner = [x.values if native is None and type(x) is cls else bare(x) for x in args]
        out = func(*inner, **{name: bare(x) for name, x in options.items()}) if options else func(*inner)
        if does.promotes and not does.writes and _beside(cls, (*args, *options.values())):
            return out  # as float16 beside a float32 tensor
        # private: whether this thread runs a backward pass, where results are gradients; nothing public says so. While
        # a rule is on, it computes a checkpointed forward again.
        backward = torch._C._current_graph_task_id() != -1 and LOCAL.rule is None
        fmt = cls.target.grad_fmt if backward else cls.target.fmt
        if does.writes:
            for i, name in does.writes:
                if isinstance(x := args[i] if i < len(args) else options.get(name), Low):
                    round_to(x.values, fmt, out=x.values)
            # private: what a write gives is the very tensor, in its new shape; torch's own subclasses use it
            return return_and_correct_aliasing(func, args, options, cls(out) if isinstance(out, Tensor) else out)

        def finished(i: int, x: Any) -> Any:
            if not isinstance(x, Tensor) or x.dtype is not (native or torch.float32):
                return x
            if native is not None:
                return cls(x.to(torch.float32))
            return x if does.statistics and i else cls(x if does.views else round_to(x, fmt, out=x))

        return type(out)(map(finished, count(), out)) if isinstance(out, tuple | list) else finished(0, out)


def _beside(kind: type[Low], values: Any) -> bool:
    """Whether a tensor that is no single number, in float32, wider or another format, stands beside those of `kind`."""
    for x in values:
        if isinstance(x, Tensor):
            if type(x) is not kind and x.dtype in (torch.float32, torch.float64) and x.dim() > 0:
                return True
        elif isinstance(x, list | tuple) and _beside(kind, x):
            return True
    return False


def bounded(x: Any, largest: float) -> Any:
    """A finite number beyond the format, as of a mask, stands for its largest; an infinity stays one."""
    if isinstance(x, Tensor) and x.dim() == 0 and x.is_floating_point():
        return torch.where(x.isfinite(), x.clamp(-largest, largest), x)
    return max(-largest, min(largest, x)) if type(x) in (int, float) and math.isfinite(x) else x


_LEAVES = frozenset(("float", "to", "type", "type_as", "numpy", "tolist", "__format__", "__array__", "resolve_neg"))
# the last one is what asks for memory to work on, as `round_to` does


def _leaves(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a conversion of a tensor in a format asks for plain float32, which holds it."""
    if name not in ("to", "type", "type_as"):
        return True
    asked = (*args[1:], *kwargs.values())
    return any(x is torch.float32 or (isinstance(x, Tensor) and not isinstance(x, Low)) for x in asked)


# --- into a format and out of it --------------------------------------------------------------------------------------


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Emulated, fmt: FloatFormat) -> Low:
        ctx.target, ctx.dtype = target, x.dtype
        # float32 holds 16-bit values exactly, so they are rounded once
        return target.kind(round_to(x if x.dtype is torch.float32 else x.to(torch.float32), fmt))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _wide(_narrow(grads[0], ctx.target)).to(ctx.dtype), None, None


class _Widen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Low) -> Tensor:
        ctx.target = x.target
        return x.values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _narrow(grads[0], ctx.target)


class _Take(_Widen):
    """An operand beside a float32: it stays in its format, and so does what comes back to it."""

    @staticmethod
    def forward(ctx: Any, x: Low) -> Low:
        ctx.target = x.target
        return type(x)(x.values)


def _narrow(grad: Tensor, target: Emulated) -> Low:
    """A gradient as it comes to a tensor in a format; an autograd function costs more than its work."""
    if isinstance(grad, Low):
        return grad
    if torch.is_grad_enabled():
        return _Narrow.apply(grad, target, target.grad_fmt)
    return target.kind(round_to(grad.to(torch.float32), target.grad_fmt))


def _wide(grad: Low) -> Tensor:
    return _Widen.apply(grad) if torch.is_grad_enabled() else grad.values


@cache
def known(fmt: FloatFormat, grad_fmt: FloatFormat) -> Emulated:
    """The target of two formats, with its class of tensors made and the compiler told what a cast to it is."""
    native = fmt.torch_dtype if fmt.bits == 16 and grad_fmt == fmt else None
    kind: Any = type(f"Low_{fmt.name}", (Low,), {"native": native, "__slots__": ()})
    target = kind.target = Emulated(fmt, grad_fmt, kind)
    cast = _TO[target] = lambda x: _narrowed(x, target)
    torch.compiler.allow_in_graph((cast, _widened, _take))  # not at import: it imports the compiler, a second
    return target


def _narrowed(x: Tensor, target: Emulated) -> Low:
    # private: whether torch.func transforms what runs, as in `mode`
    if torch.compiler.is_exporting() or torch._C._are_functorch_transforms_active():
        way_out = "take torch.float16 or torch.bfloat16, or remove_mixed_precision; torch.compile takes formats"
        raise NotImplementedError(f"torch.export and torch.func have no format such as {target}; {way_out}")
    return _Narrow.apply(x, target, target.fmt)


def _restored(target: Emulated, values: Tensor) -> Low:
    return target.kind(values)


def _widened(x: Low) -> Tensor:
    return _Widen.apply(x)


def _take(x: Any) -> Any:
    return _Take.apply(x) if isinstance(x, Low) and x.requires_grad else x


# torch reads the arguments of these faster than those of `x.to(dtype)`; formats come in as they become known
_TO: dict[Target, Callable[[Tensor], Tensor]] = {
    **{torch.bfloat16: Tensor.bfloat16, torch.float16: Tensor.half},
    **{torch.float32: Tensor.float, torch.float64: Tensor.double},
}


def convert(x: Tensor, target: Target) -> Tensor:
    """A float tensor of any shape in `target`, differentiable; `x` itself if it is in it already."""
    if isinstance(x, Low):
        if isinstance(target, Emulated) and type(x) is target.kind:  # compilers tell formats by their class
            return x
        x = _widened(x)
    elif x.dtype is not target and (x.layout is not torch.strided or x.is_nested):
        raise NotImplementedError(  # of a TypeError Python's operators would lose the words
            f"levels cast dense tensors, got a {'nested' if x.is_nested else x.layout} one; keep the module that takes "
            "it in float32 by to_float(module, torch.float32), or give x.to_dense()"
        )
    return _TO[target](x)


def left_format(x: Tensor) -> Tensor:
    """For whoever knows dtypes alone: of a format, the float32 that holds it."""
    return convert(x, torch.float32) if isinstance(x, Low) else x


def precision(x: Tensor) -> Target:
    """The target `x` is in: its format, else its dtype."""
    return x.target if isinstance(x, Low) else x.dtype


def values_of(x: Tensor) -> Tensor:
    """The values that a float tensor of any layout or format stores, without its graph."""
    x = x.detach()
    if isinstance(x, Low):
        return x.values
    if x.layout is torch.strided and not x.is_nested:
        return x
    return x.coalesce().values() if x.layout is torch.sparse_coo else x.values()


def name_of(target: Target) -> str:
    """ "float16" for a dtype, the format's name for an emulated one."""
    return dtype_name(target.fmt if isinstance(target, Emulated) else target)


# --- nests of tensors -------------------------------------------------------------------------------------------------


def map_tensors(change: Callable[[Tensor], Tensor], value: object) -> Any:
    """`change` applied to every tensor in a nest of tuples (named too), lists, dicts and dataclasses.

    The nest keeps its types, and what hangs on them beside their items. Where no tensor changes it is the very same,
    since somebody may write into it, as into a cache; else a copy, since the caller may still hold the nest as it was.

    >>> map_tensors(Tensor.sum, {"a": [torch.ones(2)], "b": 1})
    {'a': [tensor(2.)], 'b': 1}
    """
    if isinstance(value, Tensor):
        return change(value)
    parts: dict[Any, Any] = {}
    if isinstance(value, tuple | list | dict):
        parts = dict(value if isinstance(value, dict) else enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        parts = {part.name: getattr(value, part.name) for part in fields(value) if hasattr(value, part.name)}
    mapped = {key: map_tensors(change, part) for key, part in parts.items()}
    if all(mapped[key] is part for key, part in parts.items()):
        return value
    if isinstance(value, tuple | list):
        return type(value)(*mapped.values()) if hasattr(value, "_fields") else type(value)(mapped.values())
    twin: Any = {} if type(value) is dict else copy.copy(value)
    for key, new in mapped.items():
        if isinstance(value, dict):
            twin[key] = new
        else:
            object.__setattr__(twin, key, new)  # frozen ones too
    return twin


def float_tensors(value: object) -> list[Tensor]:
    """The float tensors in a nest of tuples, lists, dicts and dataclasses, in order.

    >>> float_tensors({"a": [torch.ones(2)], "b": torch.tensor(1)})
    [tensor([1., 1.])]
    """
    found: list[Tensor] = []
    map_tensors(lambda x: found.append(x) or x, value)  # type: ignore[func-returns-value]
    return [x for x in found if x.is_floating_point()]
