"""A forward hook for one module alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

See = Callable[[nn.Module, Any, Any], None]


def watch(module: nn.Module, see: See) -> RemovableHandle:
    """Call `see(module, args, output)` after each forward of this module, and of no copy of it.

    The first of `args` is there by its name too, `input` of a layer or `query` of an attention.

    A module's hooks go with `copy.deepcopy` and `pickle`. This one stays behind: a copy is another network, and what
    the hook writes to is neither copied nor stored.
    """
    return module.register_forward_hook(_Watch(module, see), with_kwargs=True)


class _Watch:
    def __init__(self, watched: nn.Module | None = None, see: See | None = None) -> None:
        self.watched, self.see = watched, see

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        if self.see is not None and module is self.watched:
            self.see(module, args or tuple(kwargs[name] for name in ("input", "query") if name in kwargs), output)

    def __reduce__(self) -> tuple[type[_Watch], tuple[()]]:
        return _Watch, ()
