"""Boost levels beside each other, the freeze timeline, less batch norm on a network, and centralized gradients."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from traitlets import Bool, Enum, Float, Int

from mpkit import networks
from mpkit.bench.gpu import table
from mpkit.boost import AutoBoost, FreezeOpt, GradientFreeze, LessBN
from mpkit.boost.auto import LEVELS, MODES
from mpkit.boost.grad_centralization import is_centralized
from mpkit.boost.grad_freeze import expected_saving, index_probabilities, stage_costs, stages_by_module
from mpkit.boost.grad_freeze.strategy import full_steps
from mpkit.data import data_dir, digits
from mpkit.explorers.base import Explorer
from mpkit.optimizers import centralized
from mpkit.replay.percent import percent

COMPARED = ("none", "less_bn", "freezing", "O1", "O1 tuned")
SWITCHES = ("less_bn", "grad_freeze", "adasum", "grad_accumulation")


# boost levels


@cache
def measured() -> Mapping[str, Any]:
    """The stored benchmark: `speed` and `accuracy` rows, and `meta` with the device and the versions."""
    return json.loads((data_dir() / "benchmarks" / "boost.json").read_text())


def on_gpu() -> Any:
    """The boost rows of every GPU that `make gpu` has run on, as a DataFrame, or a sentence where none is stored."""
    return table("boost")


def relative_time(contender: str) -> float:
    """Measured time of one step of a contender of the benchmark as a share of the step without boost."""
    return 1 / next(row["ratio"] for row in measured()["speed"] if row["contender"] == contender)


def accuracy(configuration: str) -> dict[str, Any] | None:
    """The accuracy row of a measured configuration on the digits, None when it was not trained."""
    rows = (row for row in measured()["accuracy"] if row["data"].startswith("digits"))
    return next((row for row in rows if row["configuration"] == configuration), None)


PARTS = ("forward", "batch_norm", "backward", "update")
CYCLE = 18
"""Steps that are shown one by one: a whole cycle of the tuned strategy."""


@dataclass(frozen=True)
class Steps:
    """The first steps of a measured configuration: freeze index of each, and `parts` (steps, 4) of their time.

    The unit is the measured step without boost; the shares of the parts were measured on their own, with hooks.
    """

    name: str
    indices: tuple[int, ...]
    parts: np.ndarray

    @property
    def total(self) -> float:
        """Their time in steps without boost."""
        return float(self.parts.sum())


@cache
def first_steps(name: str) -> Steps:
    """What the first steps of one of `COMPARED` spend their time on."""
    boost = preset(name)
    network, indices = "O1" if "less_bn" in boost.active else "plain", [0] * CYCLE
    if "grad_freeze" in boost.active:
        args = 10, boost.hyper["freeze_type"], boost.hyper["freeze_p"], CYCLE
        indices = GradientFreeze(*args).generate_freeze_index_sequence(*args)
    split = {row["index"]: row for row in measured()["blocks"]["rows"] if row["network"] == network}
    rows = []
    for index in indices:
        seconds = np.array([split[index][part] for part in PARTS])
        rows.append(relative_time(f"{network} index {index}") * seconds / seconds.sum())
    return Steps(name, tuple(indices), np.array(rows))


@dataclass(frozen=True)
class Effect:
    """What a configuration does to a ResNet-18.

    Args:
        active, inactive: algorithms that run; (what, reason) of what was asked for and does not.
        removed, norms:   BatchNorms that go, of so many.
        odds:             share of the steps at each freeze index 0..9.
        step:             time of a step as a share of the step without boost (dimensionless): of the whole training
                          where it was measured, else mixed from the measured steps of each freeze index.
        trained:          the configuration of the benchmark that it is, "" for none.
    """

    active: tuple[str, ...]
    inactive: tuple[tuple[str, str], ...]
    removed: int
    norms: int
    odds: tuple[float, ...]
    step: float
    trained: str

    @property
    def speedup(self) -> float:
        """Steps in the time of one without boost."""
        return 1 / self.step

    @property
    def timed(self) -> bool:
        """Whether the benchmark timed what runs: it timed no step of dim_reduce."""
        return not set(self.active) - {"less_bn", "grad_freeze"}


def effect(boost: AutoBoost, trained: str = "", timed: str = "") -> Effect:
    """What a configuration does, with times from the stored benchmark: those of `timed`, or else of `trained`."""
    timed = timed or trained
    report = _report() if "less_bn" in boost.active else None
    odds = [1.0, *[0.0] * 9]
    if "grad_freeze" in boost.active:
        full = _full_share(boost.hyper["freeze_p"], boost.hyper["freeze_type"], boost.hyper["total_steps"])
        odds = [full, *((1 - full) * p for p in index_probabilities(10, boost.hyper["freeze_type"]))]
    network = "O1" if report else "plain"
    if timed in (row["contender"] for row in measured()["speed"]):
        step = relative_time(timed)
    else:
        times = [relative_time(f"{network} index {v}") for v in range(10)]
        step = sum(p * t for p, t in zip(odds, times)) if report or odds[0] < 1 else 1.0
    inactive = tuple((item.what, item.reason) for item in boost.inactive)
    removed, norms = (len(report.removed), len(report.removed) + len(report.kept)) if report else (0, 20)
    return Effect(boost.active, inactive, removed, norms, tuple(odds), step, trained)


def _full_share(share: float, kind: int, steps: int) -> float:
    """The share of full steps that a strategy of 10 groups has: type 0 rounds it, type 1 begins with a full step."""
    if kind:
        return max(share, 1 / steps)
    full = full_steps(10, share)
    return full / (full + 9)


@cache
def _report() -> Any:
    return LessBN(networks.resnet18(width=4)).report


@cache
def _stages() -> tuple[tuple[str, bool], ...]:
    """Name of each stage of the ResNet-18, and whether LessBN removes its BatchNorm."""
    net = networks.resnet18(width=4)
    names = {id(p): name.rpartition(".")[0] for name, p in net.named_parameters()}
    removed = set(_report().removed)
    stages = []
    for stage in stages_by_module(net):
        modules = list(dict.fromkeys(names[id(p)] for p in stage))
        stages.append((modules[0], bool(removed & set(modules))))
    return tuple(stages)


@cache
def _freezing(mode: str) -> tuple[float, int]:
    """`freeze_p` and `freeze_type` that a mode brings when nobody sets them."""
    hyper = AutoBoost("O1", {"boost": {"mode": mode}}).hyper
    return hyper["freeze_p"], hyper["freeze_type"]


def preset(name: str) -> AutoBoost:
    """The AutoBoost of a configuration that was measured."""
    off = {"mode": "manual", "less_bn": False, "grad_freeze": False, "adasum": False}
    if name == "O1 tuned":
        return AutoBoost("O1", {"boost": {"mode": "tuned"}})
    if name in ("less_bn", "freezing"):
        return AutoBoost("O0", {"boost": {**off, "grad_freeze" if name == "freezing" else name: True}})
    return AutoBoost("O1" if name == "O1" else "O0")


class BoostExplorer(Explorer):
    """A boost configuration of your own beside one that was measured, on the ResNet-18 of the benchmark.

    `field`: (name, measured speed-up, accuracies of its seeds in percent) of every configuration that was trained.
    """

    gestures = ("compare_with",)
    promised: Mapping[str, float] = {"O1": 1.2, "O2": 1.3}  # what MindSpore's documents say
    controls = ("level", "mode", *SWITCHES, "full_step_fraction", "freeze_type", "compare", "beside")
    level = Enum(tuple(LEVELS), "O1").tag(label="boost_level")
    mode = Enum(MODES, "auto").tag(label="mode")
    less_bn = Bool(False).tag(label="less_bn")
    grad_freeze = Bool(False).tag(label="grad_freeze")
    adasum = Bool(False).tag(label="adasum")
    grad_accumulation = Bool(False).tag(label="grad_accumulation")
    full_step_fraction = Float(0.7, min=0.0, max=1.0).tag(label="unfrozen steps", step=0.05)
    freeze_type = Enum((0, 1), 1).tag(label="freeze_type", names={0: "0 continuous", 1: "1 interleaved"})
    compare = Enum(COMPARED, "none").tag(label="compare")
    beside = Enum(COMPARED, "O1").tag(label="with")

    def compute(self) -> None:
        """Both configurations, resolved."""
        self._follow_mode()
        self.boost = AutoBoost(self.level, self._config())
        trained = self._measured_name()
        # O2 in one process trains what O1 trains; its steps were timed on their own
        self.this = effect(self.boost, trained, "O2" if (self.level, trained) == ("O2", "O1") else "")
        self.other = effect(preset(self.compare), self.compare)
        self.stages = _stages()
        self.rows = [first_steps(name) for name in sorted((self.compare, self.beside), key=COMPARED.index)]
        rows = ((name, accuracy(name)) for name in COMPARED)
        self.field = [(n, 1 / relative_time(n), tuple(row["accuracy_percent"])) for n, row in rows if row]

    def idle(self) -> tuple[str, ...]:
        frozen = () if "grad_freeze" in self.boost.active else ("full_step_fraction", "freeze_type")
        return (*(SWITCHES if self.mode != "manual" else ()), *frozen)

    def compare_with(self, name: str) -> None:
        """Compare with another of the measured configurations, and its steps with those of the one before."""
        if name != self.compare:
            self.set(beside=self.compare, compare=name)

    def _follow_mode(self) -> None:
        """A new mode brings its own freezing: the controls show it, unless they were moved in the same change."""
        before, self._mode = getattr(self, "_mode", "auto"), self.mode
        shown = self.full_step_fraction, self.freeze_type
        if shown == _freezing(before) != _freezing(self.mode):
            self._trait_values.update(zip(("full_step_fraction", "freeze_type"), _freezing(self.mode)))

    def _config(self) -> dict[str, Any]:
        flags = {name: getattr(self, name) for name in SWITCHES} if self.mode == "manual" else {}
        config: dict[str, Any] = {"boost": {"mode": self.mode, **flags}}
        changed = (self.full_step_fraction, self.freeze_type) != _freezing(self.mode)
        probe = AutoBoost(self.level, config)
        if probe.flags["grad_freeze"] and changed:
            config["grad_freeze"] = {"freeze_p": self.full_step_fraction, "freeze_type": self.freeze_type}
        return config

    def _measured_name(self) -> str:
        own = self.boost
        for name in COMPARED:
            known = preset(name)
            same = own.active == known.active and not set(own.active) - {"less_bn", "grad_freeze"}
            keys = ("freeze_p", "freeze_type") if "grad_freeze" in own.active else ()
            if same and all(own.hyper[key] == known.hyper[key] for key in keys):
                return name
        return ""

    def frozen_share(self, of: Effect) -> list[float]:
        """Share of the steps in which each stage stands still."""
        stride = len(self.stages) // 10
        return [sum(p for v, p in enumerate(of.odds) if v * stride > s) for s in range(len(self.stages))]

    def summary(self) -> str:
        this, other = self.this, self.other
        runs = ", ".join(this.active) or "nothing"
        how = "measured" if this.trained else "computed from steps that were timed one by one"
        speed = f"speed-up is {this.speedup:.2f}, {how}" if this.timed else "speed was not measured"
        itself = other.trained == "none" or (this.trained, this.step) == (other.trained, other.step)
        against = "" if itself else f"; the speed-up of {self.compare} is {other.speedup:.2f}"
        text = (
            f"boost_level {self.level} in mode {self.mode} runs {runs}. It removes {this.removed} of {this.norms} "
            f"BatchNorms and freezes layers in {percent(1 - this.odds[0])} of the steps. "
            f"Its {speed}{against}. {self._accuracy_text()}"
        )
        ticked = [name for name in SWITCHES if getattr(self, name)] if self.mode != "manual" else []
        if ticked:
            text += f" Read in mode manual only: {', '.join(ticked)}."
        text += "".join(f" Inactive: {what} ({reason})." for what, reason in this.inactive)
        return f"{text} {' '.join(dict.fromkeys(map(self._steps_text, self.rows)))}"

    def _steps_text(self, row: Steps) -> str:
        norms = percent(row.parts[0, 1] / row.parts[0].sum())
        if row.name == "none":
            return f"BatchNorms take {norms} of a step without boost."
        return (
            f"The first {CYCLE} steps of {row.name} take as long as {row.total:.1f} steps without boost, and "
            f"BatchNorms take {norms} of a full step."
        )

    def _accuracy_text(self) -> str:
        row = accuracy(self.this.trained) if self.this.trained else None
        if row is None:
            return "Its accuracy was not measured."
        seeds = len(row["accuracy_percent"])
        against = "" if self.this.trained == "none" else f", {row['difference']:+.1f} points against no boost"
        return (
            f"Its accuracy on the digits is {row['mean']:.1f} ± {row['spread']:.1f} %{against} (mean of {seeds} seeds)."
        )

    def table(self) -> list[dict[str, Any]]:
        rows = []
        for name, one in (("this", self.this), (self.compare, self.other)):
            row = accuracy(one.trained) if one.trained else None
            rows.append(
                {
                    "configuration": name,
                    "active": ", ".join(one.active) or "nothing",
                    "BatchNorms removed": one.removed,
                    "steps frozen": percent(1 - one.odds[0]),
                    "speed-up": round(one.speedup, 2) if one.timed else "not measured",
                    "accuracy, %": "not measured" if row is None else row["mean"],
                }
            )
        return rows


# freezing


FREEZE_STEPS = 120


@cache
def _freeze_network() -> tuple[list[str], list[float]]:
    """Stage names and backward costs of a ResNet-18 on 32x32 images."""
    costs = stage_costs(networks.resnet18(width=32), torch.zeros(1, 3, 32, 32))
    return [name for name, _ in _stages()], costs


class FreezeExplorer(Explorer):
    """Which stages of a ResNet-18 are trained on which of 120 steps, and how much backward work that saves."""

    controls = ("groups", "freeze_type", "full_step_fraction", "seed", "step")
    groups = Int(10, min=1, max=21).tag(label="param_groups")
    freeze_type = Enum((0, 1), 1).tag(label="freeze_type", names={0: "0 continuous", 1: "1 interleaved"})
    full_step_fraction = Float(0.7, min=0.0, max=1.0).tag(label="steps without freezing (freeze_p)", step=0.05)
    seed = Int(0, min=0, max=99).tag(label="seed")
    step = Int(0, min=0, max=FREEZE_STEPS - 1).tag(label="step")

    def compute(self) -> None:
        """The index of every step, the trained stages, and the saving: counted and from the formula."""
        self.names, self.costs = _freeze_network()
        args = self.groups, self.freeze_type, self.full_step_fraction, FREEZE_STEPS
        self.sequence = GradientFreeze(*args, seed=self.seed).generate_freeze_index_sequence(*args)
        self.stride = len(self.names) // self.groups
        total = sum(self.costs)
        self.saved = [sum(self.costs[: v * self.stride]) / total for v in self.sequence]
        self.formula = expected_saving(self.costs, self.groups, self.freeze_type, self.full_step_fraction)

    def idle(self) -> tuple[str, ...]:
        return () if self.freeze_type else ("seed",)

    @property
    def frozen_now(self) -> int:
        """How many stages stand still on the current step."""
        return self.sequence[self.step] * self.stride

    def summary(self) -> str:
        frozen = sum(v > 0 for v in self.sequence) / len(self.sequence)
        first = "the first" if self.frozen_now == 1 else f"the first {self.frozen_now}"
        who = f"freezes {first}" if self.frozen_now else "freezes none"
        return (
            f"Step {self.step}: index {self.sequence[self.step]} {who} of the "
            f"{len(self.names)} stages and saves {percent(self.saved[self.step])} of its backward work. In "
            f"{percent(frozen)} of the {FREEZE_STEPS} steps some stages are frozen. This saves "
            f"{percent(mean(self.saved), 1)} of all backward work; the formula says {percent(self.formula, 1)}."
        )

    def table(self) -> list[dict[str, Any]]:
        return [
            {"step": i, "index": v, "frozen stages": v * self.stride, "backward work saved": percent(self.saved[i], 1)}
            for i, v in enumerate(self.sequence)
        ]


def blocks_reached(index: int) -> list[str]:
    """Blocks of a small ResNet-18 whose output a gradient reached in one backward pass frozen at `index`."""
    torch.manual_seed(0)
    net = networks.resnet18(width=4, in_channels=1)
    groups = GradientFreeze(10, 1, 0.7, 10).split_parameters_groups(net, 10)
    optimizer = FreezeOpt(torch.optim.SGD(net.parameters(), lr=0.1), groups, list(range(10)))
    heard: set[str] = set()

    def listen(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: heard.add(name))

        return hook

    for name, module in net.named_modules():
        if isinstance(module, networks.ResidualBlock):
            module.register_forward_hook(listen(name))
    images, labels = digits("train", size=8)
    with optimizer.frozen(index):
        F.cross_entropy(net(images[:16]), labels[:16]).backward()
    return sorted(heard)


# less batch norm on the network


NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "ResNet-18": lambda: networks.resnet18(width=4),
    "ResNet-34": lambda: networks.resnet34(width=4),
    "ResNet-50": lambda: networks.resnet50(width=4),
    "MobileNetV2": lambda: networks.MobileNetV2(),
    "DenseNet": lambda: networks.DenseNet(),
    "LeNet-5": lambda: networks.LeNet5(),
}


class LessBNExplorer(Explorer):
    """The layers of a network in definition order, and which BatchNorms LessBN takes away."""

    controls = ("network", "fn_flag", "faithful")
    network = Enum(tuple(NETWORKS), "ResNet-18").tag(label="network")
    fn_flag = Bool(False).tag(label="fn_flag: normalise the last FC")
    faithful = Bool(False).tag(label="faithful: MindSpore's patterns")

    def compute(self) -> None:
        """`layers`: (name, kind) of each, conv, linear, normalised, kept or removed; `shortcuts`: blocks with one."""
        net = NETWORKS[self.network]()
        blocks = (networks.ResidualBlock, networks.Bottleneck)
        self.shortcuts = {
            n for n, m in net.named_modules() if isinstance(m, blocks) or getattr(m, "shortcut", 0) is True
        }
        order = [(name, m) for name, m in net.named_modules() if isinstance(m, _DRAWN)]
        try:
            self.report = LessBN(net, self.fn_flag, faithful=self.faithful).report
        except ValueError as error:
            raise ValueError(
                f"MindSpore's patterns cannot be looked for in {self.network}: what its forward pass does depends on "
                "the size of the image; untick faithful, or choose another network"
            ) from error
        self.layers = [(name, self._kind(name, module)) for name, module in order]

    def _kind(self, name: str, module: nn.Module) -> str:
        if isinstance(module, nn.BatchNorm2d):
            return "removed" if name in self.report.removed else "kept"
        if isinstance(module, nn.Linear):
            return "normalised" if name in self.report.normalized else "linear"
        return "conv"

    def summary(self) -> str:
        norms = len(self.report.removed) + len(self.report.kept)
        last = f" The last FC, {self.report.normalized[0]}, is normalised." if self.report.normalized else ""
        rule = " by MindSpore's own patterns" if self.faithful else ""
        if not norms:
            return f"{self.network} has no BatchNorm.{last}"
        return f"{self.network}: {len(self.report.removed)} of {norms} BatchNorms are removed{rule}.{last}"

    def table(self) -> list[dict[str, Any]]:
        reasons = self.report.removed
        return [{"layer": name, "kind": kind, "why": reasons.get(name, "")} for name, kind in self.layers]


_DRAWN = (nn.Conv2d, nn.BatchNorm2d, nn.Linear)


# centralized gradients


@cache
def _gradients() -> dict[str, Tensor]:
    """Gradients of a LeNet-5 on 64 real digits at its first weights, by parameter name; those that are centralized."""
    torch.manual_seed(0)
    net = networks.LeNet5()
    images, labels = digits("train")
    F.cross_entropy(net(images[:64]), labels[:64]).backward()
    owners = {id(p): m for m in net.modules() for p in m.parameters(recurse=False)}
    named = {n: p for n, p in net.named_parameters() if is_centralized(owners[id(p)], p)}
    return {name: p.grad.flatten(1) for name, p in named.items() if p.grad is not None}


LAYERS = ("conv1.weight", "conv2.weight", "fc1.weight", "fc2.weight", "fc3.weight")


class CentralizeExplorer(Explorer):
    """One output's gradient in a LeNet-5 on real digits, before and after its mean is subtracted."""

    controls = ("layer", "output", "centralize")
    layer = Enum(LAYERS, "conv1.weight").tag(label="layer")
    output = Int(0, min=0, max=119).tag(label="output (row of the gradient)")
    centralize = Bool(True).tag(label="subtract the mean")

    def compute(self) -> None:
        """The gradient rows as they are and as the optimizer would see them."""
        grad = _gradients()[self.layer]
        if self.output >= len(grad):
            raise ValueError(f"{self.layer} has {len(grad)} outputs, 0 to {len(grad) - 1}, got {self.output}")
        self.grad = grad
        self.used = centralized(grad) if self.centralize else grad
        self.row, self.row_used = grad[self.output], self.used[self.output]

    @property
    def norm_ratio(self) -> float:
        """Length of the used gradient of the layer as a share of the original."""
        return float(self.used.norm() / self.grad.norm())

    def summary(self) -> str:
        taken = "is subtracted from" if self.centralize else "stays in"
        return (
            f"{self.layer}, output {self.output}: the mean {float(self.row.mean()):+.1e} {taken} its {len(self.row)} "
            f"entries; the layer's gradient keeps {percent(self.norm_ratio)} of its length."
        )

    def table(self) -> list[dict[str, Any]]:
        return [
            {"output": i, "mean before": f"{float(g.mean()):+.2e}", "length before": f"{float(g.norm()):.2e}"}
            | {"length after": f"{float(u.norm()):.2e}"}
            for i, (g, u) in enumerate(zip(self.grad, self.used))
        ]
