"""Files from strangers: read for what they are, refused in a sentence, written whole or not at all.

Nothing in a file is ever run, and the sizes that a zip file names are looked at before anything is unpacked. torch is
imported where it is needed: the command starts without it.
"""

from __future__ import annotations

import json
import os
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

DENSEST = 300  # times that a file may grow when it is unpacked; recorded traces grow 20-fold
SMALL = 2**26  # bytes that it may have unpacked however dense it is


def short(error: BaseException, length: int = 200) -> str:
    """The first line of what an error says, cut."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:length]


def regular(path: str | Path) -> Path:
    """The path of what may be read to its end, and be replaced.

    Raises:  ValueError for a device or a pipe, which a link in a stranger's folder can lead to: they may never end.
    """
    path = Path(path)
    if os.path.exists(path) and not (path.is_file() or path.is_dir()):  # False for a name that is too long
        raise ValueError(f"{path} is a device or a pipe, which may never end; name a file")
    return path


def write_whole(path: str | Path, write: Callable[[IO[bytes]], object], *, sync: bool = True) -> None:
    """Write a file beside `path`, then put it in place at once: whoever looks sees the old file or the new one.

    Args:
        path:   its folder is made if it is not there. A link stays one, and the file that it leads to is written; a
                file that is there keeps its permissions.
        write:  writes the content into the open file that it is given.
        sync:   force the content to the disk first, so that a power cut leaves a whole file too.
    Raises:  ValueError for a device or a pipe, whose place nothing may take; OSError where the file cannot be written:
             then nothing has changed.
    """
    path = regular(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    # a name has 255 bytes at most, and a letter up to four
    draft = path.with_name(f".{path.name[:50]}.{uuid.uuid4().hex}.part")
    try:
        with draft.open("wb") as file:
            if path.is_file():  # before there is anything to read in it
                draft.chmod(path.stat().st_mode & 0o7777)
            write(file)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def read_json(path: str | Path) -> Any:
    """What a JSON file holds. Raises ValueError, which names the file, for anything that is no JSON; OSError."""
    with refused(path := regular(path), "JSON"):
        return json.loads(path.read_text(encoding="utf-8-sig"))  # editors of Windows begin with a mark


def read_npy(path: str | Path) -> np.ndarray:
    """The array of an npy file. Raises ValueError, which names the file, for a damaged or pickled one; OSError."""
    with refused(path := regular(path), "npy"):
        return np.load(path, allow_pickle=False)


def read_npz(path: str | Path, names: Iterable[str] = ()) -> dict[str, np.ndarray]:
    """The arrays of an npz file, or those of these names alone.

    Raises:  ValueError, which names the file, for a damaged or pickled one; OSError.
    """
    with refused(path := regular(path), "npz"), zipfile.ZipFile(path) as entries:
        check_growth(entries)
        with np.load(path, allow_pickle=False) as held:
            arrays = {name: held[name] for name in names or held}
        for text in (array for array in arrays.values() if array.dtype.kind == "U"):
            text.tolist()  # raises where a letter is none of Unicode
        return arrays


def read_tensors(path: str | Path, device: Any = "cpu") -> Any:
    """What `torch.save` wrote of tensors, numbers, text, lists and dicts.

    Raises:  ValueError, which names the file, for one of another kind, or whose tensors are larger than it is; OSError.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    with refused(path := regular(path), "checkpoint"), zipfile.ZipFile(path) as entries:
        there = check_growth(entries)
        state = torch.load(path, map_location=device, weights_only=True)
        storages = [leaf.untyped_storage() for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
        # torch believes the number in the pickle, and would read beyond its record
        if (needed := sum({s.data_ptr(): s.nbytes() for s in storages}.values())) > there:
            raise ValueError(f"its tensors need {needed} bytes, and it holds {there}")
        return state


def check_growth(file: zipfile.ZipFile) -> int:
    """The bytes that a zip file holds when it is unpacked.

    Raises:  ValueError where that is far more than it is long, or where its entries lie in each other.
    """
    packed, whole = (sum(getattr(e, key) for e in file.infolist()) for key in ("compress_size", "file_size"))
    if packed > file.start_dir:
        raise ValueError(f"its entries lie in each other: {packed} bytes in {file.start_dir}")
    if whole > max(SMALL, DENSEST * packed):
        raise ValueError(f"its {packed} bytes would become {whole}")
    return whole


@contextmanager
def refused(path: Path, kind: str) -> Iterator[None]:
    """Whatever a damaged file raises, of a dozen kinds, is a ValueError that names it."""
    try:
        yield
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as error:
        raise ValueError(f"{path} is damaged or no {kind} file at all: {short(error)}") from error
