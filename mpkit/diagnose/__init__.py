"""Why a step went bad: which operation, which module, and whether scale, format, model or data is to blame."""

from mpkit.diagnose.report import VERDICTS, Report
from mpkit.diagnose.run import diagnose
from mpkit.diagnose.watch import Event, Operand, Watch

__all__ = ["VERDICTS", "Event", "Operand", "Report", "Watch", "diagnose"]
