"""Rounding: against a copy, torch's own casts, its generator, and other packages that emulate formats."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpkit.bench._measure import Row, interleaved
from mpkit.formats import BF16, E2M1, E4M3FN, E5M2, FP16, TF32, FloatFormat, get_format
from mpkit.rounding import round_to

Rounder = Callable[[Tensor], Tensor]

PEERS = {  # package: how many times as fast round_to is meant to be
    "qtorch": 3.0,
    "gfloat": 10.0,
    "pychop": 10.0,
    "ml_dtypes": None,
}


def run(*, quick: bool, device: torch.device) -> list[Row]:
    """All rows: nearest even in a large tensor, peers in a smaller one, stochastic, the other modes."""
    large = 10**6 if quick else 10**8 if device.type == "cuda" else 10**7
    rounds = 5 if quick else 15
    x = torch.randn(large, generator=torch.Generator().manual_seed(0)).to(device)
    rows = _nearest(x, rounds, device)
    rows += _stochastic(x, rounds, device) + _modes(x[: large // 10], rounds, device)
    x = x[: 10**6 if not quick else 10**5].clone()
    rows += _stochastic(x, rounds, device) + _peers(x, rounds, device)
    return rows


def _nearest(x: Tensor, rounds: int, device: torch.device) -> list[Row]:
    out, size = torch.empty_like(x), f"{x.numel():.0e}".replace("+0", "")
    note = f"{_extra_memory(x, out):.3f} of the input as extra memory"
    rows = []
    for fmt in (FP16, BF16):
        native: Any = fmt.torch_dtype
        contenders: dict[str, Callable[[], object]] = {
            "torch .to().to()": partial(_there_and_back, x, native),
            "mpkit, out=": partial(round_to, x, fmt, out=out),
            "mpkit": partial(round_to, x, fmt),
        }
        rows += interleaved(
            "rounding",
            f"{fmt.name} nearest_even {size}",
            contenders,
            rounds=rounds,
            device=device,
            goals={"mpkit, out=": 1.1},
            notes={"mpkit, out=": note},
        )
    for fmt in (TF32, E5M2, E4M3FN, get_format("e4m7")):
        contenders = {"copy_": partial(out.copy_, x), "mpkit, out=": partial(round_to, x, fmt, out=out)}
        if fmt.torch_dtype is not None:
            contenders["torch .to().to()"] = partial(_there_and_back, x, fmt.torch_dtype)
        if device.type == "cuda":
            contenders["mpkit compiled"] = partial(torch.compile(round_to), x, fmt)
        rows += interleaved(
            "rounding",
            f"{fmt.name} nearest_even {size}",
            contenders,
            rounds=rounds,
            device=device,
            goals={"mpkit, out=": 4.0 if fmt is E4M3FN else 3.5, "mpkit compiled": 1.3},
            notes={"mpkit, out=": note},
        )
    return rows


def _there_and_back(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float()


def _stochastic(x: Tensor, rounds: int, device: torch.device) -> list[Row]:
    out, rows = torch.empty_like(x), []
    for fmt in (FP16, BF16, E5M2, E4M3FN):
        rows += interleaved(
            "rounding",
            f"{fmt.name} stochastic {x.numel():.0e}".replace("+0", ""),
            {"torch.rand_like": partial(torch.rand_like, x), "mpkit": partial(round_to, x, fmt, "stochastic", out=out)},
            rounds=rounds,
            device=device,
            goals={"mpkit": 1.6},
        )
    return rows


def _modes(x: Tensor, rounds: int, device: torch.device) -> list[Row]:
    out, size = torch.empty_like(x), f"{x.numel():.0e}".replace("+0", "")
    modes = ("nearest_away", "toward_zero", "up", "down", "stochastic")
    rows = []
    for fmt in (FP16, BF16, TF32, E5M2, E4M3FN, E2M1):
        contenders = {mode: partial(round_to, x, fmt, mode, out=out) for mode in modes}  # type: ignore[arg-type]
        rows += interleaved(
            "rounding",
            f"{fmt.name}, the other modes {size}",
            {"copy_": partial(out.copy_, x), **contenders},
            rounds=rounds,
            device=device,
            goals=dict.fromkeys(modes, 6.0),
        )
    return rows


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
        measured = interleaved("rounding", case, contenders, rounds=rounds, warmup=1, goals=goals, notes=notes)
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


class _Live(TorchDispatchMode):
    """Bytes of the storages that operations create, while somebody holds them."""

    now = peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in known:
                size = made.untyped_storage().nbytes()
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(made, self._gone, size)
        return result

    def _gone(self, size: int) -> None:
        self.now -= size


def _extra_memory(x: Tensor, out: Tensor) -> float:
    """Peak extra memory of a call with out=, as a share of the input."""
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats(x.device)
        before = torch.cuda.memory_allocated(x.device)
        round_to(x, E5M2, out=out)
        return (torch.cuda.max_memory_allocated(x.device) - before) / x.nbytes
    with _Live() as live:
        round_to(x, E5M2, out=out)
    return live.peak / x.nbytes
