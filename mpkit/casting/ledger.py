"""The ledger: one row per operation of a forward pass, with what it took, computed in and gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpkit.casting import operations as ops
from mpkit.casting.calls import Call, lost_values, nbytes, storage
from mpkit.casting.handlers import Handler, looks_inside
from mpkit.casting.mode import CastMode, running
from mpkit.casting.recipe import Operand, OperandRow, row_of
from mpkit.casting.rules import CASTING
from mpkit.casting.sparse import is_dense, values_of
from mpkit.casting.targets import Emulated, Target, float_tensors, precision
from mpkit.formats import dtype_name

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
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
        saved:      bytes of activations that it keeps for the backward pass and nothing before it kept, predicted.
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


class Ledger:
    """Records every operation of `network`'s forward passes inside a `with` block; see `ledger`."""

    def __init__(self, network: nn.Module, *, count: bool = False, keep: bool = False) -> None:
        if not isinstance(network, nn.Module):
            raise TypeError(f"a ledger watches an nn.Module, got {network!r}; pass the network object itself")
        self.network = network
        self.count = count
        self.keep = keep
        self.rows: list[Operation] = []
        self.results: list[Tensor] = []
        self.casts: list[Cast] = []
        self.operands: list[OperandRow] = []
        self.measured_bytes = 0
        self._path: list[str] = []
        self._operation = ""
        self._hooks: list[Any] = []

    def __enter__(self) -> Ledger:
        if self._hooks:
            raise RuntimeError("this ledger is open already; leave its `with` block first, or make another by ledger()")
        self._parameters = {id(p): name for name, p in self.network.named_parameters()}
        self._weights = {storage(x) for x in (*self.network.parameters(), *self.network.buffers())}
        self._kept: dict[int, Tensor] = {}
        self._measured: dict[int, Tensor] = {}
        for name, module in self.network.named_modules():
            self._hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._path.append(name)))
            leave = partial(self._leave, name)
            self._hooks.append(module.register_forward_hook(leave, always_call=True))
        self._saving = torch.autograd.graph.saved_tensors_hooks(self._note_saved, lambda x: x)
        self._saving.__enter__()
        self._running = running(ledger=self)
        self._running.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._running.__exit__(*error)
        self._saving.__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._path.clear()
        self._operation = ""
        self._kept.clear()
        self._measured.clear()

    def _leave(self, name: str, *_: object) -> None:
        if self._path and self._path[-1] == name:  # a hook of somebody's that raised before ours: it was not entered
            self._path.pop()

    # --- called by the mode -------------------------------------------------------------------------------------------

    def run(
        self, mode: CastMode, handler: Handler | None, func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object:
        """Do what the rule says and write it down."""
        if handler is None and func in ops.COMPOSED:
            handler = looks_inside(ops.COMPOSED[func])
        if handler is not None and handler.inside:
            return handler.run(mode, func, args, kwargs)
        if not self._path or mode.rule is CASTING:
            return handler.run(mode, func, args, kwargs) if handler is not None else func(*args, **kwargs)
        given = tuple(name_of(precision(x)) for x in float_tensors((args, kwargs)))
        call, before = Call(func, self.count), len(self.casts)
        self._operation = call.__name__
        out = handler.run(mode, call, args, kwargs) if handler is not None else call(*args, **kwargs)
        self._operation = ""
        results = float_tensors(out)
        if results and func not in _NO_ROW:
            made = self.casts[before:]
            computes = call.instead or (handler.computes if handler is not None else None) or call.computed
            row = Operation(
                self._path[-1],
                call.__name__,
                given,
                name_of(computes) if computes is not None else name_of(precision(results[0])),
                tuple(name_of(precision(x)) for x in results),
                tuple(_plain(results[0]).shape),
                sum(_bytes(x) for x in results),
                len(made),
                self._newly_kept(call),
            )
            if self.count:
                row = replace(
                    row,
                    flushed=call.flushed + sum(cast.flushed or 0 for cast in made),
                    overflowed=call.overflowed + sum(cast.overflowed or 0 for cast in made),
                )
            self.rows.append(row)
            if self.keep:
                self.results.append(results[0].detach().clone())
        return out

    def note_cast(self, x: Tensor, y: Tensor) -> None:
        """Write down that `x` was cast to `y`."""
        if id(x) in self._parameters or storage(x) in self._weights:
            self._weights.add(storage(y))
        lost = lost_values(x, y) if self.count else (None, None)
        name = self._parameters.get(id(x), "activation")
        where = self._path[-1] if self._path else ""
        source, target = name_of(precision(x)), name_of(precision(y))
        self.casts.append(Cast(where, self._operation, name, source, target, _plain(x).numel(), *lost))

    def operand_notes(self) -> Callable[..., None]:
        """What a product under a recipe calls for each operand, in the forward and later in the backward pass."""
        where = self._path[-1] if self._path else ""

        def note(product: str, name: str, operand: Operand | None, native: bool) -> None:
            if self._hooks:
                self.operands.append(row_of(where, product, name, operand, native))

        return note

    def _note_saved(self, x: Tensor) -> Tensor:
        if self._path and storage(x) not in self._weights and storage(x) not in self._measured:
            self._measured[storage(x)] = x
            self.measured_bytes += nbytes(x)
        return x

    def _newly_kept(self, call: Call) -> int:
        """Bytes of activations that the backward of this call needs and that were not kept before."""
        new = 0
        for x in call.kept():
            if storage(x) not in self._weights and storage(x) not in self._kept:
                self._kept[storage(x)] = x
                new += nbytes(x) * _bits(x) // (8 * x.element_size()) if is_dense(x) else nbytes(x)
        return new

    # --- what the rows say --------------------------------------------------------------------------------------------

    @property
    def predicted_bytes(self) -> int:
        """Activations kept for the backward pass, from the table of what each operation needs (bytes)."""
        return sum(row.saved for row in self.rows)

    def to_frame(self) -> pd.DataFrame:
        """The rows as a table."""
        import pandas as pd

        return pd.DataFrame([asdict(row) for row in self.rows], columns=list(Operation.__dataclass_fields__))

    def casts_to_frame(self) -> pd.DataFrame:
        """The casts as a table."""
        import pandas as pd

        return pd.DataFrame([asdict(cast) for cast in self.casts], columns=list(Cast.__dataclass_fields__))

    def operands_to_frame(self) -> pd.DataFrame:
        """The operands of the products under a recipe as a table: backward passes inside the `with` block count too."""
        import pandas as pd

        return pd.DataFrame([asdict(row) for row in self.operands], columns=list(OperandRow.__dataclass_fields__))

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

    Works at every level and on a network without one. No number changes; casts up and down again that O1 leaves out
    between neighbours in an nn.Sequential are made, so that they can be seen.

    Args:
        count: also count values that were flushed to zero or overflowed; each operation is then computed again in
               float64, so it takes several times longer.
        keep:  also keep a copy of each operation's first result, in `results`.
    Returns: a context manager with `rows`, `casts`, `summary()`, `to_frame()`, `predicted_bytes`, `measured_bytes`
             (activations kept for the backward pass, by table and as autograd stored them).
    Raises:  TypeError if `network` is no module.

    >>> from mpkit.casting import auto_mixed_precision
    >>> net = auto_mixed_precision(nn.Linear(3, 2), "O1", torch.bfloat16)
    >>> with ledger(net) as book:
    ...     _ = net(torch.ones(1, 3))
    >>> book.rows[0].inputs, book.rows[0].compute, book.rows[0].output
    (('float32', 'float32', 'float32'), 'bfloat16', ('float32',))
    """
    return Ledger(network, count=count, keep=keep)


def name_of(target: Target) -> str:
    """ "float16" for a dtype, the format's name for an emulated one."""
    return dtype_name(target.fmt if isinstance(target, Emulated) else target)


def _bits(x: Tensor) -> int:
    target = precision(x)
    return target.fmt.bits if isinstance(target, Emulated) else 8 * x.element_size()


def _bytes(x: Tensor) -> int:
    return -(-_plain(x).numel() * _bits(x) // 8)


def _plain(x: Tensor) -> Tensor:
    """Of a nested tensor its values, since that has no shape of numbers."""
    return values_of(x) if x.is_nested else x


def _total(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


# Conversions are what the casts are made of; these give tensors but compute nothing.
_NO_ROW = (ops.LEFT_ALONE | ops.spellings("zeros_like", "ones_like")) - ops.CONVERSIONS
