"""Write down what a training run does, as a hook of a training step or inside any PyTorch loop."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.formats import get_format
from mpkit.policies import ScalePolicy, preset
from mpkit.record.counts import FIELDS, exponent_counts, host_counts, new_scratch, total_norm
from mpkit.record.trace import LOWEST, Ranges, Trace
from mpkit.scalers import (
    DynamicLossScaleManager,
    DynamicLossScaler,
    DynamicLossScaleUpdateCell,
    LossScaleManager,
    LossScaler,
)
from mpkit.step import Hook, StepContext

_FLUSH = 512  # steps and recorded rows kept on the device before they are copied to the host in one transfer


class Recorder(Hook):
    """Records loss, scale, overflow, learning rate, gradient norm, time, and exponent histograms of the gradients.

    As a hook: `TrainOneStepWithLossScaleCell(..., hooks=[Recorder(network)])`. In a loop of one's own, three lines:

        recorder = Recorder(network, optimizer, scaler)     # before the loop
        recorder.record(loss)                               # after backward(), before the optimizer's step
        trace = recorder.trace()                            # whenever wanted

    Args:
        network:     whose parameters are watched.
        optimizer:   whose learning rate is recorded (None: NaN; a training step brings its own).
        scaler:      a `torch.amp.GradScaler`, an mpkit scaler or update cell, or None where nothing scales the loss.
        every:       steps between two histograms and gradient norms (>= 1); all else is recorded in every step.
        by:          "parameter", or "module" to add up the parameters of a module.
        activations: also record the outputs of the modules without children, from their training forward passes.
        format:      the format that the scaled gradients had to fit into; "fp32" if nothing ran in a low precision.
        meta:        anything JSON can hold, kept in the trace.
    Raises:  TypeError, ValueError for wrong arguments; `record` raises RuntimeError when there is no gradient.
    Edges:   nothing of a GPU is read on the host in a step; 512 steps are copied to it at once. Sparse gradients count
             their missing rows as zeros, complex ones their real and imaginary parts.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: Optimizer | None = None,
        scaler: Any = None,
        *,
        every: int = 1,
        by: str = "parameter",
        activations: bool = False,
        format: str = "fp16",
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(network, nn.Module):
            raise TypeError(f"Recorder watches the parameters of an nn.Module, got {type(network).__name__}")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number of steps >= 1, got {every!r}")
        if by not in ("parameter", "module"):
            raise ValueError(f"by must be 'parameter' or 'module', got {by!r}")
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or None, got {type(optimizer).__name__}")
        get_format(format)
        json.dumps(dict(meta or {}))
        self.network, self.optimizer, self.scaler = network, optimizer, scaler
        self.every, self.format = every, format
        self.meta = dict(meta or {})
        self.index = 0
        self._groups = _groups(network, by)
        self._steps = _Table()
        self._gradients = _Rows(tuple(self._groups))
        self._activations: _Rows | None = None
        self._handles: list[Any] = []
        self._parameters = [p for group in self._groups.values() for p in group]
        self._last_note: dict[str, Any] | None = None
        self._seen: dict[str, Part] = {}
        self._scratch = new_scratch()
        self._start = time.perf_counter()
        self._policy = _policy_of(scaler)
        if activations:
            self._watch_activations()

    def record(self, loss: Tensor, *, scale: float | Tensor | None = None, unscaled: bool | None = None) -> None:
        """Record one step: call it when all gradients are there and before the optimizer (and the scaler) steps.

        Args:
            loss:      the unscaled loss, one number.
            scale:     what the loss was multiplied by; None asks the scaler (1 without one).
            unscaled:  whether the gradients were divided by the scale already. None asks the GradScaler, which knows
                       whether `scaler.unscale_(optimizer)` was called; without one they count as still scaled.
        Raises:  TypeError, ValueError for a loss that is not one number, or a scaler that cannot tell its scale.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            kind = ValueError if isinstance(loss, Tensor) else TypeError
            raise kind(f"record needs the loss as a tensor of one element, before .item(); got {what}")
        scale = _scale_of(self.scaler) if scale is None else scale
        if unscaled is None:
            unscaled = _was_unscaled(self.scaler, self.optimizer)
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
        if self._last_note and not self._last_note["found_inf_per_device"]:  # the scaler has yet to take this step
            self._steps.settle(self.index - 1, _kept(_not_finite(self._norm())))
        columns: dict[str, Any] = self._steps.columns()
        return Trace(
            **columns,
            gradients=self._gradients.ranges(),
            activations=None if self._activations is None else self._activations.ranges(),
            format=self.format,
            meta={"torch": torch.__version__} | policy | self.meta,
        )

    def close(self) -> None:
        """Take the forward hooks of `activations=True` off the network again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed recording needs to go on as if nothing had happened; what was recorded stays in `trace()`.

        Holds the next step's index (and with it the phase of `every`), the seconds so far, and the activations of
        micro-batches whose step has not come yet.
        """
        seen = {name: (torch.as_tensor(c), int(z), float(m), n) for name, (c, z, m, n) in self._seen.items()}
        return {"index": self.index, "seconds": self._seconds(), "seen": seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the saved recorder stopped; join the traces with `first + second`.

        Steps that this recorder holds already and that will now be trained again are forgotten.
        Raises:  ValueError for what `state_dict` did not make.
        """
        index = state.get("index") if isinstance(state, Mapping) else None
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise ValueError(f"a recorder's state has an index >= 0, got {state!r}; use what state_dict() returned")
        self.index = index
        self._start = time.perf_counter() - float(state.get("seconds", 0.0))
        device = next(iter(self._groups.values()))[0].device
        self._seen = {name: _moved(part, device) for name, part in state.get("seen", {}).items()}
        self._steps.forget(index)
        for rows in (self._gradients, self._activations):
            if rows is not None:
                rows.forget(index)

    def _seconds(self) -> float:
        return time.perf_counter() - self._start

    def _record(
        self, loss: Tensor, scale: float | Tensor, unscaled: bool, overflow: Tensor | None, optimizer: Any
    ) -> None:
        if not any(p.grad is not None for p in self._parameters):
            raise RuntimeError("no parameter has a gradient: call record after loss.backward() and before zero_grad()")
        scale = _kept(scale)
        factor = None if unscaled else _reciprocal(scale)
        found: Any = self._note(optimizer) if overflow is None else overflow
        norm: Any = math.nan
        with torch.no_grad():
            if self._due():
                norm = self._record_histograms(factor)
            elif found is None:
                norm = self._norm()
        if found is None or (overflow is None and self._due()):
            found = _not_finite(norm)
        norm = norm if factor is None else norm * factor
        lr = _lr_of(optimizer)
        self._steps.append((self.index, _kept(loss), scale, _kept(found), _kept(lr), _kept(norm), self._seconds()))
        self.index += 1

    def _norm(self) -> float | Tensor:
        present = [_values(p.grad) for p in self._parameters if p.grad is not None]
        return total_norm(present) if present else 0.0

    def _note(self, optimizer: Any) -> dict[str, Any] | None:
        """Where the GradScaler will say whether this step overflows: then the gradients need not be read for that.

        None where it is not known to do so: in the first step, and after one that it did not take.
        """
        before = self._last_note
        self._last_note = _state_of(self.scaler, optimizer)
        return self._last_note if before and before["found_inf_per_device"] else None

    def _due(self) -> bool:
        return self.index % self.every == 0

    def _record_histograms(self, factor: float | Tensor | None) -> float | Tensor:
        """Histograms of gradients times `factor`, and of the activations seen; -> norm of the gradients as they are."""
        rows, norms = [], []
        for group in self._groups.values():
            parts = []
            for p in group:
                if p.grad is None:
                    continue
                values = _values(p.grad).reshape(-1).float()
                counts, zeros, largest, norm = self._counts(values, factor)
                norms.append(norm)
                size = p.grad.numel() * (2 if p.grad.is_complex() else 1)
                parts.append((counts, zeros + (size - values.numel()), largest, size))
            rows.append(_added(parts))
        self._gradients.append(self.index, rows)
        if self._activations is not None:
            self._activations.append(self.index, [self._seen.get(name) for name in self._activations.names])
            self._seen = {}
        return torch.linalg.vector_norm(torch.stack(norms)) if isinstance(norms[0], Tensor) else math.hypot(*norms)

    def _counts(self, values: Tensor, factor: float | Tensor | None) -> tuple[Any, Any, Any, Any]:
        if values.device.type == "cpu" and not isinstance(factor, Tensor):
            return host_counts(values, factor, self._scratch)
        return *exponent_counts(values if factor is None else values * factor), total_norm([values])

    def _watch_activations(self) -> None:
        leaves = {name: m for name, m in self.network.named_modules() if name and not any(True for _ in m.children())}
        self._activations = _Rows(tuple(leaves))
        for name, module in leaves.items():
            self._handles.append(module.register_forward_hook(self._activation_hook(name, module)))

    def _activation_hook(self, name: str, watched: nn.Module) -> Any:
        def hook(module: nn.Module, _inputs: Any, output: Any) -> None:
            if module is not watched:  # a copy of the network carries the hook along
                return
            if self._due() and torch.is_grad_enabled() and isinstance(output, Tensor) and output.is_floating_point():
                seen = self._seen.get(name)
                with torch._C.DisableTorchFunction():  # a casting level would cast the float32 used for counting
                    flat = output.detach().reshape(-1).float()
                    new = (*self._counts(flat, None)[:3], flat.numel())
                self._seen[name] = new if seen is None else _added([seen, new])  # type: ignore[assignment]

        return hook


Part = tuple[Any, Any, Any, int]
"""Counts (256,), zeros (), largest (), and how many values they describe: numpy's on the CPU, else tensors."""


class _Table:
    """What is recorded in every step: numbers, and tensors that stay on their device for up to 512 steps."""

    names = ("step", "loss", "scale", "overflow", "lr", "grad_norm", "seconds")

    def __init__(self) -> None:
        self.waiting: list[tuple[Any, ...]] = []
        self.done: list[np.ndarray] = [np.zeros((0, len(self.names)))]

    def append(self, row: tuple[Any, ...]) -> None:
        if len(self.waiting) >= _FLUSH:
            self._flush()
        self.waiting.append(row)

    def settle(self, step: int, overflow: Any) -> None:
        """Write down the outcome of the last step where it is only noted where to look for it."""
        if self.waiting and self.waiting[-1][0] == step and isinstance(self.waiting[-1][3], dict):
            row = self.waiting[-1]
            self.waiting[-1] = (*row[:3], overflow, *row[4:])

    def _flush(self) -> None:
        self.waiting = [(*row[:3], _noted(row[3]), *row[4:]) for row in self.waiting]
        self.done.append(_host([v for row in self.waiting for v in row]).reshape(-1, len(self.names)))
        self.waiting.clear()

    def forget(self, step: int) -> None:
        """Drop that step and later ones."""
        self._flush()
        self.done = [block[block[:, 0] < step] for block in self.done]

    def columns(self) -> dict[str, np.ndarray]:
        self._flush()
        self.done = [np.concatenate(self.done)]
        columns = dict(zip(self.names, self.done[0].T.copy()))
        return columns | {"step": columns["step"].astype(np.int64), "overflow": columns["overflow"].astype(bool)}


class _Rows:
    """Histograms of named tensors, row after row: first on the device, later as arrays on the host."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.size = np.zeros(len(names), dtype=np.int64)
        self.steps: list[int] = []
        self.waiting: list[tuple[Any, Any, Any]] = []
        self.done: list[Ranges] = []

    def append(self, step: int, parts: list[Part | None]) -> None:
        like = next((part for part in parts if part is not None), None)
        if like is None:
            return
        nothing = None if None not in parts else (like[0] * 0, like[1] * 0, like[0][0] * 0.0, 0)
        counts, zeros, largest, sizes = zip(*(nothing if part is None else part for part in parts))
        self.size = np.maximum(self.size, sizes)
        self.steps.append(step)
        if isinstance(like[0], Tensor):
            self.waiting.append((torch.stack(counts).int(), torch.stack(zeros), torch.stack(largest)))
        else:
            self.waiting.append((np.stack(counts).astype(np.uint32), np.array(zeros), np.array(largest, np.float32)))
        if len(self.waiting) >= _FLUSH:
            self._flush()

    def _flush(self) -> None:
        if not self.waiting:
            return
        counts, zeros, largest = (
            torch.stack(column).cpu().numpy() if isinstance(column[0], Tensor) else np.stack(column)
            for column in zip(*self.waiting)
        )
        occupied = np.flatnonzero(counts[:, :, : FIELDS - 1].any(axis=(0, 1)))
        first, end = (int(occupied[0]), int(occupied[-1]) + 1) if len(occupied) else (127, 128)
        self.done.append(
            Ranges(
                names=self.names,
                size=self.size.copy(),
                step=np.array(self.steps, dtype=np.int64),
                lowest=first - 1 + LOWEST,
                counts=counts[:, :, first:end].astype(np.uint32),
                zeros=zeros.astype(np.int64),
                nonfinite=counts[:, :, FIELDS - 1].astype(np.int64),
                largest=largest.astype(np.float32),
            )
        )
        self.waiting.clear()
        self.steps.clear()

    def forget(self, step: int) -> None:
        """Drop that step and later ones."""
        self._flush()
        self.done = [block._rows(block.step < step) for block in self.done]

    def ranges(self) -> Ranges:
        self._flush()
        return Ranges.chained(self.done) if self.done else Ranges.empty(self.names)


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


def _added(parts: list[Part]) -> Part | None:
    """The histogram of several tensors together; None for none."""
    if len(parts) < 2:
        return parts[0] if parts else None
    counts, zeros, largest, sizes = zip(*parts)
    larger = torch.maximum if isinstance(largest[0], Tensor) else np.maximum
    return sum(counts), sum(zeros), reduce(larger, largest), sum(sizes)


def _moved(part: Part, device: torch.device) -> Part:
    """A saved part as parts are on that device."""
    counts, zeros, largest, size = part
    if device.type == "cpu":
        return counts.numpy(force=True), zeros, np.float32(largest), size
    return counts.to(device), torch.tensor(zeros, device=device), torch.tensor(largest, device=device), size


def _kept(value: Any) -> float | Tensor:
    """A number as it is now: of a tensor on a GPU a copy that stays there."""
    if not isinstance(value, Tensor):
        return value
    if value.device.type != "cpu":
        return value.detach().clone()
    value = value.detach()
    return (value.double() if value.dtype == torch.bfloat16 else value).numpy().item()


def _host(values: list[Any]) -> np.ndarray:
    """(N,) float64 from numbers and tensors of one element, with one transfer per kind of tensor."""
    kinds: dict[Any, list[int]] = {}
    for i, v in enumerate(values):
        if isinstance(v, Tensor):
            kinds.setdefault((v.dtype, v.device), []).append(i)
    found = np.array([0.0 if isinstance(v, Tensor) else v for v in values] if kinds else values, dtype=np.float64)
    for places in kinds.values():
        found[places] = torch.stack([values[i].reshape(()) for i in places]).double().numpy(force=True)
    return found


def _reciprocal(scale: float | Tensor) -> float | Tensor | None:
    """What unscales a gradient; None where nothing was scaled."""
    if isinstance(scale, Tensor):
        return scale.float().reciprocal().reshape(())
    return None if scale == 1 else 1.0 / scale if scale else math.inf


def _lr_of(optimizer: Any) -> Any:
    return optimizer.param_groups[0].get("lr", math.nan) if optimizer is not None else math.nan


def _scale_of(scaler: Any) -> Any:
    """The loss scale in use, on the device where the scaler can give it so."""
    if scaler is None:
        return 1.0
    if isinstance(scaler, torch.amp.GradScaler):
        if not scaler.is_enabled():
            return 1.0
        return scaler._scale if scaler._scale is not None else scaler.get_scale()
    if isinstance(scaler, LossScaler):
        return scaler.scale_value
    if isinstance(scaler, LossScaleManager):
        return scaler.get_loss_scale()
    raise TypeError(
        f"cannot read a loss scale from {type(scaler).__name__}; give it to record(loss, scale=...) in every step"
    )


def _state_of(scaler: Any, optimizer: Any) -> dict[str, Any] | None:
    """What a GradScaler notes down about this optimizer's running step; only its private bookkeeping knows."""
    states = getattr(scaler, "_per_optimizer_states", None)
    if not isinstance(scaler, torch.amp.GradScaler) or states is None or optimizer is None or not scaler.is_enabled():
        return None
    return states[id(optimizer)]


def _was_unscaled(scaler: Any, optimizer: Any) -> bool:
    """Whether the GradScaler has divided this optimizer's gradients."""
    state = _state_of(scaler, optimizer)
    return state is not None and getattr(state["stage"], "name", "READY") == "UNSCALED"


def _noted(value: Any) -> Any:
    """An overflow, read from where the GradScaler noted it; a step that it never took had none."""
    if not isinstance(value, dict):
        return value
    found = list(value["found_inf_per_device"].values())
    return _kept(torch.stack([f.to(found[0].device) for f in found]).amax()) if found else 0.0


def _not_finite(norm: Any) -> Any:
    return ~norm.isfinite() if isinstance(norm, Tensor) else not math.isfinite(norm)


def _policy_of(scaler: Any) -> ScalePolicy | None:
    """The scale policy in use, where the scaler has one that mpkit knows."""
    if isinstance(getattr(scaler, "policy", None), ScalePolicy):
        return scaler.policy
    if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
        policy = preset(
            "torch",
            init_scale=scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
        )
        return dataclasses.replace(policy, init_count=scaler._get_growth_tracker())
    if isinstance(scaler, DynamicLossScaleUpdateCell):
        start = scaler.loss_scale_value
        return preset("mindspore_cell", loss_scale_value=start, **_factor_and_window(scaler))
    if isinstance(scaler, DynamicLossScaler):
        return preset("mindspore_scaler", scale_value=float(scaler.scale_value), **_factor_and_window(scaler))
    if isinstance(scaler, DynamicLossScaleManager):
        return preset("mindspore_manager", init_loss_scale=scaler.get_loss_scale(), **_factor_and_window(scaler))
    return None


def _factor_and_window(scaler: Any) -> dict[str, Any]:
    return {"scale_factor": scaler.scale_factor, "scale_window": scaler.scale_window}
