"""All that wants a GPU, in one command: the tests marked `gpu`, then the benchmarks, then one table and one file.

    make gpu                                    # on a machine with a CUDA device; minutes
    make gpu ARGS="--quick --only rounding"

It needs torch, numpy, pandas, matplotlib and pytest only, and runs in the Python that `make gpu PYTHON=...` names:
nothing is installed. It ends in passed, failed, ratios and versions, and writes data/benchmarks/gpu-<name>.json, which
lessons show from then on. The exit status is 0 when no test failed and every benchmark ran.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "data" / "benchmarks"


def marked() -> list[str]:
    """The test files with a test that is marked `gpu`; others may import what a GPU server does not have."""
    return [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]


def outcomes(report: Path) -> dict[str, Any]:
    """Passed, failed and skipped tests of a JUnit file, with the names of those that failed."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    failed = [f"{c.get('classname')}::{c.get('name')}" for c in bad]
    skipped = sum(c.find("skipped") is not None for c in cases)
    passed = len(cases) - len(failed) - skipped
    return {"passed": passed, "failed": len(failed), "skipped": skipped, "failures": failed}


def printed(made: dict[str, Any]) -> list[str]:
    """The table at the end."""
    from mpkit.bench import Row
    from mpkit.bench.__main__ import line

    rows = [Row(**row) for row in made["rows"]]
    words = [row.verdict for row in rows]
    tests = made["tests"]
    return [
        *(f"  {line(row).strip()}" for row in rows if row.ratio is not None or row.skipped),
        *(f"  FAILED {name}" for name in tests["failures"]),
        f"tests    {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped",
        f"goals    {words.count('met')} met, {words.count('missed')} missed, {words.count('skipped')} not measured",
        "versions " + ", ".join(f"{key} {made['meta'][key]}" for key in ("device", "python", "torch", "cuda")),
    ]


def main(arguments: Sequence[str] | None = None, *, run: Callable[..., Any] = subprocess.run) -> int:
    parser = argparse.ArgumentParser("make gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes")
    parser.add_argument("--only", nargs="+", metavar="TOPIC", help="topics of `python -m mpkit.bench`")
    parser.add_argument("--folder", type=Path, default=STORED, help="where the file goes")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))
    import torch

    from mpkit.bench.gpu import file_name

    if not torch.cuda.is_available():
        print(f"not measured on a GPU: torch {torch.__version__} sees no CUDA device here. Nothing was run or written.")
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        report, rows = Path(scratch, "report.xml"), Path(scratch, "rows.json")
        pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
        tested = run([*pytest, *marked()], cwd=ROOT).returncode
        bench = [sys.executable, "-m", "mpkit.bench", "--gpu", "--out", str(rows)]
        bench += ["--quick"] * options.quick + (["--only", *options.only] if options.only else [])
        measured = run(bench, cwd=ROOT).returncode
        if not report.exists() or not rows.exists():
            print(f"pytest ended with {tested} and the benchmarks with {measured}, and left nothing to store")
            return 1
        made = json.loads(rows.read_text())
        made = {"meta": {**made["meta"], "made_by": "make gpu"}, "tests": outcomes(report), "rows": made["rows"]}
    print(*printed(made), sep="\n")
    path = options.folder / file_name(made["meta"]["device"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made, indent=1) + "\n")
    print(f"stored in {path}")
    return int(bool(tested or measured or not made["tests"]["passed"]))


if __name__ == "__main__":
    sys.exit(main())
