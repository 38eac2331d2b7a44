"""AutoBoost: a level and a configuration become the set of boost algorithms that run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from mpkit.arguments import checked
from mpkit.boost.adasum import AdaSumUpdate, adasum_enabled
from mpkit.boost.bn_rules import removable
from mpkit.boost.config import LEVELS, Config
from mpkit.boost.dim_reduce import DimReduce, DimReduceUpdate, prepare_pca
from mpkit.boost.grad_accumulation import Accumulate
from mpkit.boost.grad_freeze import GradientFreeze, stages_by_module
from mpkit.boost.less_bn import LessBN, NormalizedLinear
from mpkit.boost.process import OptimizerProcess, ParameterProcess, regroup
from mpkit.optimizers.arguments import inner, parameters_of, trainer
from mpkit.step.distributed import rank_and_size
from mpkit.step.update import Update


class AutoBoost(Config):
    """Which boost algorithms run, resolved from a level and a configuration; rewrites network and optimizer.

    | level | algorithms                   |
    | O0    | none                         |
    | O1    | less_bn, grad_freeze         |
    | O2    | less_bn, grad_freeze, adasum |

    The `boost` section's `mode` decides what the level's row becomes: "auto" keeps it, "manual" overrides it by the
    flags given, "enable_all" and "disable_all" switch everything, and "tuned" (mpkit's own) is "auto" with settings
    chosen for speed at an accuracy cost stated in `data/benchmarks/boost.json`: see `TUNED`.

    What combines: dim_reduce excludes less_bn, grad_freeze and adasum; everything else runs together. What was asked
    for and does not run is listed, with the reason, in `inactive` and in `print(boost)`.

    Args:
        level:              "O0", "O1" or "O2".
        boost_config_dict:  a dict of the sections in `SECTIONS`, the path of a JSON file with one, or "" or None.
        faithful:           reproduce MindSpore: an unknown level means O0, unknown keys are ignored and known ones
                            accepted in any open section; LessBN and GradientFreeze are faithful too; the last FC is
                            converted for training only, parameters regrouped by LessBN are all decayed, and adasum
                            never runs beside freezing.
    Raises:  ValueError for an unknown level, mode, section, key or value, with the nearest valid name;
             TypeError for a configuration that is no dict.
    Source:  MindSpore boost.AutoBoost, which keeps one instance per process and changes its own level table; here
             every instance is its own.

    >>> boost = AutoBoost("O1", {"boost": {"mode": "manual", "grad_freeze": False}})
    >>> boost.active
    ('less_bn',)
    >>> AutoBoost("O1", {"bost": {}})
    Traceback (most recent call last):
    ValueError: boost_config_dict has no section 'bost'; did you mean 'boost'? Valid: boost, common, ...
    """

    levels = tuple(LEVELS)
    _components: np.ndarray | None = None  # this process's rows of them

    @classmethod
    def from_json(cls, path: str | Path, level: str = "O0", **options: bool) -> AutoBoost:
        """An AutoBoost configured by a JSON file."""
        return cls(level, Path(path), **options)

    @checked
    def network_auto_process_train(self, network: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Rewrite a network and its optimizer for training.

        dim_reduce: the network stays; SGD with rate 1, which DimReduce drives, takes the place of the optimizer given,
        whose rate, momentum and decay are dropped.
        Else less_bn: the network in place, wrapped by `LessBN`; its parameters regrouped in the optimizer given, which
        keeps its class, its state, every parameter's weight decay, and what it holds beside the network.
        Then grad_freeze: the optimizer wrapped by `FreezeOpt`.
        adasum changes neither: a train cell that is given this AutoBoost, or just the optimizer returned, runs it.
        MindSpore marks the optimizer by an attribute of that name; so does `faithful`, and train cells heed one that
        is set by hand.
        """
        less_bn, freeze = self.flags["less_bn"], self.flags["grad_freeze"]
        if self.flags["dim_reduce"]:
            optimizer = self._dim_reduced(network)
        elif less_bn or freeze:
            trainer("optimizer", optimizer)  # all that can be refused is, before the network is changed
            if less_bn:
                network = self._less_bn(network, optimizer)
            if freeze:
                network, optimizer = self._freeze(network).freeze_generate(network, optimizer)
        made: Any = optimizer
        made.auto_boost = self  # for a train cell that is given the optimizer alone
        if self.flags["adasum"] and self.faithful and not self.flags["dim_reduce"]:
            made.adasum = True
        return network, optimizer

    def network_auto_process_eval(self, network: nn.Module) -> nn.Module:
        """The network as evaluation needs it: the same conversion as in training, and a no-op on a trained one."""
        if self.flags["dim_reduce"] or not self.flags["less_bn"]:
            return network
        return LessBN(network, self.hyper["fn_flag"] and not self.faithful, faithful=self.faithful)

    # what a train cell runs

    def update_of(self, network: nn.Module, optimizer: Optimizer) -> Update:
        """The update that an optimizer and this configuration ask for; each algorithm stands around those before it.

        Raises:  ValueError for algorithms that do not go together.
        """
        update = Update(optimizer)
        if self.merges(optimizer):
            update = AdaSumUpdate(update, self.hyper["device_number"])
        if self._components is not None:
            trained: list[Any] = list(parameters_of(optimizer))
            options = self._chosen("n_components", "rho", "gamma", "alpha", "sigma")
            update = DimReduceUpdate(update, DimReduce(network, optimizer, trained, self._components, **options))
        if hasattr(optimizer, "around"):  # it freezes
            update = optimizer.around(update)
        parts = self.hyper["grad_accumulation_step"]
        return Accumulate(update, parts) if "grad_accumulation" in self.active else update

    def merges(self, optimizer: Optimizer) -> bool:
        """Whether AdaSum runs: it is asked for here, or by a mark, and 2, 4, 8, ... groups of processes train."""
        if self.flags["adasum"]:
            return "adasum" in self.active
        marked = getattr(optimizer, "adasum", False)
        return bool(marked) and adasum_enabled(rank_and_size()[1], self.hyper["device_number"])

    # rewriting

    def _chosen(self, *names: str) -> dict[str, Any]:
        """Settings by their names, and which of how many processes this one is."""
        rank, size = rank_and_size()
        return {**{name: self.hyper[name] for name in names}, "rank": rank, "rank_size": size}

    def _less_bn(self, network: nn.Module, optimizer: Optimizer) -> nn.Module:
        before, own = list(network.parameters()), inner(optimizer)
        gone = [network.get_submodule(name) for name in removable(network, faithful=self.faithful)]
        if not self.faithful and {p for module in gone for p in module.parameters()}.issuperset(parameters_of(own)):
            raise ValueError("the optimizer holds only what less_bn removes; give it more, or switch less_bn off")
        network = LessBN(network, self.hyper["fn_flag"], faithful=self.faithful)
        parameters = [p for p in network.parameters() if p.requires_grad]
        ParameterProcess().assign_parameter_group(parameters, self.hyper["gradient_split_groups"])
        if not self.faithful:
            parameters = _still_trained(own, before, network)
        groups = ParameterProcess.generate_group_params(parameters, own.param_groups)
        if self.faithful:
            groups = [{**group, "decay_by_name": False} if "decay_by_name" in group else group for group in groups]
        regroup(own, groups)
        if self.hyper["gc_flag"]:
            process = OptimizerProcess(optimizer, multiple_of=16 if self.faithful else 1)
            process.add_grad_centralization(network)
            process.generate_new_optimizer()
        return network

    def _dim_reduced(self, network: nn.Module) -> Optimizer:
        names = ("n_components", "pca_mat_path", "weight_load_dir", "timeout", "device_number")
        self._components = prepare_pca(network, **self._chosen(*names))
        reduced: Any = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=1.0)
        reduced.dim_reduce = True  # MindSpore's mark
        return reduced

    def _freeze(self, network: nn.Module) -> GradientFreeze:
        groups, *rest = (self.hyper[name] for name in ("param_groups", "freeze_type", "freeze_p", "total_steps"))
        if "param_groups" not in self.configured and not self.faithful:
            groups = min(groups, max(1, len(stages_by_module(network))))  # the default must fit any network
        return GradientFreeze(groups, *rest, faithful=self.faithful)


def _still_trained(optimizer: Optimizer, before: list[nn.Parameter], network: nn.Module) -> list[nn.Parameter]:
    """What an optimizer holds without what has left the network, and the factor of a last FC whose weight it holds.

    What the network never had stays (a loss may learn something), and what the user left out stays out.
    """
    held: list[Any] = list(parameters_of(optimizer))
    here, known = list(network.parameters()), {id(p) for p in held}
    known |= {id(m.multiplier) for m in network.modules() if isinstance(m, NormalizedLinear) and id(m.weight) in known}
    elsewhere = {id(p) for p in (*before, *here)}
    return [p for p in here if id(p) in known] + [p for p in held if id(p) not in elsewhere]


def made_by(optimizer: object, boost: AutoBoost | None) -> AutoBoost:
    """`boost`, or the AutoBoost that returned this very optimizer, or one that asks for nothing."""
    return boost or getattr(optimizer, "auto_boost", None) or AutoBoost("O0", {"common": {"device_number": 1}})
