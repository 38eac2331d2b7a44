"""What freezes a step: an optimizer that updates only the trained layers, the update and the cells around it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.arguments import Count, check_alike, check_count, check_kind, checked, is_whole
from mpkit.boost.grad_accumulation import Accumulate
from mpkit.boost.grad_centralization import centralize_where_marked
from mpkit.boost.process import regroup, subset
from mpkit.optimizers.arguments import inner, parameters_of
from mpkit.optimizers.saved import check_state
from mpkit.optimizers.wrapper import Wrapper
from mpkit.step import Hook, StepContext, TrainOneStepCell
from mpkit.step.distributed import mean_
from mpkit.step.engine import uncompiled
from mpkit.step.phases import gradients_of, skips_on_device
from mpkit.step.update import Update, Wrapped


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
    State:   `step_index`, steps done or skipped, and the state of each optimizer; groups and strategy are given anew.
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
        # what torch.compile reads it compiles for, and the place in a strategy would be a graph for each place
        uncompiled(FreezeOpt, "apply")
        if train_parameter_groups is None and train_strategy is not None:
            raise ValueError("train_strategy names groups by index: give train_parameter_groups with it")
        self._held = parameters_of(opt)  # what is added later is in no group, and trained on every step
        self.groups = [self._held] if train_parameter_groups is None else _parts_of(train_parameter_groups)
        self.strategy = [] if train_strategy is None else _checked_strategy(train_strategy, len(self.groups))
        self.step_index = 0
        self.optimizers = self._copies(isinstance(train_strategy, Tensor)) if faithful else [opt]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return not self._plain_closure and all(skips_on_device(opt) for opt in self.optimizers)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        uncompiled(FreezeOpt, "apply")
        for opt in self.optimizers:
            centralize_where_marked(inner(opt))

    # freezing

    @property
    def index(self) -> int:
        """The freeze index of the coming step."""
        places = self.strategy or range(len(self.groups))
        return places[self.step_index % len(places)]

    def still(self, index: int | None = None) -> list[Tensor]:
        """The parameters that a step of `index` (None: the coming step's) does not update."""
        members = {id(p) for p in self.groups[self.index if index is None else index]}
        frozen = {id(p) for p in self._held} - members
        return [p for p in parameters_of(self) if id(p) in frozen]

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

    def apply(self) -> None:
        """Update the parameters of this step's group and go on to the next index; others keep weight and state."""
        self.step_group(self.index)
        self.advance()

    @torch.no_grad()
    def step_group(self, index: int) -> None:
        """Update the parameters of one group; the strategy stays where it is. Drops the other gradients."""
        for p in self.still(index):
            p.grad = None
        self.inside(self.optimizers[index % len(self.optimizers)])

    def advance(self) -> None:
        """Go on to the next index without an update (a skipped step)."""
        self.step_index += 1

    # saving

    def state_dict(self) -> dict[str, Any]:
        """Steps gone by, and the state of every optimizer."""
        return {"step_index": self.step_index, "optimizers": [opt.state_dict() for opt in self.optimizers]}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise TypeError or ValueError for a state that does not fit the groups and `faithful`."""
        nothing = [None] * len(self.optimizers)
        check_alike("the state of a FreezeOpt", state, {"step_index": 0, "optimizers": nothing})
        check_count("step_index", state["step_index"], low=0)
        for opt, saved in zip(self.optimizers, state["optimizers"]):
            check_state(opt, saved)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError if it does not fit the groups and `faithful`."""
        self.check_state(state_dict)
        for opt, saved in zip(self.optimizers, state_dict["optimizers"]):
            opt.load_state_dict(saved)
        self.step_index = state_dict["step_index"]

    # what is faithful to MindSpore: an optimizer for each group

    def _copies(self, split: bool) -> list[Optimizer]:
        """One optimizer per group, without state; with `split` its listed rates are divided as MindSpore does."""
        copies = [_copy_for(self.optimizer, group) for group in self.groups]
        for i, opt in enumerate(copies if split else ()):
            for own in opt.param_groups:
                if (values := getattr(own["lr"], "values", None)) is not None:
                    own["lr"] = type(own["lr"])(self._rates_of(i, values))
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
    own = inner(optimizer)
    memo: dict[int, Any] = {id(p): p for p in parameters_of(own)} | {id(own.state): defaultdict(dict)}
    result = copy.deepcopy(optimizer, memo)
    regroup(inner(result), [subset(group, parameters) for group in inner(result).param_groups])
    centralize_where_marked(inner(result))
    return result


def _parts_of(groups: Sequence[Any]) -> list[list[Tensor]]:
    """The parameters of each freeze group, which lists them or parameter groups that hold them."""
    check_kind("train_parameter_groups", groups, (list, tuple), "a list of lists of parameters")
    parts: list[list[Tensor]] = []
    for group in groups:
        check_kind("each of train_parameter_groups", group, (list, tuple), "a list of parameters")
        parts.append([p for each in group for p in (each["params"] if isinstance(each, dict) else [each])])
    return parts


def _checked_strategy(strategy: Sequence[int] | Tensor, groups: int) -> list[int]:
    if isinstance(strategy, Tensor) and (strategy.ndim, strategy.dtype) != (1, torch.int32):
        raise ValueError(f"a train_strategy tensor must be 1-D int32, got {strategy.dtype}, {tuple(strategy.shape)}")
    indices = strategy.tolist() if isinstance(strategy, Tensor) else strategy
    check_kind("train_strategy", indices, (list, tuple), "a list, a tuple or a tensor")
    if not indices or not all(is_whole(index) and 0 <= index < groups for index in indices):
        raise ValueError(f"train_strategy must hold group indices 0..{groups - 1} as ints, got {indices!r:.80}")
    return list(indices)


class FreezeHook(Hook):
    """Switches gradients off for the forward and backward pass of any train cell; `index` as in `frozen`."""

    def __init__(self, optimizer: FreezeOpt, index: int | None = None) -> None:
        self._optimizer, self._index, self._pass = optimizer, index, ExitStack()

    def before_forward(self, ctx: StepContext) -> None:
        self._pass.close()  # left over when the last pass ended in an exception
        self._pass.enter_context(self._optimizer.frozen(self._index))

    def after_backward(self, ctx: StepContext) -> None:
        self._pass.close()

    after_failure = after_backward


class Freeze(Wrapped):
    """Frozen layers have no gradients; a step that is skipped uses up its place in the strategy."""

    what = "freezing"
    refuses: ClassVar[Mapping[str, str]] = {
        "accumulation": "each pass would use up a place in the strategy; put accumulation around freezing",
        "freezing": "a layer can stand still once",
        "dimension reduction": "it needs the gradient of every weight",
    }

    def __init__(self, inside: Update, optimizer: FreezeOpt) -> None:
        super().__init__(inside)
        self.freezing, self.hooks = optimizer, (*inside.hooks, optimizer.hook())

    def apply(self, ctx: StepContext | None, found_inf: Tensor | None) -> None:
        """As inside, and on to the next place."""
        before = self.freezing.step_index
        self.inner.apply(ctx, found_inf)
        if self.freezing.step_index == before:
            self.freezing.advance()


@checked
def freeze_cell(
    reducer_flag: bool,
    network: nn.Module,
    optimizer: FreezeOpt,
    sens: float,
    grad: object,
    use_grad_accumulation: bool,
    mean: bool | None = None,
    degree: Count | None = None,
    max_accumulation_step: Count = 1,
) -> tuple[TrainOneStepCell, ...]:
    """One training cell per freeze group; cell i trains the parameters of group i and returns the loss.

    Args:
        reducer_flag:           sum gradients over the processes of torch.distributed before each update.
        network:                returns the loss.
        optimizer:              a `FreezeOpt`.
        sens:                   the backward pass starts from this number, not 0; it is not divided out.
        grad:                   unused: autograd needs no gradient function. Kept for the signature.
        use_grad_accumulation:  each cell updates with the mean of `max_accumulation_step` of its calls.
        mean, degree:           divide the sum by `degree` (None: the number of processes) when `mean`.
    Raises:  TypeError if `optimizer` is no FreezeOpt or `sens` no number.
    Source:  MindSpore boost.grad_freeze.freeze_cell.
    """

    def update(index: int, _: nn.Module, freezing: Any) -> Update:
        one = GroupUpdate(freezing, index, reducer_flag, degree if mean else 1)
        return Accumulate(one, max_accumulation_step) if use_grad_accumulation else one

    indices = range(len(optimizer.groups))
    return tuple(TrainOneStepCell(network, optimizer, sens, update=partial(update, index)) for index in indices)


class GroupUpdate(Update):
    """The update of one freeze group, whose gradients are summed over the processes and divided, or stay apart."""

    def __init__(self, optimizer: FreezeOpt, index: int, reduces: bool, degree: int | None) -> None:
        super().__init__(optimizer)
        self.freezing, self.index, self.reduces, self.degree = optimizer, index, reduces, degree
        self.hooks = (FreezeHook(optimizer, index),)

    def reduce(self) -> None:
        if self.reduces:
            mean_(gradients_of(parameters_of(self.optimizer)), self.degree)

    def apply(self, ctx: StepContext | None, found_inf: Tensor | None) -> None:
        self.freezing.step_group(self.index)
