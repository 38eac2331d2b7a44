"""As `test_sentences`, for sweeps, the staircase and the boosts."""

import math

import ml_dtypes
import numpy as np
import pytest
from sentences import PERCENT, read, swept, tells

from mpkit.data import digits
from mpkit.explorers.dim_reduce import DimReduceExplorer, start


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
