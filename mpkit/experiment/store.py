"""A folder of finished runs: one npz each, written whole or not at all, and a file that says what was asked for."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mpkit.experiment.identity import canonical, digest
from mpkit.files import read_json, read_npz, short, write_whole

SCHEMA = "mpkit.experiment/2"
MOST = 10**7  # runs of one experiment
INDEX = "experiment.json"
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
        return file_of(self.folder, self.stem)

    def series(self) -> dict[str, np.ndarray]:
        """Name -> series that the run returned. Raises ValueError for a damaged file."""
        held = read_npz(self.path)
        return {name.removeprefix("series/"): array for name, array in held.items() if name.startswith("series/")}

    @classmethod
    def read(cls, path: Path) -> Row:
        """The row of a file. Raises ValueError and more when the file is none of a run, or that of another."""
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


def file_of(folder: Path, stem: str) -> Path:
    """Where a finished run lies."""
    return folder / f"{stem}.npz"


def sorted_out(result: object) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """What a run returned: name -> number, and name -> array of its series.

    Raises:  TypeError for anything else, so that the cell fails where its author sees it.
    """
    numbers, series = dict[str, float](), dict[str, np.ndarray]()
    if not isinstance(result, Mapping):
        raise TypeError(f"a run returns a dict of numbers and series, got {type(result).__name__}")
    for name, value in result.items():
        # a list of losses that were not read by .item(), say
        array = np.asarray([_as_array(v) for v in value] if isinstance(value, list | tuple) else _as_array(value))
        if array.dtype.kind not in "biuf":
            kind = type(value).__name__
            raise TypeError(f"a run returns numbers and series of numbers; {name!r} is {kind} of {array.dtype}")
        if array.ndim:
            series[str(name)] = array
        else:
            numbers[str(name)] = float(array)
    return numbers, series


def _as_array(value: object) -> Any:
    """A tensor as an array, wherever it lies; None as NaN, all else as it is."""
    if not isinstance(value, Tensor):
        return math.nan if value is None else value
    narrow = value.is_floating_point() and value.dtype.itemsize < 4  # NumPy has no bfloat16 and no eight bits
    return (value.float() if narrow else value).numpy(force=True)


def store(folder: Path, row: Row, series: Mapping[str, np.ndarray]) -> None:
    """Write the file of a run. Raises OSError of the disk."""
    head = {"schema": SCHEMA, **{key: getattr(row, key) for key in _KINDS}}
    head["numbers"] = {k: v if math.isfinite(v) else str(v) for k, v in row.numbers.items()}
    arrays: dict[str, Any] = {"head": np.array(canonical(head)), **{f"series/{k}": v for k, v in series.items()}}
    # not forced to the disk: a file that a power cut has torn is noticed by its checksums and run again
    write_whole(file_of(folder, row.stem), lambda file: np.savez_compressed(file, **arrays), sync=False)


def read_rows(folder: Path, stems: Iterable[str]) -> Iterator[Row]:
    """The finished runs among these; with a warning where a file cannot be used."""
    for path in (file_of(folder, stem) for stem in stems):
        try:
            yield Row.read(path)
        except FileNotFoundError:
            continue
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError, OSError) as error:
            warning = f"{path} is left out and will be run again: {short(error)}"
            warnings.warn(warning, RuntimeWarning, stacklevel=2)


def folder_at(path: str | os.PathLike[str]) -> Path:
    """The folder of an experiment: ~ is the home folder; a relative one stays where it was though a run changes the
    working folder. Raises ValueError when the path is a file."""
    folder = Path(path).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give the folder that the finished cells are to lie in")
    return folder


def index_text(index: Mapping[str, Any]) -> str:
    """The file that names what was asked for: cells in order, each with label and baseline, seeds, key of the code."""
    return json.dumps({"schema": SCHEMA, **index}, indent=1)


def read_index(folder: Path) -> dict[str, Any]:
    """What the last call asked for.

    Raises:  FileNotFoundError where that is not there or not readable.
    """
    kinds = {"cell": dict, "label": str, "baseline": int}
    try:
        index = read_json(folder / INDEX)
        cells, seeds = index["cells"], index["seeds"]
        fits = index["schema"] == SCHEMA and type(index["code"]) is str and {type(seed) for seed in seeds} <= {int}
        fits &= all(type(c[key]) is kind for c in cells for key, kind in kinds.items())
        fits &= all(0 <= c["baseline"] < len(cells) for c in cells)
    except (OSError, ValueError, KeyError, TypeError):
        fits = False
    if not fits:
        raise FileNotFoundError(f"no experiment in {folder}; experiment(run, grid, folder=...) makes one")
    return index
