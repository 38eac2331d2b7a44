"""mpkit: learn, test and experiment with mixed-precision training in PyTorch.

Every public name lives in the module that is named after its idea; the names a lesson uses can also be had from
here, and are loaded when first touched, so that `import mpkit` costs little more than `import torch`.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS: dict[str, tuple[str, ...]] = {}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"mpkit.{_HOME[name]}"), name)
    raise AttributeError(f"module 'mpkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
