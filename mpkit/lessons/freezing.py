"""*Freeze and centralize*: which stages freezing trains, which BatchNorms go, what a centralized gradient loses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from itertools import groupby, pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit import networks
from mpkit.boost import FreezeOpt, GradientFreeze, LessBN
from mpkit.boost.grad_freeze import expected_saving, stage_costs
from mpkit.data import digits
from mpkit.lessons.boost import stages
from mpkit.optimizers import centralized
from mpkit.replay.percent import percent
from mpkit.view import Choice, Range, Sheet, view
from mpkit.view.sheet import linear, names

STEPS = 120
ORDERS = {0: "0 continuous", 1: "1 interleaved"}


# ---- which stages are trained on which steps
@cache
def costs() -> list[float]:
    """Backward cost of each stage of a ResNet-18 on 32x32 images."""
    return stage_costs(networks.resnet18(width=32), torch.zeros(1, 3, 32, 32))


@view(
    groups=Range(1, 21, label="param_groups"),
    kind=Choice(ORDERS, "freeze_type"),
    full=Range(0, 1, 0.05, "full steps"),
    seed=Range(0, 99),
    step=(0, STEPS - 1),
)
def timeline(see: Sheet, groups=10, kind=1, full=0.7, seed=0, step=10) -> None:
    """Which stages of a ResNet-18 are frozen on which of 120 steps, and how much backward work that saves.

    Numbers: `index frozen` (stages) and `saved` (share of the backward work) of each step; `mean` of these and
    `formula`, what they should be on average.
    """
    given = groups, kind, full, STEPS
    index = np.array(GradientFreeze(*given, seed=seed).generate_freeze_index_sequence(*given))
    every = stages()[0]
    frozen = index * (len(every) // groups)
    work = np.cumsum([0, *costs()]) / sum(costs())
    saved, formula = work[frozen], expected_saving(costs(), groups, kind, full)
    see.idle = set() if kind else {"seed"}

    see.grid(440)
    see.play("step", "step", STEPS, every=100)
    y = {"label": "stage, input at the top", "lo": len(every), "hi": 0}
    y["ticks"] = [[i + 0.5, every[i].replace("downsample.0", "shortcut")] for i in range(0, len(every), 2)]
    panel = see.panel(title="bars cover the frozen stages", x=linear("step", -0.5, STEPS - 0.5, 6), y=y)
    panel.bars(frozen, width=1, fill="reference/0.75", edge="reference", label="frozen stages", quiet=True)
    panel.rule("x", "index", "own", width=2)
    panel.handle("x", "step", step, 0, STEPS - 1, "step")

    who = ["none" if n == 0 else "the first" if n == 1 else f"the first {n}" for n in frozen.tolist()]
    see.say(
        f"Step {{at}}: index {{index}} freezes {{who}} of the {len(every)} stages and saves {{work}} of its backward "
        f"work. In {percent(float(np.mean(index > 0)))} of the {STEPS} steps some stages are frozen. This saves "
        f"{percent(saved.mean(), 1)} of all backward work; the formula says {percent(formula, 1)}.",
        at=np.arange(STEPS), index=index, who=who, work=[percent(s) for s in saved], frozen=frozen, saved=saved,
        mean=saved.mean(), formula=formula,
    )  # fmt: skip
    see.rows = [{"step": i, "frozen stages": n, "saved": percent(s, 1)} for i, (n, s) in enumerate(zip(frozen, saved))]


def blocks_reached(index: int) -> list[str]:
    """Blocks of a small ResNet-18 whose output a gradient reached in one backward pass frozen at `index`."""
    torch.manual_seed(0)
    net = networks.resnet18(width=4, in_channels=1)
    groups = GradientFreeze(10, 1, 0.7, 10).split_parameters_groups(net, 10)
    optimizer = FreezeOpt(torch.optim.SGD(net.parameters(), lr=0.1), groups, list(range(10)))
    outputs: dict[str, Tensor] = {}
    for name, module in net.named_modules():
        if isinstance(module, networks.ResidualBlock):
            module.register_forward_hook(lambda _m, _x, output, name=name: outputs.__setitem__(name, output))
    images, labels = digits("train", size=8)
    with optimizer.frozen(index):
        loss = F.cross_entropy(net(images[:16]), labels[:16])
        reached = {name: output for name, output in outputs.items() if output.requires_grad}
        grads = torch.autograd.grad(loss, [*reached.values()], allow_unused=True)
    return sorted(name for name, grad in zip(reached, grads) if grad is not None)


# ---- which BatchNorms go
def plain() -> nn.Module:
    """Three convolutions, each with a BatchNorm, and no shortcut: nothing that LessBN would remove."""
    blocks = [nn.Sequential(nn.Conv2d(a, b, 3), nn.BatchNorm2d(b), nn.ReLU()) for a, b in pairwise((3, 8, 16, 32))]
    end = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return nn.Sequential(OrderedDict(features=nn.Sequential(*blocks), end=end))


NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "ResNet-18": lambda: networks.resnet18(width=4),
    "ResNet-34": lambda: networks.resnet34(width=4),
    "ResNet-50": lambda: networks.resnet50(width=4),
    "MobileNetV2": networks.MobileNetV2,
    "DenseNet": networks.DenseNet,
    "3 convolutions": plain,
}
KINDS = {  # of a layer: role, glyph and name
    "conv": ("reference", "s", "convolution"),
    "kept": ("zero", "o", "BatchNorm kept"),
    "removed": ("overflow", "x", "BatchNorm removed"),
    "linear": ("ink", "D", "FC"),
    "normalised": ("normal", "^", "FC normalised"),
}


@cache
def layers(network: str, fn_flag: bool = False) -> tuple[list[tuple[str, str]], set[str]]:
    """(name, kind of `KINDS`) of each layer in definition order, and the names of the blocks with a shortcut."""
    net = NETWORKS[network]()
    kinds = {nn.Conv2d: "conv", nn.BatchNorm2d: "kept", nn.Linear: "linear"}
    found = {n: kinds[type(m)] for n, m in net.named_modules() if type(m) in kinds}
    residual = (networks.ResidualBlock, networks.Bottleneck)
    shortcuts = {n for n, m in net.named_modules() if isinstance(m, residual) or getattr(m, "shortcut", 0) is True}
    report = LessBN(net, fn_flag).report
    found |= dict.fromkeys(report.removed, "removed") | dict.fromkeys(report.normalized, "normalised")
    return list(found.items()), shortcuts


@view(network=[*NETWORKS], fn_flag="fn_flag: normalise the last FC")
def less_bn(see: Sheet, network="ResNet-18", fn_flag=False) -> None:
    """The layers of a network, a row for each block, and which BatchNorms LessBN takes away.

    Numbers: `layers` (name and kind of each), `removed` of so many `norms`.
    """
    every, shortcuts = layers(network, fn_flag)
    kinds = [kind for _, kind in every]
    gone = kinds.count("removed")
    norms = gone + kinds.count("kept")
    blocks = {block: [*members] for block, members in groupby(every, key=block_of)}
    places = np.array([(row, i) for row, members in enumerate(blocks.values()) for i in range(len(members))])
    told, most = f"{gone} of {norms} BatchNorms removed", places[:, 1].max()
    see.grid(110 + 26 * len(blocks), 620)
    x = linear("layer of the block", -0.6, most + 0.6) | {"ticks": [[i, str(i + 1)] for i in range(most + 1)]}
    y = names([*blocks], down=True, bare=False)
    panel = see.panel(title=f"{told}{'; arrows are shortcuts' if shortcuts else ''}", x=x, y=y)
    for row, (block, members) in enumerate(blocks.items()):
        panel.line([row, row], [0, len(members) - 1], "muted", width=1.5)
        if block in shortcuts:
            panel.arrow((-0.4, row + 0.36), (len(members) - 0.6, row + 0.36), width=1.6)
    for kind, (color, glyph, label) in KINDS.items():
        rows, columns = places[[own == kind for own in kinds]].T
        if len(rows):
            fill = "paper" if kind == "kept" else None
            panel.points(rows, columns, color, glyph=glyph, size=5.5, fill=fill, label=label)
    last = "".join(f" The last FC, {name}, is normalised." for name, kind in every if kind == "normalised")
    see.say(f"{network}: {told}.{last}", layers=every, removed=gone, norms=norms)
    see.rows = [{"layer": name, "kind": KINDS[kind][2]} for name, kind in every]


def block_of(layer: tuple[str, str]) -> str:
    """The block of a layer: the first two parts of its name."""
    return ".".join(layer[0].split(".")[:2])


# ---- centralized gradients
LAYERS = ("conv1.weight", "conv2.weight", "fc1.weight", "fc2.weight", "fc3.weight")


@cache
def gradients() -> dict[str, Tensor]:
    """Gradients (outputs, entries) of a LeNet-5 on 64 real digits at its first weights, by layer."""
    torch.manual_seed(0)
    net = networks.LeNet5()
    images, labels = digits("train")
    F.cross_entropy(net(images[:64]), labels[:64]).backward()
    return {name: p.grad.flatten(1) for name, p in net.named_parameters() if name in LAYERS and p.grad is not None}


@view(layer=[*LAYERS], output=Range(0, 119, label="output (row of the gradient)"))
def centralize(see: Sheet, layer="conv1.weight", output=0) -> None:
    """One output's gradient in a LeNet-5 on real digits, before and after its mean is subtracted.

    Numbers: `gradient` of the layer and what is `used` (outputs, entries), `kept`, the share of its length.
    """
    grad = gradients()[layer]
    outputs, count = grad.shape
    if output >= outputs:
        raise ValueError(f"{layer} has {outputs} outputs: choose output 0 to {outputs - 1}, got {output}")
    used = centralized(grad)
    kept, mean = float(used.norm() / grad.norm()), float(grad[output].mean())
    see.grid(390, 940, cols=(1.15, 1))
    reach = 1.15 * float(grad.abs().max())
    x, y = linear("entry", -1, count, 5), linear("gradient", -reach, reach, 4)
    entries = see.panel(title=f"{layer}, output {output}", x=x, y=y)
    entries.rule("y", 0, "muted", width=0.8)
    entries.points(grad[output].numpy(), color="reference", size=1.8, width=1, label="before")
    entries.points(used[output].numpy(), color="own", size=2.6, width=1.2, fill="none", label="used")
    before, after = grad.mean(1).numpy(), used.mean(1).numpy()
    top = 1.2 * max(float(np.abs(before).max()), 1e-12)
    x, y = linear("output", -1, outputs, 4), linear("mean of its gradient", -top, top, 4)
    means = see.panel(0, 1, title="mean of every output", x=x, y=y)
    means.rule("y", 0, "muted", width=0.8)
    means.points(before, color="reference", size=2.5, quiet=True)
    means.points(after, color="own", size=3.4, width=1.4, fill="none", quiet=True)
    means.handle("x", "output", output, 0, outputs - 1, "output")
    see.say(
        f"{layer}, output {output}: the mean {mean:+.1e} is subtracted from its {count} entries; the layer's gradient "
        f"keeps {percent(kept)} of its length.",
        gradient=grad, used=used, kept=kept,
    )  # fmt: skip
