"""What boost does to an optimizer's parameter groups: it edits them and never rebuilds the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mpkit.arguments import Count, check_kind, checked
from mpkit.boost.grad_centralization import centralize_where_marked, is_centralized
from mpkit.optimizers.arguments import inner

Group = dict[str, Any]


class OptimizerProcess:
    """Mark the parameters of an optimizer for gradient centralization.

    Each parameter group becomes two: the centralized parameters first, then the others; options, and the state of
    every parameter, stay as they were.

    Args:
        opt:          any `torch.optim.Optimizer`; a wrapper such as LARS is processed through the optimizer inside.
        multiple_of:  centralize only where the size of axis 1 is a multiple of this; 16 is MindSpore's tiling rule.
    Source:  MindSpore boost.OptimizerProcess, which builds a new optimizer, loses its state, fails for Adam, and
             leaves a flat list of parameters without centralization; mpkit edits the groups of the optimizer given.

    >>> import torch
    >>> network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    >>> process = OptimizerProcess(torch.optim.SGD(network.parameters(), lr=0.1, weight_decay=0.01))
    >>> process.add_grad_centralization(network)
    >>> optimizer = process.generate_new_optimizer()
    >>> [(len(g["params"]), g.get("grad_centralization", False), g["weight_decay"]) for g in optimizer.param_groups]
    [(1, True, 0.01), (3, False, 0.01)]
    """

    @checked
    def __init__(self, opt: Optimizer, *, multiple_of: Count = 1) -> None:
        self.optimizer = opt
        self.multiple_of = multiple_of
        self.origin_params: list[Any] = [dict(group) for group in inner(opt).param_groups]

    @checked
    def build_params_dict(self, network: nn.Module) -> dict[int, nn.Module]:
        """Identity of each parameter -> the module that holds it; of a shared one the last in definition order."""
        return {id(p): module for module in network.modules() for p in module.parameters(recurse=False)}

    def build_gc_params_group(self, params_dict: Mapping[int, nn.Module], parameters: Sequence[Group]) -> list[Group]:
        """Each group -> its centralized part and its rest, with the same options; an empty part is left out."""
        check_kind("params_dict", params_dict, Mapping, "what build_params_dict gives")
        result: list[Group] = []
        for group in as_groups(parameters):
            if "order_params" in group:
                result.append(group)
                continue
            plain = {key: value for key, value in group.items() if key != "grad_centralization"}
            parts: dict[bool, list[Tensor]] = {True: [], False: []}
            for p in group["params"]:
                parts[is_centralized(params_dict.get(id(p)), p)].append(p)
            marked = {**subset(plain, parts[True]), "grad_centralization": self.multiple_of == 1 or self.multiple_of}
            result += [half for half in (marked, subset(plain, parts[False])) if half["params"]]
        return result

    def add_grad_centralization(self, network: nn.Module) -> None:
        """Prepare the groups; `generate_new_optimizer` puts them in place. A flat list counts as one group.

        Raises:  ValueError when there are no parameters; TypeError when they are neither parameters nor groups.
        """
        self.origin_params = self.build_gc_params_group(self.build_params_dict(network), self.origin_params)

    def generate_new_optimizer(self) -> Optimizer:
        """The optimizer with the prepared groups: the same object, so its state and its class are kept."""
        opt = inner(self.optimizer)
        regroup(opt, as_groups(self.origin_params))
        centralize_where_marked(opt)
        return self.optimizer


class ParameterProcess:
    """Fusion ids and parameter groups for a network that boost has changed.

    Args:
        continue_ids:  the id goes on from the last call, as in MindSpore; by default each call starts at 1.
    Source:  MindSpore boost.ParameterProcess.
    """

    def __init__(self, *, continue_ids: bool = False) -> None:
        self._continue = continue_ids
        self._last = 1

    def assign_parameter_group(
        self, parameters: Sequence[Tensor], split_point: Sequence[int] | int | None = None
    ) -> Sequence[Tensor]:
        """Give each parameter a fusion id in `parameter.comm_fusion`; returns the same list.

        The id starts at 1 and rises at every index in `split_point`; None or [] splits at the middle, an int is one
        split. Parameters with one id would travel in one all-reduce; with DistributedDataParallel the ids only inform.
        """
        if not isinstance(parameters, list | tuple) or not parameters:
            return parameters
        points = {split_point} if isinstance(split_point, int) else set(split_point or [len(parameters) // 2])
        fusion = self._last if self._continue else 1
        for i, parameter in enumerate(parameters):
            fusion += i in points
            parameter.comm_fusion = fusion
        self._last = fusion
        return parameters

    @staticmethod
    def generate_group_params(parameters: Sequence[Tensor], origin_params: Sequence[Any] | None) -> list[Group]:
        """Sort `parameters` into the groups of `origin_params`, options copied.

        A flat origin gives one group. Parameters found in no group form a last group with the options of the group
        that has the most of them (the first, on a tie). A group may come out empty.
        Raises:  ValueError when `origin_params` is empty or None; TypeError when its elements are neither
                 parameters nor groups.
        """
        groups = as_groups(origin_params)
        if isinstance(origin_params[0], Tensor):  # type: ignore[index]
            return [{"params": list(parameters)}]
        every = list(parameters)
        result = [{"order_params": every} if "order_params" in group else subset(group, every) for group in groups]
        placed = {id(p) for group in groups for p in group.get("params", ())}
        if left := [p for p in every if id(p) not in placed]:
            richest = max((g for g in result if "params" in g), key=len)
            result.append({key: value for key, value in richest.items() if key != "param_names"} | {"params": left})
        return result


def as_groups(parameters: Sequence[Any] | None) -> list[Group]:
    """A flat list of parameters or a list of groups -> a list of groups."""
    if isinstance(parameters, Tensor):
        raise TypeError("need a list of parameters or parameter groups, got one tensor; put it into a list")
    if not parameters:
        raise ValueError("need at least one parameter or parameter group, got none; pass network.parameters()")
    if isinstance(parameters[0], Tensor):
        return [{"params": list(parameters)}]
    if not isinstance(parameters[0], dict):
        raise TypeError(f"need parameters or parameter groups (dicts), got {type(parameters[0]).__name__}")
    return list(parameters)


def regroup(optimizer: Optimizer, groups: Iterable[Group]) -> None:
    """Put new parameter groups into `optimizer`; empty ones are dropped, and the state of what has gone too.

    Options that a group does not give are the optimizer's defaults; kept parameters keep their state.
    """
    groups = [group for group in groups if group.get("params")]
    if not groups:
        raise ValueError("an optimizer needs at least one parameter, and every group is empty")
    optimizer.param_groups[:] = [{**optimizer.defaults, **group} for group in groups]
    kept = {id(p) for group in groups for p in group["params"]}
    for p in [p for p in optimizer.state if isinstance(p, Tensor) and id(p) not in kept]:
        del optimizer.state[p]


def subset(group: Group, parameters: Iterable[Tensor]) -> Group:
    """The part of a parameter group that is among `parameters`, in their order, with options of its own."""
    place = {id(p): i for i, p in enumerate(group["params"])}
    chosen = [place[id(p)] for p in parameters if id(p) in place]
    result = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
    for key in ("params", "param_names"):
        if key in group:
            result[key] = [group[key][i] for i in chosen]
    return result
