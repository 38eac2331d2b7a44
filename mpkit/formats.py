"""What a number format is: widths, bias, extremes, and the way between values and bit patterns.

A format is data. Everything else about it (bias, extremes, gaps, which patterns are special) follows from two widths
and from what the topmost exponent stands for.
"""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mpkit.arguments import check_kind

__all__ = [
    "BF16",
    "E2M1",
    "E2M3",
    "E3M2",
    "E4M3FN",
    "E5M2",
    "FORMATS",
    "FP16",
    "FP32",
    "FP64",
    "TF32",
    "Fields",
    "FloatFormat",
    "dtype_name",
    "get_format",
]

Specials = Literal["ieee", "nan", "none"]
Kind = Literal["zero", "subnormal", "normal", "inf", "nan"]


class Fields(NamedTuple):
    """One bit pattern taken apart: its three fields, what they mean, and the exact value (None for inf and NaN)."""

    sign: int
    exponent: int
    fraction: int
    kind: Kind
    value: Fraction | None


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format: one sign bit, then exponent, then fraction, with subnormals.

    Args:
        name:          how the format is called; `get_format(name)` finds it again.
        exponent_bits: width of the exponent field (bits, 2 to 8; 11 for FP64).
        fraction_bits: width of the fraction field (bits, 1 to 23; 52 for FP64).
        specials:      what the topmost exponent stands for: "ieee", inf (fraction 0) and NaN; "nan", ordinary numbers
                       except that fraction all ones is NaN; "none", ordinary numbers only. Without inf, the -inf of an
                       attention mask becomes NaN ("nan") or -max ("none"): mask with `-fmt.max`, which suits all.
        torch_dtype:   torch's own dtype with the same values, if there is one.
        source:        the document that defines the format.
    Raises:  TypeError if a width is no int; ValueError if it leaves its range.
    Source:  IEEE 754-2019, 3.3 and 3.4 (sets of numbers, interchange encoding); each constant names its own document.

    >>> E5M2.max, E5M2.min_normal, E5M2.min_subnormal
    (57344.0, 6.103515625e-05, 1.52587890625e-05)
    """

    name: str
    exponent_bits: int
    fraction_bits: int
    specials: Specials = "ieee"
    torch_dtype: torch.dtype | None = None
    source: str = "the rules of IEEE 754-2019, 3.3 and 3.4, at widths of its own"

    def __post_init__(self) -> None:
        widths = (self.exponent_bits, self.fraction_bits)
        if not all(type(width) is int for width in widths):
            raise TypeError(f"the widths of a format are ints, got {widths}")
        if widths != (11, 52) and not (2 <= widths[0] <= 8 and 1 <= widths[1] <= 23):
            raise ValueError(
                f"need 2 to 8 exponent bits and 1 to 23 fraction bits (or FP64's 11 and 52), got {widths[0]} and "
                f"{widths[1]}; nothing wider can be emulated inside float32"
            )
        if self.specials not in ("ieee", "nan", "none"):
            raise ValueError(f"specials must be 'ieee', 'nan' or 'none', got {self.specials!r}")
        if self.exponent_bits >= 8 and self.specials != "ieee":
            raise ValueError(
                f"with {self.exponent_bits} exponent bits the topmost exponent is beyond float32, so specials must be "
                f"'ieee', got {self.specials!r}"
            )

    def __repr__(self) -> str:
        return f"FloatFormat({self.name}: 1+{self.exponent_bits}+{self.fraction_bits} bits)"

    @property
    def bits(self) -> int:
        """Width of one pattern (bits)."""
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def bias(self) -> int:
        """What is subtracted from the exponent field to get the exponent."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number, and of every subnormal."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite number."""
        return 2**self.exponent_bits - 1 - self.bias - int(self.has_inf)

    @property
    def max(self) -> float:
        """The largest finite value."""
        missing = 2 if self.specials == "nan" else 1
        return (2.0 - missing * self.eps) * 2.0**self.max_exponent

    @property
    def min_normal(self) -> float:
        """The smallest positive value with full precision."""
        return 2.0**self.min_exponent

    @property
    def min_subnormal(self) -> float:
        """The smallest positive value, which is also the gap between subnormals."""
        return 2.0 ** (self.min_exponent - self.fraction_bits)

    @property
    def min_subnormal_exponent(self) -> int:
        """Exponent of the smallest positive value."""
        return self.min_exponent - self.fraction_bits

    @property
    def zero_up_to(self) -> float:
        """Half the smallest subnormal: rounding to nearest even makes zero of magnitudes up to and at this one."""
        return self.min_subnormal / 2

    @property
    def overflow_edge(self) -> float:
        """Half a gap above `max`: rounding to nearest even takes every magnitude above this one beyond `max`."""
        return self.max + self.ulp(self.max) / 2

    @property
    def edge_overflows(self) -> bool:
        """Whether `overflow_edge` itself, a tie, leaves the range: it does if the last bit of `max` is 1."""
        return self.specials != "nan"

    def ulp(self, x: float) -> float:
        """Gap between the values of this format around a number; see `rounding.ulp` for tensors, whose edges these are.

        >>> FP16.ulp(1.0), FP16.ulp(2048.0), FP16.ulp(0.0)
        (0.0009765625, 2.0, 5.960464477539063e-08)
        """
        if not abs(x) <= self.max:  # in comparisons, which the compiler follows
            return math.nan if x != x else self.ulp(self.max)
        exponent = math.frexp(x)[1] - 1 if x else self.min_exponent  # frexp puts the fraction into [0.5, 1)
        return 2.0 ** (min(max(exponent, self.min_exponent), self.max_exponent) - self.fraction_bits)

    @property
    def eps(self) -> float:
        """Gap between 1 and the next larger value."""
        return 2.0**-self.fraction_bits

    @property
    def has_inf(self) -> bool:
        """Whether some pattern means infinity."""
        return self.specials == "ieee"

    @property
    def has_nan(self) -> bool:
        """Whether some pattern means "not a number"."""
        return self.specials != "none"

    @property
    def overflow(self) -> Literal["inf", "nan", "saturate"]:
        """What becomes of a value beyond `max` by the format's own rule."""
        rules: dict[Specials, Literal["inf", "nan", "saturate"]] = {"ieee": "inf", "nan": "nan", "none": "saturate"}
        return rules[self.specials]

    @property
    def _infinity(self) -> int:
        """The pattern of the topmost exponent with fraction 0: +inf where the format has one."""
        return (2**self.exponent_bits - 1) << self.fraction_bits

    @property
    def _first_nan(self) -> int:
        """The smallest positive pattern that is a NaN, or one beyond all positive patterns."""
        if self.specials == "ieee":
            return self._infinity + 1
        return 2 ** (self.bits - 1) - (self.specials == "nan")

    def values(self) -> Tensor:
        """Every finite value once (one zero), ascending, float32, on the CPU.

        Raises:  ValueError above 24 bits, where the table would take gigabytes.

        >>> E2M1.values()
        tensor([-6.0000, -4.0000, -3.0000, -2.0000, -1.5000, -1.0000, -0.5000,  0.0000,
                 0.5000,  1.0000,  1.5000,  2.0000,  3.0000,  4.0000,  6.0000])
        """
        if self.bits > 24:
            raise ValueError(f"{self.name} has 2**{self.bits} patterns, too many to list; decode() those you need")
        end = self._infinity if self.has_inf else self._first_nan
        positive = self.decode(torch.arange(1, end, device="cpu"))
        return torch.cat([-positive.flip(0), positive.new_zeros(1), positive])

    def decode(self, patterns: Tensor) -> Tensor:
        """The value of each bit pattern.

        Shapes:  patterns (*) of an integer dtype, 0 <= pattern < 2**bits -> (*) float32 (FP64: float64, and patterns
                 are int64 with the sign bit as their sign), same device.
        Raises:  TypeError unless the dtype is an integer one; ValueError for a pattern out of range.

        >>> FP16.decode(torch.tensor([0x3C00, 0x7BFF, 0x0001, 0xFC00]))
        tensor([1.0000e+00, 6.5504e+04, 5.9605e-08,       -inf])
        """
        kind = patterns.dtype if isinstance(patterns, Tensor) else type(patterns).__name__
        if not isinstance(kind, torch.dtype) or kind == torch.bool or kind.is_floating_point or kind.is_complex:
            raise TypeError(f"bit patterns are a tensor of integers, got {kind}; encode() makes them from values")
        wide = patterns.to(torch.int64)
        if self.bits == 64:
            return wide.view(torch.float64)
        if wide.numel() and not 0 <= int(wide.min()) <= int(wide.max()) < 2**self.bits:
            raise ValueError(
                f"patterns of {self.name} are 0 to {2**self.bits - 1:#x}, got {int(wide.min())} to {int(wide.max())}; "
                f"mask a signed view with & {2**self.bits - 1:#x}"
            )
        magnitude = wide & (2 ** (self.bits - 1) - 1)
        field = magnitude >> self.fraction_bits
        significand = magnitude - ((field - 1).clamp(min=0) << self.fraction_bits)  # hidden bit left in for normals
        power = field.clamp(min=1) - self.bias - self.fraction_bits
        value = significand.double() * _power_of_two(power)
        if self.has_inf:
            value = value.masked_fill(magnitude == self._infinity, torch.inf)
        value = value.masked_fill(magnitude >= self._first_nan, torch.nan)
        return torch.where(wide > magnitude, -value, value).float()

    def encode(self, x: Tensor | float) -> Tensor:
        """The bit pattern of each value; `x` must already be in the format, because encoding never rounds.

        Shapes:  x (*) float32 or float64 (or a Python float) -> (*) int64 patterns, same device.
        Edges:   any NaN gives the quiet NaN with the sign of `x`.
        Raises:  TypeError for another dtype; ValueError for a value the format does not have.

        >>> [hex(p) for p in FP16.encode(torch.tensor([1.0, -65504.0, 2.0**-24]))]
        ['0x3c00', '0xfbff', '0x1']
        """
        if isinstance(x, int | float):
            try:
                x = torch.as_tensor(x, dtype=torch.float64, device="cpu")
            except OverflowError:  # a whole number beyond float64
                raise ValueError(f"{x!r:.20}... is not a value of {self.name}, whose largest is {self.max}") from None
        if not isinstance(x, Tensor):
            raise TypeError(f"encode takes a number or a tensor, got {type(x).__name__}; torch.tensor(x) makes one")
        if x.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"encode takes float32 or float64, got {x.dtype}; call x.float() first, it is exact")
        x = x.double()
        if self.bits == 64:
            return x.view(torch.int64)
        magnitude = x.abs()
        exponent = ((magnitude.view(torch.int64) >> 52) - 1023).clamp(self.min_exponent, self.max_exponent)
        significand = magnitude * _power_of_two(self.fraction_bits - exponent)
        known = (significand == significand.floor()) & (magnitude <= self.max)
        pattern = ((exponent - self.min_exponent) << self.fraction_bits) + significand.nan_to_num(0, 0).long()
        if self.has_inf:
            known |= magnitude.isinf()
            pattern = pattern.masked_fill(magnitude.isinf(), self._infinity)
        if self.has_nan:
            known |= x.isnan()
            quiet = self._infinity + (1 << (self.fraction_bits - 1)) if self.has_inf else self._first_nan
            pattern = pattern.masked_fill(x.isnan(), quiet)
        if not known.all():
            first = x[~known].flatten()[0].item()
            raise ValueError(f"{first!r} is not a value of {self.name}; call round_to(x, fmt) first")
        return pattern + (x.signbit().long() << (self.bits - 1))

    def fields(self, pattern: int) -> Fields:
        """One pattern taken apart, with its exact value.

        Raises:  TypeError unless `pattern` is an integer; ValueError for a pattern out of range.

        >>> FP16.fields(0x0001)
        Fields(sign=0, exponent=0, fraction=1, kind='subnormal', value=Fraction(1, 16777216))
        """
        pattern = operator.index(pattern)
        if self.bits == 64 and pattern < 0:  # the way int64 holds a set sign bit
            pattern += 2**64
        if not 0 <= pattern < 2**self.bits:
            raise ValueError(f"patterns of {self.name} are 0 to {2**self.bits - 1:#x}, got {pattern:#x}")
        sign, magnitude = divmod(pattern, 2 ** (self.bits - 1))
        exponent, fraction = divmod(magnitude, 2**self.fraction_bits)
        if magnitude >= self._first_nan:
            return Fields(sign, exponent, fraction, "nan", None)
        if self.has_inf and magnitude == self._infinity:
            return Fields(sign, exponent, fraction, "inf", None)
        significand = fraction + (2**self.fraction_bits if exponent else 0)
        value = (-1) ** sign * significand * Fraction(2) ** (max(exponent, 1) - self.bias - self.fraction_bits)
        kind: Kind = "normal" if exponent else "subnormal" if fraction else "zero"
        return Fields(sign, exponent, fraction, kind, value)


def _power_of_two(exponent: Tensor) -> Tensor:
    """int64 exponents, -1022 to 1023 -> 2.0**exponent, float64, built from the bits and so exact."""
    return ((exponent + 1023) << 52).view(torch.float64)


_OFP8 = "OCP 8-bit Floating Point Specification (OFP8), revision 1.0, 2023; Micikevicius et al. 2022, arXiv:2209.05433"
_MX = "OCP Microscaling Formats (MX) Specification, version 1.0, 2023: element data type"

FP64 = FloatFormat("fp64", 11, 52, torch_dtype=torch.float64, source="IEEE 754-2019, 3.6: binary64")
FP32 = FloatFormat("fp32", 8, 23, torch_dtype=torch.float32, source="IEEE 754-2019, 3.6: binary32")
TF32 = FloatFormat(
    "tf32",
    8,
    10,
    source="NVIDIA A100 Tensor Core GPU Architecture, 2020: the 19 bits of a float32 that the tensor cores read",
)
FP16 = FloatFormat("fp16", 5, 10, torch_dtype=torch.float16, source="IEEE 754-2019, 3.6: binary16")
BF16 = FloatFormat(
    "bf16",
    8,
    7,
    torch_dtype=torch.bfloat16,
    source="Intel, BFLOAT16 - Hardware Numerics Definition, 2018, but with subnormals kept, as torch.bfloat16 does",
)
E5M2 = FloatFormat("e5m2", 5, 2, torch_dtype=torch.float8_e5m2, source=f"{_OFP8}: E5M2")
E4M3FN = FloatFormat(
    "e4m3fn",
    4,
    3,
    specials="nan",
    torch_dtype=torch.float8_e4m3fn,
    source=f"{_OFP8}: E4M3, which has no infinity and one NaN per sign (not the IEEE-like e4m3 that ends at 240)",
)
E3M2 = FloatFormat("e3m2", 3, 2, specials="none", source=f"{_MX} FP6 (E3M2)")
E2M3 = FloatFormat("e2m3", 2, 3, specials="none", source=f"{_MX} FP6 (E2M3)")
E2M1 = FloatFormat("e2m1", 2, 1, specials="none", source=f"{_MX} FP4 (E2M1)")

FORMATS: dict[str, FloatFormat] = {f.name: f for f in (FP64, FP32, TF32, FP16, BF16, E5M2, E4M3FN, E3M2, E2M3, E2M1)}
"""The named formats, widest first."""

_NAMED_LAYOUTS = {(f.exponent_bits, f.fraction_bits): f for f in FORMATS.values() if f.specials == "ieee"}


def dtype_name(dtype: torch.dtype | FloatFormat) -> str:
    """What a precision is called in a table: "float16" for torch.float16, a format's own name.

    >>> dtype_name(torch.float16), dtype_name(E5M2)
    ('float16', 'e5m2')
    """
    check_kind("dtype", dtype, (torch.dtype, FloatFormat), "a torch.dtype or a FloatFormat")
    return dtype.name if isinstance(dtype, FloatFormat) else str(dtype).removeprefix("torch.")


def get_format(name: str) -> FloatFormat:
    """The named format, or for "e<exponent bits>m<fraction bits>" the IEEE-like format of those widths.

    Letter case does not matter. "e3m2", "e2m3" and "e2m1" are names (the OCP MX types without inf and NaN);
    "e5m10" is FP16 itself, as for every layout that has a name; a bare "e4m3" is the IEEE-like one (largest value 240),
    the OCP type is "e4m3fn".

    Raises:  TypeError unless `name` is a str; ValueError if no format is called so, or its widths leave their range.

    >>> get_format("e5m10") is FP16, get_format("e4m7").max
    (True, 255.0)
    """
    if not isinstance(name, str):
        raise TypeError(f"a format is asked for by its name, such as 'fp16' or 'e5m10', got {name!r}")
    key = name.lower()
    if key in FORMATS:
        return FORMATS[key]
    widths = re.fullmatch(r"e(\d+)m(\d+)", key)
    if widths is None:
        raise ValueError(f"no format is called {name!r}; there are {', '.join(FORMATS)}, or give widths as in 'e5m10'")
    exponent_bits, fraction_bits = int(widths[1]), int(widths[2])
    named = _NAMED_LAYOUTS.get((exponent_bits, fraction_bits))
    return named or FloatFormat(f"e{exponent_bits}m{fraction_bits}", exponent_bits, fraction_bits)
