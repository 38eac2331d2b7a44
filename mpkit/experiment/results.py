"""What an experiment found: every run as a row, every cell beside its baseline with an interval and a sentence."""

from __future__ import annotations

import atexit
import io
import math
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.experiment.identity import name_of
from mpkit.experiment.statistics import Paired, holm, paired
from mpkit.experiment.store import INDEX, Row, folder_at, index_text, path_of, read_index, read_rows
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
        index:   what was asked for: cells with labels and baselines, seeds, key of the code.
        rows:    the finished runs.
        folder:  where they lie.
        stopped: whether the call ended before all was done.
    """

    def __init__(self, index: Mapping[str, Any], rows: Iterable[Row], *, folder: Path, stopped: bool = False) -> None:
        if not isinstance(index, Mapping) or {"cells", "seeds", "code"} - set(index):
            raise TypeError(f"index must be a dict with the keys 'cells', 'seeds' and 'code', got {index!r:.100}")
        self.labels: list[str] = [cell["label"] for cell in index["cells"]]
        self.seeds: list[int] = list(index["seeds"])
        self.folder, self.stopped = folder, stopped
        self._index, found = index, {row.path: row for row in rows}
        self._rows = {at: found[path] for at, path in _paths(index, folder).items() if path in found}

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
        return cls(index, read_rows(_paths(index, place).values()), folder=place)

    def first(self, seeds: int) -> Results:
        """What would be known if only the first `seeds` seeds had been run.

        Raises:  ValueError unless it is a whole number from 1 to the number of seeds.
        """
        if seeds not in range(1, len(self.seeds) + 1):
            raise ValueError(f"seeds must be from 1 to {len(self.seeds)}, the number that was run, got {seeds!r}")
        index = {**self._index, "seeds": self.seeds[:seeds]}
        return Results(index, self._rows.values(), folder=self.folder, stopped=self.stopped)

    def save(self, path: str | os.PathLike[str]) -> None:
        """One zip file of these runs and no others, whole or not at all, to keep or to send; `Results.load` opens it.

        Raises:  ValueError unless the name ends in .zip.
        """
        if Path(path).suffix != ".zip":
            raise ValueError(f"the name must end in .zip, so that load recognises the file, got {path}")
        held = {row.path.name: regular(row.path).read_bytes() for row in self._rows.values()}
        held[INDEX] = index_text(self._index).encode()
        with zipfile.ZipFile(packed := io.BytesIO(), "w") as file:
            for name in sorted(held):  # stamped without the time, so that equal runs give an equal file
                file.writestr(zipfile.ZipInfo(name), held[name], zipfile.ZIP_DEFLATED)
        write_whole(Path(path), lambda file: file.write(packed.getvalue()))

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        failed, open_ = len(self.failures), len(self.labels) * len(self.seeds) - len(self)
        text = f"{len(self)} runs of {len(self.labels)} cells from {len(self.seeds)} seeds"
        return text + f", {failed} failed" * bool(failed) + f", {open_} not run yet" * bool(open_)

    @property
    def metrics(self) -> list[str]:
        """Names of all numbers that a run returned."""
        return list(dict.fromkeys(name for row in self._rows.values() for name in row.numbers))

    @property
    def note(self) -> str:
        """What to know before trusting the numbers: how times were taken, what failed or is missing."""
        beside, missing = sum(not r.alone for r in self._rows.values()), len(self.labels) * len(self.seeds) - len(self)
        said = ["Runs were made one at a time, and the cells of each seed in random order, so times can be compared."]
        if beside:
            said = [f"Times cannot be compared: {beside} of {len(self)} runs had other runs beside them; use n_jobs=1."]
        if self.failures:
            said.append(f"{len(self.failures)} of {len(self)} runs failed; `.failures` has their tracebacks.")
        if missing:
            said.append(f"{missing} runs are not done; the same call goes on with them.")
        return " ".join(said)

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
        for (i, seed), row in self._rows.items():
            shown = {k: v if isinstance(v, None | int | float | str) else name_of(v) for k, v in row.cell.items()}
            line = {arguments[k]: v for k, v in shown.items()} | {metrics[k]: v for k, v in row.numbers.items()}
            lines.append(line | dict(zip(_ALWAYS, (self.labels[i], seed, row.seconds, row.alone, row.error))))
        columns = ["cell", *arguments.values(), "seed", *metrics.values(), "run_seconds", "alone", "error"]
        return pd.DataFrame(lines, columns=columns)

    @property
    def failures(self) -> dict[tuple[str, int], str]:
        """(cell, seed) -> traceback of every failed run."""
        return {(self.labels[i], seed): row.error for (i, seed), row in self._rows.items() if row.error}

    def values(self, cell: int | str, metric: str) -> dict[int, float]:
        """Seed -> number, of the runs of a cell that ended well; NaN and inf included.

        Raises:  ValueError for a metric that no run returned, or an unknown cell.
        """
        if metric not in self.metrics and metric != "run_seconds":
            raise ValueError(f"no run returned {metric!r}; there are {', '.join(self.metrics) or 'no numbers at all'}")
        numbers = {seed: {**row.numbers, "run_seconds": row.seconds} for seed, row in self._ended(cell).items()}
        return {seed: own[metric] for seed, own in numbers.items() if metric in own}

    def series(self, cell: int | str, name: str, seed: int | None = None) -> np.ndarray:
        """A series of the run of a cell from a seed (None: the first seed that is there).

        Raises:  ValueError for a run that is not there, failed, or returned no such series.
        """
        ended = self._ended(cell)
        if (chosen := next(iter(ended), None) if seed is None else seed) not in ended:
            raise ValueError(f"cell {cell} has no run from seed {seed} that ended well; it has {list(ended)}")
        held = ended[chosen].series()
        if name not in held:
            raise ValueError(f"this run returned no series {name!r}; there are {', '.join(held) or 'none'}")
        return held[name]

    def difference(self, cell: int | str, metric: str) -> Paired:
        """The paired difference to the baseline over the seeds of which both have finite numbers.

        Two numbers that agree to twelve digits differ by 0: what is left is the order in which something was summed.
        """
        i = self.number(cell)
        own, other = self.values(i, metric), self.values(self._index["cells"][i]["baseline"], metric)
        both = {seed: (own[seed], other[seed]) for seed in own if seed in other}
        return paired(0.0 if math.isclose(a, b, rel_tol=1e-12) else a - b for a, b in both.values())

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
            own, done = paired(self.values(i, metric).values()), sum((i, s) in self._rows for s in self.seeds)
            base = self.labels[against[i]] if against[i] != i else None
            said = concluded(self.labels[i], base, own, done, d, p, tests, up)
            rows.append((own.n, own.mean, own.spread, d.mean, d.low, d.high, d.p, p, *said))
        columns = ["n", "mean", "spread", "difference", "low", "high", "p", "p_holm", "verdict", "sentence"]
        return pd.DataFrame(rows, columns=columns, index=pd.Index(self.labels, name="cell"))

    def interval(self, cell: int | str, metric: str) -> tuple[float, float, float]:
        """(low, mean, high) of a cell: its mean and the ends of its 95 % interval; NaN where they cannot be known."""
        own = paired(self.values(cell, metric).values())
        return own.low, own.mean, own.high

    def plot(self, metric: str = "accuracy", *, against: str = "seconds_per_step") -> Any:
        """A picture with its sentence: `metric` of every cell with its 95 % interval, and `against` beside it.

        Raises:  ValueError for a metric that is not there.
        """
        from mpkit.view.intervals import cost  # upward: pictures need matplotlib, and only here

        return cost(self, metric, against)

    def number(self, cell: int | str) -> int:
        """The number of a cell that is given by its label or number. Raises ValueError where there is none."""
        known: Any = self.labels if isinstance(cell, str) else range(len(self.labels))
        if cell not in known:
            raise ValueError(f"no cell {cell!r}; there are {'; '.join(self.labels)}, numbered from 0")
        return int(known.index(cell))

    def _ended(self, cell: int | str) -> dict[int, Row]:
        """Seed -> run, of the runs of a cell that ended well."""
        number = self.number(cell)
        return {seed: row for (i, seed), row in self._rows.items() if i == number and not row.error}


def _paths(index: Mapping[str, Any], folder: Path) -> dict[tuple[int, int], Path]:
    """(number of the cell, seed) -> where its run lies, in order."""
    numbered = enumerate(index["cells"])
    return {(i, s): path_of(folder, c["cell"], s, index["code"]) for i, c in numbered for s in index["seeds"]}
