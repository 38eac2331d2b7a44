"""Advice that works: what a report tells the reader to do was tried on the same batch before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
        return {
            "keep": f"keep {self.what} in float32, once the level is on: "
            f"to_float(network.get_submodule({self.what!r}), torch.float32)",
            "class": f"keep every {self.what} in float32, once the level is on: "
            f"to_float(module, torch.float32) for each module of network.modules() whose type is {self.what}",
            "autocast": f"keep {self.what} in float32: inside the region, `with torch.autocast(device_type, enabled="
            f"False):` around the call of {self.what}, on its inputs as x.float(); or, for a whole module, "
            f"to_float(network.get_submodule({self.what!r}), torch.float32)",
            "level": f"train at level {self.what}, which computes this in float32",
            "bfloat16": "use bfloat16, whose range is that of float32 (and which needs no loss scale)",
            "loss": "compute the loss in float32: loss_fn(output.float(), target)",
        }[self.kind]


def candidates(module: str, level: str | None, alike: str = "", autocast: bool = False) -> Iterator[Cure]:
    """What may end an overflow that was born in `module`, the smallest change first.

    alike:    the class of the module, if all modules of this class may be kept in float32 with it.
    autocast: the network runs inside an autocast region, and has no level.
    """
    if module == OUTSIDE:
        yield Cure("loss")
    elif module != ROOT:
        parts, keep = module.split("."), "autocast" if autocast else "keep"
        yield Cure(keep, module)
        if alike and not autocast:
            yield Cure("class", alike)
        yield from (Cure(keep, ".".join(parts[:end])) for end in range(len(parts) - 1, 0, -1))
    if level in ("O2", "O3"):
        yield from (Cure("level", gentler) for gentler in ("O1", "auto"))
    if level is not None or autocast:
        yield Cure("bfloat16")


def cures(tried: Iterator[Cure], works: Callable[[Cure], bool]) -> tuple[Cure, ...]:
    """The first candidate of each kind that `works`; of modules, the loss and levels in float32 the first alone."""
    good: dict[str, Cure] = {}
    for cure in tried:
        asked = cure.kind in good or (cure.kind != "bfloat16" and good)
        if not asked and works(cure):
            good[cure.kind] = cure
    return tuple(good.values())
