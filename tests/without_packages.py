"""Stand-ins for test packages that a GPU server lacks, so that files with a test for it can be imported there.

A test that draws examples is skipped; one that compares with ml_dtypes is too, see `conftest.py`.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest


class Anything(ModuleType):
    """Stands for any module, function or object of a package, and for what comes of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self

    __or__ = __ror__ = __getitem__ = __call__


class Settings:
    """`hypothesis.settings`: a number of examples, and a decorator that changes nothing."""

    max_examples = 100

    def __init__(self, **_: Any) -> None:
        pass

    def __call__(self, test: Any) -> Any:
        return test


def stand_in(name: str) -> None:
    """Put one into `sys.modules` unless the package is installed."""
    if find_spec(name) is not None:
        return
    module: Any = Anything(name)
    module.__spec__ = ModuleSpec(name, None, origin="a stand-in")  # torch asks for those of many packages
    if name == "hypothesis":
        module.given = lambda *_, **__: pytest.mark.skip(reason="hypothesis is not installed")
        module.example = lambda *_, **__: lambda test: test
        module.settings = Settings
    sys.modules[name] = module


def is_missing(value: Any) -> bool:
    """Whether this is a stand-in."""
    return isinstance(value, Anything)
