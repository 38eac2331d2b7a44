"""A folder of finished runs: one npz each, written whole or not at all, and a file that says what was asked for."""

from __future__ import annotations

import io
import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mpkit.experiment.identity import canonical, digest
from mpkit.files import read_json, read_npz, short, write_whole
from mpkit.record import Trace

SCHEMA = "mpkit.experiment/2"
MOST = 10**7  # runs of one experiment
INDEX, STOP = "experiment.json", "stop"
_KINDS = {"seed": int, "alone": bool, "seconds": float, "code": str, "error": str}
_KINDS |= dict.fromkeys(("cell", "numbers", "versions"), dict)


@dataclass(frozen=True)
class Row:
    """One finished run.

    Args:
        cell:     the described arguments.
        seed:     the seed.
        alone:    whether no other cell of the same call could run beside it, so that its times can be compared.
        versions: library -> version.
        code:     digest of the code of `run`, or the reader's own word for it.
        numbers:  metric -> number.
        seconds:  wall time of the whole run.
        error:    traceback of a failed run, "" of one that ended well.
        folder:   where its file lies.
    """

    cell: dict[str, Any]
    seed: int
    alone: bool
    versions: dict[str, str]
    code: str
    numbers: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""
    folder: Path = field(default=Path(), compare=False)

    @property
    def stem(self) -> str:
        """The name of its file: what is run, then the code and libraries that ran it."""
        return f"{cell_key(self.cell, self.seed)}-{code_key(self.code, self.versions)}"

    def series(self) -> dict[str, np.ndarray]:
        """Name -> array of every series of the run. Raises ValueError for a damaged file."""
        return _under("series/", read_npz(self.folder / f"{self.stem}.npz"))

    def load_trace(self) -> Trace:
        """The trace that the run recorded. Raises ValueError when it recorded none, or for a damaged file."""
        path = self.folder / f"{self.stem}.npz"
        if not (arrays := _under("trace/", read_npz(path))):
            raise ValueError("this run returned no Trace; with `train` ask for one by trace=True")
        return Trace.of_arrays(arrays, path)


def _under(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def cell_key(cell: Mapping[str, Any], seed: int) -> str:
    """What is run, as 128 bits."""
    return digest(canonical([cell, seed]))


def code_key(code: str, versions: Mapping[str, str]) -> str:
    """What runs it, as 48 bits."""
    return digest(canonical([code, versions]))[:12]


class Outcome:
    """What a run returned, sorted into numbers and arrays.

    Raises:  TypeError for anything else, so that the cell fails where its author sees it.
    """

    def __init__(self, result: object) -> None:
        self.numbers: dict[str, float] = {}
        self.arrays: dict[str, np.ndarray] = {}
        if isinstance(result, Trace):
            result = {"trace": result, **of_trace(result)}
        if not isinstance(result, Mapping):
            raise TypeError(f"a run returns a dict of numbers and series, or a Trace, got {type(result).__name__}")
        for name, value in result.items():
            self._take(str(name), value)

    def _take(self, name: str, value: object) -> None:
        if isinstance(value, Trace):
            if "trace/head" in self.arrays:
                raise TypeError(f"a run returns at most one Trace, {name!r} is the second")
            self.arrays |= {f"trace/{key}": array for key, array in value.arrays().items()}
            return
        if isinstance(value, list | tuple):  # of losses that were not read by .item(), say
            value = [math.nan if item is None else _as_array(item) for item in value]
        array = np.asarray(math.nan if value is None else _as_array(value))
        if array.dtype.kind not in "biuf":
            kind = type(value).__name__
            raise TypeError(f"a run returns numbers and series of numbers; {name!r} is {kind} of {array.dtype}")
        if array.ndim == 0:
            self.numbers[name] = float(array)
        else:
            self.arrays[f"series/{name}"] = array


def _as_array(value: object) -> Any:
    """A tensor as an array, wherever it lies; all else as it is."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    narrow = value.is_floating_point() and value.dtype.itemsize < 4  # NumPy has no bfloat16 and no eight bits
    return (value.float() if narrow else value).numpy()


def of_trace(trace: Trace) -> dict[str, Any]:
    """The numbers and series that a trace holds whatever was trained."""
    if not len(trace):
        return {"steps": 0}
    numbers = {"final_loss": trace.loss[-1], "skipped": int(trace.overflow.sum()), "last_scale": trace.scale[-1]}
    return {"steps": len(trace), **numbers, "loss": trace.loss, "scale": trace.scale}


def packed(row: Row, arrays: Mapping[str, np.ndarray]) -> bytes:
    """The file of a finished run."""
    head = {"schema": SCHEMA, **{key: getattr(row, key) for key in _KINDS}}
    head["numbers"] = {k: v if math.isfinite(v) else str(v) for k, v in row.numbers.items()}
    held = io.BytesIO()
    np.savez_compressed(held, head=np.array(canonical(head)), **dict(arrays))  # type: ignore[arg-type]
    return held.getvalue()


def unpacked(path: Path) -> Row:
    """The row in the file of a finished run. Raises ValueError when it is not what `packed` made."""
    head = json.loads(str(read_npz(path, ["head"])["head"]))
    if not isinstance(head, dict) or head.pop("schema", None) != SCHEMA:
        raise ValueError("the file is of another version of mpkit")
    if wrong := [name for name, kind in _KINDS.items() if type(head.get(name)) is not kind]:
        raise ValueError(f"{wrong[0]} is of another kind than a run writes")
    head["numbers"] = {name: float(value) for name, value in head["numbers"].items()}
    row = Row(**head, folder=path.parent)
    if row.stem != path.stem:
        raise ValueError("the file does not hold the cell that it is named after")
    return row


def index_text(index: Mapping[str, Any]) -> str:
    """The file that names what was asked for."""
    return json.dumps({"schema": SCHEMA, **index}, indent=1)


def _is_index(index: Any) -> bool:
    """Whether a file holds what `index_text` writes: cells, each with a name and a baseline among them, and seeds."""
    if not isinstance(index, dict) or index.get("schema") != SCHEMA or type(index.get("code")) is not str:
        return False
    cells, seeds = index.get("cells"), index.get("seeds")
    if not isinstance(cells, list) or not isinstance(seeds, list) or len(cells) * len(seeds) > MOST:
        return False
    kinds = {"cell": dict, "label": str, "baseline": int}
    fit = all(isinstance(c, dict) and all(type(c.get(key)) is kind for key, kind in kinds.items()) for c in cells)
    return fit and all(0 <= c["baseline"] < len(cells) for c in cells) and all(type(seed) is int for seed in seeds)


class Folder:
    """The files of one experiment. Any number of processes may read and write it at the same time.

    Args:    path: ~ is the home folder; a relative one stays where it was though a run changes the working folder.
    Raises:  ValueError when the path is a file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; give the folder that the finished cells are to lie in")

    def create(self) -> None:
        """Make the folder where it is missing, and end an earlier request to stop."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / STOP).unlink(missing_ok=True)

    @property
    def stopping(self) -> bool:
        """Whether somebody asked to start no further cell."""
        return (self.path / STOP).exists()

    def names(self) -> set[str]:
        """Stems of all finished cells, by their names alone."""
        with os.scandir(self.path) as entries:
            return {e.name[:-4] for e in entries if e.name.endswith(".npz")}

    def file(self, stem: str) -> Path:
        return self.path / f"{stem}.npz"

    def read(self, stem: str) -> Row | None:
        """A finished cell; None when there is none, and with a warning when its file cannot be used."""
        try:
            return unpacked(self.file(stem))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError, OSError) as error:
            warning = f"{self.file(stem)} is left out and will be run again: {short(error)}"
            warnings.warn(warning, RuntimeWarning, stacklevel=2)
            return None

    def write(self, stem: str, data: bytes) -> None:
        # not forced to the disk: a file that a power cut has torn is noticed by its checksums and run again
        write_whole(self.file(stem), lambda file: file.write(data), sync=False)

    def write_index(self, index: Mapping[str, Any]) -> None:
        """What the last call asked for: the order of its cells, its baseline."""
        write_whole(self.path / INDEX, lambda file: file.write(index_text(index).encode()), sync=False)

    def read_index(self) -> dict[str, Any]:
        """What the last call asked for; empty when that is not there or not readable."""
        try:
            index = read_json(self.path / INDEX)
        except (OSError, ValueError):
            return {}
        return index if _is_index(index) else {}
