"""Makes `benefit.json`: what a training step keeps in memory, counted without a GPU. Minutes on one core.

    python data/make_benefit.py

Tensors under FakeTensorMode have shapes and no values. Bytes of the weights, of the copies of weights in fewer bits
that wait for the backward pass, and of all else that waits for it: the largest sum at any moment of forward and
backward, each storage once. Counted for two batches; what is kept is linear in the batch, which a third one checks. Not
counted: temporaries of a single operation, workspaces, fragmentation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from mpkit.casting import auto_mixed_precision
from mpkit.networks import Network, TinyGPT, resnet50

WAYS = ("float32", "autocast", "O1", "O2", "O3", "8 bits")
NETWORKS: dict[str, Any] = {  # what builds it, a batch, the modules to recompute
    "mlp": (Network, lambda n: (torch.empty(n, 1, 28, 28), torch.zeros(n, dtype=torch.long)), lambda net: []),
    "resnet50": (
        lambda: resnet50(classes=1000, small_input=False),
        lambda n: (torch.empty(n, 3, 224, 224), torch.zeros(n, dtype=torch.long)),
        lambda net: [block for stage in (net.layer1, net.layer2, net.layer3, net.layer4) for block in stage],
    ),
    "gpt2": (TinyGPT.gpt2_124m, lambda n: (torch.zeros(n, 1024, dtype=torch.long),) * 2, lambda net: net.h),
}
VIEWS = ("TBackward", "ToCopyBackward", "TransposeBackward", "PermuteBackward", "ViewBackward")


class Kept:
    """One tensor that the graph keeps; its storage is counted while any of them lives."""

    live: dict[int, list[Any]] = {}
    now: dict[str, int] = {}
    peak: dict[str, int] = {}

    def __init__(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        self.x, self.key = x, storage._cdata
        entry = Kept.live.setdefault(self.key, [0, kind_of(x), storage.nbytes()])
        entry[0] += 1
        if entry[0] == 1 and entry[1]:
            Kept.now[entry[1]] += entry[2]
        if sum(Kept.now.values()) > sum(Kept.peak.values()):
            Kept.peak = dict(Kept.now)

    def __del__(self) -> None:
        entry = Kept.live[self.key]
        entry[0] -= 1
        if entry[0] == 0:
            del Kept.live[self.key]
            if entry[1]:
                Kept.now[entry[1]] -= entry[2]


def kind_of(x: Tensor) -> str:
    """ "" for a weight itself, "copies" for what was cast from a weight alone, else "activations"."""
    if (x.is_leaf and x.requires_grad) or (x._base is not None and x._base.is_leaf and x._base.requires_grad):
        return ""
    if x.dtype == torch.float8_e4m3fn and x.untyped_storage()._cdata in Linear8.weights:
        return "copies"
    node = x.grad_fn
    while node is not None and node.name().startswith(VIEWS):
        node = node.next_functions[0][0]
    return "copies" if node is not None and "AccumulateGrad" in node.name() else "activations"


class Linear8(torch.autograd.Function):
    """A linear layer as recipes of 8 bits have it: both operands wait for the backward pass in one byte an element."""

    weights: set[int] = set()

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        w8 = weight.to(torch.float8_e4m3fn) if ctx.needs_input_grad[0] else None  # the first layer needs none
        if w8 is not None:
            Linear8.weights.add(w8.untyped_storage()._cdata)
        ctx.save_for_backward(x.to(torch.float8_e4m3fn), w8)
        return x.half() @ weight.half().t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        before = None if weight is None else grad @ weight.half()
        return before, (grad.flatten(0, -2).t() @ x.half().flatten(0, -2)).float()


def in_8_bits(layer: nn.Linear) -> None:
    """Make the layer compute as `Linear8`."""
    bias = 0 if layer.bias is None else layer.bias.half()
    layer.forward = lambda x: Linear8.apply(x, layer.weight) + bias


def count(name: str, way: str, batch: int, again: bool) -> dict[str, int]:
    """Bytes of `weights`, `copies` and `activations`; `again` recomputes the blocks in the backward pass."""
    build, make, blocks = NETWORKS[name]
    Kept.live, Kept.now, Kept.peak = {}, {"copies": 0, "activations": 0}, {"copies": 0, "activations": 0}
    Linear8.weights = set()
    with FakeTensorMode(allow_non_fake_inputs=True):
        network, (x, y) = build(), make(batch)
        if way[0] == "O":
            auto_mixed_precision(network, way, torch.float16)
        for layer in (m for m in network.modules() if way == "8 bits" and isinstance(m, nn.Linear)):
            in_8_bits(layer)
        for block in blocks(network) if again else ():
            block.forward = lambda z, forward=block.forward: checkpoint(forward, z, use_reentrant=False)
        with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.x):
            with torch.autocast("cpu", torch.float16, enabled=way in ("autocast", "8 bits")):
                loss = F.cross_entropy(network(x).flatten(0, -2).float(), y.flatten())
            loss.backward()
        weights = sum(4 * p.numel() for p in network.parameters())
    return {"weights": weights, **Kept.peak}


def line(name: str, way: str, again: bool) -> dict[str, int]:
    """`weights`, `copies`, `fixed` and `each`: bytes, and bytes of activations as fixed + each * batch.

    Raises:  ValueError if they are not linear in the batch.
    """
    two, four, seven = (count(name, way, batch, again) for batch in (2, 4, 7))
    each = (four["activations"] - two["activations"]) // 2
    fixed = two["activations"] - 2 * each
    if abs(fixed + 7 * each - seven["activations"]) > 64:
        raise ValueError(f"{name} {way}: {two}, {four} and {seven} lie on no line")
    return {"weights": two["weights"], "copies": two["copies"], "fixed": fixed, "each": each}


if __name__ == "__main__":
    found: dict[str, Any] = {}
    for name in sys.argv[1:] or NETWORKS:
        for again in (False, True)[: 1 + (name != "mlp")]:
            for way in WAYS:
                found.setdefault(name, {}).setdefault("recomputed" if again else "kept", {})[way] = line(
                    name, way, again
                )
                print(name, way, again, found[name]["recomputed" if again else "kept"][way], flush=True)
    (Path(__file__).parent / "benefit.json").write_text(json.dumps(found, indent=1) + "\n")
