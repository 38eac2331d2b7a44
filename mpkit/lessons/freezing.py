"""*Freeze and centralize*: which stages freezing trains, and which BatchNorms go."""

from functools import cache, partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpkit import networks
from mpkit.boost import FreezeOpt, GradientFreeze, LessBN
from mpkit.boost.grad_freeze import expected_saving, stage_costs, stages_by_module
from mpkit.data import digits
from mpkit.view import Choice, Range, Sheet, linear, names, percent, view

STEPS = 120


# ---- which stages are trained on which steps
@cache
def stages() -> list[str]:
    """Name of each stage of a ResNet-18: that of its first layer."""
    net = networks.resnet18(width=4)
    owner = {id(p): name.rpartition(".")[0] for name, p in net.named_parameters()}
    return [owner[id(stage[0])] for stage in stages_by_module(net)]


@cache
def costs() -> list[float]:
    """Backward cost of each stage of a ResNet-18 on 32x32 images."""
    return stage_costs(networks.resnet18(width=32), torch.zeros(1, 3, 32, 32))


@view(
    groups=Range(1, 21, label="param_groups"),
    kind=Choice({0: "0 continuous", 1: "1 interleaved"}, "freeze_type"),
    full=Range(0, 1, 0.05, "full steps"),
    step=(0, STEPS - 1),
)
def timeline(see: Sheet, groups=10, kind=1, full=0.7, step=10) -> None:
    """Which stages of a ResNet-18 are frozen on which of 120 steps, and how much backward work that saves.

    Numbers: `index frozen` (stages) and `saved` (share of the backward work) of each step; `mean` of these and
    `formula`, what they should be on average.
    """
    given, every = (groups, kind, full, STEPS), stages()
    index = np.array(GradientFreeze(*given).generate_freeze_index_sequence(*given))
    frozen = index * (len(every) // groups)
    work = np.cumsum([0, *costs()]) / sum(costs())
    saved, formula = work[frozen], expected_saving(costs(), groups, kind, full)
    see.grid(440)

    y = {"label": "stage, input at the top", "lo": len(every), "hi": 0}
    y["ticks"] = [[i + 0.5, every[i].replace("downsample.0", "shortcut")] for i in range(0, len(every), 2)]
    panel = see.panel(title="bars cover the frozen stages", x=linear("step", -0.5, STEPS - 0.5, 6), y=y)
    panel.bars(frozen, width=1, fill="reference/0.75", edge="reference", label="frozen stages", quiet=True)
    see.play("step", "step", STEPS, every=100, on=panel)
    see.say(
        f"Step {{at}}: index {{index}} freezes {{frozen}} of {len(every)} stages and saves {{work}} of its backward "
        f"work. In {percent(float(np.mean(index > 0)))} of the {STEPS} steps some stages are frozen. This saves "
        f"{percent(saved.mean(), 1)} of all backward work; the formula says {percent(formula, 1)}.",
        at=np.arange(STEPS), index=index, work=[percent(s) for s in saved], frozen=frozen, saved=saved,
        mean=saved.mean(), formula=formula,
    )  # fmt: skip
    see.rows = [{"step": i, "frozen stages": n, "saved": percent(s, 1)} for i, (n, s) in enumerate(zip(frozen, saved))]


def blocks_reached(index: int) -> list[str]:
    """Blocks of a small ResNet-18 whose output a gradient reached in one backward pass frozen at `index`."""
    torch.manual_seed(0)
    net, reached = networks.resnet18(width=4, in_channels=1), list[str]()
    groups = GradientFreeze(10, 1, 0.7, 10).split_parameters_groups(net, 10)
    optimizer = FreezeOpt(torch.optim.SGD(net.parameters(), lr=0.1), groups, list(range(10)))

    def listen(name: str, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: reached.append(name))

    for name, module in net.named_modules():
        if isinstance(module, networks.ResidualBlock):
            module.register_forward_hook(lambda _m, _x, output, name=name: listen(name, output))
    images, labels = digits("train", size=8)
    with optimizer.frozen(index):
        nn.functional.cross_entropy(net(images[:16]), labels[:16]).backward()
    return sorted(reached)


# ---- which BatchNorms go
NETWORKS: dict[str, Any] = {
    **{f"ResNet-{n}": partial(getattr(networks, f"resnet{n}"), width=4) for n in (18, 34, 50)},
    **{"MobileNetV2": networks.MobileNetV2, "DenseNet": networks.DenseNet},
}
KEPT, REMOVED = "BatchNorm kept", "BatchNorm removed"
KINDS = {"convolution": ("reference", "s"), KEPT: ("zero", "o"), REMOVED: ("overflow", "x"), "FC": ("ink", "D")}


@cache
def layers(network: str) -> dict[str, str]:
    """Name of each layer, in the order of definition -> its kind, one of `KINDS`."""
    net, kinds = NETWORKS[network](), {nn.Conv2d: "convolution", nn.BatchNorm2d: KEPT, nn.Linear: "FC"}
    found = {name: kinds[type(m)] for name, m in net.named_modules() if type(m) in kinds}
    return found | dict.fromkeys(LessBN(net).report.removed, REMOVED)


@view(network=[*NETWORKS])
def less_bn(see: Sheet, network="ResNet-18") -> None:
    """The layers of a network, a row for each block, and which BatchNorms LessBN takes away.

    Numbers: `layers`, name -> kind; how many BatchNorms are `removed` and `kept`.
    """
    every = layers(network)
    removed, kept = (list(every.values()).count(kind) for kind in (REMOVED, KEPT))
    blocks = {block: [*members] for block, members in groupby(every, key=lambda name: ".".join(name.split(".")[:2]))}
    see.grid(min(110 + 26 * len(blocks), 470), 620)
    x = names(range(1, 1 + max(map(len, blocks.values()))), "layer of the block", bare=False)
    told = f"{removed} of {removed + kept} BatchNorms removed"
    panel = see.panel(title=told, x=x, y=names([*blocks], down=True, bare=False))
    for row, members in enumerate(blocks.values()):
        panel.line([row, row], [0, len(members) - 1], "muted", width=1.5)
        for i, kind in enumerate(every[name] for name in members):
            color, glyph = KINDS[kind]
            panel.points([row], [i], color, glyph=glyph, size=5.5, label=kind)
    see.say(f"{network}: {told}.", layers=every, removed=removed, kept=kept)
    see.rows = [{"layer": name, "kind": kind} for name, kind in every.items()]
