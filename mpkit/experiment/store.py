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

    @property
    def path(self) -> Path:
        """Its file."""
        return self.folder / f"{self.stem}.npz"

    def arrays(self, prefix: str) -> dict[str, np.ndarray]:
        """Name -> array of what the run returned, "series/" or "trace/". Raises ValueError for a damaged file."""
        held = read_npz(self.path)
        return {name.removeprefix(prefix): array for name, array in held.items() if name.startswith(prefix)}

    def packed(self, arrays: Mapping[str, np.ndarray]) -> bytes:
        """The file of the run."""
        head = {"schema": SCHEMA, **{key: getattr(self, key) for key in _KINDS}}
        head["numbers"] = {k: v if math.isfinite(v) else str(v) for k, v in self.numbers.items()}
        held = io.BytesIO()
        np.savez_compressed(held, head=np.array(canonical(head)), **dict(arrays))  # type: ignore[arg-type]
        return held.getvalue()

    @classmethod
    def unpacked(cls, path: Path) -> Row:
        """The reverse of `packed`. Raises ValueError when the file is none of a run, or that of another."""
        head = json.loads(str(read_npz(path, ["head"])["head"]))
        if not isinstance(head, dict) or head.pop("schema", None) != SCHEMA:
            raise ValueError("the file is of another version of mpkit")
        if wrong := [name for name, kind in _KINDS.items() if type(head.get(name)) is not kind]:
            raise ValueError(f"{wrong[0]} is of another kind than a run writes")
        head["numbers"] = {name: float(value) for name, value in head["numbers"].items()}
        row = cls(**head, folder=path.parent)
        if row.path != path:
            raise ValueError("the file does not hold the cell that it is named after")
        return row


def cell_key(cell: Mapping[str, Any], seed: int) -> str:
    """What is run, as 128 bits."""
    return digest(canonical([cell, seed]))


def code_key(code: str, versions: Mapping[str, str]) -> str:
    """What runs it, as 48 bits."""
    return digest(canonical([code, versions]))[:12]


def sorted_out(result: object) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """What a run returned: name -> number, and name -> array of its series and its trace.

    Raises:  TypeError for anything else, so that the cell fails where its author sees it.
    """
    numbers, arrays = dict[str, float](), dict[str, np.ndarray]()
    if isinstance(result, Trace):
        trace, result = result, {"trace": result, "steps": len(result)}
        if len(trace):
            result |= {"loss": trace.loss, "scale": trace.scale, "skipped": trace.overflow.sum()}
            result |= {"final_loss": trace.loss[-1], "last_scale": trace.scale[-1]}
    if not isinstance(result, Mapping):
        raise TypeError(f"a run returns a dict of numbers and series, or a Trace, got {type(result).__name__}")
    for name, value in result.items():
        if isinstance(value, Trace):
            if "trace/head" in arrays:
                raise TypeError(f"a run returns at most one Trace, {name!r} is the second")
            arrays |= {f"trace/{key}": array for key, array in value.arrays().items()}
            continue
        if isinstance(value, list | tuple):  # of losses that were not read by .item(), say
            value = [_as_array(item) for item in value]
        array = np.asarray(_as_array(value))
        if array.dtype.kind not in "biuf":
            kind = type(value).__name__
            raise TypeError(f"a run returns numbers and series of numbers; {name!r} is {kind} of {array.dtype}")
        if array.ndim:
            arrays[f"series/{name}"] = array
        else:
            numbers[str(name)] = float(array)
    return numbers, arrays


def _as_array(value: object) -> Any:
    """A tensor as an array, wherever it lies; None as NaN, all else as it is."""
    if not isinstance(value, Tensor):
        return math.nan if value is None else value
    value = value.detach().cpu()
    narrow = value.is_floating_point() and value.dtype.itemsize < 4  # NumPy has no bfloat16 and no eight bits
    return (value.float() if narrow else value).numpy()


class Folder:
    """The files of one experiment. Any number of processes may read and write it at the same time.

    Args:    path: ~ is the home folder; a relative one stays where it was though a run changes the working folder.
    Raises:  ValueError when the path is a file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; give the folder that the finished cells are to lie in")

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
            return Row.unpacked(self.file(stem))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError, OSError) as error:
            warning = f"{self.file(stem)} is left out and will be run again: {short(error)}"
            warnings.warn(warning, RuntimeWarning, stacklevel=2)
            return None

    def write(self, stem: str, data: bytes) -> None:
        # not forced to the disk: a file that a power cut has torn is noticed by its checksums and run again
        write_whole(self.file(stem), lambda file: file.write(data), sync=False)

    def begin(self, index: Mapping[str, Any]) -> None:
        """Make the folder where it is missing, end an earlier request to stop, note what is asked for."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / STOP).unlink(missing_ok=True)
        write_whole(self.path / INDEX, lambda file: file.write(index_text(index).encode()), sync=False)

    def read_index(self) -> dict[str, Any]:
        """What the last call asked for: its cells in order, each with label and baseline, and seeds.

        Raises:  FileNotFoundError where that is not there or not readable.
        """
        kinds = {"cell": dict, "label": str, "baseline": int}
        try:
            index = read_json(self.path / INDEX)
            cells = index["cells"]
            fits = index["schema"] == SCHEMA and type(index["code"]) is str
            fits &= {type(seed) for seed in index["seeds"]} <= {int}
            fits &= all(type(c[key]) is kind for c in cells for key, kind in kinds.items())
            if fits and all(0 <= c["baseline"] < len(cells) for c in cells):
                return index
        except (OSError, ValueError, KeyError, TypeError):
            pass
        raise FileNotFoundError(f"no experiment in {self.path}; experiment(run, grid, folder=...) makes one")


def index_text(index: Mapping[str, Any]) -> str:
    """The file that names what was asked for."""
    return json.dumps({"schema": SCHEMA, **index}, indent=1)
