"""`mpkit bench [--only TOPIC ...] [--gpu] [--quick] [--out FILE]`: measure, print a table, store JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

from mpkit.bench.cases import TOPICS, run
from mpkit.bench.measure import Row
from mpkit.device import default_device, describe
from mpkit.files import write_whole


def line(row: Row) -> str:
    """One row of the printed table."""
    if row.skipped:
        return f"  {row.case:44.44} {row.contender:34.34} skipped: {row.skipped}"
    time_ms = f"{row.seconds * 1e3:10.3f} ms" if row.seconds is not None else " " * 13
    ratio = f"{row.ratio:7.2f}x" if row.ratio is not None else " " * 8
    goal = f"goal {'>=' if row.goal_is_floor else '<='} {row.goal:g} {row.verdict}" if row.goal is not None else ""
    return f"  {row.case:44.44} {row.contender:34.34}{time_ms} {ratio}  {goal} {row.note}".rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mpkit bench", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=TOPICS, default=TOPICS, metavar="TOPIC", help=", ".join(TOPICS))
    parser.add_argument("--gpu", action="store_true", help="on the first CUDA device, or not at all")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes, for a first look")
    parser.add_argument("--out", type=Path, help="JSON file for the rows, with device and versions")
    options = parser.parse_args(arguments)
    if options.gpu and not torch.cuda.is_available():
        print("not measured on a GPU: torch sees no CUDA device here", file=sys.stderr)
        return 1
    torch.set_num_threads(1)  # figures that repeat
    device = torch.device("cuda", 0) if options.gpu else default_device()
    where = describe(device)
    print(", ".join(f"{key} {value}" for key, value in where.items()), flush=True)
    rows: list[Row] = []
    for topic in options.only:
        start = time.perf_counter()
        found = run(topic, quick=options.quick, device=device)
        print(f"{topic} ({time.perf_counter() - start:.0f} s)", *map(line, found), sep="\n", flush=True)
        rows += found
    if options.out:
        made = {"made_by": "python -m mpkit.bench", "utc": datetime.now(UTC).isoformat(timespec="seconds"), **where}
        text = json.dumps({"meta": made, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        write_whole(options.out, lambda file: file.write(text.encode()))
        print(f"stored in {options.out}")
    missed = [row for row in rows if row.verdict == "missed"]
    print(f"{len(rows)} rows, {len(missed)} goals missed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
