"""What an evaluation measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpkit.arguments import check_kind


class Metric:
    """A mean over all samples of a data set, summed on the device and read once at the end.

    Args:
        total:  (output, label) -> 0-d tensor, the sum over the samples of one batch.
    Source:  the reduction of MindSpore's train metrics: a sum over everything, divided by the number of samples.

    >>> import torch
    >>> accuracy = Metric(lambda output, label: (output.argmax(1) == label).sum())
    >>> accuracy.update(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([1, 1]))
    >>> accuracy.eval()
    0.5
    """

    def __init__(self, total: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.total = total
        self.clear()

    def clear(self) -> None:
        """Forget all samples."""
        self._sum: Tensor | None = None
        self._samples = 0

    def update(self, output: Tensor, label: Tensor) -> None:
        """Add one batch; the first axis counts the samples."""
        part = self.total(output, label).double()
        self._sum = part if self._sum is None else self._sum + part
        self._samples += label.shape[0]

    def eval(self) -> float:
        """The mean over the samples so far.

        Raises:  RuntimeError if there were none.
        """
        if self._sum is None:
            raise RuntimeError("the metric has seen no sample: the data set of the evaluation is empty")
        return float(self._sum) / self._samples


def of_loss(loss: Tensor, _: Tensor) -> Tensor:
    """What the metric "loss" sums: it is given the loss of each batch, as one sample."""
    return loss.float().mean()


def _correct(output: Tensor, label: Tensor) -> Tensor:
    """The sum over the samples of the share of right places; a sample has one, or one per pixel or token."""
    places = (*output.shape[:1], *output.shape[2:])
    if output.dim() < 2 or label.shape not in (output.shape, places):
        raise ValueError(
            f"accuracy needs scores of shape (samples, classes, ...) and labels of shape {places}, or of the scores' "
            f"own, one-hot; got {tuple(output.shape)} and {tuple(label.shape)}"
        )
    if output.shape[1] < 2:
        raise ValueError("accuracy chooses among two classes or more, got one column; write a Metric for its sign")
    right = output.argmax(1) == (label.argmax(1) if label.shape == output.shape else label)
    return right.sum().double() * len(right) / max(right.numel(), 1)


def _gaps(size: Callable[[Tensor], Tensor], output: Tensor, label: Tensor) -> Tensor:
    """The sum of the sizes of output - label, without the broadcasting that would compare each sample with all."""
    if output.numel() != label.numel():
        raise ValueError(f"mse and mae need a label for each output, got shapes {[*output.shape]} and {[*label.shape]}")
    return size((output - label.reshape(output.shape)).double()).sum()


# metrics by name, beside "loss", the mean of the batches' losses
METRICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "accuracy": _correct,
    "acc": _correct,
    "mse": partial(_gaps, torch.square),
    "mae": partial(_gaps, torch.abs),
}


def metrics_from(given: Iterable[str] | Mapping[str, Metric] | None) -> dict[str, Metric]:
    """What `Model` takes as `metrics` -> name and metric.

    Raises:  ValueError for a name that nobody knows, TypeError for a value that is no metric.
    """
    if given is None:
        return {}
    check_kind("metrics", given, Iterable, "names, or a dict of names and metrics")
    if isinstance(given, Mapping):
        for name, metric in given.items():
            if not all(hasattr(metric, method) for method in ("clear", "update", "eval")):
                raise TypeError(f"metric {name!r} needs clear(), update() and eval(), got {type(metric).__name__}")
        return dict(given)
    unknown = [name for name in given if name not in METRICS and name != "loss"]
    if unknown:
        raise ValueError(f"unknown metrics {unknown}; known are {', '.join([*METRICS, 'loss'])}, or pass a dict")
    # sorted: the order of a set of strings changes from process to process
    return {name: Metric(of_loss if name == "loss" else METRICS[name]) for name in sorted(given)}


def places_of(name: str, value: Any) -> tuple[int, int, int]:
    """Where loss, output and label stand in what an evaluation network returns; None: in this order."""
    if value is None:
        return 0, 1, 2
    if not isinstance(value, Sequence) or len(value) != 3 or not all(isinstance(index, int) for index in value):
        raise ValueError(f"{name} must be three ints, the places of loss, output and label, got {value!r}")
    return value[0], value[1], value[2]
