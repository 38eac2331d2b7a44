"""The scale of one tensor from its largest magnitudes: one rule, every library's as a preset of it.

An 8-bit format has too little range for a tensor whose size drifts, so each tensor gets a scale: elements are cast
after multiplying by it. *Current* scaling takes the scale from the tensor itself; *delayed* scaling takes it from the
amaxes (largest magnitudes) of earlier steps, so that nothing has to be measured before the cast, at the risk of a stale
scale. `advance` is the rule: policy, state and this step's amax in, next state out, on numbers and on tensors alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from mpkit.arguments import check_kind, check_number, is_number, is_whole
from mpkit.device import as_device
from mpkit.formats import E4M3FN, E5M2, FloatFormat

from . import rule
from .rule import FLOAT32_MAX, Value, in_float32
from .vector import Vector, stacked

_FLAGS = ("most_recent", "unfused", "delayed", "power_of_two", "double")


@dataclass(frozen=True, eq=False)
class TensorScalePolicy(Vector):
    """How the scale of a tensor follows from its amaxes: numbers only, so a vector of policies has tensors as fields.

    Args:
        element_max:  largest value of the element format (448 for E4M3, 57344 for E5M2).
        delayed:      take the scale from earlier steps (else from this step's amax).
        history_len:  steps whose amaxes count (>= 1); used when delayed.
        most_recent:  the newest amax counts alone, not the largest of the history; used when delayed.
        margin:       the scale is divided by 2**margin (whole, may be negative); used when delayed.
        unfused:      TransformerEngine's update in plain PyTorch instead of its kernel: other roundings, zeros enter
                      the history, and a NaN freezes the scale until it has left. Used when delayed.
        amax_floor:   a smaller amax counts as this (>= 0); used when not delayed.
        double:       divide in double precision and round once, without cases for 0, inf and NaN, as torchao does.
        power_of_two: round the scale down to a power of two.
        name:         the preset it came from.
    Raises:  TypeError or ValueError for a value of the wrong kind or out of range.
    Source:  TransformerEngine 2.20 (common/recipe/delayed_scaling.cu, pytorch/quantization.py, recipe_common.cuh) and
             torchao 0.18 (float8/float8_utils.py), whose recorded results are reproduced bit for bit.
    """

    element_max: Value = 448.0
    delayed: Value = True
    history_len: Value = 1024
    most_recent: Value = False
    margin: Value = 0
    unfused: Value = False
    amax_floor: Value = 0.0
    double: Value = False
    power_of_two: Value = False
    name: str = ""

    def __post_init__(self) -> None:
        for key in ("element_max", "amax_floor", "history_len", "margin"):
            value = getattr(self, key)
            if isinstance(value, Tensor):
                continue
            whole = key in ("history_len", "margin")
            if not (is_whole(value) if whole else is_number(value)):
                raise TypeError(f"{key} must be {'an int' if whole else 'a number'}, got {value!r}")
            low = {"history_len": 1, "margin": -126}.get(key, 0)
            if not low <= value <= (126 if key == "margin" else math.inf) or (key == "element_max" and not value):
                raise ValueError(f"{key} must be at least {low} and in range, got {value!r}")
            if key == "element_max":
                if value > FLOAT32_MAX or not (held := in_float32(float(value))):
                    raise ValueError(f"element_max must be a positive number that float32 holds, got {value!r}")
                object.__setattr__(self, key, held)  # as tensors have it
        for key in _FLAGS:
            if not isinstance(getattr(self, key), bool | Tensor):
                raise TypeError(f"{key} must be True or False, got {getattr(self, key)!r}")


class TensorScaleState(NamedTuple):
    """Where a policy stands.

    scale:    what the next cast multiplies by: a float, or float32 of the policy's shape.
    history:  amaxes, slot 0 first (always 0 between steps, the newest is in the last slot): a tuple, or float32 of
              (*shape, the longest history). Empty when no policy is delayed.
    """

    scale: Value
    history: Any


def initial_tensor_scale(policy: TensorScalePolicy, device: torch.device | str | None = None) -> TensorScaleState:
    """The state before the first step, scale 1: numbers, or tensors where `device` is given or `policy` is a vector."""
    check_kind("policy", policy, TensorScalePolicy, "a TensorScalePolicy")
    vector = bool(policy.shape)
    if device is None and not vector:
        return TensorScaleState(1.0, (0.0,) * policy.history_len if policy.delayed else ())
    device = None if device is None else as_device(device)
    longest = 0 if policy.delayed is False else int(torch.as_tensor(policy.history_len).max())
    history = torch.zeros(*policy.shape, longest, device=device)
    return TensorScaleState(torch.ones(policy.shape, device=device), history)


def advance_tensor_scale(policy: TensorScalePolicy, state: TensorScaleState, amax: Value) -> TensorScaleState:
    """One step: (state before, largest magnitude of this step's tensor) -> state after.

    `amax` is a number (with a state of numbers), or a float32 tensor that broadcasts to the policy's shape; then
    nothing is read on the host. In a delayed policy the scale that comes out is for the next step; in a current one it
    is for this step's own tensor.

    Edges:   amax 0, inf and NaN as the library does it, without an error: see `TensorScalePolicy.unfused` and `double`.
             `diagnose.stale_scales` names a recorded tensor whose amax was not finite.
    Raises:  ValueError for a negative number; TypeError for what is no number.
    """
    check_kind("policy", policy, TensorScalePolicy, "a TensorScalePolicy")
    check_kind("state", state, TensorScaleState, "what initial_tensor_scale(policy) gave")
    if isinstance(state.scale, Tensor):
        amax = torch.as_tensor(amax, dtype=torch.float32, device=state.scale.device).expand(policy.shape)
        return _advance_tensors(policy, state, amax)
    if not is_number(amax):
        raise TypeError(f"amax is a number where the state holds numbers, got {amax!r}; give the state a device")
    check_number("amax", amax, low=-math.inf, high=math.inf) if isinstance(amax, int) else None
    if amax < 0:
        raise ValueError(f"amax is the largest magnitude, at least 0, got {amax}")
    # numbers are tensors of one policy, so that there is one rule
    held = TensorScaleState(torch.tensor(state.scale, device="cpu"), torch.tensor(state.history, device="cpu"))
    after = _advance_tensors(policy, held, torch.tensor(in_float32(amax), device="cpu"))
    return TensorScaleState(after.scale.item(), tuple(after.history.tolist()) if policy.delayed else state.history)


@overload
def advance(policy: rule.ScalePolicy, state: rule.ScaleState, news: Value) -> tuple[rule.ScaleState, Value]: ...


@overload
def advance(policy: TensorScalePolicy, state: TensorScaleState, news: Value) -> TensorScaleState: ...


def advance(policy: Any, state: Any, news: Value) -> Any:
    """One step of either rule: a ScalePolicy takes "were the gradients finite", a TensorScalePolicy takes the amax.

    A ScalePolicy gives (state after, error code), see `rule.advance`; a TensorScalePolicy gives the state after.
    """
    if isinstance(policy, TensorScalePolicy):
        return advance_tensor_scale(policy, state, news)
    return rule.advance(policy, state, news)


def current_scale(policy: TensorScalePolicy, amax: Tensor) -> Tensor:
    """Encoding scales for amaxes (*) float32 -> (*), each amax by itself, for one policy that is not delayed."""
    return _current_tensors(policy, amax)


def _advance_tensors(p: TensorScalePolicy, state: TensorScaleState, amax: Tensor) -> TensorScaleState:
    """The rule on float32 tensors. A part that no policy of the vector uses (a plain bool says so) costs nothing."""
    current = None if p.delayed is True else _current_tensors(p, amax)
    if p.delayed is False:
        assert current is not None
        return state._replace(scale=current)
    newest = amax[..., None]
    entries = torch.cat([newest, state.history[..., 1:]], -1)
    fused = entries.nan_to_num(0.0, torch.inf).amax(-1)
    reached = _pick(p.unfused, lambda: entries.amax(-1), lambda: fused)
    reached = _pick(p.most_recent, lambda: amax, lambda: reached)
    renews = (reached > 0) & (reached < torch.inf)
    scale = _pick(p.unfused, lambda: _renewed_unfused(p, reached), lambda: _renewed_fused(p, reached))
    scale = _powered_tensors(p, scale.clamp(max=FLOAT32_MAX))
    scale = torch.where(renews, scale, state.scale)
    history = _rolled(p, entries, newest)
    if p.unfused is not True:  # the kernel leaves a step without an amax out
        counts = (amax != 0) | p.unfused
        scale = torch.where(counts, scale, state.scale)
        history = torch.where(counts[..., None], history, state.history)
    if current is not None:
        scale = torch.where(p.delayed, scale, current)
    return TensorScaleState(scale, history)


def _rolled(p: TensorScalePolicy, entries: Tensor, newest: Tensor) -> Tensor:
    """Slots one to the left, this step's amax into the last slot of each policy, 0 into slot 0."""
    slots = torch.arange(entries.shape[-1], device=entries.device)
    last = (p.history_len[..., None] if isinstance(p.history_len, Tensor) else p.history_len) - 1
    rolled = torch.where(slots == last, newest, entries.roll(-1, -1))
    return rolled.masked_fill((slots == 0) | (slots > last), 0.0)


def _renewed_fused(p: TensorScalePolicy, amax: Tensor) -> Tensor:
    return _tensor(p.element_max * 2.0 ** (-1 * p.margin), amax) / amax


def _renewed_unfused(p: TensorScalePolicy, amax: Tensor) -> Tensor:
    return torch.reciprocal(amax) * _tensor(p.element_max, amax) / _tensor(2.0 ** (1.0 * p.margin), amax)


def _current_tensors(p: TensorScalePolicy, amax: Tensor) -> Tensor:
    limit = _tensor(p.element_max, amax)

    def double() -> Tensor:
        scale = (limit.double() / torch.clamp(amax.double(), min=p.amax_floor)).float()
        if p.power_of_two is False:
            return scale
        exponent = scale.double().log2().float().floor()  # float32 log2, correctly rounded: as torchao's on a CPU
        return torch.where(
            torch.as_tensor(p.power_of_two, device=scale.device), exponent.double().exp2().float(), scale
        )

    def single() -> Tensor:
        floored = torch.maximum(amax, _tensor(p.amax_floor, amax))
        scale = _powered_tensors(p, (limit / floored).clamp(max=FLOAT32_MAX))
        return torch.where((floored > 0) & (floored < torch.inf), scale, 1.0)

    return _pick(p.double, double, single)


def _powered_tensors(p: TensorScalePolicy, scale: Tensor) -> Tensor:
    if p.power_of_two is False:
        return scale
    # in float64, where every float32 has an exponent of its own
    floored = (scale.double().view(torch.int64) & (0x7FF << 52)).view(torch.float64).float()
    return torch.where(torch.as_tensor(p.power_of_two, device=scale.device), floored, scale)


def _pick(flag: Value, yes: Callable[[], Tensor], no: Callable[[], Tensor]) -> Tensor:
    if isinstance(flag, Tensor):
        return torch.where(flag, yes(), no())
    return yes() if flag else no()


def _tensor(value: Value, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(like.device, torch.float32)
    held = value if value <= FLOAT32_MAX else math.inf  # the compiler follows no more than that
    return torch.full((), held, dtype=torch.float32, device=like.device)


def stack_tensor_scales(policies: Iterable[TensorScalePolicy], device: torch.device | str = "cpu") -> TensorScalePolicy:
    """Many policies -> one whose fields are (n,) tensors where they differ, plain where all agree."""
    rows = list(policies)
    if not rows or not all(isinstance(row, TensorScalePolicy) and not row.shape for row in rows):
        raise TypeError(f"need at least one single TensorScalePolicy, got {rows!r:.200}")
    return stacked(rows, "element_max", device)


TENSOR_SCALE_PRESETS: dict[str, TensorScalePolicy] = {
    "te_delayed": TensorScalePolicy(),
    "te_delayed_unfused": TensorScalePolicy(unfused=True),
    "te_current": TensorScalePolicy(delayed=False),
    "torchao_tensorwise": TensorScalePolicy(delayed=False, double=True, amax_floor=1e-12),
    "torchao_rowwise": TensorScalePolicy(delayed=False, double=True, amax_floor=1e-12, power_of_two=True),
    "te_blockwise": TensorScalePolicy(delayed=False, power_of_two=True),
    "te_blockwise_fp32": TensorScalePolicy(delayed=False),
    "torchao_blockwise": TensorScalePolicy(delayed=False, double=True, amax_floor=1e-12),
}
"""Presets: TransformerEngine 2.20 (te_) and torchao 0.18 (torchao_); tensor, row or block is the choice of a cast."""
TENSOR_SCALE_PRESETS = {name: replace(policy, name=name) for name, policy in TENSOR_SCALE_PRESETS.items()}


def tensor_scale_preset(name: str, element: FloatFormat = E4M3FN, **options: Any) -> TensorScalePolicy:
    """A preset for elements of a format, with TransformerEngine's or torchao's own option names where they have them.

    Args:    name is a key of TENSOR_SCALE_PRESETS; options are fields of TensorScalePolicy, or TransformerEngine's
             `amax_history_len` and `amax_compute_algo` ("max" or "most_recent").
    Raises:  ValueError for an unknown preset or algorithm, TypeError for an unknown option.

    >>> tensor_scale_preset("te_delayed", amax_history_len=16).history_len
    16
    """
    check_kind("element", element, FloatFormat, "a FloatFormat such as E4M3FN")
    check_kind("name", name, str, "the name of a preset")
    if name not in TENSOR_SCALE_PRESETS:
        raise ValueError(f"a tensor-scale preset is one of {', '.join(TENSOR_SCALE_PRESETS)}, got {name!r}")
    if "amax_history_len" in options:
        options["history_len"] = options.pop("amax_history_len")
    if "amax_compute_algo" in options:
        if (algorithm := options.pop("amax_compute_algo")) not in ("max", "most_recent"):
            raise ValueError(f"amax_compute_algo is 'max' or 'most_recent', got {algorithm!r}")
        options["most_recent"] = algorithm == "most_recent"
    known = [field.name for field in fields(TensorScalePolicy)]
    if unknown := [key for key in options if key not in known]:
        raise TypeError(f"{name} has no option {', '.join(unknown)}; there are {', '.join(known[1:-1])}")
    return replace(TENSOR_SCALE_PRESETS[name], element_max=element.max, **options)


FORWARD_ELEMENT, BACKWARD_ELEMENT = E4M3FN, E5M2  # "HYBRID": range for gradients, precision for the rest
