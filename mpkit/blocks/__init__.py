"""Formats whose elements share a scale: MX, NVFP4 and FP8 blocks; quantise and dequantise."""

from mpkit.blocks.format import (
    BLOCK_FORMATS,
    E8M0,
    FP8_1X128,
    FP8_128X128,
    INT8,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    NVFP4,
    RULES,
    BlockFormat,
    IntFormat,
    PowerFormat,
)
from mpkit.blocks.hadamard import hadamard
from mpkit.blocks.quantize import Blocks, quantize_blocks, round_with_bits

__all__ = [
    "BLOCK_FORMATS", "E8M0", "FP8_1X128", "FP8_128X128", "INT8", "MXFP4", "MXFP6_E2M3", "MXFP6_E3M2", "MXFP8_E4M3",
    "MXFP8_E5M2", "MXINT8", "NVFP4", "RULES", "BlockFormat", "Blocks", "IntFormat", "PowerFormat", "hadamard",
    "quantize_blocks", "round_with_bits",
]  # fmt: skip
