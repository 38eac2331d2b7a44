"""One loss scale for a deep network, or one for each of its groups of layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from traitlets import Enum, Int

from mpkit.boost.group_loss_scale import GroupLossScaleManager
from mpkit.data import digits
from mpkit.explorers.base import Explorer, counted
from mpkit.formats import E5M2, FP16, FP32, FloatFormat
from mpkit.replay.percent import percent
from mpkit.rounding import quantize, round_to

FORMATS = {"float16": FP16, "E5M2": E5M2}
GROUPS, WIDTH, BATCH, DISTINCT, STEPS = 4, 24, 64, 23, 160
LARGEST = 2.0**100
WAYS = ("one scale", "scale per group")


class DeepSigmoid(nn.Module):
    """64 inputs, 4 groups of `depth` sigmoid layers, 10 outputs; gradients in any format, one loss scale or four.

    A sigmoid passes on at most a quarter of the gradient that it receives, so the groups' gradients differ by powers
    of two. Everything is computed in float32; gradients are rounded to `fmt` wherever an operation hands them on.
    """

    def __init__(self, depth: int, way: str = "scale per group", fmt: FloatFormat = FP32, scale: float = 1.0) -> None:
        super().__init__()
        self.fmt, self.together = fmt, way == "one scale"
        sizes = [64, *[WIDTH] * (GROUPS * depth)]
        layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        layers.append(nn.Linear(WIDTH, 10))
        self.layers = nn.ModuleList(layers)
        ends = [*range(depth, depth * GROUPS, depth), len(layers)]
        self.groups = [layers[a:b] for a, b in pairwise([0, *ends])]
        owned = [[p for layer in group for p in layer.parameters()] for group in self.groups]
        parts = [[p for group in owned for p in group]] if self.together else owned
        self.manager = GroupLossScaleManager(scale, parts, max_scale=LARGEST)
        self.seen: list[list[Tensor]] = [[] for _ in self.groups]

    def forward(self, images: Tensor) -> Tensor:
        """(N, 1, 8, 8) images -> (N, 10) logits."""
        self.seen = [[] for _ in self.groups]
        x = images.flatten(1).clone().requires_grad_()
        for i, group in enumerate(self.groups):
            x = x if self.together and i else self.manager(x, i, i + 1)
            for layer in group:
                weight, bias = self._handed_on(layer.weight, i), self._handed_on(layer.bias, i)
                x = self._handed_on(nn.functional.linear(self._handed_on(x, i), weight, bias), i)
                x = self._handed_on(torch.sigmoid(x) if layer.out_features == WIDTH else x, i)
        last = len(self.manager.scales)
        return self.manager(x, last, last + 1)

    def _handed_on(self, x: Tensor, group: int) -> Tensor:
        self.seen[group].append(x)
        return quantize(x, FP32, self.fmt)

    def gradients(self) -> list[Tensor]:
        """Per group, all values of its weights' gradients."""
        return [
            torch.cat([p.grad.flatten() for layer in g for p in layer.parameters() if p.grad is not None])
            for g in self.groups
        ]


def deep_sigmoid(depth: int, way: str = "scale per group", fmt: FloatFormat = FP32, scale: float = 1.0) -> DeepSigmoid:
    """The network of the lesson, always with the same weights."""
    torch.manual_seed(0)
    return DeepSigmoid(depth, way, fmt, scale)


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    """The digits in `DISTINCT` batches of `BATCH` images, over and over."""
    images, labels = digits("train", size=8)
    parts = list(zip(images.split(BATCH), labels.split(BATCH)))[:DISTINCT]
    return [parts[step % DISTINCT] for step in range(steps)]


def surviving(net: DeepSigmoid, true: DeepSigmoid) -> list[float]:
    """Per group, the share of the gradient values that are not zero in `true` and not zero in `net` either."""
    return [float((g[t != 0] != 0).float().mean()) for g, t in zip(net.gradients(), true.gradients())]


def train_step(net: DeepSigmoid, images: Tensor, labels: Tensor) -> Tensor:
    """Forward, backward from 1, unscale; -> (groups,) bool, which of the manager's groups overflowed."""
    net.zero_grad()
    nn.functional.cross_entropy(net(images), labels).backward()
    return net.manager.unscale_and_update_()


@dataclass(frozen=True, eq=False)
class GradientTrace:
    """What the true gradients of a run look like.

    largest:  (steps, groups) float64, the largest magnitude that any operation of the group hands on.
    values:   per batch and group, the magnitudes of its weights' gradients, float32, zeros left out; step t meets the
              batch t modulo `DISTINCT`.
    """

    largest: np.ndarray
    values: tuple[tuple[Tensor, ...], ...]


@lru_cache(maxsize=8)
def gradient_trace(depth: int, steps: int = STEPS) -> GradientTrace:
    """True gradients of the network at its initial weights, over `steps` batches."""
    net = deep_sigmoid(depth)
    largest, values = [], []
    for images, labels in batches(min(steps, DISTINCT)):
        loss = nn.functional.cross_entropy(net(images), labels)
        grads = iter(torch.autograd.grad(loss, [x for seen in net.seen for x in seen], retain_graph=True))
        largest.append([max(float(next(grads).abs().max()) for _ in seen) for seen in net.seen])
        net.zero_grad()
        loss.backward()
        values.append(tuple(v.abs()[v != 0] for v in net.gradients()))
    every = np.resize(np.array(largest), (steps, GROUPS))  # weights stay, so the batches' gradients come again
    return GradientTrace(every, tuple(values))


@dataclass(frozen=True, eq=False)
class ScaleRun:
    """Scales over a run: (steps, groups) float64 used in each step, and whether an overflow began in the group."""

    scales: np.ndarray
    overflows: np.ndarray


@lru_cache(maxsize=64)
def replayed(depth: int, way: str, fmt_name: str, init_exponent: int, window: int) -> ScaleRun:
    """What the scales of a way would have been on the recorded gradients; `window` clean steps double a scale.

    A group overflows when its largest gradient times its scale leaves the format. With one scale the largest of all
    groups decides.
    """
    largest, fmt = gradient_trace(depth).largest, FORMATS[fmt_name]
    if way == "one scale":
        largest = largest.max(axis=1, keepdims=True)
    tops = [nn.Parameter(torch.zeros(())) for _ in largest[0]]
    manager = GroupLossScaleManager(
        2.0**init_exponent, [[p] for p in tops], growth=2 ** (1 / window), max_scale=LARGEST
    )
    scales, overflows = [], []
    for row in torch.tensor(largest, dtype=torch.float32):
        scales.append(manager.scales.tolist())
        for p, top in zip(tops, round_to(row * manager.scales, fmt)):
            p.grad = top
        overflows.append(manager.unscale_and_update_().tolist())
    shape = (len(largest), GROUPS)
    return ScaleRun(np.broadcast_to(scales, shape), np.broadcast_to(overflows, shape))


@lru_cache(maxsize=64)
def surviving_at(depth: int, way: str, fmt_name: str, init_exponent: int, window: int) -> np.ndarray:
    """(steps, groups) share of each step's gradient values that are not zero at its scales."""
    scales = torch.from_numpy(replayed(depth, way, fmt_name, init_exponent, window).scales.copy()).float()
    shares = torch.empty(scales.shape)
    for batch, groups in enumerate(gradient_trace(depth).values):
        for i, values in enumerate(groups):
            kept = round_to(values * scales[batch::DISTINCT, i, None], FORMATS[fmt_name]) != 0
            shares[batch::DISTINCT, i] = kept.float().mean(1)
    return shares.double().numpy()


class GroupScaleExplorer(Explorer):
    """One scale against four, step by step."""

    controls = ("format", "depth", "init_exponent", "window", "step")
    format = Enum(list(FORMATS), "E5M2").tag(label="gradient format")
    depth = Int(3, min=1, max=5).tag(label="layers per group", costly=True)
    init_exponent = Int(12, min=0, max=30).tag(label="initial exponent", costly=True)
    window = Int(4, min=1, max=50).tag(label="steps to double", costly=True)
    step = Int(STEPS - 1, min=0, max=STEPS - 1).tag(label="step")

    def compute(self) -> None:
        """Both runs; of each way the shares of values that survive: `survive_all` (steps, groups), `survive` now."""
        settings = (self.format, self.init_exponent, self.window)
        self.runs = {way: replayed(self.depth, way, *settings) for way in WAYS}
        self.survive_all = {way: surviving_at(self.depth, way, *settings) for way in WAYS}
        self.survive = {way: shares[self.step].tolist() for way, shares in self.survive_all.items()}

    def skipped(self, way: str) -> int:
        """Steps without an update up to and with this one."""
        return int(self.runs[way].overflows[: self.step + 1].any(axis=1).sum())

    def summary(self) -> str:
        one, own = (self.runs[way].scales[self.step] for way in WAYS)
        kept = [percent(self.survive[way][0]) for way in WAYS]
        return (
            f"{self.format}, {counted(self.depth, 'layer')} per group, step {self.step}: "
            f"the one scale is {_power(one[0])}, the scales per group are {', '.join(_power(s) for s in own)}. "
            f"Gradient values of group 1 that are not rounded to zero: {kept[0]} with one scale and {kept[1]} with "
            "four. "
            f"Steps skipped: {self.skipped(WAYS[0])} with one scale and {self.skipped(WAYS[1])} with four."
        )

    def table(self) -> list[dict[str, Any]]:
        return [
            {
                "group": i + 1,
                "largest gradient": _power(gradient_trace(self.depth).largest[self.step, i]),
                **{f"{way}": _power(run.scales[self.step, i]) for way, run in self.runs.items()},
                **{f"survive, {way}": percent(self.survive[way][i]) for way in WAYS},
            }
            for i in range(GROUPS)
        ]


def _power(value: float) -> str:
    return f"2^{np.log2(value):.1f}"
