"""The random states that a training run draws from: saved with a checkpoint, they make a resumed run the same run."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mpkit.model.holdings import Generator, generators


def random_state(dataset: object) -> dict[str, Any]:
    """The states of all generators of a run: torch, CUDA, NumPy, Python, and those that the data set holds."""
    numpy_state: Any = np.random.get_state()  # noqa: NPY002  # the state that data sets of others may draw from
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [numpy_state[0], torch.from_numpy(numpy_state[1].copy()), *map(_plain, numpy_state[2:])],
        "python": random.getstate(),
        "dataset": [state for _, state in generator_states(dataset)],
        "workers": _keeps_workers(dataset) and dataset._iterator is not None,
    }


def set_random_state(state: dict[str, Any], dataset: object) -> None:
    """The reverse of `random_state`. Raises ValueError when the data set holds other generators than the saved one."""
    own = generators(dataset)
    if len(own) != len(state["dataset"]):
        raise ValueError(
            f"the data set of the checkpoint held {len(state['dataset'])} random generators, this one holds "
            f"{len(own)}; resume with the data set that the run was started with"
        )
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy(), *rest))  # noqa: NPY002
    random.setstate(state["python"])
    set_generator_states(zip(own, state["dataset"]))


def generator_states(holder: object) -> list[tuple[Generator, object]]:
    """Every generator that an object holds, as `holdings.generators` finds them, with its state."""
    return [(generator, _state(generator)) for generator in generators(holder)]


def set_generator_states(states: Iterable[tuple[Generator, object]]) -> None:
    """The reverse of `generator_states`."""
    for generator, saved in states:
        _set_state(generator, saved)


def ready_workers(dataset: object, state: dict[str, Any]) -> None:
    """Let a DataLoader that keeps its workers stand as it did: a first pass makes them, and draws a number for it.

    What the workers themselves draw, in the transforms of a data set, say, is in no checkpoint: a warning says so.
    """
    if not _keeps_workers(dataset):
        return
    if not state.get("workers"):
        dataset._iterator = None
        return
    if dataset._iterator is None:
        iter(dataset)
    warnings.warn(
        "the workers of this DataLoader live through all epochs (persistent_workers=True) and keep random states of "
        "their own, which no checkpoint holds: the batches come in the same order, but what the data set draws inside "
        "the workers is not repeated; train with persistent_workers=False for a resumed run with the same numbers",
        RuntimeWarning,
        stacklevel=2,
    )


def _state(generator: Generator) -> object:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else _on_host(generator.state)


def _set_state(generator: Generator, saved: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(saved)
    elif isinstance(generator, random.Random):
        generator.setstate(saved)
    else:
        generator.state = _as_numpy(saved)


def _on_host(value: object) -> object:
    """A NumPy state without NumPy objects: what `torch.load(weights_only=True)` reads."""
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    return torch.from_numpy(value.astype(np.int64)) if isinstance(value, np.ndarray) else _plain(value)


def _as_numpy(value: object) -> Any:
    if isinstance(value, dict):
        return {key: _as_numpy(item) for key, item in value.items()}
    return value.numpy().astype(np.uint64) if isinstance(value, Tensor) else value


def _keeps_workers(dataset: object) -> TypeGuard[DataLoader[Any]]:
    return isinstance(dataset, DataLoader) and dataset.persistent_workers


def _plain(number: object) -> object:
    return number.item() if hasattr(number, "item") else number
