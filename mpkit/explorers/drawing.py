"""Predictions that are drawn: the first part of a curve is shown, the reader draws the rest, and then sees it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from traitlets import Unicode

from mpkit.explorers.base import Explorer, stroke
from mpkit.explorers.dim_reduce import earlier_path, reduced_path


class DrawnExplorer(Explorer):
    """A curve over the points 0, 1, 2 ... of which the first are shown; the reader draws the others.

    A subclass sets `truth` (N,) before it is made, and says how a drawing is `called` and what `happened`. `guess`
    (N - first,) are the values drawn. Once `reveal` was called the drawing stays as it is, until `reset`.
    """

    controls = ("typed",)
    actions = {"Show what happened": "reveal"}
    gestures = ("draw",)
    fresh: ClassVar[Mapping[str, Any]] = {"revealed": False}
    revealed: bool
    first: ClassVar[int] = 0
    low: ClassVar[float]
    high: ClassVar[float]
    within: ClassVar[float]
    """How near to the truth a value counts as right, and as words."""
    nearly: ClassVar[str]
    count: ClassVar[int]
    asked: ClassVar[str]
    truth: np.ndarray
    typed = Unicode()

    def __init__(self, **params: object) -> None:
        super().__init__(**params)
        self.given = self.guess.copy()

    def spread(self, typed: Sequence[float]) -> np.ndarray:
        """Typed values -> (N - first,): straight lines between them, at equal distances from the first point on."""
        places = np.linspace(0, len(self.truth) - self.first - 1, len(typed))
        return np.interp(np.arange(len(self.truth) - self.first), places, typed)

    def compute(self) -> None:
        """What is typed becomes the drawing."""
        if self.revealed:
            raise ValueError("your prediction was made: press Reset to draw another one")
        words = re.split(r"[\s,;]+", self.typed.strip())
        right = len(words) == self.count and all(re.fullmatch(r"-?\d{1,4}(\.\d+)?", word) for word in words)
        if not right or not all(self.low <= float(word) <= self.high for word in words):
            raise ValueError(f"type {self.asked}, each from {self.low:g} to {self.high:g}, got {self.typed!r}")
        self.guess = self.spread([float(word) for word in words])

    def draw(self, line: Mapping[str, float]) -> None:
        """Take over what the pen drew: point -> value. Raises ValueError once the truth is shown."""
        if self.revealed:
            raise ValueError("your prediction was made: press Reset to draw another one")
        with self.lock:
            points = {p: v for p, v in stroke(line, len(self.truth), self.low, self.high).items() if p >= self.first}
            guess = self.guess.copy()
            guess[[p - self.first for p in points]] = list(points.values())
            self.guess = guess
            self.touch()

    def reveal(self) -> None:
        """Show what happened."""
        self.revealed = True
        self.touch()

    @property
    def hidden(self) -> np.ndarray:
        """(N - first,) what was to be drawn."""
        return self.truth[self.first :]

    @property
    def close(self) -> int:
        """At how many points the drawing is nearly right."""
        return int((np.abs(self.guess - self.hidden) <= self.within).sum())

    def opening(self) -> str:
        """What is known, and what is to be drawn."""
        raise NotImplementedError

    def word(self) -> str:
        """What is said of the drawing: which wrong picture it shows, if one of the usual ones."""
        raise NotImplementedError

    def happened(self) -> str:
        """The truth in a sentence."""
        raise NotImplementedError

    def summary(self) -> str:
        if not self.revealed:
            return f"{self.opening()} Draw it with the mouse, or type it. Then press Show what happened."
        near = f"At {self.close} of {len(self.guess)} points your line is within {self.nearly}."
        word = self.word()
        if np.array_equal(self.guess, self.given):  # Show was pressed at once
            word = word.replace("You drew", "The line that you left as it was shows", 1)
        return f"{near} {word} What happened: {self.happened()}"


SHOWN, STEPS, EVERY = 40, 100, 10


class StuckExplorer(DrawnExplorer):
    """Lesson 11: the loss of DimReduce with 2 components over 40 steps, beside the descent that they come from."""

    first, low, high, within, count = 1, 0.0, 2.5, 0.1, 9
    nearly, asked = "0.1 of the loss", "nine losses such as 2.2 2 1.8 1.6 1.4 1.2 1 0.8 0.6"
    typed = Unicode("2.3 2.3 2.3 2.3 2.3 2.3 2.3 2.3 2.3").tag(label="or type it: nine losses from left to right")

    def __init__(self, **params: object) -> None:
        self.truth, self.descent = reduced_path(2).losses, earlier_path().losses
        super().__init__(**params)

    def word(self) -> str:
        guess = self.guess
        if self.close >= 34:
            return "This is the right picture: the loss falls quickly, and then it hardly moves."
        if np.abs(guess - self.descent[1:]).mean() < 0.15:
            return (
                "You followed gradient descent. Two components hold nearly all of its movement. But DimReduce takes "
                "larger steps along them, and soon both steps that it tries are far too long: it refuses them."
            )
        if guess[-1] < 0.5:
            return (
                "You drew a training that succeeds. Points with a low loss lie in these two directions, but "
                "DimReduce does not get there: soon both steps that it tries are far too long, and it refuses them."
            )
        if np.ptp(guess) < 0.2 and abs(guess[0] - self.truth[0]) < 0.2:
            return "You drew a loss that does not fall. The first steps in the two directions do lower it."
        return "Look where the lines part. The loss falls while a step that is tried is accepted, and then it stays."

    def opening(self) -> str:
        return (
            "The grey line is the loss of gradient descent. The first 2 components hold 99.8 % of the movement of its "
            "weights. What is the loss of DimReduce, which makes its large steps along these 2 components only?"
        )

    def happened(self) -> str:
        return (
            f"the loss falls to {self.truth[5]:.2f} in 5 steps and is {self.truth[-1]:.2f} after 40: the run is stuck."
        )

    def table(self) -> list[dict[str, Any]]:
        return [
            {"step": i, "your loss": f"{self.guess[i - 1]:.2f}"}
            | ({"DimReduce": f"{self.truth[i]:.2f}"} if self.revealed else {})
            | {"gradient descent": f"{self.descent[i]:.2f}"}
            for i in range(1, len(self.truth), 3)
        ]
