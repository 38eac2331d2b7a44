"""What a training run draws from: saved with a checkpoint, it makes a resumed run the same run.

Seen are the generators of torch, CUDA, NumPy and Python, and those that a loader and its samplers hold as attributes.
Nobody hunts for others: a loader with `state_dict` is asked for its own, and what is left out is said in words.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def random_state(loader: object = None) -> dict[str, Any]:
    """The states of all generators that are seen, and the epochs that samplers were told."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": _plain(np.random.get_state(legacy=False)),  # noqa: NPY002  # what data sets of others may draw from
        "python": random.getstate(),
        "loader": [state for _, state in generator_states(_samplers(loader))],
        "epochs": [part.epoch for part in _told(loader)],
    }


def set_random_state(state: dict[str, Any], loader: object = None) -> None:
    """The reverse of `random_state`. Raises ValueError where the loader holds another number of generators."""
    own, saved = generator_states(_samplers(loader)), state["loader"]
    if len(own) != len(saved):
        held = f"the data set of the checkpoint held {len(saved)} random generators, this one holds {len(own)}"
        raise ValueError(f"{held}; resume with the data set that the run was started with")
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    random.setstate(state["python"])
    set_generator_states((generator, held) for (generator, _), held in zip(own, saved))
    for part, epoch in zip(_told(loader), state["epochs"]):
        part.set_epoch(epoch)


def generator_states(things: Iterable[object]) -> list[tuple[Generator, Any]]:
    """The generators among some objects and their attributes, each with its state."""
    held = [value for thing in things for value in (thing, *getattr(thing, "__dict__", {}).values())]
    known = {id(value): value for value in held if isinstance(value, Generator)}
    return [(generator, _state(generator)) for generator in known.values()]


def set_generator_states(states: Iterable[tuple[Generator, Any]]) -> None:
    """The reverse of `generator_states`."""
    for generator, saved in states:
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = saved
        elif isinstance(generator, random.Random):
            generator.setstate(saved)
        else:
            generator.set_state(saved)


def unseen(loader: object) -> list[str]:
    """What a run draws from and no checkpoint holds, as far as a look at the loader and its data set shows it."""
    if saves_itself(loader):
        return []
    dataset = getattr(loader, "dataset", loader)
    held = getattr(dataset, "__dict__", {}).items()
    own = [f"{type(dataset).__name__}.{name}" for name, value in held if isinstance(value, Generator)]
    kept = getattr(loader, "persistent_workers", False)
    return [*own, *(["the workers that the DataLoader keeps (persistent_workers=True)"] if kept else [])]


def saves_itself(loader: object) -> bool:
    """Whether a loader has a state of its own: where it stands, and what it draws from (torchdata's protocol)."""
    return callable(getattr(loader, "load_state_dict", None))


def _samplers(loader: object) -> list[Any]:
    """A loader and its samplers."""
    batches = getattr(loader, "batch_sampler", None)
    return [loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]


def _told(loader: object) -> list[Any]:
    """What is told the epoch, as `torch.utils.data.DistributedSampler`; a data set may be, too."""
    held = {id(part): part for part in (*_samplers(loader), getattr(loader, "dataset", None))}
    return [part for part in held.values() if hasattr(part, "set_epoch") and type(getattr(part, "epoch", "")) is int]


def _state(generator: Generator) -> Any:
    """A generator's state, of what a file holds that is read again without running anything."""
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _plain(state: object) -> Any:
    """A state of NumPy's, its arrays as lists."""
    return json.loads(json.dumps(state, default=lambda array: array.tolist()))
