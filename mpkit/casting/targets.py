"""What a float tensor is cast to: a torch dtype, or a format emulated inside float32."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from mpkit.casting.sparse import by_values, cast_by_values, in_parts, is_dense
from mpkit.formats import FloatFormat
from mpkit.rounding import quantize, round_to


@dataclass(frozen=True)
class Emulated:
    """A format inside float32: every cast point rounds to `fmt` forwards and to `grad_fmt` backwards.

    A rounded tensor carries a mark, which plays the part that the dtype plays for a native cast: it says that the
    values are in the format already, and lets in-place operations round what they write.
    """

    fmt: FloatFormat
    grad_fmt: FloatFormat

    def __str__(self) -> str:
        return self.fmt.name


Target = torch.dtype | Emulated

MARK = "_mpkit_emulated"


def target_of(dtype: object, grad_dtype: FloatFormat | None = None, also: tuple[torch.dtype, ...] = ()) -> Target:
    """The target that an argument `dtype` (with `grad_dtype` for gradients) means.

    Raises:  ValueError unless dtype is float16, bfloat16, one of `also` or a FloatFormat of at most 32 bits, or if
             `grad_dtype` is wider or given beside a native dtype; TypeError if `grad_dtype` is no FloatFormat.
    """
    native = (torch.float16, torch.bfloat16, *also)
    if isinstance(dtype, FloatFormat):
        if not isinstance(grad_dtype, FloatFormat | None):
            raise TypeError(f"grad_dtype is a FloatFormat such as E5M2, got {grad_dtype!r}")
        if too_wide := [fmt.name for fmt in (dtype, grad_dtype) if fmt is not None and fmt.bits > 32]:
            raise ValueError(
                f"formats are emulated inside float32, {too_wide[0]} is wider; network.double() computes in it"
            )
        return Emulated(dtype, grad_dtype or dtype)
    if not isinstance(dtype, torch.dtype) or dtype not in native:
        names = ", ".join(map(str, native))
        raise ValueError(
            f"dtype is {names} or a FloatFormat to emulate (formats.E4M3FN, get_format('e4m7')), got {dtype!r}"
        )
    if grad_dtype is not None:
        raise ValueError(
            f"grad_dtype goes with an emulated format; with {dtype} gradients are {dtype} too, leave it out"
        )
    return dtype


class Mark:
    """That a tensor and its views hold values of a format, as long as nobody else writes into them.

    All views of a tensor count the writes into it together. A write that rounds moves `version` on; any other leaves
    it behind, and the mark no longer counts. `memory` tells whether the tensor still holds what was marked.
    """

    __slots__ = ("memory", "target", "version")
    made = False  # whether there is any

    def __init__(self, target: Emulated, x: Tensor) -> None:
        self.target = target
        self.version = counted_writes(x)
        self.memory = memory(x)
        Mark.made = True


def counted_writes(x: Tensor) -> int:
    """How often `x` or a view of it was written into, as far as torch counts that."""
    return 0 if x.is_inference() else x._version  # inference tensors count no writes


def precision(x: Tensor) -> Target:
    """The target `x` is in: the format it was rounded to, else its dtype."""
    mark = getattr(x, MARK, None)
    if mark is None:
        return x.dtype
    if type(mark) is Emulated:  # while compiling, where writes are traced and nobody else writes
        return mark
    return mark.target if mark.version == counted_writes(x) else x.dtype


def promoted_precision(targets: Iterable[Target]) -> torch.dtype:
    """What torch promotes several precisions to; a format counts as the float32 that holds it."""
    dtypes = [torch.float32 if isinstance(target, Emulated) else target for target in targets]
    wide = dtypes[0]
    for dtype in dtypes[1:]:
        wide = torch.promote_types(wide, dtype)
    return wide


def marked(x: Tensor, target: Emulated) -> Tensor:
    """The same tensor, from now on known to hold values of `target`."""
    setattr(x, MARK, target if torch.compiler.is_compiling() else Mark(target, x))
    return x


def marked_as_part(x: Tensor, whole: Tensor, target: Emulated) -> Tensor:
    """`x` known to hold values of `target`; if it is a view of `whole`, a write into one is seen by both."""
    if torch.compiler.is_compiling() or not _same_memory(x, whole) or precision(whole) != target:
        return marked(x, target)
    setattr(x, MARK, getattr(whole, MARK))
    return x


def memory(x: Tensor) -> int | None:
    """Which memory the values of `x` stand in; None if it stands for other tensors, as inside vmap, or has none yet."""
    try:
        return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError, ValueError):
        return None


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return (whose := memory(a)) is not None and whose == memory(b)


def unmarked(x: Tensor) -> Tensor:
    """The same tensor, from now on a plain one."""
    if hasattr(x, MARK):
        delattr(x, MARK)
    return x


def converted(x: Tensor, target: Target) -> Tensor:
    """A float tensor of any shape in `target`, differentiable; `x` itself if it is in it already."""
    if x.layout is not torch.strided and not x.is_nested:
        return x if precision(x) == target else converted_by_values(x, target)
    if isinstance(target, Emulated):
        if precision(x) == target:
            return x
        if x.is_nested:
            return marked(in_parts(lambda part: quantize(part.float(), target.fmt, target.grad_fmt), x), target)
        # a format lives in float32, so 16-bit values are widened, exactly, before they are rounded
        wide = x if x.dtype is torch.float32 else x.to(torch.float32)
        return marked(quantize(wide, target.fmt, target.grad_fmt), target)
    if x.dtype is not target:
        return x.to(target)
    # a view of its own: unmarking x itself would take the format from everybody who holds it
    # the same numbers, no longer bound to the format
    return x if not hasattr(x, MARK) else x.clone() if x.is_nested else x.view_as(x)


def converted_by_values(x: Tensor, target: Target) -> Tensor:
    """A sparse tensor, or a dense one whose gradient is sparse, in `target`, differentiable."""
    dtype = x.dtype

    def back(grad: Tensor) -> Tensor:
        return (quantize(grad, target.grad_fmt) if isinstance(target, Emulated) else grad).to(dtype)

    y = cast_by_values(x, lambda values: converted(values, target), back)
    return marked(y, target) if isinstance(target, Emulated) else y


class _Again(torch.autograd.Function):
    """One more use of values that were cast before: no new cast, and a gradient of its own in the dtype of `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cast: Tensor, target: Target) -> Tensor:
        ctx.dtype, ctx.target = x.dtype, target
        return cast.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        if isinstance(ctx.target, Emulated):
            rounded = ctx.target.grad_fmt
            grad = quantize(grad, rounded) if is_dense(grad) else by_values(lambda v: quantize(v, rounded), grad)
        return grad.to(ctx.dtype), None, None


def taken_again(x: Tensor, cast: Tensor, target: Target) -> Tensor:
    """`cast`, which `converted(x, target)` gave before, for another use of `x`."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        # without a graph there is no gradient to keep apart, so the same tensor serves
        again = cast.detach() if cast.requires_grad else cast
    else:
        again = _Again.apply(x, cast.detach(), target)
    return marked_as_part(again, cast, target) if isinstance(target, Emulated) and again is not cast else again


def round_in_place_(x: Tensor, target: Emulated) -> Tensor:
    """Round what an in-place operation wrote into a tensor that is bound to `target`, and stays so."""
    own = _own_values(x)
    own.copy_(quantize(own, target.fmt, target.grad_fmt))
    return still(x, target)


def is_expanded(x: Tensor) -> bool:
    """Whether several places of `x` show one number."""
    return is_dense(x) and any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape))


def _own_values(x: Tensor) -> Tensor:
    """The values of `x`, each once: an expanded tensor cannot be written into, what it shows can."""
    for dim in range(x.dim() if is_dense(x) else 0):
        if x.stride(dim) == 0:
            x = x.narrow(dim, 0, min(1, x.shape[dim]))
    return x


@torch.no_grad()
def round_behind_marks_(values: object) -> None:
    """Round in place, without a new version, what was written into tensors of a format where no write is counted.

    That is what came through `x.data` or NumPy, or in inference mode; a native dtype would have rounded it too.
    """
    for x in float_tensors(values):
        target = precision(x)
        if not isinstance(target, Emulated) or not is_dense(x) or peek_interpreter_stack() is not None:
            continue
        mark = getattr(x, MARK)
        if type(mark) is Mark and mark.memory != memory(x):  # `x.data = y`, and y is somebody's own
            unmarked(x)
            continue
        own = _own_values(x.data)
        round_to(own, target.fmt, out=own)


def still(x: Tensor, target: Emulated) -> Tensor:
    """`x` after values of `target` were written into it: it and its views are in `target` as before."""
    mark = getattr(x, MARK, None)
    if type(mark) is not Mark:
        return marked(x, target)
    # all views share the mark, so one write brings all of them up to date
    mark.version = counted_writes(x)
    return x


def map_tensors(change: Callable[[Tensor], Tensor], value: object) -> Any:
    """`change` applied to every tensor in a nest of tuples (named too), lists, dicts and dataclasses.

    The nest keeps its types, and what hangs on them beside their items.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        items = [map_tensors(change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        changed = {key: map_tensors(change, item) for key, item in value.items()}
        if type(value) is dict:
            return changed
        return _refilled(value, changed)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {part.name: getattr(value, part.name) for part in fields(value) if hasattr(value, part.name)}
        mapped = {name: map_tensors(change, part) for name, part in parts.items()}
        replaced = {name: part for name, part in mapped.items() if part is not parts[name]}
        # a copy, since the caller may still hold the nest with the tensors as they were
        twin = copy.copy(value) if replaced else value
        for name, part in replaced.items():
            object.__setattr__(twin, name, part)  # frozen ones too
        return twin
    return value


def _refilled(value: dict[Any, Any], changed: dict[Any, Any]) -> dict[Any, Any]:
    """A dict of the same type, and with the same attributes, that holds `changed`."""
    twin = copy.copy(value)
    for key, item in changed.items():
        twin[key] = item
    return twin


def float_tensors(value: object) -> list[Tensor]:
    """The float tensors in a nest of tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, part.name, None) for part in fields(value)]
    if isinstance(value, tuple | list):
        return [x for item in value for x in float_tensors(item)]
    return []
