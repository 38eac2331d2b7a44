"""Write down what a training run does, as a hook of a training step or inside any PyTorch loop."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.policies import ScalePolicy, preset
from mpkit.record.trace import LOWEST, Ranges, Trace
from mpkit.scalers import (
    DynamicLossScaleManager,
    DynamicLossScaler,
    DynamicLossScaleUpdateCell,
    LossScaleManager,
    LossScaler,
    check_and_unscale_,
)
from mpkit.step import Hook, StepContext

_FIELDS = 256  # exponent fields of float32: 0 holds zeros and subnormals, 255 holds inf and NaN
_FLUSH = 512  # recorded rows kept on the device before they are copied to the host in one transfer
_LANES = 8  # neighbours count in different places: a counter that many zeros hit in a row would wait for itself
_BLOCK = 2**16
_LANE = torch.arange(_BLOCK, dtype=torch.int16) % _LANES * 2 * _FIELDS + _FIELDS  # both signs have their own counters


def exponent_counts(x: Tensor, scratch: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """How many values of `x` lie in each power of two, without a host read.

    Shapes:  x (*) floating -> (256,) int64 counts by exponent field (entry e + 127 counts 2**e <= |x| < 2**(e+1),
             entry 255 inf and NaN, entry 0 nothing), () int64 zeros, () float32 largest magnitude. `scratch`, int16 of
             at least as many values on the same device, saves an allocation.
    Edges:   |x| < 2**-126, the subnormals of float32, count as zeros.

    >>> counts, zeros, largest = exponent_counts(torch.tensor([0.0, 1.0, 1.5, -3.0]))
    >>> counts[127:130].tolist(), int(zeros), float(largest)
    ([2, 1, 0], 1, 3.0)
    """
    flat = x.detach().reshape(-1).to(torch.float32)
    size = flat.numel()
    if not size:
        return x.new_zeros(_FIELDS, dtype=torch.int64), x.new_zeros((), dtype=torch.int64), flat.new_zeros(())
    upper = flat.view(torch.int16)[1::2]  # sign, eight bits of exponent, seven of fraction
    fields = torch.bitwise_right_shift(upper, 7, out=None if scratch is None else scratch[:size])
    if flat.device.type == "cpu":
        whole = size // _BLOCK * _BLOCK
        fields[:whole].view(-1, _BLOCK).add_(_LANE)
        fields[whole:].add_(_LANE[: size - whole])
        counts = torch.bincount(fields, minlength=2 * _LANES * _FIELDS).view(2 * _LANES, _FIELDS).sum(0)
    else:  # bincount would read the length of its result on the host
        pieces = (fields & (_FIELDS - 1)).float().split(2**24)  # histc counts in float32: exact up to 2**24
        counts = torch.stack([torch.histc(p, _FIELDS, 0, _FIELDS).long() for p in pieces]).sum(0)
    zeros = counts[0].clone()
    counts[0] = 0
    low, high = torch.aminmax(flat)
    return counts, zeros, torch.maximum(-low, high)


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
        every:       steps between two histograms (>= 1); loss, scale and overflow are recorded in every step.
        by:          "parameter", or "module" to add up the parameters of a module.
        activations: also record the outputs of the modules without children, from their training forward passes.
        format:      the format that the scaled gradients had to fit into; "fp32" if nothing ran in a low precision.
        meta:        anything JSON can hold, kept in the trace.
    Raises:  TypeError, ValueError for wrong arguments; `record` raises RuntimeError when there is no gradient.
    Edges:   nothing is read on the host in a step; every 512 histograms are copied to it at once. Sparse gradients
             count their missing rows as zeros.
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
        self.network, self.optimizer, self.scaler = network, optimizer, scaler
        self.every, self.format = every, format
        self.meta = dict(meta or {})
        self.index = 0
        self._groups = _groups(network, by)
        self._scalars: list[dict[str, Any]] = []
        self._gradients = _Rows(tuple(self._groups))
        self._activations: _Rows | None = None
        self._handles: list[Any] = []
        self._seen: dict[str, tuple[Tensor, Tensor, Tensor, int]] = {}
        self._scratch: Tensor | None = None
        self._start = time.perf_counter()
        self._policy = _policy_of(scaler)
        if activations:
            self._watch_activations()

    def record(self, loss: Tensor, *, scale: float | Tensor | None = None, unscaled: bool | None = None) -> None:
        """Record one step: call it when all gradients are there and before the optimizer (and the scaler) steps.

        Args:
            loss:      the unscaled loss.
            scale:     what the loss was multiplied by; None asks the scaler (1 without one).
            unscaled:  whether the gradients were divided by the scale already. None asks the GradScaler, which knows
                       whether `scaler.unscale_(optimizer)` was called; without one they count as still scaled.
        """
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
        table = self._scalars
        loss, scale, overflow, lr, norm = (
            _host([row[key] for row in table]) for key in ("loss", "scale", "overflow", "lr", "grad_norm")
        )
        policy = {} if self._policy is None else {"policy": dataclasses.asdict(self._policy)}
        return Trace(
            step=np.array([row["step"] for row in table], dtype=np.int64),
            loss=loss,
            scale=scale,
            overflow=overflow.astype(bool),
            lr=lr,
            grad_norm=norm,
            seconds=np.array([row["seconds"] for row in table], dtype=np.float64),
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
        """What a resumed recording needs: the next step's index."""
        return {"index": self.index}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting where the saved recorder stopped; join the traces with `first + second`."""
        self.index = int(state["index"])

    def _record(
        self, loss: Tensor, scale: float | Tensor, unscaled: bool, overflow: Tensor | None, optimizer: Any
    ) -> None:
        with torch.no_grad():
            present = [p.grad for group in self._groups.values() for p in group if p.grad is not None]
            if not present:
                raise RuntimeError(
                    "no parameter has a gradient: call record after loss.backward() and before zero_grad()"
                )
            norm: Any = float("nan")
            if self._due():
                factor = None if unscaled else _reciprocal(scale)
                norm, found = self._record_gradients(factor)
                overflow = found if overflow is None else overflow
            elif overflow is None:
                # the fused kernel is five times faster than any other check, and times 1 changes nothing
                one = torch.ones((), device=present[0].device)
                overflow = check_and_unscale_([_values(g) for g in present], one) != 0
            self._scalars.append(
                {
                    "step": self.index,
                    "loss": loss.detach().clone(),
                    "scale": scale.detach().clone() if isinstance(scale, Tensor) else float(scale),
                    "overflow": overflow,
                    "lr": _lr_of(optimizer),
                    "grad_norm": norm,
                    "seconds": time.perf_counter() - self._start,
                }
            )
        self.index += 1

    def _due(self) -> bool:
        return self.index % self.every == 0

    def _record_gradients(self, factor: float | Tensor | None) -> tuple[Tensor, Tensor]:
        """Histograms of all gradients times `factor`; -> () norm of all, () bool: something was not finite."""
        rows, squares = [], []
        for group in self._groups.values():
            parts = []
            for p in group:
                if p.grad is None:
                    continue
                values = _values(p.grad).reshape(-1).float()
                values = values if factor is None else values * factor
                counts, zeros, largest = exponent_counts(values, self._scratch_for(values))
                parts.append((counts, zeros + (p.grad.numel() - values.numel()), largest, p.grad.numel()))
                squares.append(torch.linalg.vector_norm(values))
            rows.append(_added(parts))
        self._gradients.append(self.index, rows)
        if self._activations is not None:
            self._activations.append(self.index, [self._seen.get(name) for name in self._activations.names])
            self._seen = {}
        nonfinite = torch.stack([row[0][_FIELDS - 1] for row in rows if row is not None])
        return torch.linalg.vector_norm(torch.stack(squares)), nonfinite.sum() > 0

    def _scratch_for(self, values: Tensor) -> Tensor:
        """Memory that is kept between steps: fresh memory would cost a page fault per 4 kB."""
        if self._scratch is None or self._scratch.numel() < values.numel() or self._scratch.device != values.device:
            self._scratch = torch.empty(values.numel(), dtype=torch.int16, device=values.device)
        return self._scratch

    def _watch_activations(self) -> None:
        leaves = {name: m for name, m in self.network.named_modules() if name and not any(True for _ in m.children())}
        self._activations = _Rows(tuple(leaves))
        for name, module in leaves.items():
            self._handles.append(module.register_forward_hook(self._activation_hook(name)))

    def _activation_hook(self, name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if self._due() and torch.is_grad_enabled() and isinstance(output, Tensor) and output.is_floating_point():
                seen = self._seen.get(name)
                with torch._C.DisableTorchFunction():  # a casting level would cast the float32 used for counting
                    new = (*exponent_counts(output), output.numel())
                self._seen[name] = new if seen is None else _added([seen, new])  # type: ignore[assignment]

        return hook


Part = tuple[Tensor, Tensor, Tensor, int]
"""Counts (256,), zeros (), largest (), and how many values they describe."""


class _Rows:
    """Histograms of named tensors, row after row: first on the device, later as arrays on the host."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.size = np.zeros(len(names), dtype=np.int64)
        self.steps: list[int] = []
        self.waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self.done: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def append(self, step: int, parts: list[Part | None]) -> None:
        like = next(part for part in parts if part is not None)
        nothing = (torch.zeros_like(like[0]), torch.zeros_like(like[1]), torch.zeros_like(like[2]))
        full = [nothing if part is None else part[:3] for part in parts]
        self.size = np.maximum(self.size, [0 if part is None else part[3] for part in parts])
        self.steps.append(step)
        counts, zeros, largest = zip(*full)
        self.waiting.append((torch.stack(counts).int(), torch.stack(zeros), torch.stack(largest)))
        if len(self.waiting) >= _FLUSH:
            self._flush()

    def _flush(self) -> None:
        if self.waiting:
            counts, zeros, largest = (torch.stack(column).cpu().numpy() for column in zip(*self.waiting))
            self.done.append((counts.astype(np.uint32), zeros, largest))
            self.waiting.clear()

    def ranges(self) -> Ranges:
        self._flush()
        if not self.done:
            none = np.zeros((0, len(self.names)))
            counts, zeros, largest = none.astype(np.uint32)[:, :, None].repeat(_FIELDS, 2), none, none
        else:
            counts, zeros, largest = (np.concatenate(column) for column in zip(*self.done))
        occupied = np.flatnonzero(counts[:, :, : _FIELDS - 1].any(axis=(0, 1)))
        first, end = (int(occupied[0]), int(occupied[-1]) + 1) if len(occupied) else (127, 128)
        return Ranges(
            names=self.names,
            size=self.size.copy(),
            step=np.array(self.steps, dtype=np.int64),
            lowest=first - 1 + LOWEST,
            counts=np.ascontiguousarray(counts[:, :, first:end]),
            zeros=zeros.astype(np.int64),
            nonfinite=counts[:, :, _FIELDS - 1].astype(np.int64),
            largest=largest.astype(np.float32),
        )


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
    return grad.coalesce().values() if grad.is_sparse else grad


def _added(parts: list[Part]) -> Part | None:
    """The histogram of several tensors together; None for none."""
    if len(parts) < 2:
        return parts[0] if parts else None
    counts, zeros, largest, sizes = zip(*parts)
    return torch.stack(counts).sum(0), torch.stack(zeros).sum(), torch.stack(largest).amax(), sum(sizes)


def _host(values: list[Any]) -> np.ndarray:
    """(N,) float64 from numbers and tensors of one element, with one transfer for all tensors."""
    tensors = [v.reshape(()).double() for v in values if isinstance(v, Tensor)]
    read = iter(torch.stack(tensors).tolist() if tensors else [])
    return np.array([next(read) if isinstance(v, Tensor) else float(v) for v in values], dtype=np.float64)


def _reciprocal(scale: float | Tensor) -> float | Tensor | None:
    """What unscales a gradient; None where nothing was scaled."""
    if isinstance(scale, Tensor):
        return scale.detach().float().reciprocal().reshape(())
    return None if scale == 1 else 1.0 / scale


def _lr_of(optimizer: Any) -> Any:
    lr = optimizer.param_groups[0].get("lr", float("nan")) if optimizer is not None else float("nan")
    return lr.detach().clone() if isinstance(lr, Tensor) else float(lr)


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


def _was_unscaled(scaler: Any, optimizer: Any) -> bool:
    """Whether the GradScaler has divided this optimizer's gradients; only its private bookkeeping knows."""
    states = getattr(scaler, "_per_optimizer_states", None)
    if not isinstance(scaler, torch.amp.GradScaler) or states is None or optimizer is None:
        return False
    return getattr(states[id(optimizer)]["stage"], "name", "READY") == "UNSCALED"


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
