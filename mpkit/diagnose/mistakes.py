"""What `watch_loop` finds: the mistakes of a training loop, each with the line that mends it."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpkit.diagnose.words import WORDS

MISTAKES: dict[str, str] = WORDS["mistakes"]


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
