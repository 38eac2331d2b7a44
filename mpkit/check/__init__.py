"""What a lesson asks and checks: predictions, questions, tasks, claims about a live training, figures for the screen.

They live in `mpkit/check/lesson_NN.py`: `PREDICTIONS` and `QUESTIONS`, dicts from a short name to a `Prediction` or a
`Question`, and `TASK`, a `Task`. A truth is computed wherever a computation can give it. The last digits of a live
training differ from machine to machine, so a lesson stores a `claim` that holds with a margin on all of them, and
`on_screen` shows the reader the digits themselves.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from numbers import Real
from types import ModuleType
from typing import Any

from mpkit.arguments import check_kind, check_number
from mpkit.check.task import alone as _alone
from mpkit.check.task import has_float32 as _has_float32
from mpkit.check.task import plain as _plain


@dataclass(frozen=True)
class Question:
    """One question.

    Args:
        prompt:  what is asked, in one sentence, with the unit.
        truth:   computes the right answer (a number, string, bool, list or tuple); names and whole numbers in a list
                 count in any order. An answer may be a tensor or an array, a name may be the thing that bears it (a
                 dtype, a class), and a number, True or False may stand in quotes, several names in one pair of them;
                 a dict, or a list of pairs, stands for the names that it does not mark False.
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


heard: list[Callable[[str, float, float, float], None]] = []
"""Called with (sentence, value, above, below) of every claim: how `tests/tools/other_machines.py` measures margins."""


def claim(sentence: str, value: Any, *, above: float = -math.inf, below: float = math.inf) -> None:
    """Print `sentence` if `value` (a number or a tensor of one) lies strictly between the bounds.

    Raises:  AssertionError with the sentence, the value and the bound if it does not; NaN lies between no bounds.
             TypeError if no bound is given.

    >>> claim("half of it is left", 0.48, above=0.4, below=0.6)
    half of it is left
    >>> claim("half of it is left", 0.7, above=0.4, below=0.6)
    Traceback (most recent call last):
    AssertionError: "half of it is left" does not hold here: 0.7 is not below 0.6
    """
    for name, bound in (("above", above), ("below", below)):
        check_kind(name, bound, Real, "a number")
        if math.isnan(bound if isinstance(bound, float) else check_number(name, bound, low=-math.inf)):
            raise ValueError(f"{name} must be a number, got nan")
    if above == -math.inf and below == math.inf:
        raise TypeError("a claim needs a bound: above=, below= or both")
    try:
        number = float(value)
    except (OverflowError, RuntimeError) as error:
        raise ValueError(f"a claim needs one number that fits a float, got {value!r:.60}") from error
    for listener in heard:
        listener(sentence, number, above, below)
    if not above < number:
        raise AssertionError(f'"{sentence}" does not hold here: {number:g} is not above {above:g}')
    if not number < below:
        raise AssertionError(f'"{sentence}" does not hold here: {number:g} is not below {below:g}')
    print(sentence)


def on_screen(figures: object) -> Any:
    """Show a DataFrame, or a text, of live figures in the browser; what is stored is one sentence without them.

    Returns a widget, so a cell ends with it, or calls IPython's `display` on it.
    """
    import html

    import ipywidgets as w

    class OnScreen(w.HTML):
        """HTML whose stored form is a sentence."""

        def __repr__(self) -> str:
            return "Run this cell: the figures of your machine then stand here."

    as_html = getattr(figures, "_repr_html_", None)
    if as_html:  # a head without words, in the corner, would be read out as one
        return OnScreen(as_html().replace("<th></th>", "<td></td>"))
    return OnScreen(f"<pre>{html.escape(str(figures))}</pre>")


def answer(lesson: str, name: str, value: object = None) -> None:
    """Check one answer and print a sentence; without a value, print the question.

    Raises:  ValueError for a lesson or question that does not exist.
    """
    print(verdict(lesson, name, value)[1])


def predict(lesson: str, name: str) -> Any:
    """A widget that asks for a prediction, and tells the truth to whoever has made one.

    Raises:  ValueError for a lesson or prediction that does not exist.
    """
    from mpkit.widgets.commit import Commit

    predictions = _of(lesson).PREDICTIONS
    if name not in predictions:
        raise ValueError(f"lesson {lesson} has the predictions {', '.join(predictions)}, got {name!r}")
    return Commit(predictions[name])


def judge(lesson: str, function: Callable[..., Any]) -> None:
    """Run the function that the reader of a lesson wrote on all cases of its task, and print a sentence.

    Raises:  TypeError if it is no function; ValueError for a lesson that does not exist.
    """
    if not callable(function):
        raise TypeError(f"judge needs the function that you wrote, got {function!r}: leave its parentheses out")
    print(_of(lesson).TASK.verdict(function, _same)[1])


def verdict(lesson: str, name: str, value: object = None) -> tuple[bool | None, str]:
    """(right or wrong or None when nothing was answered, the sentence)."""
    questions = _of(lesson).QUESTIONS
    if name not in questions:
        raise ValueError(f"lesson {lesson} has the questions {', '.join(questions)}, got {name!r}")
    question = questions[name]
    if value is None:
        return None, f"Question: {question.prompt}"
    truth = question.truth()
    short, value = _has_float32(value), _alone(_plain(value), truth)
    if short and isinstance(truth, float) and abs(truth) < 2.0**128 and value == _to_float32(truth):
        value = truth  # the float32 number nearest to it: an answer in float32 cannot be nearer
    if isinstance(truth, list) and isinstance(value, str):
        parts = [part for part in re.findall(r"[\w.]+", value) if part != "and"]
        value = parts if len(truth) > 1 else [value.strip(" []()")]  # one may hold a comma
    value = _names_of(value, truth)
    given = _in_any_order(value, truth)
    if _same(given, _in_any_order(truth, truth), question.rel):
        return True, "Right. " + question.right.format(truth=truth)
    for wrong, sentence in question.hints:
        if wrong(value) if callable(wrong) else _same(given, _in_any_order(wrong, truth), question.rel):
            return False, "Not yet. " + sentence
    words = _unread(value, truth) or _crossed(value, question, truth) or _percent(value, question, truth)
    return False, f"Not yet. {words}{question.hint}"


def _to_float32(number: float) -> float:
    return float(struct.unpack("f", struct.pack("f", number))[0])


def _unread(value: object, truth: object) -> str:
    """A word on an answer of another kind than is asked for: it may hold the truth in words."""
    if isinstance(truth, bool):
        return "" if _name(value) in ("true", "false") else f"True or False is asked for, got {value!r:.60}. "
    if isinstance(truth, str):
        more = isinstance(value, str) and len(value.split()) > len(truth.split())
        return f"Only the word itself is asked for, got {value!r:.60}. " if more else ""
    if isinstance(truth, list) and not isinstance(value, list):
        return f'A list is asked for, such as [1, 2] or ["a", "b"], got {value!r:.60}. '
    if isinstance(truth, int | float) and _number(value) is None:
        return f"A number is asked for, such as 0.1, 1e-5, 1/3 or 2^-14, got {value!r:.60}. "
    return ""


def _crossed(value: object, question: Question, truth: object) -> str:
    """A word on an answer that is what Python makes of a power as lessons write it: 2^20 is 22 there."""
    numbers = [n for n in (truth, *(wrong for wrong, _ in question.hints)) if type(n) in (int, float)]
    powers = [(2, n) for n in numbers if n < 0] if isinstance(truth, int) else []
    for base, log in ((2, math.log2), (10, math.log10)):
        powers += [(base, round(log(n))) for n in numbers if 0 < n < math.inf and log(n).is_integer()]
    if type(value) is not int or value not in [base ^ n for base, n in powers if abs(n) > 3]:
        return ""
    return "If you wrote a power with ^: in Python the sign ^ is no power. Write 2**n, or the power in quotes. "


def _percent(value: object, question: Question, truth: object) -> str:
    """A word on a share given in percent without the sign."""
    if not (isinstance(truth, float) and 0 < truth < 1 and _same(value, 100 * truth, question.rel)):
        return ""
    return f"If that is meant in percent, its sign is missing: write '{_number(value):g} %' in quotes. "


def _is_names(truth: object) -> bool:
    """Whether it is a list of names or whole numbers: True and False have an order."""
    return isinstance(truth, list) and all(type(part) in (str, int) for part in truth)


def _names_of(value: object, truth: object) -> object:
    """The names of a dict, or of pairs (name, anything), without those marked False; anything else as it is."""
    pairs = [list(pair) for pair in value.items()] if isinstance(value, Mapping) else value
    if not (_is_names(truth) and isinstance(pairs, list) and pairs):
        return value
    named = all(isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (str, int) for pair in pairs)
    return [name for name, mark in pairs if mark is not False] if named else value


def _in_any_order(value: object, truth: object) -> object:
    """A list of names or whole numbers is right in any order, and may be a set; one of True and False is not."""
    if _is_names(truth) and isinstance(value, list):
        return sorted(value, key=_name)
    return value


def _of(lesson: str) -> ModuleType:
    try:
        return import_module(f"mpkit.check.lesson_{lesson}")
    except ModuleNotFoundError as error:
        raise ValueError(f'there is no lesson {lesson!r} with questions; write two digits, as in "05"') from error


def _name(value: object) -> str:
    """A name as a reader gives it: "float32", torch.float32, a class of that name, or math.nan for "nan"."""
    name = str(getattr(value, "__name__", value)).strip(" .'\"\n").lower().removeprefix("torch.")
    return re.sub(r"(?<=\w)[_-](?=\w)", " ", name)


def _number(value: Any) -> float | None:
    """A number, also one in quotes such as "65,504", "0xc000", "2⁻²⁴", "1/4" or "25 %"; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        if not isinstance(value, str):
            return float(value)
        from mpkit.view.answers import read_number  # its module needs packages that a question does not

        value = value.lstrip(" '\"\n").rstrip(" .'\"\n")
        share, text = 0.01 if value.endswith("%") else 1.0, value.removesuffix("%")
        if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?", text):  # 65,536, as lessons write it
            text = text.replace(",", "")
        return share * (float(int(text, 0)) if re.match(r"[+-]?0[xbo]", text, re.I) else read_number(text))
    except (TypeError, ValueError, OverflowError):
        return None


def _same(value: Any, truth: Any, rel: float) -> bool:
    if isinstance(truth, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(truth)
            and all(_same(a, b, rel) for a, b in zip(value, truth))
        )
    if isinstance(truth, str | bool):
        return _name(value) == _name(truth)
    number = _number(value)
    if number is None:
        return False
    return (math.isnan(number) and math.isnan(truth)) or math.isclose(number, truth, rel_tol=rel)
