"""Weights on the way through training, their principal components, and the files through which ranks share them."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpkit.arguments import Count, Index, check_alike, check_count, check_kind, check_number, checked
from mpkit.files import read_npy, read_tensors, write_tensors, write_whole
from mpkit.step import Hook, StepContext

SUFFIXES = (".ckpt", ".pt", ".pth")
FULL_NAME = "pca_mat_temp.npy"
MARKER = "save_pca_end.txt"
MOST_RANKS = 2**16
OVERSAMPLING = 10
POLL_SECONDS = 0.1


def _array(name: str, value: object) -> Any:
    check_kind(name, value, np.ndarray, "an array")
    return value


def _draws(name: str, value: object) -> Any:
    check_kind(name, value, (np.random.Generator, np.random.RandomState), "a NumPy Generator or RandomState")
    return value


def _rank(name: str, value: object) -> int:
    if (rank := check_count(name, value, low=0)) > MOST_RANKS:
        raise ValueError(
            f"{name} must be at most {MOST_RANKS}, a file for each, got an int of {rank.bit_length()} bits"
        )
    return rank


Array = Annotated[np.ndarray, _array]
Draws = Annotated[Any, _draws]
Rank = Annotated[int, _rank]


class WeightSnapshots(Hook):
    """Saves a network's trained parameters every `every` training steps: a hook, and a call for other loops.

    Files `step_00000010.ckpt` hold {parameter name: tensor}, as torch.save writes it.

    Args:
        network:   whose parameters are saved, under its own names (also inside a cell that adds the loss).
        directory: made when the first snapshot is written.
        every:     steps between snapshots (>= 1).
    """

    @checked
    def __init__(self, network: nn.Module, directory: str | Path, every: Count = 10) -> None:
        self.network, self.directory, self.every = network, Path(directory), every

    def after_update(self, ctx: StepContext) -> None:
        """Save the weights after each step whose number is a multiple of `every`."""
        if (ctx.index + 1) % self.every == 0:
            self.save(ctx.index + 1)

    def save(self, step: int) -> Path:
        """Save the present weights as those after `step`; -> the file."""
        path = self.directory / f"step_{step:08d}.ckpt"
        write_tensors(path, {name: p.cpu().clone() for name, p in _trained(self.network).items()})
        return path


@checked
def read_snapshots(directory: str | Path, network: nn.Module) -> np.ndarray:
    """All snapshots of a directory in order of their names -> (snapshots, weights) float64.

    Columns follow the order of the network's trained parameters, flattened. Files end in .ckpt, .pt or .pth and hold
    a state dict; they are read with `weights_only=True`, so nothing in them is executed.

    Raises:  ValueError for a directory without snapshots, and for one that misses a parameter, has another
             shape, or is damaged.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"weight_load_dir must be a directory with snapshots, got {str(directory)!r}")
    files = sorted(f for f in directory.iterdir() if f.suffix in SUFFIXES and not f.name.startswith("."))
    if not files:
        raise ValueError(f"no snapshot ({', '.join(SUFFIXES)}) in {str(directory)!r}; record some with WeightSnapshots")
    trained, rows = _trained(network), []
    for file in files:
        state = read_tensors(file)
        try:
            check_alike("the state dict", state, trained)
        except TypeError as error:
            raise ValueError(f"{file.name} does not fit: {error}") from None
        rows.append(torch.cat([state[name].detach().reshape(-1).double() for name in trained]).numpy())
    return np.stack(rows)


def _trained(network: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}


@checked
def pca_matrix(
    data: Array,
    n_components: Count,
    *,
    method: Literal["randomized", "full"] = "randomized",
    generator: Draws | None = None,
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
    data = np.array(data, dtype=np.float64)
    if data.ndim != 2 or n_components > min(data.shape):
        raise ValueError(
            f"{n_components} components need as many samples (rows) and weights (columns), got an array of "
            f"{data.shape}; record more snapshots or take fewer components"
        )
    if n_components == data.shape[0]:
        noise = f"{n_components} components of {n_components} samples: the last one is noise; record one more snapshot"
        warnings.warn(noise, stacklevel=3)
    data -= data.mean(axis=0)
    if method == "full":
        components = samples = np.linalg.svd(data, full_matrices=False)[2][:n_components]
    else:
        draws = np.random.default_rng(0) if generator is None else generator
        components, samples = _randomized(data, n_components, draws)
    largest = samples[np.arange(len(samples)), np.abs(samples).argmax(axis=1)]
    return components * np.sign(largest)[:, None]


def _randomized(data: np.ndarray, k: int, generator: Any) -> tuple[np.ndarray, np.ndarray]:
    """The components, and their sample sides, which fix the signs."""
    wide = data.shape[0] < data.shape[1]
    tall = data.T if wide else data
    basis = tall @ generator.normal(size=(tall.shape[1], min(k + OVERSAMPLING, tall.shape[1])))
    basis = np.linalg.qr(basis)[0]  # any basis of the same space does; QR keeps it well conditioned
    basis = np.linalg.qr(tall @ np.linalg.qr(tall.T @ basis)[0])[0]
    left, _, right = np.linalg.svd(basis.T @ tall, full_matrices=False)
    left, right = (basis @ left)[:, :k].T, right[:k]
    return (left, right) if wide else (right, left)


@checked
def row_block(rows: Index, rank: Index, rank_size: Count) -> slice:
    """The rows of rank `rank`: ceil(rows / rank_size) each, the last ranks fewer or none."""
    each = -(-rows // rank_size)
    return slice(min(rank * each, rows), min((rank + 1) * each, rows))


@checked
def write_pca_files(full_path: str | Path, matrix: Array, rank_size: Rank) -> None:
    """Write each rank's rows beside `full_path`, `<stem>_rank_<r>.npy`, then an empty marker: all are there."""
    full_path = Path(full_path)
    marker = full_path.with_name(MARKER)
    marker.unlink(missing_ok=True)
    for rank in range(rank_size):
        _save(_rank_path(full_path, rank), matrix[row_block(len(matrix), rank, rank_size)])
    write_whole(marker, lambda file: None)


@checked
def read_pca_rows(full_path: str | Path, rank: Rank, timeout: Annotated[float, check_number] = 1800.0) -> np.ndarray:
    """One rank's rows, as soon as the marker is there.

    Raises:  RuntimeError when it is not there after `timeout` seconds; ValueError for a damaged file.
    """
    full_path, end = Path(full_path), time.monotonic() + timeout
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


@checked
def prepare_pca(
    network: nn.Module,
    n_components: Count = 32,
    *,
    pca_mat_path: str | Path | None = None,
    weight_load_dir: str | Path | None = None,
    timeout: float = 1800.0,
    rank: Rank = 0,
    rank_size: Count = 1,
    device_number: Count = 8,
    method: Literal["randomized", "full"] = "randomized",
    generator: Draws | None = None,
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
    source = _source(pca_mat_path, weight_load_dir)
    full_path = source if source.is_file() else source / FULL_NAME
    computes = rank % device_number == 0
    if computes:
        full_path.with_name(MARKER).unlink(missing_ok=True)
    if rank_size > 1 and dist.is_available() and dist.is_initialized():
        dist.barrier()
    weights = sum(p.numel() for p in _trained(network).values())
    if computes:
        if source.is_file():
            matrix = read_npy(source)
        else:
            matrix = pca_matrix(read_snapshots(source, network), n_components, method=method, generator=generator)
            _save(full_path, matrix)
        _need_rows(np.atleast_1d(matrix)[:n_components], (n_components, weights), f"from {source.name!r}")
        write_pca_files(full_path, matrix[:n_components], rank_size)
    rows, own = read_pca_rows(full_path, rank, timeout), row_block(n_components, rank, rank_size)
    _need_rows(rows, (own.stop - own.start, weights), f"in {str(full_path.parent)!r}; remove the files of earlier runs")
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
