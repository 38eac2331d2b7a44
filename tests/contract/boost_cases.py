"""What the two tests of boost's golden data share: the cases of every file found, and what equal means there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import golden_files, load
from torch import Tensor

FILES = {path.stem: load(path) for path in golden_files("mindspore-boost")}


def cases(stem: str, key: str) -> list[Any]:
    """(file, case) for the case or the cases under `key` of every file whose name starts with `stem`."""
    found = []
    for name, content in FILES.items():
        if name.startswith(stem):
            entries = content.get(key, [])
            entries = entries if isinstance(entries, list) else [entries]
            found += [pytest.param(content, case, id=f"{name}-{key}-{i}") for i, case in enumerate(entries)]
    return found


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def close(got: Tensor, want: Any, tolerance: float) -> None:
    """Equal within `tolerance` * (1 + |want|)."""
    torch.testing.assert_close(got.detach().double(), double(want), rtol=tolerance, atol=tolerance)
