"""`mpkit info`: device, versions, and what is installed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from mpkit import __version__


def main(arguments: Sequence[str] = ()) -> int:
    """Print it, one subject a line."""
    argparse.ArgumentParser(prog="mpkit info", description=__doc__).parse_args(arguments)
    for subject, text in facts():
        print(f"{subject:9} {text}", flush=True)
    return 0


def facts() -> Iterator[tuple[str, str]]:
    """(subject, text) of every line, the cheap ones first."""
    yield "mpkit", f"{__version__} in {Path(__file__).resolve().parent}"
    extras = wanted()
    for extra, names in extras.items():
        missing = [name for name in names if version(name) is None]
        remedy = f"; pip install 'mpkit[{extra}]'" if extra else ""
        yield extra or "needed", f"missing: {', '.join(missing)}{remedy}" if missing else "complete"
    if not extras:
        yield "extras", "unknown: mpkit is not installed here, it runs from its folder; pip install -e '.[lab]'"
    yield "packages", ", ".join(f"{name} {v}" for name in ("numpy", "pandas", "jupyterlab") if (v := version(name)))
    from mpkit.data import data_dir
    from mpkit.device import as_device, describe
    from mpkit.lab import installed_lessons

    data = data_dir()
    counts = (f"{len(list(data.glob(f'{folder}/*.{kind}')))} {folder}" for folder, kind in STORED)
    yield "data", f"{data}: {'digits' if (data / 'digits.npz').exists() else 'NO digits'}, {', '.join(counts)}"
    yield "lessons", str(installed_lessons() or "those of the checkout")
    try:
        yield from describe().items()
    except ValueError as error:  # MPKIT_DEVICE names what is not there: to be told here of all places
        yield "device", f"none: {error}"
        yield from list(describe(as_device("cpu")).items())[1:]


STORED = (("traces", "npz"), ("benchmarks", "json"))


def wanted() -> dict[str, list[str]]:
    """Extra -> the packages that it asks for by itself, "" for those that mpkit always needs; empty if not installed.

    >>> "torch" in wanted().get("", ["torch"])
    True
    """
    try:
        lines = metadata.requires("mpkit") or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, list[str]] = {}
    for line in lines:
        name, extra = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"]([\w-]+)", line)
        if name and name[0] != "mpkit":
            found.setdefault(extra[1] if extra else "", []).append(name[0])
    return found


def version(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
