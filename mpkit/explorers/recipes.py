"""Explorers of the lessons on recipes: a tensor's scale over a run, blocks with an outlier, recorded trainings."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from traitlets import Bool, Enum, Int

from mpkit.blocks import MXFP4, MXFP8_E4M3, NVFP4, BlockFormat, quantize_blocks
from mpkit.data import data_dir
from mpkit.explorers.base import Explorer
from mpkit.formats import E4M3FN, E5M2
from mpkit.policies import tensor_scale_preset
from mpkit.record import AmaxTrace
from mpkit.replay import replay_tensor_scales
from mpkit.replay.percent import percent

SHOWN = ("h.0.attn.c_attn", "h.1.mlp.2")
TENSORS = tuple(f"{layer}.{tensor}" for layer in SHOWN for tensor in ("input", "weight", "grad"))


@cache
def load_amaxes() -> AmaxTrace:
    """The amaxes of a recorded run: a small GPT on sums in float32, its loss multiplied by 64 in one step of 60."""
    return AmaxTrace.load(data_dir() / "gpt_amax.npz")


class AmaxExplorer(Explorer):
    """What a delayed scale can hold at each step of a recorded run, and where it is too small.

    After `compute`: `amax` (steps,), `holds` (steps,) the largest magnitude that the scale of the step can hold,
    `clipped` the steps whose amax is larger, `replayed` the replay.
    """

    controls = ("tensor", "history_len", "most_recent", "margin", "current", "spike")
    tensor = Enum(TENSORS, TENSORS[2]).tag(label="tensor")
    history_len = Int(16, min=1, max=128).tag(label="amax history", unit="steps")
    most_recent = Bool(False).tag(label="only the newest amax")
    margin = Int(0, min=0, max=6).tag(label="margin, 2 to the")
    current = Bool(False).tag(label="current scaling")
    spike = Int(0, min=0, max=10).tag(label="spike in step 200, 2 to the")

    def compute(self) -> None:
        self.amax = load_amaxes().series()[self.tensor].copy()
        self.amax[200] *= 2.0**self.spike
        self.element = E5M2 if self.tensor.endswith("grad") else E4M3FN
        options = {"history_len": self.history_len, "most_recent": self.most_recent, "margin": self.margin}
        name = "te_current" if self.current else "te_delayed"
        self.policy = tensor_scale_preset(name, self.element, **({} if self.current else options))
        self.replayed = replay_tensor_scales(self.amax, [self.policy], scales=True)
        assert self.replayed.scales is not None
        self.holds = self.element.max / self.replayed.scales[0].astype(float)
        self.clipped = np.flatnonzero(self.amax > self.holds * (1 + 2.0**-22))

    def idle(self) -> tuple[str, ...]:
        if self.current:
            return ("history_len", "most_recent", "margin")
        return ("history_len",) if self.most_recent else ()

    def summary(self) -> str:
        worst = float(self.replayed.worst[0])
        how = f"the largest of the last {self.history_len} amaxes"
        how = "its own amax" if self.current else "the last amax" if self.most_recent or self.history_len == 1 else how
        clipped = len(self.clipped)
        told = f"clipped in {clipped} of {len(self.amax)} steps" + (
            f", at worst by a factor of {worst:.3g}" if clipped else ""
        )
        others = " in the other steps" if clipped else ""
        unused = f"{self.replayed.unused_bits[0]:.1f} bits of the range are unused on average{others}"
        return (
            f"{self.tensor} in {self.element.name}, with a scale from {how}: {told}; {unused}, counted in whole bits."
        )

    def table(self) -> list[dict[str, Any]]:
        return [
            {"step": int(i), "amax": f"{self.amax[i]:.3g}", "scale holds": f"{self.holds[i]:.3g}"}
            for i in sorted({*range(0, len(self.amax), 25), *self.clipped.tolist()})
        ]


FORMATS: dict[str, BlockFormat] = {"MXFP8": MXFP8_E4M3, "MXFP4": MXFP4, "NVFP4": NVFP4}
RULES = ("floor", "even", "rceil", "ceil")
ROWS = 257  # of which the view shows the first


def block_format(name: str, size: int, rule: str) -> BlockFormat:
    """A format of the lesson with blocks of another size, and another rule for its scales; NVFP4 keeps its own rule."""
    fmt = replace(FORMATS[name], block=(1, size))
    return fmt if name == "NVFP4" else replace(fmt, scale_rounding=rule)


@cache
def gaussian(rows: int, columns: int = 128) -> torch.Tensor:
    """Fixed values, normally distributed: the quantiles in a shuffled order, which is the same on every machine."""
    count = rows * columns
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    share = (order.double() + 0.5) / count
    return (math.sqrt(2) * torch.erfinv(2 * share - 1)).float().view(rows, columns)


class BlockExplorer(Explorer):
    """A row of 128 values in blocks: what one outlier does to its neighbours, by block size and scale rounding.

    After `compute`: `x`, `decoded` (128,), `scales` per block, and over many rows `snr` (dB), `clipped_blocks`,
    `flushed` (shares).
    """

    controls = ("fmt", "size", "rule", "outlier")
    fmt = Enum(tuple(FORMATS), "MXFP4").tag(label="format")
    size = Enum((16, 32, 64, 128), 32).tag(label="values that share a scale")
    rule = Enum(RULES, "floor").tag(label="rounding of the scale")
    outlier = Int(0, min=0, max=10).tag(label="outlier", unit="powers of two")

    def compute(self) -> None:
        many = gaussian(ROWS).clone()
        many[:, 40] = many[:, 40].sign() * 2.0**self.outlier * 1.9 if self.outlier else many[:, 40]
        self.format = block_format(self.fmt, self.size, self.rule)
        q = quantize_blocks(many, self.format)
        y = q.dequantize()
        tops = many.abs().view(ROWS, -1, self.size).amax(-1)
        limit = q.largest().view((*tops.shape, -1))
        self.clipped_blocks = float((tops > limit[..., 0] * (1 + 2.0**-22)).double().mean())
        plain = [i for i in range(128) if i != 40]
        noise, signal = (y - many)[:, plain].double(), many[:, plain].double()
        self.snr = float(10 * torch.log10(signal.square().sum() / noise.square().sum()))
        self.flushed = float(((y == 0) & (many != 0)).double().mean())
        self.x, self.decoded = many[0].numpy(), y[0].numpy()
        whole = 1.0 if q.tensor_scale is None else float(q.tensor_scale)
        self.scales = whole * q.scales[0].numpy()  # what an element is multiplied by

    def idle(self) -> tuple[str, ...]:
        return ("rule",) if self.fmt == "NVFP4" else ()

    def summary(self) -> str:
        rule = "scales in E4M3" if self.fmt == "NVFP4" else f"scale rule {self.rule}"
        outlier = f"an outlier of 1.9 x 2^{self.outlier}" if self.outlier else "no outlier"
        clipped, zero = (percent(share, 1) for share in (self.clipped_blocks, self.flushed))
        gone, beside = int((self.decoded == 0).sum()), " beside the outlier" if self.outlier else ""
        return (
            f"{self.fmt}, blocks of {self.size}, {rule}, {outlier}. In the row that is shown {gone} of {len(self.x)} "
            f"values {'becomes' if gone == 1 else 'become'} zero. Over {ROWS} such rows: {self.snr:.1f} dB signal to "
            f"noise{beside}, {clipped} of the blocks clipped, {zero} of the values zero."
        )

    def table(self) -> list[dict[str, Any]]:
        return [
            {"place": i, "value": f"{a:.3f}", "stored": f"{b:.4g}", "scale": f"{self.scales[i // self.size]:.4g}"}
            for i, (a, b) in enumerate(zip(self.x.tolist(), self.decoded.tolist()))
        ]


@cache
def load_recipes() -> dict[str, Any]:
    """Recorded trainings of a small GPT: names, losses (recipes, seeds, points), end (recipes, seeds), and meta."""
    with np.load(data_dir() / "recipes.npz", allow_pickle=False) as z:
        return {
            "names": z["names"].tolist(),
            "losses": z["losses"],
            "end": z["end"],
            "meta": json.loads(str(z["meta"])),
        }


RECIPES_SHOWN = (
    "te_hybrid_delayed",
    "te_current",
    "torchao_rowwise",
    "mxfp8",
    "mxfp4",
    "mxfp4, weight gradient high",
    "nvfp4",
    "nvfp4, nearest and no Hadamard",
)


class RecipeExplorer(Explorer):
    """Recorded trainings under a recipe beside float32, every seed shown.

    After `compute`: `own` and `plain`, (seeds, points) losses; `gap` and `gap_now`, per seed the loss at the end and at
    `step` minus float32's; `spread` and `spread_now`, how far the seeds of float32 lie apart there.
    """

    controls = ("recipe", "step")
    recipe = Enum(RECIPES_SHOWN, "mxfp4").tag(label="recipe")
    step = Int(50, min=10, max=150).tag(label="step", step=10)

    def compute(self) -> None:
        data = load_recipes()
        i, self.every = data["names"].index(self.recipe), data["meta"]["every"]
        self.own, self.plain = data["losses"][i], data["losses"][0]
        self.gap = data["end"][i].astype(float) - data["end"][0]
        at = self.step // self.every - 1  # the last point that was recorded up to this step
        self.at, self.gap_now = (at + 1) * self.every, self.own[:, at].astype(float) - self.plain[:, at]
        self.spread, self.spread_now = float(np.ptp(data["end"][0])), float(np.ptp(self.plain[:, at]))
        self.shares = data["meta"]["shares"][self.recipe]

    def summary(self) -> str:
        low, high, now, apart = self.gap.min(), self.gap.max(), self.gap_now, self.spread
        return (
            f"{self.recipe}: its loss differs from that of float32 with the same seed, after the training by "
            f"{low:+.3f} to {high:+.3f} (mean of four batches), and in step {self.at} by {now.min():+.3f} to "
            f"{now.max():+.3f}, on average by {now.mean():+.3f} (the batch of that step). The seeds of float32 "
            f"themselves differ by {apart:.3f} after the training, and by {self.spread_now:.3f} in step {self.at}."
        )

    def table(self) -> list[dict[str, Any]]:
        # recorded as shares of 0, as if the cast had lost nothing
        high = "wgrad" if self.recipe.endswith("weight gradient high") else None
        return [
            {"operand": name} | dict.fromkeys(("clipped", "flushed"), "not cast")
            if name.partition(".")[0] == high
            else {"operand": name, "clipped": percent(clipped, 2), "flushed": percent(flushed, 2)}
            for name, (clipped, flushed) in self.shares.items()
        ]
