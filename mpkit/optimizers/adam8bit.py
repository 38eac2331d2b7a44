"""Adam whose moments take one byte each: codes of a logarithmic map, and a float32 scale for every 256 of them."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from mpkit.optimizers.arguments import Decay, Options, Params, Rate, check_betas, parameters_of
from mpkit.optimizers.base import Numbers, Optimizer
from mpkit.optimizers.update import Update, root, unbiased

BLOCK = 256  # values that share a scale
LEAST = 4096  # smaller tensors keep float32 moments: they save little, and norms and biases suffer most
_SIGNED = {"moment1": True, "moment2": False}


def dynamic_map(signed: bool) -> Tensor:
    """The 256 values that a code stands for, ascending, float32.

    0, 1, and for each power of ten from 1e-6 to 1 the middles of equal parts of [0.1, 1] times it: 1, 2, 4, ... 64 of
    them for either sign, or 2, 4, ... 128 where there is no sign. So small values keep their order of magnitude.
    Source:  Dettmers et al. 2022, arXiv:2110.02861, 2.2 (dynamic tree quantization), with torchao 0.18's numbers.
    """
    values = [torch.tensor([0.0, 1.0], dtype=torch.float32)]
    for digit in range(7):
        parts = torch.linspace(0.1, 1, 2 ** (digit if signed else digit + 1) + 1, dtype=torch.float32)
        middles = (parts[:-1] + parts[1:]) / 2 * 10.0 ** (digit - 6)
        values += [middles, -middles] if signed else [middles]
    return torch.cat(values).sort().values


_MAPS: dict[tuple[bool, str], tuple[Tensor, Tensor]] = {}  # a dict, because torch.compile looks into functools.cache


def _maps(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The map on a device, and its 255 thresholds: the smallest float32 that takes each next code."""
    key = (signed, str(device))
    if key not in _MAPS:
        table = dynamic_map(signed)
        _MAPS[key] = table.to(device), _thresholds(table).to(device)
    return _MAPS[key]


def _thresholds(table: Tensor) -> Tensor:
    """A value goes to the upper of its neighbours where value - lower >= (upper - lower) / 2, all in float32.

    That grows with the value, so the threshold is found by halving the interval between the two patterns.
    """
    lower, upper = table[:-1], table[1:]
    half = (upper - lower) * 0.5
    below, at = _ordered(lower), _ordered(upper)
    while bool((at - below > 1).any()):
        middle = (below + at) // 2
        up = _value(middle) - lower >= half
        below, at = torch.where(up, below, middle), torch.where(up, middle, at)
    return _value(at)


def _ordered(x: Tensor) -> Tensor:
    """float32 -> int64 in the order of the values."""
    bits = x.view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _value(order: Tensor) -> Tensor:
    return torch.where(order < 0, order.abs() - 2**31, order).to(torch.int32).view(torch.float32)


def encode_moment(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """A moment in blocks of 256 -> codes and scales.

    Shapes:  x (*) float, its size a multiple of 256 -> (*) uint8, (blocks,) float32; blocks run over the flat tensor.
    Edges:   a block's scale is its largest magnitude, at least 1e-12; NaN or inf makes it and the block so.
    """
    blocks = x.reshape(-1, BLOCK).float()
    scale = blocks.abs().amax(-1).clamp(min=1e-12)
    thresholds = _maps(signed, x.device)[1]
    codes = torch.bucketize(blocks / scale[:, None], thresholds, right=True, out_int32=True)
    return codes.to(torch.uint8).view(x.shape), scale


def decode_moment(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """What `encode_moment` gave -> (*) float32."""
    table = _maps(signed, codes.device)[0]
    return (table[codes.int()].view(-1, BLOCK) * scale[:, None]).view(codes.shape)


class Adam8bit(Optimizer):
    """Adam with moments of 8 bits, decoded before they are averaged and encoded after.

    `m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2`;
    `w -= lr * m / (1-b1^t) / (sqrt(v) / sqrt(1-b2^t) + eps)`, with the m and v from before they are encoded.

    A tensor of at least 4096 values, a multiple of 256, has `codes1, scales1, codes2, scales2` as its state: 2.03 bytes
    for a value where Adam has 8. Other tensors keep float32 moments.

    Args:    as `Adam`. 16-bit parameters get a float32 master copy, as everywhere here; to do without, build this on
             them and wrap it in `BFloat16Weights`.
    Against torchao:  codes and scales are those of `torchao.optim.Adam8bit` bit for bit, given the gradients. Weights
                      differ by the error of its bias corrections, which it forms in float32 (6e-5 of the first update).
    Source:  Dettmers et al. 2022, arXiv:2110.02861; torchao 0.18 optim/adam.py (blocks of 256).

    >>> w = torch.nn.Parameter(torch.zeros(4096))
    >>> optimizer = Adam8bit([w], 0.01)
    >>> w.grad = torch.linspace(-1, 1, 4096); optimizer.step()
    >>> {name: (tuple(t.shape), t.dtype) for name, t in optimizer.state[w].items() if name.endswith("1")}
    {'codes1': ((4096,), torch.uint8), 'scales1': ((16,), torch.float32)}
    """

    decay_filter = False

    def __init__(
        self,
        params: Params,
        learning_rate: Rate = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: Decay = 0.0,
        loss_scale: float = 1.0,
        **options: Unpack[Options],
    ) -> None:
        check_betas(beta1, beta2, eps)
        hyper = {"betas": (beta1, beta2), "eps": float(eps), "state_bits": 8}
        super().__init__(params, learning_rate, weight_decay, loss_scale, hyper, options)
        for device in {p.device for p in parameters_of(self)}:
            for signed in _SIGNED.values():
                _maps(signed, device)  # before a compiled step looks for them

    def slots(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        if weight.numel() < LEAST or weight.numel() % BLOCK:
            return {name: torch.zeros_like(weight) for name in _SIGNED}
        state = {}
        for k, signed in enumerate(_SIGNED.values(), 1):
            zeros = torch.zeros(weight.shape, device=weight.device)
            state[f"codes{k}"], state[f"scales{k}"] = encode_moment(zeros, signed)
        return state

    def _step_some(self, chosen: list[int], group: dict[str, Any], numbers: Numbers) -> None:
        states = self._states([group["params"][i] for i in chosen], group)
        coded = [i for i, state in zip(chosen, states) if "codes1" in state]
        for some in (coded, [i for i in chosen if i not in coded]):
            if some:
                super()._step_some(some, group, numbers)

    def update(self, u: Update) -> None:
        moments = [self._averaged(u, k) for k in (1, 2)]
        numerators = torch._foreach_div(moments[0], u.once("bias1", lambda: unbiased(u.group["betas"][0], u.count)))
        denominators = torch._foreach_sqrt(moments[1])
        torch._foreach_div_(denominators, u.once("bias2", lambda: root(unbiased(u.group["betas"][1], u.count))))
        torch._foreach_add_(denominators, u.group["eps"])
        if self.decay_in_formula:
            u.shrink_(u.lr)
        u.move_by_ratio_(u.weights, numerators, denominators, u.lr)

    def _averaged(self, u: Update, k: int) -> list[Tensor]:
        """The new moments number `k`, in the precision of the weights; the state takes them over."""
        name, signed = f"moment{k}", k == 1
        beta = u.group["betas"][k - 1]
        news = u.grads if k == 1 else torch._foreach_mul(u.grads, u.grads)
        if name in u.state:
            new = [old.to(news[i].dtype).lerp(news[i], 1 - beta) for i, old in enumerate(u.state[name])]
            u.replace_(u.state[name], new)
            return new
        codes, scales = u.state[f"codes{k}"], u.state[f"scales{k}"]
        olds = [decode_moment(c, s, signed).to(w.dtype) for c, s, w in zip(codes, scales, u.weights)]
        new = [old.lerp(grad, 1 - beta) for old, grad in zip(olds, news)]
        for moment, code, scale in zip(new, codes, scales):
            coded = encode_moment(moment, signed)
            u.replace_([code], [coded[0]])
            u.replace_([scale], [coded[1]])
        return new


class AdamW8bit(Adam8bit):
    """`Adam8bit` with decoupled weight decay: `w -= lr * weight_decay * w` before the update. Takes no `loss_scale`.

    Source:  torchao 0.18 `torchao.optim.AdamW8bit`; Loshchilov and Hutter 2019, arXiv:1711.05101.
    """

    decay_in_formula = True

    def __init__(
        self,
        params: Params,
        learning_rate: Rate = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: Decay = 1e-2,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, learning_rate, beta1, beta2, eps, weight_decay, **options)
