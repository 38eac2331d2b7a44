"""Makes `failure.json`: a network that float16 does not train without a loss scale. About ten minutes on one core.

    python data/make_failure.py

Six layers of 64 sigmoids on the 8x8 digits, Adam, level O2 with emulated float16, five seeds each way. A second table
holds where its gradients lie, layer by layer, while it is trained without a scale: the magnitudes that float32 would
compute from its weights, as counts by power of two, and the shares that float16 computes as exactly 0, and as inf or
NaN, at each loss scale.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ["MPKIT_DEVICE"] = "cpu"

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.casting import auto_mixed_precision, remove_mixed_precision
from mpkit.data import digits
from mpkit.experiment import train
from mpkit.formats import FP16
from mpkit.lessons.failure import sigmoids
from mpkit.policies import ScalePolicy

EPOCHS, BATCH, SEEDS, EVERY = 200, 256, range(5), 12  # 6 steps an epoch, the last of a smaller batch
WAYS = {
    "float32": {"level": "O0"},
    "float16, no scale": {"level": "O2", "dtype": "fp16"},
    "float16, static 2^8": {"level": "O2", "dtype": "fp16", "scaler": 2.0**8},
    "float16, dynamic": {"level": "O2", "dtype": "fp16", "scaler": ScalePolicy.by_factor(2.0**16, 2.0, 50)},
    "bfloat16": {"level": "O2", "dtype": "bf16"},
}
MOMENTS = (0, 2, 5, 10, 20, 30, 40, 50)  # epochs
LOWEST, HIGHEST = -60, 4  # powers of two; what lies outside is counted in the outermost
MOST = 40  # the largest scale is 2^40


def gradients(network: nn.Module, scale: float = 1.0) -> list[Tensor]:
    """Of the weights of each linear layer, for the first batch, times the loss scale."""
    images, labels = (t[:BATCH] for t in digits("train", 8))
    network.zero_grad()
    (F.cross_entropy(network(images).float(), labels) * scale).backward()
    return [m.weight.grad.clone() for m in network.modules() if isinstance(m, nn.Linear)]


def moment(epochs: int) -> dict[str, object]:
    """Where the gradients lie after so many epochs without a scale, and what float16 computes of them at each scale."""
    torch.manual_seed(0)
    if epochs == 0:
        network = auto_mixed_precision(sigmoids(), "O2", FP16)
    else:
        network = trained(0, "float16, no scale", epochs, keep=True)["network"]
    found: dict[str, list[list[float]]] = {"zero": [], "overflow": []}
    for exponent in range(MOST + 1):
        seen = gradients(network, 2.0**exponent)
        found["zero"].append([round(float((g == 0).float().mean()), 4) for g in seen])
        found["overflow"].append([round(float((~g.isfinite()).float().mean()), 4) for g in seen])
    counts = []
    for g in gradients(remove_mixed_precision(network)):
        low = torch.frexp(g[g != 0].abs()).exponent - 1
        counts.append(torch.bincount(low.clamp(LOWEST, HIGHEST) - LOWEST, minlength=HIGHEST - LOWEST + 1).tolist())
    return {"step": 6 * epochs, "counts": counts, **found}


def trained(seed: int, way: str, epochs: int = EPOCHS, **more: bool) -> dict:
    """One training."""
    rule = {"optimizer": "torch.Adam", "lr": 5e-3, "batch": BATCH}
    return train(sigmoids, "digits8", epochs=epochs, seed=seed, **rule, **WAYS[way], **more)


if __name__ == "__main__":
    torch.set_num_threads(1)
    runs = []
    for seed in SEEDS:
        for way in WAYS:
            run = trained(seed, way)
            losses = [round(sum(run["loss"][i : i + EVERY]) / EVERY, 3) for i in range(0, len(run["loss"]), EVERY)]
            runs.append(
                {
                    "way": way,
                    "seed": seed,
                    "accuracy": round(run["accuracy"], 1),
                    "losses": losses,
                    "skipped": run["skipped"],
                }
            )
            print(way, seed, run["accuracy"], losses[-1], run["seconds_per_step"], flush=True)
    found = {"every": EVERY, "lowest": LOWEST, "moments": [moment(epochs) for epochs in MOMENTS], "runs": runs}
    (Path(__file__).parent / "failure.json").write_text(json.dumps(found) + "\n")
