"""`python -m mpkit experiment grid.json`: a grid on a server, which a second call of the same line goes on with."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mpkit.experiment.batches import found
from mpkit.experiment.engine import experiment
from mpkit.experiment.results import Results
from mpkit.experiment.training import train
from mpkit.files import FULL, read_json

KINDS = {"run": str, "fixed": dict, "grid": dict | list, "metrics": list}
KEYS = (*KINDS, "seeds", "baseline", "n_jobs")
HELP = """grid.json, for instance:
  {"grid": {"level": ["O0", "O2"], "dtype": ["fp16", "bfloat16"], "scaler": [null, "torch"]},
   "fixed": {"network": "LeNet5", "data": "digits", "epochs": 3},
   "seeds": 5, "baseline": {"level": "O0"}, "metrics": ["accuracy", "seconds_per_step"]}
"run" is "package.module:function" (default: mpkit.experiment.train); "fixed" are arguments of every cell that does
not say otherwise.
The finished cells go to the folder beside it, grid/; a file named stop in it ends the experiment; Ctrl-C does, too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a grid and print what it found.

    Returns:  0; 1 when a run failed; 2 for a file that cannot be used; 130 when it was stopped before its end.
    """
    parser = argparse.ArgumentParser(
        prog="mpkit experiment", description=__doc__, epilog=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("grid", type=Path, help="a JSON file")
    parser.add_argument("--folder", type=Path, help="where the finished cells go (default: the name of the file)")
    parser.add_argument("--jobs", type=int, help="processes; -1: one per core (default: n_jobs of the file, else 1)")
    parser.add_argument("--retry", action="store_true", help="run failed cells again")
    parser.add_argument("--show", action="store_true", help="run nothing, print what is finished")
    options = parser.parse_args(arguments)
    if not options.grid.name:  # as in `mpkit experiment "$GRID"` where the variable is not set
        parser.error("the name of the grid file is empty")
    folder = options.folder or options.grid.with_suffix("")
    try:
        if options.show:
            results = Results.load(folder)
            asked: dict[str, Any] = read(options.grid) if options.grid.is_file() else {}
        else:
            asked = read(options.grid)
            results = results_of(asked, folder, options.jobs, options.retry)
        print(told(results, asked.get("metrics")))
    except (OSError, TypeError, ValueError) as error:
        kept = "; what is finished is kept: give the same line again" if getattr(error, "errno", None) in FULL else ""
        print(f"mpkit experiment: {error}{kept}", file=sys.stderr)
        return 2
    if results.stopped:
        return 130
    return 1 if results.failures else 0


def results_of(asked: dict[str, Any], folder: Path, jobs: int | None = None, retry: bool = False) -> Results:
    """The experiment that a grid file asks for."""
    sys.path.insert(0, str(Path.cwd()))  # "package.module:function" may lie beside the file, as with python -m
    run = partial(found(asked["run"]) if "run" in asked else train, **asked.get("fixed", {}))
    options = {key: asked[key] for key in ("seeds", "baseline", "n_jobs") if key in asked}
    options |= {} if jobs is None else {"n_jobs": jobs}
    return experiment(run, asked["grid"], folder=folder, retry=retry, **options)


def read(path: Path) -> dict[str, Any]:
    """What a grid file asks for.

    Raises:  ValueError for what is no JSON, or has no grid or unknown keys; FileNotFoundError.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; mpkit experiment --help shows what to write into one")
    asked = read_json(path)
    if not isinstance(asked, dict) or "grid" not in asked or set(asked) - set(KEYS):
        came = sorted(set(asked) - set(KEYS)) if isinstance(asked, dict) else type(asked).__name__
        raise ValueError(f"{path} must be an object with 'grid' and perhaps {', '.join(KEYS)}; unknown: {came!s:.200}")
    for key, kind in KINDS.items():
        if key in asked and not isinstance(asked[key], kind):
            raise ValueError(f"{path}: {key!r} must be of the kind shown by --help, got {asked[key]!r:.80}")
    return asked


def told(results: Results, metrics: Sequence[str] | None = None) -> str:
    """The findings in sentences, on `metrics` or else on accuracy (or the first number there is) and seconds a step."""
    usual = [m for m in ("accuracy", "seconds_per_step") if m in results.metrics] or results.metrics[:1]
    lines = [repr(results), results.note]
    for metric in metrics or usual:
        try:
            said = list(results.summary(metric)["sentence"])
        except ValueError as error:  # a metric of no run: the others, and what failed, are to be told all the same
            said = [str(error)]
        lines += ["", str(metric), *(f"  {sentence}" for sentence in said)]
    for (cell, seed), text in results.failures.items():
        lines += ["", f"failed: {cell}, seed {seed}: {text.strip().splitlines()[-1]}"]
    return "\n".join(lines)
