"""What every widget model shares: checked parameters, one recomputation per change, work in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from traitlets import Bool, Float, HasTraits, Int, TraitError, Unicode


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
    ValueError: steps must be between 0 and 10, got 11
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

    revision = Int(0, help="raised after every recomputation; views redraw on it")
    message = Unicode("", help="why the last input was refused, or what is going on")
    busy = Bool(False, help="work is going on in the background")
    progress = Float(0.0, help="share of the background work that is done, 0 to 1")

    def __init__(self, **params: object) -> None:
        self.lock = threading.RLock()
        self.changes = 0  # of results, by other means than the controls
        self._quiet = True
        self._worker: threading.Thread | None = None
        self._stop = threading.Event()
        super().__init__()
        self._quiet = False
        self._good = self.state()
        self.observe(self._changed, list(self.controls))
        if params:
            self.set(**params)
        else:
            self._recompute()
        self._opened = self.state()

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
        """Change several parameters at once, all or none. Raises ValueError, and says why in `message`."""
        unknown = set(params) - set(self.controls)
        if unknown:
            raise ValueError(f"there is no control {min(unknown)!r}; controls are {', '.join(self.controls)}")
        with self.lock:
            self._quiet = True
            try:
                for name, value in params.items():
                    setattr(self, name, value)
                self._recompute()
            except (TraitError, ValueError, TypeError) as error:
                self._restore()
                self.message = self._reason(error, params)
                raise ValueError(self.message) from None
            except BaseException:
                self._interrupted()
                raise
            finally:
                self._quiet = False

    def reset(self) -> None:
        """All parameters back to what they were when the explorer was made."""
        self.set(**self._opened)

    def idle(self) -> tuple[str, ...]:
        """Controls that change nothing as the others stand; a view hides them."""
        return ()

    def act(self, method: str, *given: Any) -> None:
        """Run the method of a button or gesture; a ValueError becomes `message`."""
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
                raise ValueError("it is still at work; press Stop first")
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
            self.busy = False
            self.touch()

    def _changed(self, change: object) -> None:
        if self._quiet:
            return
        with self.lock:
            try:
                self._recompute()
            except (ValueError, TypeError) as error:
                self._restore()
                self.message = str(error)
                raise ValueError(self.message) from None
            except BaseException:
                self._interrupted()
                raise

    def _recompute(self) -> None:
        self.compute()
        self._good = self.state()
        self.message = ""
        self.revision += 1

    def _restore(self) -> None:
        quiet, self._quiet = self._quiet, True
        try:
            for name, value in self._good.items():
                setattr(self, name, value)
        finally:
            self._quiet = quiet
        self.compute()

    def _interrupted(self) -> None:
        """The reader has interrupted the kernel: parameters and results fit each other again, and views draw them."""
        self._restore()
        self.revision += 1

    def _reason(self, error: Exception, params: Mapping[str, Any]) -> str:
        """traitlets speaks of traits and instances; the reader sees sliders."""
        if not isinstance(error, TraitError):
            return str(error)
        for name, value in params.items():
            trait = self.traits()[name]
            try:
                trait._validate(self, value)
            except TraitError:
                return f"{name} must be {_allowed(trait)}, got {value!r}"
        return str(error)


def _allowed(trait: Any) -> str:
    low, high, values = (getattr(trait, key, None) for key in ("min", "max", "values"))
    if values is not None:
        return "one of " + ", ".join(map(str, values))
    if low is not None and high is not None and low > -float("inf") and high < float("inf"):
        return f"between {low} and {high}"
    if low is not None and low > -float("inf"):
        return f"at least {low}"
    return trait.info()
