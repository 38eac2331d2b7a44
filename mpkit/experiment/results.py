"""What an experiment found: every run as a row, every cell beside its baseline with an interval and a sentence."""

from __future__ import annotations

import math
import os
import re
import shutil
import statistics
import tempfile
import weakref
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from mpkit.arguments import check_count
from mpkit.experiment.identity import name_of
from mpkit.experiment.statistics import Paired, holm, mean_of, paired, student_quantile
from mpkit.experiment.store import INDEX, Folder, Row, cell_key, index_text
from mpkit.files import check_growth, regular, short, write_whole
from mpkit.record import Trace

if TYPE_CHECKING:
    import pandas as pd

_ALWAYS = ("cell", "seed", "run_seconds", "alone", "error")  # columns of every frame
_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{12}\.npz")  # of the file of a run
UP = ("accuracy", "score", "auc", "bleu", "speed", "per_second")
DOWN = ("loss", "error", "second", "memory", "skipped", "perplexity")


def _unpack(path: Path, to: Path) -> None:
    """The files of a zip file that `Results.save` made; names and sizes are looked at before anything is written."""
    try:
        with zipfile.ZipFile(regular(path)) as file:
            check_growth(file)
            if strange := [n for n in file.namelist() if n != INDEX and not _NAME.fullmatch(n)]:
                raise ValueError(f"it holds {strange[0]!r:.80}, which no experiment writes")
            file.extractall(to)
    except FileNotFoundError:
        raise
    except Exception as error:  # zip files raise a dozen kinds of errors
        raise ValueError(f"{path} is damaged or no zip file of an experiment: {short(error)}") from error


class Temporary:
    """A folder that ends with the last of the results whose files lie in it: copies and parts of them count."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def __deepcopy__(self, memo: object) -> Temporary:
        return self

    def __reduce__(self) -> tuple[type[Path], tuple[str]]:  # in a pickle: another process ends nothing here
        return Path, (str(self.path),)


class Results:
    """The runs of an experiment, of this call or of earlier ones with the same code.

    Args:
        index:   what was asked for: cells with labels and baselines, seeds, jobs.
        rows:    the finished runs.
        folder:  where they lie.
        stopped: whether the call ended before all was done.
    """

    def __init__(self, index: Mapping[str, Any], rows: Sequence[Row], *, folder: Path, stopped: bool = False) -> None:
        if not (isinstance(index, Mapping) and {"cells", "seeds"} <= set(index)):
            raise TypeError(f"index must be a dict with the keys 'cells' and 'seeds', got {index!r:.100}")
        self.labels: list[str] = [cell["label"] for cell in index["cells"]]
        self.seeds: list[int] = list(index["seeds"])
        self.folder, self.stopped = folder, stopped
        self.held: Temporary | None = None
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
            unpacked = Path(tempfile.mkdtemp(prefix="mpkit-experiment-"))
            try:
                _unpack(Path(folder), unpacked)
                results = cls.load(unpacked)
            except BaseException:
                shutil.rmtree(unpacked, ignore_errors=True)
                raise
            results.held = Temporary(unpacked)
            return results
        place = Folder(folder)
        index = place.read_index()
        if not index:
            raise FileNotFoundError(f"no experiment in {place.path}; experiment(run, grid, folder=...) makes one")
        stems = [f"{cell_key(c['cell'], s)}-{index['code']}" for c in index["cells"] for s in index["seeds"]]
        there = place.names()
        rows = [row for stem in stems if stem in there and (row := place.read(stem)) is not None]
        return cls(index, rows, folder=place.path)

    def first(self, seeds: int) -> Results:
        """What would be known if only the first `seeds` seeds had been run.

        Raises:  TypeError, ValueError unless it is a whole number from 1 to the number of seeds.
        """
        count = check_count("seeds", seeds)
        if count > len(self.seeds):
            raise ValueError(f"seeds must be at most {len(self.seeds)}, the number that was run, got {count}")
        index, rows = {**self._index, "seeds": self.seeds[:count]}, list(self._rows.values())
        part = Results(index, rows, folder=self.folder, stopped=self.stopped)
        part.held = self.held
        return part

    def save(self, path: str | os.PathLike[str]) -> None:
        """One zip file of these runs and no others, whole or not at all, to keep or to send; `Results.load` opens it.

        Raises:  ValueError unless the name ends in .zip.
        """
        if Path(path).suffix != ".zip":
            raise ValueError(f"the name must end in .zip, so that load recognises the file, got {path}")
        files = {f"{row.stem}.npz": row.folder for row in self._rows.values()}
        held = {name: regular(home / name).read_bytes() for name, home in files.items()}
        held[INDEX] = index_text(self._index).encode()

        def pack(open_: IO[bytes]) -> None:
            with zipfile.ZipFile(open_, "w") as file:
                for name in sorted(held):  # stamped without the time, so that equal runs give an equal file
                    file.writestr(zipfile.ZipInfo(name), held[name], zipfile.ZIP_DEFLATED)

        write_whole(Path(path), pack)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        failed = sum(bool(row.error) for row in self._rows.values())
        open_ = len(self.labels) * len(self.seeds) - len(self)
        text = f"{len(self)} runs of {len(self.labels)} cells from {len(self.seeds)} seeds"
        return text + (f", {failed} failed" if failed else "") + (f", {open_} not run yet" if open_ else "")

    @property
    def metrics(self) -> list[str]:
        """Names of all numbers that a run returned."""
        return list(dict.fromkeys(name for row in self._rows.values() for name in row.numbers))

    @property
    def note(self) -> str:
        """What to know before trusting the numbers: how times were taken, what failed or is missing."""
        said = []
        beside = sum(not row.alone for row in self._rows.values())
        if beside:
            said.append(
                f"Times cannot be compared: {beside} of {len(self)} runs had other runs beside them; use n_jobs=1."
            )
        elif len(self):
            said.append(
                "Runs were made one at a time, and the cells of each seed in random order, so times can be compared."
            )
        failed = [key for key, row in self._rows.items() if row.error]
        if failed:
            said.append(f"{len(failed)} of {len(self)} runs failed; `.failures` has their tracebacks.")
        missing = len(self.labels) * len(self.seeds) - len(self)
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
        rows = [self._line(at, arguments, metrics) for at in self._order()]
        columns = ["cell", *arguments.values(), "seed", *metrics.values(), "run_seconds", "alone", "error"]
        return pd.DataFrame(rows, columns=columns)

    @property
    def failures(self) -> dict[tuple[str, int], str]:
        """(cell, seed) -> traceback of every failed run."""
        return {(self.labels[i], s): self._rows[i, s].error for i, s in self._order() if self._rows[i, s].error}

    def values(self, cell: int | str, metric: str) -> dict[int, float]:
        """Seed -> number, of the runs of a cell that ended well; NaN and inf included.

        Raises:  ValueError for a metric that no run returned, or an unknown cell.
        """
        if metric not in self.metrics and metric != "run_seconds":
            raise ValueError(f"no run returned {metric!r}; there are {', '.join(self.metrics) or 'no numbers at all'}")
        i = self.number(cell)
        ended = [s for s in self.seeds if (i, s) in self._rows and not self._rows[i, s].error]
        values = {s: self._value((i, s), metric) for s in ended}
        return {s: v for s, v in values.items() if v is not None}

    def series(self, cell: int | str, name: str, seed: int | None = None) -> np.ndarray:
        """A series of the run of a cell from a seed (None: the first seed that is there).

        Raises:  ValueError for a run that is not there, failed, or returned no such series.
        """
        row = self._row(cell, seed)
        held = row.series()
        if name not in held:
            raise ValueError(f"this run returned no series {name!r}; there are {', '.join(held) or 'none'}")
        return held[name]

    def trace(self, cell: int | str, seed: int | None = None) -> Trace:
        """The trace of the run of a cell from a seed (None: the first seed that is there)."""
        return self._row(cell, seed).load_trace()

    def difference(self, cell: int | str, metric: str, baseline: int | str | None = None) -> Paired | None:
        """The paired difference to the baseline over the seeds that both have; None where they share no finite one.

        Two numbers that agree to twelve digits differ by 0: what is left is the order in which something was summed.
        """
        i = self.number(cell)
        j = self._index["cells"][i]["baseline"] if baseline is None else self.number(baseline)
        own, other = self.values(i, metric), self.values(j, metric)
        both = [0.0 if math.isclose(own[s], other[s], rel_tol=1e-12) else own[s] - other[s] for s in own if s in other]
        finite = [d for d in both if math.isfinite(d)]
        return paired(finite) if finite else None

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

        cells = range(len(self.labels))
        against = [cell["baseline"] for cell in self._index["cells"]]
        found = [None if against[i] == i else self.difference(i, metric) for i in cells]
        corrected = holm([math.nan if d is None else d.p for d in found])
        comparisons = sum(not math.isnan(p) for p in corrected)
        up = direction(metric) if higher_is_better is None else higher_is_better
        rows = []
        for i in cells:
            finite = [v for v in self.values(i, metric).values() if math.isfinite(v)]
            d, nothing = found[i], (math.nan,) * 4
            difference, low, high, p = nothing if d is None else (d.mean, d.low, d.high, d.p)
            mean, spread = mean_of(finite) if finite else math.nan, _spread(finite)
            said = self._said(i, against[i], metric, d, corrected[i], comparisons, up)
            rows.append((len(finite), mean, spread, difference, low, high, p, corrected[i], *said))
        columns = ["n", "mean", "spread", "difference", "low", "high", "p", "p_holm", "verdict", "sentence"]
        return pd.DataFrame(rows, columns=columns, index=pd.Index(self.labels, name="cell"))

    def interval(self, cell: int | str, metric: str) -> tuple[float, float, float]:
        """(low, mean, high) of a cell: its mean and the ends of its 95 % interval; NaN where they cannot be known."""
        finite = [v for v in self.values(cell, metric).values() if math.isfinite(v)]
        mean, half = mean_of(finite) if finite else math.nan, math.nan
        if len(finite) > 1:
            half = student_quantile(0.975, len(finite) - 1) * _spread(finite) / math.sqrt(len(finite))
        return mean - half, mean, mean + half

    def plot(
        self, metric: str = "accuracy", *, against: str = "seconds_per_step", kind: str = "cost", cells: Any = None
    ) -> Any:
        """A picture with its sentence.

        Args:    kind: "cost" is `metric` of every cell with its 95 % interval, and over `against`; "curves" the series
                 `metric`, all seeds; "scales" the loss scale. cells: up to five for the latter two; None: all.
        Raises:  ValueError for another kind, too many cells, or a metric that is not there.
        """
        from mpkit.view import intervals as pictures  # upward: pictures need matplotlib, and only here

        if kind == "cost":
            return pictures.cost(self, metric, against)
        if kind not in ("curves", "scales"):
            raise ValueError(f"kind is cost, curves or scales, got {kind!r}")
        return pictures.curves(self, "scale" if kind == "scales" else metric, cells)

    def _said(
        self, i: int, j: int, metric: str, d: Paired | None, corrected: float, comparisons: int, up: bool | None
    ) -> tuple[str, str]:
        """Verdict and sentence on a cell."""
        numbers = self.values(i, metric)
        finite = [v for v in numbers.values() if math.isfinite(v)]
        done = sum((i, s) in self._rows for s in self.seeds)
        lost = done - len(finite)
        left_out = f" {lost} of {done} runs gave no finite number and are left out." if lost and finite else ""
        if not finite:
            return "no number", f"{self.labels[i]}: none of {_runs(done)} gave a finite number."
        if i == j:
            return (
                "baseline",
                f"{self.labels[i]}: the baseline, {mean_of(finite):.4g} in {_seeds(len(finite))}.{left_out}",
            )
        return _verdict(self.labels[i], self.labels[j], d, corrected, comparisons, up, left_out)

    def _order(self) -> list[tuple[int, int]]:
        return [(i, s) for i in range(len(self.labels)) for s in self.seeds if (i, s) in self._rows]

    def _line(self, at: tuple[int, int], arguments: Mapping[str, str], metrics: Mapping[str, str]) -> dict[str, Any]:
        row, cell = self._rows[at], self._index["cells"][at[0]]["cell"]
        plain = (type(None), int, float, str)
        shown = {arguments[k]: v if isinstance(v, plain) else name_of(v) for k, v in cell.items()}
        numbers = {title: value for name, title in metrics.items() if (value := self._value(at, name)) is not None}
        tail = {"seed": at[1], "run_seconds": row.seconds, "alone": row.alone, "error": row.error}
        return {"cell": self.labels[at[0]], **shown, **numbers, **tail}

    def _value(self, at: tuple[int, int], metric: str) -> float | None:
        return self._rows[at].seconds if metric == "run_seconds" else self._rows[at].numbers.get(metric)

    def number(self, cell: int | str) -> int:
        """The number of a cell that is given by its label or number. Raises ValueError where there is none."""
        if isinstance(cell, str):
            if cell not in self.labels:
                raise ValueError(f"no cell {cell!r}; there are {'; '.join(self.labels)}")
            return self.labels.index(cell)
        if not 0 <= cell < len(self.labels):
            raise ValueError(f"cells are numbered 0 to {len(self.labels) - 1}, got {cell}")
        return cell

    def _row(self, cell: int | str, seed: int | None) -> Row:
        i = self.number(cell)
        seeds = [s for s in self.seeds if (i, s) in self._rows and not self._rows[i, s].error]
        if (seed is None and not seeds) or (seed is not None and seed not in seeds):
            raise ValueError(f"{self.labels[i]} has no run from seed {seed} that ended well; it has {seeds}")
        return self._rows[i, seeds[0] if seed is None else seed]


def direction(metric: str) -> bool | None:
    """Whether more of a metric is better, as far as its name tells.

    >>> direction("accuracy"), direction("final_loss"), direction("loss_scale")
    (True, False, None)
    """
    if "scale" in metric:
        return None
    if any(word in metric for word in UP):
        return True
    return False if any(word in metric for word in DOWN) else None


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan


def _runs(count: int) -> str:
    return f"{count} run{'s' * (count != 1)}"


def _seeds(count: int) -> str:
    return f"{count} seed{'s' * (count != 1)}"


def _verdict(
    label: str, base: str, d: Paired | None, corrected: float, comparisons: int, up: bool | None, left_out: str
) -> tuple[str, str]:
    if d is None:
        return "no comparison", f"{label}: no seed gave a finite number both here and in {base}.{left_out}"
    if d.n == 1:
        text = (
            f"{label}: {d.mean:+.3g} against {base} in the one seed that both have, which may be chance; "
            "run 5 seeds or more."
        )
        return "one seed", text + left_out
    interval = f"{d.mean:+.3g} against {base} (95 % interval {d.low:+.3g} to {d.high:+.3g}, {_seeds(d.n)})"
    words = {True: ("better", "worse"), False: ("worse", "better"), None: ("higher", "lower")}[up]
    word = words[d.mean < 0]
    if corrected < 0.05:
        among = f", also after the correction for {comparisons} comparisons" if comparisons > 1 else ""
        return word, f"{label}: {word}, {interval}{among}.{left_out}"
    more = (
        "over a thousand more seeds" if d.more is None else f"about {d.more} more {'seed' if d.more == 1 else 'seeds'}"
    )
    if d.p < 0.05:
        why = f"{word} if it were the only comparison, but not after the correction for {comparisons} (Holm)"
        return "not distinguishable", f"{label}: {why}: {interval}.{left_out}"
    if d.spread == 0:
        return "not distinguishable", f"{label}: equal to {base} in every one of {_seeds(d.n)}.{left_out}"
    take = f"a difference of this size would take {more} to show" if d.more != 0 else "more seeds would show it"
    return "not distinguishable", f"{label}: not distinguishable, {interval}; {take}.{left_out}"
