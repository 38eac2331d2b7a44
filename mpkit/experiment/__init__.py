"""Grids of runs on the reader's network: every precision, several seeds, an answer with its uncertainty."""

from mpkit.experiment.engine import experiment
from mpkit.experiment.results import Results
from mpkit.experiment.training import train

__all__ = ["Results", "experiment", "train"]
