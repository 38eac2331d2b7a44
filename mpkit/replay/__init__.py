"""What any other loss-scale policy would have done on a recorded run, thousands of policies at once."""

from mpkit.replay.ceilings import CAVEAT, ceilings, flushed, flushed_by_current_scale
from mpkit.replay.simulate import Simulation, simulate
from mpkit.replay.table import replay, sweep, swept
from mpkit.replay.tensor_scales import TensorScaleReplay, replay_tensor_scales, sweep_tensor_scales

__all__ = [
    "CAVEAT",
    "Simulation",
    "TensorScaleReplay",
    "ceilings",
    "flushed",
    "flushed_by_current_scale",
    "replay",
    "replay_tensor_scales",
    "simulate",
    "sweep",
    "sweep_tensor_scales",
    "swept",
]
