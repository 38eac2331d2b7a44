"""Files from strangers: read for what they are, refused in a sentence, and nothing in them is ever run.

A reader looks at the sizes that a file names before it makes room for them. Numpy is imported where it is needed:
a worker of an experiment starts without it.
"""

from __future__ import annotations

import errno
import glob
import io
import json
import math
import os
import stat
import sys
import uuid
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

DENSEST = 300  # times that a file may grow when it is unpacked; recorded traces grow 20-fold
SMALL = 2**26  # bytes that it may have unpacked however dense it is
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, and what a user or a process may write
KINDS = "biufcSU"  # kinds of arrays that need no pickle


def short(error: BaseException, length: int = 200) -> str:
    """The first line of what an error says, cut."""
    if not isinstance(error, BaseException):
        raise TypeError(f"error must be an exception, got {type(error).__name__}")
    lines = str(error).strip().splitlines()
    return f"{lines[0] if lines else type(error).__name__}"[:length]


def _named(path: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be the name of a file, got {type(path).__name__}")
    return Path(path)


def regular(path: str | Path) -> Path:
    """The path of what may be read to its end.

    Raises:  ValueError for a device or a pipe, which a link in a stranger's folder can lead to: they may never end.
    """
    path = _named(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"{path} is a device or a pipe, which may never end; copy what it gives into a file")
    return path


def write_whole(path: str | Path, write: Callable[[IO[bytes]], object], *, sync: bool = True) -> None:
    """Write a file beside `path`, then put it in place at once: whoever looks sees the old file or the new one.

    Args:
        path:   its folder is made if it is not there. A link stays one, and the file that it leads to is written; a
                file that is there keeps its permissions. A device or a pipe (/dev/null, /dev/stdout) is written to.
        write:  writes the content into the open file that it is given.
        sync:   force the content to the disk first, so that a power cut leaves a whole file too.
    Raises:  IsADirectoryError for a folder; OSError where the file cannot be written: then nothing has changed.
    """
    path = _named(path)
    if sync is not True and sync is not False:
        raise TypeError(f"sync must be True or False, got {type(sync).__name__}")
    if not callable(write):
        raise TypeError(f"write must be a function of an open file, got {type(write).__name__}")
    path = Path(os.path.realpath(path))
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it")
    if path.exists() and not path.is_file():  # nothing may take the place of a device
        with _naming(path), path.open("wb") as file:
            write(file)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{_draft_of(path)}.{os.getpid()}.{uuid.uuid4().hex[:8]}.part")
    try:
        with _naming(path), draft.open("wb") as file:
            if path.exists():  # before there is anything to read in it
                draft.chmod(stat.S_IMODE(path.stat().st_mode))
            write(file)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An error of the disk, which knows no name, says in which file."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename in (None, ""):
            error.filename = str(path)
        raise


def write_tensors(path: str | Path, state: dict[str, Any]) -> None:
    """What `torch.save` writes, by `write_whole`.

    Raises:  TypeError unless `state` is a dict; OSError as the disk gave it, where torch would speak of positions in
             its archive.
    """
    import torch

    if not isinstance(state, dict):
        raise TypeError(f"state must be a dict, got {type(state).__name__}")

    def write(file: IO[bytes]) -> None:
        heard: Any = _Heard(file)
        try:
            torch.save(state, heard)
        except RuntimeError as error:
            raise heard.error or error from None

    write_whole(path, write)


class _Heard:
    """An open file that remembers why it could not be written."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.flush = file, file.flush
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise


def drafts_of(path: str | Path) -> Iterator[Path]:
    """What killed processes have left of `path` half-written, and what others write at this moment."""
    path = Path(os.path.realpath(_named(path)))
    return path.parent.glob(f"{glob.escape(_draft_of(path))}.*.part")


def _draft_of(path: Path) -> str:
    return f".{path.name[:50]}"  # a name has 255 bytes at most, and a letter up to four


def read_json(path: str | Path) -> Any:
    """What a JSON file holds.

    Raises:  ValueError, which names the file, for anything that is no JSON; OSError.
    """
    path = regular(path)
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))  # editors of Windows begin with a mark
    except RecursionError:
        raise ValueError(f"{path} is no JSON file that can be read: it is nested too deeply") from None
    except ValueError as error:  # of JSON, or of bytes that are no text
        raise ValueError(f"{path} is no JSON file: {short(error)}") from error


def read_npy(path: str | Path) -> np.ndarray:
    """The array of an npy file.

    Raises:  ValueError, which names the file, unless it holds as many bytes as its header says; OSError.
    """
    path = regular(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        try:
            return _array(file, size)
        except OSError:
            raise
        except Exception as error:  # NumPy's parser of headers raises whatever Python's does
            raise ValueError(f"{path} is damaged or no npy file at all: {short(error)}") from error


def read_npz(path: str | Path | io.BytesIO, name: object = None) -> dict[str, np.ndarray]:
    """The arrays of an npz file: a path, or its bytes in memory and the `name` to call them by.

    Raises:  ValueError, which names the file, for one that is damaged, pickled, or would grow more than `DENSEST` times
             beyond `SMALL` bytes; FileNotFoundError.
    """
    source = path if isinstance(path, io.BytesIO) else regular(path)
    try:
        with zipfile.ZipFile(source) as file:
            check_growth(file)
            return {entry.filename.removesuffix(".npy"): _member(file, entry) for entry in file.infolist()}
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {name or path}") from None
    except Exception as error:  # zip files and headers of arrays raise a dozen kinds between them
        raise ValueError(f"{name or path} is damaged or no npz file at all: {short(error)}") from error


def check_growth(file: zipfile.ZipFile) -> None:
    """Raise ValueError for a zip file with a name twice, a foreign compression, or far more inside than it is long.

    Entries that lie in each other are refused too: each byte of the file would count as often as it is unpacked.
    """
    if not isinstance(file, zipfile.ZipFile):
        raise TypeError(f"file must be an open ZipFile, got {type(file).__name__}")
    entries = file.infolist()
    twice = [name for name, times in Counter(e.filename for e in entries).items() if times > 1]
    if twice:
        raise ValueError(f"it holds {twice[0]!r:.80} twice")
    if any(e.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or e.flag_bits & 1 for e in entries):
        raise ValueError("it is encrypted, or compressed in a way that nothing here writes")
    _check_apart(file)
    packed, whole = sum(e.compress_size for e in entries), sum(e.file_size for e in entries)
    if whole > max(SMALL, DENSEST * packed):
        raise ValueError(f"its {packed} bytes would become {whole}")


def _check_apart(file: zipfile.ZipFile) -> None:
    """Raise ValueError where the entries of a zip file are together longer than what lies before its list of them."""
    packed = sum(entry.compress_size for entry in file.infolist())
    if packed > file.start_dir:
        raise ValueError(f"its entries lie in each other: {packed} bytes in {file.start_dir}")


def _member(file: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    with file.open(entry) as raw:
        value = _array(raw, entry.file_size)
        raw.read(1)  # at the end of the entry its checksum is compared
        return value


def _array(file: IO[bytes], size: int) -> np.ndarray:
    """The array in a file of `size` bytes."""
    import numpy as np

    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in read:
        raise ValueError(f"npy of version {version} is not read here")
    shape, fortran, dtype = read[version](file)
    if dtype.kind not in KINDS or dtype.hasobject:
        raise ValueError(f"an array of {dtype} is not read from a file: nothing here unpickles")
    wanted = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or wanted != size - file.tell():
        raise ValueError(
            f"an array of shape {shape} and {dtype} needs {wanted} bytes, and there are {size - file.tell()}"
        )
    held = bytearray(wanted)
    view, filled = memoryview(held), 0
    while filled < wanted:
        got = file.readinto(view[filled : filled + 2**20])  # type: ignore[attr-defined]
        if not got:
            raise ValueError(f"it ends after {filled} of {wanted} bytes")
        filled += got
    if dtype.kind == "b" and held.translate(None, b"\0\1"):
        raise ValueError("a truth value is neither 0 nor 1")
    if dtype.kind == "U" and (np.frombuffer(held, np.dtype("u4").newbyteorder(dtype.byteorder)) > sys.maxunicode).any():
        raise ValueError("a text has a character that Unicode does not have")
    return np.frombuffer(held, dtype).reshape(shape, order="F" if fortran else "C")


def read_tensors(path: str | Path, device: torch.device | str = "cpu") -> Any:
    """What `torch.save` wrote of tensors, numbers, text, lists and dicts.

    Raises:  ValueError, which names the file, for one of another kind, or whose tensors are larger than it is; OSError.
    """
    import torch

    with regular(path).open("rb") as file:
        try:
            with zipfile.ZipFile(file) as records:
                _check_apart(records)
                sizes = Counter(e.file_size for e in records.infolist())
                if any(e.compress_type != zipfile.ZIP_STORED for e in records.infolist()):
                    raise ValueError("it is compressed, which torch.save does not do")
            file.seek(0)
            state = torch.load(file, map_location=device, weights_only=True)
            _check_storages(state, sizes)
        except Exception as error:  # torch raises UnpicklingError, RuntimeError and more for a damaged file
            raise ValueError(
                f"{path} is no checkpoint that can be read ({type(error).__name__}: {short(error)})"
            ) from error
    return state


def _check_storages(state: object, sizes: Counter[int]) -> None:
    """Each storage has a record of its size: torch takes the number in the pickle, and would read beyond the record."""
    whole = sum(size * times for size, times in sizes.items())
    seen: dict[int, int] = {}
    for tensor in _tensors(state):
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        if tensor.numel() * tensor.element_size() > 3 * whole:
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is larger than the file")
    short_of = Counter(size for place, size in seen.items() if place) - sizes
    if short_of:
        raise ValueError(f"a storage of {next(iter(short_of))} bytes has no record of that size")


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors in nested dicts and sequences, without a recursion that a file could make too deep."""
    import torch

    open_, met = [value], {id(value)}
    while open_:
        item = open_.pop()
        if isinstance(item, torch.Tensor):
            yield item
            continue
        inner = item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple | set) else ()
        for part in inner:
            if id(part) not in met:
                met.add(id(part))
                open_.append(part)
