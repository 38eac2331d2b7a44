"""What each boost algorithm and level buys per step, and what it costs in accuracy.

`python -m mpkit.bench --only boost` measures step times. `python -m mpkit.bench.boost --out FILE` also trains every
configuration from several seeds on real digits (and MNIST where it is) and stores both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit import networks
from mpkit.bench._measure import Row
from mpkit.boost import (
    AutoBoost,
    BoostTrainOneStepCell,
    BoostTrainOneStepWithLossScaleCell,
    FreezeOpt,
    GradientFreeze,
    LessBN,
    OptimizerProcess,
)
from mpkit.boost.auto import TUNED
from mpkit.boost.grad_freeze import index_probabilities
from mpkit.boost.less_bn import NormalizedLinear
from mpkit.casting import auto_mixed_precision
from mpkit.data import digits, mnist
from mpkit.device import default_device, describe
from mpkit.optimizers import Momentum
from mpkit.schedules import CosineDecayLR
from mpkit.step import WithLossCell

GROUP = "boost"
GROUPS = 10
GOALS = {"cpu": {"O1": 1.10, "O1 tuned": 1.30}, "cuda": {"O1": 1.20, "O1 tuned": 1.30}}
Call = Callable[[], object]


@dataclass(frozen=True)
class Setting:
    """A network, its input and the casting level that every contender shares."""

    name: str
    network: Callable[[], nn.Module]
    batch: tuple[int, int, int, int]
    mixed: bool = False


def settings(device: torch.device, quick: bool) -> list[Setting]:
    """What is measured on a device."""
    if device.type == "cuda":
        small = Setting("ResNet-18, 256 x 32x32, fp16 O2", networks.resnet18, (256, 3, 32, 32), True)
        large = Setting(
            "ResNet-50, 64 x 224x224, fp16 O2", lambda: networks.resnet50(small_input=False), (64, 3, 224, 224), True
        )
        return [small] if quick else [small, large]
    if quick:
        return [Setting("ResNet-18 width 8, 8 x 16x16, fp32", lambda: networks.resnet18(width=8), (8, 3, 16, 16))]
    return [Setting("ResNet-18 width 32, 32 x 32x32, fp32", lambda: networks.resnet18(width=32), (32, 3, 32, 32))]


def run(*, quick: bool, device: torch.device) -> list[Row]:
    """Speed-up of every algorithm and level against the same network, level and optimizer without boost."""
    rows: list[Row] = []
    for setting in settings(device, quick):
        rows += _speedups(setting, device, 5 if quick else 15)
    return rows


def _speedups(setting: Setting, device: torch.device, rounds: int) -> list[Row]:
    """Every freeze index is timed once per round; a strategy's step is the mean over its indices."""
    calls = _calls(setting, device)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for number in range(rounds):
        names = list(calls)
        for name in names if number % 2 == 0 else reversed(names):
            times[name].append(_seconds(calls[name], device))
    base = times["none"]
    strategies = {
        "freezing type 1, full 0.7": ("plain", 1, 0.7),
        "freezing type 0, full 0.7": ("plain", 0, 0.7),
        "O1": ("O1", 1, 0.7),
        "O1 tuned": ("O1", int(TUNED["freeze_type"]), float(TUNED["freeze_p"])),
    }
    means: dict[str, list[float]] = {
        name: times[name] for name in ("none", "less_bn", "normalised FC", "centralization")
    }
    for name, (net, kind, full) in strategies.items():
        odds = [full, *((1 - full) * p for p in index_probabilities(GROUPS, kind))]
        means[name] = [sum(p * times[f"{net} index {v}"][r] for v, p in enumerate(odds)) for r in range(rounds)]
    means |= {name: times[name] for name in times if " index " in name}
    rows = [_speedup_row(setting, name, base, own, device) for name, own in means.items()]
    o1 = next(row for row in rows if row.contender == "O1")
    note = "one process: adasum has nothing to merge, so O2 runs what O1 runs"
    return [*rows, Row(**{**o1.as_dict(), "contender": "O2", "goal": None, "note": note})]


def _speedup_row(setting: Setting, name: str, base: list[float], own: list[float], device: torch.device) -> Row:
    ratios = [b / t for b, t in zip(base, own)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    goal = GOALS[device.type].get(name) if name in GOALS[device.type] else None
    return Row(
        GROUP,
        setting.name,
        name,
        statistics.median(own),
        "none",
        middle,
        (low, high),
        goal,
        goal_is_floor=True,
        note="ratio is the speed-up: time without boost / time with it",
    )


def _calls(setting: Setting, device: torch.device) -> dict[str, Call]:
    """One training step per contender; "plain index 3" is the network without other boosts, frozen at index 3."""
    x = torch.randn(setting.batch, device=device)
    y = torch.arange(setting.batch[0], device=device) % 10
    if device.type == "cuda":
        x = x.contiguous(memory_format=torch.channels_last)

    def network() -> nn.Module:
        torch.manual_seed(0)
        net = setting.network().to(device)
        return net.to(memory_format=torch.channels_last) if device.type == "cuda" else net  # type: ignore[call-overload]

    def optimized(net: nn.Module) -> Momentum:
        return Momentum(net.parameters(), 0.01, 0.9, weight_decay=5e-4)

    def stepping(net: nn.Module, optimizer: Optimizer) -> Call:
        if setting.mixed:
            auto_mixed_precision(net, "O2", torch.float16)
        loss = WithLossCell(net, nn.CrossEntropyLoss())
        if setting.mixed:
            scaled = BoostTrainOneStepWithLossScaleCell(loss, optimizer, torch.tensor(1024.0, device=device))
            return lambda: scaled(x, y)
        cell = BoostTrainOneStepCell(loss, optimizer)
        return lambda: cell(x, y)

    net, central, plain = network(), network(), network()
    less, cosine = LessBN(network()), _normalised(network())
    calls = {
        "none": stepping(net, optimized(net)),
        "less_bn": stepping(less, optimized(less)),
        "normalised FC": stepping(cosine, optimized(cosine)),
        "centralization": stepping(central, _centralized(central, optimized(central))),
    }
    plain, frozen = GradientFreeze(GROUPS, 1, 0.7, 1000).freeze_generate(plain, optimized(plain))
    calls |= _indexed("plain", frozen, stepping(plain, frozen))
    boost = AutoBoost("O1", {"grad_freeze": {"total_steps": 1000}})
    net = network()
    net, boosted = boost.network_auto_process_train(net, optimized(net))
    assert isinstance(boosted, FreezeOpt)
    return calls | _indexed("O1", boosted, stepping(net, boosted))


def _indexed(name: str, optimizer: FreezeOpt, step: Call) -> dict[str, Call]:
    places = [optimizer.strategy.index(v) for v in range(GROUPS)]

    def at(place: int) -> Call:
        def call() -> object:
            optimizer.step_index = place
            return step()

        return call

    return {f"{name} index {v}": at(place) for v, place in enumerate(places)}


def _normalised(net: nn.Module) -> nn.Module:
    net.fc = NormalizedLinear.of(net.fc)  # type: ignore[arg-type]
    return net


def _centralized(net: nn.Module, optimizer: Momentum) -> Optimizer:
    process = OptimizerProcess(optimizer)
    process.add_grad_centralization(net)
    return process.generate_new_optimizer()


def _seconds(call: Call, device: torch.device) -> float:
    """Wall time on a GPU; CPU time of this process elsewhere, which other programs disturb less."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        torch.cuda.synchronize(device)
        return time.perf_counter() - start
    start = time.process_time()
    call()
    return time.process_time() - start


# accuracy


def configurations(steps: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> level and configuration of AutoBoost, for a training of `steps` steps; O2 is O1 in one process."""
    freeze = {"total_steps": steps}
    off = {"mode": "manual", "less_bn": False, "grad_freeze": False, "adasum": False}
    plain = {"fn_flag": False, "gc_flag": False}
    return {
        "none": ("O0", {}),
        "less_bn": ("O0", {"boost": {**off, "less_bn": True}, "less_bn": plain}),
        "less_bn + normalised FC": ("O0", {"boost": {**off, "less_bn": True}, "less_bn": {**plain, "fn_flag": True}}),
        "less_bn + centralization": ("O0", {"boost": {**off, "less_bn": True}, "less_bn": {**plain, "gc_flag": True}}),
        "freezing": ("O0", {"boost": {**off, "grad_freeze": True}, "grad_freeze": freeze}),
        "O1": ("O1", {"grad_freeze": freeze}),
        "O1 tuned": ("O1", {"boost": {"mode": "tuned"}, "grad_freeze": freeze}),
    }


@dataclass(frozen=True)
class Study:
    """What is trained for the accuracy: real digits, so many images, a ResNet-18 of a width, so many epochs.

    `only` names the configurations; empty takes all.
    """

    source: str = "digits"
    size: int = 8
    train: int = 1500
    test: int = 297
    width: int = 8
    epochs: int = 10
    batch: int = 32
    only: tuple[str, ...] = ()

    def data(self, device: torch.device) -> tuple[Tensor, ...]:
        """Images and labels of training, images and labels of the test."""
        if self.source == "digits":
            pairs = [digits(split, self.size) for split in ("train", "test")]
        else:
            pairs = [mnist(split=split) for split in ("train", "test")]
        return tuple(t[:n].to(device) for pair, n in zip(pairs, (self.train, self.test)) for t in pair)


LEVELS = ("none", "O1", "O1 tuned")
STUDIES = (Study(), Study("mnist", 28, 2000, 1000, epochs=2, only=LEVELS), Study(epochs=20, only=LEVELS))


def trained_accuracy(level: str, config: dict[str, Any], seed: int, data: tuple[Tensor, ...], study: Study) -> float:
    """Test accuracy, percent, of one training; the seed fixes first weights and order."""
    images, labels, test_images, test_labels = data
    torch.manual_seed(seed)
    steps = study.epochs * -(-len(images) // study.batch)
    resnet = networks.resnet18(width=study.width, in_channels=1).to(images.device)
    boost = AutoBoost(level, config)
    net, optimizer = boost.network_auto_process_train(
        resnet, Momentum(resnet.parameters(), CosineDecayLR(1e-4, 0.05, steps), 0.9, weight_decay=5e-4)
    )
    cell = BoostTrainOneStepCell(WithLossCell(net, nn.CrossEntropyLoss()), optimizer, boost=boost)
    for _ in range(study.epochs):
        for rows in torch.randperm(len(images)).split(study.batch):
            cell(images[rows], labels[rows])
    net.eval()
    with torch.no_grad():
        right = [(net(x).argmax(1) == y).float().sum() for x, y in zip(test_images.split(250), test_labels.split(250))]
    return 100 * float(sum(right)) / len(test_labels)


def accuracies(study: Study, seeds: Sequence[int], device: torch.device) -> list[dict[str, Any]]:
    """One row per configuration: accuracy of every seed, mean, spread, and the difference to no boost seed by seed."""
    data = study.data(device)
    steps = study.epochs * -(-len(data[0]) // study.batch)
    rows: list[dict[str, Any]] = []
    for name, (level, config) in configurations(steps).items():
        if study.only and name not in study.only:
            continue
        scores = [trained_accuracy(level, config, seed, data, study) for seed in seeds]
        base = rows[0]["accuracy_percent"] if rows else scores
        differences = [a - b for a, b in zip(scores, base)]
        rows.append(
            {
                "data": f"{study.source} {study.size}x{study.size}, {len(data[0])} to train, {len(data[2])} to test",
                "network": f"ResNet-18 width {study.width}, {study.epochs} epochs of batch {study.batch}",
                "configuration": name,
                "accuracy_percent": [round(score, 2) for score in scores],
                "mean": round(statistics.mean(scores), 2),
                "spread": round(statistics.stdev(scores), 2),
                "difference": round(statistics.mean(differences), 2),
                "difference_spread": round(statistics.stdev(differences), 2),
            }
        )
        print(*rows[-1].values(), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mpkit.bench.boost", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = default_device()
    rows = run(quick=False, device=device)
    print(*(f"{r.contender:28} {r.ratio:.3f} {r.quartiles}" for r in rows), sep="\n", flush=True)
    found: list[dict[str, Any]] = []
    _store(options.out, rows, found, device)
    for study in STUDIES:
        try:
            found += accuracies(study, range(options.seeds), device)
        except FileNotFoundError as error:
            print(f"{study.source} is left out: {error}")
        _store(options.out, rows, found, device)


def _store(path: Path, rows: Sequence[Row], found: Sequence[dict[str, Any]], device: torch.device) -> None:
    made = {"made_by": "python -m mpkit.bench.boost", "utc": datetime.now(UTC).isoformat(timespec="seconds")}
    store = {"meta": {**made, **describe(device)}, "speed": [r.as_dict() for r in rows], "accuracy": list(found)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(store, indent=1) + "\n")


if __name__ == "__main__":
    main()
