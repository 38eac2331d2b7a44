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

    kind: "keep" (a module in float32), "level" (another level), "bfloat16", or "loss" (on the output in float32).
    what: path of the module, name of the level; else "".
    """

    kind: str
    what: str = ""

    def __str__(self) -> str:
        return {
            "keep": f"keep {self.what} in float32, once the level is on: "
            f"to_float(network.get_submodule({self.what!r}), torch.float32)",
            "level": f"train at level {self.what}, which computes this in float32",
            "bfloat16": "use bfloat16, whose range is that of float32 (and which needs no loss scale)",
            "loss": "compute the loss in float32: loss_fn(output.float(), target)",
        }[self.kind]


def candidates(module: str, level: str | None) -> Iterator[Cure]:
    """What may end an overflow that was born in `module`, the smallest change first."""
    if module == OUTSIDE:
        yield Cure("loss")
    elif module != ROOT:
        parts = module.split(".")
        yield from (Cure("keep", ".".join(parts[:end])) for end in range(len(parts), 0, -1))
    if level is not None and MINDSPORE[level].overrides:
        yield from (Cure("level", gentler) for gentler in ("O1", "auto"))
    if level is not None:
        yield Cure("bfloat16")


def cures(module: str, level: str | None, works: Callable[[Cure], bool]) -> tuple[Cure, ...]:
    """The first candidate of each kind that `works`; a level only where float32 for a module or the loss does not."""
    good: dict[str, Cure] = {}
    for cure in candidates(module, level):
        asked = cure.kind in good or (cure.kind == "level" and {"keep", "loss"} & good.keys())
        if not asked and works(cure):
            good[cure.kind] = cure
    return tuple(good.values())
