# ruff: noqa: E501  (one report per line reads best)
"""Public reports of mixed precision gone wrong, each as the smallest network that shows it; loops: `test_watch_loop`,
set-ups before the first step: `test_preflight`.

A row begins with the report (owner/repository#number on GitHub) and what it says in short.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import Written
from test_diagnose import linear
from test_diagnose_silent import Table
from torch import Tensor, nn

from mpkit.diagnose import diagnose

HALF, BF16 = torch.float16, torch.bfloat16


def randn(*shape: int, gain: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * gain


def mean(out: Tensor) -> Tensor:
    return out.float().mean()


def last(inputs: int = 8, gain: float = 1.0) -> nn.Linear:
    return linear(3, inputs, gain)


class RmsNorm(nn.Module):
    """As LLaMA's, but without the cast to float32."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


@dataclass(frozen=True)
class Net:
    """`ends`: words of the cure. `dtype`: of an autocast region, or with `low` of the network and the batch."""

    report: str
    network: Callable[[], nn.Module]
    batch: Callable[[], Any]
    verdict: str
    module: str
    operation: str
    ends: str
    dtype: torch.dtype = HALF
    low: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    loss: Callable[..., Tensor] = mean


def table(m: Any, x: Tensor) -> Tensor:
    return m.last(m.table(x))


class Cosines(Table):
    def forward(self, position: Tensor) -> Tensor:
        return super().forward(position).cos()


def rope(first: int, dtype: torch.dtype, report: str) -> Net:
    make = lambda: Written(lambda m, x: m.last(m.table(x).cos()), table=Table(True), last=linear())  # noqa: E731
    return Net(report, make, lambda: first + torch.arange(64.0), "precision_lost", "table", "", "keep table", dtype)


def residual(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    return m.last((h * 40000 / h.detach().abs().amax() + h * 40000 / h.detach().abs().amax()) / 1e4)


def distance(m: Any, x: Tensor) -> Tensor:
    """|x - y|^2 as x^2 + y^2 - 2xy, of a vector to itself."""
    z = m.first(x) + 20
    squares = (z * z).sum(-1, keepdim=True)
    return m.last((squares + squares.T - 2 * z @ z.T).sqrt()[:, :8])


def gram(m: Any, x: Tensor) -> Tensor:
    features = m.first(x)
    return m.last(torch.bmm(features.transpose(1, 2), features).mean(1) / features.shape[1])


def normalized_scores(m: Any, x: Tensor) -> Tensor:
    scores = m.first(x)
    scores = torch.cat([scores[:1] * 0 + 1, scores[1:]])  # one query whose documents are equally good
    low, high = scores.amin(-1, keepdim=True), scores.amax(-1, keepdim=True)
    return m.last((scores - low) / (high - low + 1e-8))


def padded(m: Any, x: Tensor) -> Tensor:
    """Attention over padding alone in one row, masked by a subtraction."""
    scores = m.first(x)
    return m.last(torch.cat([scores[:1] - 1e15, scores[1:]]).softmax(-1))


def filled(m: Any, x: Tensor) -> Tensor:
    return m.last(m.first(x).masked_fill(torch.arange(8) > 3, -1e9).softmax(-1))


NETS = [
    Net("huggingface/transformers#5651 T5's wo gives 66246", lambda: Written(lambda m, x: m.last(m.norm(m.wo(F.relu(m.wi(x))))), wi=linear(8, gain=60), wo=linear(8, gain=60), norm=nn.LayerNorm(8), last=last()), lambda: randn(4, 8, gain=200), "forward_overflow", "wo", "addmm", "keep wo"),
    Net("huggingface/transformers#19229 a residual sum leaves the range", lambda: Written(residual, first=linear(8), last=last()), lambda: randn(4, 8), "forward_overflow", "(network)", "add", "bfloat16", low=True),
    Net("pytorch/pytorch#133085 RMSNorm squares in fp16", lambda: nn.Sequential(linear(8), RmsNorm(), last()), lambda: randn(4, 8, gain=3000), "forward_overflow", "1", "pow", "make the base smaller", low=True),
    Net("microsoft/onnxruntime#29043 values of 7600 in a skip norm", lambda: nn.Sequential(RmsNorm(), last()), lambda: randn(4, 8, gain=7600), "forward_overflow", "0", "pow", "keep", options={"level": "O3"}),
    rope(65536, BF16, "huggingface/transformers#29285 RoPE in bfloat16 under autocast"),
    rope(2048, BF16, "huggingface/transformers#29496 Mistral's cos and sin beyond its length"),
    rope(40000, HALF, "NVIDIA/Megatron-LM#535 positions beyond 2048 fall together in fp16"),
    Net("okoge-kaz/llm-recipes#6 model.to(bfloat16) takes inv_freq along", lambda: Written(table, table=Cosines(False), last=linear()), lambda: 3000 + torch.arange(64.0), "precision_lost", "table", "", "", BF16, low=True),
    Net("NVIDIA/apex#93 a mask of -1e15 and a row of padding alone", lambda: Written(padded, first=linear(8), last=last()), lambda: randn(4, 8), "forward_overflow", "(network)", "sub", "bfloat16", low=True),
    Net("pytorch/pytorch#43211 slope of norm(3) of small fp16 values", lambda: Written(lambda m, x: (m.last(m.first(x)) * 1e-4).abs().pow(3).sum() ** (1 / 3), first=linear(8), last=last()), lambda: randn(4, 8), "gradient_overflow", "(network)", "", "", low=True),
    Net("lightonai/pylate#239 an eps of 1e-8 is zero in fp16", lambda: Written(normalized_scores, first=linear(8), last=last()), lambda: randn(4, 8), "forward_overflow", "(network)", "div", "an eps that the format holds"),
    Net("lucidrains/vector-quantize-pytorch#106 root of a negative square", lambda: Written(distance, first=linear(8), last=last()), lambda: randn(8, 8), "model_non_finite", "(network)", "sqrt", "clamp(min=eps)"),
    Net("NVIDIA/apex#402 a Gram matrix of style loss", lambda: Written(gram, first=linear(8, gain=10), last=last()), lambda: randn(2, 64, 8, gain=30), "forward_overflow", "(network)", "bmm", "bfloat16"),
    Net("pytorch/pytorch#115500 batch norm after a layer that overflows", lambda: nn.Sequential(linear(8), nn.BatchNorm1d(8), last()), lambda: torch.rand(4, 8, generator=torch.Generator().manual_seed(0)) * 2**18, "forward_overflow", "0", "cast to float16", "keep 0"),
    Net("pytorch/pytorch#96798 a convolution before a batch norm", lambda: nn.Sequential(nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8), nn.Flatten(), last()), lambda: randn(4, 8, 1, gain=6e4), "forward_overflow", "0", "cast to float16", "keep 0"),
    Net("chelsea0x3b/dfdx#748 a mean divides by a count beyond 65504", lambda: Written(lambda m, x: m.last(m.first(x).sum(0, keepdim=True) / torch.tensor(70000.0).to(x)), first=linear(8), last=last()), lambda: randn(4, 8), "forward_overflow", "(network)", "cast to float16", "", low=True),
    Net("espnet/espnet#3237 a summed loss inside autocast", lambda: nn.Sequential(last(gain=30)), lambda: randn(64, 8, gain=10), "gradient_overflow", "0", "mm", "mean, not sum", options={"level": "O2"}, loss=lambda out: out.square().sum()),
    Net("pytorch/pytorch#49844 logits of -inf in BCEWithLogitsLoss", lambda: nn.Sequential(linear(8), last(gain=1e6)), lambda: randn(4, 8), "forward_overflow", "1", "cast to float16", "bfloat16", loss=lambda out: F.binary_cross_entropy_with_logits(out.float(), torch.ones_like(out.float()))),
    Net("dingo-actual/om#11 LayerNorm over dimensions of small variance in bfloat16", lambda: Written(lambda m, x: m.last(m.norm(m.wide(x) + 300)), wide=linear(8), norm=nn.LayerNorm(8), last=last()), lambda: randn(16, 8), "precision_lost", "norm", "", "", BF16, low=True),
    Net("pytorch/executorch#20089 a running sum in bfloat16 stops at 256", lambda: Written(lambda m, x: m.last(m.count(x)), count=Written(lambda m, x: sum([x.abs() * 0 + 1] * 600, x * 0) / 600), last=last()), lambda: randn(4, 8), "precision_lost", "count", "", "", BF16, low=True),
    Net("intel/ipex-llm#2471 log(1 + eps - p) where p is 1", lambda: Written(lambda m, x: (1 + 1e-12 - m.last(x + 30).abs().sigmoid()).log(), last=last(gain=10)), lambda: randn(4, 8), "model_non_finite", "(network)", "log", "add a small number inside"),
    Net("open-mmlab/mmdetection3d#944 1e-12 beside equal corners", lambda: Written(lambda m, x: m.last(m.first(x) * 0 / ((x + 1e-12) - x)), first=linear(8), last=last()), lambda: randn(4, 8) + 3, "model_non_finite", "(network)", "div", "add an eps that the format holds"),
    Net("NVIDIA/apex#834 the scale fell to 0", lambda: nn.Sequential(linear(8), last()), lambda: randn(4, 8), "scale_zero", "", "", "init_scale", options={"scale": 0.0}),
    Net("NVIDIA/apex#318 skipped at any scale: the loss is NaN", lambda: nn.Sequential(linear(8), last()), lambda: randn(4, 8) * math.nan, "bad_data", "batch", "", "drop or repair"),
]  # fmt: skip


@pytest.mark.parametrize("case", NETS, ids=lambda case: case.report.split()[0])
def test_a_network_of_a_report(case: Net) -> None:
    network, batch, options = case.network(), case.batch(), {"level": None, "scale": 1.0} | case.options
    if case.low:
        network, batch = network.to(case.dtype), batch.to(case.dtype)
    with torch.autocast("cpu", case.dtype, enabled=not case.low and options["level"] is None):
        report = diagnose(network, batch, case.loss, **options)
    assert (report.verdict, report.module) == (case.verdict, case.module), str(report)
    assert case.operation in report.operation, str(report)
    assert case.ends in "\n".join(report.advice), str(report)
    assert report.advice


def test_a_mask_that_float16_cannot_hold_is_told_with_the_way_out() -> None:
    """NVIDIA/apex#1052 and #1105, huggingface/lerobot#710."""
    network = Written(filled, first=linear(8), last=last())
    with torch.autocast("cpu", HALF), pytest.raises(RuntimeError, match=r"finfo\(x\.dtype\)\.min"):
        diagnose(network, randn(4, 8), mean, level=None)
