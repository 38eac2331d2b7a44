"""What `operations.toml` holds, read once: the lists of the frameworks, and kinds of functions."""

from __future__ import annotations

import tomllib
from pathlib import Path

from torch import nn

_TABLES = tomllib.loads(Path(__file__).with_name("operations.toml").read_text("utf-8"))
LISTS = {table: {name: tuple(text.split()) for name, text in rows.items()} for table, rows in _TABLES.items()}
MODULES: dict[str, tuple[type[nn.Module], ...]] = {
    name: tuple(getattr(nn, kind) for kind in kinds) for name, kinds in LISTS["modules"].items()
}
