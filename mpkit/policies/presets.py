"""Every framework's dynamic loss scale, written down as a policy under the framework's own parameter names."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch

from .rule import FLOAT32_MAX, NEVER, SMALLEST_NORMAL, ScalePolicy, in_float16, in_float32


def preset(framework: str, **parameters: object) -> ScalePolicy:
    """The policy of a framework's loss scaler: `parameters` are those of its own class, defaults too.

    `preset("fairscale_layerwise", layer_scale_dict={...})` is a vector, one policy per layer.

    Raises:  ValueError for an unknown framework or a value that the framework itself refuses, TypeError for a
             parameter that its class does not have.

    >>> preset("deepspeed", scale_window=500).hysteresis
    2
    """
    build = _known(framework).build
    try:
        inspect.signature(build).bind(**parameters)
    except TypeError as error:
        raise TypeError(f"{framework} takes {inspect.signature(build)}: {error}") from None
    return _on_its_grid(replace(build(**parameters), name=framework))


def own_names(framework: str) -> tuple[str | None, str]:
    """What a framework's class calls its first scale (None: it has one for each layer) and its growth interval.

    >>> own_names("paddle")
    ('init_loss_scaling', 'incr_every_n_steps')
    """
    return _known(framework)[1:]


def _known(framework: str) -> _Preset:
    if framework not in _PRESETS:
        raise ValueError(f"unknown framework {framework!r}; known are {', '.join(FRAMEWORKS)}")
    return _PRESETS[framework]


def _on_its_grid(policy: ScalePolicy) -> ScalePolicy:
    """Start, floor and cap as the framework stores them: in the format of its scale."""
    if policy.scale_bits == 64 or policy.shape:
        return policy
    narrow = in_float32 if policy.scale_bits == 32 else in_float16
    return replace(
        policy,
        init_scale=narrow(float(policy.init_scale)),
        min_scale=narrow(float(policy.min_scale)),
        max_scale=narrow(float(policy.max_scale)),
    )


def _need(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


def _named(parameters: dict[str, Any], **others: Any) -> ScalePolicy:
    """The policy whose fields are the variables of the same name, and `others`."""
    own = {field.name for field in fields(ScalePolicy)}
    return ScalePolicy(
        **{name: value for name, value in parameters.items() if name in own and name not in others}, **others
    )


def _patience(count: int) -> int:
    """A count that is compared for equality: below 1 it is never reached."""
    return count if count >= 1 else NEVER


def _mpkit(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = 2.0**-14,
    max_scale: float = 2.0**24,
    hysteresis: int = 1,
    raise_at_min: bool = True,
) -> ScalePolicy:
    """mpkit's own: what no mainstream default has is a floor that reports and a finite cap.

    The floor lies below 1, because large losses need that, and as low as the reciprocal still fits a float16 normal;
    an overflow there is reported, since no scale can be the cause. At the cap the reciprocal is the smallest
    float16: above it, float16 gradients would all unscale to zero.
    """
    _need(growth_factor > 1 > backoff_factor > 0, "need growth_factor > 1 > backoff_factor > 0")
    _need(0 < min_scale <= init_scale <= max_scale < math.inf, "need 0 < min_scale <= init_scale <= max_scale < inf")
    soon = hysteresis > 1
    return _named(locals(), refill_on_growth=soon, refill_on_finite=soon)


def _torch(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> ScalePolicy:
    if not enabled:
        return ScalePolicy.fixed(1.0)
    _need(growth_factor > 1, f"growth_factor must be above 1, got {growth_factor}")
    _need(backoff_factor < 1, f"backoff_factor must be below 1, got {backoff_factor}")
    return _named(locals())


def _keras3(initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000) -> ScalePolicy:
    return ScalePolicy(
        init_scale=initial_scale, growth_interval=dynamic_growth_steps, hold_at_overflow=False, flush_subnormal=True
    )


def _tf_keras(
    dynamic: bool = True, initial_scale: float | None = None, dynamic_growth_steps: int | None = None
) -> ScalePolicy:
    if not dynamic:
        if initial_scale is None:
            raise ValueError("with dynamic=False, initial_scale must be given: it is the fixed scale")
        return ScalePolicy.fixed(initial_scale)
    steps = 2000 if dynamic_growth_steps is None else dynamic_growth_steps
    return _tf_v1(2.0**15 if initial_scale is None else initial_scale, steps)


def _tf_v1(initial_loss_scale: float = 2.0**15, increment_period: int = 2000, multiplier: float = 2.0) -> ScalePolicy:
    _need(multiplier > 0, f"multiplier must be above 0, got {multiplier}")
    factor = in_float32(multiplier)  # so TensorFlow holds it; the compiler makes the division a product
    return ScalePolicy(
        init_scale=initial_loss_scale,
        growth_factor=factor,
        backoff_factor=in_float32(1 / factor),
        growth_interval=increment_period,
        min_scale=1.0,
        growth_ge=True,
    )


def _apex(
    loss_scale: float | str = "dynamic",
    init_scale: float = 2.0**16,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> ScalePolicy:
    """`scale_factor` is taken and ignored, as the class does: 2 is hard-wired."""
    if loss_scale != "dynamic":
        return ScalePolicy.fixed(float(loss_scale), scale_bits=64)
    return ScalePolicy(
        init_scale=min(max_loss_scale, init_scale),
        growth_interval=scale_window,
        min_scale=min_loss_scale or 0.0,
        max_scale=max_loss_scale,
        scale_bits=64,
        hold_at_overflow=False,
        error_at_zero=True,
    )


def _deepspeed(
    init_scale: float = 2.0**16,
    scale_factor: float = 2.0,
    scale_window: int = 1000,
    min_scale: float = 1,
    delayed_shift: int = 2,
    consecutive_hysteresis: bool = False,
    raise_error_at_min_scale: bool = True,
    dtype: torch.dtype = torch.float16,
) -> ScalePolicy:
    """The dynamic scaler of ZeRO 1-3 with the defaults of its configuration."""
    _need(scale_window >= 1, f"scale_window must be at least 1, got {scale_window}")
    return ScalePolicy.by_factor(
        init_scale,
        scale_factor,
        scale_window,
        min_scale,
        scale_bits=64,
        hold_at_overflow=False,
        first_growth_lag=1,
        hysteresis=_patience(delayed_shift),
        refill_on_growth=True,
        refill_on_finite=consecutive_hysteresis,
        raise_at_min=raise_error_at_min_scale,
        error_at_inf=dtype is torch.float16,
    )


def _megatron(
    initial_scale: float = 2.0**32,
    min_scale: float = 1.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
) -> ScalePolicy:
    _need(0 < min_scale <= initial_scale, f"need 0 < min_scale <= initial_scale, got {min_scale}, {initial_scale}")
    _need(growth_factor > 1 > backoff_factor > 0, "need growth_factor > 1 > backoff_factor > 0")
    _need(growth_interval > 0, f"growth_interval must be above 0, got {growth_interval}")
    _need(hysteresis > 0, f"hysteresis must be above 0, got {hysteresis}")
    growth_factor, backoff_factor = in_float32(growth_factor), in_float32(backoff_factor)
    return _named(locals(), init_scale=initial_scale, hold_at_overflow=False, refill_on_growth=True)


def _colossalai(
    initial_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    min_scale: float | None = None,
    max_scale: float | None = None,
    hysteresis: int = 2,
    verbose: bool = False,
) -> ScalePolicy:
    _need(hysteresis >= 0, f"hysteresis must be at least 0, got {hysteresis}")
    megatron = _megatron(initial_scale, min_scale or initial_scale, growth_factor, backoff_factor, growth_interval)
    return replace(megatron, min_scale=min_scale or 0.0, max_scale=max_scale or math.inf, hysteresis=hysteresis)


def _fairseq(
    init_scale: float = 2.0**15,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    tolerance: float = 0.0,
    threshold: float | None = None,
    min_loss_scale: float = 1e-4,
) -> ScalePolicy:
    _need(scale_window >= 1, f"scale_window must be at least 1, got {scale_window}")
    return ScalePolicy.by_factor(
        init_scale,
        scale_factor,
        scale_window,
        0.0 if threshold is None else threshold,
        scale_bits=64,
        hold_at_overflow=False,
        tolerance=max(0.0, tolerance),
        stop_at=min_loss_scale,
    )


def _jmp(
    loss_scale: float,
    counter: int = 0,
    period: int = 2000,
    factor: float = 2,
    min_loss_scale: float = 1.0,
    dtype: str = "float32",
    jit: bool = False,
) -> ScalePolicy:
    """`jit=True`: as carried through `jax.jit`, where the floor is lost (1) and the division becomes a product."""
    _need(dtype in ("float16", "float32", "float64"), f"dtype is 'float16', 'float32' or 'float64', got {dtype!r}")
    _need(factor > 0, f"factor must be above 0, got {factor}")
    bits = {"float16": 16, "float32": 32, "float64": 64}[dtype]
    narrow = in_float16 if bits == 16 else in_float32 if bits == 32 else float
    held = narrow(factor)
    product = {"backoff_factor": narrow(1 / held), "backoff_divisor": 1.0} if jit else {}
    return ScalePolicy.by_factor(
        loss_scale,
        held,
        period,
        1.0 if jit else min_loss_scale,
        scale_bits=bits,
        flush_subnormal=bits == 32,
        init_count=counter,
        **product,
    )


def _flax(
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    fin_steps: int = 0,
    scale: float = 2.0**16,
    minimum_scale: float | None = SMALLEST_NORMAL,
) -> ScalePolicy:
    growth_factor, backoff_factor = in_float32(growth_factor), in_float32(backoff_factor)
    min_scale, max_scale, init_count = minimum_scale or 0.0, FLOAT32_MAX, fin_steps
    return _named(locals(), init_scale=scale, first_growth_lag=1, next_growth_lag=1, flush_subnormal=True)


def _paddle(
    enable: bool = True,
    init_loss_scaling: float = 2.0**16,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 1,
    use_dynamic_loss_scaling: bool = True,
) -> ScalePolicy:
    if not (enable and use_dynamic_loss_scaling):
        return ScalePolicy.fixed(init_loss_scaling if enable else 1.0)
    _need(incr_ratio > 1, f"incr_ratio must be above 1, got {incr_ratio}")
    _need(0 < decr_ratio < 1, f"decr_ratio must lie in (0, 1), got {decr_ratio}")
    return ScalePolicy(
        init_scale=init_loss_scaling,
        growth_factor=in_float32(incr_ratio),
        backoff_factor=in_float32(decr_ratio),
        growth_interval=incr_every_n_steps,
        hold_at_overflow=False,
        hysteresis=_patience(decr_every_n_nan_or_inf),
        refill_on_finite=True,
        refill_on_backoff=True,
    )


def _paddle_static(
    init_loss_scaling: float = 2.0**15,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.8,
    incr_every_n_steps: int = 1000,
    decr_every_n_nan_or_inf: int = 2,
) -> ScalePolicy:
    """The defaults of the older of two signatures of `paddle.static.amp.decorate` (Paddle 3.3.1): that of a call with
    `use_pure_fp16` or `use_bf16`. A plain `decorate(optimizer)` takes the newer one, with the defaults of `paddle`.
    """
    eager = _paddle(True, init_loss_scaling, incr_ratio, decr_ratio, incr_every_n_steps, decr_every_n_nan_or_inf)
    return replace(eager, min_scale=1.0, hold_at_overflow=True)


def _mxnet(_loss_scale: float = 2.0**16, _scale_seq_len: int = 2000, _max_loss_scale: float = 2.0**24) -> ScalePolicy:
    """The class has no arguments; these are the names of its private fields."""
    return ScalePolicy(
        init_scale=_loss_scale,
        growth_interval=_scale_seq_len,
        max_scale=_max_loss_scale,
        scale_bits=64,
        hold_at_overflow=False,
        delayed=True,
    )


def _fairscale_layerwise(
    layer_scale_dict: Mapping[str, float],
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 10000,
    min_scale: float = SMALLEST_NORMAL,
    max_scale: float = FLOAT32_MAX,
) -> ScalePolicy:
    if not isinstance(layer_scale_dict, Mapping):
        raise TypeError(f"layer_scale_dict must be {{name: scale}}, got {type(layer_scale_dict).__name__}")
    _need(len(layer_scale_dict) > 0, "layer_scale_dict needs at least one layer: {name: scale}")
    below = {name: scale for name, scale in layer_scale_dict.items() if not scale > 0}
    _need(not below, f"the scales of layer_scale_dict must be above 0, got {below}")
    _need(growth_factor > 1 > backoff_factor, "need growth_factor > 1 > backoff_factor")
    init_scale = torch.tensor([float(v) for v in layer_scale_dict.values()], dtype=torch.float64)
    layers, scale_bits = tuple(layer_scale_dict), 64
    return _named(locals(), hold_at_overflow=False, clamp_both_ways=True)


def _mindspore_scaler(scale_value: float, scale_factor: int, scale_window: int) -> ScalePolicy:
    return _jmp(scale_value, factor=scale_factor, period=scale_window)


def _mindspore_cell(loss_scale_value: float, scale_factor: float, scale_window: int) -> ScalePolicy:
    """`scale_window` may be a fraction, as in the class: the counter passes it at the next whole step."""
    _need(scale_factor > 0, f"scale_factor must be above 0, got {scale_factor}")
    factor = in_float32(scale_factor)
    return ScalePolicy(
        init_scale=loss_scale_value,
        growth_factor=factor,
        backoff_factor=in_float32(1 / factor),
        growth_interval=math.ceil(scale_window),
        min_scale=1.0,
        hold_at_overflow=False,
        growth_ge=True,
    )


def _mindspore_manager(
    init_loss_scale: float = 2.0**24, scale_factor: float = 2, scale_window: int = 2000
) -> ScalePolicy:
    _need(scale_factor > 0, f"scale_factor must be above 0, got {scale_factor}")
    return ScalePolicy(
        init_scale=init_loss_scale,
        growth_factor=scale_factor,
        backoff_factor=1 / scale_factor,
        growth_interval=scale_window,
        min_scale=1.0,
        scale_bits=64,
        hold_at_overflow=False,
        max_consecutive=1000,
    )


class _Preset(NamedTuple):
    """A framework's rule, and what its class calls the first scale and the finite steps before growth."""

    build: Callable[..., ScalePolicy]
    start: str | None
    interval: str


_PRESETS = {
    "mpkit": _Preset(_mpkit, "init_scale", "growth_interval"),
    "torch": _Preset(_torch, "init_scale", "growth_interval"),
    "keras3": _Preset(_keras3, "initial_scale", "dynamic_growth_steps"),
    "tf_keras": _Preset(_tf_keras, "initial_scale", "dynamic_growth_steps"),
    "tf_v1": _Preset(_tf_v1, "initial_loss_scale", "increment_period"),
    "apex": _Preset(_apex, "init_scale", "scale_window"),
    "deepspeed": _Preset(_deepspeed, "init_scale", "scale_window"),
    "megatron": _Preset(_megatron, "initial_scale", "growth_interval"),
    "colossalai": _Preset(_colossalai, "initial_scale", "growth_interval"),
    "fairseq": _Preset(_fairseq, "init_scale", "scale_window"),
    "jmp": _Preset(_jmp, "loss_scale", "period"),
    "flax": _Preset(_flax, "scale", "growth_interval"),
    "paddle": _Preset(_paddle, "init_loss_scaling", "incr_every_n_steps"),
    "paddle_static": _Preset(_paddle_static, "init_loss_scaling", "incr_every_n_steps"),
    "mxnet": _Preset(_mxnet, "_loss_scale", "_scale_seq_len"),
    "fairscale_layerwise": _Preset(_fairscale_layerwise, None, "growth_interval"),
    "mindspore_scaler": _Preset(_mindspore_scaler, "scale_value", "scale_window"),
    "mindspore_cell": _Preset(_mindspore_cell, "loss_scale_value", "scale_window"),
    "mindspore_manager": _Preset(_mindspore_manager, "init_loss_scale", "scale_window"),
}
FRAMEWORKS = tuple(_PRESETS)
"""Every name that `preset` knows."""
