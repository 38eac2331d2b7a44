"""Traces made of given gradients, for tests of what reads a trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mpkit.record import Ranges, Trace, exponent_counts


def trace_of(gradients: list[torch.Tensor], scale: float = 1.0, form: str = "fp16", **columns: Any) -> Trace:
    """A trace of one parameter with these true gradients, as a recorder would see them at `scale`."""
    rows = [exponent_counts(g) for g in gradients]
    n = len(rows)
    ranges = Ranges(
        names=("w",),
        size=np.array([gradients[0].numel()]),
        step=np.arange(n),
        lowest=-126,
        counts=np.stack([c[1:255].numpy()[None] for c, _, _ in rows]).astype(np.uint32),
        zeros=np.array([[int(z)] for _, z, _ in rows]),
        nonfinite=np.array([[int(c[255])] for c, _, _ in rows]),
        largest=np.array([[float(m)] for _, _, m in rows], dtype=np.float32),
    )
    base = {
        "step": np.arange(n),
        "loss": np.ones(n),
        "scale": np.full(n, scale),
        "overflow": ranges.nonfinite[:, 0] > 0,
        "lr": np.full(n, 0.1),
        "grad_norm": np.ones(n),
        "seconds": np.arange(n) * 1.0,
    }
    return Trace(**(base | columns), gradients=ranges, format=form)
