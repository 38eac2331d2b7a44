"""A folder of finished cells: one small JSON file each, arrays beside it as npz, written whole or not at all.

Neither torch nor NumPy is loaded before a cell needs it: a worker starts by importing this.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import sys
import time
import uuid
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeGuard

from mpkit.files import read_json, read_npz, regular, short, write_whole

if TYPE_CHECKING:
    import numpy as np

    from mpkit.record import Trace

try:
    import fcntl
except ImportError:  # Windows: two processes on one folder may then do the same cell twice, with the same result
    fcntl = None  # type: ignore[assignment]

SCHEMA = "mpkit.experiment/1"
_HEAD, _MIDDLE = '{"sha256":"', '","row":'
_KINDS = {  # what a stored row holds
    **dict.fromkeys(("cell", "numbers", "versions"), (dict,)),
    **dict.fromkeys(("timed", "alone"), (bool,)),
    **dict.fromkeys(("code", "error", "arrays", "trace"), (str,)),
    "seed": (int,),
    "seconds": (int, float),
}
MOST = 10**7  # runs of one experiment
INDEX, STOP, TOKEN = "experiment.json", "stop", "token"


def canonical(value: object) -> str:
    """JSON in which equal values give equal text; nothing but finite numbers."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(text: str | bytes) -> str:
    """128 bits of SHA-256 in hex."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:32]


@dataclass(frozen=True)
class Row:
    """One finished run.

    Args:
        cell:     the described arguments.
        seed:     the seed.
        timed:    whether this is a run for its time alone, made while no other ran.
        numbers:  metric -> number.
        alone:    whether no other cell of the same call could run beside it, so that its times can be compared.
        seconds:  wall time of the whole run.
        versions: library -> version.
        code:     digest of the code of `run`.
        error:    traceback of a failed run, "" of one that ended well.
        arrays:   digest of the npz with the series, "" without one; likewise `trace`.
    """

    cell: dict[str, Any]
    seed: int
    timed: bool
    numbers: dict[str, float]
    alone: bool
    seconds: float
    versions: dict[str, str]
    code: str
    error: str = ""
    arrays: str = ""
    trace: str = ""
    folder: Path = field(default=Path(), compare=False)

    @property
    def stem(self) -> str:
        """The name of its files: what is run, then the code and libraries that ran it."""
        return f"{cell_key(self.cell, self.seed, self.timed)}-{code_key(self.code, self.versions)}"

    def series(self) -> dict[str, np.ndarray]:
        """Name -> array of every series of the run.

        Raises:  ValueError when the file was changed since it was written.
        """
        if not self.arrays:
            return {}
        return read_npz(io.BytesIO(self._read("npz", self.arrays)), self.folder / f"{self.stem}.npz")

    def load_trace(self) -> Trace:
        """The trace that the run recorded.

        Raises:  ValueError when it recorded none, or the file was changed since it was written.
        """
        if not self.trace:
            raise ValueError("this run returned no Trace; with `train` ask for one by trace=True")
        from mpkit.record import Trace

        self._read("trace.npz", self.trace)
        return Trace.load(self.folder / f"{self.stem}.trace.npz")

    def _read(self, ending: str, expected: str) -> bytes:
        path = self.folder / f"{self.stem}.{ending}"
        data = regular(path).read_bytes() if path.exists() else b""
        if digest(data) != expected:
            raise ValueError(
                f"{path} is not what the run wrote; delete it, and the same call of experiment makes it anew"
            )
        return data

    @property
    def whole(self) -> bool:
        """Whether the arrays are there as they were written."""
        try:
            for ending, expected in (("npz", self.arrays), ("trace.npz", self.trace)):
                if expected:
                    self._read(ending, expected)
        except ValueError:
            return False
        return True


def cell_key(cell: Mapping[str, Any], seed: int, timed: bool) -> str:
    """What is run, as 128 bits."""
    return digest(canonical([cell, seed, timed]))


def code_key(code: str, versions: Mapping[str, str]) -> str:
    """What runs it, as 48 bits."""
    return digest(canonical([code, versions]))[:12]


class Outcome:
    """What a run returned, sorted into numbers, series and a trace.

    Raises:  TypeError for anything else, so that the cell fails where its author sees it.
    """

    def __init__(self, result: object) -> None:
        self.numbers: dict[str, float] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self.trace: Trace | None = None
        if _is_trace(result):
            result = {"trace": result, **of_trace(result)}
        if not isinstance(result, Mapping):
            raise TypeError(f"a run returns a dict of numbers and series, or a Trace, got {type(result).__name__}")
        for name, value in result.items():
            self._take(str(name), value)

    def _take(self, name: str, value: object) -> None:
        if _is_trace(value):
            if self.trace is not None:
                raise TypeError(f"a run returns at most one Trace, {name!r} is the second")
            self.trace = value
            return
        if value is None:
            self.numbers[name] = math.nan
            return
        if isinstance(value, list | tuple):  # of losses that were not read by .item(), say
            value = [math.nan if item is None else _as_array(item) for item in value]
        value = _as_array(value)
        if isinstance(value, bool | int | float):
            self.numbers[name] = float(value)
            return
        import numpy as np

        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            kind = type(value).__name__
            raise TypeError(f"a run returns numbers and series of numbers; {name!r} is {kind} of {array.dtype}")
        if array.ndim == 0:
            self.numbers[name] = float(array)
        else:
            self.arrays[name] = array


def _as_array(value: Any) -> object:
    """A tensor as an array, wherever it lies; all else as it is."""
    if not hasattr(value, "detach"):
        return value
    tensor = value.detach().cpu()
    narrow = tensor.is_floating_point() and tensor.dtype.itemsize < 4  # NumPy has no bfloat16 and no eight bits
    return (tensor.float() if narrow else tensor).numpy()


def _is_trace(value: object) -> TypeGuard[Trace]:
    record = sys.modules.get("mpkit.record")  # who made a trace has loaded it
    return record is not None and isinstance(value, record.Trace)


def of_trace(trace: Trace) -> dict[str, Any]:
    """The numbers and series that a trace holds whatever was trained."""
    if not len(trace):
        return {"steps": 0}
    return {
        "steps": len(trace),
        "final_loss": trace.loss[-1],
        "skipped": int(trace.overflow.sum()),
        "last_scale": trace.scale[-1],
        "loss": trace.loss,
        "scale": trace.scale,
    }


def files_of(row: Row, outcome: Outcome | None) -> dict[str, bytes]:
    """Ending -> bytes of the files of a finished run, the one that makes it count last."""
    files: dict[str, bytes] = {}
    if outcome is not None and outcome.arrays:
        import numpy as np

        held = io.BytesIO()
        with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as packed:  # np.savez refuses the name "file"
            for name, array in outcome.arrays.items():
                with packed.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, array, allow_pickle=False)
        files["npz"] = held.getvalue()
    if outcome is not None and outcome.trace is not None:
        held = io.BytesIO()
        outcome.trace.write(held)
        files["trace.npz"] = held.getvalue()
    head = {
        name: digest(files[end]) if end in files else "" for name, end in (("arrays", "npz"), ("trace", "trace.npz"))
    }
    keys = ("cell", "seed", "timed", "alone", "seconds", "versions", "code", "error")
    numbers = {k: v if math.isfinite(v) else str(v) for k, v in row.numbers.items()}
    body = canonical({"schema": SCHEMA, **{k: getattr(row, k) for k in keys}, "numbers": numbers, **head})
    files["json"] = f"{_HEAD}{digest(body)}{_MIDDLE}{body}}}".encode()
    return files


def parsed(text: str, folder: Path) -> Row:
    """The row in a JSON file.

    Raises:  ValueError when it is not what `files_of` made.
    """
    start = len(_HEAD) + 32
    body = text[start + len(_MIDDLE) : -1]
    if not text.startswith(_HEAD) or not text.endswith("}") or text[len(_HEAD) : start] != digest(body):
        raise ValueError("the file was cut or changed after it was written")
    held = json.loads(body)
    if not isinstance(held, dict) or held.pop("schema", None) != SCHEMA:
        raise ValueError("the file is of another version of mpkit")
    row = Row(**held, folder=folder)
    wrong = [name for name, kind in _KINDS.items() if type(getattr(row, name)) not in kind]
    if wrong or not {type(v) for v in row.numbers.values()} <= {int, float, str}:
        raise ValueError(f"{wrong[0] if wrong else 'numbers'} is of another kind than a run writes")
    return replace(row, numbers={name: float(value) for name, value in row.numbers.items()})


def index_text(index: Mapping[str, Any]) -> str:
    """The file that names what was asked for."""
    return json.dumps({"schema": SCHEMA, **index}, indent=1)


def _is_index(index: object) -> bool:
    """Whether a file holds what `index_text` writes: cells, each with a name and a baseline among them, and seeds."""
    if not isinstance(index, dict) or index.get("schema") != SCHEMA:
        return False
    cells, seeds = index.get("cells"), index.get("seeds")
    if not isinstance(cells, list) or not isinstance(seeds, list) or len(cells) * len(seeds) > MOST:
        return False
    fits = all(
        isinstance(c, dict)
        and isinstance(c.get("cell"), dict)
        and isinstance(c.get("label"), str)
        and type(c.get("baseline")) is int
        and 0 <= c["baseline"] < len(cells)
        for c in cells
    )
    kinds = isinstance(index.get("apart"), bool) and isinstance(index.get("code"), str)
    return fits and kinds and all(type(seed) is int for seed in seeds)


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether an open file is still the one that its path names."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


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
        if not self.token:  # whole or not there: another process may read it at any moment
            whole, token = self.path / f"{uuid.uuid4().hex}.tmp", uuid.uuid4().hex
            try:
                whole.write_text(token)
                os.link(whole, self.path / TOKEN)
            except FileExistsError:
                pass
            except OSError:  # a file system without hard links, or a full disk
                write_whole(self.path / TOKEN, lambda file: file.write(token.encode()))
            finally:
                whole.unlink(missing_ok=True)

    @property
    def token(self) -> str:
        """What tells this folder from any other of the same path, on another machine say."""
        path = self.path / TOKEN
        return regular(path).read_text() if path.exists() else ""

    @property
    def stopping(self) -> bool:
        """Whether somebody asked to start no further cell."""
        return (self.path / STOP).exists()

    def names(self) -> set[str]:
        """Stems of all finished cells, by their names alone."""
        with os.scandir(self.path) as entries:
            return {e.name[:-5] for e in entries if e.name.endswith(".json") and e.name != INDEX}

    def read(self, stem: str) -> Row | None:
        """A finished cell; None when there is none, and with a warning when its file cannot be used."""
        path = self.path / f"{stem}.json"
        try:
            row = parsed(regular(path).read_bytes().decode(), self.path)
            if row.stem != stem:
                raise ValueError("the file does not hold the cell that it is named after")
            return row
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, RecursionError, OverflowError, OSError) as error:
            warnings.warn(f"{path} is left out and will be run again: {short(error)}", RuntimeWarning, stacklevel=2)
            return None

    def has(self, stem: str) -> bool:
        """Whether a cell is finished and all its files are whole."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = self.read(stem)
        return row is not None and row.whole

    def write(self, stem: str, files: Mapping[str, bytes]) -> None:
        """All files of a cell, each under a name of its own until it is whole, the JSON last."""
        for ending in sorted(files, key=lambda e: e == "json"):
            self._replace(self.path / f"{stem}.{ending}", files[ending])

    def _replace(self, path: Path, data: bytes) -> None:
        # not forced to the disk: a file that a power cut has torn is noticed by its digest and run again
        write_whole(path, lambda file: file.write(data), sync=False)

    def write_index(self, index: Mapping[str, Any]) -> None:
        """What the last call asked for: the order of its cells, its baseline."""
        self._replace(self.path / INDEX, index_text(index).encode())

    def read_index(self) -> dict[str, Any]:
        """What the last call asked for; empty when that is not there or not readable."""
        try:
            index = read_json(self.path / INDEX)
        except (OSError, ValueError):
            return {}
        return index if _is_index(index) else {}

    def remove(self, stem: str) -> None:
        """Forget a cell."""
        for ending in ("json", "npz", "trace.npz"):
            (self.path / f"{stem}.{ending}").unlink(missing_ok=True)

    def sweep(self, older_than: float = 86400.0) -> None:
        """Remove what killed processes left half written, once it is `older_than` seconds old."""
        limit = time.time() - older_than
        with os.scandir(self.path) as entries:
            drafts = [Path(e) for e in entries if e.name.endswith((".part", ".tmp", ".lock"))]
        for path in drafts:
            with contextlib.suppress(FileNotFoundError):  # another call has put it in its place meanwhile
                if path.stat().st_mtime < limit:
                    path.unlink()

    @contextlib.contextmanager
    def claim(self, stem: str) -> Iterator[bool]:
        """Whether this process may run the cell now; False while another one, which is alive, runs it.

        The kernel gives the claim back when its process ends, however it ends.
        """
        if fcntl is None:
            yield True
            return
        path = self.path / f"{stem}.lock"
        while True:
            with path.open("wb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    yield False
                    return
                except OSError:  # a file system without locks
                    yield True
                    return
                if not _is_at(file, path):  # its owner gave the claim back between our opening and our locking
                    continue
                try:
                    yield True
                finally:
                    path.unlink(missing_ok=True)
                return

    def begun(self, stems: Iterable[str]) -> list[str]:
        """Which of these cells were begun and neither finished nor given up: those of a process that was killed."""
        if fcntl is None:
            return []
        found = []
        for stem in stems:
            path = self.path / f"{stem}.lock"
            if path.exists():
                with contextlib.suppress(OSError), path.open("r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    found.append(stem)
        return found
