"""bfloat16 weights without a float32 master copy: an update is computed in float32, what is stored is rounded well."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer as TorchOptimizer

from mpkit.arguments import check_alike, check_kind, checked
from mpkit.optimizers.arguments import inner, parameters_of
from mpkit.optimizers.saved import check_state
from mpkit.optimizers.wrapper import Wrapper

Way = Literal["stochastic", "kahan"]


@checked
def stochastic_bf16(x: Tensor, bits: Tensor | None = None, *, generator: torch.Generator | None = None) -> Tensor:
    """Round float32 to bfloat16, away from zero with the chance that keeps the mean exact.

    Args:    bits: 16 random bits r for each element (int32, 0 to 65535); None draws them. An element is rounded away
             from zero where r is below the low 16 bits of its pattern.
    Shapes:  x (*) float32 -> (*) bfloat16.
    Edges:   NaN stays NaN and inf stays inf; beyond the largest bfloat16 the carry reaches inf.
    Raises:  TypeError for another dtype; ValueError for bits of another shape.
    Source:  torchao 0.18, prototype/low_bit_optim `_fp32_to_bf16_sr`, bit for bit given the bits.
    """
    if x.dtype is not torch.float32:
        raise TypeError(f"need a float32 tensor, got {x.dtype}")
    if bits is None:
        bits = torch.randint(0, 2**16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    if bits.shape != x.shape:
        raise ValueError(f"bits need the shape of x, {tuple(x.shape)}, got {tuple(bits.shape)}")
    pattern = x.detach().view(torch.int32)
    up = (bits < (pattern & 0xFFFF)).int() << 16
    rounded = ((pattern & ~0xFFFF) + up).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x.detach()).to(torch.bfloat16)


class BFloat16Weights(Wrapper):
    """Any optimizer on bfloat16 weights, as if it had a float32 copy of them, but without one between steps.

    Plain bfloat16 forgets an update below 2^-9 of the weight. "stochastic" rounds up or down by chance, so that small
    updates arrive on average; "kahan" keeps what rounding lost in a second bfloat16 number beside each weight. Where
    somebody writes to a weight, that number is dropped once it is more than rounding to the new weight can lose.

    Args:    optimizer: built on the network's own bfloat16 parameters (float32 ones among them are left alone);
             way: "stochastic" or "kahan"; generator: source of the random bits.
    Memory:  a step has float32 copies of about as many weights at a time as the largest parameter holds. Counted for
             100 M weights in parameters of 1 M: nothing more between steps ("kahan": 2 bytes for each weight), 27 MB
             in a step. mpkit's optimizers alone keep a float32 master of every 16-bit weight, 4 bytes for each, need
             no wrapper to learn from small updates, and take up to 255 MB more in a step.
    Raises:  TypeError if `optimizer` is none, needs a closure (LBFGS) or is a FreezeOpt, which goes around this;
             ValueError for another way, or if no parameter is bfloat16.
    Source:  arXiv:2010.06192 (both ways); torchao 0.18 for the rounding.

    >>> w = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    >>> optimizer = BFloat16Weights(torch.optim.SGD([w], lr=2.0**-12), "kahan")
    >>> for _ in range(64): w.grad = torch.ones_like(w); _ = optimizer.step()
    >>> w.item()
    0.984375
    """

    _step_supports_amp_scaling = False  # a skipped step would draw random bits

    @checked
    def __init__(
        self, optimizer: TorchOptimizer, way: Way = "stochastic", *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(optimizer)
        if getattr(optimizer, "knows_its_parameters", False):
            raise TypeError(f"{type(optimizer).__name__} knows its parameters; put it around this wrapper, not inside")
        if not any(p.dtype is torch.bfloat16 for p in parameters_of(optimizer)):
            raise ValueError("no parameter is bfloat16, so nothing would be rounded; network.to(torch.bfloat16) first")
        self.way, self.generator = way, generator
        self._wide: dict[Tensor, Tensor] = {}  # bfloat16 parameter -> its float32 stand-in, empty between steps
        self._lost: dict[Tensor, Tensor] = {}  # what rounding lost, where way is "kahan"
        self._low()

    def _low(self) -> list[Tensor]:
        """The bfloat16 parameters of all groups, those added later too; each has a stand-in afterwards."""
        low = [p for p in parameters_of(self) if p.dtype is torch.bfloat16]
        for p in (p for p in low if p not in self._wide):
            self._wide[p] = wide = nn.Parameter(torch.empty(0, device=p.device))
            if self.way == "kahan":
                self._lost[p] = torch.zeros_like(p)
            if p in self.state:  # it has made steps already
                held = {name: x for name, x in self.state.pop(p).items() if name != "master"}
                narrow = {name for name, x in held.items() if getattr(x, "dtype", None) is torch.bfloat16}
                self.state[wide] = {name: x.float() if name in narrow else x for name, x in held.items()}
        return low

    @contextmanager
    def _float32(self, some: Sequence[Tensor]) -> Iterator[None]:
        """While the optimizer inside works, stand-ins are where bfloat16 was; those of `some` hold their weights."""
        kept = [list(group["params"]) for group in self.param_groups]
        try:
            for group in self.param_groups:
                group["params"] = [self._wide.get(p, p) for p in group["params"]]
            for p in some:
                self._wide[p].data = p.float() + _remainder(p, self._lost[p]) if p in self._lost else p.float()
                self._wide[p].grad = None if p.grad is None else p.grad.float()
            yield
        finally:
            for group, params in zip(self.param_groups, kept):
                group["params"] = params
            for wide in (self._wide[p] for p in some):
                wide.data, wide.grad = wide.data.new_empty(0), None

    def apply(self) -> None:
        """Some parameters after the other: the optimizer inside makes a step for each lot, and counts one for all."""
        moved = [p for p in self._low() if p.grad is not None]
        most, lots = max((p.numel() for p in moved), default=0), defaultdict[int, list[Tensor]](list)
        for p, total in zip(moved, accumulate(p.numel() for p in moved)):
            lots[total // max(most, 1)].append(p)
        others = {p: p.grad for p in parameters_of(self) if p not in self._wide}
        counters = [*self.param_groups, getattr(inner(self), "_counts", {})]
        before = [_numbers(counter) for counter in counters]
        try:
            for lot in [*lots.values()] or [[]]:
                for counter, held in zip(counters, before):
                    counter.update(_numbers(held))
                with self._float32(lot):
                    self.inside()
                    for p in lot:
                        self._round_(p, self._wide[p].data)
                for p in others:
                    p.grad = None
        finally:
            for p, grad in others.items():
                p.grad = grad

    def _round_(self, p: Tensor, wide: Tensor) -> None:
        # bits at which the nearest is taken, ties to even; a cast would lose nothing where a compiler fuses it
        bits = 0x8000 - ((wide.view(torch.int32) >> 16) & 1) if p in self._lost else None
        p.copy_(rounded := stochastic_bf16(wide, bits, generator=self.generator))
        if p in self._lost:
            self._lost[p].copy_(wide - rounded.float())

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer inside, what Kahan keeps, and the generator's state."""
        with self._float32(()):
            inside = self.optimizer.state_dict()
        generator = None if self.generator is None else self.generator.get_state()
        return {"inner": inside, "lost": [x.clone() for x in self._lost_now()], "generator": generator}

    def check_state(self, saved: dict[str, Any]) -> None:
        """Raise TypeError or ValueError for a state of another way or other parameters."""
        own: dict[str, Any] = {"inner": {}, "lost": self._lost_now(), "generator": None}
        check_alike("the state of BFloat16Weights", saved, own)
        check_kind("generator", saved["generator"], Tensor, "a generator's state", optional=True)
        with self._float32(self._low()):  # a state is checked, and cast by torch, beside the weights it belongs to
            check_state(self.optimizer, saved["inner"])

    def _lost_now(self) -> list[Tensor]:
        return [self._lost[p] for p in self._low() if p in self._lost]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError if it belongs to another way or other parameters."""
        self.check_state(state)
        with self._float32(self._low()):
            self.optimizer.load_state_dict(copy.deepcopy(state["inner"]))
        for value, saved in zip(self._lost_now(), state["lost"]):
            value.copy_(saved)
        if self.generator is not None and state["generator"] is not None:
            self.generator.set_state(state["generator"])


def _numbers(counter: dict[str, Any]) -> dict[str, Any]:
    """What counts in a group, or beside the groups, as it is now: a tensor is written to in place."""
    return {k: x.clone() if isinstance(x, Tensor) else x for k, x in counter.items() if k not in ("params", "lr")}


def _remainder(p: Tensor, lost: Tensor) -> Tensor:
    """What rounding lost, in float32; 0 where it cannot belong to the weight, which somebody has written to since."""
    wide = lost.float()
    # half a gap: at most 2^-8 of a normal number, 2^-134 of a subnormal one; the NaN beside an inf is dropped too
    most = (p.detach().float().abs() * 2.0**-8).clamp(min=2.0**-134)
    return torch.where(wide.abs() <= most, wide, 0.0)
