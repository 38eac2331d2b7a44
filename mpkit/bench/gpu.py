"""Figures of GPUs, where somebody had one: `make gpu` writes a file for each, and lessons show what is there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpkit.bench.measure import Row
from mpkit.data import data_dir
from mpkit.files import read_json

if TYPE_CHECKING:
    import pandas as pd

MISSING = (
    "Not measured on a GPU. `make gpu` on a machine with one writes data/benchmarks/gpu-<name>.json, and its figures "
    "then stand here."
)


def file_name(device: str) -> str:
    """The file of a device.

    >>> file_name("NVIDIA H100 80GB HBM3")
    'gpu-nvidia-h100-80gb-hbm3.json'
    """
    return f"gpu-{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def stored(folder: Path | None = None) -> Iterator[Mapping[str, Any]]:
    """What `make gpu` wrote on every device: `meta`, `tests` and `rows`."""
    folder = data_dir() / "benchmarks" if folder is None else folder
    for path in sorted(folder.glob("gpu-*.json")):
        yield read_json(path)


def table(group: str, folder: Path | None = None) -> pd.DataFrame | str:
    """The ratios of one topic on every GPU that was measured, or a sentence where none was."""
    import pandas as pd

    lines = [
        {"device": made["meta"]["device"], "case": row.case, "contender": row.contender, "ratio": round(row.ratio, 2)}
        for made in stored(folder)
        for row in (Row(**row) for row in made["rows"])
        if row.group == group and row.ratio is not None
    ]
    return pd.DataFrame(lines).set_index(["device", "case"]) if lines else MISSING
