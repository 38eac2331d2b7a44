"""The scale of a block from its largest magnitude, by every rule. Exponents come from bits, never from a logarithm.

Each product and quotient is rounded to float32 by itself, in the order of the library reproduced: another order gives
other scale bytes beside ties. Divisions are tensor by tensor, because `number / tensor` is a reciprocal and a product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mpkit.blocks.format import BlockFormat, PowerFormat
from mpkit.formats import E4M3FN
from mpkit.rounding import round_to

FLOAT32_MAX = torch.finfo(torch.float32).max
_EXPONENT, _FRACTION, _INF = 0x7F800000, 0x007FFFFF, 0x7F800000


class Scales(NamedTuple):
    """What a rule gives per block: the stored scale, and what elements are multiplied by (divided, if `divides`)."""

    stored: Tensor
    encode: Tensor
    divides: bool = False


def block_scales(amax: Tensor, fmt: BlockFormat, tensor_amax: Tensor | None, dtype: torch.dtype) -> Scales:
    """Largest magnitudes of blocks (*) float32 -> their scales (*), by the rule of `fmt`.

    Args:  tensor_amax is the largest magnitude of the tensor where `fmt.tensor_scale`; `dtype` is that of the input,
           whose largest number stands for an infinite scale in TransformerEngine's FP8 blocks.
    """
    rule, power = fmt.scale_rounding, isinstance(fmt.scale, PowerFormat)
    if fmt.scale.name == "e4m3fn":
        return nvfp4_scales(amax, fmt, tensor_amax)
    if power and rule in ("floor", "ceil", "even", "rceil"):
        byte = mx_byte(amax, fmt)
        decode = power_of_two(byte).masked_fill_(byte == 255, torch.nan)
        return Scales(decode, power_of_two(254 - byte).masked_fill_(byte == 255, torch.nan))
    limit = constant(fmt.element.max, amax)
    if rule in ("te", "torchao"):
        if rule == "te":
            encode = quotient(limit, amax)
            encode = torch.where(encode.isinf(), min(torch.finfo(dtype).max, FLOAT32_MAX), encode)
            encode = torch.where((amax == 0) | (amax > FLOAT32_MAX) | amax.isnan(), 1.0, encode).float()
        else:
            encode = quotient(limit.double(), amax.double().clamp(min=1e-12)).float()
        if power:
            encode = floored_power(encode)
        return Scales(quotient(torch.ones_like(encode), encode), encode)
    stored = quotient(amax.clamp(min=1e-4), limit)
    if power:
        bits = stored.view(torch.int32)
        byte = ((bits >> 23) + ((bits & _FRACTION) != 0)).clamp(1, 254)
        stored = torch.where(stored.isnan(), stored, power_of_two(byte))
    if rule == "deepseek":
        return Scales(stored, stored, divides=True)
    return Scales(stored, quotient(torch.ones_like(stored), stored))


def mx_byte(amax: Tensor, fmt: BlockFormat) -> Tensor:
    """Largest magnitudes (*) float32 -> E8M0 bytes (*) int32: 0 to 254; 255 (NaN) where a block holds inf or NaN."""
    element, rule = fmt.element, fmt.scale_rounding
    bits = amax.view(torch.int32)
    if rule == "rceil":
        inverse = quotient(constant(1.0, amax), constant(element.max, amax))
        scaled = (amax * inverse).view(torch.int32)
        field, fraction = scaled >> 23, scaled & _FRACTION
        byte = field + torch.where(field == 0, fraction > 0x400000, fraction != 0)
    else:
        if rule == "even":  # half up to the element's fraction bits; a carry beyond float32 becomes byte 255
            carried = (bits + (1 << (22 - element.fraction_bits))) >> 23
            bits = bits.masked_fill(carried >= 255, _INF)
            byte = carried - element.max_exponent
        else:
            byte = (bits >> 23) - element.max_exponent
        if rule == "ceil":
            byte = byte + ((bits & _FRACTION) != 0)
    return byte.clamp(0, 254).masked_fill(bits >= _INF, 255)


def nvfp4_scales(amax: Tensor, fmt: BlockFormat, tensor_amax: Tensor | None) -> Scales:
    """E4M3 block scales under one scale of the tensor (none: 1)."""
    limit = constant(fmt.element.max, amax)
    one = torch.ones_like(limit)
    if fmt.scale_rounding == "torchao":
        outer = one if tensor_amax is None else quotient(tensor_amax, limit * 448)
        wanted = quotient(quotient(amax, limit), outer).clamp(2.0**-6, 448)
        stored = round_to(wanted, E4M3FN)
        return Scales(stored, quotient(quotient(one, outer), stored))
    outer = tensor_encode(fmt, tensor_amax) if tensor_amax is not None else one
    return nvfp4_from(amax * (outer * quotient(one, limit)), outer)


def nvfp4_from(wanted: Tensor, outer: Tensor) -> Scales:
    """The E4M3 scale nearest to `wanted`, and the factor that goes with it under the tensor's encoding scale."""
    stored = round_to(wanted.clamp(max=448), E4M3FN)
    inverse = stored * quotient(torch.ones_like(outer), outer)
    return Scales(stored, quotient(torch.ones_like(inverse), inverse).clamp_(max=FLOAT32_MAX))


def tensor_bound(fmt: BlockFormat) -> float:
    """What the tensor's largest magnitude is mapped to: 2688 = 6 * 448 for NVFP4, 6 * 256 for its four-over-six."""
    bound = float(fmt.scale_rounding.rpartition("_")[2]) if fmt.scale_rounding.startswith("4over6") else 448.0
    return fmt.element.max * bound


def tensor_encode(fmt: BlockFormat, tensor_amax: Tensor) -> Tensor:
    """The tensor's encoding scale, 2688 / amax: 1 where that is no positive number, at most the largest float32."""
    scale = quotient(constant(tensor_bound(fmt), tensor_amax), tensor_amax).clamp(max=FLOAT32_MAX)
    return torch.where((tensor_amax == 0) | (scale == 0), 1.0, scale).float()


def quotient(a: Tensor, b: Tensor) -> Tensor:
    """a / b, rounded once on every device: both are tensors there."""
    return torch.div(a, b)


def constant(value: float, like: Tensor) -> Tensor:
    """() of the dtype and device of `like`, without a copy from the host."""
    return torch.full((), value, dtype=like.dtype, device=like.device)


def power_of_two(field: Tensor) -> Tensor:
    """Exponent fields (*) int32, 0 to 254 -> 2**(field - 127) float32, from the bits; 0 gives the subnormal 2**-127."""
    return (field << 23).masked_fill(field <= 0, 0x00400000).view(torch.float32)


def floored_power(scale: Tensor) -> Tensor:
    """Positive float32 -> the power of two at or below, at least 2**-127: the fraction bits cleared."""
    return power_of_two(scale.view(torch.int32) >> 23)
