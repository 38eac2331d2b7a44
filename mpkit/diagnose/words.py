"""What the tools of this part say, `words.toml`: one place to read every sentence."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

WORDS: dict[str, dict[str, Any]] = tomllib.loads((Path(__file__).parent / "words.toml").read_text(encoding="utf-8"))


def said(part: str, key: str, /, **values: object) -> str:
    """A sentence of a part with its values filled in.

    >>> said("report", "went_in", operand="a float16 tensor")
    'Into it went a float16 tensor.'
    """
    sentence: str = WORDS[part][key]
    return sentence.format(**values)
