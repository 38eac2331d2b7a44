"""From a tensor to elements and scales, and back."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mpkit.arguments import check_choice, check_kind
from mpkit.blocks.format import BlockFormat, IntFormat
from mpkit.blocks.scales import Scales, block_scales, constant, nvfp4_from, quotient, tensor_bound, tensor_encode
from mpkit.formats import FloatFormat
from mpkit.rounding import MODES, Mode, check_dim, round_to, ulp

_MAGNITUDE = 0x7FFFFFFF


@dataclass(frozen=True)
class Blocks:
    """A tensor in a block format.

    Args:
        stored:       the elements, in the shape of the tensor: one byte each where torch has their format (E4M3FN and
                      E5M2, rounded to nearest), else float32; `elements` are their values.
        scales:       the stored scale of each block (float32 values of `fmt.scale`); `dim` has one entry per block, and
                      with blocks of several rows so has the other dim of the matrix.
        tensor_scale: decoding scale of the whole tensor, () float32; None where the format has none.
        tensor_amax:  largest magnitude of the tensor, () float32, which `dequantize` uses in its stead (one rounding
                      less); None where the format has no tensor scale.
        fmt, dim, dtype: the format, the dim along which blocks run (counted from the end), and the dtype that came in.
    """

    stored: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    tensor_amax: Tensor | None
    fmt: BlockFormat
    dim: int
    dtype: torch.dtype

    @property
    def elements(self) -> Tensor:
        """Values of the element format (*) float32, in the shape of the tensor."""
        return self.stored.float()

    def largest(self) -> Tensor:
        """The largest magnitude that each element could stand for under its scale, (*) float32."""
        tops = torch.full_like(self.stored, self.fmt.element.max, dtype=torch.float32)
        return replace(self, stored=tops).dequantize(torch.float32).abs_()

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values that stand for the tensor, in its shape; `dtype` None is the dtype that came in.

        Element times scale is rounded to float32 once, and then to `dtype` (exact in bfloat16 for MX formats).
        """
        scales = self.scales
        if self.tensor_amax is not None and self.tensor_scale is not None:
            if self.fmt.scale_rounding == "torchao":
                scales = scales * self.tensor_scale
            else:
                # as the library: times the amax, then times the reciprocal of the bound, each product rounded
                bound = constant(tensor_bound(self.fmt), scales)
                scales = (scales * self.tensor_amax) * quotient(torch.ones_like(bound), bound)
        grid = _Grid(self.stored.shape, self.fmt, self.dim)
        wide, factor = grid.split(self.elements), grid.spread(scales)
        values = wide * factor if self.stored.dtype is torch.float32 else wide.mul_(factor)  # a copy of ours
        return grid.back(values).to(dtype or self.dtype)

    def codes(self) -> Tensor:
        """Bit patterns of the elements (*) uint8."""
        if self.stored.dtype is not torch.float32:
            return self.stored.view(torch.uint8)
        return self.fmt.element.encode(self.stored).to(torch.uint8)

    def scale_codes(self) -> Tensor:
        """Bit patterns of the stored scales: uint8, or int32 for FP32 scales."""
        if self.fmt.scale.bits == 32:
            return self.scales.view(torch.int32)
        return self.fmt.scale.encode(self.scales).to(torch.uint8)


def quantize_blocks(
    x: Tensor,
    fmt: BlockFormat,
    dim: int = -1,
    mode: Mode = "nearest_even",
    generator: torch.Generator | None = None,
    *,
    bits: Tensor | None = None,
) -> Blocks:
    """Split `x` into blocks along `dim`, scale each, and round its elements.

    Args:
        x:         the tensor to quantise.
        fmt:       the block format.
        dim:       the dim along which the columns of a block run: that over which a product sums.
        mode:      how elements are rounded, as in `round_to`; they saturate at the largest element.
        generator: source of the random bits of mode "stochastic", on the device of `x`.
        bits:      the random bits themselves, uint8 in the shape of `x`, instead of a generator: an element grows by
                   bits / 256 of its gap before it is cut, as 4-bit hardware rounds (results are exact given the bits).
    Shapes:  x (*) of any float dtype, at least 1 dim (2 for blocks of several rows) -> elements (*) float32; a last
             block that is not full counts as filled up with zeros.
    Edges:   MX formats: inf or NaN in a block gives a NaN scale, so the whole block decodes to NaN; zeros give the
             smallest scale. FP8 blocks of "te" and NVFP4: the maximum drops NaN, and inf saturates; a NaN element stays
             NaN in FP8 and becomes the largest element in FP4. -0.0 stays -0.0. float64 is cut to float32 so that no
             result changes (round to odd).
    Raises:  TypeError if `x` is no float tensor or `fmt` no BlockFormat; ValueError for a dim the format cannot take.
    Source:  see BlockFormat. No element is read on the host, so it runs on any device, meta included.

    >>> from mpkit.blocks import MXFP4
    >>> q = quantize_blocks(torch.tensor([0.1, -0.6, 5.0, 1000.0]), MXFP4)
    >>> q.scales, q.dequantize()
    (tensor([128.]), tensor([  0.,  -0.,   0., 768.]))
    """
    dim = _checked(x, fmt, dim, mode, bits)
    source = x.detach()
    grid = _Grid(source.shape, fmt, dim)
    wide = grid.split(_to_float32(source))
    # the maximum of TransformerEngine and of NVFP4 passes NaN over, that of the MX formats does not
    drops_nan = fmt.scale.name == "e4m3fn" or (fmt.scale.name != "e8m0" and fmt.scale_rounding == "te")
    amax = _block_amax(wide, drops_nan)
    total = None
    if fmt.tensor_scale:
        total = amax.amax() if amax.numel() else amax.new_zeros(())
    random = None if bits is None else grid.split(bits)
    if fmt.scale_rounding.startswith("4over6"):
        assert total is not None
        scales, elements = _four_over_six(wide, amax, fmt, total, mode, generator, random)
    else:
        scales = block_scales(amax, fmt, total, x.dtype)
        elements = _encoded(wide, scales, fmt, mode, generator, random)
    tensor_scale = None if total is None else quotient(total, constant(tensor_bound(fmt), total))
    return Blocks(grid.back(elements), grid.gather(scales.stored), tensor_scale, total, fmt, dim, x.dtype)


def _checked(x: Tensor, fmt: BlockFormat, dim: int, mode: str, bits: Tensor | None) -> int:
    """The dim counted from the end; raises what `quantize_blocks` promises."""
    check_kind("fmt", fmt, BlockFormat, "a BlockFormat such as MXFP8_E4M3 (round_to takes a FloatFormat)")
    dim = check_dim(x, dim)
    check_choice("mode", mode, MODES)
    if fmt.block[0] > 1 and (x.dim() < 2 or dim < -2):
        raise ValueError(f"{fmt.name} has blocks of the last two dims, got dim {dim} of {tuple(x.shape)}; reshape it")
    if bits is not None:
        if mode != "stochastic" or isinstance(fmt.element, IntFormat):
            raise ValueError(f"bits are for mode='stochastic' and elements of a float format, got {mode!r} and {fmt}")
        if not isinstance(bits, Tensor) or bits.dtype is not torch.uint8:
            raise TypeError("bits is a uint8 tensor: 8 random bits for each element")
        if bits.shape != x.shape:
            raise ValueError(f"bits need the shape of x, {tuple(x.shape)}, got {tuple(bits.shape)}")
    return dim


class _Grid:
    """How a tensor falls into blocks: (*) <-> (blocks, size) or (leading, row blocks, rows, column blocks, columns)."""

    def __init__(self, shape: torch.Size, fmt: BlockFormat, dim: int) -> None:
        self.shape, self.dim = shape, dim
        self.rows, self.columns = fmt.block
        length = shape[dim]
        self.moved = (*shape[:dim], *(shape[dim + 1 :] if dim < -1 else ()), length)
        self.count = -(-length // self.columns)
        self.pad = self.count * self.columns - length
        if self.rows > 1:
            self.leading = math.prod(self.moved[:-2])
            self.row_count = -(-self.moved[-2] // self.rows)
            self.row_pad = self.row_count * self.rows - self.moved[-2]

    def split(self, x: Tensor) -> Tensor:
        """(*) -> blocks."""
        x = x if self.dim == -1 else x.movedim(self.dim, -1)
        if self.rows > 1:
            if self.pad or self.row_pad:
                x = F.pad(x, (0, self.pad, 0, self.row_pad))
            return x.reshape(self.leading, self.row_count, self.rows, self.count, self.columns)
        x = F.pad(x, (0, self.pad)) if self.pad else x
        return x.reshape(-1, self.columns) if x.numel() else x.reshape(0, self.columns)

    def back(self, blocks: Tensor) -> Tensor:
        """Blocks -> (*), without what was filled up."""
        if self.rows > 1:
            height, width = self.row_count * self.rows, self.count * self.columns
            x = blocks.reshape(*self.moved[:-2], height, width)
            if self.pad or self.row_pad:
                x = x[..., : self.moved[-2], : self.moved[-1]]
        else:
            x = blocks.reshape(*self.moved[:-1], self.count * self.columns)
            x = x[..., : self.moved[-1]] if self.pad else x
        x = x.contiguous()
        return x if self.dim == -1 else x.movedim(-1, self.dim)

    def gather(self, scales: Tensor) -> Tensor:
        """One entry per block -> in the order of the tensor's dims."""
        leading = (*self.moved[:-2], self.row_count) if self.rows > 1 else self.moved[:-1]
        scales = scales.reshape(*leading, self.count)
        return scales if self.dim == -1 else scales.movedim(-1, self.dim)

    def spread(self, scales: Tensor) -> Tensor:
        """What `gather` gave -> to be multiplied with blocks."""
        scales = scales if self.dim == -1 else scales.movedim(self.dim, -1)
        return (
            scales.reshape(self.leading, self.row_count, 1, self.count, 1) if self.rows > 1 else scales.reshape(-1, 1)
        )


def _to_float32(x: Tensor) -> Tensor:
    """Any float dtype -> float32; float64 is rounded to odd, so that rounding again to few bits counts as once."""
    if x.dtype is not torch.float64:
        return x.float()
    near = x.float()
    bits = near.view(torch.int32)
    back = near.double()
    # a pattern less one is the next number toward zero, whatever its sign
    bits = bits - (back.abs() > x.abs()).int()  # toward zero; the step from inf is the largest float32
    return torch.where((back == x) | x.isnan(), near, (bits | 1).view(torch.float32))


def _block_amax(blocks: Tensor, drops_nan: bool) -> Tensor:
    """Largest magnitude of each block, as float32, found among the bit patterns: NaN is above all, unless dropped."""
    if not blocks.numel():
        shape = blocks.shape[:-1] if blocks.dim() == 2 else (blocks.shape[0], blocks.shape[1], blocks.shape[3])
        return blocks.new_zeros(shape)
    # patterns of magnitudes are ordered as the numbers are, so the largest integer belongs to the largest number
    known = blocks.nan_to_num(0.0, torch.inf, -torch.inf) if drops_nan else blocks
    bits = known.view(torch.int32) & _MAGNITUDE
    return (bits.amax(-1) if blocks.dim() == 2 else bits.amax((2, 4))).view(torch.float32)


def _encoded(
    blocks: Tensor, scales: Scales, fmt: BlockFormat, mode: Mode, generator: torch.Generator | None, bits: Tensor | None
) -> Tensor:
    """Blocks, scaled and rounded: a byte for each element where torch has its format and casts to it, else float32."""
    # one factor for a row of a block, and for a square of rows and columns
    factor = scales.encode[:, None] if blocks.dim() == 2 else scales.encode[:, :, None, :, None]
    apply = torch.div if scales.divides else torch.mul
    scaled = apply(blocks, factor)
    native = fmt.element.torch_dtype if isinstance(fmt.element, FloatFormat) else None
    # torch casts to these where it lies, eagerly on these devices; the compiler does not know all of them
    casts = blocks.device.type in ("cpu", "cuda", "meta") and not torch.compiler.is_compiling()
    if casts and mode == "nearest_even" and bits is None and native in (torch.float8_e4m3fn, torch.float8_e5m2):
        return scaled.clamp_(-fmt.element.max, fmt.element.max).to(native)
    return rounded_element(scaled, fmt.element, mode, generator, bits)


def rounded_element(
    y: Tensor,
    element: FloatFormat | IntFormat,
    mode: Mode = "nearest_even",
    generator: torch.Generator | None = None,
    bits: Tensor | None = None,
) -> Tensor:
    """Scaled values (*) float32 -> values of the element format (*), saturating at its largest.

    NaN stays NaN where the element format has one, else it becomes the largest element, as in hardware (E2M1: code 7).
    """
    if bits is not None:
        assert isinstance(element, FloatFormat)
        return round_with_bits(y, element, bits)
    if isinstance(element, FloatFormat):
        rounded = round_to(y, element, mode, overflow="saturate", generator=generator)
        return rounded if element.has_nan else rounded.nan_to_num_(element.max)
    if mode != "nearest_even":
        raise ValueError(f"INT8 elements are rounded to nearest even, got mode={mode!r}")
    return element.rounded(y.nan_to_num(element.max))


def round_with_bits(y: Tensor, element: FloatFormat, bits: Tensor) -> Tensor:
    """Stochastic rounding with given bits: |y| + bits / 256 of its gap, rounded to float32, then cut toward zero.

    Shapes:  y (*) float32, bits (*) uint8 -> (*) float32 values of `element`, at most its largest.
    Edges:   NaN gives the largest element where the format has no NaN. The chance is cut to multiples of 1/256.
    Raises:  TypeError for other dtypes; ValueError for another shape of `bits`, or an element format with more than 15
             fraction bits, to which float32 cannot add 8.
    Source:  TransformerEngine 2.20, common/util/ptx.cuh (what Blackwell's cvt.rs does in hardware).
    """
    check_kind("y", y, Tensor, "a tensor")
    check_kind("element", element, FloatFormat, "a FloatFormat such as E2M1")
    check_kind("bits", bits, Tensor, "a tensor of random bits")
    if y.dtype is not torch.float32 or bits.dtype is not torch.uint8:
        raise TypeError(f"y is float32 and bits are uint8, got {y.dtype} and {bits.dtype}; call y.float() first")
    if bits.shape != y.shape:
        raise ValueError(f"bits need the shape of y, {tuple(y.shape)}, got {tuple(bits.shape)}")
    # |y| and 8 more bits below its last one have to fit the 24 of a float32
    if element.fraction_bits > 15:
        raise ValueError(f"8 random bits go with at most 15 fraction bits, {element.name} has {element.fraction_bits}")
    y = y.detach()
    magnitude = y.abs()
    # at most one gap less 1/256 is added, so the cut reaches the next value at most
    moved = magnitude + bits.float() * 2.0**-8 * ulp(magnitude, element)
    cut = round_to(moved, element, "toward_zero", overflow="saturate").copysign(y)
    return cut if element.has_nan else torch.where(y.isnan(), element.max, cut)


def _four_over_six(
    blocks: Tensor,
    amax: Tensor,
    fmt: BlockFormat,
    total: Tensor,
    mode: Mode,
    generator: torch.Generator | None,
    bits: Tensor | None,
) -> tuple[Scales, Tensor]:
    """Per block the better of two scales: its largest magnitude becomes 4 or 6. Source: TransformerEngine 2.20."""
    outer = tensor_encode(fmt, total)
    six = quotient(amax, constant(fmt.element.max, amax)) * outer
    candidates = []
    # a scale 1.5 times as large maps the largest magnitude to 4 where it went to 6
    for wanted in (six * 1.5, six):
        scales = nvfp4_from(wanted, outer)
        elements = _encoded(blocks, scales, fmt, mode, generator, bits)
        stored = scales.stored[:, None] if blocks.dim() == 2 else scales.stored[:, :, None, :, None]
        value = quotient(elements * stored * total, constant(tensor_bound(fmt), total))
        error = value - blocks
        error = error.abs() if "mae" in fmt.scale_rounding else error * error
        candidates.append((scales, elements, _summed(error)))
    (four, four_elements, four_error), (plain, six_elements, six_error) = candidates
    wins = four_error < six_error
    block_wins = wins[:, None] if blocks.dim() == 2 else wins[:, :, None, :, None]
    scales = Scales(torch.where(wins, four.stored, plain.stored), torch.where(wins, four.encode, plain.encode))
    return scales, torch.where(block_wins, four_elements, six_elements)


def _summed(errors: Tensor) -> Tensor:
    """Errors of blocks -> one sum per block in float32: columns in order, then rows by halves."""
    sums = errors[..., 0].clone()
    # the order of the library: float32 sums in another one could choose the other scale
    for column in range(1, errors.shape[-1]):
        sums = sums + errors[..., column]
    if errors.dim() == 2:
        return sums
    while sums.shape[2] > 1:  # (leading, row blocks, rows, column blocks)
        half = sums.shape[2] // 2
        sums = sums[:, :, :half] + sums[:, :, half:]
    return sums[:, :, 0]
