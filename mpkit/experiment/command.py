"""`python -m mpkit experiment grid.json`: a grid on a server, which a second call of the same line goes on with."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from mpkit.arguments import check_kind
from mpkit.experiment.engine import experiment
from mpkit.experiment.results import Results
from mpkit.experiment.training import train
from mpkit.files import read_json, short

HELP = """grid.json, for instance:
  {"grid": {"level": ["O0", "O2"], "dtype": ["fp16", "bfloat16"], "scaler": [null, "torch"]},
   "fixed": {"network": "my_networks:Small", "data": "digits", "epochs": 3},
   "seeds": 5, "baseline": {"level": "O0"}, "metrics": ["accuracy", "seconds_per_step"]}
"run" is "package.module:function" (default: mpkit.experiment.train); "fixed" are arguments of every cell that does
not say otherwise. A text of that form stands for what it names there, too.
The finished cells go to the folder beside it, grid/; Ctrl-C ends the experiment, and the same line goes on with it."""


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
    options = parser.parse_args(arguments)
    jobs = {} if options.jobs is None else {"n_jobs": options.jobs}
    try:
        asked = read(options.grid)
        results = results_of(asked, options.folder or options.grid.with_suffix(""), retry=options.retry, **jobs)
        print(told(results, asked.get("metrics")))
    except (OSError, TypeError, ValueError) as error:
        print(f"mpkit experiment: {error}", file=sys.stderr)
        return 2
    return 130 if results.stopped else int(bool(results.failures))


def read(path: Path) -> dict[str, Any]:
    """What a grid file asks for. Raises ValueError for what is no JSON, TypeError for another kind; OSError."""
    asked = read_json(path)
    check_kind(str(path), asked, dict, "an object, as mpkit experiment --help shows")
    if "grid" not in asked:
        raise ValueError(f"{path} has no grid; mpkit experiment --help shows one")
    check_kind("metrics", asked.get("metrics"), list, "a list of names", optional=True)
    return asked


def results_of(asked: dict[str, Any], folder: Path, **options: Any) -> Results:
    """The experiment that a grid file asks for."""
    sys.path.insert(0, str(Path.cwd()))  # "package.module:function" may lie beside the file, as with python -m
    given = {key: resolved(held) for key, held in asked.items() if key not in ("run", "fixed", "metrics")} | options
    run = found(asked["run"]) if "run" in asked else train
    return experiment(partial(run, **resolved(asked.get("fixed", {}))), **given, folder=folder)


def resolved(value: Any) -> Any:
    """A value of the file, in which a text such as "package.module:name" is what it names."""
    if isinstance(value, dict):
        return {key: resolved(held) for key, held in value.items()}
    if isinstance(value, list):
        return [resolved(held) for held in value]
    is_name = isinstance(value, str) and re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", value)
    return found(value) if is_name else value


def found(name: str) -> Any:
    """What "package.module:name" names. Raises ValueError when it names nothing, or when its module fails."""
    try:
        return resolve_name(name)
    except (Exception, SystemExit) as error:
        need = f"{name!r} cannot be imported as package.module:name: {type(error).__name__}: {short(error)}"
        raise ValueError(need) from error


def told(results: Results, metrics: Sequence[str] | None = None) -> str:
    """The findings in sentences, on `metrics` or else on accuracy (or the first number there is) and seconds a step."""
    usual = [m for m in ("accuracy", "seconds_per_step") if m in results.metrics] or results.metrics[:1]
    lines = [repr(results), results.note]
    for metric in metrics or usual:
        lines += ["", metric, *(f"  {sentence}" for sentence in results.summary(metric)["sentence"])]
    for (cell, seed), text in results.failures.items():
        lines += ["", f"failed: {cell}, seed {seed}: {text.strip().splitlines()[-1]}"]
    return "\n".join(lines)
