"""An optimizer that updates only the trained layers of a step."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpkit.arguments import check_alike, check_kind, checked, is_whole
from mpkit.boost.grad_centralization import centralize_where_marked
from mpkit.boost.grad_freeze.update import Freeze, FreezeHook
from mpkit.boost.process import regroup, subset
from mpkit.optimizers.arguments import inner, parameters_of
from mpkit.optimizers.saved import check_state
from mpkit.optimizers.wrapper import PATCHES, Wrapper
from mpkit.step import Hook
from mpkit.step.phases import skips_on_device
from mpkit.step.update import Update

COUNTS = ("step_index", "steps")


class FreezeOpt(Wrapper):
    """An optimizer that, on each step, updates only the parameters of that step's group.

    Step s uses index `strategy[s]`, starting again at the end; without a strategy the groups take turns. Run the
    forward and backward pass under `frozen()` (boost's train cells and `hook()` do) and the backward pass really ends
    at the first trained layer; without it the result is the same, only not faster.

    Args:
        opt:                     any `torch.optim.Optimizer`.
        train_parameter_groups:  per index, the list of parameters to train (or of parameter groups holding them);
                                 None: one group with everything.
        train_strategy:          indices as list, tuple or 1-D int32 tensor; None: round robin.
        faithful:                False: `opt` itself does every step, so a weight has one momentum and the learning
                                 rate follows the global step. True reproduces MindSpore: a copy of `opt` per group
                                 with moments and step counter of its own; memory grows with the number of groups,
                                 schedules run late, and what is set in a group of `opt` later reaches no copy. Empty
                                 user groups are dropped.
    Compile:  `torch.compile(opt.step)` makes a graph for each group, and breaks where the group is chosen.
    Raises:  TypeError if `opt` is no optimizer or its step needs a closure (LBFGS), the groups are no lists or the
             strategy is of another kind; ValueError for a strategy without groups, an element that is no int or not an
             index of a group, or a tensor that is not 1-D int32.
    Source:  MindSpore boost.FreezeOpt.
    """

    knows_its_parameters = True
    """Which parameter is frozen is told by its identity, so that nobody may put others in its place."""

    @checked
    def __init__(
        self,
        opt: Optimizer,
        train_parameter_groups: Sequence[Any] | None = None,
        train_strategy: Sequence[int] | Tensor | None = None,
        *,
        faithful: bool = False,
    ) -> None:
        super().__init__(opt)
        if train_parameter_groups is None and train_strategy is not None:
            raise ValueError("train_strategy names groups by index: give train_parameter_groups with it")
        self.groups = _checked_groups(train_parameter_groups, opt)
        self.strategy = _checked_strategy(train_strategy, len(self.groups))
        self.step_index = 0  # the place in the strategy, or the index itself where there is none
        self.steps = 0  # calls of `step`
        self._held = parameters_of(opt)  # what is added later is in no group, and trained on every step
        self.optimizers = self._copies(isinstance(train_strategy, Tensor)) if faithful else [opt]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return not self._plain_closure and all(skips_on_device(opt) for opt in self.optimizers)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for opt in self.optimizers:
            centralize_where_marked(inner(opt))

    # freezing

    @property
    def index(self) -> int:
        """The freeze index of the coming step."""
        return self.strategy[self.step_index] if self.strategy else self.step_index

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of the wrapped optimizer, in its order."""
        return parameters_of(self)

    def trained(self, index: int | None = None) -> list[Tensor]:
        """The parameters that a step of `index` (None: the coming step's) updates."""
        still = {id(p) for p in self.still(index)}
        return [p for p in self.parameters if id(p) not in still]

    def still(self, index: int | None = None) -> list[Tensor]:
        """Those that it does not update."""
        members = {id(p) for p in self.groups[self.index if index is None else index]}
        frozen = {id(p) for p in self._held} - members
        return [p for p in self.parameters if id(p) in frozen]

    @contextmanager
    def frozen(self, index: int | None = None) -> Iterator[None]:
        """Parameters outside the group of `index` (None: the coming step's) need no gradient inside this block."""
        still = [p for p in self.still(index) if p.requires_grad]
        for p in still:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for p in still:
                p.requires_grad_(True)

    def hook(self) -> Hook:
        """A hook that freezes for the forward and backward pass of any train cell."""
        return FreezeHook(self)

    def around(self, update: Update) -> Update:
        """The update of a step that freezes."""
        return Freeze(update, self)

    def evaluated(self, closure: Callable[[], Any] | None) -> Any:
        """What the closure of a step returns; what stands still needs no gradient there."""
        if closure is None:
            return None
        with self.frozen():
            return super().evaluated(closure)

    # what torch.compile reads it compiles for, and the place in a strategy would be a graph for each place
    @partial(torch.compiler.disable, recursive=False)
    def apply(self) -> None:
        """Update the parameters of this step's group and go on to the next index; others keep weight and state."""
        self.step_group(self.index)
        self.advance()
        self.steps += 1

    @torch.no_grad()
    def step_group(self, index: int) -> None:
        """Update the parameters of one group; the strategy stays where it is. Drops the other gradients."""
        for p in self.still(index):
            p.grad = None
        opt = self.optimizers[index % len(self.optimizers)]
        self.inside(opt)

    def advance(self) -> None:
        """Go on to the next index without an update (a skipped step)."""
        self.step_index = (self.step_index + 1) % len(self.strategy or self.groups)

    # saving

    def state_dict(self) -> dict[str, Any]:
        """Place in the strategy, steps done, the strategy itself and the state of every optimizer."""
        states = [opt.state_dict() for opt in self.optimizers]
        place = {name: getattr(self, name) for name in COUNTS}
        return {**place, "strategy": list(self.strategy), "optimizers": states}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise TypeError or ValueError for a state that does not fit the groups and `faithful`."""
        check_alike("the state of a FreezeOpt", state, dict.fromkeys((*COUNTS, "strategy", "optimizers")))
        check_alike("optimizers", state["optimizers"], [None] * len(self.optimizers))
        check_kind("strategy", state["strategy"], (list, tuple), "a list of group indices")
        places = _checked_strategy(state["strategy"] or None, len(self.groups)) or self.groups
        counts = [state[name] for name in COUNTS]
        if not all(map(is_whole, counts)) or not 0 <= state["step_index"] < len(places):
            raise ValueError(f"step_index must be a place of the strategy and steps a number of calls, got {counts}")
        for opt, saved in zip(self.optimizers, state["optimizers"]):
            check_state(opt, saved)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError if it does not fit the groups and `faithful`."""
        self.check_state(state_dict)
        for opt, saved in zip(self.optimizers, state_dict["optimizers"]):
            opt.load_state_dict(saved)
        self.strategy = list(state_dict["strategy"])
        self.step_index, self.steps = (state_dict[name] for name in COUNTS)

    # what is faithful to MindSpore: an optimizer for each group

    def _copies(self, split: bool) -> list[Optimizer]:
        """One optimizer per group, without state; with `split` its listed rates are divided as MindSpore does."""
        rates = [getattr(group["lr"], "values", None) for group in self.param_groups]
        copies = []
        for i, group in enumerate(self.groups):
            opt = _copy_for(self.optimizer, group)
            for values, own in zip(rates, opt.param_groups) if split and len(opt.param_groups) == len(rates) else ():
                if values is not None:
                    own["lr"] = type(own["lr"])(self._rates_of(i, values))
            copies.append(opt)
        return copies

    def _rates_of(self, group: int, rates: tuple[float, ...]) -> tuple[float, ...]:
        """Rate i goes to the group that step i trains, so that counters per group reproduce the global schedule.

        A group that gets none, and every group when there are more rates than steps, gets the whole list and consumes
        it from its start: MindSpore's defect.
        """
        own = tuple(rate for rate, index in zip(rates, self.strategy) if index == group)
        return own if own and len(rates) <= len(self.strategy) else rates


def _copy_for(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Optimizer:
    """A copy of `optimizer` for some of its parameters: same options, no state, the parameters themselves shared."""
    own, result = inner(optimizer), object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(p): p for p in parameters_of(own)} | {id(own.state): defaultdict(dict)}
    memo[id(optimizer)] = result
    kept = {name: value for name, value in vars(optimizer).items() if name not in PATCHES}
    vars(result).update({name: copy.deepcopy(value, memo) for name, value in kept.items()})
    regroup(inner(result), [subset(group, parameters) for group in inner(result).param_groups])
    return result


def _checked_groups(groups: object, opt: Optimizer) -> list[list[Tensor]]:
    if groups is None:
        return [parameters_of(opt)]
    if not isinstance(groups, list | tuple) or not groups:
        raise TypeError(f"train_parameter_groups must be a list of lists of parameters, got {groups!r:.60}")
    held = {id(p) for p in parameters_of(opt)}
    parts: list[list[Tensor]] = []
    for i, group in enumerate(groups):
        check_kind("each of train_parameter_groups", group, (list, tuple), "a list of parameters")
        part = [p for item in group for p in (item.get("params", ()) if isinstance(item, dict) else [item])]
        for p in part:
            check_kind("each of a group of train_parameter_groups", p, Tensor, "a parameter, or a dict with 'params'")
        if not any(id(p) in held for p in part):
            raise ValueError(
                f"group {i} of train_parameter_groups has no parameter of the optimizer, so its steps would train "
                "nothing; leave the group out"
            )
        parts.append(part)
    return parts


def _checked_strategy(strategy: object, groups: int) -> list[int]:
    if strategy is None:
        return []
    if isinstance(strategy, Tensor):
        if strategy.ndim != 1 or strategy.dtype != torch.int32:
            raise ValueError(
                f"a train_strategy tensor must be 1-D int32, got {strategy.dtype} of shape {tuple(strategy.shape)}"
            )
        strategy = strategy.tolist()
    if not isinstance(strategy, list | tuple):
        raise TypeError(f"train_strategy must be a list, a tuple or a tensor, got {type(strategy).__name__}")
    if not strategy or not all(is_whole(index) and 0 <= index < groups for index in strategy):
        raise ValueError(f"train_strategy must hold group indices 0..{groups - 1} as ints, got {strategy!r:.80}")
    return list(strategy)
