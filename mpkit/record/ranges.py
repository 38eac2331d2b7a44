"""Exponent histograms of named tensors, row after row, and the checks that recorded arrays share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpkit.arguments import check_count, check_kind

LOWEST, HIGHEST = -126, 127  # exponents of the normal numbers of float32
Fields = Mapping[str, tuple[type, str]]  # array -> dtype in which it is stored, and a letter for each axis
RANGES: Fields = {
    "step": (np.int64, "H"),
    "size": (np.int64, "P"),
    "counts": (np.uint32, "HPB"),
    "zeros": (np.int64, "HP"),
    "nonfinite": (np.int64, "HP"),
    "largest": (np.float32, "HP"),
}
_ROWS = [key for key, (_, axes) in RANGES.items() if axes[0] == "H"]


@dataclass(frozen=True, eq=False)
class Ranges:
    """How large the values of P named tensors were in H recorded steps: one exponent histogram each.

    Args:
        names:     P dotted parameter or module names.
        size:      (P,) int64 number of values in each.
        step:      (H,) int64 step index of every row, ascending.
        lowest:    exponent of the first bin; bin b counts the values with 2**(lowest+b) <= |x| < 2**(lowest+b+1).
        counts:    (H, P, B) uint32 finite non-zero values per power of two.
        zeros:     (H, P) int64 values below 2**-126, in practice zeros.
        nonfinite: (H, P) int64 values that are inf or NaN.
        largest:   (H, P) float32 largest magnitude; inf or NaN where one occurred.
    Raises:  TypeError for an array of another kind; ValueError when shapes, order or totals do not fit together.
    """

    names: tuple[str, ...]
    size: np.ndarray
    step: np.ndarray
    lowest: int
    counts: np.ndarray
    zeros: np.ndarray
    nonfinite: np.ndarray
    largest: np.ndarray

    def __post_init__(self) -> None:
        hold_names(self, "names")
        hold(self, RANGES, P=len(self.names))
        check_count("lowest", self.lowest, low=LOWEST)
        if not LOWEST <= self.lowest <= HIGHEST + 1 - self.bins:
            raise ValueError(f"bins must lie in 2**{LOWEST}..2**{HIGHEST}, got {self.bins} from {self.lowest}")
        need_ascending("the recorded steps", self.step)
        if len(set(self.names)) != len(self.names):
            raise ValueError("names occur twice; every parameter or module needs its own")
        total = self.counts.sum(axis=2, dtype=np.int64) + self.zeros + self.nonfinite
        if (total > self.size).any() or min(self.zeros.min(initial=0), self.nonfinite.min(initial=0)) < 0:
            raise ValueError("a histogram counts more values than its tensor has: the trace is damaged")
        if (self.largest < 0).any():
            raise ValueError("a largest magnitude is negative: the trace is damaged")

    @property
    def bins(self) -> int:
        return self.counts.shape[2]

    @property
    def exponents(self) -> np.ndarray:
        """(B,) int64 exponent e of each bin, which holds 2**e <= |x| < 2**(e+1)."""
        return np.arange(self.lowest, self.lowest + self.bins)

    def total(self) -> np.ndarray:
        """(H, B) int64 counts of all names together."""
        return self.counts.sum(axis=1, dtype=np.int64)

    def finite_largest(self) -> np.ndarray:
        """(H,) float64 largest finite magnitude over all names; 0 where a row has no finite non-zero value.

        Rows with inf or NaN only know the power of two: they give the upper edge of the highest occupied bin.
        """
        clean = np.isfinite(self.largest)
        exact = np.where(clean, self.largest.astype(np.float64), 0.0).max(axis=1, initial=0.0)
        occupied = (self.counts > 0) & ~clean[:, :, None]
        edges = np.exp2(self.exponents + 1.0)
        return np.maximum(exact, np.where(occupied, edges, 0.0).max(axis=(1, 2), initial=0.0))

    def rows(self, keep: np.ndarray) -> Ranges:
        """Some of the rows: a mask (H,)."""
        return replace(self, **{key: getattr(self, key)[keep] for key in _ROWS})

    @classmethod
    def chained(cls, parts: Sequence[Ranges]) -> Ranges:
        """The rows of several histograms of the same tensors, one after the other, with the bins that all need.

        Raises:  ValueError for histograms of other tensors.
        """
        names = parts[0].names
        for part in parts:
            if part.names != names:
                raise ValueError(f"only traces of the same network can be joined, got {names[:3]} and {part.names[:3]}")
        lowest = min(part.lowest for part in parts)
        end = max(part.lowest + part.bins for part in parts)
        outside = [((0, 0), (0, 0), (part.lowest - lowest, end - part.lowest - part.bins)) for part in parts]
        columns = {key: np.concatenate([getattr(part, key) for part in parts]) for key in _ROWS if key != "counts"}
        counts = np.concatenate([np.pad(part.counts, around) for part, around in zip(parts, outside)])
        size = np.max([part.size for part in parts], axis=0)
        return cls(names=names, size=size, lowest=lowest, counts=counts, **columns)

    @classmethod
    def empty(cls, names: tuple[str, ...]) -> Ranges:
        """No rows."""
        whole, none = np.zeros((0, len(names)), np.int64), np.zeros(0, np.int64)
        counts, largest = whole[:, :, None].astype(np.uint32), whole.astype(np.float32)
        return cls(names, np.zeros(len(names), np.int64), none, 0, counts, whole, whole, largest)


def hold_names(record: object, key: str) -> None:
    """Its names as a tuple. Raises TypeError for what are no texts."""
    names = getattr(record, key)
    check_kind(key, names, (tuple, list), "a tuple of names")
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"{key} must be names, got {names!r:.80}")
    object.__setattr__(record, key, tuple(names))


def hold(record: object, fields: Fields, **sizes: int) -> None:
    """Its arrays in the dtypes in which they are stored, so that every trace that can be made can be read again.

    sizes:   what a letter stands for; of the others the first array decides.
    Raises:  TypeError for an array of another kind; ValueError for another shape.
    """
    for key, (dtype, axes) in fields.items():
        object.__setattr__(record, key, held_as(key, getattr(record, key), dtype, axes, sizes))


def held_as(key: str, value: np.ndarray, dtype: type, axes: str, sizes: dict[str, int]) -> np.ndarray:
    """One of them; the sizes of its axes are remembered."""
    check_kind(key, value, np.ndarray, "an array")
    if not np.can_cast(value.dtype, dtype, "same_kind"):
        raise TypeError(f"{key} must be {np.dtype(dtype)}, got {value.dtype}; write {key}.astype({dtype.__name__!r})")
    wanted = tuple(sizes.setdefault(axis, size) for axis, size in zip(axes, value.shape))
    if value.shape != wanted or value.ndim != len(axes):
        named = ", ".join(f"{axis}={sizes.get(axis, 'any')}" for axis in axes)
        raise ValueError(f"{key} must have the shape ({named}), got {value.shape}")
    return value.astype(dtype, copy=False)


def need_ascending(what: str, step: np.ndarray) -> None:
    if (np.diff(step) <= 0).any():
        raise ValueError(f"{what} must ascend, each index once")
