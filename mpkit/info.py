"""`mpkit info`: device, versions, and what is installed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from mpkit import __version__

PACKAGES = ("numpy", "pandas", "matplotlib", "joblib", "ipywidgets", "jupyterlab")
STORED = (("traces", "npz"), ("benchmarks", "json"))


def main(arguments: Sequence[str] = ()) -> int:
    """Print it, one subject a line."""
    argparse.ArgumentParser(prog="mpkit info", description=__doc__).parse_args(arguments)
    for subject, text in facts():
        print(f"{subject:9} {text}", flush=True)
    return 0


def facts() -> Iterator[tuple[str, str]]:
    """(subject, text) of every line, the cheap ones first."""
    yield "mpkit", f"{__version__} in {Path(__file__).resolve().parent}"
    versions = {name: version(name) for name in PACKAGES}
    missing = [name for name, found in versions.items() if not found]
    yield "packages", ", ".join(f"{name} {found}" for name, found in versions.items() if found)
    yield "missing", f"{', '.join(missing)}; pip install 'mpkit[lab]'" if missing else "nothing that lessons need"
    from mpkit.data import data_dir
    from mpkit.device import describe
    from mpkit.lab import installed_lessons

    data = data_dir()
    counts = (f"{len(list(data.glob(f'{folder}/*.{kind}')))} {folder}" for folder, kind in STORED)
    yield "data", f"{data}: {'digits' if (data / 'digits.npz').exists() else 'NO digits'}, {', '.join(counts)}"
    yield "lessons", str(installed_lessons() or "those of the checkout")
    try:
        yield from describe().items()
    except ValueError as error:  # MPKIT_DEVICE names what is not there: to be told here of all places
        yield "device", f"none: {error}"


def version(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
