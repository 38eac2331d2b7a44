"""A lenient reader of answers: what a reader may write for a number, a name or a list, and what it means."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Set, ValuesView
from fractions import Fraction
from typing import Any

TINY = Fraction(1, 2**1200)
"""What stands for a number so small that a float calls it 0: no format has a value near it."""
HUGE = 1 / TINY
"""What stands for a number so large that a float calls it inf."""
_RAISED = "⁻⁺⁰¹²³⁴⁵⁶⁷⁸⁹"
_DECIMAL = r"(\d+(?:\.\d+)?)"
_EXPONENT = r"([+-]?\d{1,4}|\([+-]?\d{1,4}\)|\{[+-]?\d{1,4}\})"
_PLAIN = str.maketrans(_RAISED + "−", "-+0123456789-")
_POWER = re.compile(rf"\s*([+-]?)\s*(?:{_DECIMAL}\s*[·×x*]\s*)?{_DECIMAL}\s*(?:\^|\*\*)\s*{_EXPONENT}\s*")


def read_number(text: str) -> float:
    """A number as a reader types it: "0.1", "1e-5", "1/3", "2^-14", "3 x 10^-8", "inf", "nan"; the nearest float.

    Signs that are copied from a lesson are read too, as in "−2⁻¹⁴".

    Raises:  ValueError, with examples, for anything else.

    >>> read_number("2^-14"), read_number("2⁻¹⁴"), read_number("1/3")
    (6.103515625e-05, 6.103515625e-05, 0.3333333333333333)
    """
    return read_exactly(text)[0]


def read_exactly(text: str) -> tuple[float, Fraction]:
    """(the nearest float, the number itself); 0 beside what is written inf or NaN. Raises ValueError as `read_number`.

    >>> read_exactly("1e-400")[0], read_exactly("0.1")[1]
    (0.0, Fraction(1, 10))
    """
    given, text = text, re.sub(f"([{_RAISED}]+)", r"^\1", text).translate(_PLAIN)
    power = _POWER.fullmatch(text)
    try:
        if power:
            exact = Fraction(power[2] or 1) * Fraction(power[3]) ** int(power[4].strip("(){}"))
            sign = -1 if power[1] == "-" else 1
            return sign * nearest(exact), sign * exact
        if "/" in text:
            return nearest(Fraction(text)), Fraction(text)
        near = float(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"write a number such as 0.1, 1e-5, 1/3 or 2^-14, got {given!r}") from None
    if not math.isfinite(near):
        huge = HUGE if re.search("[0-9]", text) else Fraction(0)  # not read exactly either
        return near, huge if near > 0 else -huge
    if near == 0:  # not read exactly: the exponent may be huge
        some = re.search("[1-9]", re.split("[eE]", text)[0]) is not None
        return near, some * (TINY if math.copysign(1, near) > 0 else -TINY)
    if repr(near) == text.strip() and _float32(near) == near:  # what the bits print stands for their value
        return near, Fraction(near)
    return near, Fraction(text.strip())


def nearest(exact: Fraction) -> float:
    """The nearest float; float() itself refuses what lies beyond the largest."""
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def plain(value: object) -> Any:
    """Tensors, arrays, sets, ranges, and the keys and values of a dict as numbers and lists."""
    if isinstance(value, list | tuple | Set | range | ValuesView):
        return [plain(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value


def has_float32(value: object) -> bool:
    """Whether it is a tensor or number of torch's or NumPy's float32, or a list with one."""
    if isinstance(value, list | tuple):
        return any(map(has_float32, value))
    return str(getattr(value, "dtype", "")).endswith("float32")


def alone(value: object, wanted: object) -> Any:
    """The one value of a list, also of a list in a list, where no list is wanted."""
    while isinstance(value, list) and len(value) == 1 and not isinstance(wanted, list | tuple):
        value = value[0]
    return value


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
    """An answer as the truth is written: names out of one text or a dict, a float32 for the number that it rounds."""
    short, value = has_float32(given), alone(plain(given), truth)
    if short and isinstance(truth, float) and abs(truth) < 2.0**128 and value == _float32(truth):
        return truth  # the float32 number nearest to it: an answer in float32 cannot be nearer
    if isinstance(truth, list) and isinstance(value, str):
        parts = [part for part in re.findall(r"[\w.]+", value) if part != "and"]
        value = parts if len(truth) > 1 else [value.strip(" []()")]  # one may hold a comma
    pairs = [list(pair) for pair in value.items()] if isinstance(value, Mapping) else value
    if _is_names(truth) and isinstance(pairs, list) and pairs:
        named = all(isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (str, int) for pair in pairs)
        value = [one for one, mark in pairs if mark is not False] if named else value
    return value


def same(value: Any, truth: Any, rel: float) -> bool:
    """Whether a read answer is right; names and whole numbers in a list count in any order, not so True and False."""
    if isinstance(truth, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(truth):
            return False
        pairs = (sorted(value, key=name), sorted(truth, key=name)) if _is_names(truth) else (value, truth)
        return all(same(a, b, rel) for a, b in zip(*pairs))
    if isinstance(truth, str | bool):
        return name(value) == name(truth)
    found = number(value)
    if found is None:
        return False
    return (math.isnan(found) and math.isnan(truth)) or math.isclose(found, truth, rel_tol=rel)


def aside(value: object, truth: object, rel: float) -> str:
    """A word on an answer of another kind than is asked for, or on a share in percent without the sign; often none."""
    if isinstance(truth, bool):
        return "" if name(value) in ("true", "false") else f"True or False is asked for, got {value!r:.60}. "
    if isinstance(truth, str):
        more = isinstance(value, str) and len(value.split()) > len(truth.split())
        return f"Only the word itself is asked for, got {value!r:.60}. " if more else ""
    if isinstance(truth, list) and not isinstance(value, list):
        return f'A list is asked for, such as [1, 2] or ["a", "b"], got {value!r:.60}. '
    if isinstance(truth, int | float) and number(value) is None:
        return f"A number is asked for, such as 0.1, 1e-5, 1/3 or 2^-14, got {value!r:.60}. "
    if isinstance(truth, float) and 0 < truth < 1 and same(value, 100 * truth, rel):
        return f"If that is meant in percent, its sign is missing: write '{number(value):g} %' in quotes. "
    power = math.log2(truth) if isinstance(truth, int | float) and 0 < truth < math.inf else 0.5
    if type(value) is int and power.is_integer() and abs(power) > 3 and value == 2 ^ int(power):
        return "If you wrote a power with ^: in Python the sign ^ is no power. Write 2**n, or the power in quotes. "
    return ""


def _is_names(truth: object) -> bool:
    return isinstance(truth, list) and all(type(part) in (str, int) for part in truth)


def _float32(value: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)
