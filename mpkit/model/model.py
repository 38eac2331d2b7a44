"""`Model`: a network, a loss and an optimizer, trained, evaluated and used without writing the loop."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import length_hint
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.arguments import check_count, check_kind, checked
from mpkit.casting.low import map_tensors
from mpkit.model.callbacks import Callback, RunContext
from mpkit.model.checkpoint import load_whole, need_same_tensors, save_whole
from mpkit.model.loop import ANEW, TrainingLoop
from mpkit.model.metrics import Metric, metrics_from, of_loss, places_of
from mpkit.step import WithLossCell, build_train_network
from mpkit.step.build import AmpLevel, Float32Loss, widened
from mpkit.step.phases import device_of


class Model:
    """Train, evaluate and use a network.

    Args:
        network:       the network; without `loss_fn` it must return the loss.
        loss_fn:       a module (output, label) -> scalar loss; batches then have exactly two elements.
        optimizer:     None for evaluation only, or when `network` is itself a train cell.
        metrics:       names ("accuracy", "mse", "mae", "loss"), or a dict of name -> metric.
        eval_network:  computes (loss, output, label) from a batch instead of the network and the loss.
        eval_indexes:  positions of loss, output and label in what `eval_network` returns.
        amp_level, boost_level:  as in `build_train_network`.
        loss_scale_manager, keep_batchnorm_fp32, boost_config_dict, hooks, clip_norm, accumulation_steps:
                       as there. None as manager switches off the one that O2 has by default.
        acc_level:     an older name of boost_level.
    Raises:  TypeError for another kind, ValueError for an unknown keyword or a combination that cannot train.
    Source:  MindSpore 2.7 train.Model. A manager of the user's own is told of every overflow as there, though not
             step by step: the flags are read every 100 steps and at the end of an epoch, so that the host does not
             wait in each step; its error after 1001 overflows in a row comes up to 100 steps later.

    >>> net = nn.Linear(2, 1)
    >>> model = Model(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), 0.1), metrics={"mse"})
    >>> model.train(1, [(torch.zeros(4, 2), torch.zeros(4, 1))])
    >>> list(model.eval([(torch.zeros(4, 2), torch.zeros(4, 1))]))
    ['mse']
    """

    _running = False  # whether `train` or `fit` is under way

    @checked
    def __init__(
        self,
        network: nn.Module,
        loss_fn: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        metrics: Annotated[Any, lambda _, given: metrics_from(given)] = None,
        eval_network: nn.Module | None = None,
        eval_indexes: Annotated[Any, places_of] = None,
        amp_level: AmpLevel = "O0",
        boost_level: str = "O0",
        **kwargs: Any,
    ) -> None:
        boost_level = kwargs.pop("acc_level", boost_level)
        if optimizer is None and (kwargs or amp_level != "O0" or boost_level != "O0"):
            need = f"{', '.join(kwargs) or 'a level'} says how to train, which needs an optimizer"
            raise ValueError(f"{need}; pass one, or cast a network alone with auto_mixed_precision(network, level)")
        self._metrics: dict[str, Metric] = metrics
        self._eval_network, self._eval_indexes = eval_network, eval_indexes
        self.network, self.loss_fn, self.optimizer = network, loss_fn, optimizer
        self.train_network: nn.Module = network
        if optimizer is not None:
            cell = build_train_network(network, optimizer, loss_fn, amp_level, boost_level, **kwargs)
            self.train_network, self.optimizer = cell, cell.optimizer
            # a boost may have replaced the network
            self.network = cell.network.backbone if isinstance(cell.network, WithLossCell) else cell.network
            boost = getattr(cell, "boost", None)
            if boost is not None and eval_network is not None:
                self._eval_network = boost.network_auto_process_eval(eval_network)
        self._widen = isinstance(getattr(self.train_network, "network", None), Float32Loss)
        manager = kwargs.get("loss_scale_manager")
        self.manager = manager if manager is not None and manager.get_drop_overflow_update() else None
        self._loop: TrainingLoop | None = None
        self.resumed: dict[str, Any] | None = None  # what was loaded and not yet gone on from

    def train(
        self,
        epoch: int,
        train_dataset: Iterable[Any],
        callbacks: Callback | Sequence[Callback] | None = None,
        dataset_sink_mode: bool = False,
        sink_size: int = -1,
        initial_epoch: int = 0,
    ) -> None:
        """Train until `epoch` epochs are done.

        Args:
            epoch:          epochs in all (>= 1).
            train_dataset:  gives the batches of one epoch whenever it is iterated: a list, a DataLoader.
            callbacks:      one or several; a `Checkpoint` runs after all others.
            dataset_sink_mode, sink_size:  accepted for MindSpore's sake, without effect.
            initial_epoch:  epochs that count as done already (0 <= initial_epoch < epoch).
        Raises:  TypeError, ValueError for arguments and batches; RuntimeError when weights have become inf or NaN.
                 RuntimeWarning at the end of an epoch whose last 20 steps were all skipped at the scale's floor or inf.
        Ctrl-C ends the run after the step that is running, with KeyboardInterrupt, a second one at once; `request_stop`
        ends it silently. Weights, optimizer and scale belong to the same step then, and an accumulation is finished
        first. After `load`, the run goes on where it was saved; see there.
        """
        self.fit(epoch, train_dataset, callbacks=callbacks, initial_epoch=initial_epoch)

    def fit(
        self,
        epoch: int,
        train_dataset: Iterable[Any],
        valid_dataset: Iterable[Any] | None = None,
        valid_frequency: int | Sequence[int] = 1,
        callbacks: Callback | Sequence[Callback] | None = None,
        dataset_sink_mode: bool = False,
        valid_dataset_sink_mode: bool = False,
        sink_size: int = -1,
        initial_epoch: int = 0,
    ) -> None:
        """As `train`, with an evaluation after every `valid_frequency`-th epoch, or after the epochs listed there."""
        if check_count("epoch", epoch) <= check_count("initial_epoch", initial_epoch, low=0):
            raise ValueError(f"need initial_epoch < epoch, got {initial_epoch} and {epoch}: nothing is left to train")
        if isinstance(valid_frequency, list | tuple | set):
            valid_frequency = [check_count("each of valid_frequency", each, low=0) for each in valid_frequency]
        elif not isinstance(valid_frequency, range):
            valid_frequency = range(0, epoch + 1, check_count("valid_frequency", valid_frequency))
        if valid_dataset is not None:
            self._need_metrics()
        if self.optimizer is None and not hasattr(self.train_network, "optimizer"):
            raise ValueError("training needs an optimizer: Model(network, loss_fn, optimizer), or a train cell")
        check_kind("callbacks", callbacks, (Callback, Iterable), "a Callback or a list of them", optional=True)
        callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())
        for callback in callbacks:
            check_kind("each of callbacks", callback, Callback, "a Callback (derive a class from it)")
        gives = "what gives batches, as a list or a DataLoader"
        check_kind("train_dataset", train_dataset, Iterable, gives)
        check_kind("valid_dataset", valid_dataset, Iterable, gives, optional=True)
        run = RunContext(self, epoch, length_hint(train_dataset) or None)
        self._loop = TrainingLoop(self, train_dataset, callbacks, run, valid_dataset, valid_frequency, initial_epoch)
        self._running = True
        try:
            self._loop.go(self.resumed)
        finally:
            self._running = False

    def _need_metrics(self) -> None:
        if not self._metrics:
            raise ValueError("an evaluation needs something to measure: Model(..., metrics={'accuracy'})")

    def eval(
        self, valid_dataset: Iterable[Any], callbacks: object = None, dataset_sink_mode: bool = False
    ) -> dict[str, float]:
        """The metrics over a data set, in evaluation mode, with gradients off.

        A callback may ask for it in the middle of a run, which goes on in the modes that its modules were in.

        Raises:  ValueError without metrics or with an empty data set.
        """
        self._need_metrics()
        network, batch = self.network if self._eval_network is None else self._eval_network, None
        with self._modes_kept(), torch.no_grad():
            network.eval()
            for metric in self._metrics.values():
                metric.clear()
            for batch in valid_dataset:
                loss, output, label = self._evaluated(network, self.arguments(batch))
                for metric in self._metrics.values():
                    if not _is_of_loss(metric):
                        metric.update(output, label)
                    elif loss is None:
                        raise ValueError("the metric 'loss' needs a loss_fn, or an eval_network that returns the loss")
                    else:
                        metric.update(loss, loss.reshape(-1)[:1])
        if batch is None:
            raise ValueError(f"the data set of the evaluation gave no batch; {ANEW}")
        return {name: metric.eval() for name, metric in self._metrics.items()}

    def predict(self, *predict_data: Tensor) -> Any:
        """The network's raw output in evaluation mode, with gradients off, in the level's dtype."""
        with self._modes_kept(), torch.no_grad():
            self.network.eval()
            return self.network(*self._to_device(predict_data))

    def __getstate__(self) -> dict[str, Any]:
        """A copy is a model between two runs, whatever the original is doing."""
        return {**self.__dict__, "_loop": None, "_running": False}

    @property
    def pending(self) -> int:
        """Micro-batches that are summed and that no update has used; 0 between two updates."""
        return getattr(self.train_network, "pending", 0)

    def request_stop(self) -> None:
        """End a running `train` or `fit` after its current step; may be called from a callback or another thread."""
        if self._loop is not None:
            self._loop.stop.set()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write weights, optimizer, scale, counters, random states and the position in the data set to one file.

        The file is replaced as a whole. Inside a run `Checkpoint` calls this; a hand-made call belongs in a callback,
        where `pending` is 0: what a begun accumulation has summed is not saved. A file that is saved when an epoch ends
        goes on with the next one: callbacks after the one that saves are not told of that end again.

        Raises:  TypeError when the state of a hook or callback has what could not be read again: a NumPy number, say.
        """
        progress = self._loop.progress() if self._loop is not None and self.resumed is None else self.resumed
        state = {"train_network": self.train_network.state_dict(), "progress": progress}
        if self.manager is not None:
            state["manager"] = self.manager.state_dict()
        save_whole(state, Path(path))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take over what `save` wrote; the next `train` or `fit` goes on from there.

        Its numbers are those of a run that was not stopped where torch, NumPy, Python, the loader and its samplers hold
        all that is random, or where the loader has `state_dict` and `load_state_dict` (it is asked for its own then,
        and no batch is drawn again). A generator inside a data set or a transform, the place in a stream, and what the
        kept workers of a DataLoader draw are not in the file: a RuntimeWarning names what could be seen of that.

        Raises:  FileNotFoundError; ValueError if the file is no such checkpoint, or the network, the hooks or the
                 optimizer differ; nothing is changed then.
        """
        state = load_whole(Path(path), device_of(self.train_network.parameters()))
        need_same_tensors(state["train_network"], self.train_network.state_dict(), path)
        if left_out := (state["progress"] or {}).get("unseen"):
            lacks = f"{path} does not hold the random state of {', '.join(left_out)}: a resumed run draws other numbers"
            way_out = "draw from torch's own generator, or give the loader state_dict() and load_state_dict()"
            warnings.warn(f"{lacks}; {way_out}", RuntimeWarning, stacklevel=2)
        managers = [self.manager] if self.manager is not None and "manager" in state else []
        for manager in managers:
            copy.deepcopy(manager).load_state_dict(state["manager"])  # refuses before anything is changed
        self.train_network.load_state_dict(state["train_network"])  # a cell's own state comes first, and may be refused
        for manager in managers:
            manager.load_state_dict(state["manager"])
        self.resumed = map_tensors(Tensor.cpu, state["progress"])  # random states live on the host

    @contextmanager
    def _modes_kept(self) -> Iterator[None]:
        """In the middle of a run the modes of all modules come back; else the network stays in evaluation mode."""
        networks = [network for network in (self.network, self._eval_network) if network is not None and self._running]
        before = [(part, part.training) for network in networks for part in network.modules()]
        try:
            yield
        finally:
            for part, mode in before:
                part.training = mode

    def _evaluated(self, network: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        if self._eval_network is not None:
            out = network(*inputs)
            loss, output, label = (out[index] for index in self._eval_indexes)
            return loss, output, label
        if self.loss_fn is None and all(map(_is_of_loss, self._metrics.values())):
            return network(*inputs), None, None
        data, label = inputs
        output = network(data)
        if self._widen:
            output, label = widened(output), widened(label)
        return None if self.loss_fn is None else self.loss_fn(output, label), output, label

    def arguments(self, batch: object) -> tuple[Any, ...]:
        """A batch as arguments of the train cell, on the network's device."""
        inputs = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
        if self.loss_fn is not None and len(inputs) != 2:
            need = f"with a loss_fn a batch has exactly two elements, data and label, got {len(inputs)}"
            raise ValueError(f"{need}; put a network with more inputs and its loss into one module")
        return self._to_device(inputs)

    def _to_device(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        device = device_of(self.network.parameters())
        return map_tensors(lambda x: x.to(device, non_blocking=True), values)


def _is_of_loss(metric: object) -> bool:
    return getattr(metric, "total", None) is of_loss
