"""The casts of O1 and auto written into the layers by hand: what is left of a cost when nothing has to find them."""

from __future__ import annotations

import copy

import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.networks import CausalSelfAttention

# Every class computes in bfloat16. At O1 each listed layer gives float32; at auto results stay as they are computed,
# while biases, sums and norms take float32.


class _LinearO1(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.bfloat16(), self.weight.bfloat16())
        return (y if self.bias is None else y + self.bias.bfloat16()).float()


class _LinearAuto(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.bfloat16(), self.weight.bfloat16())
        return y if self.bias is None else y + self.bias


class _ConvolutionAuto(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x.bfloat16(), self.weight.bfloat16(), None)


class _ConvolutionO1(_ConvolutionAuto):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class _ReluO1(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x.bfloat16()).float()


class _NormAuto(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class _AttentionAuto(CausalSelfAttention):
    def attended(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2).bfloat16() for t in self.c_attn(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.attended(x).transpose(1, 2).flatten(2))


class _AttentionO1(_AttentionAuto):
    def attended(self, x: Tensor) -> Tensor:
        return super().attended(x).float()


_CAST: dict[str, dict[type[nn.Module], type[nn.Module]]] = {
    "O1": {nn.Linear: _LinearO1, nn.Conv2d: _ConvolutionO1, nn.ReLU: _ReluO1, CausalSelfAttention: _AttentionO1},
    "auto": {
        nn.Linear: _LinearAuto,
        nn.Conv2d: _ConvolutionAuto,
        nn.BatchNorm2d: _NormAuto,
        CausalSelfAttention: _AttentionAuto,
    },
}


def by_hand(network: nn.Module, level: str) -> nn.Module:
    """A copy of the network that computes bit for bit what `level` does in bfloat16 on a CPU, by casts in its layers.

    For networks of `mpkit.networks` that consist of linear layers, convolutions without a bias, batch and layer norms,
    ReLUs and attentions.
    """
    network = copy.deepcopy(network)
    for module in network.modules():
        module.__class__ = _CAST[level].get(type(module), type(module))
    return network
