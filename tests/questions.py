"""What the two tables of ten questions share: a question is answered by setting controls and reading the view."""

import re
from collections.abc import Callable
from typing import Any

Reading = str | Callable[[Any], bool]
Table = dict[str, list[tuple[str, Any, dict[str, Any], Callable[[Any], Any] | None, Reading]]]
"""lesson -> (question, view, settings, what is done in the picture, reading)"""


def cases(table: Table) -> tuple[list[tuple[Any, ...]], list[str]]:
    """The cases of a table without their questions, and their names."""
    every = [(lesson, *case) for lesson, questions in table.items() for case in questions]
    return [case[2:] for case in every], [f"{case[0]}: {case[1]}" for case in every]


def answer(view: Any, settings: dict[str, Any], done: Callable[[Any], Any] | None, reading: Reading) -> None:
    """Set the controls, do what is done in the picture, and look for the reading; Reset undoes all of it."""
    explorer = view()
    before = explorer.state()
    explorer.set(**settings)
    if done:
        done(explorer)
    said = explorer.summary()
    assert reading(explorer) if callable(reading) else re.search(reading, said), said
    explorer.reset()
    assert explorer.state() == before
