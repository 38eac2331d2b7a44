"""What several tests share: the golden data of the real frameworks."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SECOND_TRY = "needed a second try"  # what a browser test records when it failed once
GOLDEN = Path(os.environ.get("MPKIT_GOLDEN", ROOT / "tests" / "golden"))


def golden_files(folder: str) -> list[Path]:
    """Every file of one golden folder that holds a JSON object, in a stable order."""
    return [path for path in sorted((GOLDEN / folder).glob("*.json")) if isinstance(load(path), dict)]


def golden_data(folder: str, *keys: str) -> list[dict[str, Any]]:
    """The golden files that hold all `keys`: a file is told by its content, whatever its name; others are left out."""
    return [load(path) for path in golden_files(folder) if load(path).keys() >= set(keys)]


@cache
def load(path: Path) -> dict[str, Any]:
    """One golden file, parsed once per test process; callers do not change it."""
    return json.loads(path.read_text())


def array(obj: dict[str, Any]) -> np.ndarray:
    """An array object {"shape", "dtype", "data"} with "inf", "-inf" and "nan" as strings -> ndarray."""
    return np.array([float(v) for v in obj["data"]], dtype=obj["dtype"]).reshape(obj["shape"])
