"""Rounding and block formats beside other packages that emulate them: `python tests/tools/peers.py`, where they are.

ml_dtypes, gfloat, pychop and qtorch round; torchao 0.18 quantises blocks and has linear layers with `emulate=True`. A
goal is a share of the peer's time. CPFloat is on no package index: a C library that would have to be built by hand.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module

import torch
from torch import Tensor, nn

from mpkit.bench import measure
from mpkit.bench.__main__ import line
from mpkit.blocks import MXFP4, MXFP8_E4M3, NVFP4, BlockFormat, quantize_blocks
from mpkit.casting import cast_like
from mpkit.formats import BF16, E4M3FN, E5M2, FP16, FloatFormat
from mpkit.rounding import round_to

ROUND = {"qtorch": 1 / 3, "gfloat": 0.1, "pychop": 0.1, "ml_dtypes": None}
NAMES = {  # those of gfloat and of ml_dtypes; float16 is NumPy's own
    FP16: ("binary16", "float16"),
    BF16: ("bfloat16", "bfloat16"),
    E5M2: ("ocp_e5m2", "float8_e5m2"),
    E4M3FN: ("ocp_e4m3", "float8_e4m3fn"),
}
BLOCKS = {"MXFP8": replace(MXFP8_E4M3, scale_rounding="floor"), "MXFP4": MXFP4, "NVFP4": NVFP4}


def rounder(name: str, fmt: FloatFormat) -> Callable[[Tensor], Tensor]:
    """Nearest-even rounding by another package, tensor in and tensor out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = import_module(name)
    if name == "qtorch":
        quantize = import_module("qtorch.quant").float_quantize
        return partial(quantize, exp=fmt.exponent_bits, man=fmt.fraction_bits, rounding="nearest")
    if name == "gfloat":
        info = getattr(import_module("gfloat.formats"), f"format_info_{NAMES[fmt][0]}")
        return lambda x: torch.from_numpy(package.round_ndarray(info, x.numpy()))
    if name == "pychop":
        package.backend("torch")
        return package.Chop(exp_bits=fmt.exponent_bits, sig_bits=fmt.fraction_bits, rmode=1)
    dtype = getattr(package, NAMES[fmt][1], NAMES[fmt][1])
    return lambda x: torch.from_numpy(x.numpy().astype(dtype).astype("float32"))


def quantiser(name: str, x: Tensor) -> Callable[[], object]:
    """torchao's blocks."""
    formats = import_module("torchao.prototype.mx_formats.mx_tensor")
    if name == "NVFP4":
        nvfp4 = import_module("torchao.prototype.mx_formats.nvfp4_tensor")
        return lambda: nvfp4.nvfp4_quantize(x, 16, nvfp4.per_tensor_amax_to_scale(x.abs().max()))
    element = torch.float8_e4m3fn if name == "MXFP8" else torch.float4_e2m1fn_x2
    floor = import_module("torchao.prototype.mx_formats.config").ScaleCalculationMode.FLOOR
    return lambda: formats.to_mx(x, element, 32, floor)


def layer(name: str, width: int) -> nn.Module:
    """torchao's linear layer under a recipe, emulated."""
    float8 = import_module("torchao.float8")
    config = replace(float8.Float8LinearConfig.from_recipe_name(name.removeprefix("torchao_")), emulate=True)
    return float8.convert_to_float8_training(nn.Sequential(nn.Linear(width, width, bias=False)), config=config)


def beside(topic: str, case: str, peer: str, make: Callable, mine: Callable, goal: float | None):
    """mpkit's time over a peer's, printed; a peer may fail in any way: not there, no compiler, another version."""
    try:
        contenders = {peer: make(), "mpkit": mine}
    except Exception as error:
        print(f"  {case:44.44} {peer:34.34} skipped: {type(error).__name__}: {error}"[:150])
        return
    goals = {} if goal is None else {"mpkit": goal}
    print(*map(line, measure(topic, case, contenders, rounds=9, warmup=1, goals=goals)), sep="\n")


def blocks(name: str, fmt: BlockFormat, x: Tensor) -> None:
    mine = partial(quantize_blocks, x, fmt)
    beside("recipes", f"{name} of 1e6 values", "torchao", partial(quantiser, name, x), mine, 1 / 3)


def main() -> None:
    torch.set_num_threads(1)
    x = torch.randn(10**6)
    for fmt in NAMES:
        for name, goal in ROUND.items():
            make = lambda name=name, fmt=fmt: partial(rounder(name, fmt), x)  # noqa: E731
            beside("rounding", f"{fmt.name} of 1e6 values", name, make, partial(round_to, x, fmt), goal)
    for name, form in BLOCKS.items():
        blocks(name, form, x[: x.numel() // 512 * 512].view(-1, 512))
    rows = torch.randn(512, 1024)
    for name in ("torchao_tensorwise", "torchao_rowwise", "torchao_rowwise_with_gw_hp"):
        own = cast_like(nn.Linear(1024, 1024, bias=False), name)
        step = lambda net: lambda: net(rows).sum().backward()  # noqa: E731
        beside("recipes", f"{name}, a step", "torchao", lambda name=name: step(layer(name, 1024)), step(own), 1.3)  # noqa: B023


if __name__ == "__main__":
    main()
