"""What a block format is: an element format, a block of elements, and the format of the scale that they share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mpkit.arguments import check_choice, check_count, check_flags, check_kind
from mpkit.formats import E2M1, E2M3, E3M2, E4M3FN, E5M2, FP32, FloatFormat, check_patterns

_MX = "OCP Microscaling Formats (MX) Specification, version 1.0, 2023"


@dataclass(frozen=True)
class PowerFormat:
    """Powers of two and NaN, without sign, zero or infinity: byte b stands for 2**(b - 127), 255 for NaN.

    Source:  OCP MX 1.0, 5.4.1 (E8M0).

    >>> E8M0.decode(torch.tensor([0, 127, 255]))
    tensor([5.8775e-39, 1.0000e+00,        nan])
    """

    name: str = "e8m0"

    bits, bias, max, min_normal, has_inf, has_nan = 8, 127, 2.0**127, 2.0**-127, False, True

    def __repr__(self) -> str:
        return f"PowerFormat({self.name})"

    def values(self) -> Tensor:
        """The 255 powers of two, ascending, float32, on the CPU."""
        return self.decode(torch.arange(255, device="cpu"))

    def decode(self, patterns: Tensor) -> Tensor:
        """Bytes (*) of an integer dtype, 0 to 255 -> (*) float32, from the bits; 2**-127 is a subnormal float32."""
        byte = check_patterns(patterns, self.name, self.bits).int()
        bits = (byte << 23).masked_fill(byte == 0, 0x00400000).masked_fill(byte == 255, 0x7FC00000)
        return bits.view(torch.float32)

    def encode(self, x: Tensor) -> Tensor:
        """Powers of two and NaN (*) float32 -> (*) int64 bytes. Raises ValueError for any other value."""
        check_kind("x", x, Tensor, "a tensor of values")
        bits = x.to(torch.float32).view(torch.int32)
        byte = ((bits >> 23) & 0xFF).masked_fill(x.isnan(), 255).long()
        if not ((self.decode(byte) == x) | x.isnan()).all():
            raise ValueError(f"{self.name} holds powers of two from 2^-127 to 2^127 and NaN; round to one first")
        return byte


@dataclass(frozen=True)
class IntFormat:
    """Two's complement integers times a fixed power of two: the values of MXINT8 are integer / 64, from -2 to 127/64.

    Args:    bits (2 to 24) and how many of them count fractions (0 to `bits`).
    Raises:  TypeError for what is no int, ValueError out of range.
    Source:  OCP MX 1.0, 5.3.4 (INT8); the specification leaves open whether -2 is used, here it is.
    """

    name: str = "int8"
    bits: int = 8
    fraction_bits: int = 6

    def __post_init__(self) -> None:
        check_kind("name", self.name, str, "a string")
        for key, low, high in (("bits", 2, 24), ("fraction_bits", 0, self.bits)):
            if check_count(key, getattr(self, key), low) > high:
                raise ValueError(f"{key} must be at most {high}, got {getattr(self, key)}")

    @property
    def max(self) -> float:
        """The largest value."""
        return (2.0 ** (self.bits - 1) - 1) / 2**self.fraction_bits

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest power of two."""
        return self.bits - 2 - self.fraction_bits

    def rounded(self, x: Tensor) -> Tensor:
        """Nearest even, saturating; there is one zero, and NaN stays."""
        grid = 2.0**self.fraction_bits
        low, high = -(2.0 ** (self.bits - 1)), 2.0 ** (self.bits - 1) - 1
        return (x * grid).round_().clamp_(low, high).add_(0.0).div_(grid)

    def encode(self, x: Tensor) -> Tensor:
        """Values (*) -> (*) int64 patterns, 0 to 2**bits - 1. Raises ValueError for what the format does not have."""
        check_kind("x", x, Tensor, "a tensor of values")
        whole = x.double() * 2.0**self.fraction_bits
        known = (whole == whole.floor()) & (whole >= -(2 ** (self.bits - 1))) & (whole < 2 ** (self.bits - 1))
        if not known.all():
            first = x[~known].flatten()[0].item()
            raise ValueError(f"{first!r} is not a value of {self.name}; round to one first")
        return whole.long() & (2**self.bits - 1)

    def decode(self, patterns: Tensor) -> Tensor:
        """Patterns (*), 0 to 2**bits - 1 -> (*) float32 values."""
        wide, half = check_patterns(patterns, self.name, self.bits), 2 ** (self.bits - 1)
        return ((wide ^ half) - half).float() / 2**self.fraction_bits


E8M0 = PowerFormat()
INT8 = IntFormat()

RULES: dict[str, tuple[str, ...]] = {
    "e8m0": ("floor", "ceil", "even", "rceil", "te", "deepgemm", "deepseek"),
    "e4m3fn": ("te", "torchao", "4over6_mae_256", "4over6_mae_448", "4over6_mse_256", "4over6_mse_448"),
    "fp32": ("te", "torchao", "deepgemm", "deepseek"),
}
"""The rules by which a scale follows from the largest magnitude of its block, by the format of the scale."""


@dataclass(frozen=True)
class BlockFormat:
    """Elements of a narrow format that share a scale, block by block.

    Args:
        name:           how the format is called in tables.
        element:        the format of one element: a FloatFormat of at most 8 bits, or INT8.
        block:          (rows, columns) of a block; columns run along the quantised dim.
        scale:          the format of the scale: E8M0, E4M3FN or FP32.
        scale_rounding: how the scale follows from the block's largest magnitude A (M is the largest element, E the
                        exponent of the largest power of two in the element format):
                        E8M0: "floor" (exponent of A, minus E: the OCP rule, clips maxima above M), "ceil", "even" (A
                        rounded half up to the element's fraction bits first), "rceil" (the smallest power that holds A,
                        as cuBLAS, TransformerEngine and torchao's RCEIL); for FP8 "te", "deepgemm", "deepseek".
                        FP32: "te" (TransformerEngine 2.20), "torchao" (0.18), "deepgemm", "deepseek" (V3 inference).
                        E4M3FN: "te" (2.14 and later), "torchao" (0.18), "4over6_mae_256" (or mse, or 448).
                        The default "floor" means "te" where the scale is no E8M0.
        tensor_scale:   one more float32 scale for the tensor, so that E4M3FN scales use their whole range.
    Raises:  TypeError or ValueError for a part of the wrong kind or a combination that does not exist.
    Source:  OCP MX 1.0; the libraries named above, whose results are reproduced bit for bit (inf and NaN as torchao's
             main branch of August 2026 has them for MX: byte 255, so the block decodes to NaN).

    >>> MXFP4.bits_per_element, NVFP4.bits_per_element
    (4.25, 4.5)
    """

    name: str
    element: FloatFormat | IntFormat
    block: tuple[int, int] = (1, 32)
    scale: FloatFormat | PowerFormat = E8M0
    scale_rounding: str = "floor"
    tensor_scale: bool = False

    def __post_init__(self) -> None:
        check_kind("element", self.element, (FloatFormat, IntFormat), "a FloatFormat such as E4M3FN, or INT8")
        if self.element.bits > 8:
            raise ValueError(f"elements of a block format have at most 8 bits, got {self.element}")
        object.__setattr__(self, "block", _checked_block(self.block))
        check_kind("scale", self.scale, (FloatFormat, PowerFormat), "E8M0, E4M3FN or FP32")
        if self.scale not in (E8M0, E4M3FN, FP32):
            raise ValueError(f"scale is E8M0, E4M3FN or FP32, got {self.scale}")
        if self.scale != E8M0 and self.scale_rounding == "floor":
            object.__setattr__(self, "scale_rounding", "te")
        check_choice(f"scale_rounding with scales in {self.scale.name}", self.scale_rounding, RULES[self.scale.name])
        check_flags(tensor_scale=self.tensor_scale)
        if self.tensor_scale and self.scale.name != "e4m3fn":
            raise ValueError(f"a tensor scale goes with E4M3FN scales, which are short of range, got {self.scale}")
        if self.scale_rounding.startswith("4over6") and not (self.tensor_scale and self.element == E2M1):
            raise ValueError("four over six chooses between 4 and 6 in E2M1 with a tensor scale: set tensor_scale=True")

    def __repr__(self) -> str:
        rows, columns = self.block
        return (
            f"BlockFormat({self.name}: {rows}x{columns} {self.element.name}, {self.scale.name} {self.scale_rounding})"
        )

    @property
    def bits_per_element(self) -> float:
        """Storage of one element with its share of the block's scale (bits)."""
        return self.element.bits + self.scale.bits / (self.block[0] * self.block[1])


def _checked_block(block: object) -> tuple[int, int]:
    pair = tuple(block) if isinstance(block, tuple | list) else None
    if pair is None or len(pair) != 2 or not all(type(size) is int for size in pair):
        raise TypeError(f"block is (rows, columns), two ints such as (1, 32), got {block!r}")
    if min(pair) < 1:
        raise ValueError(f"a block has at least one row and one column, got {block!r}")
    return pair


MXFP8_E4M3 = BlockFormat("mxfp8_e4m3", E4M3FN)
MXFP8_E5M2 = BlockFormat("mxfp8_e5m2", E5M2)
MXFP6_E3M2 = BlockFormat("mxfp6_e3m2", E3M2)
MXFP6_E2M3 = BlockFormat("mxfp6_e2m3", E2M3)
MXFP4 = BlockFormat("mxfp4", E2M1)
MXINT8 = BlockFormat("mxint8", INT8)
NVFP4 = BlockFormat("nvfp4", E2M1, (1, 16), E4M3FN, "te", tensor_scale=True)
FP8_1X128 = BlockFormat("fp8_1x128", E4M3FN, (1, 128), FP32, "te")
FP8_128X128 = BlockFormat("fp8_128x128", E4M3FN, (128, 128), FP32, "te")

BLOCK_FORMATS: dict[str, BlockFormat] = {
    fmt.name: fmt
    for fmt in (MXFP8_E4M3, MXFP8_E5M2, MXFP6_E3M2, MXFP6_E2M3, MXFP4, MXINT8, NVFP4, FP8_1X128, FP8_128X128)
}
"""The named block formats. MXFP4 has the OCP rule; replace(MXFP4, scale_rounding="rceil") is what papers train with."""
