"""A grid of cells: every combination, a name for each, and the cell that each is compared with."""

from __future__ import annotations

import inspect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from mpkit.arguments import is_whole
from mpkit.experiment.identity import Description, canonical, name_of
from mpkit.experiment.store import MOST


@dataclass(frozen=True)
class Cell:
    """One point of the grid: the arguments as they are passed, as they are stored, and as they are called."""

    arguments: dict[str, Any]
    described: dict[str, Any]
    label: str


def cells_of(grid: Any, describe: Description) -> list[Cell]:
    """The cells of a grid, in order, each once.

    Args:    grid: a dict of lists (every combination), a list of dicts (these cells), or a dict of dicts (named cells).
    Raises:  TypeError, ValueError for another kind, an empty grid, a cell twice, or a value that cannot be stored.
    """
    are_named = isinstance(grid, Mapping) and len(grid) > 0 and all(isinstance(c, Mapping) for c in grid.values())
    names = list(grid) if are_named else []
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise TypeError(f"the names of cells are strings, got {wrong[0]!r}")
    arguments = _arguments(list(grid.values()) if names else grid)
    described = [{name: describe(value) for name, value in cell.items()} for cell in arguments]
    seen: set[str] = set()
    for cell in described:
        text = canonical(cell)
        if text in seen:
            raise ValueError(f"the grid holds the cell {named(cell, list(cell))} twice; more runs of it are more seeds")
        seen.add(text)
    return [Cell(a, d, label) for a, d, label in zip(arguments, described, names or labels(described))]


def _arguments(grid: object) -> list[dict[str, Any]]:
    if isinstance(grid, Mapping):
        for name, values in grid.items():
            if isinstance(values, Set):
                raise TypeError(
                    f"grid[{name!r}] must be a list, got a set, whose order and with it the baseline change from "
                    f"process to process; write {list(values)!r}"
                )
            if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable) or _is_scalar(values):
                raise TypeError(f"grid[{name!r}] must be a list of values, got {values!r}; write [{values!r}]")
        values = [list(v) for v in grid.values()]
        if not all(values):
            raise ValueError(
                f"every list of the grid needs a value; empty: {[n for n, v in zip(grid, values) if not v]}"
            )
        if (many := math.prod(map(len, values))) > MOST:
            raise ValueError(f"an experiment has at most {MOST} runs, and this grid has {many} cells")
        cells = [dict(zip(grid, choice)) for choice in itertools.product(*values)]
    elif isinstance(grid, Sequence) and not isinstance(grid, str) and all(isinstance(c, Mapping) for c in grid):
        cells = [dict(cell) for cell in grid]
    else:
        raise TypeError(f"grid must be a dict of lists, a list of dicts or a dict of dicts, got {type(grid).__name__}")
    if not cells:
        raise ValueError("the grid is empty; it needs at least one cell")
    for cell in cells:
        if wrong := [name for name in cell if not isinstance(name, str)]:
            raise TypeError(f"the names of arguments in a grid are strings, got {wrong[0]!r}")
        if "seed" in cell:
            raise ValueError("a grid must not set seed; give the seeds to experiment(..., seeds=[...])")
    return cells


def _is_scalar(values: object) -> bool:
    """Whether an array or a tensor is one number, over which nothing can be iterated."""
    return getattr(values, "ndim", 1) == 0


def labels(described: Sequence[Mapping[str, Any]]) -> list[str]:
    """What tells each cell from the others, in a few characters.

    >>> labels([{"level": "O0", "lr": 0.1}, {"level": "O2", "lr": 0.1}])
    ['level=O0', 'level=O2']
    """
    names = list(dict.fromkeys(name for cell in described for name in cell))
    texts = {name: {canonical(cell[name]) if name in cell else "" for cell in described} for name in names}
    varying = [name for name in names if len(texts[name]) > 1] or names
    found = [named(cell, varying) for cell in described]
    times, met = Counter(found), Counter[str]()
    for i, label in enumerate(found):
        if times[label] > 1:  # two functions of one name, say: number them
            met[label] += 1
            found[i] = f"{label} #{met[label]}"
    return found


def named(cell: Mapping[str, Any], names: Sequence[str]) -> str:
    """`name=value` for the names that the cell has."""
    return ", ".join(f"{name}={name_of(cell[name])}" for name in names if name in cell) or "(no arguments)"


def baselines(cells: Sequence[Cell], baseline: object, describe: Description) -> list[int]:
    """For each cell the number of the one that it is compared with.

    Args:    baseline: None for the first cell, a cell's number or name, or a dict of arguments. A cell is then compared
             with the cell that has these arguments and equals it in all others; where there is none, with the only
             cell that has these arguments.
    Raises:  TypeError, ValueError when there is no such cell.
    """
    described, count = [cell.described for cell in cells], len(cells)
    if baseline is None:
        return [0] * count
    if isinstance(baseline, str):
        names = [cell.label for cell in cells]
        if baseline not in names:
            raise ValueError(f"the baseline must be one of the cells {'; '.join(names)}, got {baseline!r}")
        return [names.index(baseline)] * count
    if is_whole(baseline):
        if not 0 <= baseline < count:
            raise ValueError(f"baseline must be a cell's number from 0 to {count - 1}, got {baseline}")
        return [baseline] * count
    if not isinstance(baseline, Mapping):
        raise TypeError(f"baseline must be None, a cell's number or a dict of arguments, got {type(baseline).__name__}")
    wanted = {name: describe(value) for name, value in baseline.items()}
    having = [
        i for i, cell in enumerate(described) if all(name in cell and cell[name] == v for name, v in wanted.items())
    ]
    if not having:
        raise ValueError(
            f"no cell of the grid has {named(wanted, list(wanted))}; the baseline must be one of the cells"
        )
    place = {canonical(described[i]): i for i in having}
    found = []
    for cell in described:
        own = place.get(canonical({**cell, **wanted}))
        if own is None and len(having) > 1:
            raise ValueError(
                f"{len(having)} cells have {named(wanted, list(wanted))} and none of them is like "
                f"{named(cell, list(cell))} otherwise; name more arguments of the baseline"
            )
        found.append(having[0] if own is None else own)
    return found


def check_call(run: Callable[..., Any], cells: Sequence[Cell]) -> None:
    """Every cell can be passed to `run`.

    Raises:  TypeError otherwise, before anything runs.
    """
    if not callable(run):
        raise TypeError(f"run must be a function run(seed=..., **cell), got {type(run).__name__}")
    try:
        signature = inspect.signature(run)
    except (TypeError, ValueError):
        return  # a built-in tells it when it is called
    for cell in cells:
        try:
            signature.bind(seed=0, **cell.arguments)
        except TypeError as error:
            raise TypeError(f"run{signature} cannot be called as run(seed=..., {cell.label}): {error}") from None
