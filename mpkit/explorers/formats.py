"""Models of lesson 01: the bits of a number, the ranges of all formats, and where recorded gradients lie in them."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from traitlets import Enum, Float, Int, Unicode

from mpkit.arguments import is_whole
from mpkit.data import data_dir
from mpkit.explorers.base import Explorer, stroke
from mpkit.formats import FORMATS, Fields, FloatFormat, get_format
from mpkit.plots.scene import power_of_two
from mpkit.record import Trace
from mpkit.replay.percent import percent
from mpkit.rounding import round_to, ulp

NAMES = [name for name in FORMATS if name != "fp64"]


TINY = Fraction(1, 2**1200)
"""What stands for a number so small that a float calls it 0: no format has a value near it."""
HUGE = 1 / TINY
"""What stands for a number so large that a float calls it inf."""


_RAISED = "⁻⁺⁰¹²³⁴⁵⁶⁷⁸⁹"
_DECIMAL = r"(\d+(?:\.\d+)?)"
_EXPONENT = r"([+-]?\d{1,4}|\([+-]?\d{1,4}\)|\{[+-]?\d{1,4}\})"
_PLAIN = str.maketrans(_RAISED + "−", "-+0123456789-")


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
    power = re.fullmatch(rf"\s*([+-]?)\s*(?:{_DECIMAL}\s*[·×x*]\s*)?{_DECIMAL}\s*(?:\^|\*\*)\s*{_EXPONENT}\s*", text)
    try:
        if power:
            exact = Fraction(power[2] or 1) * Fraction(power[3]) ** int(power[4].strip("(){}"))
            sign = -1 if power[1] == "-" else 1
            return sign * _nearest(exact), sign * exact
        if "/" in text:
            return _nearest(Fraction(text)), Fraction(text)
        near = float(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"write a number such as 0.1, 1e-5, 1/3 or 2^-14, got {given!r}") from None
    if not math.isfinite(near):
        huge = HUGE if re.search("[0-9]", text) else Fraction(0)  # not read exactly either
        return near, huge if near > 0 else -huge
    if near == 0:  # not read exactly: the exponent may be huge
        some = re.search("[1-9]", re.split("[eE]", text)[0]) is not None
        return near, some * (TINY if math.copysign(1, near) > 0 else -TINY)
    if repr(near) == text.strip() and float(np.float32(near)) == near:  # what the bits print stands for their value
        return near, Fraction(near)
    return near, Fraction(text.strip())


def _nearest(exact: Fraction) -> float:
    """The nearest float; float() itself refuses what lies beyond the largest."""
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def to_odd(near: float, exact: Fraction) -> float:
    """A float from which any narrower format is rounded as from the number itself: where a float does not hold it, the
    one of its two neighbours whose last bit is odd.

    Source:  S. Boldo and G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding
             to odd", IEEE Transactions on Computers 57 (2008) 462.
    """
    if not math.isfinite(near) or Fraction(near) == exact or Fraction(near) / Fraction(math.ulp(near)) % 2:
        return near
    return math.nextafter(near, math.inf if exact > Fraction(near) else -math.inf)


def store(value: float, fmt: FloatFormat) -> int:
    """The pattern of a number in a format, rounded to nearest even, overflow by the format's own rule."""
    return int(fmt.encode(round_to(torch.tensor(value, dtype=torch.float64), fmt)))


def value_of(pattern: int, fmt: FloatFormat) -> float:
    """The value of one pattern."""
    return float(fmt.decode(torch.tensor(pattern)))


def neighbour(pattern: int, fmt: FloatFormat, up: bool) -> int | None:
    """The pattern of the next larger or smaller value; None beyond the ends and at NaN."""
    sign = 1 << (fmt.bits - 1)
    fields = fmt.fields(pattern)
    if fields.kind == "nan":
        return None
    magnitude = pattern & (sign - 1)
    if magnitude == 0:
        return 1 if up else sign + 1
    beside = (magnitude + 1 if up != bool(fields.sign) else magnitude - 1) + fields.sign * sign
    return None if fmt.fields(beside % (2 * sign)).kind == "nan" or (beside ^ pattern) & sign else beside


def short(value: float | None, digits: int = 7) -> str:
    """A number in at most so many significant digits: 7 tell apart the values of 16 bits, 9 those of float32."""
    return "none" if value is None else f"{value:.{digits}g}"


class BitsExplorer(Explorer):
    """A number, its bits in one format, its neighbours, and what becomes of it in every other format."""

    controls = ("fmt", "number", "pinned", "gap_before")
    actions = {"Next value up": "up", "Next value down": "down", "Change sign": "negate"}
    gestures = ("toggle", "shift_to")
    ahead = ("number", "toggle", "shift_to")
    nearest: ClassVar[int] = 60
    """How many values on each side of the number the picture shows at most."""
    fmt = Enum(NAMES, "fp16").tag(label="format")
    number = Unicode("0.1").tag(label="number")
    pinned = Enum(["none", *NAMES], "bf16").tag(label="a second format beneath")
    gap_before = Float(0.0, min=0.0, max=2.0**120).tag(hidden=True)
    """One ulp of the number before, to be seen beside the one of now; 0 where there was none. The largest is bf16's."""

    format: FloatFormat
    pattern: int
    fields: Fields

    def set(self, **params: object) -> None:
        """Another number or format leaves its gap as the one before. Raises as `Explorer.set`."""
        with self.lock:
            moved = self.revision and {"fmt", "number"} & params.keys()
            super().set(**({"gap_before": self.memory} if moved else {}) | params)

    def compute(self) -> None:
        self.format = get_format(self.fmt)
        self.wanted, self.pattern = self._read()
        self.fields = self.format.fields(self.pattern)
        self.value = value_of(self.pattern, self.format)
        ends = [neighbour(self.pattern, self.format, up) for up in (False, True)]
        self.below, self.above = (None if p is None else value_of(p, self.format) for p in ends)
        finite = self.fields.value is not None
        self.gap = float(ulp(torch.tensor(self.value, dtype=torch.float64), self.format)) if finite else math.nan
        self.memory = self.gap if finite else 0.0
        self.binades = np.arange(self.format.min_subnormal_exponent, self.format.max_exponent + 1)
        self.teeth = [(int(e), min(2, bits_kept(self.format, int(e)) - 1)) for e in self.binades]
        if finite:
            self._look_around()

    def _look_around(self) -> None:
        """`window`: what the number line shows. `near`, `pinned_near`: (values of the format there, the stored one).

        The window is as wide for an odd as for the even exponent field below it, so that flipping the last bit of the
        exponent doubles the gaps that the reader sees.
        """
        half = 20 * self.gap / (2 if self.fields.exponent > 1 and self.fields.exponent % 2 else 1)
        self.window = self.value - half, self.value + half
        self.near = self._values_within(self.format)
        self.pinned_near = ([], math.nan) if self.pinned == "none" else self._values_within(get_format(self.pinned))

    def _values_within(self, fmt: FloatFormat) -> tuple[list[float], float]:
        low, high = self.window
        wanted = min(max(self.wanted, -fmt.max), fmt.max)
        shown = min(max(self.wanted, low), high)  # what is asked for may lie far outside
        first = store(min(max(shown, -fmt.max), fmt.max), fmt)
        values = [value_of(first, fmt)]
        for up in (False, True):
            pattern: int | None = first
            end = len(values) + self.nearest
            while (pattern := neighbour(pattern, fmt, up)) is not None and len(values) < end:  # type: ignore[arg-type]
                value = value_of(pattern, fmt)
                if not low <= value <= high:
                    break
                values.append(value)
        return sorted(v for v in values if low <= v <= high), value_of(store(wanted, fmt), fmt)

    def _read(self) -> tuple[float, int]:
        """The number asked for and its pattern; nan(0x7e01) stands for one particular NaN."""
        payload = re.fullmatch(r"nan\((0x[0-9a-f]+)\)", self.number)
        wanted, self.exact = (math.nan, Fraction(0)) if payload else read_exactly(self.number)
        if math.isnan(wanted) and not self.format.has_nan:
            raise ValueError(f"{self.fmt} has no NaN; choose another format or another number")
        if payload:
            pattern = int(payload[1], 16)
            if pattern < 2**self.format.bits and self.format.fields(pattern).kind == "nan":
                return wanted, pattern
        return wanted, store(to_odd(wanted, self.exact), self.format)

    def bit(self, index: int) -> int:
        """The value of one bit; bit 0 is the last of the fraction."""
        return self.pattern >> index & 1

    def toggle(self, index: int) -> None:
        """Flip one bit. Raises ValueError for a bit that the format does not have."""
        if not (is_whole(index) and 0 <= index < self.format.bits):
            raise ValueError(f"{self.fmt} has bits 0 to {self.format.bits - 1}, got {index!r:.80}")
        self._show(self.pattern ^ 1 << index)

    def shift_to(self, _step: int, exponent: float) -> None:
        """Keep the fraction and move to another power of two. Raises ValueError where there is none to keep."""
        if not self.value or not math.isfinite(self.value):
            raise ValueError(f"{self.value} has no power of two; choose a number")
        low, high = self.format.min_subnormal_exponent, self.format.max_exponent
        power = round(stroke({0: exponent}, 1, low, high)[0])
        self.set(number=repr(math.ldexp(self.value, power - math.floor(math.log2(abs(self.value))))))

    def up(self) -> None:
        """Go to the next larger value."""
        self._move(True)

    def down(self) -> None:
        """Go to the next smaller value."""
        self._move(False)

    def negate(self) -> None:
        """Flip the sign bit."""
        self.toggle(self.format.bits - 1)

    def _move(self, up: bool) -> None:
        beside = neighbour(self.pattern, self.format, up)
        if beside is None:
            raise ValueError(f"there is no {'larger' if up else 'smaller'} value in {self.fmt}")
        self._show(beside)

    def _show(self, pattern: int) -> None:
        value = value_of(pattern, self.format)
        self.set(number=f"nan({pattern:#x})" if math.isnan(value) else repr(value))

    def bit_string(self) -> str:
        """Sign, exponent and fraction, separated by spaces."""
        bits = f"{self.pattern:0{self.format.bits}b}"
        return f"{bits[0]} {bits[1 : 1 + self.format.exponent_bits]} {bits[1 + self.format.exponent_bits :]}"

    def formula(self) -> str:
        """How the three fields make the value, and of what kind it is."""
        fields, fmt = self.fields, self.format
        if fields.kind in ("inf", "nan"):
            ones = "exponent" if fmt.has_inf else "exponent and fraction"
            return f"{ones} all ones: {'infinity' if fields.kind == 'inf' else 'not a number'}"
        lead, power = (1, fields.exponent - fmt.bias) if fields.exponent else (0, fmt.min_exponent)
        sign = "−" if fields.sign else "+"
        return f"{sign} {power_of_two(power)} × ({lead} + {fields.fraction}/{2**fmt.fraction_bits}), {fields.kind}"

    def summary(self) -> str:
        if self.fields.kind in ("inf", "nan"):
            return f"{self.number} in {self.fmt} is {self.value} (bits {self.bit_string()})."
        kind, digits = self.fields.kind, self.digits
        told = "zero" if kind == "zero" else f"a {kind} number"
        return (
            f"{self.number} in {self.fmt} is {self.value!r} ({self._error()}), {told}: bits {self.bit_string()}; "
            f"neighbours {short(self.below, digits)} and {short(self.above, digits)}, ulp {self.gap:.4g}."
        )

    @property
    def digits(self) -> int:
        """Significant digits that tell the values of the format apart."""
        return 9 if self.format.fraction_bits > 20 else 7

    def asked(self) -> str:
        """The number asked for, in at most 18 characters."""
        return self.number if len(self.number) <= 18 else f"about {self.wanted:.9g}"

    def _error(self) -> str:
        """How far the finite value is from the number asked for."""
        if math.isinf(self.wanted) and not self.exact:
            return f"{self.fmt} has no inf"
        off = Fraction(self.value) - self.exact
        near = _nearest(off)
        if math.isinf(near):
            return "off by more than 1e300"
        return f"off by {near:.3g}" if near else "off by less than 1e-300" if off else "exactly"

    def table(self) -> list[dict[str, Any]]:
        """The same real number in every format."""
        rows = []
        for fmt in (get_format(name) for name in NAMES):
            if math.isnan(self.wanted) and not fmt.has_nan:
                rows.append(
                    {"format": fmt.name, "value": "no NaN", "pattern, hex": "", "kind": "", "relative error": ""}
                )
                continue
            pattern = store(to_odd(self.wanted, self.exact), fmt)
            value = value_of(pattern, fmt)
            error = abs(value - self.wanted)
            if math.isfinite(value) and self.exact:
                error = _nearest(abs(Fraction(value) / self.exact - 1))
            rows.append(
                {
                    "format": fmt.name,
                    "value": f"{value:.9g}",
                    "pattern, hex": f"{pattern:0{-(-fmt.bits // 4)}x}",
                    "kind": fmt.fields(pattern).kind,
                    "relative error": f"{error:.2g}" if math.isfinite(error) else "",
                }
            )
        return rows


def bits_kept(fmt: FloatFormat, exponent: int) -> int:
    """Significant bits of numbers in [2**exponent, 2**(exponent+1)): 0 where they are lost, -1 where they overflow."""
    if exponent > fmt.max_exponent:
        return -1
    return max(0, fmt.fraction_bits + 1 - max(0, fmt.min_exponent - exponent))


def format_rows() -> list[dict[str, Any]]:
    """One row per named format: widths, extremes, gap at 1."""
    return [
        {
            "format": fmt.name,
            "bits": fmt.bits,
            "exponent": fmt.exponent_bits,
            "fraction": fmt.fraction_bits,
            "smallest subnormal": f"{fmt.min_subnormal:.4g}",
            "smallest normal": f"{fmt.min_normal:.4g}",
            "largest": f"{fmt.max:.6g}",
            "gap at 1": f"2^-{fmt.fraction_bits}",
            "beyond largest": fmt.overflow,
        }
        for fmt in (get_format(name) for name in NAMES)
    ]


class RangesExplorer(Explorer):
    """One magnitude on the axes of all formats."""

    controls = ("exponent",)
    exponent = Int(-20, min=-152, max=130).tag(label="magnitude, 2 to the")

    def compute(self) -> None:
        self.kept = {name: bits_kept(get_format(name), self.exponent) for name in NAMES}

    def fate(self, name: str) -> str:
        """What one format does to the magnitude, in words."""
        fmt, kept = get_format(name), self.kept[name]
        if kept < 0:
            return {"inf": "overflows to inf", "nan": "overflows to NaN", "saturate": f"becomes {fmt.max:g}"}[
                fmt.overflow
            ]
        if kept == 0:
            # exactly half the smallest subnormal is a tie, and 0 is even
            return "becomes 0"
        return f"{kept} of {fmt.fraction_bits + 1} bits" + (", subnormal" if self.exponent < fmt.min_exponent else "")

    def summary(self) -> str:
        told = "; ".join(f"{name} {self.fate(name)}" for name in ("fp32", "fp16", "bf16", "e5m2", "e4m3fn"))
        return f"2^{self.exponent} = {2.0**self.exponent:.4g}: {told}."

    def table(self) -> list[dict[str, Any]]:
        return [{"format": name, f"2^{self.exponent}": self.fate(name)} for name in NAMES]


@cache
def recorded() -> Trace:
    """The recorded training of the 784-512-512-10 network on the digits."""
    return Trace.load(data_dir() / "traces" / "mlp_digits.npz")


class GradientsExplorer(Explorer):
    """The gradients of one recorded step, multiplied by a loss scale, on the range of one format.

    After `compute`: `exponents` (bins,) after scaling, `share` (bins,) of this step, `shares` (steps, bins) of all;
    `lost`, `subnormal`, `normal` and `over`, the shares of the four zones. Of `normal`, `split` lies in the power of
    two in which the format ends, and `sure` below it.
    """

    controls = ("fmt", "scale_exponent", "step")
    fmt = Enum(["fp16", "bf16", "e5m2", "e4m3fn"], "fp16").tag(label="format")
    scale_exponent = Int(0, min=0, max=30).tag(label="loss scale, 2 to the")
    step = Int(200, min=0, max=399).tag(label="training step")

    def compute(self) -> None:
        ranges = recorded().gradients
        every = ranges.total().astype(np.float64)
        self.shares = every / every.sum(axis=1, keepdims=True)
        counts = every[min(self.step, len(every) - 1)]
        self.format = get_format(self.fmt)
        self.exponents = ranges.exponents + self.scale_exponent
        self.share = counts / counts.sum()
        self.values = int(counts.sum())
        lost, least = self.exponents < self.lost_below, self.exponents < self.format.min_exponent
        over = self.exponents > self.format.max_exponent
        # a format ends inside its last power of two, and the recording counts by powers of two
        split = self.exponents == self.format.max_exponent
        zones = lost, least & ~lost, ~least & ~over, over, ~least & ~over & ~split, split
        self.lost, self.subnormal, self.normal, self.over, self.sure, self.split = (
            float(counts[where].sum() / counts.sum()) for where in zones
        )

    @property
    def lost_below(self) -> int:
        """Magnitudes below two to this power, half the smallest subnormal, round to zero."""
        return self.format.min_subnormal_exponent - 1

    def summary(self) -> str:
        last = self.format.max_exponent
        told = (
            f"Step {self.step}, {self.values:,} non-zero gradients times 2^{self.scale_exponent} in {self.fmt}: "
            f"{percent(self.lost, 1)} become 0, {percent(self.subnormal, 1)} subnormal, "
            f"{percent(self.sure, 1)} normal, {percent(self.over, 1)} overflow"
        )
        if not self.split:
            return f"{told}."
        return (
            f"{told}, and {percent(self.split, 1)} lie between 2^{last} and 2^{last + 1}, where {self.fmt} ends: "
            "which of these overflow was not recorded."
        )

    def table(self) -> list[dict[str, Any]]:
        return [
            {"exponent": int(exponent), "share": percent(share, 2)}
            for exponent, share in zip(self.exponents, self.share)
            if share > 0
        ]
