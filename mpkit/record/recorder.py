"""Write down what a training run does, as a hook of a training step or inside any PyTorch loop."""

from __future__ import annotations

import dataclasses
import json
import math
import time
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.arguments import Count, check_alike, check_count, check_flags, check_kind, check_number, checked
from mpkit.casting.low import float_tensors, values_of
from mpkit.formats import get_format
from mpkit.optimizers.arguments import coming_rate
from mpkit.record.amax import AmaxRecorder, AmaxTrace
from mpkit.record.columns import Columns, kept
from mpkit.record.histograms import Histograms, real_values, total_norm
from mpkit.record.scale import found_inf, note_of, policy_of, scale_of, was_unscaled
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

    @checked
    def __init__(
        self,
        network: nn.Module,
        optimizer: Optimizer | None = None,
        scaler: object = None,
        *,
        every: Count = 1,
        by: Literal["parameter", "module"] = "parameter",
        activations: bool = False,
        amaxes: bool = False,
        format: str = "fp16",
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        get_format(format)
        self.meta = {} if meta is None else dict(meta)
        json.dumps(self.meta)  # refused now, and not when the trace is saved
        self.network, self.optimizer, self.scaler = network, optimizer, scaler
        self.every, self.format, self.index = every, format, 0
        trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError("the network has no parameter with requires_grad=True, so there is no gradient to record")
        modules = (name.rpartition(".")[0] or "(root)" for name in trained)
        self._names = dict(zip(trained.values(), trained if by == "parameter" else modules))
        leaves = {name: m for name, m in network.named_modules() if name and next(m.children(), None) is None}
        self._steps, self._gradients = Columns(), Histograms(dict.fromkeys(self._names.values()))
        self._activations = Histograms(leaves if activations else ())
        self._watches = activations
        self._forward = set[str]()  # the modules that ran outside of a backward pass
        self._note: dict[str, Any] | None = None  # what a GradScaler writes down of the last step
        self._start = time.perf_counter()
        self._policy = policy_of(scaler)
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
        for name, given in (("loss", loss), ("scale", scale)):
            if isinstance(given, Tensor) and (given.numel() != 1 or given.is_complex()):
                shape = tuple(given.shape)
                raise ValueError(f"{name} must be one real number, got a tensor of {given.dtype} and shape {shape}")
        if unscaled is not None:
            check_flags(unscaled=unscaled)
        scale = scale_of(self.scaler) if scale is None else kept(scale)
        if not isinstance(scale, Tensor):
            check_number("scale", scale, closed_high=True)
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
        if self._note and not self._note["found_inf_per_device"] and callable(last.get("overflow")):
            last["overflow"] = kept(~total_norm(self._values().values()).isfinite())  # the scaler has yet to step
        columns: Any = {name: c.astype(STEPS[name][0]) for name, c in self._steps.joined([*STEPS]).items()}
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

    def state_dict(self) -> dict[str, Any]:
        """What a resumed recording needs to go on as if nothing had happened; what was recorded stays in `trace()`.

        Holds the next step's index (and with it the phase of `every`) and the seconds so far.
        """
        return {"index": self.index, "seconds": time.perf_counter() - self._start}

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
        if all(p.grad is None for p in self._names):
            raise RuntimeError("no parameter has a gradient: call record after loss.backward() and before zero_grad()")
        if self.index & (self.index - 1) == 0:  # now and then: it goes through the whole network
            self._warn_of_others()
        norm: float | Tensor = math.nan
        due = self.index % self.every == 0
        found: Any = self._outcome(optimizer) if overflow is None else overflow
        if due or found is None:
            divided = was_unscaled(self._note) if unscaled is None else unscaled
            with torch.no_grad():
                factor = torch.as_tensor(1.0 if divided else scale, device=loss.device).double().reciprocal()
                values = self._values()
                total = total_norm(values.values())
                norm, found = total * factor, ~total.isfinite() if overflow is None else overflow
                for p, part in values.items() if due else ():
                    self._gradients.add(self._names[p], part, factor, p.numel() * (2 if p.is_complex() else 1))
        if due:
            self._gradients.end_step(self.index)
            self._activations.end_step(self.index)
            self._forward.clear()
        rate = coming_rate(optimizer, optimizer.param_groups[0]) if optimizer and optimizer.param_groups else math.nan
        row = (self.index, loss, scale, found, rate, norm, time.perf_counter() - self._start)
        self._steps.append(dict(zip(STEPS, map(kept, row))))
        if self._amaxes is not None:
            self._amaxes.end_step()
        self.index += 1

    def _values(self) -> dict[nn.Parameter, Tensor]:
        return {p: real_values(p.grad) for p in self._names if p.grad is not None}

    def _warn_of_others(self) -> None:
        """Say so where parameters train that are not watched."""
        others = [name for name, p in self.network.named_parameters() if p.grad is not None and p not in self._names]
        if others:
            what = f"{len(others)} parameters have gradients that this Recorder does not watch, as {others[0]}"
            way_out = "make it when all are in place and trainable, and freeze then"
            warnings.warn(f"{what}: {way_out}", RuntimeWarning, stacklevel=4)

    def _outcome(self, optimizer: Optimizer | None) -> Any:
        """What will say whether this step overflows, where the GradScaler knows it: the gradients need not be read.

        None where it is not known to do so: in the first step, and after one that it did not take.
        """
        before, self._note = self._note, note_of(self.scaler, optimizer)
        return partial(found_inf, self._note) if self._note and before and before["found_inf_per_device"] else None

    def _activation(self, name: str, _module: nn.Module, _inputs: object, output: object) -> None:
        if self.index % self.every or not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() == -1:
            self._forward.add(name)
        elif name in self._forward:
            return  # a checkpoint computes it again; of a re-entrant one this is the first time with gradients
        with torch._C.DisableTorchFunction():  # a casting level would cast the float32 used for counting
            for values in map(values_of, float_tensors(output)):
                self._activations.add(name, values)
