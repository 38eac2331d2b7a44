"""See every tensor operation of a forward and backward pass, and find where the first bad inf or NaN was born."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpkit.arguments import check_kind
from mpkit.diagnose.cure import OUTSIDE, ROOT
from mpkit.formats import dtype_name
from mpkit.rounding import ROUNDING

ROUND_TO = "round to "


@dataclass(frozen=True)
class Operand:
    """What went into an operation: dtype, shape, extremes of the finite values, how many were not finite."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    low: float
    high: float
    nonfinite: int

    def __str__(self) -> str:
        kind = dtype_name(self.dtype)
        if not self.shape:
            return f"one {kind} value, {'which is not finite' if self.nonfinite else format(self.low, '.4g')}"
        what = f"{'an' if kind[0] in 'aeiou' else 'a'} {kind} tensor of {'x'.join(map(str, self.shape))}"
        if self.nonfinite == math.prod(self.shape):
            return f"{what} without a finite value"
        bad = f"; {self.nonfinite} are not finite" if self.nonfinite else ""
        return f"{what} with values from {self.low:.4g} to {self.high:.4g}{bad}"


Sources = tuple[tuple[Operand, ...], list[int], list[str], bool]


@dataclass(frozen=True)
class Event:
    """An operation whose result was not finite.

    kinds:    which of "inf", "-inf", "nan" occur in the result.
    parents:  indices of the events whose non-finite results went in.
    leaves:   names of the non-finite tensors that went in and that no operation made (data, weights, buffers).
    meant:    infinities put there on purpose, as an attention mask does.
    """

    index: int
    operation: str
    module: str
    phase: str
    gradient_of: str
    kinds: frozenset[str]
    operands: tuple[Operand, ...]
    parents: tuple[int, ...]
    leaves: tuple[str, ...]
    meant: bool

    @property
    def emulated(self) -> bool:
        """Whether this is a step inside mpkit's rounding, which makes infinities on its way to a finite result."""
        return self.operation.startswith(ROUND_TO)


class Watch(TorchDispatchMode):
    """While entered, remembers every operation with a non-finite result and where it came from.

    Args:
        network:  its modules give operations their path; use `attached()` around the forward pass.
        leaves:   name -> tensor of everything the computation starts from.
    """

    def __init__(self, network: nn.Module, leaves: dict[str, Tensor]) -> None:
        check_kind("network", network, nn.Module, "an nn.Module")
        check_kind("leaves", leaves, dict, "a dict of tensors by name")
        super().__init__()
        self.network = network
        bad = {name: t for name, t in leaves.items() if _checkable(t) and not _finite(t)}
        self.leaves = {_storage(t): (name, t) for name, t in bad.items()}  # as they were before anything ran
        self.events: list[Event] = []
        self.backward = False
        self.zeroed: dict[tuple[str, str], float] = {}  # (module, operation) -> largest share of values made zero
        self._used: set[int] = set()  # events whose non-finite results went into an operation outside of a rounding
        self._path: list[str] = []
        self._made: dict[int, tuple[int, Tensor]] = {}  # storage -> event, and the tensor that keeps the storage alive
        self._nodes: dict[int, tuple[str, str]] = {}  # autograd sequence number -> module and operation

    def attached(self) -> _Attached:
        """A context in which the modules of the network say where the computation is."""
        return _Attached(self)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and _checkable(t)]
        given = [t for t in inputs if _storage(t) in self._made and not _finite(t)]
        writes = func._schema.is_mutable
        described = self._sources(inputs) if writes else None
        out = func(*args, **kwargs)
        name = func._overloadpacket.__name__
        if not self.backward or self._path:  # a module that runs in the backward pass is one of a checkpoint
            node = torch.autograd._get_sequence_nr() - 1
            if node not in self._nodes:
                self._nodes[node] = self._where(), _operation(func, args, kwargs)
        flushes = not self.backward and name in _FLUSHING and ROUNDING.get() is None
        if flushes and isinstance(out, Tensor) and _checkable(out):
            share = _share_zeroed(name, inputs, out)
            key = self._where(), _operation(func, args, kwargs)
            self.zeroed[key] = max(share, self.zeroed.get(key, 0.0))
        if name.startswith(("empty", "new_empty")):
            return out  # memory that nobody has written yet
        if ROUNDING.get() is not None:
            self._carry(args, out)
        else:
            self._used.update(self._made[_storage(t)][0] for t in given)
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor) and _checkable(t)]
        bad = [t for t in results if not _finite(t)]
        seen = {_storage(t) for t in inputs}
        if not writes:
            bad = [
                t for t in bad if not (_storage(t) in seen and (_storage(t) in self._made or self._leaf(t)))
            ]  # views
        if bad:
            self._remember(func, args, kwargs, bad, described or self._sources(inputs))
        return out

    def born(self, results: Iterable[Tensor]) -> tuple[Event | None, tuple[str, ...]]:
        """The earliest operation that made `results` non-finite, or else the names of the leaves that did."""
        births: set[int] = set()
        leaves: list[str] = []
        todo: list[int] = []
        for tensor in results:
            if _finite(tensor):
                continue
            if self._leaf(tensor):
                leaves.append(self.leaves[_storage(tensor)][0])
            elif _storage(tensor) in self._made:
                todo.append(self._made[_storage(tensor)][0])
        visited: set[int] = set()
        while todo:
            index = todo.pop()
            if index in visited:
                continue
            visited.add(index)
            event = self.events[index]
            guilty = [i for i in event.parents if not self.events[i].meant]
            leaves += event.leaves
            todo += guilty
            if not guilty and not event.leaves:
                births.add(self._brought_in(event))
        if leaves:
            return None, tuple(dict.fromkeys(leaves))
        return (self.events[min(births)] if births else None), ()

    def _brought_in(self, event: Event) -> int:
        """Where the infinity arose that `event` choked on: at a constant of another module, or in `event` itself.

        A softmax accepts the infinities of a mask. If it gives NaN, for a row without any finite number, the fault
        arose in the softmax itself.
        """
        todo, first = list(event.parents), event.index
        while todo and "softmax" not in event.operation:
            index = todo.pop()
            first = min(first, index)
            todo += self.events[index].parents
        return first if self.events[first].module != event.module else event.index

    def consumers(self, event: Event | None) -> set[str]:
        """Names of the operations that took in the result of `event`."""
        return {e.operation for e in self.events if event is not None and event.index in e.parents}

    def hidden(self) -> Event | None:
        """The first forward operation that made +inf or NaN out of finite numbers, even if the loss is finite.

        A -inf alone does not count: masks of -1e9 become that in float16, and a softmax rightly makes zeros of them.
        """
        used = self._used | {i for e in self.events if not e.emulated and not e.meant for i in e.parents}
        for event in reversed(self.events):  # from the operations that used a rounded value back to where it was made
            used.update(event.parents if event.index in used and not event.meant else ())
        for event in self.events:
            born = event.phase == "forward" and not event.parents and not event.leaves and not event.meant
            if event.emulated and any(operand.nonfinite for operand in event.operands):
                continue  # a number of the rounding: what was rounded held an infinity already
            if born and event.kinds - {"-inf"} and (event.index in used or not event.emulated):
                return event
        return None

    def _sources(self, inputs: list[Tensor]) -> Sources:
        """Describe the inputs: -> operands, events they come from, leaves they are, whether a leaf is only a mask."""
        parents, leaves, mask = [], [], False
        for t in inputs:
            if _finite(t):
                continue
            if _storage(t) in self._made:
                parents.append(self._made[_storage(t)][0])
            elif self._leaf(t):
                name, leaf = self.leaves[_storage(t)]
                if _kinds(t) == {"-inf"} and not leaf.requires_grad:  # a mask is not trained
                    mask = True
                else:
                    leaves.append(name)
        return tuple(_operand(t) for t in inputs), parents, leaves, mask

    def _carry(self, args: tuple[Any, ...], out: object) -> None:
        """A rounding works on bits too, in tensors of integers: where the numbers came from goes with them."""
        sources = [t for t in tree_leaves(args) if isinstance(t, Tensor) and _storage(t) in self._made]
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and not t.is_floating_point():
                if sources:
                    self._made[_storage(t)] = self._made[_storage(sources[0])]
                else:  # what stood there before is gone
                    self._made.pop(_storage(t), None)

    def _remember(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], bad: list[Tensor], sources: Sources
    ) -> None:
        operands, parents, leaves, mask = sources
        kinds = frozenset().union(*(_kinds(t) for t in bad))
        name = _operation(func, args, kwargs)
        module, of = self._where(), ""
        if self.backward and not self._path:
            module, of = self._origin()
        rounding = ROUNDING.get()
        if rounding is not None:  # its steps multiply and add numbers of their own
            operands = (_operand(rounding[0]),)
        given = self._outside(parents) if rounding is not None else [self.events[i] for i in parents]
        allowed = frozenset().union(*(e.kinds for e in given if e.meant), {"-inf"} if mask else ())
        written = {_constant_kind(v) for v in tree_leaves((args, kwargs)) if isinstance(v, float)} - {""}
        meant = not leaves and all(e.meant for e in given) and kinds <= (allowed | written) and "nan" not in kinds
        event = Event(
            index=len(self.events),
            operation=name,
            module=module,
            phase="backward" if self.backward else "forward",
            gradient_of=of,
            kinds=kinds,
            operands=operands,
            parents=tuple(parents),
            leaves=tuple(leaves),
            meant=meant,
        )
        self.events.append(event)
        for t in bad:
            self._made[_storage(t)] = (event.index, t)

    def _outside(self, parents: Iterable[int]) -> list[Event]:
        """The events that a rounding started from, seen through its own steps."""
        found, todo, visited = [], list(parents), set()
        while todo:
            event = self.events[todo.pop()]
            if event.index not in visited:
                visited.add(event.index)
                if event.emulated and not event.meant:
                    todo += event.parents
                else:
                    found.append(event)
        return found

    def _leaf(self, t: Tensor) -> bool:
        return _storage(t) in self.leaves

    def _where(self) -> str:
        return self._path[-1] if self._path else OUTSIDE

    def _origin(self) -> tuple[str, str]:
        """Module and forward operation that the running backward operation belongs to."""
        node = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else None
        if number is None or number >= 2**63:
            return OUTSIDE, ""
        known = [n for n in self._nodes if n <= number]
        return self._nodes[max(known)] if known else (OUTSIDE, "")


class _Attached:
    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.handles: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self.watch.network.named_modules():
            self.handles.append(module.register_forward_pre_hook(self._enter(name or ROOT), prepend=True))
            self.handles.append(module.register_forward_hook(self._leave, always_call=True))

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: object) -> None:
            self.watch._path.append(name)

        return hook

    def _leave(self, *_: object) -> None:
        self.watch._path.pop()


def _stored(t: Tensor) -> Tensor:
    """The dense tensor that holds the numbers of a dense or sparse one."""
    if t.layout == torch.strided:
        return t
    return t._values() if t.layout == torch.sparse_coo else t.values()


def _storage(t: Tensor) -> int:
    return _stored(t).untyped_storage()._cdata


def _numbers(t: Tensor) -> Tensor:
    """Them as real numbers of a dtype that every operation knows: of a complex one the real and imaginary parts."""
    t = _stored(t.detach())
    if t.is_complex():
        return torch.view_as_real(t.resolve_conj())
    return t.float() if t.dtype.itemsize == 1 else t


_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_PACKED = {getattr(torch, "float4_e2m1fn_x2", None)}  # two numbers in a byte, which no operation reads


def _checkable(t: Tensor) -> bool:
    if t._is_zerotensor():  # a tangent of zeros, as forward mode makes for a bias: it has no memory to read
        return False
    kind = (t.is_floating_point() and t.dtype not in _PACKED) or t.is_complex()
    return kind and t.layout in _LAYOUTS and t.device.type != "meta" and t.numel() > 0


def _finite(t: Tensor) -> bool:
    return bool(_numbers(t).isfinite().all())


def _kinds(t: Tensor) -> set[str]:
    t = _numbers(t)
    found = {"nan": t.isnan(), "inf": t == math.inf, "-inf": t == -math.inf}
    return {kind for kind, where in found.items() if bool(where.any())}


_FLUSHING = ("_to_copy", "mul", "div", "exp", "_softmax", "pow", "sigmoid")  # zero from what is none


def _share_zeroed(name: str, inputs: list[Tensor], out: Tensor) -> float:
    """Share of the results that are zero though nothing that went in was; minus infinity rightly becomes one."""
    zero = _numbers(out) == 0
    for t in inputs if bool(zero.any()) else ():
        numbers = _numbers(t)
        there = numbers != (-math.inf if name in ("exp", "_softmax", "sigmoid") else 0)
        zero = zero & there if there.dim() <= zero.dim() and _fits(there, zero) else zero
    return float(zero.double().mean())


def _fits(one: Tensor, other: Tensor) -> bool:
    return all(a in (1, b) for a, b in zip(reversed(one.shape), reversed(other.shape)))


def _constant_kind(value: float) -> str:
    return {math.inf: "inf", -math.inf: "-inf"}.get(value, "")


def _operand(t: Tensor) -> Operand:
    numbers = _numbers(t).reshape(-1)
    finite = numbers[numbers.isfinite()].double()
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (math.nan, math.nan)
    return Operand(t.dtype, tuple(t.shape), low, high, numbers.numel() - finite.numel())


def _plain_name(name: str) -> str:
    plain = name.strip("_").removeprefix("native_")
    return plain.replace("_backward_data", "_backward")


def _operation(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The operation in words: what torch calls it, or which cast or rounding it is."""
    if (rounded := ROUNDING.get()) is not None:
        return f"{ROUND_TO}{rounded[1].name}"
    name = func._overloadpacket.__name__
    if name in ("_to_copy", "to"):
        dtype = kwargs.get("dtype")
        return f"cast to {dtype_name(dtype)}" if isinstance(dtype, torch.dtype) else "copy"
    if name == "copy_":
        return f"cast to {dtype_name(args[0].dtype)}" if args[0].dtype != args[1].dtype else "copy"
    return _plain_name(name)
