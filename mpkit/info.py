"""`mpkit info`: device, versions, and what is installed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from mpkit import __version__
from mpkit.data import data_dir
from mpkit.device import describe
from mpkit.lab import installed_lessons

PACKAGES = ("numpy", "pandas", "matplotlib", "joblib", "ipywidgets", "jupyterlab")


def main(arguments: Sequence[str] = ()) -> int:
    """Print it, one subject a line."""
    argparse.ArgumentParser(prog="mpkit info", description=__doc__).parse_args(arguments)
    for subject, text in facts():
        print(f"{subject:9} {text}", flush=True)
    return 0


def facts() -> Iterator[tuple[str, str]]:
    """(subject, text) of every line."""
    installed = {each.name: each.version for each in metadata.distributions()}
    missing = ", ".join(name for name in PACKAGES if name not in installed)
    data = data_dir()
    traces, benchmarks = (len([*data.glob(pattern)]) for pattern in ("traces/*.npz", "benchmarks/*.json"))
    digits = "digits" if (data / "digits.npz").exists() else "NO digits"
    yield "mpkit", f"{__version__} in {Path(__file__).resolve().parent}"
    yield "packages", ", ".join(f"{name} {installed[name]}" for name in PACKAGES if name in installed)
    yield "missing", f"{missing}; pip install 'mpkit[lab]'" if missing else "nothing that lessons need"
    yield "data", f"{data}: {digits}, {traces} traces, {benchmarks} benchmarks"
    yield "lessons", str(installed_lessons() or "those of the checkout")
    try:
        yield from describe().items()
    except ValueError as error:  # MPKIT_DEVICE names what is not there: to be told here of all places
        yield "device", f"none: {error}"
