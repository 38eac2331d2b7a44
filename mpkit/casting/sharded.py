"""Hooks of sharded modules move parameters; they run without casts, whoever's forward they run in.

`fully_shard` gathers a module's parameters in a hook before its forward. Inside a cast parent that hook would compute
by the parent's rule, and would gather rounded weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

_SHARDING = "torch.distributed.fsdp"


class Uncast:
    """A hook that runs without casts."""

    def __init__(self, hook: Callable[..., Any], uncast: Callable[[], Any]) -> None:
        self.hook = hook
        self.uncast = uncast

    def __call__(self, *args: object, **kwargs: object) -> Any:
        with self.uncast():
            return self.hook(*args, **kwargs)


def may_be_sharded() -> bool:
    """Whether a module of this process can be sharded at all."""
    return _SHARDING in sys.modules and dist.is_initialized()


def leave_hooks_uncast(network: nn.Module, uncast: Callable[[], Any]) -> None:
    """From now on the hooks that sharding put on the modules of `network` run inside `uncast()`."""
    for module in network.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if str(getattr(hook, "__module__", "")).startswith(_SHARDING) and not isinstance(hook, Uncast):
                    hooks[key] = Uncast(hook, uncast)
