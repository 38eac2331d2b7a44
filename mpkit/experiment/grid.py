"""A grid of cells: every combination, a name for each, and the cell that each is compared with."""

from __future__ import annotations

import inspect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from mpkit.arguments import check_kind, is_whole
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
    names: list[str] = []
    if isinstance(grid, Mapping) and grid and all(isinstance(cell, Mapping) for cell in grid.values()):
        names, grid = list(grid), list(grid.values())
        check_kind("the name of a cell", next((n for n in names if not isinstance(n, str)), ""), str, "a string")
    arguments = _combined(grid) if isinstance(grid, Mapping) else grid
    if not isinstance(arguments, Sequence) or not all(isinstance(cell, Mapping) for cell in arguments):
        raise TypeError(f"grid must be a dict of lists, a list of dicts or a dict of dicts, got {type(grid).__name__}")
    if not arguments:
        raise ValueError("the grid is empty; it needs at least one cell")
    for name in {name for cell in arguments for name in cell}:
        check_kind("the name of an argument", name, str, "a string")
        if name == "seed":
            raise ValueError("a grid must not set seed; give the seeds to experiment(..., seeds=[...])")
    described = [{name: describe(value) for name, value in cell.items()} for cell in arguments]
    times = Counter(map(canonical, described))
    for cell in described:
        if times[canonical(cell)] > 1:
            raise ValueError(f"the grid holds the cell {named(cell, list(cell))} twice; more runs of it are more seeds")
    return [Cell(dict(a), d, label) for a, d, label in zip(arguments, described, names or labels(described))]


def _combined(grid: Mapping[Any, Any]) -> list[dict[Any, Any]]:
    """Every combination of the values in a dict of lists."""
    for name, values in grid.items():
        if isinstance(values, Set | str | bytes | Mapping) or not isinstance(values, Iterable):
            raise TypeError(f"grid[{name!r}] must be a list of values, in an order, got {values!r}; write [...]")
    lists = {name: list(values) for name, values in grid.items()}
    many = math.prod(map(len, lists.values()))
    if not 0 < many <= MOST:
        raise ValueError(f"every list of the grid needs a value, and all together at most {MOST} cells, got {many}")
    return [dict(zip(lists, choice)) for choice in itertools.product(*lists.values())]


def seeds_of(seeds: object) -> list[int]:
    """The seeds, given as a list, or as how many.

    Raises:  TypeError, ValueError for what is none, twice the same, or too many.
    """
    given = range(min(seeds, MOST + 1)) if is_whole(seeds) else seeds
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"seeds must be how many, or a list of them, got {seeds!r}")
    found = list(given)
    if not all(map(is_whole, found)):
        raise TypeError(f"seeds are whole numbers, got {found}")
    if not 0 < len(set(found)) == len(found) <= MOST or not 0 <= min(found) <= max(found) < 2**64:
        need = f"from 1 to {MOST}, or a list of different whole numbers from 0 and below 2**64"
        raise ValueError(f"seeds must be {need}, got {seeds!r:.80}")
    return [int(seed) for seed in found]


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
    count, names = len(cells), [cell.label for cell in cells]
    if isinstance(baseline, str):
        if baseline not in names:
            raise ValueError(f"the baseline must be one of the cells {'; '.join(names)}, got {baseline!r}")
        return [names.index(baseline)] * count
    if baseline is None or is_whole(baseline):
        if not 0 <= (number := baseline or 0) < count:
            raise ValueError(f"baseline must be a cell's number from 0 to {count - 1}, got {baseline}")
        return [number] * count
    if not isinstance(baseline, Mapping):
        raise TypeError(f"baseline must be None, a cell's number or a dict of arguments, got {type(baseline).__name__}")
    wanted = {name: describe(value) for name, value in baseline.items()}
    asked = named(wanted, list(wanted))
    place = {canonical(cell.described): i for i, cell in enumerate(cells) if wanted.items() <= cell.described.items()}
    if not place:
        raise ValueError(f"no cell of the grid has {asked}; the baseline must be one of the cells")
    found = []
    for cell in cells:
        own = place.get(canonical({**cell.described, **wanted}))
        if own is None and len(place) > 1:
            several = f"{len(place)} cells have {asked} and none of them is like {cell.label} otherwise"
            raise ValueError(f"{several}; name more arguments of the baseline")
        found.append(next(iter(place.values())) if own is None else own)
    return found


def check_call(run: Callable[..., Any], cells: Sequence[Cell]) -> None:
    """Every cell can be passed to `run`.

    Raises:  TypeError otherwise, before anything runs.
    """
    if not callable(run):
        raise TypeError(f"run must be a function run(seed=..., **cell), got {type(run).__name__}")
    inner, given, fixed = (run.func, run.args, run.keywords) if isinstance(run, partial) else (run, (), {})
    try:
        signature = inspect.signature(inner)
    except (TypeError, ValueError):
        return  # a built-in tells it when it is called
    for cell in cells:
        try:
            signature.bind(*given, **{**fixed, "seed": 0, **cell.arguments})
        except TypeError as error:
            raise TypeError(f"run{signature} cannot be called as run(seed=..., {cell.label}): {error}") from None
