"""The record of a run as plain arrays: saved without pickle, checked when loaded, joined after a resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.arguments import check_choice, check_kind
from mpkit.files import read_npz, refused, write_whole
from mpkit.formats import get_format
from mpkit.record.ranges import RANGES, Fields, Ranges, held_as, hold, need_ascending

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = "mpkit.trace/1"
STEPS: Fields = {
    key: (np.int64 if key == "step" else np.bool_ if key == "overflow" else np.float64, "N")
    for key in ("step", "loss", "scale", "overflow", "lr", "grad_norm", "seconds")
}
PARTS = ("gradients", "activations")


@dataclass(frozen=True, eq=False)
class Trace:
    """What happened in N steps of one training run.

    Args:
        step:      (N,) int64 index of the step, ascending.
        loss:      (N,) float64 unscaled loss.
        scale:     (N,) float64 loss scale that this step was made with (1 without scaling).
        overflow:  (N,) bool: a gradient was inf or NaN, the update was skipped.
        lr:        (N,) float64 learning rate of the first parameter group.
        grad_norm: (N,) float64 2-norm of all unscaled gradients; NaN in steps that `every` left
                   out, unless the overflow had to be read from the gradients.
        seconds:   (N,) float64 time since the recorder was made.
        gradients: exponent histograms of the unscaled gradients.
        activations: the same of module outputs, or None.
        format:    name of the format that the scaled gradients had to fit into, "fp16" in mixed precision.
        measured:  by name of a format, (N,) float64 largest loss scale that was measured to give finite gradients in
                   it; negative where none does. `replay` prefers it to what the histograms tell.
        meta:      anything JSON can hold: versions, what was trained, `policy` with the scale policy in use.
    Raises:  TypeError for an array of another kind; ValueError when the arrays do not fit together.
    """

    step: np.ndarray
    loss: np.ndarray
    scale: np.ndarray
    overflow: np.ndarray
    lr: np.ndarray
    grad_norm: np.ndarray
    seconds: np.ndarray
    gradients: Ranges
    activations: Ranges | None = None
    format: str = "fp16"
    meta: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes: dict[str, int] = {"N": len(self.step)} if isinstance(self.step, np.ndarray) else {}
        hold(self, STEPS, **sizes)
        check_kind("gradients", self.gradients, Ranges, "Ranges")
        check_kind("activations", self.activations, Ranges, "Ranges", optional=True)
        need_ascending("the steps", self.step)
        if (self.scale < 0).any():
            raise ValueError("a loss scale is negative: the trace is damaged")
        get_format(self.format)
        check_kind("meta", self.meta, Mapping, "a dict of what JSON can hold")
        check_kind("measured", self.measured, Mapping, "a dict of arrays")
        for name, tops in self.measured.items():
            get_format(name)
            if np.isnan(held_as(f"measured[{name!r}]", tops, np.float64, "N", sizes)).any():
                raise ValueError(f"a measured ceiling of {name} is NaN: the trace is damaged")
        if not all(np.isin(part.step, self.step).all() for part in self._parts().values()):
            raise ValueError("a histogram belongs to a step that the trace does not have")

    def _parts(self) -> dict[str, Ranges]:
        return {name: part for name in PARTS if (part := getattr(self, name)) is not None}

    def __len__(self) -> int:
        return len(self.step)

    def __repr__(self) -> str:
        counts = f"{len(self)} steps, {self.overflow.sum()} skipped, {len(self.gradients.step)} with histograms"
        return f"Trace({counts} of {len(self.gradients.names)} gradients, format={self.format})"

    @property
    def rows(self) -> np.ndarray:
        """(H,) int64 position in the step arrays of every recorded gradient histogram."""
        return np.searchsorted(self.step, self.gradients.step)

    def save(self, path: str | Path) -> None:
        """Write one compressed npz of plain arrays, whole or not at all; nothing is pickled."""
        head = {"schema": SCHEMA, "format": self.format, "meta": dict(self.meta), "measured": [*self.measured]}
        arrays: dict[str, Any] = {key: getattr(self, key) for key in STEPS}
        for prefix, part in self._parts().items():
            head[prefix] = {"names": part.names, "lowest": part.lowest}
            arrays |= {f"{prefix}_{key}": getattr(part, key) for key in RANGES}
        arrays |= {f"measured_{name}": tops.astype(np.float64) for name, tops in self.measured.items()}
        arrays["head"] = np.array(json.dumps(head))
        write_whole(path, lambda file: np.savez_compressed(file, **arrays))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote.

        Raises:  ValueError, which says what is wrong, for a damaged or foreign file; FileNotFoundError.
        """
        arrays = read_npz(path)
        with refused(Path(path), "Trace"):
            head = json.loads(str(arrays["head"]))
            check_choice("schema", head["schema"], (SCHEMA,))
            held = {n: head[n] | {key: arrays[f"{n}_{key}"] for key in RANGES} for n in PARTS if n in head}
            parts: dict[str, Any] = {name: Ranges(**fields) for name, fields in held.items()}
            columns: dict[str, Any] = {key: arrays[key] for key in STEPS}
            measured = {name: arrays[f"measured_{name}"] for name in head.get("measured", [])}
            return cls(**columns, **parts, format=head["format"], meta=head["meta"], measured=measured)

    def before(self, step: int) -> Trace:
        """The steps with an index below `step`, for instance those that a checkpoint covers."""
        keep = self.step < step
        columns: dict[str, Any] = {key: getattr(self, key)[keep] for key in STEPS}
        columns |= {name: part.rows(part.step < step) for name, part in self._parts().items()}
        return replace(self, **columns, measured={name: tops[keep] for name, tops in self.measured.items()})

    def thinned(self, steps: np.ndarray) -> Trace:
        """The same steps with only the gradient histograms of `steps`."""
        return replace(self, gradients=self.gradients.rows(np.isin(self.gradients.step, steps)))

    def __add__(self, later: Trace) -> Trace:
        """This run and its continuation after a resume.

        Steps that both hold were trained twice (the run went on after its last checkpoint): the later trace wins.
        Raises:  ValueError when the traces are of different networks or formats.
        """
        if self.format != later.format or (self.activations is None) != (later.activations is None):
            kinds = [f"{t.format} with {' and '.join(t._parts())}" for t in (self, later)]
            raise ValueError(f"only traces of one format and the same parts can be joined, got {' and '.join(kinds)}")
        if not len(later):
            return self
        first = self.before(int(later.step[0]))
        # a resumed recorder goes on with its clock, a new one starts from zero
        offset = first.seconds[-1] if len(first) and later.seconds[0] <= first.seconds[-1] else 0.0
        columns: dict[str, Any] = {key: np.concatenate([getattr(first, key), getattr(later, key)]) for key in STEPS}
        columns["seconds"] = np.concatenate([first.seconds, later.seconds + offset])
        columns |= {name: Ranges.chained([part, getattr(later, name)]) for name, part in first._parts().items()}
        both = [name for name in first.measured if name in later.measured]
        columns["measured"] = {name: np.concatenate([first.measured[name], later.measured[name]]) for name in both}
        return replace(first, **columns)

    def to_frame(self, part: str = "steps") -> pd.DataFrame:
        """The trace as a table.

        Args:  part: "steps" = one row per step; "gradients" or "activations" = one row per recorded step and name.
        """
        import pandas as pd

        if part == "steps":
            return pd.DataFrame({key: getattr(self, key) for key in STEPS}).set_index("step")
        check_choice("part", part, ("steps", *PARTS))
        if (ranges := self._parts().get(part)) is None:
            raise ValueError("this trace has no activations; make it with Recorder(..., activations=True)")
        index = pd.MultiIndex.from_product([ranges.step, ranges.names], names=["step", "name"])
        present = ranges.counts > 0
        low = np.where(present.any(axis=2), ranges.exponents[present.argmax(axis=2)], 0)
        columns = {key: getattr(ranges, key).ravel() for key in ("zeros", "nonfinite", "largest")}
        size = np.tile(ranges.size, len(ranges.step))
        return pd.DataFrame({"size": size, **columns, "smallest_exponent": low.ravel()}, index=index)
