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

from mpkit.arguments import check_choice, check_count, check_flags, check_kind

__all__ = [
    "BF16", "E2M1", "E2M3", "E3M2", "E3M4", "E4M3B11FNUZ", "E4M3FN", "E4M3FNUZ", "E5M2", "E5M2FNUZ", "FORMATS",
    "FP16", "FP32", "FP64", "OTHER_FORMATS", "TF32", "Fields", "FloatFormat", "dtype_name", "get_format", "p3109",
]  # fmt: skip

Specials = Literal["ieee", "nan", "none", "fnuz", "nuz"]
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
    """A binary floating-point format: a sign bit unless it is unsigned, then exponent, then fraction, with subnormals.

    Args:
        name:          how the format is called; `get_format(name)` finds it again.
        exponent_bits: width of the exponent field (bits, 1 to 8; 11 for FP64).
        fraction_bits: width of the fraction field (bits, 0 to 23; 52 for FP64).
        specials:      what is no ordinary number: "ieee", the topmost exponent, inf (fraction 0) and NaN; "nan", the
                       topmost pattern, NaN; "none", nothing; "fnuz", NaN alone, in the place of minus zero (finite,
                       unsigned zero); "nuz", the same and inf in the topmost pattern. Without a sign there is no minus
                       zero, and NaN is the topmost pattern. Without inf, the -inf of an attention mask becomes NaN, or
                       -max ("none"): mask with `-fmt.max`, which suits all.
        torch_dtype:   torch's own dtype with the same values, if there is one.
        source:        the document that defines the format.
        bias:          what is subtracted from the exponent field; None: 2**(exponent_bits - 1) - 1, as IEEE 754 has it.
        signed:        whether there are negative numbers. In an unsigned format they lie beyond the range.
    Raises:  TypeError if a width or the bias is no int; ValueError if one leaves its range, or values leave float32's.
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
    bias: int = None  # type: ignore[assignment]  # an int once it is built
    signed: bool = True

    def __post_init__(self) -> None:
        exponent, fraction = widths = (self.exponent_bits, self.fraction_bits)
        if not all(type(width) is int for width in widths):
            raise TypeError(f"the widths of a format are ints, got {widths}")
        check_choice("specials", self.specials, ("ieee", "nan", "none", "fnuz", "nuz"))
        low = (2, 1) if self.specials == "ieee" else (1, 0)
        if widths != (11, 52) and not (low[0] <= exponent <= 8 and low[1] <= fraction <= 23):
            raise ValueError(
                f"need {low[0]} to 8 exponent bits and {low[1]} to 23 fraction bits (or FP64's 11 and 52), got "
                f"{exponent} and {fraction}; nothing wider can be emulated inside float32"
            )
        check_flags(signed=self.signed)
        object.__setattr__(self, "bias", 2 ** (exponent - 1) - 1 if self.bias is None else self.bias)
        if type(self.bias) is not int:
            raise TypeError(f"the bias of a format is an int, got {self.bias!r}")
        if self._last < 1:
            raise ValueError(f"{self.bits} bits with specials {self.specials!r} leave no number but zero")
        if self.bits < 64 and not -149 <= self.min_subnormal_exponent <= self.max_exponent <= 127:
            raise ValueError(
                f"the values of {self.name} reach from 2**{self.min_subnormal_exponent} to 2**{self.max_exponent}, "
                "beyond float32 (2**-149 to 2**127); take another bias, or specials 'ieee' with 8 exponent bits"
            )

    def __repr__(self) -> str:
        return f"FloatFormat({self.name}: {int(self.signed)}+{self.exponent_bits}+{self.fraction_bits} bits)"

    @property
    def bits(self) -> int:
        """Width of one pattern (bits)."""
        return self.signed + self.exponent_bits + self.fraction_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number, and of every subnormal."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite number."""
        return max(self._last >> self.fraction_bits, 1) - self.bias

    @property
    def max(self) -> float:
        """The largest finite value."""
        significand, exponent = self._magnitude(self._last)
        return significand * 2.0**exponent  # exact: at most 53 bits

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
        return self._last % 2 == 1

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
        return self.specials in ("ieee", "nuz")

    @property
    def has_nan(self) -> bool:
        """Whether some pattern means "not a number"."""
        return self.specials != "none"

    @property
    def has_minus_zero(self) -> bool:
        """Whether zero has a sign."""
        return self.signed and self.specials in ("ieee", "nan", "none")

    @property
    def overflow(self) -> Literal["inf", "nan", "saturate"]:
        """What becomes of a value beyond `max` by the format's own rule."""
        return "inf" if self.has_inf else "nan" if self.has_nan else "saturate"

    @property
    def _top(self) -> int:
        """The topmost pattern without the sign."""
        return 2 ** (self.exponent_bits + self.fraction_bits) - 1

    @property
    def _last(self) -> int:
        """The pattern of `max`; those above it are inf, if there is one, and then NaN."""
        if self.specials == "ieee":
            return self._top - 2**self.fraction_bits
        high_nan = self.specials == "nan" or (self.has_nan and not self.signed)
        return self._top - high_nan - self.has_inf

    @property
    def _quiet_nan(self) -> int:
        """The pattern that stands for any NaN."""
        if self.specials == "ieee":
            return self._last + 1 + (1 << (self.fraction_bits - 1))
        return self._top + 1 if self.signed and not self.has_minus_zero else self._top

    def _magnitude(self, pattern: int) -> tuple[int, int]:
        """(whole number, power of two) whose product is the value of a pattern without its sign."""
        exponent = pattern >> self.fraction_bits
        fraction = pattern - (exponent << self.fraction_bits)
        significand = fraction + (2**self.fraction_bits if exponent else 0)
        return significand, max(exponent, 1) - self.bias - self.fraction_bits

    def values(self) -> Tensor:
        """Every finite value once (one zero), ascending, float32, on the CPU.

        Raises:  ValueError above 24 bits, where the table would take gigabytes.

        >>> E2M1.values()
        tensor([-6.0000, -4.0000, -3.0000, -2.0000, -1.5000, -1.0000, -0.5000,  0.0000,
                 0.5000,  1.0000,  1.5000,  2.0000,  3.0000,  4.0000,  6.0000])
        """
        if self.bits > 24:
            raise ValueError(f"{self.name} has 2**{self.bits} patterns, too many to list; decode() those you need")
        positive = self.decode(torch.arange(1, self._last + 1, device="cpu"))
        negative = -positive.flip(0) if self.signed else positive[:0]
        return torch.cat([negative, positive.new_zeros(1), positive])

    def decode(self, patterns: Tensor) -> Tensor:
        """The value of each bit pattern.

        Shapes:  patterns (*) of an integer dtype, 0 <= pattern < 2**bits -> (*) float32 (FP64: float64, and patterns
                 are int64 with the sign bit as their sign), same device.
        Raises:  TypeError unless the dtype is an integer one; ValueError for a pattern out of range.

        >>> FP16.decode(torch.tensor([0x3C00, 0x7BFF, 0x0001, 0xFC00]))
        tensor([1.0000e+00, 6.5504e+04, 5.9605e-08,       -inf])
        """
        if self.bits == 64:
            return check_patterns(patterns, self.name, 0).view(torch.float64)
        wide = check_patterns(patterns, self.name, self.bits)
        magnitude = wide & self._top
        field = magnitude >> self.fraction_bits
        significand = magnitude - ((field - 1).clamp(min=0) << self.fraction_bits)  # hidden bit left in for normals
        power = field.clamp(min=1) - self.bias - self.fraction_bits
        value = significand.double() * _power_of_two(power)
        value = value.masked_fill(magnitude > self._last, torch.nan)
        if self.has_inf:
            value = value.masked_fill(magnitude == self._last + 1, torch.inf)
        value = torch.where(wide > magnitude, -value, value).float()
        return (
            value if self.has_minus_zero or not self.signed else value.masked_fill(wide == self._quiet_nan, torch.nan)
        )

    def encode(self, x: Tensor | float) -> Tensor:
        """The bit pattern of each value; `x` must already be in the format, because encoding never rounds.

        Shapes:  x (*) float32 or float64 (or a Python float) -> (*) int64 patterns, same device.
        Edges:   any NaN gives the quiet NaN, with the sign of `x` where there are two of them.
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
            pattern = pattern.masked_fill(magnitude.isinf(), self._last + 1)
        negative = x.signbit() & (x != 0) if not self.has_minus_zero else x.signbit()
        if not self.signed:
            known &= ~negative
        if self.has_nan:
            known |= x.isnan()
            pattern = pattern.masked_fill(x.isnan(), self._quiet_nan)
            negative = negative if self.has_minus_zero else negative & ~x.isnan()
        if not known.all():
            first = x[~known].flatten()[0].item()
            raise ValueError(f"{first!r} is not a value of {self.name}; call round_to(x, fmt) first")
        return pattern + negative.long() * (self._top + 1)

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
        sign, magnitude = divmod(pattern, self._top + 1)
        exponent, fraction = divmod(magnitude, 2**self.fraction_bits)
        if self.has_inf and magnitude == self._last + 1:
            return Fields(sign, exponent, fraction, "inf", None)
        if magnitude > self._last or (self.has_nan and pattern == self._quiet_nan):
            return Fields(sign, exponent, fraction, "nan", None)
        kind: Kind = "normal" if exponent else "subnormal" if fraction else "zero"
        significand, power = self._magnitude(magnitude)
        return Fields(sign, exponent, fraction, kind, (-1) ** sign * significand * Fraction(2) ** power)


def check_patterns(patterns: Tensor, name: str, bits: int) -> Tensor:
    """Raise unless these are integers of so many bits (0: any); -> them as int64."""
    kind = patterns.dtype if isinstance(patterns, Tensor) else type(patterns).__name__
    if not isinstance(kind, torch.dtype) or kind == torch.bool or kind.is_floating_point or kind.is_complex:
        raise TypeError(f"bit patterns are a tensor of integers, got {kind}; encode() makes them from values")
    wide, top = patterns.to(torch.int64), 2**bits - 1
    low, high = map(int, wide.aminmax()) if bits and wide.numel() else (0, 0)
    if not 0 <= low <= high <= top:
        raise ValueError(f"patterns of {name} are 0 to {top:#x}, got {low} to {high}; mask them with & {top:#x}")
    return wide


def _power_of_two(exponent: Tensor) -> Tensor:
    """int64 exponents, -1022 to 1023 -> 2.0**exponent, float64, built from the bits and so exact."""
    return ((exponent + 1023) << 52).view(torch.float64)


_OFP8 = "OCP 8-bit Floating Point Specification (OFP8), revision 1.0, 2023; Micikevicius et al. 2022, arXiv:2209.05433"
_MX = "OCP Microscaling Formats (MX) Specification, version 1.0, 2023: element data type"
_A100 = "NVIDIA A100 Tensor Core GPU Architecture, 2020: the 19 bits of a float32 that the tensor cores read"
_INTEL = "Intel, BFLOAT16 - Hardware Numerics Definition, 2018, but with subnormals kept, as torch.bfloat16 does"
_NOT_IEEE = "which has no infinity and one NaN per sign (not the IEEE-like e4m3 that ends at 240)"
_NOUNE = "Noune et al. 2022, arXiv:2206.02915 (Graphcore and AMD)"
_P3109 = "IEEE P3109, Standard for Arithmetic Formats for Machine Learning, interim report of 2025"

FP64 = FloatFormat("fp64", 11, 52, torch_dtype=torch.float64, source="IEEE 754-2019, 3.6: binary64")
FP32 = FloatFormat("fp32", 8, 23, torch_dtype=torch.float32, source="IEEE 754-2019, 3.6: binary32")
TF32 = FloatFormat("tf32", 8, 10, source=_A100)
FP16 = FloatFormat("fp16", 5, 10, torch_dtype=torch.float16, source="IEEE 754-2019, 3.6: binary16")
BF16 = FloatFormat("bf16", 8, 7, torch_dtype=torch.bfloat16, source=_INTEL)
E5M2 = FloatFormat("e5m2", 5, 2, torch_dtype=torch.float8_e5m2, source=f"{_OFP8}: E5M2")
E4M3FN = FloatFormat("e4m3fn", 4, 3, "nan", torch.float8_e4m3fn, f"{_OFP8}: E4M3, {_NOT_IEEE}")
E3M2 = FloatFormat("e3m2", 3, 2, "none", source=f"{_MX} FP6 (E3M2)")
E2M3 = FloatFormat("e2m3", 2, 3, "none", source=f"{_MX} FP6 (E2M3)")
E2M1 = FloatFormat("e2m1", 2, 1, "none", source=f"{_MX} FP4 (E2M1)")

E5M2FNUZ = FloatFormat("e5m2fnuz", 5, 2, "fnuz", torch.float8_e5m2fnuz, _NOUNE, bias=16)
E4M3FNUZ = FloatFormat("e4m3fnuz", 4, 3, "fnuz", torch.float8_e4m3fnuz, _NOUNE, bias=8)
E4M3B11FNUZ = FloatFormat("e4m3b11fnuz", 4, 3, "fnuz", source="Google; ml_dtypes.float8_e4m3b11fnuz", bias=11)
E3M4 = FloatFormat("e3m4", 3, 4, source="Amazon Trainium; the rules of IEEE 754-2019, as ml_dtypes.float8_e3m4")

FORMATS: dict[str, FloatFormat] = {f.name: f for f in (FP64, FP32, TF32, FP16, BF16, E5M2, E4M3FN, E3M2, E2M3, E2M1)}
"""The usual formats by their names, widest first."""


def p3109(bits: int, precision: int, signed: bool = True, extended: bool = True) -> FloatFormat:
    """The IEEE P3109 format binary<bits>p<precision>, followed by s or u (signed), and e or f (extended: with inf).

    Args:    bits: 3 to 15; precision: bits of the significand, 1 to `bits` (to bits - 1 where it is signed).
    Raises:  TypeError for kinds; ValueError for ranges, and for a format whose values float32 does not have.

    >>> p3109(8, 3).max, p3109(8, 3, signed=False, extended=False)
    (49152.0, FloatFormat(binary8p3uf: 0+6+2 bits))
    """
    check_flags(signed=signed, extended=extended)
    if check_count("bits", bits, 3) > 15:
        raise ValueError(f"P3109 defines formats of 3 to 15 bits, got {bits}")
    if check_count("precision", precision) > bits - signed:
        raise ValueError(f"precision must be at most {bits - signed} in {bits} bits, got {precision}")
    exponent_bits = bits - signed - (precision - 1)
    name = f"binary{bits}p{precision}{'s' if signed else 'u'}{'e' if extended else 'f'}"
    specials: Specials = "nuz" if extended else "fnuz"
    bias = 2 ** (exponent_bits - 1)
    return FloatFormat(name, exponent_bits, precision - 1, specials, None, _P3109, bias, signed)


OTHER_FORMATS: dict[str, FloatFormat] = {
    f.name: f for f in (E5M2FNUZ, E4M3FNUZ, E4M3B11FNUZ, E3M4, *(p3109(8, precision) for precision in range(1, 8)))
}
"""Further 8-bit formats, of accelerators and of IEEE P3109; `p3109` makes those of other widths."""

_NAMED_LAYOUTS = {(f.exponent_bits, f.fraction_bits): f for f in (*FORMATS.values(), E3M4) if f.specials == "ieee"}


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
    the OCP type is "e4m3fn". "binary8p3" is the signed, extended format of IEEE P3109, "binary8p3uf" the unsigned,
    finite one.

    Raises:  TypeError unless `name` is a str; ValueError if no format is called so, or its widths leave their range.

    >>> get_format("e5m10") is FP16, get_format("e4m7").max
    (True, 255.0)
    """
    if not isinstance(name, str):
        raise TypeError(f"a format is asked for by its name, such as 'fp16' or 'e5m10', got {name!r}")
    key = name.lower()
    if key in FORMATS or key in OTHER_FORMATS:
        return FORMATS.get(key) or OTHER_FORMATS[key]
    if standard := re.fullmatch(r"binary(\d+)p(\d+)([su]?)([ef]?)", key):
        return p3109(int(standard[1]), int(standard[2]), standard[3] != "u", standard[4] != "f")
    widths = re.fullmatch(r"e(\d+)m(\d+)", key)
    if widths is None:
        known = ", ".join([*FORMATS, *OTHER_FORMATS])
        raise ValueError(f"no format is called {name!r}; there are {known}, or give widths as in 'e5m10'")
    exponent_bits, fraction_bits = int(widths[1]), int(widths[2])
    named = _NAMED_LAYOUTS.get((exponent_bits, fraction_bits))
    return named or FloatFormat(f"e{exponent_bits}m{fraction_bits}", exponent_bits, fraction_bits)
