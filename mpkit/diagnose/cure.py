"""Advice that works: what a report tells the reader to do was tried on the same batch before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mpkit.casting.table import MINDSPORE

OUTSIDE = "(loss function)"
ROOT = "(network)"


@dataclass(frozen=True)
class Cure:
    """One change that ends an overflow.

    kind: "keep" (a module in float32), "class" (all modules of a class), "level" (another level), "bfloat16", or "loss"
          (on the output in float32).
    what: path of the module, name of the class or the level; else "".
    """

    kind: str
    what: str = ""

    def __str__(self) -> str:
        return {
            "keep": f"keep {self.what} in float32, once the level is on: "
            f"to_float(network.get_submodule({self.what!r}), torch.float32)",
            "class": f"keep every {self.what} in float32, once the level is on: "
            f"to_float(module, torch.float32) for each module of network.modules() whose type is {self.what}",
            "level": f"train at level {self.what}, which computes this in float32",
            "bfloat16": "use bfloat16, whose range is that of float32 (and which needs no loss scale)",
            "loss": "compute the loss in float32: loss_fn(output.float(), target)",
        }[self.kind]


def candidates(module: str, level: str | None, alike: str = "") -> Iterator[Cure]:
    """What may end an overflow that was born in `module`, the smallest change first.

    alike: the class of the module, if all modules of this class may be kept in float32 with it.
    """
    if module == OUTSIDE:
        yield Cure("loss")
    elif module != ROOT:
        parts = module.split(".")
        yield Cure("keep", module)
        if alike:
            yield Cure("class", alike)
        yield from (Cure("keep", ".".join(parts[:end])) for end in range(len(parts) - 1, 0, -1))
    if level is not None and MINDSPORE[level].overrides:
        yield from (Cure("level", gentler) for gentler in ("O1", "auto"))
    if level is not None:
        yield Cure("bfloat16")


def cures(module: str, level: str | None, works: Callable[[Cure], bool], alike: str = "") -> tuple[Cure, ...]:
    """The first candidate of each kind that `works`; of modules, the loss and levels in float32 the first alone."""
    good: dict[str, Cure] = {}
    for cure in candidates(module, level, alike):
        asked = cure.kind in good or (cure.kind != "bfloat16" and good)
        if not asked and works(cure):
            good[cure.kind] = cure
    return tuple(good.values())
