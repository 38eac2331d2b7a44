"""As `test_sentences`, for sweeps, the staircase and the boosts."""

import math
from functools import cache

import ml_dtypes
import numpy as np
import pytest
import torch
from sentences import PERCENT, power, read, swept, tells

from mpkit.data import digits
from mpkit.explorers.adasum import PairExplorer, WorkersExplorer
from mpkit.explorers.dim_reduce import DimReduceExplorer, start
from mpkit.explorers.group_scale import GroupScaleExplorer, deep_sigmoid, gradient_trace


def every_value(dtype):
    bits = ml_dtypes.finfo(dtype).bits
    patterns = np.arange(2**bits, dtype=np.uint16 if bits == 16 else np.uint8)
    with np.errstate(invalid="ignore"):
        values = patterns.view(dtype).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def added(a, b):
    """AdaSum of two vectors by its formula; a vector of zeros gives nothing up."""
    if not (a @ a and b @ b):
        return a + b
    return (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b


def test_adasum_of_two():
    for m in swept(PairExplorer(), samples=7):
        turn = math.radians(m.angle)
        a, b = np.array([m.length_a, 0.0]), m.length_b * np.array([math.cos(turn), math.sin(turn)])
        want = [np.linalg.norm(v) for v in (a + b, (a + b) / 2, added(a, b))]
        told = read(r"sum (\S+), mean (\S+), AdaSum (\S+)\. AdaSum = (\S+) a ([+-] \d\S*) b", m)
        told = [float(v.replace(" ", "")) for v in told]
        assert told[:3] == pytest.approx(want, abs=0.0051)
        assert np.linalg.norm(told[3] * a + told[4] * b) == pytest.approx(want[2], abs=0.03)


def test_adasum_of_many():
    for m in swept(WorkersExplorer(), samples=5):
        draw = torch.Generator().manual_seed(m.seed)
        common, *own = torch.randn(17, m.dimension, generator=draw, dtype=torch.float64).numpy()
        common = common / np.linalg.norm(common)
        part = [
            math.sqrt(m.agreement) * common + math.sqrt(1 - m.agreement) * v / np.linalg.norm(v)
            for v in own[: m.workers]
        ]
        part = [v / np.linalg.norm(v) for v in part]
        total, tree = sum(part), part
        while len(tree) > 1:
            tree = [added(a, b) for a, b in zip(tree[::2], tree[1::2])]
        told = read(r"sum (\S+), mean (\S+), AdaSum (\S+)\. The .* is (\S+) for AdaSum and (\S+) for the mean\.", m)
        length = [np.linalg.norm(v) for v in (total, total / m.workers, tree[0])]
        want = [*length, tree[0] @ common / length[2], total @ common / length[0]]
        assert [float(v) for v in told] == pytest.approx(want, abs=0.0051)


def tanh_network(flat, images, labels):
    """(loss, gradient) of 64-12-10 with tanh, by hand in NumPy."""
    w1, b1, w2, b2 = (
        part.reshape(shape) for part, shape in zip(np.split(flat, [768, 780, 900]), [(12, 64), (12,), (10, 12), (10,)])
    )
    hidden = np.tanh(images @ w1.T + b1)
    logits = hidden @ w2.T + b2
    chance = np.exp(logits - logits.max(1, keepdims=True))
    chance /= chance.sum(1, keepdims=True)
    back = (chance - np.eye(10)[labels]) / len(images)
    inner = (back @ w2) * (1 - hidden**2)
    parts = inner.T @ images, inner.sum(0), back.T @ hidden, back.sum(0)
    return -np.log(chance[np.arange(len(images)), labels]).mean(), np.concatenate([p.ravel() for p in parts])


def test_dim_reduce():
    images, labels = (t[:300].numpy() for t in digits("train", size=8))
    images, path = images.reshape(300, 64).astype(np.float64), [start().flat()]
    for _ in range(40):
        path.append(path[-1] - 0.5 * tanh_network(path[-1], images, labels)[1])
    plain = [tanh_network(w, images, labels)[0] for w in path]
    points = np.array(path)[::2]
    axes = np.linalg.svd(points - points.mean(0), full_matrices=False)[2]
    for m in swept(DimReduceExplorer(), samples=5, components=(2, 8, 16)):
        at, weights = m.step, m.path.weights
        losses = r"loss is (\S+) \(\D+ (\S+)\); after 40 steps it is (\S+) \(\D+ (\S+)\)\."
        told = read(rf"{losses} .* the subspace is {PERCENT} as long as the whole", m)
        (now, gradient), last = (tanh_network(weights[i], images, labels) for i in (at, -1))
        assert [float(v) for v in told[:4]] == pytest.approx([now, plain[at], last[0], plain[40]], abs=6e-4)
        inside = np.linalg.norm(axes[: m.components] @ gradient) / np.linalg.norm(gradient)
        assert tells(told[4], math.sqrt(max(0.0, 1 - inside**2)))
        moved = np.linalg.norm(axes[: m.components] @ (weights[at + 1] - weights[at]))
        assert ("accepts neither" in m.summary()) == (moved < 1e-6), m.state()


@cache
def first_group(depth, batch):
    """The sizes of the true gradients of group 1 in one batch of 64 digits: layers of sigmoids, without any marker."""
    images, labels = (t[64 * batch : 64 * batch + 64] for t in digits("train", size=8))
    x, layers = images.flatten(1), deep_sigmoid(depth).layers
    for layer in layers[:-1]:
        x = torch.sigmoid(torch.nn.functional.linear(x, layer.weight, layer.bias))
    x = torch.nn.functional.linear(x, layers[-1].weight, layers[-1].bias)
    owned = [p for layer in layers[:depth] for p in layer.parameters()]
    found = torch.autograd.grad(torch.nn.functional.cross_entropy(x, labels), owned)
    sizes = torch.cat([g.flatten() for g in found]).abs().numpy()
    return sizes[sizes > 0]


def test_group_scales():
    kinds = {"E5M2": ml_dtypes.float8_e5m2, "float16": np.float16}
    for m in swept(GroupScaleExplorer(), samples=3, depth=(1, 3, 5)):
        trace, kind = gradient_trace(m.depth), kinds[m.format]
        skips, ends, kept = [], [], []
        for groups in ([[0, 1, 2, 3]], [[0], [1], [2], [3]]):
            scales, skipped = [np.float32(2.0**m.init_exponent)] * len(groups), 0
            for step in range(m.step + 1):
                used, bad = list(scales), []
                for i, group in enumerate(groups):
                    top = np.float32(trace.largest[step, group].max()) * used[i]
                    with np.errstate(over="ignore"):
                        bad.append(not np.isfinite(top.astype(kind).astype(np.float32)))
                    factor = np.float32(0.5**0.5 if bad[-1] else 2 ** (1 / m.window))
                    scales[i] = min(used[i] * factor, np.float32(2.0**100))
                skipped += any(bad)
            with np.errstate(over="ignore"):
                stored = (first_group(m.depth, m.step % 23) * used[0]).astype(kind).astype(np.float32)
            skips.append(skipped)
            ends.append(used)
            kept.append((stored != 0).mean())
        scales = r"one scale is (\S+), the .* are (\S+), (\S+), (\S+), (\S+)\. "
        told = read(rf"{scales}.*: {PERCENT} with one .* and {PERCENT} w", m)
        want = np.log2(np.array([*ends[0], *ends[1]], dtype=np.float64))
        assert [math.log2(power(v)) for v in told[:5]] == pytest.approx(want.tolist(), abs=0.06)
        assert all(map(tells, told[5:], kept)), m.summary()
        assert [int(v) for v in read(r"skipped: (\d+) with one scale and (\d+) with four\.", m)] == skips
