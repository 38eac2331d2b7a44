"""Every object with a saved state is given one in which a single entry, drawn at random, is wrong or gone.

It says so with TypeError or ValueError and is as it was: a state that is taken over in part, or that makes the next
step crash, loses a run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from oracles import MEMBERS
from support import assert_same, tries
from test_lives_training import OPTIMIZERS, Lines

from mpkit.boost import FreezeOpt
from mpkit.model import LossMonitor
from mpkit.optimizers import BFloat16Weights
from mpkit.policies import ScalePolicy, TensorScalePolicy
from mpkit.record import Recorder
from mpkit.scalers import (
    DynamicLossScaleManager,
    DynamicLossScaler,
    PolicyLossScaler,
    StaticLossScaler,
    TensorScaler,
)
from mpkit.step import ScaledStep, TrainOneStepCell, TrainOneStepWithLossScaleCell

JUNK = ["x", None, [], {}, object(), "gone"]
OPTIONAL = {"steps", "seconds", "seen", "param_names", "lr", "weight_decay", "initial_lr", "_metadata"}
"""Keys that may be missing; a rate may be a schedule, which is not saved."""


def recorded() -> Recorder:
    net = Lines()
    recorder = Recorder(net, activations=True)
    net(torch.ones(1, 2)).backward()
    recorder.record(torch.tensor(1.0))
    net(torch.ones(1, 2))
    return recorder


def stepped(make: Callable[[Any], Any]) -> Any:
    net = Lines()
    optimizer = make([p.bfloat16() for p in net.parameters()] if make is bf16 else list(net.parameters()))
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def bf16(params: list[torch.Tensor]) -> BFloat16Weights:
    return BFloat16Weights(torch.optim.SGD([torch.nn.Parameter(p) for p in params], 0.1, momentum=0.5), "kahan")


def frozen(params: list[torch.Tensor]) -> FreezeOpt:
    return FreezeOpt(torch.optim.SGD(params, 0.1, momentum=0.5), [params, params[1:]], [0, 1, 1])


def cell(optimizer: str = "Momentum", plain: bool = False) -> Any:
    net = Lines()
    made = OPTIMIZERS[optimizer](net.parameters())
    options = {"accumulation_steps": 2, "hooks": [Recorder(net)]}
    new = TrainOneStepCell(net, made, **options) if plain else None
    new = new or TrainOneStepWithLossScaleCell(net, made, DynamicLossScaler(1024, 2, 3), **options)
    for _ in range(3):
        new(torch.ones(1, 2))
    return new


def by_hand() -> ScaledStep:
    net = Lines()
    step = ScaledStep(OPTIMIZERS["Momentum"](net.parameters()), DynamicLossScaler(1024, 2, 3))
    step.backward(net(torch.ones(1, 2)))
    step.update()
    return step


OBJECTS: dict[str, Callable[[], Any]] = {
    "StaticLossScaler": lambda: StaticLossScaler(64),
    "DynamicLossScaler": lambda: DynamicLossScaler(64, 2, 3),
    "DynamicLossScaleManager": lambda: DynamicLossScaleManager(64.0, 2, 3),
    "PolicyLossScaler": lambda: PolicyLossScaler(ScalePolicy(growth_interval=3), 5),
    "PolicyLossScaler by the rule": lambda: PolicyLossScaler(ScalePolicy(growth_interval=3, hysteresis=2), 5),
    "TensorScaler": lambda: TensorScaler(TensorScalePolicy(history_len=3)),
    "Recorder": recorded,
    "LossMonitor": LossMonitor,
    "FreezeOpt of torch's": lambda: stepped(frozen),
    "BFloat16Weights": lambda: stepped(bf16),
    "ScaledStep": by_hand,
    "plain cell": lambda: cell(plain=True),
    "scaled cell": cell,
    "scaled cell, torch's optimizer": lambda: cell("torch"),
    **{name: lambda name=name: stepped(MEMBERS[name]) for name in MEMBERS},
}

FRESH: dict[str, Callable[[Any], Any]] = {**MEMBERS, "FreezeOpt": frozen, "BFloat16Weights": bf16}


@pytest.mark.parametrize("name", FRESH)
def test_a_state_of_before_the_first_step_is_taken_over(name):
    one, other = (FRESH[name]([torch.nn.Parameter(p.bfloat16()) for p in Lines().parameters()]) for _ in range(2))
    other.load_state_dict(one.state_dict())
    assert_same(other.state_dict(), one.state_dict())


def places(state: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of the entries whose kind matters."""
    found = []
    inside = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in inside:
        here = (*path, key)
        if value is not None and key not in OPTIONAL - {"steps", "seconds", "seen"}:
            found.append(here)
        if key not in ("policy", "params"):
            found += places(value, here)
    return found


def state_of(thing: Any) -> Any:
    """What must not change; the clock of a recorder goes on."""
    extra = getattr(thing, "get_extra_state", None)
    state = copy.deepcopy(extra() if extra else thing.state_dict())
    for part in (state, *state.get("hooks", ())):
        part.pop("seconds", None)
    return state


@pytest.mark.parametrize("name", OBJECTS)
@given(st.data())
@tries(0.12)
def test_a_state_with_one_wrong_entry_is_refused_and_nothing_changes(name, data):
    thing = OBJECTS[name]()
    extra = hasattr(thing, "get_extra_state")
    state = copy.deepcopy(thing.get_extra_state() if extra else thing.state_dict())
    path = data.draw(st.sampled_from(places(state)))
    holder = state
    for key in path[:-1]:
        holder = holder[key]
    junk = data.draw(st.sampled_from(JUNK))
    # what torch's own optimizers hold, torch takes as it comes, and it fills in an option that is missing
    in_torch = ("torch" in name or "inner" in path) and ("state" in path or junk == "gone")
    may_be_none = junk is None and {"gradients", "generator", "kinds"} & {*path}
    if isinstance(holder[path[-1]], type(junk)) or in_torch or may_be_none:
        return
    if junk == "gone":
        if {path[-1], *path[:1]} & OPTIONAL or (isinstance(holder, dict) and not isinstance(path[-1], str)):
            return
        del holder[path[-1]]
    else:
        holder[path[-1]] = junk
    note(f"{path} is {junk!r}")
    before = state_of(thing)
    with pytest.raises((TypeError, ValueError)) as refused:
        thing.set_extra_state(state) if extra else thing.load_state_dict(state)
    assert len(str(refused.value)) > 10
    assert_same(state_of(thing), before)
