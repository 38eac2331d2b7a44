"""Weights on the way through training, their principal components, and the files through which ranks share them."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from mpkit.arguments import Count, Index, Real, check_alike, check_kind, checked
from mpkit.files import read_npy, read_tensors, write_whole
from mpkit.optimizers import trainable_params
from mpkit.step import Hook, StepContext
from mpkit.step.distributed import several_processes

SUFFIXES = (".ckpt", ".pt", ".pth")
FULL_NAME = "pca_mat_temp.npy"
MARKER = "save_pca_end.txt"
OVERSAMPLING = 10
POLL_SECONDS = 0.1
Draws = np.random.Generator | np.random.RandomState | int


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
        state = {name: p.detach().cpu().clone() for name, p in trainable_params(self.network)}
        write_whole(path, lambda file: torch.save(state, file))
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
    trained, rows = dict(trainable_params(network)), []
    for file in files:
        state = read_tensors(file)
        check_alike(f"the state dict in {file.name}", state, trained)
        rows.append(torch.cat([state[name].detach().reshape(-1).double() for name in trained]).numpy())
    return np.stack(rows)


@checked
def pca_matrix(
    data: np.ndarray, n_components: Count, *, method: Literal["randomized", "full"] = "randomized", generator: Draws = 0
) -> np.ndarray:
    """The first principal components of `data`, one per row, with orthonormal rows.

    Shapes:  data (samples, weights) -> (n_components, weights) float64. `data` is not changed.
    Edges:   as many components as samples: the last one is noise, since centring costs one dimension; a warning.
             Signs: "randomized" makes the largest entry of each component's sample side positive, "full" that of the
             component itself.
    Args:
        generator: draws the random directions of "randomized", or a seed of one, so that runs repeat.
    Raises:  ValueError for fewer samples or weights than components.
    Source:  Halko, Martinsson, Tropp 2011, arXiv:0909.4061, algorithms 4.4 and 5.1 with one power iteration and ten
             extra directions, as in MindSpore boost (which centres the caller's array in place).
    """
    check_kind("data", data, np.ndarray, "an array")
    draws = generator if isinstance(generator, np.random.RandomState) else np.random.default_rng(generator)
    data = np.array(data, dtype=np.float64)
    if data.ndim != 2 or n_components > min(data.shape):
        need = f"{n_components} components need as many samples (rows) and weights (columns)"
        raise ValueError(f"{need}, got {data.shape}; record more snapshots or take fewer components")
    if n_components == data.shape[0]:
        noise = f"{n_components} components of {n_components} samples: the last one is noise; record one more snapshot"
        warnings.warn(noise, stacklevel=3)
    data -= data.mean(axis=0)
    if method == "full":
        components = samples = np.linalg.svd(data, full_matrices=False)[2][:n_components]
    else:
        components, samples = _randomized(data, n_components, draws)
    largest = samples[np.arange(len(samples)), np.abs(samples).argmax(axis=1)]
    return components * np.sign(largest)[:, None]


def _randomized(
    data: np.ndarray, k: int, draws: np.random.Generator | np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """The components, and their sample sides, which fix the signs."""
    wide = data.shape[0] < data.shape[1]
    tall = data.T if wide else data
    basis = tall @ draws.normal(size=(tall.shape[1], min(k + OVERSAMPLING, tall.shape[1])))
    basis = np.linalg.qr(basis)[0]  # any basis of the same space does; QR keeps it well conditioned
    basis = np.linalg.qr(tall @ np.linalg.qr(tall.T @ basis)[0])[0]
    left, _, right = np.linalg.svd(basis.T @ tall, full_matrices=False)
    left, right = (basis @ left)[:, :k].T, right[:k]
    return (left, right) if wide else (right, left)


def row_block(rows: int, rank: int, rank_size: int) -> slice:
    """The rows of rank `rank`: ceil(rows / rank_size) each, the last ranks fewer or none."""
    each = -(-rows // rank_size)
    return slice(min(rank * each, rows), min((rank + 1) * each, rows))


@checked
def write_pca_files(full_path: str | Path, matrix: np.ndarray, rank_size: Count) -> None:
    """Write the rows of each rank beside `full_path`, `<stem>_rank_<r>.npy`, then a marker: all are there."""
    full_path = Path(full_path)
    full_path.with_name(MARKER).unlink(missing_ok=True)
    for rank in range(min(rank_size, len(matrix))):  # others have no rows
        _save(_rank_path(full_path, rank), matrix[row_block(len(matrix), rank, rank_size)])
    write_whole(full_path.with_name(MARKER), lambda file: None)


@checked
def read_pca_rows(full_path: str | Path, rank: Index, timeout: Real = 1800.0) -> np.ndarray:
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
    timeout: Real = 1800.0,
    rank: Index = 0,
    rank_size: Count = 1,
    device_number: Count = 8,
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
    source = weight_load_dir if pca_mat_path is None else pca_mat_path
    if source is None:
        raise ValueError("dim_reduce needs pca_mat_path (a .npy file) or weight_load_dir (with WeightSnapshots)")
    full_path = Path(source) / FULL_NAME if pca_mat_path is None else Path(source)
    weights = sum(p.numel() for _, p in trainable_params(network))
    if computes := rank % device_number == 0:
        full_path.with_name(MARKER).unlink(missing_ok=True)
    if several_processes():
        dist.barrier()
    if computes and pca_mat_path is None:
        matrix = pca_matrix(read_snapshots(source, network), n_components)
        _save(full_path, matrix)
    elif computes:
        matrix = np.atleast_1d(read_npy(full_path))[:n_components]
        _need_rows(matrix, (n_components, weights), f"from {full_path.name!r}")
    if computes:
        write_pca_files(full_path, matrix, rank_size)
    own = row_block(n_components, rank, rank_size)
    rows = read_pca_rows(full_path, rank, timeout) if own.start < own.stop else np.empty((0, weights))
    _need_rows(rows, (own.stop - own.start, weights), f"in {str(full_path.parent)!r}; remove the files of earlier runs")
    return rows


def _need_rows(matrix: np.ndarray, shape: tuple[int, int], where: str) -> None:
    if matrix.shape != shape or matrix.dtype.kind != "f":
        came = f"{matrix.shape} of {matrix.dtype} {where}"
        raise ValueError(f"need {shape[0]} components of {shape[1]} weights, got a matrix {came}")
