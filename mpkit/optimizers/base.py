"""What all optimizers share: decay, centralization, static loss scale, masters, counters, skipping, saving.

A subclass declares its arguments (their checks stand in the annotations), `slots`, the state a weight starts with, and
`update`, its formula on an `Update`. Counters and rates are host numbers until a `found_inf` tensor has been seen on a
device; then they live there, because only the device knows which steps were applied.
"""

# no `from __future__ import annotations`: the fields of `Optimizer` are read in the modules of its subclasses

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from mpkit.arguments import check_alike, check_count
from mpkit.optimizers.arguments import Declared, Group, Grouped, Params, centralized, parameters_of, split_groups
from mpkit.optimizers.saved import check_saved
from mpkit.optimizers.update import Many, Number, Update, follow_, silenced

Loss = TypeVar("Loss")

AT_HAND = frozenset({"cpu"})
"""Devices whose memory is the host's own: looking at a flag there waits for nothing, and a step that is applied costs
what it costs without the flag. Elsewhere the decision is taken on the device, by neutral coefficients."""

LARGE = 2**18
"""Values above which a tensor on a CPU is updated alone, some rows of so many values after the other: what a formula
computes on the way then stays in the cache, where memory for a whole tensor would be asked from the system anew."""

LOT = 2**24
"""Values that are updated together, about, on any device: a formula needs memory on the way."""

TOLD = ("found_inf", "grad_scale")
"""What torch.amp.GradScaler puts on an optimizer for a step."""
PATCHES = frozenset({"step", "_opt_called", *TOLD})
"""What torch's schedulers and scalers put on an optimizer: bound to this very object, so nothing for a copy of it."""
OWN = {"params", "learning_rate", "loss_scale", "count_skipped", "faithful"} | {
    *("use_locking", "use_offload", "compression")  # taken for MindSpore's sake, without effect
}
"""Arguments of an optimizer; all others are options of its groups."""


class Closing:
    """What an optimizer does with the closure of a step."""

    _plain_closure = False  # while that of a step without `found_inf` and `grad_scale` runs, which unscales nothing

    def evaluated(self, closure: Callable[[], Loss] | None) -> Loss | None:
        """What the closure returns, called with gradients enabled; None without one."""
        if closure is None:
            return None
        self._plain_closure = all(getattr(self, name, None) is None for name in TOLD)
        try:
            with torch.enable_grad():
                return closure()
        finally:
            self._plain_closure = False


class Optimizer(Declared, Closing, Grouped):
    """Base of mpkit's optimizers: a `torch.optim.Optimizer` with MindSpore's groups, decay and loss scale.

    Before the formula of a subclass, gradients pass through (S the static `loss_scale`):

        g <- g + (weight_decay * S) * w;   g <- centralized(g), where asked for;   g <- g * (1 / S)

    so that afterwards g is the plain gradient plus decay when the loss was multiplied by S.

    To add one, declare its arguments as the fields of a dataclass are declared, with annotations that carry their
    checks, and write its `slots` and its `update`; arguments that are none of those below become options of the groups.

    Args:
        params:         parameters, (name, parameter) pairs, or dicts with `params`, `lr`, `weight_decay`,
                        `grad_centralization`; one more dict may hold `order_params`, the order of `parameters`.
        learning_rate:  number >= 0, list or 1-D tensor (step k uses entry k), or schedule.
        weight_decay:   number >= 0, or a function of the step. Ungrouped and named parameters are decayed unless their
                        name contains "beta" or "gamma"; grouped or unnamed ones all are. Biases are decayed.
        loss_scale:     number > 0 by which the loss was multiplied.
        count_skipped:  True lets a skipped step advance the schedule (never the moments); default False, as the
                        reference, whose optimizer does not run at all on overflow.
        faithful:       True reproduces two roundings of MindSpore: fixed rates pass through float32 `(lr + 1) - 1` when
                        another rate is dynamic, and centralization only touches gradients whose axis 1 is a multiple of
                        16. Default False does neither.

    Precision:  moments are float32, and **16-bit parameters are updated through a float32 master copy** that is kept
                in the state, so a network in pure bfloat16 does not forget small updates, and takes 4 bytes more for
                each weight. `BFloat16Weights` does without the copy. At most 16 million values are updated together,
                so that what a formula needs on the way does not grow with the network.
    Skipping:   `step` follows torch.amp.GradScaler's protocol: when the attribute `found_inf` is a tensor, the decision
                is taken where it lies, without waiting for a device; weights, state and counters stay as they are
                bit for bit when it is not 0.
    Counters:   `global_step` counts applied updates (see `count_skipped`) and drives the schedules; each group counts
                its own updates, so a group added later starts its moments afresh. Both are in `state_dict`.
    Raises:     TypeError for kinds, ValueError for ranges, KeyError for group keys, RuntimeError for a parameter in
                two groups or a list of rates that is too short.
    Source:     MindSpore 2.7 nn.Optimizer.
    """

    params: Params
    _: KW_ONLY
    count_skipped: bool = False
    faithful: bool = False

    slots: ClassVar[Mapping[str, float | str]] = {}  # state -> its first value, or the hyper-parameter that gives it
    refused: ClassVar[Mapping[str, Callable[[Mapping[str, Any]], bool]]] = {}  # arguments that do not go together
    switched: ClassVar[Mapping[str, str]] = {}  # state -> the hyper-parameter without which it is not needed
    decays_itself = False  # True where `update` applies weight decay, and no static loss scale is divided out
    decay_filter = True  # False where MindSpore ignores the beta/gamma rule
    centralizes = True
    by_axes = False  # True where matrices have another state than vectors
    sliced = True  # False where a number depends on the others of its tensor, or nothing is computed on the way

    def __post_init__(self) -> None:
        given = self.given()
        for words, wrong in self.refused.items():
            if wrong(given):
                raise ValueError(words.format(**given))
        groups, order, grouped = split_groups(given["params"])
        self.loss_scale: float = given.get("loss_scale", 1.0)
        self.count_skipped, self.faithful = given["count_skipped"], given["faithful"]
        hyper = {name: x for name, x in given.items() if name not in OWN}
        if "beta2" in hyper:
            hyper["betas"] = (hyper.pop("beta1"), hyper.pop("beta2"))
        self.gradient_rule: Callable[[Update], Many] | None = None  # LARS puts its own here: decay, scaling and all
        # A dict, because torch.compile drops what a compiled step writes to attributes of an optimizer. "calls" is at
        # least the number of applied steps, and known without a host read.
        self._counts: dict[str, Any] = {"global_step": 0, "calls": 0}
        defaults = {"weight_decay": 0.0, "grad_centralization": False, "updates": 0}
        defaults |= {"lr": given.get("learning_rate") or 0.0, "decay_by_name": self.decay_filter and not grouped}
        super().__init__(groups, defaults | hyper)
        self._order = order
        if order and sorted(map(id, order)) != sorted(map(id, parameters_of(self))):
            raise ValueError("order_params must list the grouped parameters once each, and no other")

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

    # -- counters

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

    def _count_on_device(self, device: torch.device) -> None:
        """From now on the counters are tensors, because only the device knows which steps were skipped.

        In float64: arithmetic with int64 would take torch's default dtype.
        """
        for held, name in [(self._counts, "global_step"), *((group, "updates") for group in self.param_groups)]:
            if isinstance(held[name], int):
                held[name] = torch.full((), held[name], dtype=torch.float64, device=device)

    # -- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:  # type: ignore[override]
        """One update from the gradients in `p.grad`; parameters without one are left out.

        Returns what `closure` returns (it is called first, with gradients enabled), or None.
        Edges:   attributes `found_inf` (skip where not 0) and `grad_scale` (divide gradients by it), both one-element
                 float32 tensors or None, are read as torch.amp.GradScaler sets them.
        """
        loss, keep = self.evaluated(closure), None
        found, scale = (getattr(self, name, None) for name in TOLD)
        if found is not None and found.device.type in AT_HAND and not torch.compiler.is_compiling():
            if found.numpy(force=True).any():
                self._counts["global_step"] += self.count_skipped
                return loss
        elif found is not None:
            keep = (found.reshape(()) == 0).double()
            self._count_on_device(keep.device)
        elif torch.compiler.is_compiling():  # a number would be a constant of the graph, and be compiled for each time
            self._count_on_device(self.param_groups[0]["params"][0].device)
        # before anything moves: a rate or a decay that is none, and a gradient that is not taken, raise here
        numbers = [(self._rate(group), self._decay(group)) for group in self.param_groups]
        parts = [self._alike(group) for group in self.param_groups]
        one = 1 if keep is None else keep
        for group, (lr, decay), alike in zip(self.param_groups, numbers, parts):
            for chosen in alike:
                self._update(group, chosen, lr, decay, keep, scale)
            group["updates"] += one
        self._counts["global_step"] += 1 if self.count_skipped else one
        self._counts["calls"] += 1
        return loss

    def _alike(self, group: Group) -> list[list[int]]:
        """Indices of the parameters that have a gradient, by what one `Update` takes together."""
        found: defaultdict[Any, list[int]] = defaultdict(list)
        params, total = group["params"], 0
        strided, by_axes = torch.strided, self.by_axes  # looked up once: with a hundred small tensors it is felt
        large = LARGE if self.sliced and self.needed(params[0], group) else math.inf  # else nobody gains by it
        for i, p in enumerate(params):
            if (grad := p.grad) is None:
                continue
            total += (size := p.numel())
            if (rows := grad.layout is not strided) and not (group.get("use_lazy") and grad.is_sparse):
                raise RuntimeError(f"{type(self).__name__} needs dense gradients; use LazyAdam for sparse ones")
            alone = rows or (size > large and p.is_cpu)
            found[i if alone else (p.dtype, p.device, by_axes and p.ndim > 1, total // LOT)].append(i)
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
        dtype, device = weights[0].dtype, weights[0].device
        numbers: Any = (lr, decay, group["updates"] + 1, keep)
        lr, decay, t, keep = (x.to(device) if isinstance(x, Tensor) else x for x in numbers)
        g = Many(grads if grads[0].dtype == dtype else [grad.to(dtype) for grad in grads])
        if scale is not None:
            g = g.times(scale.to(device).reshape(()).reciprocal())
        many = {slot: Many(xs) for slot, xs in states.items()}
        u = Update(Many(weights), g, many, group, chosen, lr, decay, t, keep)
        u.g = self._prepared(u) if self.gradient_rule is None else self.gradient_rule(u)
        if keep is not None:
            u.g = silenced(u.g, keep)
        for each in u.slices(LARGE) if self.sliced else (u,):
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
        """Decay, centralization, and the static loss scale."""
        g, group = u.g, u.group
        if not self.decays_itself and (where := u.decayed()):
            # the gradient is still S times too large here, so the decay is made so too; 1 / S comes last
            g = g.changed(where, g.part(where).plus(u.w.part(where), u.decay * self.loss_scale))
        if group["grad_centralization"] and self.centralizes:
            multiple = max(int(group["grad_centralization"]), 16 if self.faithful else 1)  # a group may say 16 itself
            g = g.map(lambda x: centralized(x, multiple))
        return g if self.loss_scale == 1.0 or self.decays_itself else g * (1.0 / self.loss_scale)

    # -- saving and copying

    def state_dict(self) -> dict[str, Any]:
        """As torch's, plus `global_step`; schedules and functions are left out, they belong to the constructor."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group["updates"] = int(group["updates"])
            for key in [key for key in ("lr", "weight_decay") if callable(group[key])]:
                del group[key]
        return {**saved, "global_step": self.global_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken: state, hyper-parameters of the groups and every counter.

        Raises:  ValueError for the state of another optimizer or of other groups; nothing is changed then.
        """
        self.check_state(state_dict)
        before = self.param_groups
        super().load_state_dict(dict(state_dict))
        # torch does not load as they were saved: float32 state of 16-bit parameters, schedules, counters
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for p, key in zip(parameters_of(self), keys):
            for name, value in state_dict["state"].get(key, {}).items():
                self.state[p][name] = value.detach().to(p.device, copy=True)
        for old, new in zip(before, self.param_groups):
            for name in ("lr", "weight_decay"):
                new.setdefault(name, old[name])
        self._counts = {"global_step": state_dict["global_step"], "calls": state_dict["global_step"]}

    def check_state(self, saved: dict[str, Any]) -> None:
        """Raise TypeError or ValueError unless each saved weight has the tensors that it starts with here."""
        check_saved(self, saved, whole=True)
        check_count("global_step", saved.get("global_step"), low=0)
        for group, there in zip(self.param_groups, saved["param_groups"]):
            check_count("updates", there["updates"], low=0)
            for p, key in zip(group["params"], there["params"]):
                if (held := saved["state"].get(key)) is not None:
                    fresh = {slot: self.first(slot, p.detach(), group) for slot in self.needed(p, group)}
                    check_alike(f"state[{key!r}]", held, fresh | ({"master": p.detach()} if "master" in held else {}))

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name not in PATCHES and "_hooks" not in name}
