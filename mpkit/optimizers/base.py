"""What all optimizers share: groups, rates, decay, gradient transforms, static loss scale, counters, skipping.

A subclass gives its arguments (their checks stand in the annotations), `slots`, the state a weight starts with, and
`update`, its formula on an `Update`. Counters and rates are host numbers until a `found_inf` tensor has been seen on a
device; then they live there, because only the device knows which steps were applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from mpkit.arguments import check_alike, check_count, check_flags, check_function, check_kind, check_number, checks_of
from mpkit.optimizers.arguments import (
    GROUP_KEYS,
    Options,
    centralized,
    is_named,
    learning_rate_of,
    listed,
    parameters_of,
    split_groups,
    tensors_of,
    weight_decay_of,
)
from mpkit.optimizers.many import Many, Number
from mpkit.optimizers.saved import check_saved
from mpkit.optimizers.update import Update, follow_, silenced
from mpkit.schedules import LearningRateSchedule, ListedLR

Group = dict[str, Any]
Loss = TypeVar("Loss")

AT_HAND = frozenset({"cpu"})
"""Devices whose memory is the host's own: looking at a flag there waits for nothing, and a step that is applied costs
what it costs without the flag. Elsewhere the decision is taken on the device, by neutral coefficients."""

LARGE, SLICE = 2**18, 2**18
"""Values above which a tensor on a CPU is updated alone, some rows after the other: what a formula computes on the way
then stays in the cache, where the memory of a whole tensor would be asked from the system anew each time."""

NEEDED = ("params", "learning_rate", "weight_decay", "options")
UNUSED = ("use_locking", "use_offload", "compression")  # taken for MindSpore's sake, without effect
NOT_HYPER = frozenset({*NEEDED, *UNUSED, "loss_scale", "beta1", "beta2"})


class Optimizer(torch.optim.Optimizer):
    """Base of mpkit's optimizers: a `torch.optim.Optimizer` with MindSpore's groups, decay and loss scale.

    Before the formula of a subclass, gradients pass through (S the static `loss_scale`):

        g <- g + (weight_decay * S) * w;   g <- transform(g);   g <- g * (1 / S)

    so that afterwards g is the plain gradient plus decay when the loss was multiplied by S.

    To add one, write its `slots`, its `update`, and a constructor whose annotations carry the checks and which ends in
    `super().__init__(locals())`; arguments that are none of those below become options of the groups.

    Args:
        params:         parameters, (name, parameter) pairs, or dicts with `params`, `lr`, `weight_decay`,
                        `grad_centralization`; one more dict may hold `order_params`, the order of `parameters`.
        learning_rate:  number >= 0, list or 1-D tensor (step k uses entry k), or schedule.
        weight_decay:   number >= 0, or a function of the step. Ungrouped and named parameters are decayed unless their
                        name contains "beta" or "gamma"; grouped or unnamed ones all are. Biases are decayed.
        loss_scale:     number > 0 by which the loss was multiplied.
        options:        see `Options`.

    Precision:  moments are float32, and **16-bit parameters are updated through a float32 master copy** that is kept
                in the state, so a network in pure bfloat16 does not forget small updates, and takes 4 bytes more for
                each weight. `BFloat16Weights` does without the copy.
    Skipping:   `step` follows torch.amp.GradScaler's protocol: when the attribute `found_inf` is a tensor, the decision
                is taken where it lies, without waiting for a device; weights, state and counters stay as they are
                bit for bit when it is not 0.
    Counters:   `global_step` counts applied updates (see `count_skipped`) and drives the schedules; each group counts
                its own updates, so a group added later starts its moments afresh. Both are in `state_dict`.
    Raises:     TypeError for kinds, ValueError for ranges, KeyError for group keys, RuntimeError for a parameter in
                two groups or a list of rates that is too short.
    Source:     MindSpore 2.7 nn.Optimizer.
    """

    slots: ClassVar[Mapping[str, float | str]] = {}  # state -> its first value, or the hyper-parameter that gives it
    switched: ClassVar[Mapping[str, str]] = {}  # state -> the hyper-parameter without which it is not needed
    decays_itself = False  # True where `update` applies weight decay, and no static loss scale is divided out
    decay_filter = True  # False where MindSpore ignores the beta/gamma rule
    decay_varies = True  # False where the weight decay is a number, never a function
    rate_by_group = True
    centralizes = True
    by_axes = False  # True where matrices have another state than vectors
    elementwise = True  # False where the update of one number depends on the others of its tensor

    def __init__(self, given: dict[str, Any]) -> None:
        check_alike("given, the locals() of a constructor", given, dict.fromkeys(("__class__", *NEEDED)))
        given = {name: check(name, given[name]) for name, check in checks_of(given["__class__"].__init__).items()}
        options, hyper = given["options"], {name: x for name, x in given.items() if name not in NOT_HYPER}
        if unknown := set(options) - set(Options.__annotations__):
            raise TypeError(f"{type(self).__name__} does not take {sorted(unknown)}")
        check_flags(**{key: options.get(key, False) for key in ("count_skipped", "faithful")})
        self.gradient_transform = options.get("gradient_transform")
        what = "a function (gradients, parameters, group) -> gradients"
        check_function("gradient_transform", self.gradient_transform, what, optional=True)
        if "beta2" in given:
            hyper["betas"] = (given["beta1"], given["beta2"])
        elif "beta1" in given:
            hyper["beta1"] = given["beta1"]
        groups, order, grouped = split_groups(given["params"])
        self.loss_scale: float = given.get("loss_scale", 1.0)
        self.count_skipped, self.faithful = options.get("count_skipped", False), options.get("faithful", False)
        self.gradient_rule: Callable[[Update], Many] | None = None  # LARS puts its own here: decay, scaling and all
        # A dict, because torch.compile drops what a compiled step writes to attributes of an optimizer. "calls" is at
        # least the number of applied steps, and known without a host read.
        self._counts: dict[str, Any] = {"global_step": 0, "calls": 0}
        self._plain_closure = self.rates_grouped = False
        defaults = {
            "lr": learning_rate_of(given["learning_rate"]),
            "weight_decay": weight_decay_of(given["weight_decay"]),
            "grad_centralization": False,
            "decay_by_name": not grouped and self.decay_filter,
            "updates": 0,
        }
        super().__init__(groups, {**defaults, **hyper})
        self._order = self._checked_order(order)

    def update(self, u: Update) -> None:
        """Apply the formula to one `Update`, in place."""
        raise NotImplementedError(f"{type(self).__name__} must define update(u)")

    def needed(self, p: Tensor, group: Group) -> list[str]:
        """The slots of a weight under the options of its group."""
        return [slot for slot in self.slots if slot not in self.switched or group[self.switched[slot]]]

    def first(self, slot: str, weight: Tensor, group: Group) -> Tensor:
        """A state of a weight before its first update; float32 for 16-bit parameters."""
        value = self.slots[slot]
        return torch.full_like(weight, group[value] if isinstance(value, str) else value)

    # -- groups

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; as the groups given to the constructor, but `order_params` is no longer possible."""
        group, name = dict(param_group), type(self).__name__
        if "params" not in group:
            raise KeyError("a group needs the key 'params'")
        if unknown := set(group) - (GROUP_KEYS - {"order_params"}):
            raise KeyError(f"a group takes {sorted(GROUP_KEYS)}, got {sorted(unknown)}")
        if "lr" in group and not self.rate_by_group:
            raise ValueError(f"{name} takes one learning rate for all groups; leave 'lr' out of the group")
        group["params"] = items = listed(group["params"], "a group's params")
        if not items:
            raise ValueError("a group's params is empty; leave the group out")
        mine = {id(p) for p in parameters_of(self)}
        for tensor in tensors_of(items):
            check_kind("each of a group's params", tensor, Tensor, "a parameter or a (name, parameter) pair")
            if not tensor.is_floating_point():
                raise TypeError(f"parameters must be real floating point, got {tensor.dtype}")
            if id(tensor) in mine:
                raise RuntimeError("a parameter is in two groups, or twice in one; it would be updated twice")
            mine.add(id(tensor))
        for key, converted in (("lr", learning_rate_of), ("weight_decay", weight_decay_of)):
            if key in group:
                group[key] = converted(group[key])
        if callable(group.get("weight_decay")) and not self.decay_varies:
            raise TypeError(f"{name} takes a fixed weight decay; use Momentum for one that changes")
        check_flags(grad_centralization=group.get("grad_centralization", False))
        rates = [g["lr"] for g in self.param_groups] + [group.get("lr", self.defaults["lr"])]
        if len(lengths := {len(rate.values) for rate in rates if isinstance(rate, ListedLR)}) > 1:
            raise ValueError(f"lists of learning rates must have one length in all groups, got {sorted(lengths)}")
        if self.param_groups:
            group["decay_by_name"] = False
        own_rate = "lr" in group
        super().add_param_group(group)
        self.rates_grouped = self.rates_grouped or own_rate

    def _checked_order(self, order: list[Tensor] | None) -> list[tuple[int, int]] | None:
        """`order_params` as (group, index) pairs, which survive a copy of the optimizer."""
        if order is None:
            return None
        place = {id(p): (i, j) for i, g in enumerate(self.param_groups) for j, p in enumerate(g["params"])}
        if len(order) != len(place) or {id(p) for p in order} != set(place):
            raise ValueError(f"order_params must list the {len(place)} grouped parameters once each, got {len(order)}")
        return [place[id(p)] for p in order]

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters: in the order of `order_params` when given, else group after group."""
        first = [self.param_groups[i]["params"][j] for i, j in self._order or ()]
        known = {id(p) for p in first}
        return first + [p for p in parameters_of(self) if id(p) not in known]

    # -- rates and counters

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch.amp.GradScaler asks: pass found_inf on instead of reading it on the host, and do not unscale first.

        False while a step without either runs its closure: nothing will be unscaled, so gradients may be clipped there.
        """
        return not self._plain_closure

    @property
    def global_step(self) -> int:
        """Applied updates so far (with `count_skipped`, all steps). Reads the device after steps that could skip."""
        return int(self._counts["global_step"])

    def _rate(self, group: Group) -> Number:
        rate, step = group["lr"], self._counts["global_step"]
        if not isinstance(rate, float | LearningRateSchedule) and not (isinstance(rate, Tensor) and rate.ndim == 0):
            rate = group["lr"] = learning_rate_of(rate)  # set by hand, as the constructor takes it
        if isinstance(rate, LearningRateSchedule):
            if isinstance(rate, ListedLR) and self._counts["calls"] >= len(rate.values):
                step = int(step)  # perhaps past the end, which only the host can report
            return _at(rate, step)
        if self.faithful and isinstance(rate, float):
            rates = [g["lr"] for g in [*self.param_groups, self.defaults]]
            if any(isinstance(other, LearningRateSchedule) for other in rates):
                return float(np.float32(rate) + np.float32(1) - np.float32(1))
        return rate

    def _decay(self, group: Group) -> Number:
        decay = group["weight_decay"]
        if callable(decay):
            return _at(decay, self._counts["global_step"])
        return decay if isinstance(decay, float | Tensor) else check_number("weight_decay", decay)

    def get_lr(self) -> Tensor | list[Tensor]:
        """The rate of the next step, 0-d float32; one per parameter, in order, when groups were given rates."""
        if self.rates_grouped:
            return self.get_lr_parameter(self.parameters)
        return torch.as_tensor(self._rate(self.param_groups[0]), dtype=torch.float32)

    def get_lr_parameter(self, param: object) -> Tensor | list[Tensor]:
        """The rate of the next step of one parameter, or the list of rates of a list of them.

        Raises:  TypeError for something else; ValueError for a parameter that is not in this optimizer.
        """
        params = param if isinstance(param, list | tuple) and not is_named(param) else [param]
        rates = [torch.as_tensor(self._rate(group), dtype=torch.float32) for group in self.param_groups]
        shown = {id(p): rate for rate, group in zip(rates, self.param_groups) for p in group["params"]}
        for p in (wanted := tensors_of(params)):
            check_kind("each of param", p, Tensor, "a parameter")
            if id(p) not in shown:
                raise ValueError(f"the parameter of shape {tuple(p.shape)} is not in this optimizer")
        found = [shown[id(p)] for p in wanted]
        return found if params is param else found[0]

    def _count_on_device(self, device: torch.device) -> None:
        """From now on the counters are tensors, because only the device knows which steps were skipped."""
        # adding skipped steps, which are counted in a tensor, makes it one; a graph needs a tensor from the start
        if torch.compiler.is_compiling() and isinstance(self._counts["global_step"], int):
            self._counts["global_step"] = torch.full((), self._counts["global_step"], dtype=torch.int64, device=device)
        for group in self.param_groups:
            if isinstance(group["updates"], int):
                group["updates"] = torch.full((), group["updates"], dtype=torch.int64, device=device)

    # -- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:  # type: ignore[override]
        """One update from the gradients in `p.grad`; parameters without one are left out.

        Returns what `closure` returns (it is called first, with gradients enabled), or None.
        Edges:   attributes `found_inf` (skip where not 0) and `grad_scale` (divide gradients by it), both one-element
                 float32 tensors or None, are read as torch.amp.GradScaler sets them.
        """
        loss, keep = evaluated(self, closure), None
        found, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found is not None and found.device.type in AT_HAND and not torch.compiler.is_compiling():
            if found.numpy(force=True).any():
                self._counts["global_step"] += self.count_skipped
                return loss
        elif found is not None:
            keep = (found.reshape(()) == 0).float()
            self._count_on_device(keep.device)
        elif torch.compiler.is_compiling():  # a number would be a constant of the graph, and be compiled for each time
            self._count_on_device(self.param_groups[0]["params"][0].device)
        # before anything moves: a rate or a decay that is none, and a gradient that is not taken, raise here
        numbers = [(self._rate(group), self._decay(group)) for group in self.param_groups]
        parts = [self._alike(group) for group in self.param_groups]
        one = 1 if keep is None else keep.to(torch.int64)
        for group, (lr, decay), alike in zip(self.param_groups, numbers, parts):
            for chosen in alike:
                self._update(group, chosen, lr, decay, keep, scale)
            group["updates"] += one
        self._counts["global_step"] += 1 if self.count_skipped else one
        self._counts["calls"] += 1
        return loss

    def _alike(self, group: Group) -> list[list[int]]:
        """Indices of the parameters that have a gradient, by what one `Update` takes together."""
        found: dict[Any, list[int]] = {}
        most, lazy, by_axes = (
            LARGE if self.gradient_transform is None else math.inf,
            group.get("use_lazy"),
            self.by_axes,
        )
        for i, p in enumerate(group["params"]):
            if (grad := p.grad) is None:
                continue
            if (rows := grad.layout is not torch.strided) and not (lazy and grad.is_sparse):
                raise RuntimeError(f"{type(self).__name__} needs dense gradients; use LazyAdam for sparse ones")
            alone = rows or (p.numel() > most and p.is_cpu)
            key = p.device, p.dtype, ~i if alone else by_axes and p.ndim > 1  # ~i is negative: no True, no False
            found.setdefault(key, []).append(i)
        return list(found.values())

    def _update(
        self, group: Group, chosen: list[int], lr: Number, decay: Number, keep: Tensor | None, scale: Tensor | None
    ) -> None:
        """Raw gradients -> the gradients of the formula -> new weights and state, in place."""
        params = [group["params"][i] for i in chosen]
        narrow, rows, needed = params[0].dtype.itemsize < 4, params[0].grad.is_sparse, self.needed(params[0], group)
        held = self._states(params, group, narrow, needed) if needed or narrow else []
        whole = [state["master"] for state in held] if narrow else params
        if narrow:
            follow_(whole, params)
        states = {slot: [state[slot] for state in held] for slot in needed}
        grads, weights = [p.grad for p in params], whole
        if rows:  # the formula runs on the rows that a sparse gradient names, and on nothing else
            (grad,) = (grad.coalesce() for grad in grads)
            at = tuple(grad.indices())
            grads, weights, *parts = [grad.values()], *([xs[0][at]] for xs in (whole, *states.values()))
            states = dict(zip(states, parts))
        dtype, device, t = weights[0].dtype, weights[0].device, group["updates"] + 1
        lr, decay = (x.to(device) if isinstance(x, Tensor) else x for x in (lr, decay))
        keep = None if keep is None else keep.to(device, dtype)
        if isinstance(t, Tensor):
            t = t.to(device).double()  # arithmetic with an int64 tensor would take torch's default dtype
        g = Many(grads if grads[0].dtype == dtype else [grad.to(dtype) for grad in grads])
        if scale is not None:
            g = g.times(scale.to(device).reshape(()).reciprocal())
        many = {slot: Many(xs) for slot, xs in states.items()}
        u = Update(Many(weights), g, many, group, chosen, lr, decay, t, keep)
        u.g = self._prepared(u) if self.gradient_rule is None else self.gradient_rule(u)
        if keep is not None:
            u.g = silenced(u.g, keep)
        for each in u.slices(SLICE) if self.elementwise and weights[0].numel() > LARGE else (u,):
            self.update(each)
        if rows:
            whole[0][at] = weights[0]
            for slot, (part,) in states.items():
                held[0][slot][at] = part
        if narrow:
            torch._foreach_copy_(params, whole)

    def _states(self, params: list[Tensor], group: Group, narrow: bool, needed: list[str]) -> list[dict[str, Tensor]]:
        """The state of each parameter, begun or brought up to what its dtype and the options of its group ask now."""
        states = [self.state[p] for p in params]
        for p, state in zip(params, states):
            if narrow != ("master" in state):  # at first, or somebody has cast the network since
                state.update(master=p.detach().float()) if narrow else state.pop("master")
            for slot in needed:
                if slot not in state:  # at first, or somebody has switched an option on since
                    state[slot] = self.first(slot, state.get("master", p), group)
        return states

    def _prepared(self, u: Update) -> Many:
        """Decay, centralization, the transform, and the static loss scale."""
        g, group = u.g, u.group
        if not self.decays_itself and (where := u.decayed()):
            # the gradient is still S times too large here, so the decay is made so too; 1 / S comes last
            g = g.changed(where, g.part(where).plus(u.w.part(where), u.decay * self.loss_scale))
        if group["grad_centralization"] and self.centralizes:
            multiple = max(int(group["grad_centralization"]), 16 if self.faithful else 1)  # a group may say 16 itself
            g = g.map(lambda x: centralized(x, multiple))
        if self.gradient_transform is not None:
            g = Many(list(self.gradient_transform(list(g.xs), [group["params"][i] for i in u.chosen], group)))
        return g if self.loss_scale == 1.0 or self.decays_itself else g * (1.0 / self.loss_scale)

    # -- saving and copying

    def state_dict(self) -> dict[str, Any]:
        """As torch's, plus `global_step`; schedules and functions are left out, they belong to the constructor."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group["updates"] = int(group["updates"])
            for key in ("lr", "weight_decay"):
                if callable(group[key]):
                    del group[key]
        return {**saved, "global_step": self.global_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken: state, hyper-parameters of the groups and every counter.

        Raises:  ValueError for the state of another optimizer or of other groups; nothing is changed then.
        """
        if not isinstance(state_dict, Mapping):
            check_saved(self, state_dict)
        taken: dict[str, Any] = {}
        before = self.param_groups
        # between the hooks of others: checked is what theirs have made of the state, and theirs see it complete
        hooks = (
            self.register_load_state_dict_pre_hook(lambda _, given: taken.update(self.check_state(given))),
            self.register_load_state_dict_post_hook(lambda _: self._complete(taken, before), prepend=True),
        )
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            for hook in hooks:
                hook.remove()

    def _complete(self, saved: dict[str, Any], before: list[Group]) -> None:
        """What torch does not load as it was saved: float32 state of 16-bit parameters, schedules, counters."""
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        for p, key in zip(parameters_of(self), keys):
            for name, value in saved["state"].get(key, {}).items():
                self.state[p][name] = value.detach().to(p.device, copy=True)
        for old, new in zip(before, self.param_groups):
            for name in ("lr", "weight_decay"):
                new.setdefault(name, old[name])
        self._counts = {"global_step": saved["global_step"], "calls": saved["global_step"]}

    def check_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Raise TypeError or ValueError unless each saved weight has the tensors that it starts with here."""
        check_saved(self, saved, whole=True)
        if "global_step" not in saved:
            raise ValueError(f"this state has no global_step; {type(self).__name__} needs what its state_dict() gave")
        check_count("global_step", saved["global_step"], low=0)
        for group, there in zip(self.param_groups, saved["param_groups"]):
            check_count("updates", there["updates"], low=0)
            for p, key in zip(group["params"], there["params"]):
                if (held := saved["state"].get(key)) is not None:
                    fresh = {slot: self.first(slot, p.detach(), group) for slot in self.needed(p, group)}
                    check_alike(
                        f"state[{key!r}]", held, {**fresh, **({"master": p.detach()} if "master" in held else {})}
                    )
        return saved

    def __getstate__(self) -> dict[str, Any]:
        mine = ("loss_scale", "gradient_transform", "count_skipped", "faithful", "_counts", "_plain_closure")
        rest = ("gradient_rule", "rates_grouped", "_order")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in (*mine, *rest)}}


class TakesClosures(Protocol):
    """An optimizer that says whether the closure of its running step gets gradients as they are."""

    _plain_closure: bool


@contextmanager
def plain_closure(optimizer: TakesClosures) -> Iterator[None]:
    """While the closure of a step without `found_inf` and `grad_scale` runs, the optimizer says it unscales nothing."""
    if getattr(optimizer, "found_inf", None) is None and getattr(optimizer, "grad_scale", None) is None:
        optimizer._plain_closure = True
    try:
        yield
    finally:
        optimizer._plain_closure = False


def evaluated(optimizer: TakesClosures, closure: Callable[[], Loss] | None) -> Loss | None:
    """What the closure of a step returns, called with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad(), plain_closure(optimizer):
        return closure()


def _at(function: Callable[[Any], Any], step: int | Tensor) -> Number:
    """A schedule or function of the step; a schedule on the device in float64, so that no weight loses digits."""
    if isinstance(function, LearningRateSchedule) and isinstance(step, Tensor):
        return torch.as_tensor(function.rate(step.double()), dtype=torch.float64, device=step.device)
    return function(step)
