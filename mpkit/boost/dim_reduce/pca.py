"""Principal components of weight snapshots, and the files through which ranks share them."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch.distributed as dist
from torch import nn

from mpkit.arguments import check_choice, check_count, check_kind, check_number
from mpkit.boost.dim_reduce.snapshots import read_snapshots
from mpkit.files import read_npy, write_whole

FULL_NAME = "pca_mat_temp.npy"
MARKER = "save_pca_end.txt"
MOST_RANKS = 2**16
OVERSAMPLING = 10
POLL_SECONDS = 0.1


class NormalDraws(Protocol):
    """What `pca_matrix` needs of a generator: numpy's Generator and RandomState both have it."""

    def normal(self, *, size: tuple[int, int]) -> np.ndarray:
        """Standard normal numbers of a shape."""


def pca_matrix(
    data: np.ndarray,
    n_components: int,
    *,
    method: Literal["randomized", "full"] = "randomized",
    generator: NormalDraws | None = None,
) -> np.ndarray:
    """The first principal components of `data`, one per row, with orthonormal rows.

    Shapes:  data (samples, weights) -> (n_components, weights) float64. `data` is not changed.
    Edges:   as many components as samples: the last one is noise, since centring costs one dimension; a warning.
             Signs: "randomized" makes the largest entry of each component's sample side positive, "full" that of the
             component itself.
    Args:
        generator: draws the random directions of "randomized"; None: numpy's default_rng(0), so runs repeat.
    Raises:  ValueError for fewer samples or weights than components.
    Source:  Halko, Martinsson, Tropp 2011, arXiv:0909.4061, algorithms 4.4 and 5.1 with one power iteration and ten
             extra directions, as in MindSpore boost (which centres the caller's array in place).
    """
    check_kind("data", data, np.ndarray, "an array with a row per sample")
    check_kind("n_components", n_components, int, "an int")
    data = np.array(data, dtype=np.float64)
    if data.ndim != 2:
        raise ValueError(f"data must have a row per sample, got shape {data.shape}")
    if not 1 <= n_components <= min(data.shape):
        raise ValueError(
            f"{n_components} components need as many samples and weights, got {data.shape[0]} samples of "
            f"{data.shape[1]} weights; record more snapshots or take fewer components"
        )
    check_choice("method", method, ("randomized", "full"))
    _check_generator(generator)
    if n_components == data.shape[0]:
        warnings.warn(
            f"{n_components} components of {n_components} samples: the last one is noise; record one more snapshot",
            stacklevel=2,
        )
    data -= data.mean(axis=0)
    if method == "full":
        components = np.linalg.svd(data, full_matrices=False)[2][:n_components]
        return components * _sign_of_largest(components)[:, None]
    return _randomized(data, n_components, np.random.default_rng(0) if generator is None else generator)


def _check_generator(generator: object) -> None:
    kinds = (np.random.Generator, np.random.RandomState)
    check_kind("generator", generator, kinds, "a NumPy Generator or RandomState", optional=True)


def _check_rank(rank: int) -> None:
    if check_count("rank", rank, low=0) >= MOST_RANKS:
        raise ValueError(f"ranks are 0 to {MOST_RANKS - 1}, a file for each, got an int of {rank.bit_length()} bits")


def _randomized(data: np.ndarray, k: int, generator: NormalDraws) -> np.ndarray:
    wide = data.shape[0] < data.shape[1]
    tall = data.T if wide else data
    basis = tall @ generator.normal(size=(tall.shape[1], min(k + OVERSAMPLING, tall.shape[1])))
    basis = np.linalg.qr(basis)[0]  # any basis of the same space does; QR keeps it well conditioned
    basis = np.linalg.qr(tall @ np.linalg.qr(tall.T @ basis)[0])[0]
    left, _, right = np.linalg.svd(basis.T @ tall, full_matrices=False)
    left, right = (basis @ left)[:, :k].T, right[:k]
    samples, components = (right, left) if wide else (left, right)
    return components * _sign_of_largest(samples)[:, None]


def _sign_of_largest(rows: np.ndarray) -> np.ndarray:
    return np.sign(rows[np.arange(len(rows)), np.abs(rows).argmax(axis=1)])


def row_block(rows: int, rank: int, rank_size: int) -> slice:
    """The rows of rank `rank`: ceil(rows / rank_size) each, the last ranks fewer or none."""
    check_count("rows", rows, low=0)
    check_count("rank", rank, low=0)
    check_count("rank_size", rank_size)
    each = -(-rows // rank_size)
    return slice(min(rank * each, rows), min((rank + 1) * each, rows))


def write_pca_files(full_path: str | Path, matrix: np.ndarray, rank_size: int) -> None:
    """Write each rank's rows beside `full_path`, `<stem>_rank_<r>.npy`, then an empty marker: all are there."""
    check_kind("matrix", matrix, np.ndarray, "an array")
    _check_rank(check_count("rank_size", rank_size) - 1)
    full_path = Path(full_path)
    marker = full_path.with_name(MARKER)
    marker.unlink(missing_ok=True)
    for rank in range(rank_size):
        _save(_rank_path(full_path, rank), matrix[row_block(len(matrix), rank, rank_size)])
    write_whole(marker, lambda file: None)


def read_pca_rows(full_path: str | Path, rank: int, timeout: float = 1800.0) -> np.ndarray:
    """One rank's rows, as soon as the marker is there.

    Raises:  RuntimeError when it is not there after `timeout` seconds; ValueError for a damaged file.
    """
    _check_rank(rank)
    check_number("timeout", timeout)
    full_path = Path(full_path)
    end = time.monotonic() + timeout
    while not full_path.with_name(MARKER).exists():
        if time.monotonic() >= end:
            waited = f"rank {rank} waited {timeout:g} s for {MARKER} in {str(full_path.parent)!r}"
            raise RuntimeError(f"{waited}; the rank that computes has failed, needs longer, or writes elsewhere")
        time.sleep(min(POLL_SECONDS, max(0.0, end - time.monotonic())))
    return read_npy(_rank_path(full_path, rank))


def _save(path: Path, array: np.ndarray) -> None:
    write_whole(path, lambda file: np.save(file, array, allow_pickle=False))


def _rank_path(full_path: Path, rank: int) -> Path:
    return full_path.with_name(f"{full_path.stem}_rank_{rank}.npy")


def prepare_pca(
    network: nn.Module,
    n_components: int = 32,
    *,
    pca_mat_path: str | Path | None = None,
    weight_load_dir: str | Path | None = None,
    timeout: float = 1800.0,
    rank: int = 0,
    rank_size: int = 1,
    device_number: int = 8,
    method: Literal["randomized", "full"] = "randomized",
    generator: NormalDraws | None = None,
) -> np.ndarray:
    """This rank's rows of the PCA matrix, from a `.npy` file or from the snapshots in a directory.

    The first rank of each node of `device_number` computes (and writes the full matrix to `pca_mat_temp.npy` beside
    the snapshots); all ranks then read their rows from files. Under torch.distributed nobody reads before the old
    files are gone; without it, clear the directory between runs of several processes.

    Shapes:  -> (ceil(n_components / rank_size) or what is left, weights of the network) float64.
    Raises:  ValueError without a usable file or directory and for sizes that do not fit the network; RuntimeError
             after `timeout` seconds.
    Source:  MindSpore boost, section dim_reduce of the configuration.
    """
    check_kind("network", network, nn.Module, "an nn.Module")
    _check_rank(rank)
    for name, value in (("rank_size", rank_size), ("device_number", device_number)):
        check_count(name, value)
    _check_generator(generator)
    source = _source(pca_mat_path, weight_load_dir)
    full_path = source if source.is_file() else source / FULL_NAME
    computes = rank % device_number == 0
    if computes:
        full_path.with_name(MARKER).unlink(missing_ok=True)
    if rank_size > 1 and dist.is_available() and dist.is_initialized():
        dist.barrier()
    weights = sum(p.numel() for p in network.parameters() if p.requires_grad)
    if computes:
        if source.is_file():
            matrix = read_npy(source)
        else:
            matrix = pca_matrix(read_snapshots(source, network), n_components, method=method, generator=generator)
            _save(full_path, matrix)
        _need_rows(np.atleast_1d(matrix)[:n_components], (n_components, weights), f"from {source.name!r}")
        write_pca_files(full_path, matrix[:n_components], rank_size)
    rows = read_pca_rows(full_path, rank, timeout)
    own = len(range(n_components)[row_block(n_components, rank, rank_size)])
    _need_rows(rows, (own, weights), f"in {str(full_path.parent)!r}; remove the files of an earlier run")
    return rows


def _need_rows(matrix: np.ndarray, shape: tuple[int, int], where: str) -> None:
    if matrix.shape != shape or matrix.dtype.kind != "f":
        came = f"{matrix.shape} of {matrix.dtype} {where}"
        raise ValueError(f"need {shape[0]} components of {shape[1]} weights, got a matrix {came}")


def _source(pca_mat_path: str | Path | None, weight_load_dir: str | Path | None) -> Path:
    if pca_mat_path is not None:
        path = Path(pca_mat_path)
        if path.suffix != ".npy" or not path.is_file():
            raise ValueError(f"pca_mat_path must be an existing .npy file, got {str(path)!r}")
        return path
    if weight_load_dir is None or not Path(weight_load_dir).is_dir():
        need = "dim_reduce needs pca_mat_path (a .npy file) or weight_load_dir (a directory of WeightSnapshots)"
        raise ValueError(f"{need}, got weight_load_dir={weight_load_dir!r}")
    return Path(weight_load_dir)
