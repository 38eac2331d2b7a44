"""Lessons 00 and 04: a training on the digits that is steered while it runs."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mpkit.casting import LEVELS
from mpkit.lessons.digits import Run, recorded_run, training
from mpkit.policies import ScalePolicy, ScaleState, advance, initial
from mpkit.scalers import LossScaler
from mpkit.view import Choice, Range, Sheet, counted, exponent, loss_and_scale, percent, power_of_two, view

WIDE = 240  # steps in the picture
FLOOR = (-14, 10)


# ---- a training that is steered while it runs
class SteeredScaler(LossScaler):
    """A loss scaler whose policy is asked for anew before every step, so that it can be steered while it runs."""

    def __init__(self, policy: Callable[[], ScalePolicy], kicked: Callable[[], int] = lambda: 0) -> None:
        self._policy, self._kicked, self._done = policy, kicked, 0
        self._state: ScaleState = initial(policy())
        self.scale_value = torch.tensor(self._state.scale, dtype=torch.float32)

    def adjust(self, grads_finite: Tensor) -> bool:
        """One step of the policy as it is now; then what was asked for by hand, powers of two: `kicked` in all, those
        before the first step among them."""
        self._state, _ = advance(self._policy(), self._state, bool(grads_finite))
        kick, self._done = self._kicked() - self._done, self._kicked()
        if kick:  # the running step is over: its gradients were divided by what multiplied its loss
            scale = min(2.0**100, max(2.0**-40, self._state.scale * 2.0**kick))
            self._state = self._state._replace(scale=scale, decided=scale, good=0)
        self.scale_value.fill_(self._state.scale)
        return True


def live_policy(start: int, factor: int, window: int, floor: int, **_: Any) -> ScalePolicy:
    """The policy of the sliders; a window lowered below the steps counted so far is full at once."""
    return ScalePolicy.by_factor(2.0**start, float(factor), window, 2.0 ** min(floor, start), growth_ge=True)


def steered(now: Callable[[], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Train until stopped, with the policy and the kicks of the moment; the run that was there is the one before."""
    given = now()
    yield {"before": given["run"], "run": None}
    scaler = SteeredScaler(lambda: live_policy(**now()), lambda: now()["kicks"])
    for run in training(given["level"], scaler, dtype=given["dtype"], steps=given["steps"]):
        yield {"run": run, "progress": len(run.losses) / given["steps"]}


@view(
    level=Choice({name: name for name in LEVELS if name != "auto"}, "casting level"),
    dtype=Choice({"float16": "float16", "bfloat16": "bfloat16"}, "16-bit format"),
    start=Range(0, 30, label="initial scale, 2 to the"),
    factor=Range(2, 16, label="scale_factor"),
    window=Range(1, WIDE, label="scale_window, steps"),
    floor=Range(*FLOOR, label="floor, 2 to the"),
)
def live(
    see: Sheet, level="O2", dtype="float16", start=16, factor=2, window=20, floor=0, kicks=0, steps=2000, hand=True,
    run: Run | None = None, before: Run | None = None,
) -> None:  # fmt: skip
    """A real training on the digits whose scale can be steered while it runs, beside the run before it.

    Numbers: `run before`. Without `hand` there are no floor and no kicks: the scaler of the first lesson, which steps
    as `DynamicLossScaler` does.
    """
    see.grid(380, 900, cols=(1, 1.2))
    see.buttons = {"Train": steered}
    if hand:
        see.buttons |= {"Scale × 2^10": {"kicks": kicks + 10}, "Scale / 2^10": {"kicks": kicks - 10}}
    see.idle = ({"hand"} if hand else {"hand", "floor"}) | ({"level", "dtype", "start"} if see.busy else set())
    last = max(WIDE, len(run.losses) if run else 0)
    old = ("run before", before) if before else ("recorded, with momentum", recorded_run(WIDE))
    # the recorded one has no later steps
    runs = [(*old, "reference", "--")] * bool(before or last == WIDE) + [("this run", run, "own", None)] * bool(run)
    _, panel = loss_and_scale(see, runs, last - WIDE, last, also=(start, floor) if hand else (start,))
    if last == WIDE and not see.busy:  # a training that runs has begun at another scale
        panel.handle("y", "start", start, 0, 30, "initial scale, 2 to the", cross=0.03 * WIDE, note="start")
    if hand:
        panel.handle("y", "floor", floor, *FLOOR, "floor, 2 to the", note=f"floor {power_of_two(floor)}")

    low = f", floor 2^{floor}" * hand + f", moved by hand by 2^{kicks}" * bool(kicks)
    settings = f"Set to {level} in {computed(level, dtype)}, start 2^{start}, factor {factor}, window {window}{low}."
    now = f"This run: {told(run)}." if run else "Press Train; what you move then acts on the running training."
    grey = " Grey: another training of this network, recorded with momentum and window 50." * (last == WIDE)
    see.say(f"{settings} {now}{f' Before: {told(before)}.' if before else grey}", run=run, before=before)


def computed(level: str, dtype: str) -> str:
    """The format that a level computes in: O0 casts nothing."""
    return "float32" if level == "O0" else dtype


def told(run: Run) -> str:
    """A run in words."""
    right = "" if run.accuracy is None else f", {percent(run.accuracy)} of the test digits right"
    head = f"{run.level} in {computed(run.level, run.dtype)}, {counted(len(run.losses), 'step')}: loss"
    return f"{head} {run.losses[-1]:.2f}{right}, {len(run.skipped)} skipped, last scale {exponent(run.scales[-1])}"
