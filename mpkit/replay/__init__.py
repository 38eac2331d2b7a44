"""What any other loss-scale policy would have done on a recorded run, thousands of policies at once."""

from mpkit.replay.ceilings import CAVEAT, ceilings, flushed
from mpkit.replay.simulate import Simulation, can_compile, simulate
from mpkit.replay.table import replay, sweep, swept

__all__ = ["CAVEAT", "Simulation", "can_compile", "ceilings", "flushed", "replay", "simulate", "sweep", "swept"]
