"""Traces made of given gradients, for tests of what reads a trace."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpkit.record import Ranges, Trace, exponent_counts


def trace_of(gradients: list[Any], scale: float = 1.0, form: str = "fp16", **columns: Any) -> Trace:
    """A trace of one parameter with these true gradients, or of several where each is a list, as a recorder would see
    them at `scale`."""
    whole = [row if isinstance(row, list) else [row] for row in gradients]
    rows = [[exponent_counts(g) for g in row] for row in whole]
    n = len(rows)
    ranges = Ranges(
        names=tuple("wabcde"[: len(rows[0])]),
        size=np.array([g.numel() for g in whole[0]]),
        step=np.arange(n),
        lowest=-126,
        counts=np.array([[c[1:255].tolist() for c, _, _ in row] for row in rows], np.uint32),
        zeros=np.array([[int(z) for _, z, _ in row] for row in rows]),
        nonfinite=np.array([[int(c[255]) for c, _, _ in row] for row in rows]),
        largest=np.array([[float(m) for _, _, m in row] for row in rows], dtype=np.float32),
    )
    base = {
        "step": np.arange(n), "loss": np.ones(n), "scale": np.full(n, scale),
        "overflow": ranges.nonfinite.any(axis=1), "lr": np.full(n, 0.1), "grad_norm": np.ones(n),
        "seconds": np.arange(n) * 1.0,
    }  # fmt: skip
    return Trace(**(base | columns), gradients=ranges, format=form)
