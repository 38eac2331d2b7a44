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
INDEX = "experiment.json"


@dataclass(frozen=True)
class Row:
    """One run, finished or to be made.

    Args:
        folder:   where its file lies.
        cell:     the described arguments.
        seed:     the seed.
        alone:    whether no other cell of the same call could run beside it, so that its times can be compared.
        versions: library -> version.
        code:     digest of the code of `run`, or the reader's own word for it.
        numbers:  metric -> number.
        seconds:  wall time of the whole run.
        error:    traceback of a failed run, "" of one that ended well.
    """

    folder: Path
    cell: dict[str, Any]
    seed: int
    alone: bool
    versions: dict[str, str]
    code: str
    numbers: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""

    @property
    def path(self) -> Path:
        """Its file, named after what is run, and after the code and the libraries that run it."""
        return path_of(self.folder, self.cell, self.seed, code_key(self.code, self.versions))

    def series(self) -> dict[str, np.ndarray]:
        """Name -> series that the run returned. Raises ValueError for a damaged file."""
        held = read_npz(self.path)
        return {name.removeprefix("series/"): array for name, array in held.items() if name.startswith("series/")}

    @classmethod
    def read(cls, path: Path) -> Row:
        """The row of a file. Raises ValueError and more when the file is none of a run, or that of another."""
        head = json.loads(str(read_npz(path, ["head"])["head"]))
        row = cls(path.parent, **{key: kind(head[key]) for key, kind in _HEAD.items()})
        if head["schema"] != SCHEMA or row.path != path:
            raise ValueError("the file is of another version of mpkit, or not of the cell that it is named after")
        return row

    def write(self, series: Mapping[str, np.ndarray]) -> Row:
        """Write its file. Raises OSError of the disk."""
        head = json.dumps({"schema": SCHEMA, **{key: getattr(self, key) for key in _HEAD}})
        arrays: dict[str, Any] = {"head": np.array(head), **{f"series/{name}": held for name, held in series.items()}}
        # not forced to the disk: a file that a power cut has torn is noticed by its checksums and run again
        write_whole(self.path, lambda file: np.savez_compressed(file, **arrays), sync=False)
        return self


def _numbers(held: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in held.items()}


_HEAD: dict[str, Any] = {"cell": dict, "seed": int, "alone": bool, "versions": dict, "code": str, "numbers": _numbers}
_HEAD |= {"seconds": float, "error": str}


def path_of(folder: Path, cell: Mapping[str, Any], seed: int, code: str) -> Path:
    """Where a run lies: 128 bits of what is run, then the key of the code."""
    return folder / f"{digest(canonical([cell, seed]))}-{code}.npz"


def code_key(code: str, versions: Mapping[str, str]) -> str:
    """What runs it, as 48 bits."""
    return digest(canonical([code, versions]))[:12]


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


def read_rows(paths: Iterable[Path]) -> Iterator[Row]:
    """The finished runs among these; with a warning where a file cannot be used."""
    for path in filter(os.path.lexists, paths):
        try:
            yield Row.read(path)
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
    try:
        held = read_json(folder / INDEX)
        known = {SCHEMA: range(len(held["cells"]))}[held["schema"]]
        cells = [
            {"cell": dict(c["cell"]), "label": str(c["label"]), "baseline": known.index(c["baseline"])}
            for c in held["cells"]
        ]
        return {"seeds": [int(seed) for seed in held["seeds"]], "cells": cells, "code": str(held["code"])}
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise FileNotFoundError(f"no experiment in {folder}; experiment(run, grid, folder=...) makes one") from error
