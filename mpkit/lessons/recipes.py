"""The lessons on eight and four bits: a scale over a recorded run, blocks with an outlier, trainings under recipes."""

import json
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from mpkit.blocks import MXFP4, MXFP8_E4M3, NVFP4, BlockFormat, quantize_blocks
from mpkit.data import data_dir
from mpkit.formats import E4M3FN, E5M2
from mpkit.policies import tensor_scale_preset
from mpkit.record import AmaxTrace
from mpkit.replay import replay_tensor_scales
from mpkit.view import GLYPHS, Choice, Range, Sheet, exponents, fitted, linear, log2, names, percent, view

OVER = 1 + 2.0**-22  # above what the scale holds by less than this is only the rounding of the scale

# ---- *A scale for every tensor*: the scale of a tensor over a recorded run
TENSORS = [f"{layer}.{tensor}" for layer in ("h.0.attn.c_attn", "h.1.mlp.2") for tensor in ("input", "weight", "grad")]
SPIKE = 200  # the step of the reader's own spike


@cache
def load_amaxes() -> AmaxTrace:
    """The amaxes of a recorded run: a small GPT on sums in float32, its loss multiplied by 64 in one step of 60."""
    return AmaxTrace.load(data_dir() / "gpt_amax.npz")


@view(
    tensor=TENSORS,
    length=Range(1, 128, label="amax history, steps"),
    margin=Range(0, 6, label="margin, 2 to the"),
    current="current scaling",
    spike=Range(0, 10, label=f"spike in step {SPIKE}, 2 to the"),
)
def delayed(see: Sheet, tensor=TENSORS[2], length=16, margin=0, current=False, spike=0) -> None:
    """What a tensor's scale can hold at each step of a recorded run, and where it is too small.

    Numbers: `amax holds` (steps,), the largest element and the largest that the scale holds; `clipped` steps; `worst`,
    the largest ratio of the two; `unused`, the mean of the bits of range that are not used.
    """
    amax = load_amaxes().series()[tensor].copy()
    amax[SPIKE] *= 2.0**spike
    element = E5M2 if tensor.endswith("grad") else E4M3FN
    asked: dict[str, Any] = {} if current else {"history_len": length, "margin": margin}
    policy = tensor_scale_preset("te_current" if current else "te_delayed", element, **asked)
    done = replay_tensor_scales(amax, [policy], scales=True)
    holds = element.max / np.array(done.scales, dtype=float)[0]
    clipped = np.flatnonzero(amax > holds * OVER)
    see.idle = {"length", "margin"} if current else set()

    low, high = fitted(amax, holds[1:], room=1)
    see.grid(400)
    x, y = linear("step", 0, len(amax) - 1), log2("magnitude", low, high)
    panel = see.panel(title="the largest element, and the largest that the scale can hold", x=x, y=y)
    panel.band(exponents(holds, low, high), high, label="clipped here")
    panel.line(exponents(holds, low, high), color="overflow", step="mid", width=1.6, label="the scale holds")
    panel.line(exponents(amax, low, high), color="own", width=1.6, label="amax")
    panel.crosses(exponents(amax, low, high), clipped, "clipped step")

    how = "its own amax" if current else f"the largest of the last {length} amaxes" if length > 1 else "the last amax"
    at_worst = ", at worst by a factor of {worst:.2f}" if len(clipped) else ""
    see.say(
        f"{tensor} in {element.name}, with a scale from {how}: clipped in {len(clipped)} of {len(amax)} steps"
        f"{at_worst}; on average {{unused:.1f}} bits of the range are unused in the others, counted in whole bits.",
        amax=amax, holds=holds, clipped=clipped, worst=float(done.worst[0]), unused=float(done.unused_bits[0]),
    )  # fmt: skip


# ---- *Blocks*: an outlier among 128 values
FORMATS: dict[str, BlockFormat] = {"MXFP8": MXFP8_E4M3, "MXFP4": MXFP4, "NVFP4": NVFP4}
ROWS, OUTLIER = 257, 40  # rows of values, of which the view shows the first; the outlier's place in each


def block_format(name: str, size: int, rule: str) -> BlockFormat:
    """A format of the lesson with blocks of another size, and another rule for its scales; NVFP4 keeps its own rule."""
    fmt = replace(FORMATS[name], block=(1, size))
    return fmt if name == "NVFP4" else replace(fmt, scale_rounding=rule)


@cache
def gaussian() -> torch.Tensor:
    """(ROWS, 128) normally distributed: the quantiles in a shuffled order, which is the same on every machine."""
    order = torch.randperm(ROWS * 128, generator=torch.Generator().manual_seed(0))
    share = (order.double() + 0.5) / len(order)
    return (math.sqrt(2) * torch.erfinv(2 * share - 1)).float().view(ROWS, 128)


@view(
    fmt=Choice({name: name for name in FORMATS}, "format"),
    size=Choice({n: str(n) for n in (16, 32, 64, 128)}, "values that share a scale"),
    rule=Choice({name: name for name in ("floor", "even", "rceil", "ceil")}, "rounding of the scale"),
    outlier=Range(0, 10, label="outlier, powers of two"),
)
def blocks(see: Sheet, fmt="MXFP4", size=32, rule="floor", outlier=6) -> None:
    """A row of 128 values in blocks: what one outlier does to its neighbours, by block size and scale rounding.

    Numbers: `x decoded` (128,), `scales` per block; over many rows `snr` (dB, beside the outlier), `clipped` (share of
    blocks), `flushed` (share of values).
    """
    many = gaussian().clone()
    if outlier:
        many[:, OUTLIER] = many[:, OUTLIER].sign() * 2.0**outlier * 1.9
    q = quantize_blocks(many, block_format(fmt, size, rule))
    y = q.dequantize()
    tops = many.abs().view(ROWS, -1, size).amax(-1)
    held = q.largest().view((*tops.shape, -1))[..., 0]
    noise, signal = (part[:, torch.arange(128) != OUTLIER].double().square().sum() for part in (y - many, many))
    clipped, flushed = float((tops > held * OVER).double().mean()), float(((y == 0) & (many != 0)).double().mean())
    x, decoded = many[0].numpy(), y[0].numpy()
    scales = (1.0 if q.tensor_scale is None else float(q.tensor_scale)) * q.scales[0].numpy()
    see.idle = {"rule"} if fmt == "NVFP4" else set()

    low, high = -8, max(3, math.ceil(math.log2(float(np.abs(x).max()))) + 1)
    see.grid(420)
    across, up = linear("place in the row", -1, 128, 8), log2("magnitude", low - 0.4, high)  # or an x would be cut
    up["ticks"][0][1] = "0"
    panel = see.panel(title="128 magnitudes in a row, and how they are stored; zero is at the bottom", x=across, y=up)
    for border in range(size, 128, size):
        panel.rule("x", border - 0.5)
    panel.points(exponents(np.abs(x), low, high), color="reference", glyph="o", size=3.5, label="value")
    panel.points(exponents(np.abs(decoded), low, high), color="own", glyph="x", size=4, label="stored")

    gone = int((decoded == 0).sum())
    see.say(
        f"{fmt}, blocks of {size}, {'scales in E4M3' if fmt == 'NVFP4' else f'scale rule {rule}'}, "
        f"{f'an outlier of 1.9 × 2^{outlier}' if outlier else 'no outlier'}. In the row that is shown {gone} of 128 "
        f"values {'becomes' if gone == 1 else 'become'} zero. Over {ROWS} such rows: {{snr:.1f}} dB signal to noise"
        f"{' beside the outlier' if outlier else ''}, {percent(clipped, 1)} of the blocks clipped, "
        f"{percent(flushed, 1)} of the values zero.",
        x=x, decoded=decoded, scales=scales, snr=float(10 * torch.log10(signal / noise)), clipped=clipped,
        flushed=flushed,
    )  # fmt: skip


# ---- *Three products*: recorded trainings under recipes
@cache
def load_recipes() -> dict[str, Any]:
    """Recorded trainings of a small GPT: names, losses (recipes, seeds, points), end (recipes, seeds), and meta."""
    with np.load(data_dir() / "recipes.npz", allow_pickle=False) as z:
        return {"names": z["names"].tolist(), "meta": json.loads(str(z["meta"]))} | {k: z[k] for k in ("losses", "end")}


RECIPES = load_recipes()["names"][1:]  # the first is float32


@view(recipe=RECIPES)
def trained(see: Sheet, recipe="mxfp4") -> None:
    """Recorded trainings under a recipe beside float32, every seed shown, and what its casts lose.

    Numbers: `own plain` (seeds, points) losses; `gap` (seeds,), the loss after the training minus float32's; `spread`,
    how far the seeds of float32 lie apart there; `shares`, operand -> (clipped, flushed).
    """
    data = load_recipes()
    i, every = data["names"].index(recipe), data["meta"]["every"]
    own, plain = data["losses"][i], data["losses"][0]
    gap, spread = data["end"][i].astype(float) - data["end"][0], float(np.ptp(data["end"][0]))
    high = "wgrad" if recipe.endswith("weight gradient high") else ""  # recorded as if its cast had lost nothing
    shares = {name: s for name, s in data["meta"]["shares"][recipe].items() if name.partition(".")[0] != high}

    see.grid(380, 900, cols=(1.7, 1))
    steps, both = every * (1 + np.arange(own.shape[1])), np.concatenate([own, plain])
    ends = math.floor(float(both.min()) * 4) / 4, math.ceil(float(both.max()) * 4) / 4
    x, y = linear("step", 0, int(steps[-1])), linear("loss, nats", *ends)
    panel = see.panel(title="training loss, one line and one sign for each seed", x=x, y=y)
    for seed, glyph in enumerate(GLYPHS[: len(own)]):
        look: dict[str, Any] = {"glyph": glyph, "size": 3}
        panel.line(plain[seed], steps, "reference", width=1.4, dash="--", label=None if seed else "float32", **look)
        panel.line(own[seed], steps, "own", width=1.6, label=None if seed else recipe, **look)
    lost = [100 * flushed for _, flushed in shares.values()]
    x = linear("share of the values, %", 0, max(20, *lost), 4)
    side = see.panel(0, 1, title="flushed to zero", x=x, y=names(list(shares), down=True, bare=False))
    side.bars(lost, axis="y", fill="zero", label="flushed to zero, %", quiet=True)

    most = max(shares, key=lambda name: shares[name][1])
    see.say(
        f"{recipe}: after the training its loss differs from that of float32 with the same seed by {gap.min():+.3f} "
        f"to {gap.max():+.3f} (mean of four batches), on average by {gap.mean():+.3f}. The seeds of float32 themselves "
        f"differ by {spread:.3f}. The most zeros: {most}, {percent(shares[most][1])}.",
        own=own, plain=plain, gap=gap, spread=spread, shares=shares,
    )  # fmt: skip
    told = dict.fromkeys(data["meta"]["shares"][recipe], ["not cast"] * 2)
    told |= {name: [percent(share, 2) for share in both] for name, both in shares.items()}
    see.rows = [{"operand": name, "clipped": clipped, "flushed": flushed} for name, (clipped, flushed) in told.items()]
