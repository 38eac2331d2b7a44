"""One batch through a copy of a network, forwards and backwards: in float32, at a level, with a cure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mpkit.casting import auto_mixed_precision, remove_mixed_precision, to_float
from mpkit.diagnose.copies import copied, copied_batch, tensors_of
from mpkit.diagnose.listening import Listening, in_autocast
from mpkit.diagnose.report import Cure
from mpkit.diagnose.watch import Watch
from mpkit.diagnose.words import said
from mpkit.formats import BF16, FloatFormat
from mpkit.step.phases import checked_loss

LossFn = Callable[..., Tensor]
EXPONENTS = range(-40, 128)  # of the loss scales that are tried


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
        with Listening() as stack:
            if plain:  # autocast is off, also in a context that a network enters itself
                stack.enter_context(torch.autocast(device_of(network), enabled=False))
                stack.swap(torch.autocast, "__enter__", lambda _, context: context)
                stack.swap(torch.autocast, "__exit__", lambda *_: None)
            stack.enter_context(self.watch)  # in the backward pass too: re-entrant checkpoints run modules
            self.wide = loss_of(network, batch, loss_fn).float()
            self.watch.backward = True
            self.gradients = self.again(scale)
        self.loss = float(self.wide.detach())
        results = self.gradients if math.isfinite(self.loss) else [self.wide.detach()]
        self.bad = [t for t in results if t is not None and not bool(t.isfinite().all())]
        self.finite = not self.bad

    def again(self, scale: float) -> list[Tensor | None]:
        """The gradients of loss * scale, dense. Out of an autocast region, as a loop does it.

        The parameters are those of a copy: `backward()`, which a re-entrant checkpoint needs, overwrites their `grad`.
        """
        for p in self.parameters:
            p.grad = None
        with torch.autocast(self.wide.device.type, enabled=False):
            self.wide.backward(torch.full_like(self.wide, scale), retain_graph=True)
        return [p.grad.to_dense() if p.grad is not None and p.grad.is_sparse else p.grad for p in self.parameters]

    def largest_scale(self) -> float | None:
        """Largest 2**k with finite gradients, by bisection; None if not even the smallest works."""

        def fails(exponent: int) -> bool:
            return not all(bool(g.isfinite().all()) for g in self.again(2.0**exponent) if g is not None)

        first = bisect_left(EXPONENTS, True, key=fails)
        return 2.0 ** EXPONENTS[first - 1] if first else None

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

    def at(self, scale: float, cure: Cure | None = None) -> Pass:
        """At the level and this scale, once the advice of a cure is followed."""
        kind, what = (cure.kind, cure.what) if cure is not None else ("", "")
        level = what if kind == "level" else self.level
        low = BF16 if isinstance(self.dtype, FloatFormat) else torch.bfloat16
        dtype = low if kind == "bfloat16" else self.dtype
        network, loss_fn = copied(self.network, self.loss_fn)
        if level is not None:
            auto_mixed_precision(remove_mixed_precision(network).float(), level, dtype)
        if kind in ("keep", "autocast"):
            to_float(network.get_submodule(what), torch.float32)
        if kind == "loss" and loss_fn is not None:
            loss_fn = partial(_in_float32, loss_fn)
        self.again()
        with ExitStack() as stack:
            stack.enter_context(_saying(f"the batch runs in float32 but not at level {level} in {dtype}"))
            if kind == "bfloat16" and level is None:
                stack.enter_context(torch.autocast(device_of(network), torch.bfloat16))
            return Pass(network, loss_fn, self.batch, scale)

    def cured(self, cure: Cure) -> Pass | None:
        """At scale 1 with this cure; None where a network or a loss refuses it, as a 16-bit weight does float32."""
        try:
            return self.at(1.0, cure)
        except Exception:  # whatever they raise
            return None


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


def loss_of(network: nn.Module, batch: object, loss_fn: LossFn | None) -> Tensor:
    """The loss of a batch in any of the forms that `diagnose` takes."""
    if loss_fn is None:
        loss = _forward(network, batch)
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
