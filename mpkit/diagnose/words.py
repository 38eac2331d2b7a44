"""What the tools of this part say, `words.toml`: one place to read every sentence; and what `watch_loop` finds."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORDS: dict[str, dict[str, Any]] = tomllib.loads((Path(__file__).parent / "words.toml").read_text(encoding="utf-8"))
MISTAKES: dict[str, str] = WORDS["mistakes"]


def said(part: str, key: str, /, **values: object) -> str:
    """A sentence of a part with its values filled in.

    >>> said("report", "went_in", operand="a float16 tensor")
    'Into it went a float16 tensor.'
    """
    sentence: str = WORDS[part][key]
    return sentence.format(**values)


@dataclass(frozen=True)
class LoopFinding:
    """What a loop does wrong: its `mistake` (a key of `MISTAKES`), `where` it is (optimizer, step, line) and the
    `advice`, with the line that mends it."""

    mistake: str
    where: str
    advice: str

    def __str__(self) -> str:
        return f"{self.mistake}: {self.where}: {self.advice}"


@dataclass
class LoopReport:
    """What was seen of a loop: `findings`, one for each mistake of an optimizer; `steps` it took, skipped ones too."""

    findings: list[LoopFinding] = field(default_factory=list)
    steps: int = 0

    def __str__(self) -> str:
        seen = f"{self.steps} step{'s' * (self.steps != 1)} watched"
        if not self.findings:
            return f"{seen}: no mistake" if self.steps else f"{seen}: let the loop run inside the `with` block"
        return "\n".join([f"{seen}:", *(f"  {found}" for found in self.findings)])
