"""What every widget model shares: checked parameters, one recomputation per change, work in the background."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
from traitlets import Bool, Bunch, Float, HasTraits, Int, TraitError, Unicode

from mpkit.arguments import is_number

AT_WORK = "it is still at work; press Stop first"


class Explorer(HasTraits):
    """A model of one interactive view that works without a browser.

    A subclass declares its parameters as traits, names them in `controls`, and overrides `compute` (parameters ->
    results, kept as plain attributes), `summary` (one sentence with the numbers on screen) and `table`.
    A trait's tags tell the view how to show it: `label`, `unit`, `scale` ("linear", "log2" or "log10"), `step`,
    `costly=True` (recompute when the control is released only).

    Every change of a control recomputes once and raises `revision`; a refused change leaves everything as it was,
    puts the reason into `message`, and raises. Callbacks may come from several threads: `lock` guards all of it.

    >>> class Halving(Explorer):
    ...     controls = ("steps",)
    ...     steps = Int(3, min=0, max=10)
    ...     def compute(self): self.value = 2.0 ** -self.steps
    >>> model = Halving()
    >>> model.steps = 4
    >>> model.value, model.revision
    (0.0625, 2)
    >>> model.set(steps=11)
    Traceback (most recent call last):
    ValueError: steps must be a whole number between 0 and 10, got 11
    >>> model.state()
    {'steps': 4}
    """

    controls: ClassVar[tuple[str, ...]] = ()
    actions: ClassVar[Mapping[str, str]] = {}
    """Button label -> name of the method that it calls."""
    gestures: ClassVar[tuple[str, ...]] = ()
    """Methods that a click, a drag or the pen in the picture calls with what was done."""
    ahead: ClassVar[tuple[str, ...]] = ()
    """Controls and gestures that the lesson is about: the pictures of their other values are sent to the page ahead."""

    fresh: ClassVar[Mapping[str, Any]] = {}
    """What the results depend on besides the parameters, such as what was drawn by hand, as it is before that."""

    memory: object = None
    """What the next picture will show of the one before it, beside the parameters."""

    revision = Int(0, help="raised after every recomputation; views redraw on it")
    message = Unicode("", help="why the last input was refused, or what is going on")
    busy = Bool(False, help="work is going on in the background")
    progress = Float(0.0, help="share of the background work that is done, 0 to 1")

    def __init__(self, **params: object) -> None:
        self.changes = 0  # of results, by other means than the controls
        self._alone()
        vars(self).update(self.fresh)
        super().__init__()
        self.set(**params)
        self._opened = self.state()

    def _alone(self) -> None:
        """What no copy shares with its original."""
        self.lock = threading.RLock()
        self._worker: threading.Thread | None = None
        self._stop = threading.Event()

    def __getstate__(self) -> dict[str, Any]:
        kept = {k: v for k, v in super().__getstate__().items() if k not in ("lock", "_worker", "_stop")}
        return kept | {"_trait_values": kept["_trait_values"] | {"busy": False}}  # work goes on in the original alone

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._alone()

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.controls:
            self.set(**{name: value})
        else:
            super().__setattr__(name, value)

    def compute(self) -> None:
        """Parameters -> results. A ValueError refuses the parameters."""

    def summary(self) -> str:
        """One sentence with the numbers on screen."""
        return ""

    def stored(self) -> str:
        """The sentence that a stored page shows: `summary` without figures that differ from machine to machine."""
        return self.summary()

    def table(self) -> list[dict[str, Any]]:
        """The data on screen, rounded, one dict per row."""
        return []

    def state(self) -> dict[str, Any]:
        """The parameters as they are now."""
        return {name: getattr(self, name) for name in self.controls}

    def set(self, **params: object) -> None:
        """Change several parameters at once, all or none. Raises ValueError, and says why in `message`.

        Observers hear of it when all is computed. What one of them raises is its own, and the change stands.
        """
        unknown = set(params) - set(self.controls)
        if unknown:
            raise ValueError(f"there is no control {min(unknown)!r}; controls are {', '.join(self.controls)}")
        self._change(params)

    def _change(self, params: Mapping[str, Any], **own: object) -> None:
        """Change parameters, and what else the results depend on."""
        with self.lock:
            before, held = self.state(), {name: getattr(self, name) for name in own}
            begun = done = False
            try:
                wanted = {name: self._checked(name, value) for name, value in params.items()}
                begun = True
                self._trait_values.update(wanted)
                vars(self).update(own)
                self.compute()
                after, done = self.state(), True
                self.changes += bool(own)
                self._tell(before, after)
            except BaseException as error:
                if done and isinstance(error, Exception):
                    raise
                if begun and not done:
                    self._trait_values.update(before)
                    vars(self).update(held)
                    self.compute()
                if not isinstance(error, ValueError | TypeError):
                    self.revision += 1  # the reader has interrupted the kernel: views draw what is there
                    raise
                self.message = str(error)
                raise ValueError(self.message) from None

    def _tell(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        self.message = ""
        self.revision += 1
        for name in self.controls:
            if before[name] != after[name]:
                told = Bunch(name=name, old=before[name], new=after[name], owner=self, type="change")
                self.notify_change(told)

    def _checked(self, name: str, value: object) -> object:
        """The value as Python's own kind and as the trait holds it. Raises ValueError for any other."""
        trait: Any = self.traits()[name]
        given = value = value.item() if isinstance(value, np.generic) else value
        try:
            if isinstance(trait, Int | Float):
                low, high = _ends(trait)
                value = value if is_number(value) and low <= value <= high else ...  # NaN lies nowhere
            elif values := getattr(trait, "values", ()):
                plain = is_number(value) or isinstance(value, str)
                value = next((v for v in values if v is value or (plain and v == value)), ...)
            elif isinstance(trait, Bool | Unicode) and not isinstance(value, bool if isinstance(trait, Bool) else str):
                value = ...  # traitlets takes bytes and 0 or 1 too
            return trait._validate(self, value)
        except (TraitError, OverflowError):
            raise ValueError(f"{name} must be {_allowed(trait)}, got {given!r:.80}") from None

    def reset(self) -> None:
        """All parameters back to what they were when the explorer was made, and nothing drawn."""
        self._change(self._opened, **self.fresh)

    def idle(self) -> tuple[str, ...]:
        """Controls that change nothing as the others stand; a view hides them."""
        return ()

    def act(self, method: str, *given: object) -> None:
        """Run the method of a button or gesture; a ValueError becomes `message`, in place of what stood there."""
        self.message = ""
        try:
            getattr(self, method)(*given)
        except ValueError as error:
            self.message = str(error)

    def touch(self) -> None:
        """Tell the views that results have changed."""
        with self.lock:
            self.changes += 1
            self.revision += 1

    def start(self, work: Callable[[], Iterator[float]], redraw_every: float = 0.25) -> None:
        """Run a generator in the background; it yields the share of the work done (0 to 1) as often as it likes.

        Views are told at most every `redraw_every` seconds, and at the end. Raises ValueError if work is going on.
        """
        with self.lock:
            if self.busy:  # a thread that has told its end may still be drawing: it is no reason to refuse
                raise ValueError(AT_WORK)
            stop = self._stop = threading.Event()
            self.message = ""  # why an earlier press was refused no longer holds
            self.progress, self.busy = 0.0, True
            self._worker = threading.Thread(target=self._run, args=(work, redraw_every, stop), daemon=True)
            self._worker.start()

    def stop(self) -> None:
        """End the background work after its current step."""
        self._stop.set()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the background work has ended. Raises TimeoutError after `timeout` seconds."""
        if self._worker is None:
            return
        self._worker.join(timeout)
        if self._worker.is_alive():
            raise TimeoutError(f"the background work has not ended within {timeout} s")

    def _run(self, work: Callable[[], Iterator[float]], redraw_every: float, stop: threading.Event) -> None:
        last = 0.0
        try:
            for share in work():
                if time.monotonic() - last >= redraw_every:
                    self.progress = share
                    self.touch()
                    last = time.monotonic()
                if stop.is_set():
                    break
            else:
                self.progress = 1.0
        except Exception as error:  # a thread has nobody to raise to: the reader gets the reason
            self.message = f"{type(error).__name__}: {error}"
        finally:
            self.message = self.message.replace(AT_WORK, "")  # why a press was refused no longer holds
            self.busy = False
            self.touch()


def counted(number: int, noun: str) -> str:
    """A count and its noun.

    >>> counted(1, "step"), counted(2, "step")
    ('1 step', '2 steps')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def stroke(drawn: Mapping[Any, Any], steps: int, low: float, high: float) -> dict[int, float]:
    """A stroke of the pen, step -> height: without what lies outside the steps, and no higher than the picture.

    Raises ValueError unless all of it are numbers.
    """
    try:
        points = {int(step): float(height) for step, height in drawn.items()}
        if not all(map(math.isfinite, points.values())):
            raise ValueError
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise ValueError(f'a stroke is the height at each step, such as {{"7": 16.5}}, got {drawn!r:.80}') from None
    return {step: min(max(height, low), high) for step, height in points.items() if 0 <= step < steps}


def _ends(trait: Any) -> tuple[float, float]:
    low, high = trait.min, trait.max
    return -math.inf if low is None else low, math.inf if high is None else high


def _allowed(trait: Any) -> str:
    """In the reader's words: traitlets speaks of traits and instances."""
    if values := getattr(trait, "values", None):
        return "one of " + ", ".join(map(str, values))
    if not isinstance(trait, Int | Float):
        return "true or false" if isinstance(trait, Bool) else "text" if isinstance(trait, Unicode) else trait.info()
    low, high = _ends(trait)
    what = "a whole number" if isinstance(trait, Int) else "a number"
    ends = [f"at least {low}" * (low > -math.inf), f"at most {high}" * (high < math.inf)]
    return f"{what} between {low} and {high}" if all(ends) else " ".join(filter(None, [what, *ends]))
