"""Why a step went bad, what to train with instead, and what to check before the first step."""

from mpkit.diagnose.loop import watch_loop
from mpkit.diagnose.preflight import Finding, preflight
from mpkit.diagnose.recommend import Recommendation, recommend
from mpkit.diagnose.report import VERDICTS, Report
from mpkit.diagnose.run import diagnose
from mpkit.diagnose.stale import StaleScale, recommend_recipe, stale_scales
from mpkit.diagnose.words import LoopReport

__all__ = [
    "VERDICTS",
    "Finding",
    "LoopReport",
    "Recommendation",
    "Report",
    "StaleScale",
    "diagnose",
    "preflight",
    "recommend",
    "recommend_recipe",
    "stale_scales",
    "watch_loop",
]
