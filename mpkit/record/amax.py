"""The largest magnitude of each tensor of each linear layer, step by step: what a tensor-scale policy decides from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpkit.arguments import check_kind
from mpkit.casting.products import linear_layers
from mpkit.casting.recipe import amax_of
from mpkit.files import read_npz, refused, write_whole
from mpkit.record.columns import Columns
from mpkit.record.ranges import hold, hold_names
from mpkit.record.watch import watch
from mpkit.step.hooks import Hook, StepContext


@dataclass(frozen=True)
class AmaxTrace:
    """Recorded amaxes.

    Args:
        tensors: names, "<path of the layer>.input", ".weight" and ".grad" (gradient of the output).
        amax:    (steps, tensors) float32; 0 where a tensor did not occur in a step.
    Raises:  TypeError for names that are no text, or an array of another kind; ValueError for another shape.
    """

    tensors: tuple[str, ...]
    amax: np.ndarray

    def __post_init__(self) -> None:
        hold_names(self, "tensors")
        hold(self, {"amax": (np.float32, "NT")}, T=len(self.tensors))

    def __len__(self) -> int:
        return len(self.amax)

    def series(self) -> dict[str, np.ndarray]:
        """Tensor -> its amaxes (steps,)."""
        return {name: np.ascontiguousarray(self.amax[:, i]) for i, name in enumerate(self.tensors)}

    def save(self, path: str | Path) -> None:
        """Write an npz without pickle, whole or not at all."""
        names = np.array(self.tensors, dtype=np.str_)
        write_whole(path, lambda file: np.savez_compressed(file, tensors=names, amax=self.amax))

    @classmethod
    def load(cls, path: str | Path) -> AmaxTrace:
        """Read what `save` wrote. Raises ValueError for a file of another kind or a damaged one; FileNotFoundError."""
        held = read_npz(path)
        with refused(Path(path), "AmaxTrace"):
            return cls(held["tensors"].tolist(), held["amax"])


class AmaxRecorder(Hook):
    """Records amaxes while a network trains, without a host read in a step.

    Use it as a hook of a step or a Model, or in a loop of your own: call `end_step()` after the optimizer. The
    micro-batches of one step count together. An attention counts as one layer: its first input, the weight of its first
    projection, and the gradient of its result are recorded.

    Args:    network: the module to watch.
    Raises:  TypeError if it is no module; ValueError if it has no linear layer.

    >>> net = nn.Sequential(nn.Linear(4, 2))
    >>> recorder = AmaxRecorder(net)
    >>> net(torch.full((1, 4), -3.0)).sum().backward(); recorder.end_step()
    >>> recorder.trace().series()["0.input"].tolist(), recorder.trace().series()["0.grad"].tolist()
    ([3.0], [1.0])
    """

    def __init__(self, network: nn.Module) -> None:
        check_kind("network", network, nn.Module, "an nn.Module")
        layers = linear_layers(network)
        if not layers:
            raise ValueError(f"amaxes are recorded of linear layers, and this {type(network).__name__} has none")
        self._now: dict[str, Tensor] = {}
        self._columns, self.index = Columns(), 0  # of the step that comes
        self._names = tuple(f"{path}.{tensor}" for path in layers for tensor in ("input", "weight", "grad"))
        self._hooks = [watch(layer, partial(self._seen, path)) for path, layer in layers.items()]

    def _seen(self, path: str, layer: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        # an attention has one weight for its three projections, or where its keys have another width one for each
        weights = (getattr(layer, name, None) for name in ("weight", "in_proj_weight", "q_proj_weight"))
        self._note(f"{path}.weight", next(weight for weight in weights if weight is not None))
        if args:
            self._note(f"{path}.input", args[0])
        result = output[0] if isinstance(output, tuple) else output
        if result.requires_grad:
            result.register_hook(lambda grad: self._note(f"{path}.grad", grad))

    def _note(self, name: str, tensor: Tensor) -> None:
        amax = amax_of(tensor)
        old = self._now.get(name)
        self._now[name] = amax if old is None else torch.maximum(old, amax)

    def end_step(self) -> None:
        """The step is over: what comes now belongs to the next."""
        self._columns.append({"step": self.index, **{name: self._now.get(name, 0.0) for name in self._names}})
        self.index, self._now = self.index + 1, {}

    def go_on(self, index: int) -> None:
        """The coming step is that of this index: what is held of it and of later ones is forgotten."""
        self._columns.forget(index)
        self.index, self._now = index, {}

    def after_update(self, ctx: StepContext) -> None:
        """The step of a train cell is over."""
        self.end_step()

    def close(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()

    def trace(self) -> AmaxTrace:
        """What was recorded so far (reads the device)."""
        columns = self._columns.joined(self._names)
        return AmaxTrace(self._names, np.stack([columns[name] for name in self._names], axis=1).astype(np.float32))
