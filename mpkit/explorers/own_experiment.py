"""An experiment of one's own: choose cells, watch them arrive, stop, go on, and compare two runs step by step."""

from __future__ import annotations

import math
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import numpy as np
from torch import nn
from traitlets import Bool, Enum, Int

from mpkit.data import data_dir
from mpkit.experiment import Results, experiment, train
from mpkit.experiment.store import Row
from mpkit.explorers.base import Explorer
from mpkit.networks import LeNet5, Network, resnet18

CELLS: dict[str, dict[str, Any]] = {
    name: {"level": level, "dtype": dtype, "scaler": scaler, "boost": boost}
    for name, level, dtype, scaler, boost in (
        ("float32", "O0", "float16", None, "O0"),
        ("fp16 O2", "O2", "fp16", None, "O0"),
        ("fp16 O2, scaled", "O2", "fp16", "torch", "O0"),
        ("bf16 O2", "O2", "bf16", None, "O0"),
        ("e5m2 O2, scaled", "O2", "e5m2", "torch", "O0"),
        ("e3m2 O2, scaled", "O2", "e3m2", "torch", "O0"),
        ("freezing", "O0", "float16", None, "grad_freeze"),
        ("centralized", "O0", "float16", None, "grad_centralization"),
    )
}
"""What the lesson compares: formats are emulated, so that every machine gives the same."""


def perceptron() -> nn.Module:
    """64-32-10, the quickest network that is worth a question."""
    return Network(inputs=64, hidden=32)


def lenet() -> nn.Module:
    """LeNet-5 for 28x28 digits."""
    return LeNet5()


def residual() -> nn.Module:
    """A ResNet-18 of width 4 for 8x8 digits."""
    return resnet18(width=4, in_channels=1)


NETWORKS: dict[str, Any] = {  # name -> how it is trained, small enough for a minute of several cells and seeds
    "perceptron": partial(train, perceptron, "digits8", lr=0.1, epochs=2),
    "LeNet-5": partial(train, lenet, "digits", lr=0.05, epochs=1),
    "ResNet-18, width 4": partial(train, residual, "digits8", lr=0.05, epochs=1),
}
