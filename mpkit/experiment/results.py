"""What an experiment found: every run as a row, every cell beside its baseline with an interval and a sentence."""

from __future__ import annotations

import atexit
import math
import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from mpkit.arguments import check_count
from mpkit.experiment.identity import name_of
from mpkit.experiment.statistics import Paired, holm, paired
from mpkit.experiment.store import INDEX, Row, cell_key, folder_at, index_text, read_index, read_rows
from mpkit.experiment.verdict import concluded, direction
from mpkit.files import check_growth, refused, regular, write_whole

if TYPE_CHECKING:
    import pandas as pd

_ALWAYS = ("cell", "seed", "run_seconds", "alone", "error")  # columns of every frame


def temporary() -> Path:
    """A folder that ends with this process."""
    path = tempfile.mkdtemp(prefix="mpkit-experiment-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


class Results:
    """The runs of an experiment, of this call or of earlier ones with the same code.

    Args:
        index:   what was asked for: cells with labels and baselines, seeds.
        rows:    the finished runs.
        folder:  where they lie.
        stopped: whether the call ended before all was done.
    """

    def __init__(self, index: Mapping[str, Any], rows: Sequence[Row], *, folder: Path, stopped: bool = False) -> None:
        if not isinstance(index, Mapping) or {"cells", "seeds"} - set(index):
            raise TypeError(f"index must be a dict with the keys 'cells' and 'seeds', got {index!r:.100}")
        self.labels: list[str] = [cell["label"] for cell in index["cells"]]
        self.seeds: list[int] = list(index["seeds"])
        self.folder, self.stopped = folder, stopped
        self._index = index
        place = {cell_key(c["cell"], s): (i, s) for i, c in enumerate(index["cells"]) for s in self.seeds}
        keyed = ((place.get(cell_key(row.cell, row.seed)), row) for row in rows)
        self._rows: dict[tuple[int, int], Row] = {at: row for at, row in keyed if at is not None}

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Results:
        """The results that lie in a folder, as far as they are finished; nothing is run.

        Args:    folder: the folder, or the zip file that `save` made.
        Raises:  FileNotFoundError where no experiment was; ValueError for a zip file that `save` did not make. Warns:
                 of files that were changed or cut.
        """
        if Path(folder).suffix == ".zip" and not Path(folder).expanduser().is_dir():
            unpacked = temporary()
            try:
                with refused(Path(folder), "zip file of an experiment"), zipfile.ZipFile(regular(Path(folder))) as file:
                    check_growth(file)
                    file.extractall(unpacked)
                return cls.load(unpacked)
            except Exception:
                shutil.rmtree(unpacked)
                raise
        place = folder_at(folder)
        index = read_index(place)
        stems = (f"{cell_key(c['cell'], s)}-{index['code']}" for c in index["cells"] for s in index["seeds"])
        return cls(index, list(read_rows(place, stems)), folder=place)

    def first(self, seeds: int) -> Results:
        """What would be known if only the first `seeds` seeds had been run.

        Raises:  TypeError, ValueError unless it is a whole number from 1 to the number of seeds.
        """
        count = check_count("seeds", seeds)
        if count > len(self.seeds):
            raise ValueError(f"seeds must be at most {len(self.seeds)}, the number that was run, got {count}")
        index, rows = {**self._index, "seeds": self.seeds[:count]}, list(self._rows.values())
        return Results(index, rows, folder=self.folder, stopped=self.stopped)

    def save(self, path: str | os.PathLike[str]) -> None:
        """One zip file of these runs and no others, whole or not at all, to keep or to send; `Results.load` opens it.

        Raises:  ValueError unless the name ends in .zip.
        """
        if Path(path).suffix != ".zip":
            raise ValueError(f"the name must end in .zip, so that load recognises the file, got {path}")
        held = {row.path.name: regular(row.path).read_bytes() for row in self._rows.values()}
        held[INDEX] = index_text(self._index).encode()

        def pack(open_: IO[bytes]) -> None:
            with zipfile.ZipFile(open_, "w") as file:
                for name in sorted(held):  # stamped without the time, so that equal runs give an equal file
                    file.writestr(zipfile.ZipInfo(name), held[name], zipfile.ZIP_DEFLATED)

        write_whole(Path(path), pack)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        failed, open_ = len(self.failures), len(self.labels) * len(self.seeds) - len(self)
        text = f"{len(self)} runs of {len(self.labels)} cells from {len(self.seeds)} seeds"
        return text + (f", {failed} failed" if failed else "") + (f", {open_} not run yet" if open_ else "")

    @property
    def metrics(self) -> list[str]:
        """Names of all numbers that a run returned."""
        return list(dict.fromkeys(name for row in self._rows.values() for name in row.numbers))

    @property
    def note(self) -> str:
        """What to know before trusting the numbers: how times were taken, what failed or is missing."""
        beside, missing = sum(not r.alone for r in self._rows.values()), len(self.labels) * len(self.seeds) - len(self)
        alone = "Runs were made one at a time, and the cells of each seed in random order, so times can be compared."
        said = [alone] if len(self) and not beside else []
        if beside:
            said += [
                f"Times cannot be compared: {beside} of {len(self)} runs had other runs beside them; use n_jobs=1."
            ]
        if self.failures:
            said += [f"{len(self.failures)} of {len(self)} runs failed; `.failures` has their tracebacks."]
        return " ".join(said + [f"{missing} runs are not done; the same call goes on with them."] * bool(missing))

    @property
    def frame(self) -> pd.DataFrame:
        """One row a run: the cell's arguments, seed, numbers, wall seconds of the run, and what went wrong.

        An argument called like one of the columns that are always there stands as "error (argument)", and a number
        called like one of them or like an argument as "error (result)"; `summary` and `values` know it by its own name.
        """
        import pandas as pd

        names = dict.fromkeys(name for cell in self._index["cells"] for name in cell["cell"])
        arguments = {name: f"{name} (argument)" if name in _ALWAYS else name for name in names}
        metrics = {n: f"{n} (result)" if n in _ALWAYS or n in names else n for n in self.metrics}
        lines = []
        for (i, seed), row in self._ordered().items():
            shown = {k: v if isinstance(v, None | int | float | str) else name_of(v) for k, v in row.cell.items()}
            line = {"cell": self.labels[i], **{arguments[k]: v for k, v in shown.items()}, "seed": seed}
            line |= {metrics[k]: v for k, v in row.numbers.items()}
            lines.append(line | {"run_seconds": row.seconds, "alone": row.alone, "error": row.error})
        columns = ["cell", *arguments.values(), "seed", *metrics.values(), "run_seconds", "alone", "error"]
        return pd.DataFrame(lines, columns=columns)

    def _ordered(self, cell: int | str | None = None) -> dict[tuple[int, int], Row]:
        """(number of the cell, seed) -> row, in order; of one cell those that ended well."""
        cells = range(len(self.labels)) if cell is None else [self.number(cell)]
        rows = {(i, s): self._rows[i, s] for i in cells for s in self.seeds if (i, s) in self._rows}
        return rows if cell is None else {at: row for at, row in rows.items() if not row.error}

    @property
    def failures(self) -> dict[tuple[str, int], str]:
        """(cell, seed) -> traceback of every failed run."""
        return {(self.labels[i], s): row.error for (i, s), row in self._ordered().items() if row.error}

    def values(self, cell: int | str, metric: str) -> dict[int, float]:
        """Seed -> number, of the runs of a cell that ended well; NaN and inf included.

        Raises:  ValueError for a metric that no run returned, or an unknown cell.
        """
        if metric not in self.metrics and metric != "run_seconds":
            raise ValueError(f"no run returned {metric!r}; there are {', '.join(self.metrics) or 'no numbers at all'}")
        numbers = {s: {**row.numbers, "run_seconds": row.seconds} for (_, s), row in self._ordered(cell).items()}
        return {seed: own[metric] for seed, own in numbers.items() if metric in own}

    def series(self, cell: int | str, name: str, seed: int | None = None) -> np.ndarray:
        """A series of the run of a cell from a seed (None: the first seed that is there).

        Raises:  ValueError for a run that is not there, failed, or returned no such series.
        """
        held = self._row(cell, seed).series()
        if name not in held:
            raise ValueError(f"this run returned no series {name!r}; there are {', '.join(held) or 'none'}")
        return held[name]

    def difference(self, cell: int | str, metric: str) -> Paired:
        """The paired difference to the baseline over the seeds of which both have finite numbers.

        Two numbers that agree to twelve digits differ by 0: what is left is the order in which something was summed.
        """
        i = self.number(cell)
        own, other = self.values(i, metric), self.values(self._index["cells"][i]["baseline"], metric)
        both = [0.0 if math.isclose(own[s], other[s], rel_tol=1e-12) else own[s] - other[s] for s in own if s in other]
        return paired([d for d in both if math.isfinite(d)])

    def summary(self, metric: str, *, higher_is_better: bool | None = None) -> pd.DataFrame:
        """One row a cell: mean, spread, the difference to its baseline seed by seed, and what can be concluded.

        Args:    higher_is_better: None: known for the usual names (accuracy, loss, seconds ...), else "higher" and
                 "lower" are said instead of "better" and "worse".
        Columns: n (runs with a finite number), mean, spread (standard deviation), difference, low and high (its 95 %
                 interval, each comparison for itself), p (paired t test) and p_holm (corrected for the number of
                 comparisons), verdict (which needs p_holm below 0.05) and sentence.
        Raises:  ValueError for a metric that no run returned.
        Source:  Student's paired t interval; Holm 1979 for several comparisons. With few seeds both assume that
                 the differences are about normally distributed.
        """
        import pandas as pd

        against = [cell["baseline"] for cell in self._index["cells"]]
        found = [paired([]) if i == j else self.difference(i, metric) for i, j in enumerate(against)]
        corrected = holm([d.p for d in found])
        tests = sum(not math.isnan(p) for p in corrected)
        up = direction(metric) if higher_is_better is None else higher_is_better
        rows = []
        for i, (d, p) in enumerate(zip(found, corrected)):
            own, done = self._own(i, metric), sum((i, s) in self._rows for s in self.seeds)
            base = self.labels[against[i]] if against[i] != i else None
            said = concluded(self.labels[i], base, own, done, d, p, tests, up)
            rows.append((own.n, own.mean, own.spread, d.mean, d.low, d.high, d.p, p, *said))
        columns = ["n", "mean", "spread", "difference", "low", "high", "p", "p_holm", "verdict", "sentence"]
        return pd.DataFrame(rows, columns=columns, index=pd.Index(self.labels, name="cell"))

    def interval(self, cell: int | str, metric: str) -> tuple[float, float, float]:
        """(low, mean, high) of a cell: its mean and the ends of its 95 % interval; NaN where they cannot be known."""
        own = self._own(cell, metric)
        return own.low, own.mean, own.high

    def plot(self, metric: str = "accuracy", *, against: str = "seconds_per_step") -> Any:
        """A picture with its sentence: `metric` of every cell with its 95 % interval, and over `against`.

        Raises:  ValueError for a metric that is not there.
        """
        from mpkit.view.intervals import cost  # upward: pictures need matplotlib, and only here

        return cost(self, metric, against)

    def number(self, cell: int | str) -> int:
        """The number of a cell that is given by its label or number. Raises ValueError where there is none."""
        if isinstance(cell, str):
            if cell not in self.labels:
                raise ValueError(f"no cell {cell!r}; there are {'; '.join(self.labels)}")
            return self.labels.index(cell)
        if not 0 <= cell < len(self.labels):
            raise ValueError(f"cells are numbered 0 to {len(self.labels) - 1}, got {cell}")
        return cell

    def _own(self, cell: int | str, metric: str) -> Paired:
        return paired([v for v in self.values(cell, metric).values() if math.isfinite(v)])

    def _row(self, cell: int | str, seed: int | None) -> Row:
        ended = {s: row for (_, s), row in self._ordered(cell).items()}
        if not ended or seed not in (None, *ended):
            label = self.labels[self.number(cell)]
            raise ValueError(f"{label} has no run from seed {seed} that ended well; it has {list(ended)}")
        return next(iter(ended.values())) if seed is None else ended[seed]
