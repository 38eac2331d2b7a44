"""Grids of runs on the reader's network: every precision, several seeds, an answer with its uncertainty.

The names are loaded when first touched: a worker that needs neither torch nor statistics starts without them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpkit.experiment.engine import experiment
    from mpkit.experiment.results import Results
    from mpkit.experiment.training import train

__all__ = ["Results", "experiment", "train"]
_HOME = {"Results": "results", "experiment": "engine", "train": "training"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"mpkit.experiment.{_HOME[name]}"), name)
    raise AttributeError(f"module 'mpkit.experiment' has no attribute {name!r}")
