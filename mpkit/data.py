"""Real inputs: the 8x8 digits that are committed in `data/`, and MNIST from the user's disk."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import tempfile
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mpkit.arguments import check_choice, check_count, checked
from mpkit.files import read_npz, regular

__all__ = ["data_dir", "digits", "mnist"]

_DIGITS_SHA256 = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"  # images, then labels
_DIGITS_TRAIN = 1500  # the last 297 images, by other writers, are the test set

_MNIST_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_AGAIN = "delete it and call mnist(download=True), or copy it again"
_MNIST = {  # file name without -ubyte.gz -> shape, SHA-256 of the decompressed content
    "train-images-idx3": ((60000, 28, 28), "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    "train-labels-idx1": ((60000,), "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    "t10k-images-idx3": ((10000, 28, 28), "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
    "t10k-labels-idx1": ((10000,), "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
}


def data_dir() -> Path:
    """The folder with the lessons' data: `MPKIT_DATA` if it holds `digits.npz`, else the one that came with mpkit.

    That is `share/data` inside an installed package and `data/` beside the package in a checkout. `MPKIT_DATA` may
    also hold MNIST alone, in its folder `mnist`.
    """
    asked = os.environ.get("MPKIT_DATA")
    if asked and (Path(asked).expanduser() / "digits.npz").exists():
        return Path(asked).expanduser()
    installed = Path(__file__).resolve().parent / "share" / "data"
    return installed if installed.exists() else installed.parents[2] / "data"


def digits(split: str = "train", size: int = 28) -> tuple[Tensor, Tensor]:
    """The 1,797 handwritten digits of the UCI set that scikit-learn ships, 8x8 pixels each.

    Args:
        split:  "train" (the first 1,500), "test" (the last 297) or "all".
        size:   pixels per side; 8 is the original, anything larger is interpolated (bilinear).
    Returns: images (N, 1, size, size) float32 in [0, 1] and labels (N,) int64.
    Raises:  TypeError for a split that is no text or a size that is no whole number; ValueError for another split or a
             smaller size, or a file that is damaged; FileNotFoundError if it is missing.
    Source:  Alpaydin and Kaynak 1998, "Optical recognition of handwritten digits", test part; see data/README.md.
    """
    parts = {"train": slice(_DIGITS_TRAIN), "test": slice(_DIGITS_TRAIN, None), "all": slice(None)}
    check_choice("split", split, parts)
    check_count("size", size, low=8)
    path = data_dir() / "digits.npz"
    try:
        held = read_npz(path, ["images", "labels"])
        pixels, labels = held["images"], held["labels"]
        if hashlib.sha256(pixels.tobytes() + labels.tobytes()).hexdigest() != _DIGITS_SHA256:
            raise ValueError("it holds other images than the 1,797 digits")
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({error}); restore it with `git checkout data/digits.npz`") from error
    images = torch.from_numpy(pixels[parts[split]]).float().div_(16).unsqueeze(1)
    if size != 8:
        images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    return images, torch.from_numpy(labels[parts[split]]).long()


@checked
def mnist(
    root: str | os.PathLike[str] | None = None, download: bool = False, *, split: Literal["train", "test"] = "train"
) -> tuple[Tensor, Tensor]:
    """MNIST from its four standard idx.gz files.

    Args:
        root:      the folder that holds the files; None means `$MPKIT_DATA/mnist`, then the user's cache.
        download:  fetch missing files into the folder first, with a progress bar (12 MB).
        split:     "train" (60,000 images) or "test" (10,000).
    Returns: images (N, 1, 28, 28) float32 in [0, 1] and labels (N,) int64.
    Raises:  FileNotFoundError if files are missing and `download` is False; ValueError, naming the file, if one has
             another content (its size and SHA-256 say so); ConnectionError if a download fails.
             Existing files are never overwritten, and a broken download leaves nothing behind.
    Source:  LeCun, Cortes, Burges, "The MNIST database of handwritten digits".
    """
    prefixes = {"train": "train", "test": "t10k"}
    if root is None and os.environ.get("MPKIT_DATA"):
        root = Path(os.environ["MPKIT_DATA"]) / "mnist"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "mpkit" / "mnist"
    folder = Path(cache if root is None else root).expanduser()
    for name in _MNIST if download else ():
        if not (folder / f"{name}-ubyte.gz").exists():
            _download(name, folder)
    images, labels = (_read_idx(folder, f"{prefixes[split]}-{part}") for part in ("images-idx3", "labels-idx1"))
    return torch.from_numpy(images).float().div_(255).unsqueeze(1), torch.from_numpy(labels).long()


def _read_idx(folder: Path, name: str) -> np.ndarray:
    """One idx.gz file -> uint8 array of the shape it must have, every byte checked first."""
    path, (shape, sha256) = folder / f"{name}-ubyte.gz", _MNIST[name]
    if not path.exists():
        way_out = "name a folder that has it by root= or MPKIT_DATA, or call mnist(download=True) to fetch it (12 MB)"
        raise FileNotFoundError(f"{path} is missing; {way_out}")
    header = 4 + 4 * len(shape)  # a magic number and the shape
    try:
        with gzip.open(regular(path)) as file:
            content = file.read(header + math.prod(shape) + 1)  # no more, however much the file would unpack to
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"{path} is not a whole gzip file ({error}); {_AGAIN}") from error
    if (got := hashlib.sha256(content).hexdigest()) != sha256:
        raise ValueError(f"{path} has a content of SHA-256 {got[:12]}... instead of {sha256[:12]}...; {_AGAIN}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy()


def _download(name: str, folder: Path) -> None:
    """Fetch one MNIST file beside its final place, check it there, then move it: never a half file."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
        part = Path(scratch) / f"{name}-ubyte.gz"
        try:
            torch.hub.download_url_to_file(_MNIST_MIRROR + part.name, str(part))
        except OSError as error:
            way_out = f"check the network, or put the MNIST files into {folder}"
            raise ConnectionError(f"could not download {part.name} ({error}); {way_out}") from error
        _read_idx(part.parent, name)
        part.replace(folder / part.name)
