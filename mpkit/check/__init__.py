"""Questions at the end of a lesson, answered by code; the truth of each is computed, never written down.

A lesson's questions live in `mpkit/check/lesson_NN.py` as `QUESTIONS`, a dict from a short name to a `Question`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Question:
    """One question.

    Args:
        prompt:  what is asked, in one sentence, with the unit.
        truth:   computes the right answer (a number, string, bool, list or tuple).
        right:   the sentence for a right answer; `{truth}` is filled in.
        hint:    the sentence for a wrong answer without a hint of its own; does not give the answer away.
        hints:   pairs of a typical wrong answer (a value, or a predicate on the answer) and what it tells.
        rel:     relative tolerance for numbers; 0 asks for the exact value.
    """

    prompt: str
    truth: Callable[[], Any]
    right: str
    hint: str
    hints: Sequence[tuple[Any, str]] = ()
    rel: float = 1e-9


def answer(lesson: str, name: str, value: Any = None) -> None:
    """Check one answer and print a sentence; without a value, print the question.

    Raises:  ValueError for a lesson or question that does not exist.
    """
    print(verdict(lesson, name, value)[1])


def verdict(lesson: str, name: str, value: Any = None) -> tuple[bool | None, str]:
    """(right or wrong or None when nothing was answered, the sentence)."""
    questions = _questions(lesson)
    if name not in questions:
        raise ValueError(f"lesson {lesson} has the questions {', '.join(questions)}, got {name!r}")
    question = questions[name]
    if value is None:
        return None, f"Question: {question.prompt}"
    truth = question.truth()
    if _same(value, truth, question.rel):
        return True, "Right. " + question.right.format(truth=truth)
    for wrong, sentence in question.hints:
        if wrong(value) if callable(wrong) else _same(value, wrong, question.rel):
            return False, "Not yet. " + sentence
    return False, "Not yet. " + question.hint


def _questions(lesson: str) -> dict[str, Question]:
    try:
        return import_module(f"mpkit.check.lesson_{lesson}").QUESTIONS
    except ModuleNotFoundError as error:
        raise ValueError(f'there is no lesson {lesson!r} with questions; write two digits, as in "05"') from error


def _same(value: Any, truth: Any, rel: float) -> bool:
    if isinstance(truth, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(truth)
            and all(_same(a, b, rel) for a, b in zip(value, truth))
        )
    if isinstance(truth, str):
        return isinstance(value, str) and value.strip().lower() == truth.lower()
    if isinstance(truth, bool) or isinstance(value, bool | str):
        return value is truth or (isinstance(value, bool) and value == truth)
    try:
        number = float(value)
    except (TypeError, ValueError):
        return False
    return (math.isnan(number) and math.isnan(truth)) or math.isclose(number, truth, rel_tol=rel)
