"""Predictions that are drawn: the first part of a curve is shown, the reader draws the rest, and then sees it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from traitlets import Unicode

from mpkit.explorers.base import Explorer, stroke
from mpkit.explorers.dim_reduce import earlier_path, reduced_path
from mpkit.explorers.rounding import running_sum
from mpkit.explorers.scaling import exponent, recorded, stepped
from mpkit.formats import FP16
from mpkit.policies import ScalePolicy
from mpkit.rounding import ulp


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


class DrawExplorer(DrawnExplorer):
    """Lesson 05: the first 40 steps of a scale with factor 2 and window 20; the reader draws the next 60.

    `truth` (100,) are exponents of the scale, `top` (100,) those of the ceiling.
    """

    first, low, high, within, count = SHOWN, 14.0, 22.0, 0.5, (STEPS - SHOWN) // EVERY
    nearly, asked = "half a power of two of the scale", "six exponents such as 17 18 18 17 16 17"
    typed = Unicode("17 17 17 17 17 17").tag(label="or type it: 2 to the ..., from step 40, 50, 60, 70, 80, 90 on")

    def __init__(self, **params: object) -> None:
        policy = ScalePolicy.by_factor(2.0**16, 2.0, 20, 1.0)
        ceiling = recorded("gpt_sums")[1][:STEPS]
        scale, self.finite, _ = stepped(policy, ceiling)
        self.truth, self.top = np.log2(scale), np.log2(ceiling)
        super().__init__(**params)

    def spread(self, typed: Sequence[float]) -> np.ndarray:
        """One power of two for every ten steps."""
        return np.repeat(np.asarray(typed, dtype=float), EVERY)

    def word(self) -> str:
        guess, top = self.guess, self.top[SHOWN:]
        moves = np.diff(guess)
        above = int((guess > top).sum())
        if self.close >= 54:
            return "This is the right picture: rests of 20 steps, single doublings, a fall at the ceiling."
        if np.ptp(guess) < 0.5:
            return (
                "You drew a scale that rests. It cannot rest so long: 20 finite steps in a row always double it, "
                "until it meets the ceiling again."
            )
        if np.abs(guess - top).mean() < 0.6:
            return (
                "You followed the ceiling. The scaler does not see it: it counts finite steps, and learns of the "
                "ceiling only when a step overflows."
            )
        if (changes := int(np.count_nonzero(moves))) > 12:
            real = int((np.diff(self.hidden) != 0).sum())
            return (
                f"You drew a scale that changes {changes} times. It doubles, halves, or rests, and it changes only "
                f"{real} times here."
            )
        if above > 6:
            return (
                f"Your line lies above the ceiling in {above} steps. It cannot stay there: each of these steps "
                "would be skipped and would halve the scale."
            )
        return (
            "Look where the lines part. The scale doubles 20 finite steps after its last change, and every "
            "overflow halves it at once."
        )

    def opening(self) -> str:
        return (
            f"Factor 2, window 20: the scale starts at {exponent(2.0 ** self.truth[0])} and doubles at step 20. "
            f"How does it go on from step {SHOWN} to {STEPS - 1}?"
        )

    def happened(self) -> str:
        changes = np.flatnonzero(np.diff(self.truth)) + 1
        ups, downs = (
            [int(i) for i in changes if i >= SHOWN and (self.truth[i] > self.truth[i - 1]) == up] for up in (1, 0)
        )
        return f"the scale doubled at the steps {_listed(ups)} and halved at the steps {_listed(downs)}."

    def table(self) -> list[dict[str, Any]]:
        return [
            {"step": i, "your scale": f"2^{self.guess[i - SHOWN]:.4g}"}
            | ({"scale": f"2^{self.truth[i]:.4g}"} if self.revealed else {})
            | {"ceiling": f"2^{self.top[i]:.4g}"}
            for i in range(SHOWN, STEPS, 5)
        ]


class GapExplorer(DrawnExplorer):
    """Lesson 01: the gap from each power of two to the next number of float16, as powers of two; that of 1 is known.

    `exponents` (40,) are those of the powers of two, 2^-24 to 2^15.
    """

    low, high, within, count = -30.0, 10.0, 0.5, 9
    nearly, asked = "half a power of two of the gap", "nine exponents such as -20 -18 -15 -12 -9 -6 -3 0 3"
    typed = Unicode("-10 -10 -10 -10 -10 -10 -10 -10 -10").tag(
        label="or type it: 2 to the ..., nine gaps at equal distances from 2^-24 to 2^15"
    )
    exponents = np.arange(-24, 16)

    def __init__(self, **params: object) -> None:
        self.truth = np.log2(ulp(torch.exp2(torch.from_numpy(self.exponents).double()), FP16).numpy())
        super().__init__(**params)

    def word(self) -> str:
        guess, small = self.guess, self.exponents < -14
        if self.close >= 36:
            return "This is the right picture: it rises with the numbers, and it is level at the left."
        if np.ptp(guess) < 1:
            return (
                "You drew one gap for all numbers. Whole numbers have that. In float16 the gap grows with the number."
            )
        if np.corrcoef(self.exponents, guess)[0, 1] < -0.8:
            return "You drew larger gaps for smaller numbers. But small numbers lie closer together than large ones."
        if np.abs(guess - (self.exponents - 10)).mean() < 1:
            return (
                "You drew a gap that shrinks all the way down. Below 2^-14 there is no smaller exponent, so the "
                "numbers there, the subnormal ones, keep the gap of their right neighbours."
            )
        if np.abs(guess - self.truth)[small].mean() < 1:
            return "The left part is right. Above 2^-14 the gap doubles with every power of two."
        return "Look where the lines part. Eleven significant bits make the gap 2^-10 of the number, down to 2^-14."

    def opening(self) -> str:
        return (
            "The gap from 1 to the next number of float16 is 2^-10. How large is the gap at every other power of two?"
        )

    def happened(self) -> str:
        return "from 2^-24 to 2^-14 the gap stays 2^-24, then it doubles with every power of two, up to 2^5 at 2^15."

    def table(self) -> list[dict[str, Any]]:
        return [
            {"number": f"2^{e}", "your gap": f"2^{mine:.4g}"} | ({"gap": f"2^{gap:g}"} if self.revealed else {})
            for e, mine, gap in zip(self.exponents.tolist(), self.guess, self.truth)
        ]


class TotalExplorer(DrawnExplorer):
    """Lesson 02: the float16 sum of 0 to 4000 ones, added one by one; the sums up to 500 are known."""

    each = 100
    first, low, high, within, count = 6, 0.0, 4200.0, 60.0, 7
    nearly, asked = "60 of the sum", "seven sums such as 1000 1500 2000 2500 3000 3500 4000"
    typed = Unicode("500 500 500 500 500 500 500").tag(
        label="or type it: seven sums at equal distances from 600 to 4000 ones"
    )

    def __init__(self, **params: object) -> None:
        totals = running_sum(torch.ones(4000, dtype=torch.float16)).float().numpy()
        self.truth = np.concatenate([[0.0], totals[self.each - 1 :: self.each]])
        super().__init__(**params)

    def word(self) -> str:
        guess, exact = self.guess, self.each * np.arange(self.first, len(self.truth))
        first, second = guess[len(guess) // 2] - guess[0], guess[-1] - guess[len(guess) // 2]
        if self.close >= 31:
            return "This is the right picture: exact up to 2048, and nothing after it."
        if np.abs(guess - exact).mean() < 120:
            return (
                "You drew the exact sum. float16 holds 4000, but above 2048 it has no odd numbers: 2048 + 1 is a tie."
            )
        if (guess - exact > 120).any():
            return "You drew a sum that is larger than the number of ones. No rounding here makes it larger."
        if (np.maximum.accumulate(guess) - guess > 60).any():
            return "You drew a sum that falls. It cannot fall: at worst, adding 1 changes nothing."
        if np.ptp(guess[-5:]) < 120:
            return f"You drew a sum that stops near {guess[-1]:.0f}. It does stop, where the gap becomes 2."
        drew = "You drew a sum that slows down." if second < 0.8 * first else "Look where the lines part."
        return f"{drew} Up to 2048 every sum is exact. After it each addition is lost as a whole."

    def opening(self) -> str:
        return "Ones are added in float16, one by one. The first 500 sums are exact. How does it go on up to 4000 ones?"

    def happened(self) -> str:
        return (
            f"the sum is exact up to {self.truth.max():.0f} and stays there: 2049 is a tie that goes to the even 2048."
        )

    def table(self) -> list[dict[str, Any]]:
        return [
            {"ones": self.each * i, "your sum": f"{self.guess[i - self.first]:.0f}"}
            | ({"sum in float16": f"{self.truth[i]:.0f}"} if self.revealed else {})
            for i in range(self.first, len(self.truth), 2)
        ]


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


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps[:-1])) + f" and {steps[-1]}"
