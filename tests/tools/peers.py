"""Rounding and block formats beside other packages that emulate them: `python tests/tools/peers.py`, where they are.

ml_dtypes, gfloat, pychop and qtorch round; torchao 0.18 quantises blocks and has linear layers with `emulate=True`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.bench import Row, measure
from mpkit.bench.__main__ import line
from mpkit.blocks import MXFP4, MXFP8_E4M3, NVFP4, BlockFormat, quantize_blocks
from mpkit.casting import cast_like
from mpkit.formats import BF16, E4M3FN, E5M2, FP16, FloatFormat
from mpkit.rounding import round_to

Rounder = Callable[[Tensor], Tensor]
PEERS = {"qtorch": 3.0, "gfloat": 10.0, "pychop": 10.0, "ml_dtypes": None}
"""Package -> how many times as fast round_to is meant to be."""
ROUND, MINE, PEER = "round_to the element format", "mpkit quantize_blocks", "torchao"
FORMATS: dict[str, BlockFormat] = {
    "MXFP8": replace(MXFP8_E4M3, scale_rounding="floor"),
    "MXFP4": MXFP4,
    "NVFP4": NVFP4,
}


def main() -> None:
    torch.set_num_threads(1)
    device, x = torch.device("cpu"), torch.randn(10**6)
    rows = _peers(x, 9, device)
    for name, fmt in FORMATS.items():
        rows += _quantising(name, fmt, 10**6, 9, device)
    for name in ("torchao_tensorwise", "torchao_rowwise", "torchao_rowwise_with_gw_hp"):
        rows += _step(name, 9, device, quick=False)
    print(*map(line, rows), sep="\n")


def _peers(x: Tensor, rounds: int, device: torch.device) -> list[Row]:
    rows = [
        Row("rounding", "all formats", "CPFloat", skipped="not on the package index: a C library to be built by hand")
    ]
    for fmt in (FP16, BF16, E5M2, E4M3FN):
        case = f"{fmt.name} against peers {x.numel():.0e}".replace("+0", "")
        contenders: dict[str, Callable[[], object]] = {"mpkit": partial(round_to, x, fmt)}
        notes = {}
        for name in PEERS:
            if device.type != "cpu":
                rows.append(Row("rounding", case, name, skipped="compared on the CPU only"))
                continue
            try:
                peer = _peer(name, fmt)
                wrong = int((peer(x) != round_to(x, fmt)).sum())
            except Exception as error:  # a peer may fail in any way: not installed, no compiler, another version
                rows.append(Row("rounding", case, name, skipped=f"{type(error).__name__}: {error}"[:100]))
                continue
            contenders[name] = partial(peer, x)
            notes[name] = f"{wrong} of {x.numel()} values differ"
        goals = {name: goal for name, goal in PEERS.items() if goal is not None}
        measured = measure("rounding", case, contenders, rounds=rounds, warmup=1, goals=goals, notes=notes)
        rows += [replace(row, goal_is_floor=True) for row in measured]
    return rows


def _peer(name: str, fmt: FloatFormat) -> Rounder:
    """Nearest-even rounding by another package, tensor in and tensor out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = import_module(name)
    widths = fmt.exponent_bits, fmt.fraction_bits
    if name == "qtorch":
        quantize = import_module("qtorch.quant").float_quantize
        return lambda x: quantize(x, exp=widths[0], man=widths[1], rounding="nearest")
    if name == "gfloat":
        names = {"fp16": "binary16", "bf16": "bfloat16", "e5m2": "ocp_e5m2", "e4m3fn": "ocp_e4m3"}
        info = getattr(import_module("gfloat.formats"), f"format_info_{names[fmt.name]}")
        return lambda x: torch.from_numpy(package.round_ndarray(info, x.numpy()))
    if name == "pychop":
        package.backend("torch")
        return package.Chop(exp_bits=widths[0], sig_bits=widths[1], rmode=1)
    names = {"fp16": "float16", "bf16": "bfloat16", "e5m2": "float8_e5m2", "e4m3fn": "float8_e4m3fn"}
    dtype = getattr(package, names[fmt.name], names[fmt.name])  # fp16 is numpy's own
    return lambda x: torch.from_numpy(x.numpy().astype(dtype).astype("float32"))


def _quantising(name: str, fmt: BlockFormat, count: int, rounds: int, device: torch.device) -> list[Row]:
    x = torch.randn(count // 512, 512, device=device)
    case = f"{name}, {count:.0e} values"
    contenders: dict[str, Callable[[], object]] = {
        ROUND: lambda: round_to(x, fmt.element, overflow="saturate"),  # type: ignore[arg-type]
        MINE: lambda: quantize_blocks(x, fmt),
    }
    ours = measure("recipes", case, contenders, rounds=rounds, warmup=1, device=device, goals={MINE: 3.0})
    peer = _torchao_quantiser(name, x)
    if peer is None:
        return [*ours, Row("recipes", case, f"{PEER} over mpkit", skipped="torchao 0.18 is not installed")]
    both = measure("recipes", case, {MINE: contenders[MINE], PEER: peer}, rounds=rounds, warmup=1, device=device)
    return [*ours, replace(both[1], contender=f"{PEER} over mpkit", goal=3.0, goal_is_floor=True, note=_peer_version())]


def _peer_version() -> str:
    return f"{PEER} {version(PEER)}"


def _torchao_quantiser(name: str, x: torch.Tensor) -> Callable[[], object] | None:
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
    except ImportError:
        return None
    if name == "NVFP4":
        return lambda: nvfp4_quantize(x, 16, per_tensor_amax_to_scale(x.abs().max()))
    element = torch.float8_e4m3fn if name == "MXFP8" else torch.float4_e2m1fn_x2
    return lambda: to_mx(x, element, 32, ScaleCalculationMode.FLOOR)


def _step(name: str, rounds: int, device: torch.device, quick: bool) -> list[Row]:
    """Forward and backward of one linear layer under torchao's recipe, here and there emulated."""
    width, batch = (256, 128) if quick else (1024, 512)
    case = f"{name} step, {batch} x {width} -> {width}"
    x = torch.randn(batch, width, device=device)

    def step_of(layer: nn.Module) -> Callable[[], object]:
        return lambda: layer(x).sum().backward()

    mine = cast_like(nn.Linear(width, width, bias=False).to(device), name)
    peer = _torchao_layer(name, width, device)
    if peer is None:
        return [Row("recipes", case, "mpkit", skipped="torchao 0.18 is not installed")]
    contenders = {f"{PEER}, emulate=True": step_of(peer), "mpkit": step_of(mine)}
    notes = {f"{PEER}, emulate=True": _peer_version()}
    return measure("recipes", case, contenders, rounds=rounds, device=device, goals={"mpkit": 1.3}, notes=notes)


def _torchao_layer(name: str, width: int, device: torch.device) -> Any:
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        return None
    config = replace(Float8LinearConfig.from_recipe_name(name.removeprefix("torchao_")), emulate=True)
    return convert_to_float8_training(nn.Sequential(nn.Linear(width, width, bias=False)).to(device), config=config)


if __name__ == "__main__":
    main()
