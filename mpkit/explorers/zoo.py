"""The loss-scale rules of all frameworks on one sequence of overflows, and one rule that cannot work."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from traitlets import Bool, Enum, Float, Int

from mpkit.explorers.base import Explorer
from mpkit.explorers.scaling import exponent, stepped
from mpkit.policies import FRAMEWORKS, ScalePolicy, naive_loss_ratio, own_names, preset, stack
from mpkit.replay import simulate

STEPS = 200
SITUATIONS = {
    "drop": "the ceiling falls and returns",
    "outliers": "one bad batch in 20 steps",
    "fixed": "the ceiling stays at 2^13",
    "model": "the model is broken",
    "free": "nothing ever overflows",
}
_TOLD = {
    "drop": "The ceiling falls from 2^20 to 2^3 at step 60 and returns at step 120.",
    "outliers": "The ceiling is 2^18, and one batch in 20 steps is bad.",
    "fixed": "The ceiling is 2^13 from the start.",
    "model": "The model is broken: from step 60 on every gradient is NaN.",
    "free": "Nothing ever overflows.",
}
_START_NEEDED = ("jmp", "mindspore_scaler", "mindspore_cell")  # their classes have no default for it
_FACTOR_NEEDED = ("mindspore_scaler", "mindspore_cell")
ZOO = (*(name for name in FRAMEWORKS if name not in ("mpkit", "fairscale_layerwise")), "mpkit")


def zoo_policy(framework: str, interval: int, start: float | None = None) -> ScalePolicy:
    """A framework's policy with this growth interval and, if given, this start; all else is its default."""
    own_start, own_interval = own_names(framework)
    parameters: dict[str, Any] = {own_interval: interval}
    if own_start is not None and (start is not None or framework in _START_NEEDED):
        parameters[own_start] = 2.0**16 if start is None else start
    if framework in _FACTOR_NEEDED:
        parameters["scale_factor"] = 2
    return preset(framework, **parameters)


def situation(name: str, steps: int = STEPS) -> np.ndarray:
    """The largest scale that each step can bear, (steps,); negative where none works."""
    i = np.arange(steps)
    return {
        "drop": np.where((i >= 60) & (i < 120), 2.0**3, 2.0**20),
        "outliers": np.where(i % 20 == 19, 2.0**2, 2.0**18),
        "fixed": np.full(steps, 2.0**13),
        "model": np.where(i >= 60, -1.0, 2.0**20),
        "free": np.full(steps, math.inf),
    }[name]


class ZooExplorer(Explorer):
    """All frameworks on one sequence of overflows: `scales` (steps, frameworks), `ceiling`, `done`."""

    controls = ("situation", "interval", "same_start", "start_exponent")
    situation = Enum(list(SITUATIONS), "drop").tag(label="what happens", names=SITUATIONS)
    interval = Int(20, min=2, max=200).tag(label="growth interval", unit="steps")
    same_start = Bool(True).tag(label="all start at the same scale")
    start_exponent = Int(16, min=4, max=24).tag(label="that start, 2 to the")

    def compute(self) -> None:
        start = 2.0**self.start_exponent if self.same_start else None
        self.names = ZOO
        self.ceiling = situation(self.situation)
        self.policies = stack(zoo_policy(name, self.interval, start) for name in ZOO)
        self.done = simulate(self.ceiling, self.policies)
        self.scales = self.done.sampled
        with np.errstate(invalid="ignore"):
            self.finite = self.scales <= self.ceiling[:, None]
        self.parting = self._parting()

    def _parting(self) -> tuple[int, int, int]:
        """(step, rule, rule) where two rules that had gone together first use another scale; step -1 where none does.

        Of several such pairs the one whose scales lie furthest apart in the end.
        """
        with np.errstate(divide="ignore"):
            powers = np.nan_to_num(np.log2(self.scales), nan=-200.0, posinf=200.0, neginf=-200.0)
        changed = np.flatnonzero((powers != powers[:, :1]).any(axis=1))
        if not len(changed):
            return -1, 0, 1
        step = int(changed[0])
        low = int(powers[step].argmin())
        others = np.flatnonzero(powers[step] != powers[step, low])
        far = others[np.abs(powers[:, others] - powers[:, [low]]).mean(axis=0).argmax()]
        return step, min(low, int(far)), max(low, int(far))

    def ending(self, i: int) -> str:
        """How framework i ends, in a word or two."""
        if self.done.raised_at[i] >= 0:
            return f"stops at step {self.done.raised_at[i]}"
        final = self.done.final[i]
        if not math.isfinite(final) or final == 0:
            return "inf" if final > 0 else "0"
        return exponent(final)

    def summary(self) -> str:
        skipped = self.done.skipped
        stops = [self.names[i] for i in np.flatnonzero(self.done.raised_at >= 0)]
        raised = f" Rules that raise an error and stop: {', '.join(stops)}." if stops else ""
        own = "start at their own defaults (jmp and two of MindSpore's, which have none, at 2^16)"
        start = f"start at 2^{self.start_exponent}" if self.same_start else own
        least, most = int(skipped.min()), int(skipped.max())
        counts = f"The rules skip between {least} ({self._who(least)}) and {most} ({self._who(most)}) of {STEPS} steps."
        if least == most:
            counts = f"Every rule skips {most} of {STEPS} steps."
        return (
            f"{len(self.names)} rules {start}, with a growth interval of {self.interval} steps. "
            f"{_TOLD[self.situation]} {counts}{raised}"
        )

    def _who(self, skips: int) -> str:
        """The rules that skip so many steps: the one, or how many they are and one of them."""
        who = [name for name, own in zip(self.names, self.done.skipped) if own == skips]
        return who[0] if len(who) == 1 else f"{len(who)} rules, such as {who[0]}"

    def table(self) -> list[dict[str, Any]]:
        lowest = np.fmin(self.done.lowest, self.done.final)  # the last decision may go below what was used
        return [
            {
                "framework": name,
                "skipped": int(self.done.skipped[i]),
                "lowest": exponent(float(lowest[i])),
                "ends at": self.ending(i),
            }
            for i, name in enumerate(self.names)
        ]


class NaiveExplorer(Explorer):
    """The rule that compares the loss with the scale, beside torch's: `naive` and `torch` (300,) scales used.

    `ceiling` is the largest scale whose gradients are finite; the naive rule does not look at them, so its steps above
    the ceiling (`poisoned`) go into the weights.
    """

    controls = ("start_exponent", "loss", "ceiling_exponent")
    STEPS = 300
    start_exponent = Int(0, min=-8, max=16).tag(label="start, 2 to the")
    loss = Float(2.3, min=0.01, max=1000.0).tag(label="loss", unit="nats", scale="log10", step=0.05)
    ceiling_exponent = Int(18, min=4, max=24).tag(label="ceiling of the gradients, 2 to the")

    def compute(self) -> None:
        ceiling, scale = 2.0**self.ceiling_exponent, 2.0**self.start_exponent
        naive = []
        for _ in range(self.STEPS):
            naive.append(scale)
            scale = naive_loss_ratio(scale, self.loss)
        self.naive = np.array(naive)
        policy = preset("torch", init_scale=2.0**self.start_exponent, growth_interval=20)
        self.torch, _, _ = stepped(policy, np.full(self.STEPS, ceiling))
        self.ceiling = ceiling
        self.poisoned = np.flatnonzero(self.naive > ceiling)

    def summary(self) -> str:
        end = self.naive[-1]
        if len(self.poisoned):
            fate = f"from step {self.poisoned[0]} on inf goes into the weights"
        elif end < self.naive[0]:
            fate = "the gradients sink below what float16 can hold"
        else:
            fate = "it rests, because it happens to lie between the loss and twice the loss"
        return (
            f"The naive rule starts at 2^{self.start_exponent}, with a loss of {self.loss:.4g}. "
            f"At step {self.STEPS - 1} its scale is {exponent(end)}: {fate}. "
            f"At step {self.STEPS - 1} the scale of torch's rule is {exponent(self.torch[-1])}. The ceiling is "
            f"2^{self.ceiling_exponent}."
        )

    def table(self) -> list[dict[str, Any]]:
        return [
            {"step": i, "naive rule": exponent(self.naive[i]), "torch": exponent(self.torch[i])}
            for i in range(0, self.STEPS, 30)
        ]
