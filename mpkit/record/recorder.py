"""Write down what a training run does, as a hook of a training step or inside any PyTorch loop."""

from __future__ import annotations

import dataclasses
import json
import math
import time
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.arguments import check_alike, check_choice, check_count, check_flags, check_kind, check_number
from mpkit.casting.low import float_tensors, values_of
from mpkit.formats import get_format
from mpkit.optimizers.arguments import coming_rate
from mpkit.record.amax import AmaxRecorder, AmaxTrace
from mpkit.record.columns import Columns, kept
from mpkit.record.counts import total_norm
from mpkit.record.histograms import Histograms
from mpkit.record.scale import found_inf, policy_of, scale_of, state_of, was_unscaled
from mpkit.record.trace import STEPS, Trace
from mpkit.record.watch import watch
from mpkit.step import Hook, StepContext


class Recorder(Hook):
    """Records loss, scale, overflow, learning rate, gradient norm, time, and exponent histograms of the gradients.

    As a hook: `TrainOneStepWithLossScaleCell(..., hooks=[Recorder(network)])`. In a loop of one's own, three lines:

        recorder = Recorder(network, optimizer, scaler)     # before the loop
        recorder.record(loss)                               # after backward(), before the optimizer's step
        trace = recorder.trace()                            # whenever wanted

    Args:
        network:     whose parameters are watched.
        optimizer:   whose learning rate is recorded (None: NaN; a training step brings its own), that of the coming
                     step in the first group.
        scaler:      a `torch.amp.GradScaler`, an mpkit scaler or update cell, or None where nothing scales the loss.
        every:       steps between two histograms and gradient norms (>= 1); all else is recorded in every step.
        by:          "parameter", or "module" to add up the parameters of a module.
        activations: also record the outputs of the modules without children, from their training forward passes: all
                     float tensors of one output together, in tuples, dicts and dataclasses too (an LSTM's states).
        amaxes:      also record the amaxes of linear layers in every step, as `AmaxRecorder` does; see `amax_trace`.
        format:      the format that the scaled gradients had to fit into; "fp32" if nothing ran in a low precision.
        meta:        anything JSON can hold, kept in the trace.
    Raises:  TypeError, ValueError for wrong arguments; `record` raises RuntimeError when there is no gradient.
    Edges:   nothing of a GPU is read on the host in a step; 512 steps are copied to it at once. Sparse gradients count
             their missing rows as zeros, complex ones their real and imaginary parts. Parameters that come or become
             trainable later are not watched; a RuntimeWarning says so.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: Optimizer | None = None,
        scaler: object = None,
        *,
        every: int = 1,
        by: str = "parameter",
        activations: bool = False,
        amaxes: bool = False,
        format: str = "fp16",
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        check_kind("network", network, nn.Module, "an nn.Module, whose parameters are watched")
        every = check_count("every", every)
        check_choice("by", by, ("parameter", "module"))
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or None, got {type(optimizer).__name__}")
        check_flags(activations=activations, amaxes=amaxes)
        get_format(format)
        self.meta = {} if meta is None else dict(meta)
        json.dumps(self.meta)
        self.network, self.optimizer, self.scaler = network, optimizer, scaler
        self.every, self.format = every, format
        self.index = 0
        self._groups = _groups(network, by)
        self._parameters = [p for group in self._groups.values() for p in group]
        leaves = {name: m for name, m in network.named_modules() if name and next(m.children(), None) is None}
        self._steps, self._gradients = Columns(), Histograms(self._groups)
        self._activations = Histograms(leaves if activations else ())
        self._forward = set[str]()  # the modules that ran outside of a backward pass
        self._last_note: dict[str, Any] | None = None
        self._start = time.perf_counter()
        self._policy = policy_of(scaler)
        self._watches = activations
        self._amaxes = AmaxRecorder(network) if amaxes else None
        self._handles = [watch(m, partial(self._activation, name)) for name, m in leaves.items() if activations]

    def record(self, loss: Tensor, *, scale: float | Tensor | None = None, unscaled: bool | None = None) -> None:
        """Record one step: call it when all gradients are there and before the optimizer (and the scaler) steps.

        Args:
            loss:      the unscaled loss, one number.
            scale:     what the loss was multiplied by; None asks the scaler (1 without one).
            unscaled:  whether the gradients were divided by the scale already. None asks the GradScaler, which knows
                       whether `scaler.unscale_(optimizer)` was called; without one they count as still scaled.
        Raises:  TypeError, ValueError for a loss that is not one number, a scale that is not one from 0 on, or a scaler
                 that cannot tell its scale.
        """
        check_kind("loss", loss, Tensor, "a tensor of one element, before .item()")
        if loss.numel() != 1:
            raise ValueError(f"the loss must be one number, got a tensor of shape {tuple(loss.shape)}")
        if loss.is_complex():  # it could be recorded, and then no trace be made
            raise TypeError(f"record needs a real loss, got {loss.dtype}")
        if unscaled is not None:
            check_flags(unscaled=unscaled)
        scale = scale_of(self.scaler) if scale is None else _checked_scale(scale)
        self._record(loss, scale, unscaled, None, self.optimizer)

    def after_unscale(self, ctx: StepContext) -> None:
        assert ctx.loss is not None
        self._record(ctx.loss, ctx.scale, True, ctx.overflow, ctx.optimizer)

    def before_update(self, ctx: StepContext) -> None:
        if ctx.overflow is None:  # a step without loss scaling has no phase `after_unscale`
            assert ctx.loss is not None
            self._record(ctx.loss, ctx.scale, False, None, ctx.optimizer)

    def trace(self) -> Trace:
        """Everything recorded so far."""
        policy = {} if self._policy is None else {"policy": dataclasses.asdict(self._policy)}
        last = self._steps.waiting[-1] if self._steps.waiting else {}
        if self._last_note and not self._last_note["found_inf_per_device"] and callable(last.get("overflow")):
            last["overflow"] = kept(_not_finite(self._norm()))  # the scaler has yet to take this step
        columns: dict[str, Any] = self._steps.joined(list(STEPS))
        columns = {name: columns[name].astype(dtype) for name, (dtype, _) in STEPS.items()}
        return Trace(
            **columns,
            gradients=self._gradients.ranges(),
            activations=self._activations.ranges() if self._watches else None,
            format=self.format,
            meta={"torch": torch.__version__} | policy | self.meta,
        )

    def amax_trace(self) -> AmaxTrace:
        """The amaxes recorded so far, one row a step. Raises ValueError without `amaxes=True`."""
        if self._amaxes is None:
            raise ValueError("no amaxes were recorded; make it Recorder(network, ..., amaxes=True)")
        return self._amaxes.trace()

    def close(self) -> None:
        """Take the forward hooks of `activations=True` and `amaxes=True` off the network again."""
        if self._amaxes is not None:
            self._amaxes.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed recording needs to go on as if nothing had happened; what was recorded stays in `trace()`.

        Holds the next step's index (and with it the phase of `every`) and the seconds so far.
        """
        return {"index": self.index, "seconds": self._seconds()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the saved recorder stopped; join the traces with `first + second`.

        Steps that this recorder holds already and that will now be trained again are forgotten.
        Raises:  ValueError for what `state_dict` did not make.
        """
        check_kind("state", state, Mapping, "what state_dict() returned, with an index")
        index = check_count("index", state.get("index"), 0)
        check_alike("seconds", seconds := state.get("seconds", 0.0), 0.0)
        self.index, self._start = index, time.perf_counter() - float(seconds)
        for columns in (self._steps, self._gradients, self._activations):
            columns.forget(index)
        self._activations.now = {}
        if self._amaxes is not None:
            self._amaxes.go_on(index)

    def _record(
        self, loss: Tensor, scale: float | Tensor, unscaled: bool | None, overflow: Tensor | None, optimizer: Any
    ) -> None:
        if not any(p.grad is not None for p in self._parameters):
            raise RuntimeError("no parameter has a gradient: call record after loss.backward() and before zero_grad()")
        if self.index & (self.index - 1) == 0:  # now and then: it goes through the whole network
            self._warn_of_others()
        scale = kept(scale)
        found: Any = self._note(optimizer) if overflow is None else kept(overflow)
        norm: float | Tensor = math.nan
        due = self._due()
        if due or found is None:
            unscaled = was_unscaled(self.scaler, optimizer) if unscaled is None else unscaled
            factor = None if unscaled else _reciprocal(scale)
            with torch.no_grad():
                norm = self._record_histograms(factor) if due else self._norm()
            found = _not_finite(norm) if overflow is None else found
            norm = norm if factor is None else norm * factor
        row = (self.index, kept(loss), scale, found, kept(_lr_of(optimizer)), kept(norm), self._seconds())
        self._steps.append(dict(zip(STEPS, row)))
        if self._amaxes is not None:
            self._amaxes.end_step()
        self.index += 1

    def _warn_of_others(self) -> None:
        """Say so where parameters train that are not watched."""
        known = {id(p) for p in self._parameters}
        others = [name for name, p in self.network.named_parameters() if p.grad is not None and id(p) not in known]
        if others:
            warnings.warn(
                f"{len(others)} parameters have gradients that this Recorder does not watch, as {others[0]}: they came "
                "or became trainable after it was made. Make it when all are in place and trainable, and freeze then",
                RuntimeWarning,
                stacklevel=4,
            )

    def _norm(self) -> float | Tensor:
        present = [_values(p.grad) for p in self._parameters if p.grad is not None]
        return total_norm(present) if present else 0.0

    def _note(self, optimizer: Optimizer | None) -> Any:
        """What will say whether this step overflows, where the GradScaler knows it: the gradients need not be read.

        None where it is not known to do so: in the first step, and after one that it did not take.
        """
        before = self._last_note
        self._last_note = note = state_of(self.scaler, optimizer)
        return partial(found_inf, note) if note and before and before["found_inf_per_device"] else None

    def _due(self) -> bool:
        return self.index % self.every == 0

    def _seconds(self) -> float:
        return time.perf_counter() - self._start

    def _record_histograms(self, factor: float | Tensor | None) -> float | Tensor:
        """Histograms of gradients times `factor`, and of the activations seen; -> norm of the gradients as they are."""
        values = {p: _values(p.grad) for p in self._parameters if p.grad is not None}
        for name, group in self._groups.items():
            for p in (p for p in group if p in values):
                self._gradients.add(name, values[p], factor, p.numel() * (2 if p.is_complex() else 1))
        for part in (self._gradients, self._activations):
            part.end_step(self.index)
        self._forward = set()
        return total_norm(list(values.values()))

    def _activation(self, name: str, _module: nn.Module, _inputs: object, output: object) -> None:
        if not (self._due() and torch.is_grad_enabled()):
            return
        if torch._C._current_graph_task_id() == -1:
            self._forward.add(name)
        elif name in self._forward:
            return  # a checkpoint computes it again; of a re-entrant one this is the first time with gradients
        with torch._C.DisableTorchFunction():  # a casting level would cast the float32 used for counting
            for values in map(values_of, float_tensors(output)):
                self._activations.add(name, values)


def _checked_scale(scale: object) -> float | Tensor:
    """A scale that somebody gives: refused here and not when the trace is made, after all steps."""
    if isinstance(scale, Tensor) and scale.numel() != 1:
        raise ValueError(f"scale must be one number, got a tensor of shape {tuple(scale.shape)}")
    scale = kept(scale)
    return scale if isinstance(scale, Tensor) else check_number("scale", scale, closed_high=True)  # on a GPU unread


def _groups(network: nn.Module, by: str) -> dict[str, list[nn.Parameter]]:
    groups: dict[str, list[nn.Parameter]] = {}
    for name, p in network.named_parameters():
        if p.requires_grad:
            key = name if by == "parameter" else name.rpartition(".")[0] or "(root)"
            groups.setdefault(key, []).append(p)
    if not groups:
        raise ValueError("the network has no parameter with requires_grad=True, so there is no gradient to record")
    return groups


def _values(grad: Tensor) -> Tensor:
    """The stored values of a gradient as real numbers."""
    values = grad.coalesce().values() if grad.is_sparse else grad
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values.resolve_neg()


def _reciprocal(scale: float | Tensor) -> float | Tensor | None:
    """What unscales a gradient; None where nothing was scaled."""
    if isinstance(scale, Tensor):
        return scale.float().reciprocal().reshape(())
    return None if scale == 1 else 1.0 / scale if scale else math.inf


def _lr_of(optimizer: Optimizer | None) -> float | Tensor:
    if optimizer is None or not optimizer.param_groups:
        return math.nan
    return coming_rate(optimizer, optimizer.param_groups[0])


def _not_finite(norm: float | Tensor) -> bool | Tensor:
    return ~norm.isfinite() if isinstance(norm, Tensor) else not math.isfinite(norm)
