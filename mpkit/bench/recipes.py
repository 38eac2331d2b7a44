"""Recipes: quantising blocks against rounding alone and torchao, a training step of each recipe, replayed scales.

The peer is torchao 0.18 (`pip install "mpkit[recipes]"`): its eager CPU path for MX and NVFP4 blocks, and its
`emulate=True` linear layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import nn

from mpkit.bench._measure import Row, interleaved
from mpkit.blocks import MXFP4, MXFP8_E4M3, NVFP4, BlockFormat, quantize_blocks
from mpkit.casting import cast_like
from mpkit.policies import tensor_scale_preset
from mpkit.replay import replay_tensor_scales
from mpkit.rounding import round_to

ROUND, MINE, PEER = "round_to the element format", "mpkit quantize_blocks", "torchao"
FORMATS: dict[str, BlockFormat] = {
    "MXFP8": replace(MXFP8_E4M3, scale_rounding="floor"),
    "MXFP4": MXFP4,
    "NVFP4": NVFP4,
}


def run(*, quick: bool, device: torch.device) -> list[Row]:
    """Ratios in one run: against rounding (at most 3), torchao's time over ours (at least 3), steps (at most 1.3)."""
    rows: list[Row] = []
    count, rounds = (2**20, 3) if quick else (10_000_000 // 512 * 512, 9)
    for name, fmt in FORMATS.items():
        rows += _quantising(name, fmt, count, rounds, device)
    for name in ("torchao_tensorwise", "torchao_rowwise", "torchao_rowwise_with_gw_hp"):
        rows += _step(name, rounds, device, quick)
    return [*rows, _replay(quick)]


def _quantising(name: str, fmt: BlockFormat, count: int, rounds: int, device: torch.device) -> list[Row]:
    x = torch.randn(count // 512, 512, device=device)
    case = f"{name}, {count:.0e} values"
    contenders: dict[str, Callable[[], object]] = {
        ROUND: lambda: round_to(x, fmt.element, overflow="saturate"),  # type: ignore[arg-type]
        MINE: lambda: quantize_blocks(x, fmt),
    }
    ours = interleaved("recipes", case, contenders, rounds=rounds, warmup=1, device=device, goals={MINE: 3.0})
    peer = _torchao_quantiser(name, x)
    if peer is None:
        return [*ours, Row("recipes", case, f"{PEER} over mpkit", skipped="torchao 0.18 is not installed")]
    both = interleaved("recipes", case, {MINE: contenders[MINE], PEER: peer}, rounds=rounds, warmup=1, device=device)
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
    return interleaved("recipes", case, contenders, rounds=rounds, device=device, goals={"mpkit": 1.3}, notes=notes)


def _torchao_layer(name: str, width: int, device: torch.device) -> Any:
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        return None
    config = replace(Float8LinearConfig.from_recipe_name(name.removeprefix("torchao_")), emulate=True)
    return convert_to_float8_training(nn.Sequential(nn.Linear(width, width, bias=False)).to(device), config=config)


def _replay(quick: bool) -> Row:
    steps, count = (1_000, 1_000) if quick else (10_000, 10_000)
    amax = np.exp(np.cumsum(np.random.default_rng(0).normal(size=steps) * 0.05)).astype(np.float32)
    policies = [tensor_scale_preset("te_delayed", history_len=1 + i) for i in range(count)]
    replay_tensor_scales(amax, policies[:10])
    start, cpu = time.perf_counter(), time.process_time()
    replay_tensor_scales(amax, policies)
    wall, busy = time.perf_counter() - start, time.process_time() - cpu  # one thread: busy is what the work takes
    case = f"{steps:.0e} steps x {count:.0e} delayed scales"
    note = f"{steps * count / busy:.3g} policy-steps/s of processor time; {wall:.2f} s by the clock"
    return Row("recipes", case, "replay_tensor_scales", busy, "a second of work", busy, goal=1.0, note=note)
