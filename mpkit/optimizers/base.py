"""What all optimizers share: groups, decay, gradient transforms, static loss scale, counters, skipping on the device.

A subclass gives two things: `slots`, the state a weight starts with, and `update`, its formula in `torch._foreach_*`
calls on an `Update`, the tensors of one device and dtype. Counters and rates are host numbers until a `found_inf`
tensor has been seen on a device; then they live there, because only the device knows which steps were applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from mpkit.arguments import check_alike, check_count, check_flags, check_kind, check_number
from mpkit.optimizers.arguments import (
    GROUP_KEYS,
    Decay,
    Options,
    Params,
    Rate,
    centralized,
    is_named,
    learning_rate_of,
    listed,
    parameters_of,
    split_groups,
    tensors_of,
    weight_decay_of,
)
from mpkit.optimizers.saved import check_saved
from mpkit.optimizers.update import Number, Update, decayed_positions, silencer
from mpkit.schedules import LearningRateSchedule, ListedLR

# Values of a lot on a CPU, and half of a slice: a quarter of a megabyte in float32, with state and intermediates about
# one. Larger intermediates would be written to memory and back, and come from pages that the system hands out anew.
CACHED = 2**16

AT_HAND = frozenset({"cpu"})
"""Devices whose memory is the host's own: looking at a flag there waits for nothing, and a step that is applied costs
what it costs without the flag. Elsewhere the decision is taken on the device, by neutral coefficients."""


@dataclass(frozen=True)
class Numbers:
    """The numbers of one step of one group; see `Update` for the first four."""

    lr: Number
    decay: Number
    count: int | Tensor
    keep: Tensor | None
    grad_scale: Tensor | None

    def on(self, weight: Tensor) -> Numbers:
        """The same numbers as `weight` needs them: tensors on its device, coefficients in its precision."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        tensors = {name: x.to(weight.device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        for name in ("lr", "decay", "keep"):
            if name in tensors:
                tensors[name] = tensors[name].to(wide)
        return replace(self, **tensors) if tensors else self


class Optimizer(torch.optim.Optimizer):
    """Base of mpkit's optimizers: a `torch.optim.Optimizer` with MindSpore's groups, decay and loss scale.

    Before the formula of a subclass, gradients pass through (S the static `loss_scale`):

        g <- g + (weight_decay * S) * w;   g <- transform(g);   g <- g * (1 / S)

    so that afterwards g is the plain gradient plus decay when the loss was multiplied by S.

    Args:
        params:         parameters, (name, parameter) pairs, or dicts with `params`, `lr`, `weight_decay`,
                        `grad_centralization`; one more dict may hold `order_params`, the order of `parameters`.
        learning_rate:  number >= 0, list or 1-D tensor (step k uses entry k), or schedule.
        weight_decay:   number >= 0, or a function of the step. Ungrouped and named parameters are decayed unless their
                        name contains "beta" or "gamma"; grouped or unnamed ones all are. Biases are decayed.
        loss_scale:     number > 0 by which the loss was multiplied.
        options:        see `Options`.

    Precision:  16-bit parameters are updated through float32 master copies (kept in the state); moments are float32.
    Skipping:   `step` follows torch.amp.GradScaler's protocol: when the attribute `found_inf` is a tensor, the decision
                is taken where it lies, without waiting for a device; weights, state and counters stay as they are
                bit for bit when it is not 0.
    Counters:   `global_step` counts applied updates (see `count_skipped`) and drives the schedules; each group counts
                its own updates, so a group added later starts its moments afresh. Both are in `state_dict`.
    Raises:     TypeError for kinds, ValueError for ranges, KeyError for group keys, RuntimeError for a parameter in
                two groups or a list of rates that is too short.
    Source:     MindSpore 2.7 nn.Optimizer.
    """

    decay_in_formula = False  # True where `update` applies weight decay itself
    decay_filter = True  # False where MindSpore ignores the beta/gamma rule
    centralizes = True
    elementwise = False  # True where `update` treats every value for itself, so that a CPU may take a tensor in slices
    switched: tuple[tuple[str, str], ...] = ()  # (hyper-parameter that may be 0 at first, the slot that it needs)
    intermediates = True  # False where `update` writes its operands only, so that lots have nothing to keep in a cache

    def __init__(
        self,
        params: Params,
        learning_rate: Rate,
        weight_decay: Decay = 0.0,
        loss_scale: float = 1.0,
        hyper: Mapping[str, Any] | None = None,
        options: Options | None = None,
    ) -> None:
        check_number("loss_scale", loss_scale, open_low=True)
        check_kind("hyper", hyper, Mapping, "a dict of hyper-parameters", optional=True)
        check_kind("options", options, Mapping, "a dict of options", optional=True)
        options = options or {}
        check_flags(**{key: options.get(key, False) for key in ("count_skipped", "faithful")})
        if unknown := set(options) - set(Options.__annotations__):
            raise TypeError(f"{type(self).__name__} does not take {sorted(unknown)}")
        groups, order, grouped = split_groups(params)
        self.loss_scale = float(loss_scale)
        self.gradient_transform = options.get("gradient_transform")
        if not (self.gradient_transform is None or callable(self.gradient_transform)):
            raise TypeError(
                f"gradient_transform must be a function (gradients, parameters, group) -> gradients, or None, got "
                f"{self.gradient_transform!r}"
            )
        self.gradient_rule: Callable[..., list[Tensor]] | None = None  # LARS puts its own here: decay, scaling and all
        self.count_skipped = options.get("count_skipped", False)
        self.faithful = options.get("faithful", False)
        # A dict, because torch.compile drops what a compiled step writes to attributes of an optimizer. "calls" is at
        # least the number of applied steps, and known without a host read.
        self._counts: dict[str, Any] = {"global_step": 0, "calls": 0}
        self._plain_closure = False
        self.rates_grouped = False
        defaults = {
            "lr": learning_rate_of(learning_rate),
            "weight_decay": weight_decay_of(weight_decay),
            "grad_centralization": False,
            "decay_by_name": not grouped and self.decay_filter,
            "updates": 0,
        }
        super().__init__(groups, {**defaults, **(hyper or {})})
        self._order = self._checked_order(order)

    def slots(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of one weight before its first update; float32 for 16-bit parameters."""
        return {}

    def update(self, u: Update) -> None:
        """Apply the formula to one `Update`, in place."""
        raise NotImplementedError(f"{type(self).__name__} must define update(u)")

    # -- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; as the groups given to the constructor, but `order_params` is no longer possible."""
        group = dict(param_group)
        if "params" not in group:
            raise KeyError("a group needs the key 'params'")
        unknown = set(group) - (GROUP_KEYS - {"order_params"})
        if unknown:
            raise KeyError(f"a group takes {sorted(GROUP_KEYS)}, got {sorted(unknown)}")
        items = listed(group["params"], "a group's params")
        if not items:
            raise ValueError("a group's params is empty; leave the group out")
        mine = {id(p) for old in self.param_groups for p in old["params"]}
        for tensor in tensors_of(items):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"a group holds parameters or (name, parameter) pairs, got {type(tensor).__name__}")
            if not tensor.is_floating_point():
                raise TypeError(f"parameters must be real floating point, got {tensor.dtype}")
            if id(tensor) in mine:
                raise RuntimeError("a parameter is in two groups, or twice in one; it would be updated twice")
            mine.add(id(tensor))
        group["params"] = items
        if own_rate := "lr" in group:
            group["lr"] = learning_rate_of(group["lr"])
        if "weight_decay" in group:
            group["weight_decay"] = weight_decay_of(group["weight_decay"])
        check_flags(grad_centralization=group.get("grad_centralization", False))
        rates = [g["lr"] for g in self.param_groups] + [group.get("lr", self.defaults["lr"])]
        if len(lengths := {len(rate.values) for rate in rates if isinstance(rate, ListedLR)}) > 1:
            raise ValueError(f"lists of learning rates must have one length in all groups, got {sorted(lengths)}")
        if self.param_groups:
            group["decay_by_name"] = False
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
        groups = self.param_groups
        if self._order is None:
            return parameters_of(self)
        placed = set(self._order)
        later = [(i, j) for i, g in enumerate(groups) for j in range(len(g["params"])) if (i, j) not in placed]
        return [groups[i]["params"][j] for i, j in [*self._order, *later]]

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

    def _rate(self, group: dict[str, Any]) -> Number:
        rate, step = group["lr"], self._counts["global_step"]
        if isinstance(rate, LearningRateSchedule):
            if isinstance(rate, ListedLR) and self._counts["calls"] >= len(rate.values):
                step = int(step)  # perhaps past the end, which only the host can report
            return _at(rate, step)
        if isinstance(rate, Tensor) and rate.ndim == 0:
            return rate
        if not isinstance(rate, float):  # set by hand, as the constructor takes it: a list, an array, an int
            rate = group["lr"] = learning_rate_of(rate)
            if not isinstance(rate, float):
                return self._rate(group)
        if self.faithful and any(
            isinstance(g["lr"], LearningRateSchedule) for g in [*self.param_groups, self.defaults]
        ):
            return float(np.float32(rate) + np.float32(1) - np.float32(1))
        return float(rate)

    def _decay(self, group: dict[str, Any]) -> Number:
        decay = group["weight_decay"]
        if callable(decay):
            return _at(decay, self._counts["global_step"])
        return decay if isinstance(decay, float | Tensor) else check_number("weight_decay", decay)

    def get_lr(self) -> Tensor | list[Tensor]:
        """The rate of the next step, 0-d float32; one per parameter, in order, when groups were given rates."""
        if self.rates_grouped:
            return self.get_lr_parameter(self.parameters)
        return self._shown(self.param_groups[0])

    def get_lr_parameter(self, param: object) -> Tensor | list[Tensor]:
        """The rate of the next step of one parameter, or the list of rates of a list of them.

        Raises:  TypeError for something else; ValueError for a parameter that is not in this optimizer.
        """
        params = [param] if is_named(param) or not isinstance(param, list | tuple) else param
        wanted = tensors_of(params)
        shown = {id(p): i for i, group in enumerate(self.param_groups) for p in group["params"]}
        for p in wanted:
            if not isinstance(p, Tensor):
                raise TypeError(f"need a parameter or a list of parameters, got {type(p).__name__}")
            if id(p) not in shown:
                raise ValueError(f"the parameter of shape {tuple(p.shape)} is not in this optimizer")
        rates = [self._shown(group) for group in self.param_groups]
        found = [rates[shown[id(p)]] for p in wanted]
        return found if params is param else found[0]

    def _shown(self, group: dict[str, Any]) -> Tensor:
        return torch.as_tensor(self._rate(group), dtype=torch.float32)

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
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update from the gradients in `p.grad`; parameters without one are left out.

        Returns what `closure` returns (it is called first, with gradients enabled), or None.
        Edges:   attributes `found_inf` (skip where not 0) and `grad_scale` (divide gradients by it), both one-element
                 float32 tensors or None, are read as torch.amp.GradScaler sets them.
        """
        loss = evaluated(self, closure)
        keep, found_inf, grad_scale = None, getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and found_inf.device.type in AT_HAND and not torch.compiler.is_compiling():
            if found_inf.numpy(force=True).any():
                self._counts["global_step"] += self.count_skipped
                return loss
        elif found_inf is not None:
            # the host does not know whether this step counts, so the counters move to where it is decided
            keep = (found_inf.reshape(()) == 0).float()
            self._count_on_device(keep.device)
        elif torch.compiler.is_compiling():  # a number would be a constant of the graph, and be compiled for each time
            self._count_on_device(self.param_groups[0]["params"][0].device)
        lean = keep is None and self.gradient_rule is None and not self.intermediates
        together = lean or self.gradient_transform is not None
        numbered = [  # before anything moves: a rate or a decay that is none raises here
            Numbers(self._rate(group), self._decay(group), group["updates"] + 1, keep, grad_scale)
            for group in self.param_groups
        ]
        lots = [self._alike(group, together) for group in self.param_groups]
        for group, numbers, parts in zip(self.param_groups, numbered, lots):
            for chosen in parts:
                self._step_some(chosen, group, numbers)
            self._advance(group, keep)
        self._counts["global_step"] += 1 if keep is None or self.count_skipped else keep.to(torch.int64)
        self._counts["calls"] += 1
        return loss

    def _alike(self, group: dict[str, Any], together: bool) -> list[list[int]]:
        """Indices of the parameters that have a gradient, by device and dtype.

        Unless all must come `together`, those on a CPU are dealt out in lots of about `CACHED` values: the intermediate
        results of a formula then stay in the cache, where those of a whole network would be written to memory and back.

        Raises RuntimeError, before anything moves, for a gradient that this optimizer does not take.
        """
        found: dict[Any, list[int]] = {}
        sizes: dict[Any, int] = {}
        for i, p in enumerate(group["params"]):
            if (grad := p.grad) is not None:
                if grad.layout is not torch.strided and not (self._takes_rows(group) and grad.is_sparse):
                    raise RuntimeError(f"{type(self).__name__} needs dense gradients; use LazyAdam for sparse ones")
                key, lot = (p.device, p.dtype), 0
                if not together:  # else the sizes do not matter
                    size = sizes.get(key, 0)
                    sizes[key] = size + p.numel()
                    lot = 0 if p.is_cuda else size // CACHED
                found.setdefault((key, lot), []).append(i)
        return list(found.values())

    def _takes_rows(self, group: dict[str, Any]) -> bool:
        """Whether a sparse gradient may come, which moves the rows that it names."""
        return False

    @staticmethod
    def _advance(group: dict[str, Any], keep: Tensor | None) -> None:
        group["updates"] += 1 if keep is None else keep.to(torch.int64)

    def _step_some(self, chosen: list[int], group: dict[str, Any], numbers: Numbers) -> None:
        """Update the parameters group["params"][i] for i in chosen, which share a device and a dtype."""
        params = [group["params"][i] for i in chosen]
        states = self._states(params, group)
        narrow = "master" in states[0]
        weights = [s["master"] for s in states] if narrow else params
        numbers = numbers.on(weights[0])
        if narrow:
            # the master is the truth, unless somebody has written to the parameter since
            follow_(weights, params)
        idle = {"master", *(slot for key, slot in self.switched if not group[key])}
        state = {name: [s[name] for s in states] for name in states[0] if name not in idle}
        self._apply([p.grad for p in params], weights, state, group, chosen, numbers)
        if narrow:
            torch._foreach_copy_(params, weights)

    def _apply(
        self,
        grads: list[Any],
        weights: list[Tensor],
        state: dict[str, list[Tensor]],
        group: dict[str, Any],
        chosen: list[int],
        numbers: Numbers,
    ) -> None:
        """Raw gradients -> the gradients of the formula -> new weights and state, in place."""
        grads = self._unscaled(grads, weights, numbers.grad_scale)
        if self.gradient_rule is not None:
            grads = self.gradient_rule(grads, weights, group, chosen, numbers)
        else:
            if not self.decay_in_formula:
                grads = self._decayed(grads, weights, group, chosen, numbers.decay)
            grads = self._transformed(grads, [group["params"][i] for i in chosen], group)
        lr, decay, count, keep = numbers.lr, numbers.decay, numbers.count, numbers.keep
        whole = Update(weights, grads, state, group, chosen, lr, decay, count, keep)
        silenced = None if keep is None else silencer(keep, weights[0])
        # slices keep the intermediates of a formula in the cache; a GPU has none to win by it
        sliced = self.elementwise and not weights[0].is_cuda and (self.intermediates or keep is not None)
        for part in whole.slices(2 * CACHED) if sliced else [whole]:
            if silenced is not None:
                part.grads = silenced(part.grads)
            self.update(part)

    def _states(self, params: list[Tensor], group: dict[str, Any]) -> list[dict[str, Any]]:
        states = [self.state[p] or self._begin(p, group) for p in params]
        narrow = params[0].dtype.itemsize < 4
        for p, state in zip(params, states):
            if narrow != ("master" in state):  # somebody has cast the network since
                state.update(master=p.detach().float()) if narrow else state.pop("master")
        for slot in [slot for key, slot in self.switched if group[key]]:
            for p, state in zip(params, states):
                if slot not in state:  # somebody has switched it on since
                    state[slot] = self.slots(state.get("master", p), group)[slot]
        return states

    def _begin(self, p: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[p]
        weight = p
        if p.dtype.itemsize < 4:
            weight = state["master"] = p.detach().float()
        state.update(self.slots(weight, group))
        return state

    def _unscaled(self, grads: list[Tensor], weights: list[Tensor], grad_scale: Tensor | None) -> list[Tensor]:
        """The gradients in the dtype of the weights, divided by `grad_scale`; `p.grad` stays as it is."""
        if grads[0].dtype != weights[0].dtype:
            grads = [grad.to(weights[0].dtype) for grad in grads]
        if grad_scale is not None:
            grads = list(torch._foreach_mul(grads, grad_scale.reshape(()).reciprocal()))
        return grads

    def _decayed(
        self, grads: list[Tensor], weights: list[Tensor], group: dict[str, Any], chosen: list[int], decay: Number
    ) -> list[Tensor]:
        """g + (decay * loss_scale) * w, for the weights that the name rule lets through."""
        if isinstance(decay, float) and decay == 0.0:
            return grads
        where = decayed_positions(group, chosen)
        g, w = [grads[i] for i in where], [weights[i] for i in where]
        # the gradient is still S times too large here, so the decay is made so too; 1 / S comes last
        amount = decay * self.loss_scale
        if not where:
            return grads
        if isinstance(amount, Tensor):
            more = torch._foreach_add(g, torch._foreach_mul(w, amount))
        else:
            more = torch._foreach_add(g, w, alpha=amount)
        out = list(grads)
        for i, grad in zip(where, more):
            out[i] = grad
        return out

    def _transformed(self, grads: list[Tensor], params: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        if group["grad_centralization"] and self.centralizes:
            multiple = max(int(group["grad_centralization"]), 16 if self.faithful else 1)  # a group may say 16 itself
            grads = [centralized(grad, multiple) for grad in grads]
        if self.gradient_transform is not None:
            grads = list(self.gradient_transform(list(grads), params, group))
        if self.loss_scale != 1.0 and not self.decay_in_formula:
            grads = list(torch._foreach_mul(grads, 1.0 / self.loss_scale))
        return grads

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
            self.register_load_state_dict_pre_hook(lambda _, given: taken.update(self._checked(given))),
            self.register_load_state_dict_post_hook(lambda _: self._complete(taken, before), prepend=True),
        )
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            for hook in hooks:
                hook.remove()

    def _complete(self, saved: dict[str, Any], before: list[dict[str, Any]]) -> None:
        """What torch does not load as it was saved: float32 state of 16-bit parameters, schedules, counters."""
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        for p, key in zip(parameters_of(self), keys):
            for name, value in saved["state"].get(key, {}).items():
                self.state[p][name] = value.detach().to(p.device, copy=True)
        for old, new in zip(before, self.param_groups):
            for name in ("lr", "weight_decay"):
                new.setdefault(name, old[name])
        self._counts = {"global_step": saved["global_step"], "calls": saved["global_step"]}

    def _checked(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Raise TypeError or ValueError unless each saved weight has the tensors that it starts with here."""
        check_saved(self, saved, whole=True)
        if "global_step" not in saved:
            raise ValueError(f"this state has no global_step; {type(self).__name__} needs what its state_dict() gave")
        check_count("global_step", saved["global_step"], low=0)
        for group, there in zip(self.param_groups, saved["param_groups"]):
            check_count("updates", there["updates"], low=0)
            for p, key in zip(group["params"], there["params"]):
                if (held := saved["state"].get(key)) is not None:
                    extra = {"master"} if "master" in held else set()
                    fresh = self.slots(p.detach(), group) | {name: p.detach() for name in extra}
                    check_alike(f"state[{key!r}]", held, fresh)
        return saved

    def __getstate__(self) -> dict[str, Any]:
        mine = ("loss_scale", "gradient_transform", "count_skipped", "faithful", "_counts", "_plain_closure")
        rest = ("gradient_rule", "rates_grouped", "_order")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in (*mine, *rest)}}


Loss = TypeVar("Loss")


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


def follow_(masters: list[Tensor], params: list[Tensor]) -> None:
    """Read a 16-bit parameter anew where somebody else has written to it: it no longer is its master, rounded."""
    if params[0].is_cuda and len(params) > 1:  # a few launches for all of them
        merged = _followed(*map(torch._utils._flatten_dense_tensors, (masters, params)))
        torch._foreach_copy_(masters, torch._utils._unflatten_dense_tensors(merged, masters))
        return
    for master, p in zip(masters, params):
        master.copy_(_followed(master, p))


def _followed(master: Tensor, p: Tensor) -> Tensor:
    bits = torch.int16 if p.dtype.itemsize == 2 else torch.int8
    return torch.where(master.to(p.dtype).view(bits) == p.view(bits), master, p.float())


def _at(function: Callable[[Any], Any], step: int | Tensor) -> Number:
    """A schedule or function of the step; a schedule on the device in float64, so that no weight loses digits."""
    if isinstance(function, LearningRateSchedule) and isinstance(step, Tensor):
        return torch.as_tensor(function.rate(step.double()), dtype=torch.float64, device=step.device)
    return function(step)
