"""What may look in on a training run, print, save and stop it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from mpkit.arguments import check_alike, check_count
from mpkit.step import StepOutcome


@dataclass
class RunContext:
    """Where a training run stands; callbacks receive it and may stop the run.

    model:           the `Model` that is trained.
    epoch_num:       epochs of the whole run.
    batch_num:       batches per epoch, None when the data set does not know.
    cur_epoch_num:   epoch now running, from 1.
    cur_step_in_epoch:  batch of the epoch, from 1; 0 before the first.
    cur_step_num:    steps since the training began, from 1.
    net_outputs:     what the train cell returned: a loss or a `StepOutcome`.
    metrics:         the last evaluation, empty before.
    failed:          True in `on_train_end` when an error ended the run, so that its state is not worth saving.
    Source:  MindSpore RunContext; `original_args()` returns the same object under its names there.
    """

    model: Any
    epoch_num: int
    batch_num: int | None
    cur_epoch_num: int = 0
    cur_step_in_epoch: int = 0
    cur_step_num: int = 0
    net_outputs: Any = None
    metrics: dict[str, float] = field(default_factory=dict)
    failed: bool = False

    def original_args(self) -> RunContext:
        """This object."""
        return self

    @property
    def loss(self) -> Tensor:
        """The mean loss of the last step, () float32."""
        out = self.net_outputs
        return (out[0] if isinstance(out, tuple) else out).detach().float().mean()

    def request_stop(self) -> None:
        """End the run after the step that is running."""
        self.model.request_stop()


class Callback:
    """Is told about a training run; override what you need.

    A callback with `state_dict` and `load_state_dict` is saved in checkpoints and restored with them.
    Source:  MindSpore train.Callback (`on_*` methods).
    """

    def on_train_begin(self, run: RunContext) -> None:
        """The run starts, or goes on after a checkpoint was loaded."""

    def on_train_epoch_begin(self, run: RunContext) -> None:
        """An epoch starts."""

    def on_train_step_end(self, run: RunContext) -> None:
        """`run.net_outputs` holds the step's result; reading it makes the host wait for the device."""

    def on_train_epoch_end(self, run: RunContext) -> None:
        """An epoch is over, its evaluation not."""

    def on_eval_end(self, run: RunContext) -> None:
        """`run.metrics` holds the evaluation of `fit`."""

    def on_train_end(self, run: RunContext) -> None:
        """The run is over; also called when it ends by an error."""


class LossMonitor(Callback):
    """Print `epoch: 1 step: 100, loss is 1.740437` whenever that many steps have passed since the last line.

    Args:     per_print_times: steps between two lines, counted over epochs (0: never).
    Raises:   ValueError if negative. A loss of nan or inf ends the training with ValueError, where the train cell has
              no overflow check (a cell that scales the loss skips such a step instead).
    Source:   MindSpore train.LossMonitor: a train cell without scaling prints the loss as a Python float, one with
              scaling as a float32 with the fewest digits that tell it apart.
    """

    def __init__(self, per_print_times: int = 1) -> None:
        self.per_print_times = check_count("per_print_times", per_print_times, low=0)  # 0 never prints
        self._last = 0

    def on_train_begin(self, run: RunContext) -> None:
        self._last = min(self._last, run.cur_step_num)

    def on_train_step_end(self, run: RunContext) -> None:
        if not self.per_print_times or run.cur_step_num - self._last < self.per_print_times:
            return
        self._last = run.cur_step_num
        where, loss = f"epoch: {run.cur_epoch_num} step: {run.cur_step_in_epoch}", run.loss.cpu()
        scaled = isinstance(run.net_outputs, StepOutcome)
        if not scaled and not loss.isfinite():
            way_out = "look at the inputs and the learning rate, or take a loss_scale_manager, which skips such steps"
            raise ValueError(f"{where}: the loss is {loss.item()}, so training stopped; {way_out}")
        shown = str(loss.numpy()[()]) if scaled else loss.item()  # 8 digits of a float32, or the float64 that equals it
        print(f"{where}, loss is {shown}", flush=True)

    def on_eval_end(self, run: RunContext) -> None:
        print(f"Eval result: epoch {run.cur_epoch_num}, metrics: {run.metrics}", flush=True)

    def state_dict(self) -> dict[str, int]:
        return {"last": self._last}

    def load_state_dict(self, state: dict[str, int]) -> None:
        check_alike("the state of a LossMonitor", state, self.state_dict())
        self._last = check_count("last", state["last"], low=0)


class ProgressBar(Callback):
    """A bar over the steps of the whole run with the loss, read every `every` steps, and the loss scale.

    It needs tqdm (`pip install mpkit[lab]`).
    """

    def __init__(self, every: int = 10, **options: object) -> None:
        self.every = check_count("every", every)
        self.options = options
        self._bar: Any = None

    def on_train_begin(self, run: RunContext) -> None:
        from tqdm.auto import tqdm

        total = None if run.batch_num is None else run.epoch_num * run.batch_num
        self._bar = tqdm(total=total, initial=run.cur_step_num, unit="step", **self.options)

    def on_train_step_end(self, run: RunContext) -> None:
        self._bar.update()
        if run.cur_step_num % self.every == 0:
            shown = {"loss": f"{run.loss:.5g}"}
            if isinstance(run.net_outputs, StepOutcome):
                shown["scale"] = f"{float(run.net_outputs.scale):.5g}"
            self._bar.set_postfix(shown)

    def on_train_end(self, run: RunContext) -> None:
        if self._bar is not None:  # a callback before this one may have failed when the run began
            self._bar.close()


class Checkpoint(Callback):
    """Save everything that a resumed training needs, so that a killed process loses at most `every` steps.

    A checkpoint falls between two updates: one that is due in an accumulation waits for its end. What is summed and not
    used when the whole run ends is not saved.

    Args:
        path:   the file; it is replaced as a whole, so a kill while writing leaves the previous one.
        every:  steps between two saves; the end of the run is saved too, unless an error ended it.
    Resume with `if path.exists(): model.load(path)` before `model.train(...)` with the same arguments.
    """

    def __init__(self, path: str | os.PathLike[str], every: int = 100) -> None:
        self.path = Path(path)
        self.every = check_count("every", every)
        self._due = False

    def on_train_step_end(self, run: RunContext) -> None:
        self._due = self._due or run.cur_step_num % self.every == 0
        if self._due and not run.model.pending:
            run.model.save(self.path)
            self._due = False

    def on_train_end(self, run: RunContext) -> None:
        if not run.failed:
            run.model.save(self.path)
