"""Training, evaluation and prediction without writing the loop."""

from mpkit.model.callbacks import Callback, Checkpoint, LossMonitor, ProgressBar, RunContext
from mpkit.model.metrics import METRICS, Metric
from mpkit.model.model import Model

__all__ = ["METRICS", "Callback", "Checkpoint", "LossMonitor", "Metric", "Model", "ProgressBar", "RunContext"]
