"""A forward hook for one module alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

See = Callable[[nn.Module, Any, Any], None]


def watch(module: nn.Module, see: See) -> RemovableHandle:
    """Call `see(module, args, output)` after each forward of this module, and of no copy of it.

    A module's hooks go with `copy.deepcopy` and `pickle`. This one stays behind: a copy is another network, and what
    the hook writes to is neither copied nor stored.
    """
    return module.register_forward_hook(_Watch(module, see))


class _Watch:
    def __init__(self, watched: nn.Module | None = None, see: See | None = None) -> None:
        self.watched, self.see = watched, see

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        if self.see is not None and module is self.watched:
            self.see(module, args, output)

    def __reduce__(self) -> tuple[type[_Watch], tuple[()]]:
        return _Watch, ()
