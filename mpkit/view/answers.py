"""A lenient reader of answers: what a reader may write for a number, a name or a list, and what it means."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Set, ValuesView
from fractions import Fraction
from typing import Any

_RAISED = "⁻⁺⁰¹²³⁴⁵⁶⁷⁸⁹"
_PLAIN = str.maketrans(_RAISED + "−", "-+0123456789-")
_DECIMAL = r"(\d+(?:\.\d+)?)"
_POWER = re.compile(rf"([+-]?)\s*(?:{_DECIMAL}\s*[·×x*]\s*)?{_DECIMAL}\s*(?:\^|\*\*)\s*[({{]?([+-]?\d{{1,4}})[)}}]?")


def read_number(text: str) -> float:
    """A number as a reader types it: "0.1", "1e-5", "1/3", "2^-14", "3 x 10^-8", "inf", "nan"; the nearest float.

    Signs that are copied from a lesson are read too, as in "−2⁻¹⁴".

    Raises:  ValueError, with examples, for anything else.

    >>> read_number("2^-14"), read_number("2⁻¹⁴"), read_number("1/3")
    (6.103515625e-05, 6.103515625e-05, 0.3333333333333333)
    """
    shown = re.sub(f"([{_RAISED}]+)", r"^\1", text).translate(_PLAIN).strip()
    try:
        if power := _POWER.fullmatch(shown):
            sign, times, base, exponent = power.groups()
            return float(Fraction(sign + (times or "1")) * Fraction(base) ** int(exponent))
        return float(Fraction(*map(Fraction, shown.split("/")))) if "/" in shown else float(shown)
    except OverflowError:  # float() of a fraction refuses what lies beyond the largest
        return -math.inf if shown.startswith("-") else math.inf
    except (TypeError, ValueError, ZeroDivisionError):
        raise ValueError(f"write a number such as 0.1, 1e-5, 1/3 or 2^-14, got {text!r}") from None


def plain(value: object) -> Any:
    """Tensors, arrays, sets, ranges, and the keys and values of a dict as numbers and lists."""
    if isinstance(value, list | tuple | Set | range | ValuesView):
        return [plain(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value


def alone(value: object, wanted: object) -> Any:
    """The same, and the one value of a list, also of a list in a list, where no list is wanted."""
    value = plain(value)
    while isinstance(value, list) and len(value) == 1 and not isinstance(wanted, list):
        value = value[0]
    return value


def precision(value: object, rel: float) -> float:
    """How near an answer has to come: less near if it holds float32, of some dozen roundings."""
    parts = value if isinstance(value, list | tuple) else [value]
    return max(rel, 1e-5) if any(str(getattr(part, "dtype", "")).endswith("float32") for part in parts) else rel


def number(value: Any) -> float | None:
    """A number, also one in quotes such as "65,504", "0xc000", "2⁻²⁴", "1/4" or "25 %"; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        if not isinstance(value, str):
            return float(value)
        value = value.lstrip(" '\"\n").rstrip(" .'\"\n")
        share, text = 0.01 if value.endswith("%") else 1.0, value.removesuffix("%")
        if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?", text):  # 65,536, as lessons write it
            text = text.replace(",", "")
        return share * (float(int(text, 0)) if re.match(r"[+-]?0[xbo]", text, re.I) else read_number(text))
    except (TypeError, ValueError, OverflowError):
        return None


def name(value: object) -> str:
    """A name as a reader gives it: "float32", torch.float32, a class of that name, or math.nan for "nan"."""
    found = str(getattr(value, "__name__", value)).strip(" .'\"\n").lower().removeprefix("torch.")
    return re.sub(r"(?<=\w)[_-](?=\w)", " ", found)


def read(given: object, truth: Any) -> Any:
    """An answer as the truth is written: names out of one text or a dict."""
    value = alone(given, truth)
    if isinstance(truth, list) and isinstance(value, str):
        parts = [part for part in re.findall(r"[\w.]+", value) if part != "and"]
        return parts if len(truth) > 1 else [value.strip(" []()")]  # one may hold a comma
    if _is_names(truth) and isinstance(value, Mapping):
        return [key for key, mark in value.items() if mark is not False]
    return value


def same(value: Any, truth: Any, rel: float, strict: bool = False) -> bool:
    """Whether a read answer is right; names and whole numbers in a list count in any order, not so True and False.

    What a function returns is judged `strict`: in its order, and with a number not in quotes.
    """
    if isinstance(truth, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(truth):
            return False
        any_order = _is_names(truth) and not strict
        pairs = (sorted(value, key=name), sorted(truth, key=name)) if any_order else (value, truth)
        return all(same(a, b, rel, strict) for a, b in zip(*pairs))
    if strict and isinstance(value, str) and not isinstance(truth, str):
        return False
    if isinstance(truth, str | bool):
        value = bool(value) if strict and isinstance(value, int) else value  # what Python takes for one
        return name(value) in (name(truth), {"True": "yes", "False": "no"}.get(str(truth)))
    found = number(value)
    return found is not None and (math.isclose(found, truth, rel_tol=rel) or (found != found and truth != truth))  # NaN


def aside(value: object, truth: object, rel: float) -> str:
    """A word on an answer of another kind than is asked for, or on a share in percent without the sign; often none.

    Of verdicts, a list of True and False alone, it says how many are right.
    """
    kinds = {  # of the truth -> does the answer fit, what is asked for
        bool: (name(value) in ("true", "false", "yes", "no"), "True or False is"),
        str: (len(str(value).split()) <= len(str(truth).split()), "Only the word itself is"),
        list: (isinstance(value, list), 'A list, such as [1, 2] or ["a", "b"], is'),
    }
    fits, asked = kinds.get(type(truth), (number(value) is not None, "A number, such as 0.1, 1e-5, 1/3 or 2^-14, is"))
    if not fits:
        return f"{asked} asked for, got {value!r:.60}. "
    if isinstance(truth, list) and isinstance(value, list) and truth and len(value) == len(truth):
        verdicts = [(aside(a, b, rel), same(a, b, rel)) for a, b in zip(value, truth) if isinstance(b, bool)]
        right = f"{sum(fits for _, fits in verdicts)} of {len(truth)} are right. " * bool(verdicts)
        return next((word for word, _ in verdicts if word), right)
    if isinstance(truth, float) and 0 < truth < 1 and same(value, 100 * truth, rel):
        return f"If that is meant in percent, its sign is missing: write '{number(value):g} %' in quotes. "
    return ""


def _is_names(truth: object) -> bool:
    return isinstance(truth, list) and all(type(part) in (str, int) for part in truth)
