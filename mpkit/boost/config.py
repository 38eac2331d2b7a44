"""The configuration of boost: levels, modes, sections and keys, what they say together, and what of it runs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from mpkit.arguments import Count, Inside, Real, Share, ShareOrOne, check_count, check_kind, check_of, checked, is_whole
from mpkit.boost.adasum import adasum_enabled
from mpkit.boost.grad_freeze import FreezeType
from mpkit.files import read_json
from mpkit.step.distributed import rank_and_size

FLAGS = ("less_bn", "grad_freeze", "adasum", "grad_accumulation", "dim_reduce", "loss_scale_group")
LEVELS: Mapping[str, frozenset[str]] = {
    "O0": frozenset(),
    "O1": frozenset({"less_bn", "grad_freeze"}),
    "O2": frozenset({"less_bn", "grad_freeze", "adasum"}),
}
MODES = ("auto", "manual", "enable_all", "disable_all", "tuned")
TUNED: Mapping[str, Any] = {"freeze_p": 0.5, "freeze_type": 0}
"""What mode "tuned" sets where the configuration is silent: half of the steps are frozen, with all indices in turn."""


def _positions(name: str, value: Any) -> list[int] | None:
    listed = [value] if is_whole(value) else value
    check_kind(name, listed, list, "a list of parameter positions, or one position", optional=True)
    return listed and [check_count(f"each of {name}", each, low=0) for each in listed]


Positions = Annotated[Any, _positions]
Place = Annotated[Any, partial(check_kind, kind=(str, Path), what="a path", optional=True)]
Given = Mapping[str, Any] | str | Path | None
SECTIONS: Mapping[str, Mapping[str, tuple[Any, Any]]] = {
    "boost": {"mode": ("auto", str), **dict.fromkeys(FLAGS, (None, bool))},
    "common": {"gradient_split_groups": (None, Positions), "device_number": (8, Count)},  # devices per node
    "less_bn": {"fn_flag": (True, bool), "gc_flag": (True, bool)},
    "grad_freeze": {
        "param_groups": (10, Count),
        "freeze_type": (1, FreezeType),
        "freeze_p": (0.7, ShareOrOne),  # of steps without freezing
        "total_steps": (65536, Count),
    },
    "grad_accumulation": {"grad_accumulation_step": (1, Count)},
    "dim_reduce": {
        "rho": (0.55, Inside),
        "gamma": (0.9, Share),
        "alpha": (0.001, Real),
        "sigma": (0.4, Inside),
        "n_components": (32, Count),
        "pca_mat_path": (None, Place),
        "weight_load_dir": (None, Place),
        "timeout": (1800, Real),  # seconds
    },
}
"""The configuration: section -> key -> its default, and what it must be."""
KEYS = {name: section for section, keys in SECTIONS.items() for name in keys if section != "boost"}


class Inactive(NamedTuple):
    """Something that was asked for and does not run."""

    what: str
    reason: str


class Config:
    """A level and a configuration, resolved.

    level, mode:  as they are, or as MindSpore takes them.
    flags:        which algorithms are asked for.
    hyper:        every key and its value.
    configured:   the keys that the configuration gives.
    """

    @checked
    def __init__(self, level: str = "O0", boost_config_dict: Given = "", *, faithful: bool = False) -> None:
        self.faithful, sections = faithful, _loaded(boost_config_dict)
        self.level = known("O0" if faithful and level not in LEVELS else level, LEVELS, "boost has no level")
        section = sections.get("boost", {})
        self.mode = known(section.get("mode", "auto"), MODES[: 4 if faithful else 5], "section 'boost' has no mode")
        if not faithful:
            _check_names(sections)
        self.flags = {flag: flag in LEVELS[self.level] for flag in FLAGS}
        given = {flag: self._checked(flag, section[flag], "boost") for flag in FLAGS if flag in section}
        if self.mode == "manual":
            self.flags |= given
        elif self.mode.endswith("_all"):
            self.flags = dict.fromkeys(FLAGS, self.mode == "enable_all")
        self.hyper = {name: SECTIONS[section][name][0] for name, section in KEYS.items()}
        self.hyper |= TUNED if self.mode == "tuned" else {}
        for name, keys in sections.items():
            if name == "common" or self.flags.get(name):
                self.hyper |= {key: self._checked(key, keys[key], KEYS[key]) for key in keys if key in KEYS}
        self.configured = frozenset(name for keys in sections.values() for name in keys)
        lost = f"mode {self.mode!r} does not read flags; use 'manual'"
        self._unread = [Inactive(f"boost.{flag}", lost) for flag in given if given[flag] != self.flags[flag]]
        closed = [name for name in FLAGS if sections.get(name) and not self.flags[name]]
        off = f"is off at level {self.level} in mode {self.mode!r}"
        self._unread += [Inactive(f"section {name}", f"{name} {off}") for name in closed]

    def _checked(self, name: str, value: object, section: str) -> Any:
        if self.faithful and name != "gradient_split_groups":
            return value
        try:
            return check_of(SECTIONS[section][name][1])(name, value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"section {section}: {error}") from None

    @property
    def active(self) -> tuple[str, ...]:
        """The algorithms that will run."""
        stopped = {item.what for item in self.inactive}
        return tuple(flag for flag in FLAGS if self.flags[flag] and flag not in stopped)

    @property
    def inactive(self) -> list[Inactive]:
        """What was asked for and will not run, with the reason; asks torch.distributed how many processes there are."""
        on, hyper, reasons = self.flags, self.hyper, dict[str, str]()
        if on["dim_reduce"]:
            reasons = dict.fromkeys(
                ("less_bn", "grad_freeze", "adasum"), "dim_reduce replaces the update and excludes it"
            )
        elif on["grad_freeze"] and (never := [key for key in ("param_groups", "freeze_p") if hyper[key] == 1]):
            reasons["grad_freeze"] = f"{never[0]} is 1: no step is ever frozen"
        if not on["dim_reduce"]:
            (_, world), devices = rank_and_size(), hyper["device_number"]
            if self.faithful and on["grad_freeze"]:
                reasons["adasum"] = "with grad_freeze MindSpore's train cell takes the freeze path first"
            elif not adasum_enabled(world, devices):
                reasons["adasum"] = (
                    f"AdaSum needs 2, 4, 8, ... groups of processes; {world} process{'es' * (world != 1)} // "
                    f"device_number {devices} = {world // devices} groups; set device_number in section common"
                )
        if hyper["grad_accumulation_step"] <= 1:
            reasons["grad_accumulation"] = "grad_accumulation_step is 1: every step updates"
        return [Inactive(flag, reasons[flag]) for flag in FLAGS if on[flag] and flag in reasons] + self._unread

    def __str__(self) -> str:
        lines = [f"AutoBoost level {self.level}, mode {self.mode}"]
        lines.append("  active: " + (", ".join(self.active) or "nothing"))
        for flag in self.active:
            own = [f"{name}={self.hyper[name]}" for name in SECTIONS.get(flag, ())]
            lines += [f"    {flag}: " + ", ".join(own)] if own else []
        return "\n".join([*lines, *(f"  inactive: {item.what} ({item.reason})" for item in self.inactive)])


def _loaded(config: Any) -> dict[str, dict[str, Any]]:
    if isinstance(config, str | Path) and config != "":
        config = read_json(config)
    config = {} if config is None or config == "" else config
    check_kind("boost_config_dict", config, Mapping, "a dict or the path of a JSON file")
    for section, keys in config.items():
        check_kind(f"section {section!r} of boost_config_dict", keys, Mapping, "a dict")
    return {section: dict(keys) for section, keys in config.items()}


def _check_names(config: Mapping[str, Mapping[str, Any]]) -> None:
    for section, keys in config.items():
        valid = SECTIONS[known(section, SECTIONS, "boost_config_dict has no section")]
        for name in keys:
            if name in KEYS and name not in valid:
                raise ValueError(f"section {section!r} has no key {name!r}; it belongs to section {KEYS[name]!r}")
            known(name, valid, f"section {section!r} has no key")


def known(name: Any, valid: Iterable[str], what: str) -> str:
    """`name`, if it is a valid one. Raises ValueError, with the one that is nearest."""
    names = {one.lower(): one for one in valid}
    if name not in list(names.values()):  # a list or a dict is no name either, and cannot be looked up
        near = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.5)
        meant = f"; did you mean {names[near[0]]!r}?" if near else "."
        raise ValueError(f"{what} {name!r}{meant} Valid: {', '.join(names.values())}")
    return name
