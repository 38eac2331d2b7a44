"""Elements in the one-byte dtypes of torch, and back: a quarter of the memory that float32 takes to be written."""

from __future__ import annotations

import torch
from torch import Tensor

from mpkit.blocks.format import IntFormat
from mpkit.formats import FloatFormat

CHUNK = 2**16  # values that stay in the cache of one core while several passes run over them
_LARGEST = torch.finfo(torch.float32).max


def byte_dtype(element: FloatFormat | IntFormat) -> torch.dtype | None:
    """The dtype of one byte in which torch stores elements of this format, None if it has none."""
    native = element.torch_dtype if isinstance(element, FloatFormat) else None
    return native if native in (torch.float8_e4m3fn, torch.float8_e5m2) else None


def casts(x: Tensor) -> bool:
    """Whether torch casts this tensor to 8-bit floats where it lies, as it does eagerly on these devices."""
    return x.device.type in ("cpu", "cuda", "meta") and not torch.compiler.is_compiling()


def widened(stored: Tensor) -> Tensor:
    """What `Blocks.stored` holds -> float32 of the same shape; float32 itself comes back as it is.

    On a CPU it goes through float16, whose conversion processors have built in; torch's own takes several times as
    long. An E5M2 pattern is the upper half of the float16 one. Moved by 7 bits an E4M3 pattern is a float16 with an
    exponent too small by 8, and NaN, the pattern above 448, becomes 480.
    """
    if stored.dtype is torch.float32 or not stored.is_cpu or torch.compiler.is_compiling():
        return stored.float()
    four = stored.dtype is torch.float8_e4m3fn
    source = stored.contiguous().view(torch.int8)
    out = torch.empty(source.shape, dtype=torch.float32, device=source.device)
    scratch = torch.empty(min(CHUNK, out.numel()), dtype=torch.float32, device=source.device)
    for piece, target in zip(source.view(-1).split(CHUNK), out.view(-1).split(CHUNK)):
        beyond = scratch[: len(piece)]
        half = beyond.view(torch.int16)[: len(piece)]
        half.copy_(piece).bitwise_left_shift_(7 if four else 8)
        if four:
            half.bitwise_and_(-0x4001)  # of the sign, which was spread over two bits, the upper one
        target.copy_(half.view(torch.float16))
        if four:
            target.mul_(2.0**8)
            torch.mul(target, _LARGEST / 464, out=beyond)  # infinite for 480 alone
            target.add_(beyond, alpha=0)
    return out
