"""What the tests of view sentences share: controls over their whole range, numbers read back, the rule in a loop."""

import re

import ml_dtypes
import numpy as np

from mpkit.explorers.base import Explorer

NARROW = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


def swept(explorer: Explorer, samples: int = 6, **only):
    """The explorer at its opening state, and with each control alone at values over its whole range."""
    opening = explorer.state()
    yield explorer
    for name in explorer.controls:
        trait = explorer.traits()[name]
        if name in only:
            values = only[name]
        elif getattr(trait, "values", None):
            values = trait.values
        elif hasattr(trait, "min"):
            values = sorted({type(trait.default_value)(v) for v in np.linspace(trait.min, trait.max, samples)})
        else:
            values = (True, False)
        for value in values:
            explorer.set(**opening | {name: value})
            yield explorer
    explorer.set(**opening)


def jointly(explorer: Explorer, count: int, **only):
    """The explorer at so many settings of all controls together, often at their ends; what it refuses is left out."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        wanted = {}
        for name in explorer.controls:
            trait = explorer.traits()[name]
            values = only.get(name) or getattr(trait, "values", None) or (True, False)
            if name not in only and hasattr(trait, "min"):
                kind = type(trait.default_value)
                ends = [trait.min, trait.max, trait.default_value]
                values = [*ends, kind(trait.min + 1), *map(kind, rng.uniform(trait.min, trait.max, 3))]
            wanted[name] = values[rng.integers(len(values))]
        try:
            explorer.set(**wanted)
        except ValueError:
            continue
        yield explorer


def in_percent(share: float, digits: int = 0) -> str:
    """As words: rounded, but only nothing is 0 and only all is 100."""
    unit = 10.0 ** -(2 + digits)
    if share in (0, 1):
        return f"{int(100 * share)} %"
    if share < unit or share > 1 - unit:
        return f"{'less' if share < unit else 'more'} than {100 * (unit if share < unit else 1 - unit):.{digits}f} %"
    return f"{100 * share:.{digits}f} %"


PERCENT = r"((?:(?:less|more) than )?[\d.]+) ?%"


def tells(text: str, share: float, digits: int = 0) -> bool:
    """Whether what stands before a percent sign tells this share (0 to 1): 0 is none of it, 100 is all."""
    least, found = 10.0**-digits, 100 * share
    if text.startswith("less than"):
        return 0 < found < 1.001 * least and float(text[10:]) == least
    if text.startswith("more than"):
        return 100 - 1.001 * least < found < 100 and float(text[10:]) == 100 - least
    if float(text) in (0, 100):
        return abs(found - float(text)) < 1e-9
    return abs(found - float(text)) <= 0.51 * least


def power(text: str) -> float:
    """2^17.75 and 0 as they stand in a sentence, as a number."""
    return 2.0 ** float(text[2:]) if text.startswith("2^") else float(text)


def read(pattern: str, explorer: Explorer) -> list[str]:
    found = re.search(pattern, explorer.summary())
    assert found, explorer.summary()
    return list(found.groups())


def ridden(tops, scale, factor, window, floor=0.0):
    """The scale of each step, by the rule in one loop; float32 as it is stored."""
    seen, good = [], 0
    for top in tops:
        seen.append(scale)
        if not scale <= top:
            scale, good = max(float(np.float32(scale / factor)), floor), 0
        elif (good := good + 1) == window:
            scale, good = float(np.float32(scale * factor)), 0
    return np.array(seen)


def zeroed(part, scales, rows=slice(None)):
    """Share of the non-zero values below half of float16's smallest number, spread evenly over their power of two."""
    counts = part.total()[rows].astype(float)
    reach = np.clip(-25 - np.log2(scales)[:, None] - np.asarray(part.exponents)[None], 0, 1)
    return (counts * reach).sum(1) / np.maximum(counts.sum(1), 1)
