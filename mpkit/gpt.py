"""A GPT-2-shaped decoder, small enough to read and named as GPT-2 names it."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and its past. x (N, T, width) -> (N, T, width).

    `width` is a multiple of `heads`.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP, each with a residual sum. x (N, T, width) -> (N, T, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class TinyGPT(nn.Module):
    """A GPT-2-shaped decoder; the defaults fit a laptop, `TinyGPT.gpt2_124m()` has GPT-2's sizes.

    Shapes:  tokens (N, T <= context) int64 -> logits (N, T, vocabulary). The output layer shares the token embedding.
    Init:    normal with deviation 0.02, and 0.02 / sqrt(2 * layers) in the output layers of the attentions. (GPT-2 does
             the same in those of the MLPs, which have 0.02 here, as in the recorded traces.)
    Raises:  ValueError for more tokens in a row than the context.
    Source:  Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3.
    """

    def __init__(
        self, vocabulary: int = 128, context: int = 64, width: int = 64, heads: int = 4, layers: int = 2
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.h = nn.ModuleList(TransformerBlock(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.apply(partial(_gpt2_init, layers=layers))
        self.lm_head.weight = self.wte.weight

    @classmethod
    def gpt2_124m(cls) -> TinyGPT:
        """The sizes of GPT-2 small: 12 layers, width 768, 12 heads, context 1024, vocabulary 50304 (padded)."""
        return cls(vocabulary=50304, context=1024, width=768, heads=12, layers=12)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[-1] > self.wpe.num_embeddings:
            need = f"at most {self.wpe.num_embeddings} tokens to a row, the context of this network"
            raise ValueError(f"need {need}, got {tokens.shape[-1]}; make it with a longer context")
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[-1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def _gpt2_init(module: nn.Module, layers: int) -> None:
    # the outputs of the attentions start smaller by sqrt(2 * layers), GPT-2 section 2.3
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, CausalSelfAttention):
        nn.init.normal_(module.c_proj.weight, std=0.02 / (2 * layers) ** 0.5)
