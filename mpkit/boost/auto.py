"""AutoBoost: a level and a configuration become the set of boost algorithms that run."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from mpkit.arguments import check_flags, check_kind, is_number, is_whole
from mpkit.boost.adasum import adasum_enabled
from mpkit.boost.dim_reduce import DimReduceSGD, prepare_pca
from mpkit.boost.grad_freeze import GradientFreeze, stages_by_module
from mpkit.boost.grad_freeze.update import need_unused
from mpkit.boost.less_bn import LessBN, NormalizedLinear
from mpkit.boost.process import OptimizerProcess, ParameterProcess, regroup
from mpkit.files import read_json
from mpkit.optimizers.arguments import coming_rate, inner, need_plain_step, parameters_of
from mpkit.step.distributed import averaging_wrapper, rank_and_size

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


class Key(NamedTuple):
    """One hyper-parameter of the configuration: where it stands, its default, and what it must be."""

    section: str
    default: Any
    valid: Callable[[Any], bool]
    need: str


class Inactive(NamedTuple):
    """Something that was asked for and does not run."""

    what: str
    reason: str


def _number(low: float, high: float, *, without: tuple[float, ...] = ()) -> Callable[[Any], bool]:
    return lambda v: is_number(v) and low <= v <= high and v not in without


def _whole(low: int) -> Callable[[Any], bool]:
    return lambda v: is_whole(v) and v >= low


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_path(value: object) -> bool:
    return value is None or isinstance(value, str | Path)


def _is_split(value: object) -> bool:
    return value is None or all(_whole(0)(v) for v in (value if isinstance(value, list) else [value]))


INF = float("inf")
KEYS: Mapping[str, Key] = MappingProxyType(
    {
        "gradient_split_groups": Key("common", None, _is_split, "a list of parameter positions, or one position"),
        "device_number": Key("common", 8, _whole(1), "an int >= 1 (devices per node)"),
        "fn_flag": Key("less_bn", True, _is_bool, "True or False"),
        "gc_flag": Key("less_bn", True, _is_bool, "True or False"),
        "param_groups": Key("grad_freeze", 10, _whole(1), "an int >= 1"),
        "freeze_type": Key("grad_freeze", 1, lambda v: _is_bool(v) is False and v in (0, 1), "0 or 1"),
        "freeze_p": Key("grad_freeze", 0.7, _number(0, 1), "a number in [0, 1], the share of steps without freezing"),
        "total_steps": Key("grad_freeze", 65536, _whole(1), "an int >= 1"),
        "grad_accumulation_step": Key("grad_accumulation", 1, _whole(1), "an int >= 1"),
        "rho": Key("dim_reduce", 0.55, _number(0, 1, without=(0, 1)), "a number in (0, 1)"),
        "gamma": Key("dim_reduce", 0.9, _number(0, 1, without=(1,)), "a number in [0, 1)"),
        "alpha": Key(
            "dim_reduce",
            0.001,
            lambda v: v == "lr" or _number(0, INF, without=(INF,))(v),
            'a number >= 0, or "lr" for the rate of the optimizer',
        ),
        "sigma": Key("dim_reduce", 0.4, _number(0, 1, without=(0, 1)), "a number in (0, 1)"),
        "n_components": Key("dim_reduce", 32, _whole(1), "an int >= 1"),
        "pca_mat_path": Key("dim_reduce", None, _is_path, "a path or None"),
        "weight_load_dir": Key("dim_reduce", None, _is_path, "a path or None"),
        "timeout": Key("dim_reduce", 1800, _number(0, INF), "a number of seconds >= 0"),
    }
)
SECTIONS = ("boost", *dict.fromkeys(key.section for key in KEYS.values()))

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

    def __init__(
        self,
        level: str = "O0",
        boost_config_dict: Mapping[str, Any] | str | Path | None = "",
        *,
        faithful: bool = False,
    ) -> None:
        check_flags(faithful=faithful)
        self.faithful = faithful
        if faithful and level not in LEVELS:
            level = "O0"
        self.level = _known(level, LEVELS, "level")
        config = _loaded(boost_config_dict)
        if not faithful:
            _check_names(config)
        section = config.get("boost", {})
        self.mode = _known(section.get("mode", "auto"), MODES[: 4 if faithful else 5], "mode of section boost")
        self.flags = self._resolved_flags(section)
        self.hyper = self._resolved_hyper(config)
        self.configured = frozenset(name for keys in config.values() if isinstance(keys, Mapping) for name in keys)
        self._notes = self._unread(config)

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
        on = {flag for flag in FLAGS if self.flags[flag]}
        found = []
        if "dim_reduce" in on:
            reason = "dim_reduce replaces the update and excludes it"
            found = [Inactive(flag, reason) for flag in ("less_bn", "grad_freeze", "adasum") if flag in on]
        elif "adasum" in on and (why := self._why_no_adasum("grad_freeze" in on)):
            found = [Inactive("adasum", why)]
        if "grad_accumulation" in on and self.hyper["grad_accumulation_step"] <= 1:
            found.append(Inactive("grad_accumulation", "grad_accumulation_step is 1: every step updates"))
        never = [key for key in ("param_groups", "freeze_p") if self.hyper[key] == 1]
        if "grad_freeze" in on and "dim_reduce" not in on and never:
            found.append(Inactive("grad_freeze", f"{never[0]} is 1: no step is ever frozen"))
        return found + self._notes

    def __str__(self) -> str:
        lines = [f"AutoBoost level {self.level}, mode {self.mode}"]
        lines.append("  active: " + (", ".join(self.active) or "nothing"))
        for flag in self.active:
            own = {name: self.hyper[name] for name, key in KEYS.items() if key.section == flag}
            lines += [f"    {flag}: " + ", ".join(f"{name}={value}" for name, value in own.items())] if own else []
        lines += [f"  inactive: {item.what} ({item.reason})" for item in self.inactive]
        return "\n".join(lines)

    def need_groups(self, scale_sense: object) -> None:
        """Raise TypeError unless the scale of a step is of groups, where the configuration asks for that."""
        if self.flags["loss_scale_group"] and not getattr(scale_sense, "for_boost", False):
            raise TypeError(
                "loss_scale_group is on, so scale_sense must be a GroupLossScaleManager, got "
                f"{type(scale_sense).__name__}"
            )

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
        check_kind("network", network, nn.Module, "an nn.Module")
        check_kind("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
        network, optimizer = self._processed(network, optimizer)
        MADE[optimizer] = self
        return network, optimizer

    def _processed(self, network: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        if self.flags["dim_reduce"]:
            return network, self._dim_reduced(network, optimizer)
        if self.flags["less_bn"] or self.flags["grad_freeze"]:
            need_plain_step(optimizer)  # before the network is changed
        replica = averaging_wrapper(network)
        if self.flags["less_bn"] and replica is not None:
            raise ValueError(
                "less_bn changes layers, and DistributedDataParallel would wait for the old ones: process the network "
                "first and wrap what network_auto_process_train returns"
            )
        if self.flags["grad_freeze"]:
            need_unused(replica)
        if self.flags["less_bn"]:
            network = self._less_bn(network, optimizer)
        if self.flags["grad_freeze"]:
            network, optimizer = self._freeze(network).freeze_generate(network, optimizer)
        if self.flags["adasum"] and self.faithful:
            optimizer.adasum = True  # type: ignore[attr-defined]
        return network, optimizer

    def network_auto_process_eval(self, network: nn.Module) -> nn.Module:
        """The network as evaluation needs it: the same conversion as in training, and a no-op on a trained one."""
        if self.flags["dim_reduce"] or not self.flags["less_bn"]:
            return network
        return LessBN(network, self.hyper["fn_flag"] and not self.faithful, faithful=self.faithful)

    # resolution

    def _resolved_flags(self, section: Mapping[str, Any]) -> dict[str, bool]:
        row = {flag: flag in LEVELS[self.level] for flag in FLAGS}
        if self.mode in ("enable_all", "disable_all"):
            return dict.fromkeys(FLAGS, self.mode == "enable_all")
        if self.mode == "manual":
            given = {flag: value for flag, value in section.items() if flag in FLAGS}
            for flag, value in given.items() if not self.faithful else ():
                if not _is_bool(value):
                    raise ValueError(f"{flag} of section boost must be True or False, got {value!r}")
            row |= given
        return row

    def _resolved_hyper(self, config: Mapping[str, Any]) -> dict[str, Any]:
        hyper = {name: key.default for name, key in KEYS.items()}
        if self.mode == "tuned":
            hyper |= TUNED
        for section, keys in config.items():
            if section == "boost" or not (section == "common" or self.flags.get(section)):
                continue
            for name, value in keys.items():
                if name in KEYS:
                    hyper[name] = self._checked(name, value)
        return hyper

    def _checked(self, name: str, value: object) -> Any:
        key = KEYS[name]
        if not key.valid(value) and (not self.faithful or name == "gradient_split_groups"):
            raise ValueError(f"{name} of section {key.section} must be {key.need}, got {value!r}")
        return [value] if name == "gradient_split_groups" and isinstance(value, int) else value

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
        if alpha == "lr":
            alpha = float(coming_rate(optimizer, optimizer.param_groups[0]))
        return DimReduceSGD([p for p in network.parameters() if p.requires_grad], rows, alpha)

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


def _loaded(config: object) -> dict[str, Any]:
    if config is None or config == "":
        return {}
    if isinstance(config, str | Path):
        try:
            config = read_json(Path(config))
        except ValueError as error:
            raise ValueError(f"boost_config_dict names a file that cannot be used: {error}") from error
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
        valid = ("mode", *FLAGS) if section == "boost" else [n for n, key in KEYS.items() if key.section == section]
        for name in keys:
            if name not in valid:
                home = f"; it belongs to section {KEYS[name].section!r}." if name in KEYS else _nearest(name, valid)
                raise ValueError(f"section {section!r} has no key {name!r}{home} Keys: {', '.join(valid)}")
