"""`adam8bit.npz` from torchao's own optimizers: python tests/golden/recipes/make_adam8bit.py FILE (torchao 0.18)."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from torch import nn
from torchao.optim import Adam8bit, AdamW8bit
from torchao.optim.quant_utils import create_dynamic_map

STEPS = 6
CASES = (("Adam8bit", (4096,), 0.0), ("AdamW8bit", (20, 256), 0.0625), ("AdamW8bit", (9, 16, 32), 0.0))
# 1 - beta is a power of two, so that the moments do not depend on whether a processor fuses product and sum
SETTINGS = {"lr": 2.0**-6, "betas": (0.875, 0.9375), "eps": 2.0**-20}


def patterns(x: Any) -> np.ndarray:
    return np.array(x, dtype=np.float32).view(np.uint32)


def run(kind: str, shape: tuple[int, ...], decay: float, seed: int) -> dict[str, np.ndarray]:
    generator = torch.Generator().manual_seed(seed)
    w = nn.Parameter((torch.randn(shape, generator=generator) * 64).round() / 64)
    optimizer = {"Adam8bit": Adam8bit, "AdamW8bit": AdamW8bit}[kind]([w], **SETTINGS, weight_decay=decay)
    kept: dict[str, list[np.ndarray]] = {key: [] for key in ("grad", "codes1", "scales1", "codes2", "scales2")}
    start = patterns(w.detach())
    for step in range(STEPS):
        grad = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-6, 6, shape, generator=generator)
        grad = (grad * 2**8).round() / 2**8
        if step % 2:
            grad.view(-1)[:256] = 0  # a block without news
        if step == 3:
            grad.view(-1)[300] = 2.0**12  # one that an outlier fills
        w.grad = grad
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
        kept["grad"].append(patterns(grad))
        state = optimizer.state[w]
        for k, moment in ((1, state["exp_avg"]), (2, state["exp_avg_sq"])):
            kept[f"codes{k}"].append(moment.codes.numpy().copy())
            kept[f"scales{k}"].append(patterns(moment.scale))
    return {"start": start, "end": patterns(w.detach()), **{key: np.stack(value) for key, value in kept.items()}}


def main(path: str) -> None:
    torch.set_num_threads(1)
    arrays = {f"map_{s}": patterns(create_dynamic_map(s == "signed")) for s in ("signed", "unsigned")}
    cases = []
    for number, (kind, shape, decay) in enumerate(CASES):
        arrays |= {f"a{number}.{key}": value for key, value in run(kind, shape, decay, 101 + number).items()}
        cases.append({"id": f"a{number}", "kind": kind, "shape": shape, "weight_decay": decay, **SETTINGS})
    meta = {"oracle": "torchao 0.18.0, torch 2.13.0+cpu, run eagerly", "cases": cases}
    np.savez_compressed(path, meta=json.dumps(meta), **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1])
