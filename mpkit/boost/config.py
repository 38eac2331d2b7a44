"""The configuration of boost: levels, modes, sections and keys, and what they say together."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from mpkit.arguments import check_count, check_flag, check_kind, check_number, is_whole
from mpkit.files import read_json

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


class Config:
    """A level and a configuration, resolved.

    flags:       which algorithms are asked for.
    hyper:       every key and its value.
    configured:  the keys that the configuration gives.
    unread:      what it says and nobody reads.
    """

    def __init__(self, level: object, config: object, faithful: bool) -> None:
        self.level = known("O0" if faithful and level not in LEVELS else level, LEVELS, "level")
        sections, self._faithful = _loaded(config), faithful
        section = sections.get("boost", {})
        self.mode = known(section.get("mode", "auto"), MODES[: 4 if faithful else 5], "mode of section boost")
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
        off = f"is off at level {self.level} in mode {self.mode!r}"
        lost = f"mode {self.mode!r} does not read flags; use 'manual'"
        self.unread = [Inactive(f"boost.{flag}", lost) for flag in given if given[flag] != self.flags[flag]]
        closed = [name for name, keys in sections.items() if name in FLAGS and keys and not self.flags[name]]
        self.unread += [Inactive(f"section {name}", f"{name} {off}") for name in closed]

    def _checked(self, name: str, value: object, section: str) -> Any:
        if self._faithful and name != "gradient_split_groups":
            return value
        try:
            return SECTIONS[section][name][1](name, value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"section {section}: {error}") from None


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


def known(name: object, valid: Iterable[str], what: str) -> str:
    if name not in tuple(valid):  # a list or a dict is no name either, and cannot be looked up
        raise ValueError(f"no {what} {name!r}{_nearest(name, valid)} Valid: {', '.join(valid)}")
    return name


def _nearest(name: object, valid: Iterable[str]) -> str:
    match = difflib.get_close_matches(str(name).lower(), [v.lower() for v in valid], n=1, cutoff=0.5)
    return f"; did you mean {next(v for v in valid if v.lower() == match[0])!r}?" if match else "."


def _check_names(config: Mapping[str, Any]) -> None:
    for section, keys in config.items():
        if section not in SECTIONS:
            near, there = _nearest(section, SECTIONS), ", ".join(SECTIONS)
            raise ValueError(f"boost_config_dict has no section {section!r}{near} Sections: {there}")
        for name in keys:
            if name not in (valid := SECTIONS[section]):
                home = f"; it belongs to section {KEYS[name]!r}." if name in KEYS else _nearest(name, valid)
                raise ValueError(f"section {section!r} has no key {name!r}{home} Keys: {', '.join(valid)}")
