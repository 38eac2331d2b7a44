"""The scale of one tensor from its largest magnitudes: one rule, every library's as a preset of it.

An 8-bit format has too little range for a tensor whose size drifts, so each tensor gets a scale: elements are cast
after multiplying by it. *Current* scaling takes the scale from the tensor itself; *delayed* scaling takes it from the
amaxes (largest magnitudes) of earlier steps, so that nothing has to be measured before the cast, at the risk of a stale
scale. `advance` is the rule: policy, state and this step's amax in, next state out, on numbers and on tensors alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from mpkit.arguments import check_choice, check_count, check_kind, check_number
from mpkit.device import as_device
from mpkit.formats import E4M3FN, FloatFormat

from .rule import FLOAT32_MAX, Flag, Scale, Value, in_float32
from .rule import advance as advance_loss_scale
from .vector import Vector, stacked, steps

_positive = partial(check_number, low=2.0**-149, high=FLOAT32_MAX, closed_high=True)
Limit = Annotated[Value, lambda name, value: in_float32(_positive(name, value))]
Margin = Annotated[Value, partial(steps, low=-126, high=126)]


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

    element_max: Limit = 448.0
    delayed: Flag = True
    history_len: Annotated[Value, check_count] = 1024
    most_recent: Flag = False
    margin: Margin = 0
    unfused: Flag = False
    amax_floor: Scale = 0.0
    double: Flag = False
    power_of_two: Flag = False
    name: str = ""


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
    if device is None and not policy.shape:
        return TensorScaleState(1.0, (0.0,) * policy.history_len if policy.delayed else ())
    device = None if device is None else as_device(device)
    longest = 0 if policy.delayed is False else int(torch.as_tensor(policy.history_len).max())
    return TensorScaleState(torch.ones(policy.shape, device=device), torch.zeros(*policy.shape, longest, device=device))


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
    if not (isinstance(amax, float) and math.isnan(amax)):  # NaN is the policy's affair
        check_number("amax", amax, closed_high=True)
    # numbers are tensors of one policy, so that there is one rule
    held = TensorScaleState(torch.tensor(state.scale, device="cpu"), torch.tensor(state.history, device="cpu"))
    after = _advance_tensors(policy, held, torch.tensor(in_float32(amax), device="cpu"))
    return TensorScaleState(after.scale.item(), tuple(after.history.tolist()))


def advance(policy: Any, state: Any, news: Value) -> Any:
    """One step of either rule: a ScalePolicy takes "were the gradients finite", a TensorScalePolicy takes the amax.

    A ScalePolicy gives (state after, error code), see `rule.advance`; a TensorScalePolicy gives the state after.
    """
    rule = advance_tensor_scale if isinstance(policy, TensorScalePolicy) else advance_loss_scale
    return rule(policy, state, news)


def _advance_tensors(p: TensorScalePolicy, state: TensorScaleState, amax: Tensor) -> TensorScaleState:
    """The rule on float32 tensors. A part that no policy of the vector uses (a plain bool says so) costs nothing."""
    if p.delayed is False:
        return state._replace(scale=current_scale(p, amax))
    newest = amax[..., None]
    entries = torch.cat([newest, state.history[..., 1:]], -1)
    largest = _pick(p.unfused, lambda: entries.amax(-1), lambda: entries.nan_to_num(0.0, torch.inf).amax(-1))
    reached = _pick(p.most_recent, lambda: amax, lambda: largest)
    limit, shift = _tensor(p.element_max, amax), _tensor(2.0 ** (1.0 * p.margin), amax)
    scale = _pick(
        p.unfused,
        lambda: torch.reciprocal(reached) * limit / shift,
        lambda: _tensor(p.element_max * 2.0 ** (-1.0 * p.margin), amax) / reached,
    )
    scale = _power_of_two(p, scale.clamp(max=FLOAT32_MAX))
    counts = (amax != 0) | p.unfused  # the kernel leaves a step without an amax out
    scale = torch.where((reached > 0) & (reached < torch.inf) & counts, scale, state.scale)
    history = torch.where(counts[..., None], _rolled(p, entries, newest), state.history)
    return TensorScaleState(_pick(p.delayed, lambda: scale, lambda: current_scale(p, amax)), history)


def _rolled(p: TensorScalePolicy, entries: Tensor, newest: Tensor) -> Tensor:
    """Slots one to the left, this step's amax into the last slot of each policy, 0 into slot 0."""
    slots = torch.arange(entries.shape[-1], device=entries.device)
    last = (p.history_len[..., None] if isinstance(p.history_len, Tensor) else p.history_len) - 1
    rolled = torch.where(slots == last, newest, entries.roll(-1, -1))
    return rolled.masked_fill((slots == 0) | (slots > last), 0.0)


def current_scale(p: TensorScalePolicy, amax: Tensor) -> Tensor:
    """Encoding scales for amaxes (*) float32 -> (*), each amax by itself, for policies that are not delayed."""
    limit = _tensor(p.element_max, amax)

    def double() -> Tensor:
        scale = (limit.double() / torch.clamp(amax.double(), min=p.amax_floor)).float()
        # float32 log2, correctly rounded: as torchao's on a CPU
        return _pick(
            p.power_of_two, lambda: scale.double().log2().float().floor().double().exp2().float(), lambda: scale
        )

    def single() -> Tensor:
        floored = torch.maximum(amax, _tensor(p.amax_floor, amax))
        scale = _power_of_two(p, (limit / floored).clamp(max=FLOAT32_MAX))
        return torch.where((floored > 0) & (floored < torch.inf), scale, 1.0)

    return _pick(p.double, double, single)


def _power_of_two(p: TensorScalePolicy, scale: Tensor) -> Tensor:
    """Rounded down to one, where the policy asks for it: in float64, where every float32 has an exponent of its own."""
    down = lambda: (scale.double().view(torch.int64) & (0x7FF << 52)).view(torch.float64).float()  # noqa: E731
    return _pick(p.power_of_two, down, lambda: scale)


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
    return stacked(TensorScalePolicy, policies, "element_max", device)


_CURRENT: dict[str, Any] = {"delayed": False}
_TORCHAO: dict[str, Any] = {"delayed": False, "double": True, "amax_floor": 1e-12}
TENSOR_SCALE_PRESETS = {
    name: TensorScalePolicy(name=name, **fields)
    for name, fields in {
        "te_delayed": {},
        "te_delayed_unfused": {"unfused": True},
        "te_current": _CURRENT,
        "torchao_tensorwise": _TORCHAO,
        "torchao_rowwise": {**_TORCHAO, "power_of_two": True},
        "te_blockwise": {**_CURRENT, "power_of_two": True},
        "te_blockwise_fp32": _CURRENT,
        "torchao_blockwise": _TORCHAO,
    }.items()
}
"""Presets: TransformerEngine 2.20 (te_) and torchao 0.18 (torchao_); tensor, row or block is the choice of a cast."""


def tensor_scale_preset(name: str, element: FloatFormat = E4M3FN, **options: Any) -> TensorScalePolicy:
    """A preset for elements of a format, with TransformerEngine's or torchao's own option names where they have them.

    Args:    name is a key of TENSOR_SCALE_PRESETS; options are fields of TensorScalePolicy, or TransformerEngine's
             `amax_history_len` and `amax_compute_algo` ("max" or "most_recent").
    Raises:  ValueError for an unknown preset or algorithm, TypeError for an unknown option.

    >>> tensor_scale_preset("te_delayed", amax_history_len=16).history_len
    16
    """
    check_kind("element", element, FloatFormat, "a FloatFormat such as E4M3FN")
    made = TENSOR_SCALE_PRESETS[check_choice("name", name, TENSOR_SCALE_PRESETS)]
    if "amax_history_len" in options:
        options["history_len"] = options.pop("amax_history_len")
    if "amax_compute_algo" in options:
        algorithm = check_choice("amax_compute_algo", options.pop("amax_compute_algo"), ("max", "most_recent"))
        options["most_recent"] = algorithm == "most_recent"
    return replace(made, **{"element_max": element.max, **options})
