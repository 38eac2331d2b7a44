"""The ledger: one row per operation of a forward pass, with what it took, computed in and gave. It only watches.

A mode below the casts sees every torch function. Under a level the mode above says where an operation begins, and what
is called until it ends are its parts; without one every function is an operation. What autograd keeps is measured by
torch's hooks on saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mpkit.casting import operators as ops
from mpkit.casting.low import Emulated, Low, Target, float_tensors, map_tensors, name_of, precision, values_of
from mpkit.casting.mode import LOCAL
from mpkit.casting.recipe import Operand, OperandRow, row_of

if TYPE_CHECKING:
    import pandas as pd

OUTSIDE = "(outside)"


@dataclass(frozen=True)
class Operation:
    """One operation of a forward pass.

    Args:
        module:     path of the module whose forward called it, "" for the network itself; "(outside)" for the loss.
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
    compute: str
    output: tuple[str, ...]
    shape: tuple[int, ...]
    bytes: int
    casts: int
    saved: int
    flushed: int | None = None
    overflowed: int | None = None


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


@dataclass(frozen=True)
class ModuleSummary:
    """What the operations of one module add up to (bytes; compute lists each precision once)."""

    module: str
    kind: str
    operations: int
    compute: tuple[str, ...]
    output: tuple[str, ...]
    casts: int
    bytes: int
    saved: int
    flushed: int | None
    overflowed: int | None


class _Open:
    """An operation that runs: what its parts computed in, lost and kept."""

    def __init__(self, name: str, listed: bool) -> None:
        self.name = name
        self.listed = listed
        self.computed: Target | None = None
        self.kept = self.flushed = self.overflowed = 0


class _Watch(TorchFunctionMode):
    def __init__(self, book: Ledger) -> None:
        super().__init__()
        self.book = book

    def __torch_function__(
        self, func: ops.Function, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.book.see(func, args, kwargs or {})


class Ledger:
    """Records every operation of `network`'s forward passes inside a `with` block; see `ledger`."""

    def __init__(self, network: nn.Module, *, count: bool = False, keep: bool = False) -> None:
        if not isinstance(network, nn.Module):
            raise TypeError(f"a ledger watches an nn.Module, got {network!r}; pass the network object itself")
        self.network = network
        self.count = count
        self.keep = keep
        self.rows: list[Operation] = []
        self.outside: list[Operation] = []
        self.results: list[Tensor] = []
        self.casts: list[Cast] = []
        self.operands: list[OperandRow] = []
        self.weight_copies = 0
        self._path: list[str] = []
        self._operation: _Open | None = None
        self._blocks: ExitStack | None = None

    def __enter__(self) -> Ledger:
        if self._blocks is not None:
            raise RuntimeError("this ledger is open already; leave its `with` block first, or make another by ledger()")
        self._parameters = {id(p): name for name, p in self.network.named_parameters()}
        self._weights = {_storage(x) for x in (*self.network.parameters(), *self.network.buffers())}
        self._kept: dict[int, Tensor] = {}
        with ExitStack() as blocks:
            for name, module in self.network.named_modules():
                enters = module.register_forward_pre_hook(lambda *_, name=name: self._path.append(name))
                leaves = module.register_forward_hook(partial(self._leave, name), always_call=True)
                blocks.callback(enters.remove)
                blocks.callback(leaves.remove)
            blocks.enter_context(torch.autograd.graph.saved_tensors_hooks(_note_saved, lambda x: x))
            blocks.enter_context(self._among_books())
            blocks.enter_context(_Watch(self))
            self._blocks = blocks.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._blocks is not None
        blocks, self._blocks, self._operation = self._blocks, None, None
        blocks.__exit__(*error)
        self._path.clear()
        self._kept.clear()

    @contextmanager
    def _among_books(self) -> Iterator[None]:
        outer, LOCAL.books = LOCAL.books, (*LOCAL.books, self)
        try:
            yield
        finally:
            LOCAL.books = outer

    def _leave(self, name: str, *_: object) -> None:
        if self._path and self._path[-1] == name:  # a hook of somebody's that raised before ours: it was not entered
            self._path.pop()

    # --- what is seen -------------------------------------------------------------------------------------------------

    def see(self, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function that reached torch: a part of the open operation, or an operation of its own."""
        if LOCAL.quiet or func.__name__ == "__get__":
            return func(*args, **kwargs)
        if self._operation is not None:
            return self._part(self._operation, func, args, kwargs)
        if func.__name__ in ops.COMPOSED:
            with _Watch(self):
                return ops.COMPOSED[func.__name__](*args, **kwargs)
        return self.record(func, lambda given, named: self._part(self._operation, func, given, named), args, kwargs)

    def record(self, func: ops.Function, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do `run(args, kwargs)`, which is the operation `func`, and write it down."""
        if self._operation is not None or LOCAL.quiet:
            return run(args, kwargs)
        given = tuple(name_of(precision(x)) for x in float_tensors((args, kwargs)))
        before, opened = len(self.casts), _Open(func.__name__, func.__name__ not in _NO_ROW)
        self._operation = opened
        try:
            out = run(args, kwargs)
        finally:
            self._operation = None
        results = float_tensors(out)
        if not results or not opened.listed or (not self._path and not _in_a_graph(results)):
            return out
        row = self._row(opened, given, results, self.casts[before:])
        (self.rows if self._path else self.outside).append(row)
        if self.keep and self._path:
            self.results.append(values_of(results[0]).clone())
        return out

    def _row(self, opened: _Open, given: tuple[str, ...], results: list[Tensor], made: Sequence[Cast]) -> Operation:
        computed = opened.computed
        row = Operation(
            self._path[-1] if self._path else OUTSIDE,
            opened.name,
            given,
            name_of(precision(results[0]) if computed is None else computed),
            tuple(name_of(precision(x)) for x in results),
            tuple(results[0].shape),
            sum(_bytes(x) for x in results),
            len(made),
            opened.kept,
        )
        if not self.count:
            return row
        flushed, overflowed = (sum(getattr(cast, name) or 0 for cast in made) for name in ("flushed", "overflowed"))
        return replace(row, flushed=flushed + opened.flushed, overflowed=overflowed + opened.overflowed)

    def _part(self, opened: _Open | None, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function that torch computes for an operation: in the precision of its inputs, unless autocast decides."""
        if opened is None or (func.__name__ in ops.LEFT_ALONE and func.__name__ != opened.name):
            return func(*args, **kwargs)
        inputs = float_tensors((args, kwargs))
        exact = _in_float64(func, args, kwargs) if self.count and inputs else None
        out = func(*args, **kwargs)
        if opened.computed is None:
            opened.computed = _common(inputs)
        for wide, got in zip(float_tensors(exact), float_tensors(out)):
            flushed, overflowed = lost_values(wide, got)
            opened.flushed += flushed
            opened.overflowed += overflowed
        return out

    def note_cast(self, x: Tensor, y: Tensor) -> None:
        """Write down that `x` was cast to `y`."""
        if id(x) in self._parameters or _storage(x) in self._weights:
            self._copied(y)
        lost = lost_values(x, y) if self.count else (None, None)
        where = self._path[-1] if self._path else ""
        name = self._parameters.get(id(x), "activation")
        operation = "" if self._operation is None else self._operation.name
        source, target = name_of(precision(x)), name_of(precision(y))
        self.casts.append(Cast(where, operation, name, source, target, x.numel(), *lost))

    def note_precision(self, target: Target) -> None:
        """The open operation computes in `target`, whatever its inputs say."""
        if self._operation is not None:
            self._operation.computed = target

    def operand_notes(self) -> Callable[..., None]:
        """What a product under a recipe calls for each operand, in the forward and later in the backward pass."""
        where = self._path[-1] if self._path else ""

        def note(product: str, name: str, operand: Operand | None, native: bool) -> None:
            if self._blocks is not None:
                self.operands.append(row_of(where, product, name, operand, native))

        return note

    def note_saved(self, x: Tensor) -> None:
        """`x` is kept for the backward pass."""
        key = _storage(x)
        if key not in self._weights and key not in self._kept:
            if self._is_copy_of_a_weight(x):
                self._copied(x)
            else:
                self._kept[key] = x
                if self._operation is not None:
                    self._operation.kept += _nbytes(x)

    def _copied(self, y: Tensor) -> None:
        if _storage(y) not in self._weights:
            self._weights.add(_storage(y))
            self._kept[-len(self._weights)] = y  # its memory must not be given to another tensor meanwhile
            self.weight_copies += _nbytes(y)

    def _is_copy_of_a_weight(self, x: Tensor) -> bool:
        """Whether x, such as autocast makes of a weight, has its size and was made of it alone."""
        node: Any = x.grad_fn
        while node is not None and len(node.next_functions) == 1:
            node = node.next_functions[0][0]
        weight = getattr(node, "variable", None)
        return weight is not None and id(weight) in self._parameters and weight.numel() == x.numel()

    # --- what the rows say --------------------------------------------------------------------------------------------

    @property
    def measured_bytes(self) -> int:
        """Activations kept for the backward pass of the network, as autograd stored them (bytes)."""
        return sum(row.saved for row in self.rows)

    @property
    def kept_bytes(self) -> dict[str, int]:
        """What is kept for the backward pass, each storage once (bytes): activations, copies of weights, the loss's."""
        outside = sum(row.saved for row in self.outside)
        return {"activations": self.measured_bytes, "weight copies": self.weight_copies, "outside": outside}

    def __str__(self) -> str:
        """The operations as a table, and what is kept for the backward pass."""
        head = ("module", "operation", "inputs", "compute", "output", "casts", "kept, bytes")
        lines = [
            (r.module, r.operation, _short(r.inputs), r.compute, _short(r.output), str(r.casts), str(r.saved))
            for r in (*self.rows, *self.outside)
        ]
        widths = [max(map(len, column)) for column in zip(head, *lines)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in (head, *lines)]
        kept = ", ".join(f"{name} {size}" for name, size in self.kept_bytes.items())
        return "\n".join((*table, f"kept for the backward pass, bytes: {kept}"))

    def to_frame(self) -> pd.DataFrame:
        """The rows as a table."""
        return _frame(self.rows, Operation)

    def casts_to_frame(self) -> pd.DataFrame:
        """The casts as a table."""
        return _frame(self.casts, Cast)

    def operands_to_frame(self) -> pd.DataFrame:
        """The operands of the products under a recipe as a table: backward passes inside the `with` block count too."""
        return _frame(self.operands, OperandRow)

    def summary(self) -> list[ModuleSummary]:
        """One line per module that ran an operation of its own, in the order of first use."""
        kinds = {name: type(module).__name__ for name, module in self.network.named_modules()}
        lines = []
        for module in dict.fromkeys(row.module for row in self.rows):
            rows = [row for row in self.rows if row.module == module]
            lines.append(
                ModuleSummary(
                    module,
                    kinds[module],
                    len(rows),
                    tuple(dict.fromkeys(row.compute for row in rows)),
                    rows[-1].output,
                    sum(cast.module == module for cast in self.casts),
                    sum(row.bytes for row in rows),
                    sum(row.saved for row in rows),
                    _total([row.flushed for row in rows]),
                    _total([row.overflowed for row in rows]),
                )
            )
        return lines


def ledger(network: nn.Module, *, count: bool = False, keep: bool = False) -> Ledger:
    """Watch `network`: inside the `with` block every operation of its forward passes becomes a row.

    Works at every level, inside `torch.autocast`, and on a network that knows nothing of either. No number changes.
    `print(book)` shows the rows as a table. What is computed outside the network from its results, as a loss, stands
    in `outside`.

    Args:
        count: also count values that were flushed to zero or overflowed; each operation is then computed again in
               float64, so it takes several times longer.
        keep:  also keep a copy of each operation's first result, in `results`.
    Returns: a context manager with `rows`, `outside`, `casts`, `summary()`, `to_frame()`, and what is kept for the
             backward pass: `measured_bytes` (activations), `kept_bytes` (also copies of weights, and the loss's).
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
_NO_ROW = (ops.LEFT_ALONE | ops.names_of("zeros_like", "ones_like")) - ops.CONVERSIONS


def _note_saved(x: Tensor) -> Tensor:
    for book in LOCAL.books:  # of several hooks torch calls the innermost
        book.note_saved(x)
    return x


def _in_a_graph(results: list[Tensor]) -> bool:
    """Whether something outside the network belongs to a loss: an optimizer's step has no graph."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in results)


def _common(inputs: list[Tensor]) -> Target | None:
    """What an operation on these computes in; None where its result says so: without inputs, or where autocast does."""
    targets = list(dict.fromkeys(precision(x) for x in inputs))
    if any(torch.is_autocast_enabled(device) for device in {x.device.type for x in inputs}) or not targets:
        return None
    if len(targets) == 1:
        return targets[0]
    wide = torch.float32
    for target in targets:
        wide = torch.promote_types(wide, torch.float32 if isinstance(target, Emulated) else target)
    return wide if any(t is torch.float32 or isinstance(t, Emulated) for t in targets) else targets[0]


def _in_float64(func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result in float64; None where there is none to compare with, as for a function that draws at random."""
    name = func.__name__
    if name in ops.IN_PLACE or "." in name:
        return None
    outer, LOCAL.quiet = LOCAL.quiet, True
    # copies of float64 too, since a norm writes its running statistics
    widened = map_tensors(_float64_copy, (args, kwargs))
    later = {key: value for key, value in widened[1].items() if key != "out"}
    later |= {"inplace": False} if "inplace" in kwargs else {}
    devices = {x.device for x in float_tensors((args, kwargs)) if x.is_cuda}
    generators = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
    with torch.no_grad(), torch.random.fork_rng([*devices]):
        before = _random_state(devices, generators)
        try:
            out = func(*widened[0], **later)
        except (RuntimeError, TypeError, NotImplementedError, ValueError):  # no float64 kernel
            return None
        finally:
            LOCAL.quiet = outer
            after = _random_state(devices, generators)
            for generator, state in zip(generators, before):
                generator.set_state(state)
    return out if all(torch.equal(a, b) for a, b in zip(before, after)) else None


def _random_state(devices: set[torch.device], generators: list[torch.Generator]) -> list[Tensor]:
    """The states of these generators, which are a caller's own, then of torch's for the processor and the devices."""
    own = [generator.get_state() for generator in generators]
    return [*own, torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _float64_copy(x: Tensor) -> Tensor:
    return values_of(x).to(torch.float64, copy=True) if x.is_floating_point() else x


def lost_values(wide: Tensor, narrow: Tensor) -> tuple[int, int]:
    """How many values became zero, and how many non-finite."""
    wide, narrow = values_of(wide), values_of(narrow)
    if wide.shape != narrow.shape:
        return 0, 0
    flushed = (narrow == 0) & (wide != 0)
    overflowed = wide.isfinite() & ~narrow.isfinite()
    return int(flushed.sum()), int(overflowed.sum())


def _storage(x: Tensor) -> int:
    """Which memory a tensor stands in."""
    try:
        return values_of(x).untyped_storage()._cdata  # of meta tensors too, whose addresses are all 0
    except (NotImplementedError, RuntimeError):  # a tensor that stands for others
        return id(x)


def _nbytes(x: Tensor) -> int:
    """Memory of a tensor (bytes); of an emulated format its own bits."""
    try:
        size = values_of(x).untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        size = x.numel() * x.element_size()
    return size * x.target.fmt.bits // 32 if isinstance(x, Low) else size


def _bytes(x: Tensor) -> int:
    bits = x.target.fmt.bits if isinstance(x, Low) else 8 * x.element_size()
    return -(-x.numel() * bits // 8)


def _short(names: tuple[str, ...]) -> str:
    return "/".join(dict.fromkeys(names))


def _frame(rows: Sequence[Any], kind: Any) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame([asdict(row) for row in rows], columns=list(kind.__dataclass_fields__))


def _total(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
