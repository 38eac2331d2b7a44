"""Weights on the way through training, kept in files: the data of the principal components."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from mpkit.arguments import check_alike, check_count, check_kind
from mpkit.files import read_tensors, write_tensors
from mpkit.step import Hook, StepContext

SUFFIXES = (".ckpt", ".pt", ".pth")


class WeightSnapshots(Hook):
    """Saves a network's trained parameters every `every` training steps: a hook, and a call for other loops.

    Files `step_00000010.ckpt` hold {parameter name: tensor}, as torch.save writes it.

    Args:
        network:   whose parameters are saved, under its own names (also inside a cell that adds the loss).
        directory: made when the first snapshot is written.
        every:     steps between snapshots (>= 1).
    """

    def __init__(self, network: nn.Module, directory: str | Path, every: int = 10) -> None:
        check_kind("network", network, nn.Module, "an nn.Module")
        check_count("every", every)
        self.network = network
        self.directory = Path(directory)
        self.every = every

    def after_update(self, ctx: StepContext) -> None:
        """Save the weights after each step whose number is a multiple of `every`."""
        if (ctx.index + 1) % self.every == 0:
            self.save(ctx.index + 1)

    def save(self, step: int) -> Path:
        """Save the present weights as those after `step`; -> the file."""
        weights = {name: p.detach().cpu().clone() for name, p in _trained(self.network).items()}
        path = self.directory / f"step_{step:08d}.ckpt"
        write_tensors(path, weights)
        return path


def read_snapshots(directory: str | Path, network: nn.Module) -> np.ndarray:
    """All snapshots of a directory in order of their names -> (snapshots, weights) float64.

    Columns follow the order of the network's trained parameters, flattened. Files end in .ckpt, .pt or .pth and hold
    a state dict; they are read with `weights_only=True`, so nothing in them is executed.

    Raises:  ValueError for a directory without snapshots, and for one that misses a parameter, has another
             shape, or is damaged.
    """
    check_kind("network", network, nn.Module, "an nn.Module")
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"weight_load_dir must be a directory with snapshots, got {str(directory)!r}")
    files = sorted(f for f in directory.iterdir() if f.suffix in SUFFIXES and not f.name.startswith("."))
    if not files:
        raise ValueError(f"no snapshot ({', '.join(SUFFIXES)}) in {str(directory)!r}; record some with WeightSnapshots")
    trained = _trained(network)
    return np.stack([_row(file, trained) for file in files])


def _trained(network: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in network.named_parameters() if p.requires_grad}


def _row(file: Path, trained: Mapping[str, nn.Parameter]) -> np.ndarray:
    state: Mapping[str, Tensor] = read_tensors(file)
    try:
        check_alike("the state dict", state, {name: p.detach() for name, p in trained.items()})
    except TypeError as error:
        raise ValueError(f"{file.name} does not fit: {error}") from None
    return torch.cat([state[name].detach().reshape(-1).double() for name in trained]).numpy()
