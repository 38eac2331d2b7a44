"""A prediction that is drawn: the next steps of a loss scale, and then what really happened over it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from traitlets import Unicode

from mpkit.explorers.base import Explorer
from mpkit.explorers.scaling import exponent, recorded, stepped
from mpkit.policies import ScalePolicy

SHOWN, STEPS, EVERY = 40, 100, 10
LOWEST, HIGHEST = 14, 22
"""Powers of two that can be drawn."""


class DrawExplorer(Explorer):
    """The first 40 steps of a scale with factor 2 and window 20; the reader draws the next 60, then sees them.

    `guess` (60,) are the exponents drawn, `truth` (100,) those of the scale, `top` (100,) those of the ceiling. Once
    `reveal` was called the drawing stays as it is, until `reset`.
    """

    controls = ("typed",)
    actions = {"Show what happened": "reveal"}
    gestures = ("draw",)
    typed = Unicode("17 17 17 17 17 17").tag(label="or type it: 2 to the ..., from step 40, 50, 60, 70, 80, 90 on")

    def __init__(self, **params: object) -> None:
        policy = ScalePolicy.by_factor(2.0**16, 2.0, 20, 1.0)
        ceiling = recorded("gpt_sums")[1][:STEPS]
        scale, self.finite, _ = stepped(policy, ceiling)
        self.truth, self.top = np.log2(scale), np.log2(ceiling)
        self.revealed = False
        super().__init__(**params)

    def compute(self) -> None:
        """What is typed becomes the drawing: one power of two for every ten steps."""
        if self.revealed:
            raise ValueError("your prediction was made: press Reset to draw another one")
        words = re.split(r"[\s,;]+", self.typed.strip())
        if len(words) != (STEPS - SHOWN) // EVERY or not all(re.fullmatch(r"\d{1,2}(\.\d+)?", word) for word in words):
            raise ValueError(f"type six exponents such as 17 18 18 17 16 17, got {self.typed!r}")
        self.guess = np.repeat(np.clip([float(word) for word in words], LOWEST, HIGHEST), EVERY)

    def draw(self, stroke: Mapping[str, float]) -> None:
        """Take over what the pen drew: step -> exponent. Raises ValueError once the truth is shown."""
        if self.revealed:
            raise ValueError("your prediction was made: press Reset to draw another one")
        with self.lock:
            for step, height in stroke.items():
                if SHOWN <= int(step) < STEPS:
                    self.guess[int(step) - SHOWN] = min(max(float(height), LOWEST), HIGHEST)
            self.touch()

    def reveal(self) -> None:
        """Show what happened."""
        self.revealed = True
        self.touch()

    def reset(self) -> None:
        self.revealed = False
        super().reset()
        self.touch()

    @property
    def close(self) -> int:
        """Steps of the 60 in which the drawing lies within half a power of two of the scale."""
        return int((np.abs(self.guess - self.truth[SHOWN:]) <= 0.5).sum())

    def word(self) -> str:
        """What is said of the drawing: which wrong picture it shows, if one of the usual ones."""
        guess, top = self.guess, self.top[SHOWN:]
        moves = np.abs(np.diff(guess))
        above = int((guess > top).sum())
        if self.close >= 54:
            return "This is the right picture: rests of 20 steps, single doublings, a fall at the ceiling."
        if np.ptp(guess) < 0.5:
            return (
                "You drew a scale that rests. It cannot rest: 20 finite steps in a row always double it, until it "
                "meets the ceiling again."
            )
        if np.abs(guess - top).mean() < 0.6:
            return (
                "You followed the ceiling. The scaler does not see it: it counts finite steps, and learns of the "
                "ceiling only when a step overflows."
            )
        if (moves > 0.01).sum() > 12:
            return "You drew a smooth curve. The scale only doubles, halves, or rests."
        if above > 6:
            return (
                f"Your line lies above the ceiling in {above} steps. It cannot stay there: each of these steps would "
                "be skipped and would halve the scale."
            )
        return (
            "Look where the lines part. The scale doubles 20 finite steps after its last change, and every overflow "
            "halves it at once."
        )

    def summary(self) -> str:
        if not self.revealed:
            return (
                f"Factor 2, window 20: the scale starts at {exponent(2.0 ** self.truth[0])} and doubles at step 20. "
                f"Draw it from step {SHOWN} to {STEPS - 1} with the mouse, or type it; then press Show what happened."
            )
        changes = np.flatnonzero(np.diff(self.truth)) + 1
        ups, downs = (
            [int(i) for i in changes if i >= SHOWN and (self.truth[i] > self.truth[i - 1]) == up] for up in (1, 0)
        )
        return (
            f"In {self.close} of {STEPS - SHOWN} steps your line is within half a power of two of the scale. "
            f"{self.word()} What happened: the scale doubled at the steps {_listed(ups)} and halved at the steps "
            f"{_listed(downs)}."
        )

    def table(self) -> list[dict[str, Any]]:
        return [
            {"step": i, "your scale": f"2^{self.guess[i - SHOWN]:.4g}"}
            | ({"scale": f"2^{self.truth[i]:.4g}"} if self.revealed else {})
            | {"ceiling": f"2^{self.top[i]:.4g}"}
            for i in range(SHOWN, STEPS, 5)
        ]


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps[:-1])) + f" and {steps[-1]}"
