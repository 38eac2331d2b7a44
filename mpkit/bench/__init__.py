"""What precision, recording, replay and boost cost here: `measure` times contenders in turn, `cases` are the table.

Other packages as peers, and the studies behind `data/benchmarks`, are in `tests/tools`.
"""

from mpkit.bench.measure import HostReads, Row, measure, rebuilt

__all__ = ["HostReads", "Row", "measure", "rebuilt"]
