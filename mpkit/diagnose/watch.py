"""See every tensor operation of a forward and backward pass, and find where the first bad inf or NaN was born."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from mpkit.casting.low import values_of
from mpkit.diagnose.precision import Call, kept
from mpkit.formats import FloatFormat, dtype_name
from mpkit.record.histograms import real_values
from mpkit.rounding import ROUNDING, TOLD

OUTSIDE, ROOT = "(loss function)", "(network)"  # places that no path of a module names


@dataclass(frozen=True)
class Operand:
    """What went into an operation: dtype, shape, extremes of the finite values, how many were not finite."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    low: float
    high: float
    nonfinite: int

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or "one value"
        bad = f"; {self.nonfinite} are not finite" if self.nonfinite else ""
        return f"a {dtype_name(self.dtype)} tensor of {size} with values from {self.low:.4g} to {self.high:.4g}{bad}"


@dataclass(frozen=True)
class Event:
    """An operation in which inf or NaN arose: no inf or NaN went in, or only some that was put there on purpose.

    index:       events are numbered as they come.
    phase:       "forward" or "backward"; there `gradient_of` is the forward operation.
    """

    index: int
    operation: str
    module: str
    phase: str
    gradient_of: str
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class Origin:
    """Where the inf and NaN of a tensor come from: the earliest `event`, or `leaves`, tensors that no operation made.

    meant:  the infinities among them that were put there on purpose, as an attention mask is; then it is no fault.
    """

    event: Event | None = None
    leaves: tuple[str, ...] = ()
    meant: frozenset[str] = frozenset()


class Watch(TorchDispatchMode):
    """While entered, follows every inf and NaN from the operation or the tensor that it came from.

    Args:
        network:  its modules give operations their path, and are noted down with what they made of what.
        leaves:   name -> tensor of everything the computation starts from.
    """

    def __init__(self, network: nn.Module, leaves: dict[str, Tensor]) -> None:
        super().__init__()
        self.network = network
        self.backward = False
        self.calls: list[Call] = []  # of modules, in the forward pass
        self.zeroed: dict[tuple[str, str], float] = {}  # (module, operation) -> largest share of values made zero
        # The first forward operation that made +inf or NaN out of finite numbers, even if the loss is finite. A -inf
        # alone does not count: masks of -1e9 become that in float16, and a softmax rightly makes zeros of them.
        self.hidden: Event | None = None
        self._numbers = itertools.count()  # of events
        self._made: dict[int, tuple[Origin, Tensor]] = {}  # by storage; the tensor keeps the storage alive
        self._nodes: dict[int, tuple[str, str]] = {}  # autograd sequence number -> module and operation
        self._path: list[str] = []
        self._hooks: list[RemovableHandle] = []
        self._busy = False
        for name, t in leaves.items():
            if checkable(t) and not finite(t):
                mask = _kinds(t) == {"-inf"} and not t.requires_grad  # a mask is not trained
                self._made[_storage(t)] = Origin(None, (name,), frozenset({"-inf"} if mask else ())), t

    def __enter__(self) -> Watch:
        self._token = TOLD.set(self._rounded)
        for name, module in self.network.named_modules():
            enter, leave = (partial(hook, name or ROOT) for hook in (self._entered, self._left))
            self._hooks.append(module.register_forward_pre_hook(enter, prepend=True))
            self._hooks.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        TOLD.reset(self._token)

    def _entered(self, name: str, *_: object) -> None:
        self._path.append(name)

    def _left(self, name: str, module: nn.Module, args: object, kwargs: object, out: object) -> None:
        del self._path[-1]
        if not self.backward:
            with self._alone():
                self.calls.append(Call(name, type(module), kept((args, kwargs)), kept(out)))

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if self._busy or ROUNDING.get() is not None:  # a rounding is told of as a whole
            return func(*args, **kwargs)
        with self._alone():
            inputs = _tensors((args, kwargs))
            writes, name = func._schema.is_mutable, func._overloadpacket.__name__
            written = {_KINDS[v] for v in tree_leaves((args, kwargs)) if isinstance(v, float) and v in _KINDS}
            before = self._origins(inputs) + [Origin(meant=frozenset({kind})) for kind in written]
            operands = _operands(inputs) if writes else None
            out = func(*args, **kwargs)
            operation = _operation(name, args, kwargs)
            if not self.backward or self._path:  # a module that runs in the backward pass is one of a checkpoint
                self._nodes.setdefault(torch.autograd._get_sequence_nr() - 1, (self._where(), operation))
            if not name.startswith(("empty", "new_empty")):  # memory that nobody has written yet
                known = () if writes else [_storage(t) for t in inputs if _storage(t) in self._made]
                made = [t for t in _tensors(out) if _storage(t) not in known]  # the others are views
                if bad := [t for t in made if not finite(t)]:
                    self._note(operation, before, bad, operands or _operands(inputs))
            if name in _FLUSHING and isinstance(out, Tensor):
                self._flushed(operation, inputs, out)
        return out

    def _rounded(self, x: Tensor, fmt: FloatFormat, rounded: Tensor) -> None:
        if not self._busy and not finite(rounded):  # busy: the operation is that of a tensor in a format
            with self._alone():
                self._note(f"round to {fmt.name}", self._origins([x]), [rounded], _operands([x]))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def born(self, results: Iterable[Tensor]) -> tuple[Event | None, tuple[str, ...]]:
        """The earliest operation that made `results` non-finite, or else the names of the leaves that did."""
        origin = _merged(self._origins(results))
        return (None, origin.leaves) if origin.leaves else (origin.event, ())

    def _origins(self, tensors: Iterable[Tensor]) -> list[Origin]:
        """Of those that are not finite, as far as something is known."""
        bad = [_storage(t) for t in tensors if not finite(t)]
        return [self._made[key][0] for key in bad if key in self._made]

    def _note(self, operation: str, before: list[Origin], bad: list[Tensor], operands: tuple[Operand, ...]) -> None:
        """What came out and is not finite comes from what went in and was not meant; else it is a new event."""
        guilty = [origin for origin in before if not origin.meant]
        kinds = set[str]().union(*map(_kinds, bad))
        origin = _merged(guilty) if guilty else self._new(operation, before, kinds, operands)
        self._made.update((_storage(t), (origin, t)) for t in bad)

    def _new(self, operation: str, before: list[Origin], kinds: set[str], operands: tuple[Operand, ...]) -> Origin:
        module, of = self._origin() if self.backward and not self._path else (self._where(), "")
        phase = "backward" if self.backward else "forward"
        event = Event(next(self._numbers), operation, module, phase, of, operands)
        first = _merged(before).event or event
        if "nan" not in kinds and kinds <= set[str]().union(*(origin.meant for origin in before)):
            return Origin(first, meant=frozenset(kinds))
        if phase == "forward" and not before and kinds - {"-inf"}:
            self.hidden = self.hidden or event
        # a constant of another module brought in what this one chokes on; a softmax accepts the infinities of a mask,
        # so that where it gives NaN, for a row without any finite number, the fault is its own
        elsewhere = first.module != module and "softmax" not in operation
        return Origin(first if elsewhere else event)

    def _flushed(self, operation: str, inputs: list[Tensor], out: Tensor) -> None:
        if not self.backward and checkable(out):
            key = self._where(), operation
            self.zeroed[key] = max(_share_zeroed(inputs, out), self.zeroed.get(key, 0.0))

    def _where(self) -> str:
        return self._path[-1] if self._path else OUTSIDE

    def _origin(self) -> tuple[str, str]:
        """Module and forward operation that the running backward operation belongs to."""
        node = torch._C._current_autograd_node()
        known = [n for n in self._nodes if node is not None and n <= node._sequence_nr() < 2**63]
        return self._nodes[max(known)] if known else (OUTSIDE, "")


def _merged(origins: list[Origin]) -> Origin:
    """The earliest event and all leaves."""
    event = min((o.event for o in origins if o.event), key=lambda e: e.index, default=None)
    return Origin(event, tuple(dict.fromkeys(name for o in origins for name in o.leaves)))


def _tensors(nest: object) -> list[Tensor]:
    return [t for t in tree_leaves(nest) if isinstance(t, Tensor) and checkable(t)]


def _storage(t: Tensor) -> int:
    values = t._values() if t.layout == torch.sparse_coo else values_of(t)
    return values.untyped_storage()._cdata


def numbers(t: Tensor) -> Tensor:
    """What it stores, as real numbers of a dtype that every operation knows."""
    values = real_values(t)
    return values.float() if values.dtype.itemsize == 1 else values


_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_KINDS = {math.inf: "inf", -math.inf: "-inf"}
_FLUSHING = ("_to_copy", "mul", "div", "exp", "_softmax", "pow", "sigmoid")  # zero from what is none


def checkable(t: Tensor) -> bool:
    kind = t.is_floating_point() or t.is_complex()
    return kind and t.layout in _LAYOUTS and not t.is_meta and t.numel() > 0


def finite(t: Tensor) -> bool:
    return bool(numbers(t).isfinite().all())


def _kinds(t: Tensor) -> set[str]:
    t = numbers(t)
    found = {"nan": t.isnan(), "inf": t == math.inf, "-inf": t == -math.inf}
    return {kind for kind, where in found.items() if bool(where.any())}


def _share_zeroed(inputs: list[Tensor], out: Tensor) -> float:
    """Share of the results that are zero though nothing that went in was."""
    zero = numbers(out) == 0
    for given in map(numbers, inputs if bool(zero.any()) else ()):
        there = given != 0
        fits = all(a in (1, b) for a, b in zip(reversed(there.shape), reversed(zero.shape)))
        zero = zero & there if there.dim() <= zero.dim() and fits else zero
    return float(zero.double().mean())


def _operands(tensors: list[Tensor]) -> tuple[Operand, ...]:
    return tuple(map(_operand, tensors))


def _operand(t: Tensor) -> Operand:
    values = numbers(t).reshape(-1)
    known = values[values.isfinite()].double()
    low, high = map(float, torch.aminmax(known)) if known.numel() else (math.nan, math.nan)
    return Operand(t.dtype, tuple(t.shape), low, high, values.numel() - known.numel())


def _operation(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The operation in words: what torch calls it, or which cast it is."""
    if name in ("_to_copy", "to", "copy_"):
        dtype = kwargs.get("dtype") if name != "copy_" else args[0].dtype if args[0].dtype != args[1].dtype else None
        return f"cast to {dtype_name(dtype)}" if isinstance(dtype, torch.dtype) else "copy"
    return name.strip("_").removeprefix("native_").replace("_backward_data", "_backward")
