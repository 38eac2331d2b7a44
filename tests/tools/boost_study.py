"""The study behind `data/benchmarks/boost.json`: what each boost algorithm and level buys per step, and what it costs.

`python tests/tools/boost_study.py --out FILE` measures the time of trainings freeze index by freeze index, and
trains every configuration from several seeds on real digits (and MNIST where it is) and stores both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from boost_accuracy import CONFIGURATIONS, OFF, STUDIES, accuracies
from torch import nn
from torch.optim import Optimizer

from mpkit import networks
from mpkit.bench import Row
from mpkit.boost import AutoBoost, FreezeOpt
from mpkit.casting import auto_mixed_precision
from mpkit.device import default_device, describe
from mpkit.experiment.parts import boost_of, step_of
from mpkit.files import write_whole
from mpkit.optimizers import Momentum

Pair = tuple[list[float], list[float]]
GROUPS = 10
PHASE = 18  # steps between two looks at the clock: one whole cycle of the tuned strategy
GOALS = {"cpu": {"O1": 1.10, "O1 tuned": 1.30}, "cuda": {"O1": 1.20, "O1 tuned": 1.30}}
INDEXED = {"freezing": "plain", "O1": "O1"}
"""The contenders whose freeze indices are also timed one by one, and how those rows are called."""


@dataclass(frozen=True)
class Setting:
    """A network, its input and the casting level that every contender shares."""

    name: str
    network: Callable[[], nn.Module]
    batch: tuple[int, int, int, int]
    mixed: bool = False


@dataclass(frozen=True)
class Contender:
    """One training: `step` runs its next step, `indices` are the freeze indices of its steps, none without freezing."""

    step: Callable[[], object]
    optimizer: Optimizer
    network: nn.Module
    indices: tuple[int, ...] = ()

    def follow(self, indices: Sequence[int]) -> None:
        """The coming steps take these freeze indices, again and again."""
        if isinstance(self.optimizer, FreezeOpt):
            self.optimizer.strategy, self.optimizer.step_index = list(indices), 0


def settings(device: torch.device) -> list[Setting]:
    """What is measured on a device."""
    if device.type == "cuda":
        large = partial(networks.resnet50, small_input=False)
        return [
            Setting("ResNet-18, 256 x 32x32, fp16 O2", networks.resnet18, (256, 3, 32, 32), True),
            Setting("ResNet-50, 64 x 224x224, fp16 O2", large, (64, 3, 224, 224), True),
        ]
    return [Setting("ResNet-18 width 32, 32 x 32x32, fp32", partial(networks.resnet18, width=32), (32, 3, 32, 32))]


def speedups(setting: Setting, device: torch.device, phases: int) -> list[Row]:
    """Speed-up of every algorithm and level against the same network, level and optimizer without boost.

    Every contender trains `phases` phases, in turn with the others; then each freeze index is timed alone.
    """
    contenders = _contenders(setting, device, phases * PHASE)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for one in contenders.values():
        one.step()  # fills caches and momentum buffers
        one.follow(one.indices)
    for number in range(phases):
        for name in list(contenders) if number % 2 == 0 else reversed(list(contenders)):
            one = contenders[name]
            steps = PHASE if one.indices or name == "none" else PHASE // 3  # steps that are all alike
            times[name].append(_seconds(one.step, steps, device))
    alone = _index_times(contenders, device, phases)
    rows = [_row(setting, name, times["none"], own, device) for name, own in times.items()]
    return rows + [_row(setting, name, base, own, device) for name, (base, own) in alone.items()]


def _contenders(setting: Setting, device: torch.device, steps: int) -> dict[str, Contender]:
    """Every configuration of the accuracy study, and freezing in whole cycles."""
    frozen = {"level": "O0", "boost": {**OFF, "grad_freeze": True}, "grad_freeze": {"freeze_type": 0}}
    configs = {**CONFIGURATIONS, "freezing, type 0": frozen}
    return {name: _contender(setting, device, boost_of(config, steps)) for name, config in configs.items()}


def _contender(setting: Setting, device: torch.device, boost: AutoBoost) -> Contender:
    torch.manual_seed(0)
    x = torch.randn(setting.batch, device=device)
    y = torch.arange(setting.batch[0], device=device) % 10
    net = setting.network().to(device)
    if device.type == "cuda":
        x = x.contiguous(memory_format=torch.channels_last)
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    net, optimizer = boost.network_auto_process_train(net, Momentum(net.parameters(), 0.01, 0.9, weight_decay=5e-4))
    if setting.mixed:
        auto_mixed_precision(net, "O2", torch.float16)
    sense = torch.tensor(1024.0, device=device) if setting.mixed else None
    cell = step_of(net, nn.CrossEntropyLoss(), False, optimizer, sense, boost=boost)
    return Contender(lambda: cell(x, y), optimizer, net, tuple(getattr(optimizer, "strategy", ())))


def _by_index(contenders: Mapping[str, Contender], rounds: int, look: Callable[..., Any]) -> dict[Any, list[Any]]:
    """What `look` sees in a step of each network of `INDEXED` at each freeze index, (name, index) -> round by round."""
    found: dict[Any, list[Any]] = {}
    for _ in range(rounds):
        for contender, name in {"none": "none", **INDEXED}.items():
            one = contenders[contender]
            one.step()  # not looked at: the step after another network meets a cold cache
            one.follow(range(GROUPS))
            for v in range(GROUPS if name != "none" else 1):
                found.setdefault((name, v), []).append(look(one))
    return found


def _index_times(contenders: Mapping[str, Contender], device: torch.device, rounds: int) -> dict[str, Pair]:
    """Times of a step without boost and of one frozen at an index, such as "plain index 3", round by round."""
    times = _by_index(contenders, rounds, lambda one: _seconds(one.step, 1, device))
    base = times.pop(("none", 0))
    return {f"{name} index {v}": (base, own) for (name, v), own in times.items()}


def blocks(setting: Setting, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Where the time of a step goes, for each network of `INDEXED` and freeze index: medians in seconds.

    `batch_norm` is what the BatchNorms take forward and back, `forward` and `backward` are the rest of the two passes,
    `update` is the optimizer. Measured step by step in turn, with hooks at the modules, so a little above a plain step.
    """
    found = _by_index(_contenders(setting, device, PHASE), rounds, lambda one: _split(one, device))
    return [
        {"network": name, "index": v} | {part: statistics.median(r[part] for r in rows) for part in rows[0]}
        for (name, v), rows in found.items()
        if name != "none"
    ]


def _split(one: Contender, device: torch.device) -> dict[str, float]:
    """One step of a contender, taken apart: seconds of each part."""
    spent = dict.fromkeys(("forward", "backward", "batch_norm", "update", "norm_forward"), 0.0)
    started: dict[Any, float] = {}

    def start(key: Hashable) -> Callable[..., None]:
        return lambda *_: started.__setitem__(key, _now(device))

    def stop(key: Hashable, part: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if key in started:
                spent[part] += _now(device) - started.pop(key)

        return hook

    net, rule = one.network, one.optimizer
    handles: list[Any] = [
        net.register_forward_pre_hook(start("net")),
        net.register_forward_hook(stop("net", "forward")),
        rule.register_step_pre_hook(start("update")),
        rule.register_step_post_hook(stop("update", "update")),
    ]
    for norm in (m for m in net.modules() if isinstance(m, nn.BatchNorm2d)):
        handles += [
            norm.register_forward_pre_hook(start((norm, 0))),
            norm.register_forward_hook(stop((norm, 0), "norm_forward")),
            norm.register_full_backward_pre_hook(start((norm, 1))),
            norm.register_full_backward_hook(stop((norm, 1), "batch_norm")),
        ]
    whole = _seconds(one.step, 1, device)
    for handle in handles:
        handle.remove()
    norm_forward = spent.pop("norm_forward")
    spent["backward"] = whole - spent["forward"] - spent["update"] - spent["batch_norm"]
    spent["forward"] -= norm_forward
    spent["batch_norm"] += norm_forward
    return spent


def _now(device: torch.device) -> float:
    """Wall time on a GPU, elsewhere CPU time of the process."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def _row(setting: Setting, name: str, base: list[float], own: list[float], device: torch.device) -> Row:
    """Ratio of the two trainings as a whole, quartiles of the ratios phase by phase."""
    low, _, high = statistics.quantiles([b / t for b, t in zip(base, own)], n=4)
    middle, what = (statistics.median, "a step") if " index " in name else (statistics.mean, "a whole training")
    ratio, goal = middle(base) / middle(own), GOALS[device.type].get(name)
    note = f"speed-up: {middle.__name__} time of {what} without boost / with it"
    return Row(
        "boost", setting.name, name, middle(own), "none", ratio, (low, high), goal, goal_is_floor=True, note=note
    )


def _seconds(step: Callable[[], object], steps: int, device: torch.device) -> float:
    """Time of one of `steps` steps: wall time on a GPU; elsewhere CPU time, which other programs disturb less."""
    start = _now(device)
    for _ in range(steps):
        step()
    return (_now(device) - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/tools/boost_study.py", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file, written after every part")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of every configuration")
    parser.add_argument("--folder", type=Path, help="keep every training there, and go on with it after a break")
    parser.add_argument("--note", default="", help="what a reader must know of the machine, for the file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = default_device()
    unless = "" if device.type == "cuda" else "CPU time of the process, not measured on a GPU"
    made = {"made_by": "python tests/tools/boost_study.py", "utc": datetime.now(UTC).isoformat(timespec="seconds")}
    meta = {**made, **describe(device), "note": options.note or unless}
    store: dict[str, Any] = {"meta": meta, "speed": [], "accuracy": [], "blocks": {"meta": meta}}

    def save() -> None:
        write_whole(options.out, lambda file: file.write((json.dumps(store, indent=1) + "\n").encode()))

    store["speed"] = [asdict(row) for setting in settings(device) for row in speedups(setting, device, 8)]
    store["blocks"]["rows"] = blocks(settings(device)[0], device, 5)
    save()
    for number, study in enumerate(STUDIES):
        folder = options.folder and options.folder / f"{number}"
        try:
            store["accuracy"] += accuracies(study, range(options.seeds * study.repeats), folder)
        except FileNotFoundError as error:
            print(f"{study.source} is left out: {error}")
        save()


if __name__ == "__main__":
    main()
