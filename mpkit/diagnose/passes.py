"""One batch through a copy of a network, forwards and backwards: in float32, at a level, with a cure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mpkit.casting import auto_mixed_precision, remove_mixed_precision, to_float
from mpkit.diagnose.copies import copied, copied_batch, tensors_of
from mpkit.diagnose.cure import Cure
from mpkit.diagnose.listening import Listening, in_autocast
from mpkit.diagnose.watch import Watch
from mpkit.diagnose.words import said
from mpkit.formats import BF16, FloatFormat
from mpkit.step.phases import checked_loss

LossFn = Callable[..., Tensor]
SMALLEST, LARGEST = -40, 127  # exponents of the loss scales that are tried


class Pass:
    """A forward pass, watched, and the backward pass from it at one scale.

    plain:  in float32, and without an autocast context, whoever enters it.
    """

    def __init__(self, network: nn.Module, loss_fn: LossFn | None, batch: object, scale: float, plain: bool = False):
        self.network, self.parameters = network, [p for p in network.parameters() if p.requires_grad]
        batch = copied_batch(batch, widened=plain)
        leaves = dict(tensors_of("batch", batch))
        leaves |= {f"parameter {name}": p for name, p in network.named_parameters()}
        leaves |= {f"buffer {name}": b for name, b in network.named_buffers()}
        self.watch = Watch(network, leaves)
        with ExitStack() as stack:
            if plain:
                stack.enter_context(without_autocast(device_of(network)))
            stack.enter_context(self.watch)  # in the backward pass too: re-entrant checkpoints run modules
            loss = loss_of(network, batch, loss_fn)
            if not self.parameters:
                raise ValueError(
                    "no parameter of the network has requires_grad=True, so there is no gradient to look at"
                )
            self.wide = loss.float()
            self.watch.backward = True
            self.gradients = self.again(scale)
        self.loss = float(self.wide.detach())
        bad = loss if not bool(loss.isfinite()) else self.wide
        results = self.gradients if math.isfinite(self.loss) else [bad.detach()]
        self.bad = [t for t in results if t is not None and not bool(t.isfinite().all())]

    def again(self, scale: float) -> list[Tensor | None]:
        """The gradients at another scale."""
        return gradients_of(self.wide, self.parameters, scale)

    @property
    def finite(self) -> bool:
        return not self.bad

    def largest_scale(self) -> float | None:
        """Largest 2**k with finite gradients, by bisection; None if not even the smallest works."""
        works, fails = SMALLEST, LARGEST + 1
        if not self._works(works):
            return None
        while fails - works > 1:
            middle = (works + fails) // 2
            works, fails = (middle, fails) if self._works(middle) else (works, middle)
        return 2.0**works

    def _works(self, exponent: int) -> bool:
        return all(bool(g.isfinite().all()) for g in self.again(2.0**exponent) if g is not None)

    def lost(self, gradients: list[Tensor | None]) -> float:
        """Share of the values that are not zero in this pass and zero in `gradients`; NaN when those are not finite."""
        pairs = [(a, b) for a, b in zip(self.gradients, gradients) if a is not None and b is not None]
        if not pairs or not all(bool(b.isfinite().all()) for _, b in pairs):
            return math.nan
        there = sum(int((a != 0).sum()) for a, _ in pairs)
        gone = sum(int(((a != 0) & (b == 0)).sum()) for a, b in pairs)
        return gone / there if there else 0.0


@dataclass(frozen=True)
class Question:
    """What is asked about; `again` makes the next pass meet the random numbers of the first."""

    network: nn.Module
    batch: object
    loss_fn: LossFn | None
    level: str | None
    dtype: torch.dtype | FloatFormat
    again: Callable[[], None]

    @property
    def autocast(self) -> bool:
        """Whether the network has no level and runs inside an autocast region."""
        return self.level is None and in_autocast(device_of(self.network))

    @property
    def step(self) -> float:
        return self.dtype.eps if isinstance(self.dtype, FloatFormat) else torch.finfo(self.dtype).eps

    def plain(self) -> Pass:
        """In float32."""
        with _saying("the batch does not even run in float32"):
            network, loss_fn = copied(self.network, self.loss_fn)
            loss_fn = loss_fn.float() if isinstance(loss_fn, nn.Module) else loss_fn
            return Pass(remove_mixed_precision(network).float(), loss_fn, self.batch, 1.0, plain=True)

    def low(self) -> tuple[nn.Module, LossFn | None]:
        """The network at the level, and its loss."""
        network, loss_fn = copied(self.network, self.loss_fn)
        if self.level is None:
            return network, loss_fn
        return auto_mixed_precision(remove_mixed_precision(network).float(), self.level, self.dtype), loss_fn

    def at(self, scale: float) -> Pass:
        """At the level and this scale."""
        where = f"at level {self.level}" if self.level is not None else "with the levels that the network has"
        self.again()
        with _saying(f"the batch runs in float32 but not {where} in {self.dtype}"):
            return Pass(*self.low(), self.batch, scale)

    def cured(self, cure: Cure) -> Pass | None:
        """At scale 1 once the advice is followed; None where a float32 result then meets a 16-bit weight."""
        asked = replace(self, level=cure.what) if cure.kind == "level" else self
        inside: Any = nullcontext()
        if cure.kind == "bfloat16":
            asked = replace(self, dtype=BF16 if isinstance(self.dtype, FloatFormat) else torch.bfloat16)
            inside = torch.autocast(device_of(self.network), torch.bfloat16) if self.level is None else inside
        network, loss_fn = asked.low()
        for module in cure.keeps(network):
            to_float(module, torch.float32)
        if cure.kind == "loss" and loss_fn is not None:
            loss_fn = partial(_in_float32, loss_fn)
        self.again()
        try:
            with inside:
                return Pass(network, loss_fn, self.batch, 1.0)
        except Exception:  # whatever a network or a loss raises for a dtype that it does not take
            return None


@contextmanager
def without_autocast(kind: str) -> Iterator[None]:
    """Autocast is off, also in a context that a network enters itself.

    kind:    type of the device, as in `torch.autocast`.
    """
    with torch.autocast(kind, enabled=False), Listening() as listening:
        listening.swap(torch.autocast, "__enter__", lambda _, context: context)
        listening.swap(torch.autocast, "__exit__", lambda *_: None)
        yield


def device_of(network: nn.Module) -> str:
    return next((p.device.type for p in network.parameters()), "cpu")


def dtype_of(network: nn.Module, given: torch.dtype | FloatFormat) -> torch.dtype | FloatFormat:
    """What a network without a level runs in: that of the autocast region, or of a parameter of 16 bits."""
    if in_autocast(device_of(network)):
        return torch.get_autocast_dtype(device_of(network))
    return next((p.dtype for p in network.parameters() if p.dtype in (torch.float16, torch.bfloat16)), given)


@contextmanager
def _saying(what: str) -> Iterator[None]:
    """Errors of torch behind a sentence that says in which run they arose."""
    try:
        yield
    except RuntimeError as error:
        unfit = "cannot be converted to type" in str(error)
        raise RuntimeError(f"{what}: {error}{said('report', 'unfit') if unfit else ''}") from error


def _in_float32(loss_fn: LossFn, output: object, *target: object) -> Tensor:
    wide = tree_map(lambda t: t.float() if isinstance(t, Tensor) and t.is_floating_point() else t, output)
    return loss_fn(wide, *target)


def gradients_of(loss: Tensor, parameters: list[nn.Parameter], scale: float) -> list[Tensor | None]:
    """The gradients of loss * scale, dense; the graph stays. Out of an autocast region, as a loop does it.

    The parameters are those of a copy: `backward()`, which a re-entrant checkpoint asks for, overwrites their `grad`.
    """
    for p in parameters:
        p.grad = None
    with torch.autocast(loss.device.type, enabled=False):
        loss.backward(torch.full_like(loss, scale), retain_graph=True)
    return [p.grad.to_dense() if p.grad is not None and p.grad.is_sparse else p.grad for p in parameters]


def loss_of(network: nn.Module, batch: object, loss_fn: LossFn | None) -> Tensor:
    """The loss of a batch in any of the forms that `diagnose` takes."""
    if loss_fn is None:
        loss = network(*batch) if isinstance(batch, tuple | list) else network(batch)
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        loss = loss_fn(_forward(network, batch[0]), batch[1])
    elif isinstance(batch, Tensor | Mapping):
        loss = loss_fn(_forward(network, batch))
    else:
        raise TypeError(
            f"batch must be (inputs, target), one tensor or a dict of inputs, got {type(batch).__name__}; "
            "several inputs go into a tuple: ((x1, x2), target)"
        )
    return checked_loss(loss)


def _forward(network: nn.Module, inputs: object) -> object:
    if isinstance(inputs, Mapping):
        return network(**inputs)
    return network(*inputs) if isinstance(inputs, tuple | list) else network(inputs)
