"""Gradient freezing: on some steps only a suffix of the layers is trained, and the backward pass stops early."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from mpkit.boost.grad_accumulation import GradientAccumulation
from mpkit.boost.grad_centralization import centralize_where_marked
from mpkit.boost.process import inner, regroup, subset
from mpkit.step import Hook, StepContext
from mpkit.step.phases import skips_on_device

Rule = Literal["modules", "mindspore"]
State = Literal["shared", "per_group"]
TYPES = {0: "continuous", 1: "interleaved"}


class GradientFreeze:
    """Decide which layers stand still on which step.

    The network is cut into stages in definition order. With G groups, index v = 1..G-1 freezes the first
    v * (stages // G) stages, index 0 trains everything. The forward pass always runs in full, so BatchNorm statistics
    of frozen layers keep moving.

    Args:
        param_groups:        G, number of freeze groups (>= 1; 1 never freezes).
        freeze_type:         0 "continuous": full steps, then indices 1, 2, .., G-1 in a row; 1 "interleaved": frozen
                             steps spread evenly, their index drawn, small ones more often.
        freeze_p:            share of steps *without* freezing, in [0, 1]. The original calls it the probability of
                             freezing; it is the opposite.
        total_steps:         length of the strategy, steps (>= 0); afterwards it starts again.
        full_step_fraction:  a clear name for `freeze_p`; give one of them.
        rule:                "modules": a stage is one layer with a weight matrix and what follows until the next one.
                             "mindspore": by parameter name ("bn" or "bias" joins the stage, three fill it), which does
                             nothing at all when G exceeds the number of stages.
        state:               see `FreezeOpt`.
        seed:                of the own generator that draws the indices.
    Raises:  TypeError for kinds, ValueError for ranges. Warns when G exceeds the number of stages, and takes that.
    Source:  MindSpore boost.GradientFreeze.

    >>> GradientFreeze(3, 0, 0.5, 8).generate_freeze_index_sequence(3, 0, 0.5, 8)
    [0, 0, 1, 2, 0, 0, 1, 2]
    """

    def __init__(
        self,
        param_groups: int,
        freeze_type: int,
        freeze_p: float | None = None,
        total_steps: int | None = None,
        *,
        full_step_fraction: float | None = None,
        rule: Rule = "modules",
        state: State = "shared",
        seed: int = 0,
    ) -> None:
        share = full_step_fraction if freeze_p is None else freeze_p
        if share is None or None not in (freeze_p, full_step_fraction):
            raise TypeError("give freeze_p or full_step_fraction (one of them): the share of steps without freezing")
        if isinstance(param_groups, bool) or not isinstance(param_groups, int):
            raise TypeError(
                f"param_groups must be the number of groups, an int, got {type(param_groups).__name__}; "
                "split_parameters_groups(network, number) makes the lists of parameters"
            )
        if total_steps is None:
            raise TypeError("GradientFreeze needs total_steps, the length of the strategy in steps")
        if rule not in ("modules", "mindspore"):
            raise ValueError(f"rule must be 'modules' or 'mindspore', got {rule!r}")
        self.param_groups = param_groups
        self.freeze_type = freeze_type
        self.freeze_p = share
        self.total_steps = total_steps
        self.rule, self.state, self.seed = rule, state, seed
        _check_strategy(param_groups, freeze_type, self.freeze_p, total_steps)

    def split_parameters_groups(self, net: nn.Module, freeze_para_groups_number: int) -> list[list[nn.Parameter]]:
        """One list per freeze group: list i holds the parameters that are trained when the index is i."""
        stages = stages_by_name(net) if self.rule == "mindspore" else stages_by_module(net)
        if not stages:
            raise ValueError(f"{type(net).__name__} has no trainable parameter to freeze or train")
        groups = freeze_para_groups_number
        if self.rule == "modules" and groups > len(stages):
            warnings.warn(
                f"{groups} freeze groups were asked for and the network has {len(stages)} stages; taking "
                f"{len(stages)} groups. Give param_groups={len(stages)} or less.",
                stacklevel=2,
            )
            groups = len(stages)
        stride = len(stages) // groups
        return [[p for stage in stages[i * stride :] for p in stage] for i in range(groups)]

    def generate_freeze_index_sequence(
        self,
        parameter_groups_number: int,
        freeze_strategy: int,
        freeze_p: float,
        total_steps: int,
        *,
        numpy_seed: int | None = None,
    ) -> list[int]:
        """The index of every step, exactly `total_steps` long.

        Args:
            numpy_seed:  reproduce the original bit for bit as after `numpy.random.seed(numpy_seed)`: int(1.01 *
                         total_steps) long, for type 0 rounded up to whole cycles. None: this object's own `seed`.
        Edges:   freeze_p = 1 never freezes; a step count of 0 gives [].
        """
        _check_strategy(parameter_groups_number, freeze_strategy, freeze_p, total_steps)
        groups, length = parameter_groups_number, total_steps
        if numpy_seed is not None:
            length = int(total_steps * 1.01)
        if groups <= 1 or (freeze_strategy == 0 and freeze_p == 1):
            return [0] * length
        if freeze_strategy == 0:
            sequence = _continuous(groups, freeze_p, length)
            return sequence if numpy_seed is not None else sequence[:length]
        draw = np.random.default_rng(self.seed) if numpy_seed is None else np.random.RandomState(numpy_seed)
        sequence = _interleaved(groups, freeze_p, length, draw)
        return sequence if numpy_seed is not None else sequence[:length]

    def freeze_generate(
        self, network: nn.Module, optimizer: Optimizer, *, numpy_seed: int | None = None
    ) -> tuple[nn.Module, FreezeOpt]:
        """The network as it came, and its optimizer wrapped into a `FreezeOpt` with groups and strategy.

        What the optimizer holds beside the network's stages, such as the parameters of a loss, is always trained.
        """
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        groups = self.split_parameters_groups(network, self.param_groups)
        if self.rule == "modules":
            staged = {id(p) for p in groups[0]}
            others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in staged]
            groups = [group + others for group in groups]
        strategy = self.generate_freeze_index_sequence(
            len(groups), self.freeze_type, self.freeze_p, self.total_steps, numpy_seed=numpy_seed
        )
        return network, FreezeOpt(optimizer, groups, strategy or None, state=self.state)


def _check_strategy(groups: int, kind: int, share: float, steps: int) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"total_steps must be an int, got {type(steps).__name__}")
    if groups < 1 or steps < 0:
        raise ValueError(f"need param_groups >= 1 and total_steps >= 0, got {groups} and {steps}")
    if groups > 1 and kind not in TYPES:
        raise ValueError(f"freeze_type must be 0 (continuous) or 1 (interleaved), got {kind!r}")
    if isinstance(share, bool) or not isinstance(share, Real):
        raise TypeError(f"freeze_p must be a number in [0, 1], got {share!r}")
    if not 0 <= share <= 1:
        raise ValueError(f"freeze_p is the share of steps without freezing and must be in [0, 1], got {share}")


def _continuous(groups: int, share: float, length: int) -> list[int]:
    """Whole cycles of z full steps and the indices 1..G-1, at least `length` steps."""
    # the original's arithmetic: G = 10 and p = 0.7 give 20 full steps because 6.3 / 0.3 is 20.999...
    zeros = int(np.floor(share * (groups - 1) / (1 - share)) + 0.5)
    cycle = [0] * zeros + list(range(1, groups))
    return cycle * -(-length // len(cycle))


def _interleaved(groups: int, share: float, length: int, draw: Any) -> list[int]:
    """Frozen steps as soon as their share falls below 1 - p; index v drawn with probability ~ G - v."""
    indices = list(range(groups - 1, 0, -1))
    odds = np.arange(1, groups) / sum(range(1, groups))
    sequence, full, frozen = [0], 1, 0
    while len(sequence) < length:
        if frozen / (full + frozen) < 1 - share:
            sequence.append(int(draw.choice(indices, p=odds)))
            frozen += 1
        else:
            sequence.append(0)
            full += 1
    return sequence


def stages_by_module(net: nn.Module) -> list[list[nn.Parameter]]:
    """The trainable parameters in definition order, cut before each module that holds a weight of two axes or more."""
    stages: list[list[nn.Parameter]] = []
    seen: set[int] = set()
    closed = True  # the stage at the end has its weight, so another weight opens a new one
    for module in net.modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        seen.update(map(id, own))
        weighty = any(p.ndim >= 2 for p in own)
        if own and (not stages or (weighty and closed)):
            stages.append([])
            closed = False
        if own:
            stages[-1] += own
        closed = closed or weighty
    return stages


def stages_by_name(net: nn.Module) -> list[list[nn.Parameter]]:
    """The original's rule: "bn" or "bias" in the name joins the stage, any other closes it once it holds three."""
    stages: list[list[nn.Parameter]] = [[]]
    for name, p in net.named_parameters():
        if not p.requires_grad:
            continue
        if "bn" not in name and "bias" not in name and len(stages[-1]) >= 3:
            stages.append([])
        stages[-1].append(p)
    return [stage for stage in stages if stage]


class FreezeOpt(Optimizer):
    """An optimizer that, on each step, updates only the parameters of that step's group.

    Step s uses index `strategy[s]`, starting again at the end; without a strategy the groups take turns. Run the
    forward and backward pass under `frozen()` (boost's train cells and `hook()` do) and the backward pass really ends
    at the first trained layer; without it the result is the same, only not faster.

    Args:
        opt:                     any `torch.optim.Optimizer`.
        train_parameter_groups:  per index, the list of parameters to train (or of parameter groups holding them);
                                 None: one group with everything.
        train_strategy:          indices as list, tuple or 1-D int32 tensor; None: round robin.
        state:                   "shared": `opt` itself does every step, so a weight has one momentum and the learning
                                 rate follows the global step. "per_group": the original's, a copy of `opt` per group
                                 with moments and step counter of its own; memory grows with the number of groups and
                                 schedules run late. Empty user groups are dropped.
    Raises:  TypeError if `opt` is no optimizer, the groups are no lists or the strategy is of another kind;
             ValueError for a strategy without groups, an element that is no int or not an index of a group, or a
             tensor that is not 1-D int32.
    Source:  MindSpore boost.FreezeOpt.
    """

    def __init__(
        self,
        opt: Optimizer,
        train_parameter_groups: Sequence[Any] | None = None,
        train_strategy: Sequence[int] | Tensor | None = None,
        *,
        state: State = "shared",
    ) -> None:
        if not isinstance(opt, Optimizer):
            raise TypeError(f"opt must be a torch.optim.Optimizer, got {type(opt).__name__}")
        if state not in ("shared", "per_group"):
            raise ValueError(f"state must be 'shared' or 'per_group', got {state!r}")
        if train_parameter_groups is None and train_strategy is not None:
            raise ValueError("train_strategy names groups by index: give train_parameter_groups with it")
        self.optimizer = opt
        self.groups = _checked_groups(train_parameter_groups, opt)
        self.strategy = _checked_strategy(train_strategy, len(self.groups))
        self.step_index = 0
        self.steps = 0  # calls of step()
        self.optimizers = [opt] if state == "shared" else self._copies(train_strategy)
        self._members = [{id(p) for p in group} for group in self.groups]

    # what a torch.optim.Optimizer is asked for

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the optimizer that was wrapped."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the optimizer that was wrapped."""
        return self.optimizer.state

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return all(skips_on_device(opt) for opt in self.optimizers)

    def __getattr__(self, name: str) -> Any:  # only for names that this class does not have
        if name in ("optimizer", "found_inf", "grad_scale") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._members = [{id(p) for p in group} for group in self.groups]  # a copy has other parameters
        for opt in self.optimizers:
            centralize_where_marked(inner(opt))

    def __repr__(self) -> str:
        return f"FreezeOpt({len(self.groups)} groups, step {self.step_index}, {type(self.optimizer).__name__})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    # freezing

    @property
    def index(self) -> int:
        """The freeze index of the coming step."""
        return self.strategy[self.step_index] if self.strategy else self.step_index

    @property
    def parameters(self) -> list[Tensor]:
        """Every parameter that some group trains, in the order of the wrapped optimizer."""
        return [p for group in self.param_groups for p in group["params"]]

    @contextmanager
    def frozen(self, index: int | None = None) -> Iterator[None]:
        """Parameters outside the group of `index` (None: the coming step's) need no gradient inside this block."""
        still = self.freeze_(index)
        try:
            yield
        finally:
            thaw_(still)

    def freeze_(self, index: int | None = None) -> list[Tensor]:
        """Switch off the gradients of everything outside the group; -> what was switched off, for `thaw_`."""
        trained = self._members[self.index if index is None else index]
        still = [p for p in self.parameters if p.requires_grad and id(p) not in trained]
        for p in still:
            p.requires_grad_(False)
        return still

    def hook(self) -> Hook:
        """A hook that freezes for the forward and backward pass of any train cell."""
        return _FreezeHook(self)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters of this step's group and go on to the next index; others keep weight and state."""
        loss = self.step_group(self.index, closure)
        self.advance()
        self.steps += 1
        return loss

    def step_group(self, index: int, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters of one group; the strategy stays where it is. Drops the other gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad(), self.frozen(index):
                loss = closure()
        trained = self._members[index]
        for p in self.parameters:
            if id(p) not in trained:
                p.grad = None
        opt = self.optimizers[index % len(self.optimizers)]
        for name in ("found_inf", "grad_scale"):
            setattr(opt, name, getattr(self, name, None))
        try:
            opt.step()
        finally:
            for name in ("found_inf", "grad_scale"):
                delattr(opt, name)
        return loss

    def advance(self) -> None:
        """Go on to the next index without an update (a skipped step)."""
        length = len(self.strategy) if self.strategy else len(self.groups)
        self.step_index = (self.step_index + 1) % length

    def state_dict(self) -> dict[str, Any]:
        """Place in the strategy, steps done, the strategy itself and the state of every optimizer."""
        return {
            "step_index": self.step_index,
            "steps": self.steps,
            "strategy": list(self.strategy),
            "optimizers": [opt.state_dict() for opt in self.optimizers],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError if it does not fit the groups and the state= option."""
        if len(state_dict["optimizers"]) != len(self.optimizers):
            raise ValueError(
                f"this FreezeOpt has {len(self.optimizers)} optimizers, the state {len(state_dict['optimizers'])}; "
                "make it with the same groups and the same state= option"
            )
        strategy = _checked_strategy(state_dict["strategy"] or None, len(self.groups))
        place, length = int(state_dict["step_index"]), len(strategy or self.groups)
        if not 0 <= place < length:
            raise ValueError(f"step_index must be in 0..{length - 1}, the places of the strategy, got {place}")
        for opt, state in zip(self.optimizers, state_dict["optimizers"]):
            opt.load_state_dict(state)
        self.strategy, self.step_index, self.steps = strategy, place, int(state_dict.get("steps", 0))

    def _copies(self, strategy: Any) -> list[Optimizer]:
        """One optimizer per group, without state, its listed learning rates split as the original does."""
        split = isinstance(strategy, Tensor)
        rates = [getattr(group["lr"], "values", None) for group in self.param_groups]
        copies = []
        for i, group in enumerate(self.groups):
            opt = _copy_for(self.optimizer, group)
            for values, own in zip(rates, opt.param_groups) if split and len(opt.param_groups) == len(rates) else ():
                if values is not None:
                    own["lr"] = type(own["lr"])(tuple(split_learning_rates(values, self.strategy, len(self.groups))[i]))
            copies.append(opt)
        return copies


class _FreezeHook(Hook):
    def __init__(self, optimizer: FreezeOpt) -> None:
        self._optimizer = optimizer
        self._still: list[Tensor] = []

    def before_forward(self, ctx: StepContext) -> None:
        thaw_(self._still)  # left over when the last pass ended in an exception
        self._still = self._optimizer.freeze_()

    def after_backward(self, ctx: StepContext) -> None:
        thaw_(self._still)
        self._still = []


def thaw_(still: Sequence[Tensor]) -> None:
    """Switch the gradients of frozen parameters on again."""
    for p in still:
        p.requires_grad_(True)


def split_learning_rates(rates: Sequence[float], strategy: Sequence[int], groups: int) -> list[list[float]]:
    """Rate i goes to the group that step i trains, so that counters per group reproduce the global schedule.

    Edges:   a group that gets none, and every group when there are more rates than steps, gets the whole list and
             consumes it from its start: the original's defect, which `FreezeOpt(state="shared")` does not have.
    """
    if len(rates) > len(strategy):
        return [list(rates) for _ in range(groups)]
    split: dict[int, list[float]] = defaultdict(list)
    for rate, index in zip(rates, strategy):
        split[index].append(rate)
    return [split[i] or list(rates) for i in range(groups)]


def freeze_cell(
    reducer_flag: bool,
    network: nn.Module,
    optimizer: FreezeOpt,
    sens: float,
    grad: Any,
    use_grad_accumulation: bool,
    mean: bool | None = None,
    degree: int | None = None,
    max_accumulation_step: int = 1,
) -> tuple[FreezeTrainCell, ...]:
    """One training cell per freeze group; cell i trains the parameters of group i.

    Args:
        reducer_flag:           sum gradients over the processes of torch.distributed after each backward pass.
        network:                returns the loss.
        optimizer:              a `FreezeOpt`.
        sens:                   the backward pass starts from this number; it is not divided out.
        grad:                   unused: autograd needs no gradient function. Kept for the signature.
        use_grad_accumulation:  each cell updates with the mean of `max_accumulation_step` of its calls.
        mean, degree:           divide the sum by `degree` (None: the number of processes) when `mean`.
    Raises:  TypeError if `optimizer` is no FreezeOpt or `sens` no number.
    Source:  MindSpore boost.grad_freeze.freeze_cell.
    """
    if not isinstance(optimizer, FreezeOpt):
        raise TypeError(f"optimizer must be a FreezeOpt, got {type(optimizer).__name__}; wrap it: FreezeOpt(optimizer)")
    if isinstance(sens, bool) or not isinstance(sens, int | float):
        raise TypeError(f"sens must be a number, got {type(sens).__name__}")
    steps = max_accumulation_step if use_grad_accumulation else 1
    cells = (
        FreezeTrainCell(network, optimizer, i, float(sens), reducer_flag, mean, degree, steps)
        for i in range(len(optimizer.groups))
    )
    return tuple(cells)


class FreezeTrainCell(nn.Module):
    """Forward, backward for one freeze group from `sens`, reduce, update; -> the loss. See `freeze_cell`."""

    def __init__(
        self,
        network: nn.Module,
        optimizer: FreezeOpt,
        index: int,
        sens: float,
        reducer_flag: bool,
        mean: bool | None,
        degree: int | None,
        max_accumulation_step: int,
    ) -> None:
        super().__init__()
        self.network, self.optimizer, self.index, self.sens = network, optimizer, index, sens
        self.reducer_flag, self.mean, self.degree = reducer_flag, mean, degree
        self.accumulation = GradientAccumulation(
            max_accumulation_step, optimizer, update=lambda: optimizer.step_group(index), reduce=self._reduce
        )

    def forward(self, *inputs: Any) -> Tensor:
        self.optimizer.zero_grad()
        with self.optimizer.frozen(self.index):
            loss = self.network(*inputs)
            loss.backward(torch.full_like(loss, self.sens))
        return self.accumulation(loss.detach())

    def _reduce(self, grads: list[Tensor]) -> None:
        if self.reducer_flag:
            reduce_(grads, mean=bool(self.mean), degree=self.degree)


def reduce_(grads: Sequence[Tensor], *, mean: bool = True, degree: int | None = None) -> None:
    """Sum each tensor over all processes in place, and divide by `degree` (None: their number) when `mean`.

    Raises:  RuntimeError when torch.distributed has not been set up.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise RuntimeError("reducing gradients needs torch.distributed.init_process_group(...) in every process")
    for grad in grads:
        torch.distributed.all_reduce(grad)
    if mean and grads:
        torch._foreach_div_(list(grads), float(degree or torch.distributed.get_world_size()))


def index_probabilities(groups: int, freeze_type: int) -> list[float]:
    """P(v) of v = 1..G-1 on a frozen step: uniform for type 0, (G - v) / (G (G-1) / 2) for type 1."""
    if freeze_type == 0:
        return [1 / (groups - 1)] * (groups - 1)
    return [(groups - v) / (groups * (groups - 1) / 2) for v in range(1, groups)]


def expected_saving(stage_costs: Sequence[float], groups: int, freeze_type: int, full_step_fraction: float) -> float:
    """Share of the backward work that freezing saves on average: S = (1-p) sum_v P(v) s_v.

    Args:
        stage_costs:  backward cost of each stage, any unit, in definition order; s_v is the share of the first
                      v * (stages // groups) of them.

    >>> round(expected_saving([1.0] * 10, 10, 1, 0.7), 4)   # (1 - 0.7) * (10 + 1) / (3 * 10)
    0.11
    """
    if groups < 2:
        return 0.0
    stride, total = len(stage_costs) // groups, sum(stage_costs)
    shares = (sum(stage_costs[: v * stride]) / total for v in range(1, groups))
    return (1 - full_step_fraction) * sum(p * s for p, s in zip(index_probabilities(groups, freeze_type), shares))


def stage_costs(net: nn.Module, *inputs: Any) -> list[float]:
    """Multiply-adds that freezing each stage saves in a backward pass: for `expected_saving`.

    A layer costs its multiply-adds once for the gradient of its weight and once for that of its input, which the
    first layer does not need. Freezing stage k also spares the input gradient of the layer after it, so that one is
    counted there. Only Linear and convolution layers count.

    Args:
        inputs:  one forward pass is run on them, without gradients.
    """
    stages = stages_by_module(net)
    place = {id(p): i for i, stage in enumerate(stages) for p in stage}
    work = [0.0] * (len(stages) + 1)

    def count(module: Any, _inputs: Any, output: Tensor) -> None:
        outputs = output.numel() / output.shape[0] / module.weight.shape[0]  # positions of one sample
        work[place[id(module.weight)]] += outputs * module.weight.numel()

    layers = [m for m in net.modules() if isinstance(m, nn.Linear | _ConvNd) and id(m.weight) in place]
    handles = [layer.register_forward_hook(count) for layer in layers]
    training = net.training
    try:
        with torch.no_grad():
            net.eval()(*inputs)
    finally:
        net.train(training)
        for handle in handles:
            handle.remove()
    return [weight + after for weight, after in pairwise(work)]


def _checked_groups(groups: Any, opt: Optimizer) -> list[list[Tensor]]:
    if groups is None:
        return [[p for group in opt.param_groups for p in group["params"]]]
    if not isinstance(groups, list | tuple) or not groups:
        raise TypeError(f"train_parameter_groups must be a list of lists of parameters, got {groups!r:.60}")
    for group in groups:
        if not isinstance(group, list | tuple):
            raise TypeError(f"each of train_parameter_groups must be a list of parameters, got {type(group).__name__}")
    return [[p for item in group for p in (item["params"] if isinstance(item, dict) else [item])] for group in groups]


def _checked_strategy(strategy: Any, groups: int) -> list[int]:
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
    for index in strategy:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < groups:
            raise ValueError(f"train_strategy must hold group indices 0..{groups - 1} as ints, got {index!r}")
    if not strategy:
        raise ValueError("train_strategy is empty; leave it out to visit the groups in turn")
    return list(strategy)


def _copy_for(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Optimizer:
    """A copy of `optimizer` for some of its parameters: same options, no state, the parameters themselves shared."""
    own = inner(optimizer)
    memo: dict[int, Any] = {id(p): p for group in own.param_groups for p in group["params"]}
    memo[id(own.state)] = defaultdict(dict)
    result = object.__new__(type(optimizer))
    memo[id(optimizer)] = result
    result.__dict__.update({key: copy.deepcopy(value, memo) for key, value in optimizer.__dict__.items()})
    regroup(inner(result), [subset(group, parameters) for group in inner(result).param_groups])
    return result
