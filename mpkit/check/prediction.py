"""A prediction: a question with a few answers, given before the result stands on the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Prediction:
    """What a reader predicts.

    Args:
        prompt:   what is asked.
        choices:  pairs of an answer and what is said of it once it was chosen: why it holds, or which wrong picture
                  of the matter usually leads to it.
        truth:    computes the letter of the right answer: "a" for the first one.
    """

    prompt: str
    choices: Sequence[tuple[str, str]]
    truth: Callable[[], str]

    def told(self, first: str, now: str) -> str:
        """What is said when `now` was chosen, and `first` was the first choice of all."""
        word = self.choices[ord(now) - ord("a")][1]
        right = self.truth()
        if now != first:
            return f"Your prediction was ({first}). Of ({now}): {'right. ' if now == right else ''}{word}"
        if now == right:
            return f"You predicted ({now}), and so it is. {word}"
        return f"You predicted ({now}). Run the next cells: they show something else. {word}"
