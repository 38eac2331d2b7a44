"""What data sets and samplers count themselves: the epoch, or how far they have come in an endless stream."""

from __future__ import annotations

import warnings
from typing import Any

from mpkit.model.holdings import parts

PLAIN = (bool, int, float, str, type(None))
Values = list[list[Any]]
"""For each data set and sampler: the name of its class, and its attributes that are numbers, texts or None."""


class Counters:
    """The plain attributes of a run's data sets and samplers; those that move in the run are its counters.

    What never moves is a setting, and stays as the resumed run was given it.
    """

    def __init__(self, dataset: object) -> None:
        self.dataset = dataset
        self._first = self.values()
        self._moved: set[tuple[int, str]] = set()
        self._epoch_start = self._first

    def values(self) -> Values:
        """As they are now."""
        return [
            [type(part).__name__, {name: item for name, item in vars(part).items() if type(item) in PLAIN}]
            for part in parts(self.dataset)
        ]

    def begin_epoch(self) -> None:
        """Note where the epoch begins; its batches are drawn from there again."""
        self._epoch_start = self.values()

    def state_dict(self) -> dict[str, Any]:
        """What `restore` needs: the values of now and of the epoch's beginning, and which of them have moved."""
        now = self.values()
        moved = self._moved | {
            (i, name) for i, (here, there) in _pairs(self._first, now) for name in here if here[name] != there[name]
        }
        return {"epoch_start": self._epoch_start, "now": now, "moved": [list(place) for place in sorted(moved)]}

    def restore(self, saved: dict[str, Any] | None, *, epoch_start: bool) -> None:
        """Set what had moved; warn of whole numbers that had not and differ, since other batches may follow."""
        if saved is None:  # of an older version
            return
        self._moved = {(i, name) for i, name in saved["moved"]}
        own, differ = parts(self.dataset), []
        for i, (here, there) in _pairs(self.values(), saved["epoch_start" if epoch_start else "now"]):
            for name in here:
                if (i, name) in self._moved:
                    _set(own[i], name, there[name])
                elif type(here[name]) is int and here[name] != there[name]:
                    differ.append(f"{type(own[i]).__name__}.{name} is {here[name]} and was {there[name]}")
        if differ:
            warnings.warn(
                f"the data set is not as it was saved: {', '.join(differ[:3])}; the resumed run may get other batches",
                RuntimeWarning,
                stacklevel=2,
            )


def _pairs(one: Values, other: Values) -> list[tuple[int, tuple[dict[str, Any], dict[str, Any]]]]:
    """The attributes that both have, part by part; none for data sets of other parts."""
    if [name for name, _ in one] != [name for name, _ in other]:
        return []
    common = [(a, b, [name for name in a if name in b]) for (_, a), (_, b) in zip(one, other)]
    return [(i, ({n: a[n] for n in names}, {n: b[n] for n in names})) for i, (a, b, names) in enumerate(common)]


def _set(part: object, name: str, value: object) -> None:
    """An `epoch` by `set_epoch`, as `torch.utils.data.DistributedSampler` has it."""
    if name == "epoch" and hasattr(part, "set_epoch"):
        part.set_epoch(value)
    else:
        vars(part)[name] = value
