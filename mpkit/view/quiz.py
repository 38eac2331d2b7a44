"""What a lesson asks: predictions, questions and a task, whose words and answers stand in `lessons/<topic>.toml`.

    [predict.search]              [question.descent]           [task]
    ask = "..."                   ask = "..."                  ask = "..."
    right = "b"                   truth = 14                   right = "..."
    choices = [                   right = "{truth}: ..."       hint = "..."
      ["answer", "a word"],       hint = "..."                 cases = [[[8.0, 0, true], [8.0, 1]]]
    ]                             hints = [[15, "..."]]        rel = 1e-9

A topic of several lessons has `[tasks.NAME]`. {linear = [16, 48]} in a case is a linear layer of these sizes.
The wrong answer of a hint is a value, or {above = , below = } for numbers, and for how many there are in a list.
Each truth is computed a second way in `tests/unit/lessons/test_<topic>.py`.
"""

from __future__ import annotations

import copy
import dis
import math
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from torch import nn

from mpkit.view.answers import alone, aside, number, plain, precision, read, same
from mpkit.view.words import raised, topics, words


def predict(topic: str, name: str) -> Any:
    """A widget with a button for every answer; the first press is the prediction, further ones tell of the others.

    Stored on a page it is the question and its answers: what is right is said to nobody who has not pressed.

    Raises:  ValueError for a topic or prediction that does not exist.
    """
    from mpkit.view.page import Note

    note = predicted(topic, name)
    return Note(stored="\n  ".join([f"Predict: {note['ask']}", *note["answers"]]), note=note)


def predicted(topic: str, name: str) -> dict[str, Any]:
    """What a page needs of a prediction: the question, its answers, what is told after each first and last press."""
    asked = _of(topic, "predict", name)
    letters = "abcdefgh"[: len(asked["choices"])]
    answers = [f"({letter}) {raised(text)}" for letter, (text, _) in zip(letters, asked["choices"])]
    says = [[told(asked, first, now) for now in letters] for first in letters]
    return {"ask": raised(asked["ask"]), "answers": answers, "says": says}


def told(prediction: Mapping[str, Any], first: str, now: str) -> str:
    """What is said when `now` was chosen, and `first` was the first choice of all: the truth, to whoever predicted."""
    right = prediction["right"]
    tells = {letter: raised(word) for letter, (_, word) in zip("abcdefgh", prediction["choices"])}
    if now != first:
        return f"Your prediction was ({first}). Of ({now}): {'right. ' if now == right else ''}{tells[now]}"
    if now == right:
        return f"You predicted ({now}), and so it is. {tells[now]}"
    return f"You predicted ({now}). {tells[now]} It is ({right}). {tells[right]}"


def answer(topic: str, name: str, value: object = None) -> None:
    """Check one answer and print a sentence; without a value, print the question.

    Raises:  ValueError for a topic or question that does not exist.
    """
    print(verdict(topic, name, value)[1])


def judge(topic: str, function: Callable[..., Any], name: str = "") -> None:
    """Run the function that the reader of a lesson wrote on all cases of its task, and print a sentence.

    A topic of several lessons has several tasks, each with a name.

    Raises:  TypeError if it is no function; ValueError for a topic without a task.
    """
    if not callable(function):
        raise TypeError(f"judge needs the function that you wrote, got {function!r}: leave its parentheses out")
    print(raised(judged(_of(topic, "tasks" if name else "task", name), function)[1]))


def _of(topic: str, kind: str, name: str = "") -> dict[str, Any]:
    entries = words(topic).get(kind, {})
    found = entries.get(name) if name else entries
    if not found:
        there = f"{topic} has the {kind}s {', '.join(entries)}" if entries else f"topics are {', '.join(topics())}"
        raise ValueError(f"there is no {kind} {name!r} of {topic!r}; {there}")
    return found


def verdict(topic: str, name: str, value: object = None) -> tuple[bool | None, str]:
    """(right or wrong or None when nothing was answered, the sentence)."""
    question = _of(topic, "question", name)
    if value is None:
        return None, f"Question: {raised(question['ask'])}"
    truth, rel = question["truth"], precision(value, question.get("rel", 1e-9))
    given = read(value, truth)
    if same(given, truth, rel):
        return True, "Right. " + raised(question["right"].format(truth=truth))
    for wrong, sentence in question.get("hints", ()):
        if _meant(given, wrong, rel):
            return False, "Not yet. " + raised(sentence)
    return False, f"Not yet. {aside(given, truth, rel)}{raised(question['hint'])}"


def _meant(given: Any, wrong: Any, rel: float) -> bool:
    """Whether an answer is the wrong one that a hint is for."""
    if not isinstance(wrong, Mapping):
        return same(given, wrong, rel)
    found = len(given) if isinstance(given, list) else number(given)
    return found is not None and wrong.get("above", -math.inf) < found < wrong.get("below", math.inf)


def judged(task: Mapping[str, Any], function: Callable[..., Any]) -> tuple[bool | None, str]:
    """(right or wrong or None while nothing is written, the sentence) for a function on all cases of a task."""
    for k, (given, expected) in enumerate(task["cases"]):
        arguments = [nn.Linear(*one["linear"]) if isinstance(one, Mapping) else one for one in given]
        call = f"{getattr(function, '__name__', 'it')}({', '.join(map(_shown, arguments))})"
        try:
            found = function(*copy.deepcopy(arguments))
        except Exception as error:  # the reader's own code: whatever it raises is told, not raised again
            return False, f"Not yet. {call} raised {type(error).__name__}: {error}"
        if found is None and k == 0 and _unwritten(function):
            return None, f"Write it yourself: {task['ask']}"
        got = alone(found, expected)
        if not same(got, expected, precision(found, task.get("rel", 1e-9)), strict=True):
            none = ", as a function without return does" if got is None else ""
            return False, f"Not yet. {call} must give {_shown(expected)}, and gave {_shown(got)}{none}. {task['hint']}"
    return True, f"Right, in all {len(task['cases'])} cases. {task['right']}"


def _unwritten(function: Callable[..., Any]) -> bool:
    """Whether its body is still empty: it begins, and returns a constant."""
    code = getattr(function, "__code__", None)
    return code is not None and len(list(dis.get_instructions(code))) <= 3


def _shown(value: object) -> str:
    value = plain(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return f"{value:.10g}" if isinstance(value, float) else repr(value)


def on_screen(figures: object) -> Any:
    """Show a DataFrame, or a text, of live figures in the browser; what is stored is one sentence without them.

    Returns a widget, so a cell ends with it, or calls IPython's `display` on it.
    """
    from mpkit.view.page import Note

    as_html = getattr(figures, "_repr_html_", None)  # of which a head without words, in the corner, would be read out
    shown = as_html().replace("<th></th>", "<td></td>") if as_html else f"<pre>{escape(str(figures))}</pre>"
    return Note(stored="Run this cell: the figures of your machine then stand here.", note={"figures": shown})
