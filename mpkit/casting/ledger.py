"""The ledger: one row per operation of a forward pass, with what it took, computed in and gave. It only watches.

A mode below the casts sees every torch function. Under a level the mode above says where an operation begins, and what
is called until it ends are its parts; without one every function is an operation. What autograd keeps is measured by
torch's hooks on saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from mpkit.arguments import check_kind
from mpkit.casting import operators as ops
from mpkit.casting.low import Low, Target, float_tensors, map_tensors, name_of, precision, values_of
from mpkit.casting.mode import LOCAL
from mpkit.casting.recipe import Operand, OperandRow, row_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class Operation:
    """One operation of a forward pass.

    Args:
        module:     path of the module whose forward called it, "" for the network itself.
        operation:  torch's name of it.
        inputs:     precision of each float input as it was given, before any cast.
        compute:    precision in which it computed.
        output:     precision of each float result.
        shape:      shape of the first result.
        bytes:      size of the float results in their precision (bytes; an emulated format counts its own bits).
        casts:      tensors cast for it (its inputs, its result).
        saved:      bytes of activations that it keeps for the backward pass and nothing before it kept.
        flushed:    non-zero values that became zero in its casts and its result; None unless asked for.
        overflowed: finite values that became infinite or NaN there; None unless asked for.
    """

    module: str
    operation: str
    inputs: tuple[str, ...]
    compute: str = ""
    output: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    bytes: int = 0
    casts: int = 0
    saved: int = 0
    flushed: int | None = None
    overflowed: int | None = None

    def lost(self, values: tuple[int, int]) -> None:
        """Count values that became zero, and values that became non-finite."""
        self.flushed = (self.flushed or 0) + values[0]
        self.overflowed = (self.overflowed or 0) + values[1]


@dataclass(frozen=True)
class Cast:
    """One tensor that was cast: where, what (name of a parameter, or "activation"), from and to which precision.

    `operation` is the one it was cast for, "" at the border of a module (its arguments, its result).
    """

    module: str
    operation: str
    tensor: str
    source: str
    target: str
    elements: int
    flushed: int | None = None
    overflowed: int | None = None


class _Watch(TorchFunctionMode):
    def __init__(self, book: Ledger) -> None:
        super().__init__()
        self.book = book

    def __torch_function__(self, func: ops.Function, types: object, args: Any = (), kwargs: Any = None) -> Any:
        return self.book.see(func, args, kwargs or {})


class Ledger:
    """Records every operation of `network`'s forward passes inside a `with` block; see `ledger`."""

    def __init__(self, network: nn.Module, *, count: bool, keep: bool) -> None:
        check_kind("network", network, nn.Module, "an nn.Module")
        self.network, self.count, self.keep = network, count, keep
        self.rows: list[Operation] = []
        self.results: list[Tensor] = []
        self.casts: list[Cast] = []
        self.operands: list[OperandRow] = []
        self._path: list[str] = []
        self._row: Operation | None = None  # of the operation that runs
        self._blocks: ExitStack | None = None

    def __enter__(self) -> Ledger:
        if self._blocks is not None:
            raise RuntimeError("this ledger is open already; leave its `with` block first, or make another by ledger()")
        self._parameters = {id(p): name for name, p in self.network.named_parameters()}
        self._weights = {_memory(x)[0] for x in (*self.network.parameters(), *self.network.buffers())}
        self._kept: dict[int, Tensor] = {}
        self._copies: dict[int, Tensor] = {}
        with ExitStack() as blocks:
            for name, module in self.network.named_modules():
                # each takes itself away at the end
                blocks.enter_context(module.register_forward_pre_hook(lambda *_, name=name: self._path.append(name)))
                blocks.enter_context(module.register_forward_hook(self._leave, always_call=True))
            blocks.enter_context(torch.autograd.graph.saved_tensors_hooks(_note_saved, lambda x: x))
            blocks.callback(setattr, LOCAL, "books", LOCAL.books)
            blocks.enter_context(_Watch(self))
            self._blocks, LOCAL.books = blocks.pop_all(), (*LOCAL.books, self)
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._blocks is not None
        blocks, self._blocks, self._row = self._blocks, None, None
        blocks.__exit__(*error)
        self._path, self._kept, self._copies = [], {}, {}

    def _leave(self, *_: object) -> None:
        del self._path[-1:]  # of an empty one nothing, where the ledger was opened inside this forward

    # --- what is seen -------------------------------------------------------------------------------------------------

    def see(self, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function that reached torch: a part of the open operation, or an operation of its own."""
        if self not in LOCAL.books or func.__name__ == "__get__":
            return func(*args, **kwargs)
        if self._row is not None:
            return self._part(self._row, func, args, kwargs)
        if func.__name__ in ops.COMPOSED:
            with _Watch(self):
                return ops.COMPOSED[func.__name__](*args, **kwargs)
        return self.record(func, lambda given, named: self._part(self._row, func, given, named), args, kwargs)

    def record(self, func: ops.Function, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do `run(args, kwargs)`, which is the operation `func`, and write it down."""
        if self._row is not None or not self._path:
            return run(args, kwargs)
        row = self._row = Operation(self.where, func.__name__, _names(float_tensors((args, kwargs))))
        if self.count:
            row.lost((0, 0))
        try:
            out = run(args, kwargs)
        finally:
            self._row = None
        if (results := float_tensors(out)) and row.operation not in _NO_ROW:
            row.output, row.shape = _names(results), tuple(results[0].shape)
            row.compute = row.compute or row.output[0]
            row.bytes = sum(-(-x.numel() * _bits(x) // 8) for x in results)
            self.rows.append(row)
            if self.keep:
                self.results.append(values_of(results[0]).clone())
        return out

    def _part(self, row: Operation | None, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that torch computes for an operation: in the precision of its inputs, unless autocast decides."""
        if row is None or (func.__name__ in ops.LEFT_ALONE and func.__name__ != row.operation):
            return func(*args, **kwargs)
        inputs = float_tensors((args, kwargs))
        exact = _in_float64(func, args, kwargs) if self.count and inputs else None
        out = func(*args, **kwargs)
        row.compute = row.compute or _common(inputs)
        for wide, got in zip(float_tensors(exact), float_tensors(out)):
            row.lost(_lost(wide, got))
        return out

    def note_cast(self, x: Tensor, y: Tensor) -> None:
        """Write down that `x` was cast to `y`."""
        if id(x) in self._parameters or _memory(x)[0] in self._weights | self._copies.keys():
            self._copies[_memory(y)[0]] = y  # held, so that its memory is not given to another tensor meanwhile
        lost = _lost(x, y) if self.count else (None, None)
        operation, what = self._row.operation if self._row else "", self._parameters.get(id(x), "activation")
        source, target = _names((x, y))
        self.casts.append(Cast(self.where, operation, what, source, target, x.numel(), *lost))
        if self._row is not None:
            self._row.casts += 1
            if self.count:
                self._row.lost(lost)  # type: ignore[arg-type]

    def note_precision(self, target: Target) -> None:
        """The open operation computes in `target`, whatever its inputs say."""
        if self._row is not None:
            self._row.compute = name_of(target)

    def note_operand(self, where: str, product: str, name: str, operand: Operand | None) -> None:
        """Write down an operand of a product under a recipe, in the forward and later in the backward pass."""
        if self._blocks is not None:
            self.operands.append(row_of(where, product, name, operand))

    @property
    def where(self) -> str:
        """Path of the module that runs."""
        return self._path[-1] if self._path else ""

    def note_saved(self, x: Tensor) -> None:
        """`x` is kept for the backward pass."""
        key, size = _memory(x)
        if key in self._weights or key in self._kept:
            return
        self._kept[key] = x
        if self._row is not None and key not in self._copies:
            self._row.saved += size

    # --- what the rows say --------------------------------------------------------------------------------------------

    @property
    def measured_bytes(self) -> int:
        """Activations kept for the backward pass of the network, as autograd stored them (bytes)."""
        return sum(row.saved for row in self.rows)

    def __str__(self) -> str:
        """The operations as a table, and what is kept for the backward pass."""
        frame = self.to_frame().drop(columns=["shape", "bytes", "flushed", "overflowed"])
        return f"{frame.to_string(index=False)}\nkept for the backward pass, bytes: {self.measured_bytes}"

    def to_frame(self, kind: type = Operation) -> pd.DataFrame:
        """The rows as a table; with `Cast` the casts, with `OperandRow` the operands of products under a recipe."""
        import pandas as pd

        tables: dict[type, Sequence[Any]] = {Operation: self.rows, Cast: self.casts, OperandRow: self.operands}
        return pd.DataFrame(map(asdict, tables[kind]), columns=[field.name for field in fields(kind)])


def ledger(network: nn.Module, *, count: bool = False, keep: bool = False) -> Ledger:
    """Watch `network`: inside the `with` block every operation of its forward passes becomes a row.

    Works at every level, inside `torch.autocast`, and on a network that knows nothing of either. No number changes.
    `print(book)` shows the rows as a table.

    Args:
        count: also count values that were flushed to zero or overflowed; each operation is then computed again in
               float64, so it takes several times longer.
        keep:  also keep a copy of each operation's first result, in `results`.
    Returns: a context manager with `rows`, `casts`, `operands`, `to_frame()`, and `measured_bytes`, the size of the
             activations that are kept for the backward pass.
    Raises:  TypeError if `network` is no module.

    >>> from mpkit.casting import auto_mixed_precision
    >>> net = auto_mixed_precision(nn.Linear(3, 2), "O1", torch.bfloat16)
    >>> with ledger(net) as book:
    ...     _ = net(torch.ones(1, 3))
    >>> book.rows[0].inputs, book.rows[0].compute, book.rows[0].output
    (('float32', 'float32', 'float32'), 'bfloat16', ('float32',))
    """
    return Ledger(network, count=count, keep=keep)


# Conversions are what casts are made of; these give tensors but compute nothing.
_NO_ROW = (ops.LEFT_ALONE | ops.names_of("zeros_like", "ones_like")) - ops.KINDS["conversions"]


def _note_saved(x: Tensor) -> Tensor:
    for book in LOCAL.books:  # of several hooks torch calls the innermost
        book.note_saved(x)
    return x


def _common(inputs: Sequence[Tensor]) -> str:
    """What an operation on these computes in; "" where its result says so: without inputs, or where autocast does."""
    targets = {precision(x) for x in inputs}
    devices = filter(torch.amp.is_autocast_available, {x.device.type for x in inputs})
    if not targets or any(map(torch.is_autocast_enabled, devices)):
        return ""
    return name_of(targets.pop() if len(targets) == 1 else reduce(torch.promote_types, {x.dtype for x in inputs}))


def _in_float64(func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result in float64; None where there is none to compare with, as for a function that draws at random."""
    if func.__name__ in ops.IN_PLACE or "." in func.__name__ or kwargs.get("generator") is not None:
        return None
    devices = [*{x.device for x in float_tensors((args, kwargs)) if x.is_cuda}]
    books, LOCAL.books = LOCAL.books, ()
    try:
        # copies of float64 too, since a norm writes its running statistics
        options = {name: value for name, value in kwargs.items() if name not in ("out", "inplace")}
        args, kwargs = map_tensors(_float64_copy, (args, options))
        with torch.no_grad(), torch.random.fork_rng(devices):
            before = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
            out = func(*args, **kwargs)
            after = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
            return out if all(map(torch.equal, before, after)) else None
    except (RuntimeError, TypeError, ValueError):  # no float64 kernel
        return None
    finally:
        LOCAL.books = books


def _float64_copy(x: Tensor) -> Tensor:
    return values_of(x).to(torch.float64, copy=True) if x.is_floating_point() else x


def _lost(wide: Tensor, narrow: Tensor) -> tuple[int, int]:
    """How many values became zero, and how many non-finite."""
    wide, narrow = values_of(wide), values_of(narrow)
    if wide.shape != narrow.shape:
        return 0, 0
    return int(((narrow == 0) & (wide != 0)).sum()), int((wide.isfinite() & ~narrow.isfinite()).sum())


def _bits(x: Tensor) -> int:
    return x.target.fmt.bits if isinstance(x, Low) else 8 * x.element_size()


def _memory(x: Tensor) -> tuple[int, int]:
    """Which memory a tensor stands in, and its size (bytes); of an emulated format its own bits."""
    try:
        storage = values_of(x).untyped_storage()
        return StorageWeakRef(storage).cdata, storage.nbytes() // x.element_size() * _bits(x) // 8
    except (NotImplementedError, RuntimeError):  # a tensor that stands for others
        return id(x), x.numel() * _bits(x) // 8


def _names(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    return tuple(name_of(precision(x)) for x in tensors)
