"""Advice that works: what a report tells the reader to do was tried on the same batch before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from mpkit.diagnose.words import said

OUTSIDE = "(loss function)"
ROOT = "(network)"


@dataclass(frozen=True)
class Cure:
    """One change that ends an overflow.

    kind: "keep" (a module in float32), "class" (all modules of a class), "autocast" (off for a module), "level"
          (another level), "bfloat16", or "loss" (on the output in float32).
    what: path of the module, name of the class or the level; else "".
    """

    kind: str
    what: str = ""

    def __str__(self) -> str:
        return said("cures", self.kind, what=self.what)

    def keeps(self, network: nn.Module) -> list[nn.Module]:
        """The modules that it keeps in float32."""
        if self.kind == "class":
            return [module for module in network.modules() if type(module).__name__ == self.what]
        return [network.get_submodule(self.what)] if self.kind in ("keep", "autocast") else []


def candidates(network: nn.Module, module: str, level: str | None, autocast: bool) -> Iterator[Cure]:
    """What may end an overflow that was born in `module`, the smallest change first.

    autocast: the network runs inside an autocast region, and has no level.
    """
    if module == OUTSIDE:
        yield Cure("loss")
    elif module != ROOT:
        parts, keep = module.split("."), "autocast" if autocast else "keep"
        yield Cure(keep, module)
        if not autocast and _light(network, network.get_submodule(module)):
            yield Cure("class", type(network.get_submodule(module)).__name__)
        yield from (Cure(keep, ".".join(parts[:end])) for end in range(len(parts) - 1, 0, -1))
    if level in ("O2", "O3"):
        yield from (Cure("level", gentler) for gentler in ("O1", "auto"))
    if level is not None or autocast or any(p.dtype is torch.float16 for p in network.parameters()):
        yield Cure("bfloat16")


def _light(network: nn.Module, module: nn.Module) -> bool:
    """Whether it costs little in float32, having vectors only, and there are several of its class.

    One without any is a function of the reader's as a module, and its class says nothing of what it does.
    """
    sizes = [p.dim() for p in module.parameters()]
    several = sum(type(m) is type(module) for m in network.modules()) > 1
    return several and max(sizes, default=2) <= 1 and not any(True for _ in module.children())


def cures(tried: Iterator[Cure], works: Callable[[Cure], bool]) -> tuple[Cure, ...]:
    """The first candidate of each kind that `works`; of modules, the loss and levels in float32 the first alone."""
    good: dict[str, Cure] = {}
    for cure in tried:
        if (not good or (cure.kind == "bfloat16" and cure.kind not in good)) and works(cure):
            good[cure.kind] = cure
    return tuple(good.values())
