"""Every framework's dynamic loss scale as a row of a table: its own parameters, and the policy that they make.

A row lists the parameters of the framework's class with their defaults. `CALLED` says which field of a policy the
other names mean; the row adds the fields that its parameters do not set, what its class refuses, and, where a name is
not enough, how a field follows from the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from mpkit.arguments import check_choice, check_kind, check_number

from .rule import FLOAT32_MAX, NEVER, SMALLEST_NORMAL, ScalePolicy, in_float32, in_format

Values = dict[str, Any]
NEEDED: Any = object()  # the default of a parameter that has none
_NAMES = {  # field of a policy -> what frameworks call it
    "init_scale": "initial_scale initial_loss_scale init_loss_scaling init_loss_scale loss_scale_value scale_value "
    "scale _loss_scale",
    "growth_interval": "dynamic_growth_steps increment_period scale_window period incr_every_n_steps _scale_seq_len",
    "growth_factor": "incr_ratio",
    "backoff_factor": "decr_ratio",
    "factor": "multiplier scale_factor",  # for both ways
    "min_scale": "min_loss_scale minimum_scale",
    "max_scale": "max_loss_scale _max_loss_scale",
    "hysteresis": "delayed_shift decr_every_n_nan_or_inf",
    "init_count": "counter fin_steps",
    "raise_at_min": "raise_error_at_min_scale",
    "refill_on_finite": "consecutive_hysteresis",
}
CALLED = {other: name for name, others in _NAMES.items() for other in others.split()}
"""What a framework calls a parameter -> the field of a policy."""


def preset(framework: str, **parameters: object) -> ScalePolicy:
    """The policy of a framework's loss scaler: `parameters` are those of its own class, defaults too.

    `preset("fairscale_layerwise", layer_scale_dict={...})` is a vector, one policy per layer.

    Raises:  ValueError for an unknown framework or a value that the framework itself refuses, TypeError for a
             parameter that its class does not have.

    >>> preset("deepspeed", scale_window=500).hysteresis
    2
    """
    row = _ROWS[check_choice("framework", framework, _ROWS)]
    own: Values = {**row.own, **parameters}
    if strange := own.keys() - row.own.keys():
        raise TypeError(f"{framework} takes {', '.join(row.own)}; got {', '.join(sorted(strange))}")
    if missing := [name for name, value in own.items() if value is NEEDED]:
        raise TypeError(f"{framework} needs {', '.join(missing)}; it takes {', '.join(row.own)}")
    if (scale := row.fixed(own)) is not None:
        return ScalePolicy.fixed(float(scale), scale_bits=row.fields.get("scale_bits", 32), name=framework)
    for name, check in row.refuses.items():
        check(name, own[name])
    made = {**row.fields, **{row.field_of(name): value for name, value in own.items()}}
    for rule in row.rules:
        made |= rule(made)
    policy = ScalePolicy(**{name: made[name] for name in FIELDS & made.keys()}, name=framework)
    return replace(policy, init_scale=in_format(policy.scale_bits, policy.init_scale))  # as the framework stores it


def own_names(framework: str) -> tuple[str | None, str]:
    """What a framework's class calls its first scale (None: it has one for each layer) and its growth interval.

    >>> own_names("paddle")
    ('init_loss_scaling', 'incr_every_n_steps')
    """
    row = _ROWS[check_choice("framework", framework, _ROWS)]
    called = {row.field_of(name): name for name in row.own}
    return called.get("init_scale"), called["growth_interval"]


@dataclass(frozen=True)
class _Row:
    """A framework.

    own:      its parameters -> their defaults.
    fields:   fields of the policy that are the same for all parameters.
    refuses:  parameter -> the check of its range.
    rules:    what follows from several parameters, or in other numbers than they are given: fields -> changed fields.
    called:   names that mean another field here than in `CALLED`.
    fixed:    the scale, where the parameters switch the dynamic rule off, else None.
    """

    own: Values
    fields: Values = field(default_factory=dict)
    refuses: Mapping[str, Callable[[str, Any], object]] = field(default_factory=dict)
    rules: tuple[Callable[[Values], Values], ...] = ()
    called: Mapping[str, str] = field(default_factory=dict)
    fixed: Callable[[Values], float | None] = lambda own: None

    def field_of(self, name: str) -> str:
        return self.called.get(name) or CALLED.get(name, name)


FIELDS = {f.name for f in fields(ScalePolicy)} - {"name"}


# --- ranges that classes refuse


def _above(low: float, high: float = math.inf) -> Callable[[str, Any], object]:
    return partial(check_number, low=low, high=high, open_low=True, closed_high=high == math.inf)


_GROWS, _SHRINKS = {"growth_factor": _above(1)}, {"backoff_factor": _above(0, 1)}
_BELOW_1 = {"backoff_factor": partial(check_number, low=-math.inf, high=1)}
_RATIOS = {"incr_ratio": _above(1), "decr_ratio": _above(0, 1)}
_DTYPE = {"dtype": partial(check_choice, choices=("float16", "float32", "float64"))}


def _ordered(*names: str) -> Callable[[Values], Values]:
    """A rule that changes nothing, and raises unless 0 < the first <= the second, and so on."""

    def rule(p: Values) -> Values:
        for low, high in pairwise(names):
            if not 0 < p[low] <= p[high]:
                raise ValueError(f"need 0 < {low} <= {high}, got {p[low]} and {p[high]}")
        return {}

    return rule


# --- what follows from the parameters


def _divides(p: Values) -> Values:
    """One factor for both ways: times it, and divided by it."""
    return {"growth_factor": p["factor"], "backoff_factor": 1.0, "backoff_divisor": p["factor"]}


def _multiplies(p: Values) -> Values:
    """One factor for both ways: times it, and times its reciprocal, in the precision of the scale."""
    bits = p.get("scale_bits", 32)
    factor = in_format(bits, p["factor"])
    return {"growth_factor": factor, "backoff_factor": in_format(bits, 1 / factor)}


def _single(p: Values) -> Values:
    """Factors as float32 holds them."""
    return {name: in_float32(p[name]) for name in ("factor", "growth_factor", "backoff_factor") if name in p}


def _positive(p: Values) -> Values:
    """A count that is compared for equality: below 1 it is never reached."""
    return {"hysteresis": p["hysteresis"] if p["hysteresis"] >= 1 else NEVER}


def _free(p: Values) -> Values:
    """None is no bound."""
    return {"min_scale": p["min_scale"] or 0.0, "max_scale": p.get("max_scale") or math.inf}


def _jmp(p: Values) -> Values:
    """`jit`: as carried through `jax.jit`, where the floor is lost (1) and the division becomes a product."""
    bits = {"float16": 16, "float32": 32, "float64": 64}[p["dtype"]]
    made = {"factor": in_format(bits, p["factor"]), "scale_bits": bits, "flush_subnormal": bits == 32}
    product = {**_multiplies({**p, **made}), "backoff_divisor": 1.0, "min_scale": 1.0} if p["jit"] else {}
    return {**made, **_divides(made), **product}


def _layers(p: Values) -> Values:
    check_kind("layer_scale_dict", layers := p["layer_scale_dict"], Mapping, "{name: scale}")
    for name, scale in layers.items():
        _above(0)(f"the scale of {name!r} in layer_scale_dict", scale)
    return {"init_scale": torch.tensor([*layers.values()], dtype=torch.float64), "layers": tuple(layers)}


def _tf_fixed(own: Values) -> float | None:
    if not own["dynamic"] and own["initial_scale"] is None:
        raise ValueError("with dynamic=False, initial_scale must be given: it is the fixed scale")
    return None if own["dynamic"] else own["initial_scale"]


def _paddle_fixed(own: Values) -> float | None:
    dynamic = own["enable"] and own["use_dynamic_loss_scaling"]
    return None if dynamic else own["init_loss_scaling"] if own["enable"] else 1.0


# --- the table

_USUAL = {"growth_factor": 2.0, "backoff_factor": 0.5}
_TO_INF, _WIDE = {"hold_at_overflow": False}, {"hold_at_overflow": False, "scale_bits": 64}
_PADDLE = {"refill_on_finite": True, "refill_on_backoff": True}
_TF, _STANDARD = {"min_scale": 1.0, "growth_ge": True}, {"init_scale": 2.0**15, "growth_interval": 2000}
_MINDSPORE = {"scale_factor": NEEDED, "scale_window": NEEDED}
_FACTOR = {"scale_factor": _above(0)}

# fmt: off
_ROWS: dict[str, _Row] = {
    # mpkit's own: what no mainstream default has is a floor that reports and a finite cap. The floor lies below 1,
    # because large losses need that, and as low as the reciprocal still fits a float16 normal; an overflow there is
    # reported, since no scale can be the cause. At the cap the reciprocal is the smallest float16: above it, float16
    # gradients would all unscale to zero.
    "mpkit": _Row(
        {"init_scale": 2.0**16, **_USUAL, "growth_interval": 2000, "min_scale": 2.0**-14, "max_scale": 2.0**24,
         "hysteresis": 1, "raise_at_min": True},
        refuses={**_GROWS, **_SHRINKS, "max_scale": check_number},
        rules=(_ordered("min_scale", "init_scale", "max_scale"),
               lambda p: dict.fromkeys(("refill_on_growth", "refill_on_finite"), p["hysteresis"] > 1))),
    "torch": _Row(
        {"init_scale": 2.0**16, **_USUAL, "growth_interval": 2000, "enabled": True},
        refuses={**_GROWS, **_BELOW_1}, fixed=lambda own: None if own["enabled"] else 1.0),
    "keras3": _Row(
        {"initial_scale": 2.0**15, "dynamic_growth_steps": 2000}, {**_TO_INF, "flush_subnormal": True}),
    "tf_keras": _Row(
        {"dynamic": True, "initial_scale": None, "dynamic_growth_steps": None}, _TF,
        rules=(lambda p: {name: usual for name, usual in _STANDARD.items() if p[name] is None},), fixed=_tf_fixed),
    "tf_v1": _Row(  # the compiler makes the division a product
        {"initial_loss_scale": 2.0**15, "increment_period": 2000, "multiplier": 2.0}, _TF,
        {"multiplier": _above(0)}, (_multiplies,)),
    "apex": _Row(  # `scale_factor` is taken and ignored, as the class does: 2 is hard-wired
        {"loss_scale": "dynamic", "init_scale": 2.0**16, "scale_factor": 2.0, "scale_window": 2000,
         "min_loss_scale": None, "max_loss_scale": 2.0**24}, {**_WIDE, "error_at_zero": True},
        rules=(_free, lambda p: {"init_scale": min(p["max_scale"], p["init_scale"])}),
        fixed=lambda own: None if own["loss_scale"] == "dynamic" else own["loss_scale"]),
    "deepspeed": _Row(  # the dynamic scaler of ZeRO 1-3 with the defaults of its configuration
        {"init_scale": 2.0**16, "scale_factor": 2.0, "scale_window": 1000, "min_scale": 1, "delayed_shift": 2,
         "consecutive_hysteresis": False, "raise_error_at_min_scale": True, "dtype": torch.float16},
        {**_WIDE, "first_growth_lag": 1, "refill_on_growth": True}, {"scale_window": _above(0)},
        (_divides, _positive, lambda p: {"error_at_inf": p["dtype"] is torch.float16})),
    "megatron": _Row(
        {"initial_scale": 2.0**32, "min_scale": 1.0, **_USUAL, "growth_interval": 1000, "hysteresis": 2},
        {**_TO_INF, "refill_on_growth": True},
        {**_GROWS, **_SHRINKS, "growth_interval": _above(0), "hysteresis": _above(0)},
        (_ordered("min_scale", "init_scale"), _single)),
    "colossalai": _Row(
        {"initial_scale": 2.0**16, **_USUAL, "growth_interval": 1000, "min_scale": None, "max_scale": None,
         "hysteresis": 2, "verbose": False}, {**_TO_INF, "refill_on_growth": True},
        {**_GROWS, **_SHRINKS, "growth_interval": _above(0), "hysteresis": check_number},
        (lambda p: _ordered("least", "init_scale")({**p, "least": p["min_scale"] or p["init_scale"]}), _single, _free)),
    "fairseq": _Row(
        {"init_scale": 2.0**15, "scale_factor": 2.0, "scale_window": 2000, "tolerance": 0.0, "threshold": None,
         "min_loss_scale": 1e-4}, _WIDE, {"scale_window": _above(0)},
        (_divides, _free, lambda p: {"tolerance": max(0.0, p["tolerance"])}),
        {"threshold": "min_scale", "min_loss_scale": "stop_at"}),
    "jmp": _Row(
        {"loss_scale": NEEDED, "counter": 0, "period": 2000, "factor": 2, "min_loss_scale": 1.0, "dtype": "float32",
         "jit": False}, {}, {"factor": _above(0), **_DTYPE}, (_jmp,), {"loss_scale": "init_scale"}),
    "flax": _Row(
        {**_USUAL, "growth_interval": 2000, "fin_steps": 0, "scale": 2.0**16, "minimum_scale": SMALLEST_NORMAL},
        {"max_scale": FLOAT32_MAX, "first_growth_lag": 1, "next_growth_lag": 1, "flush_subnormal": True},
        rules=(_single, _free)),
    "paddle": _Row(
        {"enable": True, "init_loss_scaling": 2.0**16, "incr_ratio": 2.0, "decr_ratio": 0.5, "incr_every_n_steps": 2000,
         "decr_every_n_nan_or_inf": 1, "use_dynamic_loss_scaling": True},
        {**_PADDLE, **_TO_INF}, _RATIOS, (_single, _positive), fixed=_paddle_fixed),
    # The defaults of the older of two signatures of `paddle.static.amp.decorate` (Paddle 3.3.1): that of a call with
    # `use_pure_fp16` or `use_bf16`. A plain `decorate(optimizer)` takes the newer one, with the defaults of `paddle`.
    "paddle_static": _Row(
        {"init_loss_scaling": 2.0**15, "incr_ratio": 2.0, "decr_ratio": 0.8, "incr_every_n_steps": 1000,
         "decr_every_n_nan_or_inf": 2}, {**_PADDLE, "min_scale": 1.0}, _RATIOS, (_single, _positive)),
    "mxnet": _Row(  # the class has no arguments; these are the names of its private fields
        {"_loss_scale": 2.0**16, "_scale_seq_len": 2000, "_max_loss_scale": 2.0**24}, {**_WIDE, "delayed": True}),
    "fairscale_layerwise": _Row(
        {"layer_scale_dict": NEEDED, **_USUAL, "growth_interval": 10000, "min_scale": SMALLEST_NORMAL,
         "max_scale": FLOAT32_MAX}, {**_WIDE, "clamp_both_ways": True}, {**_GROWS, **_BELOW_1}, (_layers,)),
    "mindspore_scaler": _Row(
        {"scale_value": NEEDED, **_MINDSPORE}, {"min_scale": 1.0, "flush_subnormal": True}, _FACTOR,
        (_single, _divides)),
    "mindspore_cell": _Row(  # the window may be a fraction, as in the class: the counter passes it at the next step
        {"loss_scale_value": NEEDED, **_MINDSPORE}, {**_TO_INF, **_TF}, _FACTOR,
        (_multiplies, lambda p: {"growth_interval": math.ceil(p["growth_interval"])})),
    "mindspore_manager": _Row(
        {"init_loss_scale": 2.0**24, "scale_factor": 2, "scale_window": 2000},
        {**_WIDE, "min_scale": 1.0, "max_consecutive": 1000}, _FACTOR, (_multiplies,)),
}
# fmt: on
FRAMEWORKS = tuple(_ROWS)
"""Every name that `preset` knows."""
