"""What a lesson asks: predictions, questions and a task, whose words and answers stand in `lessons/<topic>.toml`.

    [predict.search]              [question.descent]           [task]
    ask = "..."                   ask = "..."                  ask = "..."
    right = "b"                   truth = 14                   right = "..."
    choices = [                   right = "{truth}: ..."       hint = "..."
      ["answer", "a word"],       hint = "..."                 cases = [[[8.0, 0, true], [8.0, 1]]]
    ]                             hints = [[15, "..."]]        rel = 1e-9

A topic of several lessons has `[tasks.NAME]`. {linear = [16, 48]} in a case is a linear layer of these sizes.
The wrong answer of a hint is a value, or {above = , below = } for numbers, or {more_than = } or {fewer_than = } items.
Each truth is computed a second way in `tests/unit/lessons/test_<topic>.py`.
"""

from __future__ import annotations

import copy
import dis
import math
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from mpkit.view.answers import alone, aside, number, plain, precision, read, same
from mpkit.view.words import topics, words


def predict(topic: str, name: str) -> Any:
    """A widget that asks for a prediction, and tells the truth to whoever has made one.

    Raises:  ValueError for a topic or prediction that does not exist.
    """
    from mpkit.view.commit import Commit

    return Commit(_of(topic, "predict", name))


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
    print(judged(_of(topic, "tasks" if name else "task", name), function)[1])


def _of(topic: str, kind: str, name: str = "") -> dict[str, Any]:
    found = words(topic)
    if not found:
        raise ValueError(f"there is no topic {topic!r} with words; topics are {', '.join(topics())}")
    entries = found.get(kind, {})
    if name and name not in entries:
        raise ValueError(f"{topic} has the {kind}s {', '.join(entries)}, got {name!r}")
    if not entries:
        raise ValueError(f"{topic} has no {kind}")
    return entries[name] if name else entries


def verdict(topic: str, name: str, value: object = None) -> tuple[bool | None, str]:
    """(right or wrong or None when nothing was answered, the sentence)."""
    question = _of(topic, "question", name)
    if value is None:
        return None, f"Question: {question['ask']}"
    truth, rel = question["truth"], precision(value, question.get("rel", 1e-9))
    given = read(value, truth)
    if same(given, truth, rel):
        return True, "Right. " + question["right"].format(truth=truth)
    for wrong, sentence in question.get("hints", ()):
        if _meant(given, wrong, rel):
            return False, "Not yet. " + sentence
    return False, f"Not yet. {aside(given, truth, rel)}{question['hint']}"


def _meant(given: Any, wrong: Any, rel: float) -> bool:
    """Whether an answer is the wrong one that a hint is for."""
    if not isinstance(wrong, Mapping):
        return same(given, wrong, rel)
    if {"more_than", "fewer_than"} & wrong.keys():
        many = len(given) if isinstance(given, list | tuple) else -1
        return many >= 0 and wrong.get("more_than", -1) < many < wrong.get("fewer_than", math.inf)
    found = number(given)
    return found is not None and wrong.get("above", -math.inf) < found < wrong.get("below", math.inf)


def judged(task: Mapping[str, Any], function: Callable[..., Any]) -> tuple[bool | None, str]:
    """(right or wrong or None while nothing is written, the sentence) for a function on all cases of a task."""
    for k, (given, expected) in enumerate(task["cases"]):
        arguments = [_layer(one) for one in given]
        call = f"{getattr(function, '__name__', 'it')}({', '.join(map(_shown, arguments))})"
        try:
            found = function(*copy.deepcopy(arguments))
        except Exception as error:  # the reader's own code: whatever it raises is told, not raised again
            return False, f"Not yet. {call} raised {type(error).__name__}: {error}"
        if found is None and k == 0 and _unwritten(function):
            return None, f"Write it yourself: {task['ask']}"
        got = alone(found, expected)
        if not same(got, expected, precision(found, task.get("rel", 1e-9)), strict=True):
            both = [_shown(expected), _shown(got)]
            both = both if both[0] != both[1] else [repr(expected), repr(got)]  # they differ in later digits
            none = ", as a function without return does" if got is None else ""
            return False, f"Not yet. {call} must give {both[0]}, and gave {both[1]}{none}. {task['hint']}"
    return True, f"Right, in all {len(task['cases'])} cases. {task['right']}"


def _layer(given: Any) -> Any:
    """The linear layer that {linear = [inputs, outputs]} stands for; anything else as it is."""
    if not isinstance(given, Mapping) or "linear" not in given:
        return given
    from torch import nn  # heavy, and for one lesson's task alone

    return nn.Linear(*given["linear"])


def _unwritten(function: Callable[..., Any]) -> bool:
    """Whether its body is still empty: it begins, and returns a constant."""
    code = getattr(function, "__code__", None)
    return code is not None and len(list(dis.get_instructions(code))) <= 3


def _shown(value: object) -> str:
    value = plain(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def on_screen(figures: object) -> Any:
    """Show a DataFrame, or a text, of live figures in the browser; what is stored is one sentence without them.

    Returns a widget, so a cell ends with it, or calls IPython's `display` on it.
    """
    import ipywidgets as w

    class OnScreen(w.HTML):
        """HTML whose stored form is a sentence."""

        def __repr__(self) -> str:
            return "Run this cell: the figures of your machine then stand here."

    as_html = getattr(figures, "_repr_html_", None)
    if as_html:  # a head without words, in the corner, would be read out as one
        return OnScreen(as_html().replace("<th></th>", "<td></td>"))
    return OnScreen(f"<pre>{escape(str(figures))}</pre>")
