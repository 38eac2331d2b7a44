"""The words of a topic, `mpkit/lessons/<topic>.toml`, and small words for numbers."""

from __future__ import annotations

import math
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

FLOAT32_MAX = 2.0**128 * (1 - 2.0**-24)
LESSONS = Path(__file__).parents[1] / "lessons"
_RAISED = str.maketrans("-.0123456789", "⁻·⁰¹²³⁴⁵⁶⁷⁸⁹")


@cache
def words(topic: str) -> dict[str, Any]:
    """The words of a topic, by its name or that of its module; none for a view that stands elsewhere."""
    package, _, name = topic.rpartition(".")
    file = LESSONS / f"{name}.toml"
    if package not in ("", "mpkit.lessons") or not file.is_file():
        return {}
    return tomllib.loads(file.read_text(encoding="utf-8"))


def topics() -> list[str]:
    """The names of all topics that have words."""
    return sorted(path.stem for path in LESSONS.glob("*.toml"))


def counted(number: int, noun: str) -> str:
    """A count and its noun.

    >>> counted(1, "step"), counted(2, "step")
    ('1 step', '2 steps')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def capital(text: str) -> str:
    """With a capital first letter; names such as GPT stay as they are."""
    return text[:1].upper() + text[1:]


def raised(text: str) -> str:
    """Words with every 2^n in superscript digits, as both pictures show them."""
    return re.sub(r"\b2\^(-?[\d.]*\d)", lambda found: "2" + found[1].translate(_RAISED), text)


def power_of_two(power: float) -> str:
    """2^n in superscript digits.

    >>> power_of_two(-14), power_of_two(0.5)
    ('2⁻¹⁴', '2⁰·⁵')
    """
    return raised(f"2^{power:g}")


def exponent(value: float) -> str:
    """2^n for tables and sentences; 0 and inf as they are.

    >>> exponent(1024.0), exponent(1000.0), exponent(0.0)
    ('2^10', '2^9.966', '0')
    """
    if value <= 0 or not math.isfinite(value):
        return f"{value:g}"
    return "float32 max" if value == FLOAT32_MAX else f"2^{math.log2(value):.4g}"


def short(value: float) -> str:
    """Three digits without an exponent where they are read as a number; a power of two from a million on.

    >>> short(0.03921), short(2567.0), short(2.0**24)
    ('0.0392', '2570', '2^24')
    """
    return exponent(value) if value >= 1e6 else f"{float(f'{value:.3g}'):g}"
