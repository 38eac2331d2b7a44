"""Record `recipes.npz` and `gpt_amax.npz` in this folder: `python data/make_recipes.py [FOLDER]`.

Real trainings of a small GPT on sums on one CPU thread: under every recipe with three seeds (the loss on fresh sums at
the end, the share of clipped and flushed operands), and once in float32 with the amaxes of all linear layers, where
one batch in 60 has its loss multiplied by 64. Another machine's numbers differ in the last bits, and with them the
losses in their third digit.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mpkit.casting import RECIPES, Recipe, cast_like, ledger
from mpkit.experiment import experiment
from mpkit.networks import TinyGPT
from mpkit.record import AmaxRecorder

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "traces"))
STEPS, SEEDS, EVERY = 150, (1, 2, 3), 10


def variants() -> dict[str, Recipe | None]:
    mxfp4, nvfp4 = RECIPES["mxfp4"], RECIPES["nvfp4"]
    high = {"wgrad_grad": None, "wgrad_input": None}
    nearest = {
        key: replace(cast, rounding="nearest_even", hadamard=False) for key, cast in nvfp4.casts() if cast is not None
    }
    return {
        "float32": None,
        **{name: RECIPES[name] for name in ("te_hybrid_delayed", "te_current", "torchao_rowwise", "mxfp8")},
        "mxfp4": mxfp4,
        "mxfp4, weight gradient high": replace(mxfp4, **high),
        "nvfp4": nvfp4,
        "nvfp4, nearest and no Hadamard": replace(nvfp4, **nearest),
    }


def loss_of(network: TinyGPT, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(network(tokens).flatten(0, 1), target.flatten())


def train(recipe: Recipe | None, seed: int, batches: list[Any], recorder: Any = None) -> dict[str, Any]:
    torch.manual_seed(seed)
    network = TinyGPT(vocabulary=16, context=48)
    if recipe is not None:
        cast_like(network, recipe, keep="lm_head")
    watch = AmaxRecorder(network) if recorder else None
    optimizer = torch.optim.AdamW(network.parameters(), 3e-3, weight_decay=0.0)
    losses, rows = [], []
    for step, (tokens, target) in enumerate(batches[:-4]):
        optimizer.zero_grad()
        loss = loss_of(network, tokens, target)
        (loss * (64.0 if watch and step % 60 == 50 else 1.0)).backward()
        if watch:
            watch.end_step()
        optimizer.step()
        if step % EVERY == EVERY - 1:
            losses.append(float(loss.detach()))
    if recipe is not None:
        with ledger(network) as log:
            loss_of(network, *batches[-1]).backward()
        rows = [(r.product, r.operand, r.clipped, r.flushed) for r in log.operands]
    with torch.no_grad():
        end = float(np.mean([float(loss_of(network, *batch)) for batch in batches[-4:]]))
    shares = {}
    for product in ("fprop", "dgrad", "wgrad"):
        for operand in ("input", "weight", "grad"):
            found = [row[2:] for row in rows if row[:2] == (product, operand)]
            if found:
                shares[f"{product}.{operand}"] = [float(v) for v in np.mean(found, axis=0)]
    return {"losses": losses, "end": end, "shares": shares, "amax": watch.trace() if watch else None}


def run(seed: int, name: str) -> dict[str, Any]:
    """One training under the recipe of that name, as `experiment` calls it."""
    from make_traces import sums

    made = train(variants()[name], seed, list(sums(steps=STEPS + 4)))
    shares = np.frombuffer(json.dumps(made["shares"]).encode(), np.uint8)
    return {"losses": made["losses"], "end": made["end"], "shares": shares}


def main() -> None:
    from make_traces import sums

    torch.set_num_threads(1)
    amax = train(None, 1, list(sums(steps=304)), recorder=True)["amax"]
    amax.save(HERE / "gpt_amax.npz")
    folder = sys.argv[1] if len(sys.argv) > 1 else None  # a second call with the same folder goes on
    names = list(variants())
    results = experiment(run, {name: {"name": name} for name in names}, seeds=SEEDS, folder=folder)
    if results.failures or results.stopped:
        raise SystemExit(str(results.failures))
    print(*results.summary("end", higher_is_better=False)["sentence"], sep="\n")
    meta = {
        "steps": STEPS,
        "every": EVERY,
        "seeds": SEEDS,
        "shares": {name: json.loads(bytes(results.series(name, "shares", SEEDS[0])).decode()) for name in names},
        "made_by": "data/make_recipes.py",
    }
    losses = [[results.series(name, "losses", seed) for seed in SEEDS] for name in names]
    np.savez_compressed(
        HERE / "recipes.npz",
        names=np.array(names),
        losses=np.array(losses, dtype=np.float32),
        end=np.array([list(results.values(name, "end").values()) for name in names], dtype=np.float32),
        meta=json.dumps(meta),
    )


if __name__ == "__main__":
    main()
