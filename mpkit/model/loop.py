"""The loop over epochs and batches, with everything that makes it stoppable and resumable."""

from __future__ import annotations

import math
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.model.callbacks import Callback, Checkpoint, RunContext
from mpkit.model.randomness import random_state, saves_itself, set_random_state, unseen
from mpkit.step import StepOutcome, TrainOneStepCell

READ_EVERY = 100
"""Steps between two reads of the overflow flags on the host (one read for all of them)."""
STUCK = 20
"""Skipped steps in a row, at the floor of the scale, from which the end of an epoch says what is wrong."""


class TrainingLoop:
    """One call of `Model.train` or `Model.fit`.

    Args:
        model:      has the cell that is called with each batch, and the manager that hears of every overflow.
        dataset:    gives the batches of one epoch whenever it is iterated.
        callbacks:  told in order, checkpoints last.
        run:        where the run stands; its counters are kept here.
        first_epoch:  epochs that count as done already.
        evaluate:   called after an epoch's callbacks.
    """

    def __init__(
        self,
        model: Any,
        dataset: Iterable[Any],
        callbacks: Sequence[Callback],
        run: RunContext,
        first_epoch: int,
        evaluate: Callable[[], None],
    ) -> None:
        self.cell = model.train_network
        self.dataset = dataset
        self.callbacks = sorted(callbacks, key=lambda callback: isinstance(callback, Checkpoint))
        self.run = run
        self.model = model
        self.evaluate = evaluate
        self.stop, self.interrupted = threading.Event(), False
        self.epochs_done, self.step_in_epoch = first_epoch, 0
        self.skipped_in_a_row = 0
        self._flags: list[Tensor] = []
        self._epoch_random: dict[str, Any] = {}

    def restore(self, resumed: dict[str, Any]) -> None:
        """Stand where a checkpoint was saved; `go` draws its batches and random numbers."""
        self._restore_callbacks(resumed["callbacks"])
        self.epochs_done = resumed["epochs_done"]
        self.run.cur_step_num = resumed["step"]
        self.skipped_in_a_row = resumed["skipped_in_a_row"]

    def go(self, resumed: dict[str, Any] | None) -> None:
        """Run the epochs that are left, from the beginning of one or from where `resumed` says."""
        skip = 0 if resumed is None else resumed["step_in_epoch"]
        with self._ctrl_c_waits():
            try:
                self.tell("on_train_begin")
                while self.epochs_done < self.run.epoch_num and not self.stopped:
                    self._epoch(skip, resumed)
                    skip, resumed = 0, None
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

        def first(number: int, frame: object) -> None:
            signal.signal(signal.SIGINT, before)
            self.interrupted = True
            self.stop.set()

        if threading.current_thread() is not threading.main_thread():
            yield
            return
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
            "step_in_epoch": self.step_in_epoch,
            "step": self.run.cur_step_num,
            "skipped_in_a_row": self.skipped_in_a_row,
            "random_at_epoch_start": self._epoch_random,
            "random": random_state(self.dataset),
            "loader": self.dataset.state_dict() if saves_itself(self.dataset) else None,  # type: ignore[attr-defined]
            "unseen": unseen(self.dataset),
            "callbacks": [[type(c).__name__, c.state_dict()] for c in self._stateful()],
        }

    def _stateful(self) -> list[Any]:
        return [callback for callback in self.callbacks if hasattr(callback, "state_dict")]

    def _restore_callbacks(self, saved: list[Any]) -> None:
        theirs, ours = [name for name, _ in saved], [type(callback).__name__ for callback in self._stateful()]
        if theirs != ours:
            raise ValueError(
                f"the checkpoint holds the states of the callbacks {theirs}, this run has {ours}; "
                "resume with the callbacks that the run was started with"
            )
        for callback, (_, state) in zip(self._stateful(), saved):
            callback.load_state_dict(state)

    def _epoch(self, skip: int, resumed: dict[str, Any] | None) -> None:
        run = self.run
        run.cur_epoch_num, run.cur_step_in_epoch = self.epochs_done + 1, skip
        self.step_in_epoch = skip
        self.cell.train()
        if resumed is not None:  # before a callback tells a sampler which epoch begins
            set_random_state(resumed["random_at_epoch_start" if skip else "random"], self.dataset)
        if not skip:
            self.tell("on_train_epoch_begin")
        for batch in self._batches(skip, resumed):
            run.net_outputs = self.cell(*self.model.arguments(batch))
            self.step_in_epoch += 1
            run.cur_step_in_epoch, run.cur_step_num = self.step_in_epoch, run.cur_step_num + 1
            self._note(run.net_outputs)
            self.tell("on_train_step_end")
            if self.stopped:
                return
        if self.step_in_epoch == 0:
            raise ValueError(
                f"the data set gave no batch in epoch {run.cur_epoch_num}; pass something that can be iterated anew "
                "for every epoch, such as a list or a DataLoader, not a generator"
            )
        self._read_flags()
        self._check_health()
        # whatever is saved from now on goes on with the next epoch
        self.epochs_done, self.step_in_epoch = run.cur_epoch_num, 0
        self.tell("on_train_epoch_end")
        self.evaluate()
        run.cur_step_in_epoch = 0

    def _batches(self, skip: int, resumed: dict[str, Any] | None) -> Iterable[Any]:
        """The batches of an epoch after the first `skip`: the loader goes on there, or those are drawn and left."""
        self._epoch_random = random_state(self.dataset) if not skip else (resumed or {})["random_at_epoch_start"]
        own = (resumed or {}).get("loader")
        if own is not None:
            self.dataset.load_state_dict(own)  # type: ignore[attr-defined]
        batches = iter(self.dataset)
        for drawn in range(skip if own is None else 0):
            if next(batches, self) is self:
                raise ValueError(
                    f"the data set ended after {drawn} batches, and the checkpoint was saved after {skip} of this "
                    "epoch; resume with the data set that the run was started with"
                )
        if resumed is not None and skip:
            set_random_state(resumed["random"], self.dataset)
        return batches

    def _note(self, outcome: object) -> None:
        if isinstance(outcome, StepOutcome):
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
        if flags and isinstance(self.cell, TrainOneStepCell):
            self.cell.step.scaling.scale.check()  # raises here what the policy could not raise on the device

    def _check_health(self) -> None:
        """Why the last steps were skipped, where it is not the search of a scale: the weights, the scale, the data."""
        if not self.skipped_in_a_row:
            return
        outcome = self.run.net_outputs  # None when the run was resumed after the last step of the epoch
        scale = float(outcome.scale if outcome is not None else getattr(self.cell, "scale_sense", math.nan))
        if bad := _nonfinite(getattr(self.cell, "network", self.cell)):
            raise RuntimeError(
                f"{bad[0]!r} and {len(bad) - 1} more tensors of the network hold inf or NaN, so every gradient does: "
                "no loss scale can repair weights; go back to a checkpoint from before, then lower the learning rate "
                "or look for a batch with inf in it"
            )
        if math.isinf(scale):
            raise RuntimeError(
                "the loss scale itself is inf, so every gradient is: its rule grew past the largest float32 and cannot "
                "come back; set a finite scale, and give the rule a cap or a longer window"
            )
        if self.skipped_in_a_row >= STUCK and scale <= 1:
            message = (
                f"the last {self.skipped_in_a_row} steps were skipped: gradients overflow although the loss scale is "
                "at its floor, so the scale is not the cause; check the batch for inf and NaN, lower the learning "
                "rate, or keep the layer that overflows in float32 (mpkit.diagnose.diagnose names it)"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=5)

    def tell(self, phase: str) -> None:
        """Call one method of every callback."""
        for callback in self.callbacks:
            getattr(callback, phase)(self.run)


def _nonfinite(network: nn.Module) -> list[str]:
    """Names of the parameters and buffers that hold inf or NaN. Reads the device once."""
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    named = {name: t.detach() for name, t in tensors.items() if t.is_floating_point() and t.numel()}
    bad = torch.stack([(~t.isfinite()).any() for t in named.values()]).tolist() if named else []
    return [name for name, is_bad in zip(named, bad) if is_bad]
