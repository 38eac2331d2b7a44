"""The loop over epochs and batches, with everything that makes it stoppable and resumable."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from mpkit.model.callbacks import Callback, Checkpoint, RunContext
from mpkit.model.randomness import random_state, saves_itself, set_random_state, unseen
from mpkit.step import StepOutcome, TrainOneStepCell

READ_EVERY = 100  # steps between two reads of the overflow flags on the host, one read for all of them
STUCK = 20  # skipped steps in a row at a scale that can move no further, of which the end of an epoch tells
ANEW = "pass what can be iterated anew each time, such as a list or a DataLoader, not a generator"


@dataclass
class TrainingLoop:
    """One call of `Model.train` or `Model.fit`.

    Args:
        model:      has the cell that is called with each batch, and the manager that hears of every overflow.
        dataset:    gives the batches of one epoch whenever it is iterated.
        callbacks:  told in order, checkpoints last.
        run:        where the run stands; its counters are kept here.
        valid:      what the model is evaluated on after the epochs that are `due`; None: nothing.
        epochs_done:  epochs that count as done already.
    """

    model: Any
    dataset: Any
    callbacks: Sequence[Callback]
    run: RunContext
    valid: Iterable[Any] | None
    due: Container[int]
    epochs_done: int

    def __post_init__(self) -> None:
        self.callbacks = sorted(self.callbacks, key=lambda callback: isinstance(callback, Checkpoint))
        self.cell = self.model.train_network
        self.stop, self.interrupted = threading.Event(), False
        self.skipped_in_a_row = 0
        self._flags: list[Tensor] = []
        self._epoch_random: dict[str, Any] = {}

    def go(self, resumed: dict[str, Any] | None) -> None:
        """Run the epochs that are left, from the beginning of one or from where `resumed` says."""
        if resumed is not None:
            self._restore(resumed)
        with self._ctrl_c_waits():
            try:
                self.tell("on_train_begin")
                while self.epochs_done < self.run.epoch_num and not self.stopped:
                    self._epoch(resumed)
                    resumed = None
            except BaseException:
                self.run.failed = True  # the last checkpoint is better
                raise
            finally:
                self.tell("on_train_end")
        if self.interrupted:
            raise KeyboardInterrupt

    @contextmanager
    def _ctrl_c_waits(self) -> Iterator[None]:
        """Ctrl-C ends the run where `stopped` says, a second one at once. Only the main thread receives signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def first(number: int, frame: object) -> None:
            signal.signal(signal.SIGINT, before)
            self.interrupted = True
            self.stop.set()

        before = signal.signal(signal.SIGINT, first) or signal.default_int_handler
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @property
    def stopped(self) -> bool:
        """Whether the run is to end here: between two updates, so that weights, optimizer and scale belong together."""
        return self.stop.is_set() and not self.model.pending

    def progress(self) -> dict[str, Any]:
        """What a checkpoint needs to go on in the middle of an epoch with the same batches and random numbers."""
        self._read_flags()
        return {
            "epochs_done": self.epochs_done,
            "step_in_epoch": self.run.cur_step_in_epoch if self.epochs_done < self.run.cur_epoch_num else 0,
            "step": self.run.cur_step_num,
            "skipped_in_a_row": self.skipped_in_a_row,
            "random_at_epoch_start": self._epoch_random,
            "random": random_state(self.dataset),
            "loader": self.dataset.state_dict() if saves_itself(self.dataset) else None,
            "unseen": unseen(self.dataset),
            "callbacks": [[type(c).__name__, c.state_dict()] for c in self._stateful()],
        }

    def _stateful(self) -> list[Any]:
        return [callback for callback in self.callbacks if hasattr(callback, "state_dict")]

    def _restore(self, resumed: dict[str, Any]) -> None:
        saved = resumed["callbacks"]
        theirs, ours = [name for name, _ in saved], [type(callback).__name__ for callback in self._stateful()]
        if theirs != ours:
            raise ValueError(f"resume with the callbacks of the checkpoint, whose states are {theirs}, here {ours}")
        for callback, (_, state) in zip(self._stateful(), saved):
            callback.load_state_dict(state)
        self.epochs_done, self.run.cur_step_num = resumed["epochs_done"], resumed["step"]
        self.skipped_in_a_row = resumed["skipped_in_a_row"]

    def _epoch(self, resumed: dict[str, Any] | None) -> None:
        run, skip = self.run, 0 if resumed is None else resumed["step_in_epoch"]
        run.cur_epoch_num, run.cur_step_in_epoch = self.epochs_done + 1, skip
        self.cell.train()
        if resumed is not None:  # before a callback tells a sampler which epoch begins
            set_random_state(resumed["random_at_epoch_start" if skip else "random"], self.dataset)
        if not skip:
            self.tell("on_train_epoch_begin")
        for batch in self._batches(skip, resumed):
            run.net_outputs = self.cell(*self.model.arguments(batch))
            self.model.resumed = None  # from here on this run is what is saved
            run.cur_step_in_epoch, run.cur_step_num = run.cur_step_in_epoch + 1, run.cur_step_num + 1
            self._note(run.net_outputs)
            self.tell("on_train_step_end")
            if self.stopped:
                return
        if run.cur_step_in_epoch == 0:
            raise ValueError(f"the data set gave no batch in epoch {run.cur_epoch_num}; {ANEW}")
        self._read_flags()
        self._check_health()
        # whatever is saved from now on goes on with the next epoch
        self.model.resumed, self.epochs_done = None, run.cur_epoch_num
        self.tell("on_train_epoch_end")
        if self.valid is not None and run.cur_epoch_num in self.due:
            run.metrics = self.model.eval(self.valid)
            self.tell("on_eval_end")
        run.cur_step_in_epoch = 0

    def _batches(self, skip: int, resumed: dict[str, Any] | None) -> Iterable[Any]:
        """The batches of an epoch after the first `skip`: the loader goes on there, or those are drawn and left."""
        self._epoch_random = random_state(self.dataset)  # when this epoch began: a resumed one was brought back there
        own = None if resumed is None else resumed["loader"]
        if own is not None:
            self.dataset.load_state_dict(own)
        batches, left = iter(self.dataset), skip if own is None else 0
        drawn = sum(1 for _ in islice(batches, left))
        if drawn < left:
            ended = f"the data set ended after {drawn} batches, and the checkpoint was saved after {skip} of this epoch"
            raise ValueError(f"{ended}; resume with the data set that the run was started with")
        if resumed is not None and skip:
            set_random_state(resumed["random"], self.dataset)
        return batches

    def _note(self, outcome: object) -> None:
        if isinstance(outcome, StepOutcome) and isinstance(self.cell, TrainOneStepCell):
            self._flags.append(outcome.overflow)
            if len(self._flags) >= READ_EVERY:
                self._read_flags()

    def _read_flags(self) -> None:
        """Bring the overflow flags to the host, all at once, and tell the manager."""
        flags, self._flags = self._flags, []
        for overflow in torch.stack(flags).tolist() if flags else []:
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if overflow else 0
            if self.model.manager is not None:
                self.model.manager.update_loss_scale(overflow)
        if flags:
            self.cell.step.scaling.scale.check()  # raises here what the policy could not raise on the device

    def _check_health(self) -> None:
        """Why the last steps were skipped, where it is not the search of a scale: the weights, or the data."""
        if not self.skipped_in_a_row:
            return
        held = [*self.cell.network.named_parameters(), *self.cell.network.named_buffers()]
        if bad := [name for name, tensor in held if not tensor.detach().isfinite().all()]:
            way_out = "go back to an earlier checkpoint and lower the learning rate, or look for inf in the data"
            raise RuntimeError(f"{bad[0]!r} and {len(bad) - 1} more tensors hold inf or NaN, for ever; {way_out}")
        scale = float(self.cell.step.scaling.shown())
        if self.skipped_in_a_row >= STUCK and not 1 < scale < torch.inf:
            told = f"the last {self.skipped_in_a_row} steps were skipped: gradients overflow at a scale of {scale:g}"
            way_out = "check the data for inf and NaN, lower the rate, or keep the layer that overflows in float32"
            warnings.warn(f"{told}; {way_out} (mpkit.diagnose.diagnose names it)", RuntimeWarning, stacklevel=4)

    def tell(self, phase: str) -> None:
        """Call one method of every callback."""
        for callback in self.callbacks:
            getattr(callback, phase)(self.run)
