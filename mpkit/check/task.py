"""A task: two to ten lines that the reader writes, judged on cases whose results the library computes."""

from __future__ import annotations

import copy
import dis
from collections.abc import Callable, Iterable, Set, ValuesView
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """What a lesson lets its reader write.

    Args:
        prompt:  what the function gets and must return.
        cases:   computes pairs of the arguments (a tuple) and the right result.
        right:   the sentence when all cases agree.
        hint:    the sentence beside the first case that differs.
        rel:     relative tolerance for numbers.
    """

    prompt: str
    cases: Callable[[], Iterable[tuple[tuple[Any, ...], Any]]]
    right: str
    hint: str
    rel: float = 1e-9

    def verdict(self, function: Callable[..., Any], same: Callable[[Any, Any, float], bool]) -> tuple[bool | None, str]:
        """(right or wrong or None while nothing is written, the sentence)."""
        name = getattr(function, "__name__", "it")
        for number, (arguments, expected) in enumerate(self.cases()):
            call = f"{name}({', '.join(_shown(a) for a in arguments)})"
            try:
                found = function(*copy.deepcopy(arguments))
                got = alone(plain(found), expected)
                rel = max(self.rel, 1e-5 if has_float32(found) else 0.0)  # of some dozen roundings
            except Exception as error:  # the reader's own code: whatever it raises is told, not raised again
                return False, f"Not yet. {call} raised {type(error).__name__}{_said(error)}"
            if got is None and number == 0 and _unwritten(function):
                return None, f"Write it yourself: {self.prompt}"
            if _quoted(got, expected) or not same(got, plain(expected), rel):
                both = [_shown(expected), _shown(got)]
                both = both if both[0] != both[1] else [repr(plain(expected)), repr(got)]  # they differ in later digits
                none = ", as a function without return does" if got is None else ""
                return False, f"Not yet. {call} must give {both[0]}, and gave {both[1]}{none}. {self.hint}"
        return True, f"Right, in all {number + 1} cases. {self.right}"


def plain(value: object) -> Any:
    """Tensors, arrays, sets, ranges, and the keys and values of a dict as numbers and lists."""
    if isinstance(value, list | tuple | Set | range | ValuesView):
        return [plain(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value


def alone(value: object, wanted: object) -> Any:
    """The one value of a list, also of a list in a list, where no list is wanted."""
    while isinstance(value, list) and len(value) == 1 and not isinstance(wanted, list | tuple):
        value = value[0]
    return value


def _unwritten(function: Callable[..., Any]) -> bool:
    """Whether its body is still empty: it begins, and returns a constant."""
    code = getattr(function, "__code__", None)
    return code is not None and len(list(dis.get_instructions(code))) <= 3


def _quoted(got: object, expected: object) -> bool:
    """Whether a text stands where none is expected: a reader may write "0.5" or "True", a function may not."""
    if isinstance(got, list) and isinstance(expected, list | tuple):
        return any(map(_quoted, got, expected))
    return isinstance(got, str) and not isinstance(expected, str)


def has_float32(value: object) -> bool:
    """Whether it is a tensor or number of torch's or NumPy's float32, or a list with one."""
    if isinstance(value, list | tuple):
        return any(map(has_float32, value))
    return str(getattr(value, "dtype", "")).endswith("float32")


def _said(error: Exception) -> str:
    """What an error of the reader's says, if it says anything: its own words may raise, too."""
    try:
        words = str(error)
    except Exception:
        return ""
    return f": {words}" if words else ""


def _shown(value: object) -> str:
    value = plain(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return repr(value)
