"""What happened in a training run, step by step and parameter by parameter: `Recorder` writes a `Trace`."""

from mpkit.record.amax import AmaxRecorder, AmaxTrace
from mpkit.record.histograms import exponent_counts
from mpkit.record.ranges import Ranges
from mpkit.record.recorder import Recorder
from mpkit.record.trace import Trace

__all__ = ["AmaxRecorder", "AmaxTrace", "Ranges", "Recorder", "Trace", "exponent_counts"]
