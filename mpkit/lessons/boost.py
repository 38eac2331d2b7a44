"""Lesson 07: what a boost level switches on, how fast and how accurate it was, and what each step spends time on."""

import json
import math
from functools import cache
from typing import Any

import numpy as np

from mpkit import networks
from mpkit.boost import AutoBoost, GradientFreeze, LessBN
from mpkit.boost.config import MODES
from mpkit.boost.grad_freeze import full_steps
from mpkit.data import data_dir
from mpkit.view import Choice, Sheet, linear, names, percent, view

COMPARED = ("none", "less_bn", "freezing", "O1", "O1 tuned")
GROUPS = 10  # of stages, in the network that was measured
CYCLE = 18  # steps that are shown one by one: a whole cycle of the tuned strategy
# of a step; batch norms are hatched
PARTS = {"forward": "zero/0.6", "batch_norm": "subnormal/0.9", "backward": "reference/0.55", "update": "normal/0.8"}


# ---- numbers
@cache
def measured() -> dict[str, Any]:
    """The stored benchmark: `speed` and `accuracy` rows, and `meta` with the device and the versions."""
    return json.loads((data_dir() / "benchmarks" / "boost.json").read_text())


def relative_time(contender: str) -> float:
    """Measured time of one step of a contender of the benchmark as a share of the step without boost."""
    return 1 / next(row["ratio"] for row in measured()["speed"] if row["contender"] == contender)


def accuracies(configuration: str) -> list[float]:
    """Accuracy on the digits (percent) from each seed, without an entry where it was not trained."""
    rows = [row for row in measured()["accuracy"] if row["data"].startswith("digits")]
    return next((row["accuracy_percent"] for row in rows if row["configuration"] == configuration), [])


def preset(name: str) -> AutoBoost:
    """The AutoBoost of one of `COMPARED`."""
    if name in ("less_bn", "freezing"):
        return AutoBoost("O0", {"boost": {"mode": "manual", "grad_freeze" if name == "freezing" else name: True}})
    tuned = name == "O1 tuned"
    return AutoBoost("O0" if name == "none" else "O1", {"boost": {"mode": "tuned"}} if tuned else None)


def strategy(boost: AutoBoost) -> tuple[float, int]:
    """`freeze_p` and `freeze_type`; no step is frozen where freezing does not run."""
    return (boost.hyper["freeze_p"], boost.hyper["freeze_type"]) if "grad_freeze" in boost.active else (1.0, 1)


def full_share(boost: AutoBoost) -> float:
    """Share of the steps in which nothing is frozen: type 0 has whole steps only, type 1 begins with a full one."""
    full, kind = strategy(boost)
    if kind:
        return max(full, 1 / boost.hyper["total_steps"])
    count = full_steps(GROUPS, full)
    return count / (count + GROUPS - 1)


def measured_as(boost: AutoBoost) -> tuple[str, float]:
    """Which of `COMPARED` a configuration is ("" for none), and its time of a step in those without boost, or NaN."""
    alike = (n for n in COMPARED if (p := preset(n)).active == boost.active and strategy(p) == strategy(boost))
    name = next(alike, "")  # in one process O2 does what O1 does
    return name, relative_time("O2" if (boost.level, name) == ("O2", "O1") else name) if name else math.nan


@cache
def first_steps(name: str) -> np.ndarray:
    """What the first steps of one of `COMPARED` spend on each of `PARTS`, (18, 4), in steps without boost.

    The shares of the parts were measured on their own, with hooks.
    """
    boost = preset(name)
    network = "O1" if "less_bn" in boost.active else "plain"
    full, kind = strategy(boost)
    split = {row["index"]: [row[p] for p in PARTS] for row in measured()["blocks"]["rows"] if row["network"] == network}
    indices = GradientFreeze(GROUPS, kind, full, CYCLE).generate_freeze_index_sequence(GROUPS, kind, full, CYCLE)
    return np.array([relative_time(f"{network} index {v}") * np.array(split[v]) / sum(split[v]) for v in indices])


@cache
def thinned() -> tuple[int, int]:
    """How many BatchNorms of a ResNet-18 LessBN removes, of how many."""
    report = LessBN(networks.resnet18(width=4)).report
    return len(report.removed), len(report.removed) + len(report.kept)


# ---- a configuration beside one that was measured
@view(
    level=Choice({level: level for level in AutoBoost.levels}, "boost_level"),
    mode=[*MODES],
    less_bn="less_bn",
    grad_freeze="grad_freeze",
    compare=[*COMPARED],
)
def levels(see: Sheet, level="O1", mode="auto", less_bn=False, grad_freeze=False, compare="none") -> None:
    """A boost configuration of your own beside one that was measured, on the ResNet-18 of the benchmark.

    Numbers: `active inactive removed frozen` (share of the steps) `speedup`, `trained` (which measured configuration
    it is), and `steps` (rows, 18, 4), what the first steps of `compare` and of that one spend on a part.
    """
    switches = {"less_bn": less_bn, "grad_freeze": grad_freeze}
    see.idle = set() if mode == "manual" else {*switches}
    # what is not written falls back to the level
    this = AutoBoost(level, {"boost": {"mode": mode, **(switches | {"adasum": False} if mode == "manual" else {})}})
    trained, step = measured_as(this)
    rows = sorted({"none", trained if compare == "none" else compare} - {""}, key=COMPARED.index)
    steps = np.array([first_steps(name) for name in rows])
    removed, norms = thinned()
    removed *= "less_bn" in this.active
    see.grid(456, 900, rows=(296, 160), least=680)
    _field(see, 1 / step, compare)
    _steps(see, rows, steps)

    speed = f"speed-up is {1 / step:.2f}, measured" if trained else "speed was not measured"
    stopped = "".join(f" Inactive: {what} ({reason})." for what, reason in this.inactive)
    taken = [
        f" The first {CYCLE} steps of {name} take as long as {parts.sum():.1f} without boost; BatchNorms take "
        f"{percent(parts[0, 1] / parts[0].sum())} of a full step."
        for name, parts in zip(rows, steps)
    ]
    see.say(
        f"boost_level {level} in mode {mode} runs {', '.join(this.active) or 'nothing'}. It removes {removed} of "
        f"{norms} BatchNorms and freezes layers in {percent(1 - full_share(this))} of the steps. Its {speed}. "
        f"{_accuracy_told(trained)}{stopped}{''.join(taken)}",
        active=this.active, inactive=this.inactive, removed=removed, frozen=1 - full_share(this), speedup=1 / step,
        trained=trained, steps=steps,
    )  # fmt: skip


def _accuracy_told(trained: str) -> str:
    if not (seeds := accuracies(trained)):
        return "Its accuracy was not measured."
    mean, against = np.mean(seeds), np.mean(np.subtract(seeds, accuracies("none")))
    told = f"{mean:.1f} ± {np.std(seeds, ddof=1):.1f} %, {against:+.1f} points against no boost"
    return f"Its accuracy on the digits is {told} (mean ± one standard deviation of {len(seeds)} seeds)."


def _field(see: Sheet, own: float, compare: str) -> None:
    """Speed-up and accuracy of every measured configuration, its seeds, the promises, and where this one stands."""
    ordered = sorted(COMPARED, key=relative_time, reverse=True)
    runs = {name: accuracies(name) for name in ordered}
    at = {name: (1 / relative_time(name), float(np.mean(runs[name]))) for name in ordered}
    low, high = np.floor(min(map(min, runs.values()))) - 0.5, np.ceil(max(map(max, runs.values()))) + 0.5
    x = linear("speed-up against no boost", 0.96, max(1.4, np.nan_to_num(own) + 0.1), 5)
    y = linear("accuracy on the digits, %", low, high, 6)
    panel = see.panel(title="dots: seeds; lines: ± one standard deviation", x=x, y=y)
    for name, promise in (("O1", 1.2), ("O2", 1.3)):  # what MindSpore's documents say
        panel.rule("x", promise, "muted", dash="--")
        panel.text(f"{name} promised", promise, low, color="muted", rotate=90, dx=9, dy=-42, halo=True)
    for name, (speed, mean) in at.items():
        color, spread = "zero" if name == compare else "reference", float(np.std(runs[name], ddof=1))
        panel.points(runs[name], [speed] * len(runs[name]), "muted", size=2.5, label="one seed", quiet=True)
        panel.line([mean - spread, mean + spread], [speed] * 2, color, width=3, quiet=True)
        panel.points([mean], [speed], color, glyph="s", size=5.5, label=name, quiet=True)
        # right of O1 stands the line of what is promised
        panel.text(name, speed, mean, halo=True, color=color, dy=21, beside=-8 if name == "O1" else 8)
    speeds, means = np.array(list(at.values())).T
    squares = speeds - 0.012, means - 0.4, speeds + 0.012, means + 0.4
    sets = [{"compare": name} for name in at]
    panel.boxes(*squares, name="compare", sets=sets, names=[f"compare with {name}" for name in at], quiet=True)
    if math.isfinite(own):
        panel.points([high - 0.25], [own], "own", glyph="v", size=7, quiet=True)
        crowded = any(0 < promise - own < 0.07 for promise in (1.2, 1.3))
        panel.text(f"this: {own:.2f}", own, high, color="own", valign="top", beside=-12 if crowded else 12, halo=True)


def _steps(see: Sheet, rows: list[str], steps: np.ndarray) -> None:
    """The first steps of two configurations: each begins where one without boost would."""
    x = linear("step, as wide as one without boost", 0, CYCLE + 0.2)
    x |= {"ticks": [[v, str(v)] for v in range(0, CYCLE + 1, 3)]}
    panel = see.panel(1, title="step by step: click another square above", x=x, y=names(rows, down=True))
    row, start = (axis.ravel() for axis in np.indices(steps.shape[:2]))
    ends = start[:, None] + np.insert(steps.reshape(-1, len(PARTS)).cumsum(1), 0, 0, axis=1)
    for k, (part, fill) in enumerate(PARTS.items()):
        told = [f"{share:.2f} of a step" for share in steps[..., k].ravel()]
        look = {"fill": fill, "hatch": part == "batch_norm" or None, "label": part.replace("_", " "), "told": told}
        edge = "normal" if part == "update" else "muted"  # so thin that its edge is all one sees
        panel.boxes(ends[:, k], row - 0.2, ends[:, k + 1], row + 0.4, edge=edge, width=1, **look)
    for k, name in enumerate(rows):
        words = f"{CYCLE} steps" if name == "none" else f"{CYCLE} steps in the time of {steps[k].sum():.1f}"
        panel.text(words, CYCLE, k - 0.22, anchor="end", valign="bottom", weight="bold")
