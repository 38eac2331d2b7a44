"""Models of lesson 03: a network at a level, operation by operation; and one number through softmax and log."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from traitlets import Bool, Enum, Int

from mpkit.casting import EXACT, LEVELS, PRESETS, auto_mixed_precision, cast_like, ledger, to_float
from mpkit.data import digits
from mpkit.explorers.base import Explorer, counted
from mpkit.formats import get_format
from mpkit.networks import LeNet5, Network, ResidualBlock, TransformerBlock

FORMATS = ("fp16", "bf16", "e5m2", "e4m3fn", "e4m7")
SHOWN_ANYWAY = ("relu", "max_pool2d")


def _rows_as_tokens(images: Tensor) -> Tensor:
    return images.squeeze(1)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor]]] = {
    "MLP": (Network, lambda images: images),
    "LeNet5": (LeNet5, lambda images: images),
    "residual block": (lambda: ResidualBlock(1, 8, stride=2), lambda images: images),
    "transformer block": (lambda: TransformerBlock(28, 4), _rows_as_tokens),
}


@dataclass(frozen=True)
class Step:
    """One operation of the network as the picture shows it.

    Args:
        module:     path of the module, "" for the network itself.
        operation:  name of the operation.
        inputs:     precisions of its inputs as given.
        compute:    precision it computed in.
        output:     precision of its result.
        casts:      tensors cast for it.
        error:      root mean square error of the result against float64, relative to the result (dimensionless).
        flushed:    non-zero values that became zero in its casts and result.
        overflowed: finite values that became infinite or NaN there.
        saved:      bytes that it keeps for the backward pass.
    """

    module: str
    operation: str
    inputs: tuple[str, ...]
    compute: str
    output: str
    casts: int
    error: float
    flushed: int
    overflowed: int
    saved: int


@dataclass(frozen=True)
class Walk:
    """A network seen operation by operation at one level: steps, layer names, bytes kept, error of the result."""

    steps: tuple[Step, ...]
    layers: tuple[str, ...]
    kept_bytes: int
    parameter_casts: int
    activation_casts: int
    error: float


def batch(count: int = 8) -> Tensor:
    """The first real handwritten digits, (count, 1, 28, 28) float32 in [0, 1]."""
    return digits("test")[0][:count]


def layers_of(network: nn.Module) -> tuple[str, ...]:
    """Paths of the modules that hold parameters of their own."""
    return tuple(name for name, m in network.named_modules() if any(True for _ in m.parameters(recurse=False)))


def _built(kind: str, exponent: int) -> tuple[nn.Module, Tensor]:
    build, inputs = NETWORKS[kind]
    torch.manual_seed(0)
    return build(), inputs(batch()) * 2.0**exponent


@lru_cache(maxsize=64)
def _exact(kind: str, exponent: int) -> list[Tensor]:
    """What every operation gives in float64."""
    network, x = _built(kind, exponent)
    with ledger(network.double(), keep=True) as book:
        network(x.double())
    return book.results


@lru_cache(maxsize=64)
def walk(kind: str, level: str, fmt: str, kept: int = 0, exponent: int = 0) -> Walk:
    """Run one forward pass of a network in an emulated format and compare every operation with float64.

    Args:
        kind:     a key of NETWORKS.
        level:    a MindSpore level or a preset of another framework.
        fmt:      name of the low format.
        kept:     number of the layer that `to_float` puts into float32, from 1; 0: none.
        exponent: the inputs are multiplied by 2**exponent.
    Raises:  ValueError if the network has fewer layers than `kept`.
    """
    network, x = _built(kind, exponent)
    layers = layers_of(network)
    if not 0 <= kept <= len(layers):
        raise ValueError(f"the {kind} has {len(layers)} layers, got layer {kept}")
    low = get_format(fmt)
    (cast_like if level in PRESETS else auto_mixed_precision)(network, level, low)
    if kept:
        to_float(network.get_submodule(layers[kept - 1]), torch.float32)
    with ledger(network, count=True, keep=True) as book:
        network(x)
    steps = tuple(
        Step(
            row.module,
            row.operation,
            row.inputs,
            row.compute,
            row.output[0],
            row.casts,
            relative_error(got, want),
            row.flushed or 0,
            row.overflowed or 0,
            row.saved,
        )
        for row, got, want in zip(book.rows, book.results, _exact(kind, exponent))
        if row.operation not in EXACT or row.operation in SHOWN_ANYWAY
    )
    border = [cast for cast in book.casts if not cast.operation]  # the network's input counts for the first operation
    flushed, overflowed = (sum(getattr(cast, name) or 0 for cast in border) for name in ("flushed", "overflowed"))
    first = replace(steps[0], flushed=steps[0].flushed + flushed, overflowed=steps[0].overflowed + overflowed)
    steps = (first, *steps[1:])
    weights = sum(cast.tensor != "activation" for cast in book.casts)
    kept_bytes = book.measured_bytes
    return Walk(steps, layers, kept_bytes, weights, len(book.casts) - weights, steps[-1].error)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of `want`; inf where a value is not finite."""
    if not bool(got.isfinite().all()):
        return math.inf
    difference = (got.double() - want.double()).square().mean().sqrt()
    return float(difference / want.double().square().mean().sqrt().clamp(min=1e-300))


class CastingExplorer(Explorer):
    """A network at a level: what each operation computed in, what was cast, and what that cost in accuracy."""

    controls = ("network", "level", "fmt", "kept", "exponent")
    network = Enum(list(NETWORKS), "MLP").tag(label="network")
    level = Enum([*LEVELS, "apex_O1", "apex_O2", "keras_mixed_float16", "torch_autocast"], "O2").tag(label="level")
    fmt = Enum(FORMATS, "fp16").tag(label="format")
    kept = Int(0, min=0, max=6).tag(label="float32 layer (0: none)", costly=True)
    exponent = Int(0, min=-24, max=18).tag(label="inputs times 2 to the", costly=True)

    def compute(self) -> None:
        self.walk = walk(self.network, self.level, self.fmt, self.kept, self.exponent)
        self.plain = walk(self.network, "O0", self.fmt, 0, self.exponent)

    @property
    def low(self) -> list[Step]:
        """The operations that did not compute in float32."""
        return [step for step in self.walk.steps if step.compute != "float32"]

    def summary(self) -> str:
        error = "not finite" if math.isinf(self.walk.error) else f"{self.walk.error:.2g}"
        return f"{self.stored()} The relative error of the result is {error}."

    def stored(self) -> str:
        w = self.walk
        lost = sum(s.flushed for s in w.steps), sum(s.overflowed for s in w.steps)
        moved = f", layer {w.layers[self.kept - 1]} in float32" if self.kept else ""
        return (
            f"{self.network} at {self.level} in {self.fmt}{moved}: {len(self.low)} of {len(w.steps)} operations "
            f"compute in {self.fmt}. Parameters are cast {counted(w.parameter_casts, 'time')}, activations "
            f"{counted(w.activation_casts, 'time')}. {counted(lost[0], 'value')} became zero and {lost[1]} overflowed. "
            f"{w.kept_bytes / 1024:.0f} KiB are kept for the backward pass, against "
            f"{self.plain.kept_bytes / 1024:.0f} KiB in float32."
        )

    def table(self) -> list[dict[str, Any]]:
        return [
            {
                "module": s.module or "(network)",
                "operation": s.operation,
                "inputs": ", ".join(s.inputs),
                "computes in": s.compute,
                "gives": s.output,
                "casts": s.casts,
                "error": f"{s.error:.2g}",
                "to zero": s.flushed,
                "overflow": s.overflowed,
            }
            for s in self.walk.steps
        ]


LOGITS = torch.arange(0, -33.0, -1.0)


class LogSoftmaxExplorer(Explorer):
    """log(softmax(z)) for logits 0, -1, ..., -32, computed at a level in a format."""

    controls = ("level", "fmt", "fused")
    level = Enum(LEVELS, "O2").tag(label="level")
    fmt = Enum(FORMATS, "fp16").tag(label="format")
    fused = Bool(False).tag(label="log_softmax in one operation")

    def compute(self) -> None:
        head = _FusedHead() if self.fused else _Head()
        network = auto_mixed_precision(head, self.level, get_format(self.fmt))
        self.got = network(LOGITS).double()
        self.want = F.log_softmax(LOGITS.double(), 0)
        finite = self.got.isfinite()
        self.lost = int((~finite).sum())
        self.becomes = "NaN" if bool(self.got.isnan().any()) else "-inf"  # e4m3fn has no infinity
        self.error = float((self.got - self.want)[finite].abs().max()) if bool(finite.any()) else math.inf

    def summary(self) -> str:
        how = "log_softmax" if self.fused else "log(softmax)"
        used, others = "float32" if self.level == "O0" else self.fmt, " of the others" if self.lost else ""
        return (
            f"{how} at {self.level} in {used}: {self.lost} of {len(LOGITS)} log-probabilities became "
            f"{self.becomes}. The largest error{others} is {self.error:.2g}."
        )

    def idle(self) -> tuple[str, ...]:
        return ("fmt",) if self.level == "O0" else ()

    def table(self) -> list[dict[str, Any]]:
        rows = zip(LOGITS.tolist(), self.want.tolist(), self.got.tolist())
        return [{"logit": f"{z:g}", "exact": f"{want:.4f}", "computed": f"{got:.4f}"} for z, want, got in rows]


class _Head(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return torch.log(torch.softmax(z, 0))


class _FusedHead(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return F.log_softmax(z, 0)
