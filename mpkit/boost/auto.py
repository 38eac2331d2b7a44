"""AutoBoost: a level and a configuration become the set of boost algorithms that run."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from mpkit.arguments import check_count, check_flag, check_kind, check_number, checked, is_whole
from mpkit.boost.adasum import AdaSumUpdate, adasum_enabled
from mpkit.boost.dim_reduce import DimReduce, prepare_pca
from mpkit.boost.dim_reduce.descent import DimReduceUpdate
from mpkit.boost.grad_accumulation import Accumulate
from mpkit.boost.grad_freeze import GradientFreeze, stages_by_module
from mpkit.boost.grad_freeze.update import need_unused
from mpkit.boost.less_bn import LessBN, NormalizedLinear
from mpkit.boost.process import OptimizerProcess, ParameterProcess, regroup
from mpkit.files import read_json
from mpkit.optimizers.arguments import coming_rate, inner, need_plain_step, parameters_of
from mpkit.step.distributed import averaging_wrapper, rank_and_size
from mpkit.step.update import Update

FLAGS = ("less_bn", "grad_freeze", "adasum", "grad_accumulation", "dim_reduce", "loss_scale_group")
LEVELS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "O0": frozenset(),
        "O1": frozenset({"less_bn", "grad_freeze"}),
        "O2": frozenset({"less_bn", "grad_freeze", "adasum"}),
    }
)
MODES = ("auto", "manual", "enable_all", "disable_all", "tuned")
TUNED: Mapping[str, Any] = MappingProxyType({"freeze_p": 0.5, "freeze_type": 0})
"""What mode "tuned" sets where the configuration is silent: half of the steps are frozen, with all indices in turn."""


class Inactive(NamedTuple):
    """Something that was asked for and does not run."""

    what: str
    reason: str


def _type(name: str, value: object) -> object:
    if isinstance(value, bool) or value not in (0, 1):
        raise ValueError(f"{name} must be 0 or 1, got {value!r}")
    return value


def _path(name: str, value: object) -> object:
    check_kind(name, value, (str, Path), "a path", optional=True)
    return value


def _alpha(name: str, value: object) -> object:
    return value if value == "lr" else check_number(name, value)


def _split(name: str, value: object) -> list[int] | None:
    if value is not None and not (is_whole(value) or isinstance(value, list)):
        raise ValueError(f"{name} must be a list of parameter positions, or one position, got {value!r}")
    listed = value if isinstance(value, list) else [value]
    return None if value is None else [check_count(f"each of {name}", each, low=0) for each in listed]


_share = partial(check_number, high=math.nextafter(1.0, 2.0))
_open = partial(check_number, high=1.0, open_low=True)
Setting = tuple[Any, Callable[[str, Any], Any]]
SECTIONS: Mapping[str, Mapping[str, Setting]] = MappingProxyType(
    {
        "boost": {"mode": ("auto", lambda _, mode: mode), **dict.fromkeys(FLAGS, (None, check_flag))},
        "common": {"gradient_split_groups": (None, _split), "device_number": (8, check_count)},  # devices per node
        "less_bn": {"fn_flag": (True, check_flag), "gc_flag": (True, check_flag)},
        "grad_freeze": {
            "param_groups": (10, check_count),
            "freeze_type": (1, _type),
            "freeze_p": (0.7, _share),  # of steps without freezing
            "total_steps": (65536, check_count),
        },
        "grad_accumulation": {"grad_accumulation_step": (1, check_count)},
        "dim_reduce": {
            "rho": (0.55, _open),
            "gamma": (0.9, partial(check_number, high=1.0)),
            "alpha": (0.001, _alpha),  # a number, or "lr" for the rate of the optimizer
            "sigma": (0.4, _open),
            "n_components": (32, check_count),
            "pca_mat_path": (None, _path),
            "weight_load_dir": (None, _path),
            "timeout": (1800, check_number),  # seconds
        },
    }
)
"""The configuration: section -> key -> its default, and what checks it."""
KEYS = {name: section for section, keys in SECTIONS.items() for name in keys if section != "boost"}

MADE: WeakKeyDictionary[Optimizer, AutoBoost] = WeakKeyDictionary()
"""The AutoBoost that returned an optimizer, for a train cell that is given the optimizer alone."""


class AutoBoost:
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
    ValueError: boost_config_dict has no section 'bost'; did you mean 'boost'? Sections: boost, common, ...
    """

    levels = tuple(LEVELS)

    @checked
    def __init__(
        self,
        level: str = "O0",
        boost_config_dict: Mapping[str, Any] | str | Path | None = "",
        *,
        faithful: bool = False,
    ) -> None:
        self.faithful = faithful
        self.level = _known("O0" if faithful and level not in LEVELS else level, LEVELS, "level")
        config = _loaded(boost_config_dict)
        section = config.get("boost", {})
        self.mode = _known(section.get("mode", "auto"), MODES[: 4 if faithful else 5], "mode of section boost")
        if not faithful:
            _check_names(config)
        self.flags = self._resolved_flags(section)
        self.hyper = self._resolved_hyper(config)
        self.configured = frozenset(name for keys in config.values() for name in keys)
        self._notes = self._unread(config)
        self._reduction: tuple[np.ndarray, float] | None = None  # rows of components, and the rate of the residual

    @classmethod
    def from_json(cls, path: str | Path, level: str = "O0", **options: bool) -> AutoBoost:
        """An AutoBoost configured by a JSON file."""
        return cls(level, Path(path), **options)

    @property
    def active(self) -> tuple[str, ...]:
        """The algorithms that will run."""
        stopped = {item.what for item in self.inactive}
        return tuple(flag for flag in FLAGS if self.flags[flag] and flag not in stopped)

    @property
    def inactive(self) -> list[Inactive]:
        """What was asked for and will not run, with the reason; asks torch.distributed how many processes there are."""
        on, hyper, found = {flag for flag in FLAGS if self.flags[flag]}, self.hyper, []
        if "dim_reduce" in on:
            reason = "dim_reduce replaces the update and excludes it"
            found = [Inactive(flag, reason) for flag in ("less_bn", "grad_freeze", "adasum") if flag in on]
        elif "adasum" in on and (why := self._why_no_adasum("grad_freeze" in on)):
            found = [Inactive("adasum", why)]
        if "grad_accumulation" in on and hyper["grad_accumulation_step"] <= 1:
            found.append(Inactive("grad_accumulation", "grad_accumulation_step is 1: every step updates"))
        never = [key for key in ("param_groups", "freeze_p") if hyper[key] == 1]
        if "grad_freeze" in on and "dim_reduce" not in on and never:
            found.append(Inactive("grad_freeze", f"{never[0]} is 1: no step is ever frozen"))
        return found + self._notes

    def __str__(self) -> str:
        lines = [f"AutoBoost level {self.level}, mode {self.mode}"]
        lines.append("  active: " + (", ".join(self.active) or "nothing"))
        for flag in self.active:
            own = [f"{name}={self.hyper[name]}" for name in SECTIONS.get(flag, ())]
            lines += [f"    {flag}: " + ", ".join(own)] if own else []
        return "\n".join([*lines, *(f"  inactive: {item.what} ({item.reason})" for item in self.inactive)])

    def need_groups(self, scale_sense: object) -> None:
        """Raise TypeError unless the scale of a step is of groups, where the configuration asks for that."""
        if self.flags["loss_scale_group"] and not getattr(scale_sense, "for_boost", False):
            raise TypeError(
                "loss_scale_group is on, so scale_sense must be a GroupLossScaleManager, got "
                f"{type(scale_sense).__name__}"
            )

    @checked
    def network_auto_process_train(self, network: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Rewrite a network and its optimizer for training.

        dim_reduce: the network stays; SGD with rate 1, which DimReduce drives, takes the place of the optimizer given,
        whose rate, momentum and decay are dropped (config `"alpha": "lr"` keeps its rate for the residual).
        Else less_bn: the network in place, wrapped by `LessBN`; its parameters regrouped in the optimizer given, which
        keeps its class, its state, every parameter's weight decay, and what it holds beside the network.
        Then grad_freeze: the optimizer wrapped by `FreezeOpt`.
        adasum changes neither: a train cell that is given this AutoBoost, or just the optimizer returned, runs it.
        MindSpore marks the optimizer by an attribute of that name; so does `faithful`, and train cells heed one that
        is set by hand.
        """
        less_bn, freeze = self.flags["less_bn"], self.flags["grad_freeze"]
        if self.flags["dim_reduce"]:
            optimizer = self._dim_reduced(network, optimizer)
        elif less_bn or freeze:
            need_plain_step(optimizer)  # all that can be refused is, before the network is changed
            replica = averaging_wrapper(network)
            if less_bn and replica is not None:
                raise ValueError(
                    "less_bn changes layers, and DistributedDataParallel would wait for the old ones: process the "
                    "network first and wrap what network_auto_process_train returns"
                )
            if freeze:
                need_unused(replica)
            if less_bn:
                network = self._less_bn(network, optimizer)
            if freeze:
                network, optimizer = self._freeze(network).freeze_generate(network, optimizer)
        if self.flags["adasum"] and self.faithful and not self.flags["dim_reduce"]:
            optimizer.adasum = True  # type: ignore[attr-defined]
        MADE[optimizer] = self
        return network, optimizer

    def network_auto_process_eval(self, network: nn.Module) -> nn.Module:
        """The network as evaluation needs it: the same conversion as in training, and a no-op on a trained one."""
        if self.flags["dim_reduce"] or not self.flags["less_bn"]:
            return network
        return LessBN(network, self.hyper["fn_flag"] and not self.faithful, faithful=self.faithful)

    # what a train cell runs

    def update_of(self, network: nn.Module, optimizer: Optimizer) -> Update:
        """The update that an optimizer and this configuration ask for; each algorithm stands around those before it.

        Raises:  ValueError for an optimizer marked for DimReduce that comes from no AutoBoost, and for algorithms that
                 do not go together.
        """
        update = Update(optimizer)
        if self.merges(optimizer):
            update = AdaSumUpdate(update, self.hyper["device_number"])
        if self._reduction is not None or getattr(optimizer, "dim_reduce", False):
            if self._reduction is None:  # marked by hand
                raise ValueError("an optimizer marked for dim_reduce comes from AutoBoost.network_auto_process_train")
            rows, alpha = self._reduction
            rank, size = rank_and_size()
            names = ("n_components", "rho", "gamma", "sigma")
            options = {**{name: self.hyper[name] for name in names}, "alpha": alpha, "rank": rank, "rank_size": size}
            trained: list[Any] = list(parameters_of(optimizer))
            update = DimReduceUpdate(update, DimReduce(network, optimizer, trained, rows, **options))
        update = getattr(optimizer, "around", lambda inside: inside)(update)  # an optimizer may freeze
        steps = self.hyper["grad_accumulation_step"]
        return Accumulate(update, steps) if "grad_accumulation" in self.active else update

    def merges(self, optimizer: Optimizer) -> bool:
        """Whether AdaSum runs: it is asked for here, or by a mark, and 2, 4, 8, ... groups of processes train."""
        if self.flags["adasum"]:
            return "adasum" in self.active
        marked = getattr(optimizer, "adasum", False)
        return bool(marked) and adasum_enabled(rank_and_size()[1], self.hyper["device_number"])

    # resolution

    def _resolved_flags(self, section: Mapping[str, Any]) -> dict[str, bool]:
        row = {flag: flag in LEVELS[self.level] for flag in FLAGS}
        if self.mode in ("enable_all", "disable_all"):
            return dict.fromkeys(FLAGS, self.mode == "enable_all")
        given = {flag: self._checked(flag, section[flag], "boost") for flag in FLAGS if flag in section}
        return row | given if self.mode == "manual" else row

    def _resolved_hyper(self, config: Mapping[str, Any]) -> dict[str, Any]:
        hyper = {name: SECTIONS[section][name][0] for name, section in KEYS.items()}
        hyper |= TUNED if self.mode == "tuned" else {}
        for section, keys in config.items():
            if section == "common" or self.flags.get(section):
                hyper |= {name: self._checked(name, value, KEYS[name]) for name, value in keys.items() if name in KEYS}
        return hyper

    def _checked(self, name: str, value: object, section: str) -> Any:
        if self.faithful and name != "gradient_split_groups":
            return value
        try:
            return SECTIONS[section][name][1](name, value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"section {section}: {error}") from None

    def _unread(self, config: Mapping[str, Any]) -> list[Inactive]:
        """What the configuration says and nobody reads."""
        given, unread = config.get("boost", {}), f"mode {self.mode!r} does not read flags; use 'manual'"
        off = f"is off at level {self.level} in mode {self.mode!r}"
        flags = [f for f in FLAGS if self.mode != "manual" and f in given and given[f] != self.flags[f]]
        closed = [s for s, keys in config.items() if s in FLAGS and keys and not self.flags[s]]
        return [Inactive(f"boost.{f}", unread) for f in flags] + [
            Inactive(f"section {s}", f"{s} {off}") for s in closed
        ]

    def _why_no_adasum(self, freezing: bool) -> str | None:
        if self.faithful and freezing:
            return "with grad_freeze MindSpore's train cell takes the freeze path first"
        _, world = rank_and_size()
        devices = self.hyper["device_number"]
        if adasum_enabled(world, devices):
            return None
        return (
            f"AdaSum needs 2, 4, 8, ... groups of processes; {world} process{'es' * (world != 1)} // device_number "
            f"{devices} = {world // devices} groups; set device_number in section common"
        )

    # rewriting

    def _less_bn(self, network: nn.Module, optimizer: Optimizer) -> nn.Module:
        before = list(network.parameters())
        network = LessBN(network, self.hyper["fn_flag"], faithful=self.faithful)
        parameters = [p for p in network.parameters() if p.requires_grad]
        ParameterProcess().assign_parameter_group(parameters, self.hyper["gradient_split_groups"])
        own = inner(optimizer)
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

    def _dim_reduced(self, network: nn.Module, optimizer: Optimizer) -> Optimizer:
        rank, size = rank_and_size()
        names = ("n_components", "pca_mat_path", "weight_load_dir", "timeout", "device_number")
        rows = prepare_pca(network, **{name: self.hyper[name] for name in names}, rank=rank, rank_size=size)
        alpha = self.hyper["alpha"]
        rate = coming_rate(optimizer, optimizer.param_groups[0]) if alpha == "lr" else alpha
        self._reduction = rows, float(rate)
        reduced: Any = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=1.0)
        reduced.dim_reduce = True  # MindSpore's mark, by which train cells know it
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
    made = MADE.get(optimizer) if isinstance(optimizer, Optimizer) else None
    return boost or made or AutoBoost("O0", {"common": {"device_number": 1}})


def _loaded(config: object) -> dict[str, dict[str, Any]]:
    if isinstance(config, str | Path) and config != "":
        try:
            config = read_json(Path(config))
        except ValueError as error:
            raise ValueError(f"boost_config_dict names a file that cannot be used: {error}") from error
    config = {} if config is None or config == "" else config
    check_kind("boost_config_dict", config, Mapping, "a dict or the path of a JSON file")
    assert isinstance(config, Mapping)
    for section, keys in config.items():
        check_kind(f"section {section!r} of boost_config_dict", keys, Mapping, "a dict")
    return {section: dict(keys) for section, keys in config.items()}


def _known(name: object, valid: Iterable[str], what: str) -> str:
    if name not in tuple(valid):  # a list or a dict is no name either, and cannot be looked up
        raise ValueError(f"no {what} {name!r}{_nearest(name, valid)} Valid: {', '.join(valid)}")
    return name


def _nearest(name: object, valid: Iterable[str]) -> str:
    match = difflib.get_close_matches(str(name).lower(), [v.lower() for v in valid], n=1, cutoff=0.5)
    return f"; did you mean {next(v for v in valid if v.lower() == match[0])!r}?" if match else "."


def _check_names(config: Mapping[str, Any]) -> None:
    for section, keys in config.items():
        if section not in SECTIONS:
            near, known = _nearest(section, SECTIONS), ", ".join(SECTIONS)
            raise ValueError(f"boost_config_dict has no section {section!r}{near} Sections: {known}")
        for name in keys:
            if name not in (valid := SECTIONS[section]):
                home = f"; it belongs to section {KEYS[name]!r}." if name in KEYS else _nearest(name, valid)
                raise ValueError(f"section {section!r} has no key {name!r}{home} Keys: {', '.join(valid)}")
