"""Lessons 00 and 06: will my network fit, how fast can it be? Bytes that a step keeps, and the roofline of a layer."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from mpkit.bench import gpu
from mpkit.data import data_dir
from mpkit.files import read_json
from mpkit.view import LINES, Choice, Range, Sheet, linear, log2, names, view

NETWORKS = {
    "gpt2": "GPT-2 124M, rows of 1024 tokens",
    "resnet50": "ResNet-50, 224x224",
    "mlp": "the lessons' perceptron",
}
WAYS = ("float32", "autocast", "O1", "O2", "O3", "8 bits")
PARTS = {"weights": ("zero", None), "gradients": ("overflow", True), "optimizer state": ("subnormal", None),
         "copies of weights": ("own", True), "kept for the backward pass": ("normal", None)}  # fmt: skip
# of a part: its role and whether it is hatched, so that neighbours differ without colour
STATE = {"Adam": 8, "momentum": 4}  # bytes of float32 state for a parameter


class Card(NamedTuple):
    """A GPU as its maker publishes it: dense peaks in TFLOP/s with float32 sums, TB/s, GB; None: it has no such unit.

    Source: NVIDIA's data sheets of T4, A100 40GB and H100 SXM (which print twice as much, for sparse matrices), and its
    paper on the Ada architecture for the RTX 4090, appendix A.
    """

    float32: float
    tf32: float | None
    float16: float
    fp8: float | None
    bandwidth: float
    memory: int


CARDS = {
    "T4": Card(8.1, None, 65, None, 0.320, 16),
    "RTX 4090": Card(82.6, 82.6, 165.2, 330.3, 1.008, 24),
    "A100 40GB": Card(19.5, 156, 312, None, 1.555, 40),
    "H100 SXM": Card(66.9, 494.7, 989.4, 1978.9, 3.35, 80),
}
SIZES = {"float32": (4, 4), "tf32": (4, 4), "float16": (2, 2), "fp8": (1, 2)}  # bytes of an operand and of a result
GIB = 2**30


# ---- bytes
@cache
def counted() -> dict[str, Any]:
    """What `data/make_benefit.py` counted."""
    return read_json(data_dir() / "benefit.json")


def step_bytes(network: str, way: str, batch: int, again: bool = False, optimizer: str = "Adam") -> dict[str, int]:
    """Bytes that a training step keeps, by the names of `PARTS`.

    Args:  again: the activations inside a block are computed anew in the backward pass, where the network has blocks.
    """
    table = counted()[network]
    row = table["recomputed" if again and "recomputed" in table else "kept"][way]
    weights = row["weights"]
    kept = row["fixed"] + row["each"] * batch
    return dict(zip(PARTS, (weights, weights, weights // 4 * STATE[optimizer], row["copies"], kept)))


def largest_batch(network: str, way: str, room: float, again: bool = False, optimizer: str = "Adam") -> int:
    """The largest batch that `room` bytes hold; 0 where not even one sample fits."""
    none, one = (sum(step_bytes(network, way, n, again, optimizer).values()) for n in (0, 1))
    return max(0, int((room - none) // (one - none)))


@view(
    network=Choice(NETWORKS, "network"),
    batch=Range(1, 512, label="batch size", log=2),
    again="compute activations again (checkpointing)",
    optimizer=Choice({name: name for name in STATE}, "optimizer"),
    card=Choice({name: f"{name}, {c.memory} GB" for name, c in CARDS.items()}, "your card"),
)
def memory(see: Sheet, network="gpt2", batch=8, again=False, optimizer="Adam", card="T4") -> None:
    """What a training step keeps in memory at each level, and whether a card holds it.

    Numbers: `bytes`, by way and part; `fits`, the largest batch by way.
    """
    limit = CARDS[card].memory * 1e9
    room = f"{card}, {CARDS[card].memory} GB = {limit / GIB:.1f} GiB"
    kept = {way: step_bytes(network, way, batch, again, optimizer) for way in WAYS}
    whole = np.array([sum(parts.values()) for parts in kept.values()])
    fits = {way: largest_batch(network, way, limit, again, optimizer) for way in WAYS}
    unit, word = (GIB, "GiB") if whole.max() > GIB else (2**20, "MiB")
    see.grid(360, 900)
    see.idle = {"again"} if network == "mlp" else set()
    most = 1.15 * max(whole.max(), limit if limit < 2.5 * whole.max() else 0) / unit
    y = names(WAYS, down=True) | {"hi": -1.1}  # room for the card's words
    panel = see.panel(title="kept during a training step", x=linear(word, 0, most, 6), y=y, pad=[28, 20, 44, 80])
    before = np.zeros(len(WAYS))
    for part, (color, hatch) in PARTS.items():
        here = np.array([parts[part] for parts in kept.values()]) / unit
        rows = np.flatnonzero(here)
        panel.boxes(before[rows], rows - 0.36, (before + here)[rows], rows + 0.36, fill=color, label=part, hatch=hatch,
                    edge=hatch and "ink", told=[f"{h:.3g} {word}" for h in here[rows]])  # fmt: skip
        before += here
    panel.text([f"{w / whole[0]:.0%}" for w in whole], before, np.arange(len(WAYS)), anchor="start", dx=6)
    if inside := limit / unit < most:
        panel.rule("x", limit / unit, "ink", dash="--", width=2)
    words = room if inside else f"{room}, beyond →"
    panel.text(words, min(limit / unit, most), -0.85, beside=-6 if limit / unit > most / 2 else 6)
    see.say(
        f"{NETWORKS[network]}, batch {batch}, {optimizer}: float32 keeps {whole[0] / unit:.3g} {word}, autocast "
        f"{whole[1] / whole[0]:.0%} of it, O1 {whole[2] / whole[0]:.0%}, O2 {whole[3] / whole[0]:.0%}. "
        f"The largest batch on the card ({card}) is {fits['float32']} in float32, {fits['O2']} at O2.",
        bytes=kept, fits=fits,
    )  # fmt: skip
    see.rows = [
        {"way": way, **{p: f"{v / unit:.3g} {word}" for p, v in parts.items()}, "largest batch": fits[way]}
        for way, parts in kept.items()
    ]


# ---- time
def seconds(card: str, form: str, m: int, k: int, n: int) -> float | None:
    """The least time of an (m, k) @ (k, n) product: the slower of computing and of moving its operands and result.

    Returns:  seconds; None where the card has no unit for the format.
    Source:   Williams et al. 2009, "Roofline".
    """
    peak, (operand, result) = getattr(CARDS[card], form), SIZES[form]
    moved = operand * (m * k + k * n) + result * m * n
    return max(2 * m * k * n / (peak * 1e12), moved / (CARDS[card].bandwidth * 1e12)) if peak else None


@view(
    card=Choice({name: name for name in CARDS}, "card"),
    rows=Range(1, 65536, label="rows: batch x length", log=2),
    width=Range(64, 16384, label="width, inputs = outputs", log=2),
)
def roofline(see: Sheet, card="A100 40GB", rows=8192, width=1024) -> None:
    """How fast a linear layer can be at best in each format, from published peaks.

    Numbers: `seconds` by format that the card has.
    """
    there, work = CARDS[card], 2.0 * rows * width * width
    times = {form: t for form in SIZES if (t := seconds(card, form, rows, width, width))}
    see.grid(380, 900)
    x, y = log2("operations for a byte moved", -2, 14, 2), log2("TFLOP/s", -4, 12, 2)
    panel = see.panel(title=f"{card}: what its data sheet allows; a disc is this layer", x=x, y=y)
    place = np.linspace(-2, 14, 97)
    for (form, time), look in zip(times.items(), LINES):
        roof = np.minimum(np.log2(getattr(there, form)), place + np.log2(there.bandwidth))
        panel.line(roof, place, label=form, **look)
        operand, result = SIZES[form]
        dense = work / (operand * (rows * width + width * width) + result * rows * width)
        panel.points([np.log2(work / time / 1e12)], [np.log2(dense)], look["color"], size=8 + 3 * (form == "float32"))
    gains = ", ".join(f"{form} {times['float32'] / t:.1f}" for form, t in times.items() if form != "float32")
    slow = "by its memory" if times["float16"] > work / (there.float16 * 1e12) else "by computing"
    measured = "" if list(gpu.stored()) else " Published peaks, not measured on a GPU."
    see.say(
        f"A linear layer of {width} × {width} on {rows} row{'s' * (rows > 1)}, {card}. At best so many times as fast "
        f"as float32: {gains}. float16 is held back {slow}.{measured}",
        seconds=times,
    )  # fmt: skip
    see.rows = [{"format": form, "microseconds": f"{1e6 * t:.3g}"} for form, t in times.items()]
