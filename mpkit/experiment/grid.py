"""A grid of cells: every combination, a name for each, and the cell that each is compared with."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from mpkit.arguments import check_function, check_kind, is_whole
from mpkit.experiment.identity import canonical, described, name_of

MOST = 10**7  # seeds of one experiment


@dataclass(frozen=True)
class Cell:
    """One point of the grid: the arguments as they are passed, as they are stored, and as they are called."""

    arguments: dict[str, Any]
    described: dict[str, Any]
    label: str


def cells_of(grid: Any) -> list[Cell]:
    """The cells of a grid, in order, each once.

    Args:    grid: a dict of lists (every combination), a list of dicts (these cells), or a dict of dicts (named cells).
    Raises:  TypeError, ValueError for another kind, an empty grid, a cell twice, or a value that cannot be stored.
    """
    names: list[Any] = []
    if isinstance(grid, Mapping) and grid and all(isinstance(cell, Mapping) for cell in grid.values()):
        names, grid = list(grid), list(grid.values())
    if isinstance(grid, Mapping):
        lists = [[(name, held, described(held)) for held in _listed(name, grid[name])] for name in grid]
        chosen = list(itertools.product(*lists))
    elif isinstance(grid, Sequence) and all(isinstance(cell, Mapping) for cell in grid):
        chosen = [tuple((name, held, described(held)) for name, held in cell.items()) for cell in grid]
    else:
        raise TypeError(f"grid must be a dict of lists, a list of dicts or a dict of dicts, got {type(grid).__name__}")
    if not chosen:
        raise ValueError("the grid is empty; it needs at least one cell, and each of its lists a value")
    for name in {name for cell in chosen for name, *_ in cell} | {*names}:
        check_kind("the name of a cell or an argument", name, str, "a string")
        if name == "seed":
            raise ValueError("a grid must not set seed; give the seeds to experiment(..., seeds=[...])")
    told = [{name: text for name, _, text in cell} for cell in chosen]
    for text, times in Counter(map(canonical, told)).items():
        if times > 1:
            raise ValueError(f"the grid holds the cell {text} twice; more runs of it are more seeds")
    arguments = [{name: held for name, held, _ in cell} for cell in chosen]
    return list(map(Cell, arguments, told, names or labels(told)))


def _listed(name: str, values: Any) -> Iterable[Any]:
    if isinstance(values, Set | str | bytes | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"grid[{name!r}] must be a list of values, in an order, got {values!r}; write [...]")
    return values


def seeds_of(seeds: Any) -> list[int]:
    """The seeds, given as a list, or as how many.

    Raises:  TypeError, ValueError for what is none, twice the same, or too many.
    """
    found = list(range(min(seeds, MOST + 1)) if is_whole(seeds) else seeds)
    if not all(map(is_whole, found)):
        raise TypeError(f"seeds must be how many, or a list of whole numbers, got {seeds!r:.80}")
    if not 0 < len(set(found)) == len(found) <= MOST or not 0 <= min(found) <= max(found) < 2**64:
        raise ValueError(f"seeds must be 1 to {MOST} different whole numbers from 0 to 2**64 - 1, got {seeds!r:.80}")
    return [int(seed) for seed in found]


def labels(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What tells each cell from the others, in a few characters.

    >>> labels([{"level": "O0", "lr": 0.1}, {"level": "O2", "lr": 0.1}])
    ['level=O0', 'level=O2']
    """
    names = list(dict.fromkeys(name for cell in cells for name in cell))
    texts = {name: {canonical(cell[name]) if name in cell else "" for cell in cells} for name in names}
    varying = [name for name in names if len(texts[name]) > 1] or names
    found = [named({name: cell[name] for name in varying if name in cell}) for cell in cells]
    # of two functions of one name, say, the first is #1
    return [f"{text} #{found[: i + 1].count(text)}" if found.count(text) > 1 else text for i, text in enumerate(found)]


def named(cell: Mapping[str, Any]) -> str:
    """`name=value` for each argument."""
    return ", ".join(f"{name}={name_of(value)}" for name, value in cell.items()) or "(no arguments)"


def baselines(cells: Sequence[Cell], baseline: Any) -> list[int]:
    """For each cell the number of the one that it is compared with.

    Args:    baseline: None for the first cell, a cell's number or name, or a dict of arguments. A cell is then compared
             with the cell that has these arguments and equals it in all others; where there is none, with the only
             cell that has these arguments.
    Raises:  TypeError, ValueError when there is no such cell.
    """
    if not isinstance(baseline, Mapping):
        if not (baseline is None or is_whole(baseline)):
            check_kind("baseline", baseline, str, "None, a cell's name or number, or a dict of arguments")
        known: Any = [cell.label for cell in cells] if isinstance(baseline, str) else range(len(cells))
        if (chosen := 0 if baseline is None else baseline) not in known:
            raise ValueError(f"baseline must be one of {', '.join(map(str, known))}, got {baseline!r:.80}")
        return [known.index(chosen)] * len(cells)
    wanted = {name: described(value) for name, value in baseline.items()}
    place = {canonical(cell.described): i for i, cell in enumerate(cells) if wanted.items() <= cell.described.items()}
    found = [place.get(canonical({**cell.described, **wanted})) for cell in cells]
    if not place or (None in found and len(place) > 1):
        several = f"{len(place)} cells of the grid have {named(wanted)}"
        raise ValueError(
            f"{several}, and not each cell has one that is like it otherwise; name more or other arguments"
        )
    only = next(iter(place.values()))
    return [only if own is None else own for own in found]


def check_call(run: Callable[..., Any], cells: Sequence[Cell]) -> None:
    """Every cell can be passed to `run`.

    Raises:  TypeError otherwise, before anything runs.
    """
    check_function("run", run, "a function run(seed=..., **cell)")
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
