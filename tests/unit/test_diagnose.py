# ruff: noqa: E501  (one fault per line reads best)
"""The diagnosis is right about planted faults in every kind of network, and silent on healthy ones."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import Op, Written
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpkit.casting import auto_mixed_precision
from mpkit.diagnose import VERDICTS, diagnose
from mpkit.formats import E4M3FN, E5M2, FP16, TF32, FloatFormat
from mpkit.networks import LeNet5, Network, ResidualBlock, TinyGPT
from mpkit.step import WithLossCell


def chain(*parts: Any) -> nn.Module:
    """Linear(8, 8) called "first", then the parts called "fault" or "part1", ..., then Linear(8, 3) called "last"."""
    torch.manual_seed(0)
    middle = {f"part{i}" if i else "fault": p if isinstance(p, nn.Module) else Op(p) for i, p in enumerate(parts)}
    return nn.Sequential(OrderedDict(first=nn.Linear(8, 8), **middle, last=nn.Linear(8, 3)))


def rows(n: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, 8, generator=generator), torch.arange(n) % 3


def with_weight(module: nn.Module, path: str, change: Callable[[Tensor], Any]) -> nn.Module:
    with torch.no_grad():
        change(dict(module.state_dict(keep_vars=True))[path])
    return module


def touched(batch: tuple[Tensor, Tensor], value: float, which: int = 0) -> tuple[Tensor, Tensor]:
    parts = [t.clone() for t in batch]
    parts[which].view(-1)[1] = value
    return parts[0], parts[1]


def linear(outputs: int = 3, inputs: int = 8, gain: float = 1.0) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        layer.weight.mul_(gain)
    return layer


def attention(gain: float = 1.0, mask: Tensor | None = None) -> nn.Module:
    """One head, written out; a mask is added to the scores, its own one or one that comes with the batch."""

    def forward(m: Any, x: Tensor, given: Any = 0.0) -> Tensor:
        scores = m.scores((m.query(x), m.key(x))) + (given if mask is None else m.mask)
        return m.softmax(scores) @ m.value(x)

    torch.manual_seed(1)
    layers = {name: nn.Linear(8, 8) for name in ("query", "key", "value")}
    scores = Op(lambda qk: qk[0] @ qk[1].transpose(-1, -2) * gain)
    network = Written(forward, scores=scores, softmax=nn.Softmax(-1), **layers)
    network.register_buffer("mask", mask)
    return network


def last_of(rnn: nn.Module) -> nn.Module:
    """The last output of a recurrent network."""
    return Written(lambda m, x: m.rnn(x)[0][:, -1], rnn=rnn)


def checkpointed(function: Callable[[Tensor], Tensor], reentrant: bool = False) -> nn.Module:
    """A block whose forward pass runs again in the backward pass."""
    inner = nn.Sequential(nn.Linear(8, 8), Op(function))
    return Written(lambda m, x: checkpoint(m.inner, x, use_reentrant=reentrant), inner=inner)


def tied(gain: float) -> nn.Module:
    """Two layers with one weight."""
    layers = {"one": linear(8), "other": linear(8), "grow": Op(lambda x: x * gain)}
    network = Written(lambda m, x: m.other(m.grow(torch.relu(m.one(x)))), **layers)
    network.other.weight = network.one.weight
    return network


def filled(first: int) -> nn.Module:
    """Attention scores with a mask of -inf filled in: with 0 for `first` one row holds nothing else."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.project(x)
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(first).flip(0, 1)
        return m.softmax((h @ h.T).masked_fill(hidden, -math.inf)) @ h

    return nn.Sequential(Written(forward, project=linear(8), softmax=nn.Softmax(-1)), linear())


def packed() -> nn.Module:
    """The maximum over sequences of different lengths, padded with -inf."""

    def forward(m: Any, x: Tensor) -> Tensor:
        short = nn.utils.rnn.pack_padded_sequence(x, [20, 11], batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(m.rnn(short)[0], True, -math.inf)[0].amax(1)

    return Written(forward, rnn=nn.LSTM(8, 4, 2, batch_first=True, bidirectional=True))


def routed() -> nn.Module:
    """Experts weighted by a softmax over the two best; the others get -inf."""

    def forward(m: Any, x: Tensor) -> Tensor:
        scores = m.gate(x)
        best = scores.topk(2, -1)
        share = torch.full_like(scores, -math.inf).scatter(-1, best.indices, best.values).softmax(-1)
        return sum(share[:, i : i + 1] * expert(x) for i, expert in enumerate(m.experts))

    return Written(forward, gate=linear(4), experts=nn.ModuleList(linear() for _ in range(4)))


def upscaled() -> nn.Module:
    torch.manual_seed(19)
    up = nn.Sequential(nn.ConvTranspose2d(1, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.ReLU())
    return up.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)])


def weight_normed() -> nn.Module:
    torch.manual_seed(20)
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 3))


def words_in(table: nn.Module) -> nn.Module:
    torch.manual_seed(21)
    return nn.Sequential(table, Op(lambda e: e.mean(1)), nn.Linear(8, 3))


def growing_rnn() -> nn.Module:
    torch.manual_seed(2)
    rnn = nn.RNN(8, 8, nonlinearity="relu", batch_first=True)
    with torch.no_grad():
        rnn.weight_hh_l0.copy_(3 * torch.eye(8))
        rnn.weight_ih_l0.fill_(1.0)
    return last_of(rnn)


def convolution(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(4)
    layers = {"conv": nn.Conv2d(1, 4, 3, padding=1), "norm": nn.BatchNorm2d(4), "pool": nn.AdaptiveAvgPool2d(1)}
    network = nn.Sequential(OrderedDict(layers, flat=nn.Flatten(), last=nn.Linear(4, 3)))
    return with_weight(network, "conv.weight", lambda w: w.mul_(gain))


def images() -> tuple[Tensor, Tensor]:
    return torch.rand(4, 1, 6, 6, generator=torch.Generator().manual_seed(5)) + 0.5, torch.arange(4) % 3


def sequences(steps: int = 20) -> Tensor:
    return torch.rand(2, steps, 8, generator=torch.Generator().manual_seed(6)) + 0.1


def embedded(row: Callable[[Tensor], Any]) -> nn.Module:
    torch.manual_seed(7)
    return with_weight(nn.Sequential(OrderedDict(table=nn.Embedding(10, 8), last=nn.Linear(8, 3))), "table.weight", row)


def mean(out: Tensor) -> Tensor:
    return out.mean()


def causal(size: int, all_of_row: int | None = None) -> Tensor:
    mask = torch.full((size, size), -math.inf).triu(1)
    if all_of_row is not None:
        mask[all_of_row] = -math.inf
    return mask


@dataclass(frozen=True)
class Fault:
    """A planted fault and what the report must say; `operation` is a word in the operation's name, and behind an "of"
    there is the one whose gradient it computes."""

    name: str
    network: Callable[[], nn.Module]
    batch: Callable[[], Any]
    verdict: str
    phase: str = ""
    module: str = ""
    operation: str = ""
    loss: Callable[..., Tensor] = F.cross_entropy
    options: tuple[tuple[str, Any], ...] = ()
    cures: str = ""


FAULTS = [
    Fault("log of zero", lambda: chain(F.relu, lambda x: torch.log(x * 0)), rows, "model_non_finite", "forward", "part1", "log"),
    Fault("exp of 100", lambda: chain(lambda x: torch.exp(x * 0 + 100)), rows, "model_non_finite", "forward", "fault", "exp"),
    Fault("0/0 of a norm", lambda: chain(lambda x: x * 0 / (x * 0).norm()), rows, "model_non_finite", "forward", "fault", "div"),
    Fault("slope of a root at 0", lambda: chain(lambda x: (x * 0).sqrt()), rows, "model_non_finite", "backward", "fault", "div of sqrt"),
    Fault("slope of acos at 1", lambda: chain(lambda x: torch.acos(x * 0 + 1)), rows, "model_non_finite", "backward", "fault", ""),
    Fault("0 times log 0", lambda: chain(lambda x: torch.where(x > 9, x, -math.inf) * 0), rows, "model_non_finite", "forward", "fault", "mul"),
    Fault("square of 300", lambda: chain(lambda x: (x * 0 + 300) ** 2), rows, "forward_overflow", "forward", "fault", "pow", cures="bfloat16"),
    Fault("minus inf before a softmax", lambda: chain(lambda x: ((x * 0 + 300) * -300).softmax(-1)), rows, "forward_overflow", "forward", "fault", "mul", cures="keep fault, bfloat16"),
    Fault("square of 300, one value", lambda: chain(lambda x: x * (x.sum() * 0 + 300) ** 2), rows, "forward_overflow", "forward", "fault", "pow", cures="bfloat16"),
    Fault("overflow under a mask, emulated", lambda: chain(lambda x: (causal(8)[:4] - torch.exp(x * 0 + 88.72)).softmax(-1)), rows, "forward_overflow", "forward", "fault", "exp", options=(("dtype", FP16),), cures="keep fault, bfloat16"),
    Fault("overflow rounded by bits", lambda: chain(lambda x: torch.exp(x * 0 + 88.72) * 1e-38), rows, "forward_overflow", "forward", "fault", "exp", options=(("dtype", TF32),), cures="keep fault, bfloat16"),
    Fault("variance of a constant", lambda: chain(lambda x: (x * 0) * torch.rsqrt((x * 0).var(-1, keepdim=True) + 1e-9)), rows, "forward_overflow", "forward", "fault", "rsqrt", cures="keep fault, bfloat16"),
    Fault("cumprod of threes", lambda: chain(lambda x: (x[:, :1] * 0 + 3).expand(-1, 60).cumprod(1)[:, -8:] * 1e-25), rows, "forward_overflow", "forward", "fault", "cumprod", cures="keep fault, bfloat16"),
    Fault("softmax over large logits", lambda: nn.Sequential(attention(1e5), nn.Linear(8, 3)), rows, "forward_overflow", "forward", "0.scores", "mul", cures="keep 0, bfloat16"),
    Fault("fully masked row", lambda: nn.Sequential(attention(1.0, causal(4, 2)), nn.Linear(8, 3)), rows, "model_non_finite", "forward", "0.softmax", "softmax"),
    Fault("inf in the data", lambda: chain(nn.ReLU()), lambda: touched(rows(), math.inf), "bad_data", "", "batch[0]"),
    Fault("NaN in the data", lambda: convolution(), lambda: touched(images(), math.nan), "bad_data", "", "batch[0]"),
    Fault("inf in the target", lambda: chain(), lambda: touched((rows()[0], torch.zeros(4, 3)), math.inf, 1), "bad_data", "", "batch[1]", loss=F.mse_loss),
    Fault("NaN weight", lambda: with_weight(chain(nn.ReLU()), "first.weight", lambda w: w[2].fill_(math.nan)), rows, "weights_non_finite", "", "parameter first.weight"),
    Fault("inf bias of a convolution", lambda: with_weight(convolution(), "conv.bias", lambda b: b[0].fill_(math.inf)), images, "weights_non_finite", "", "parameter conv.bias"),
    Fault("NaN running variance", lambda: with_weight(convolution().eval(), "norm.running_var", lambda b: b.fill_(math.nan)), images, "weights_non_finite", "", "buffer norm.running_var"),
    Fault("NaN row of an embedding", lambda: embedded(lambda w: w[3].fill_(math.nan)), lambda: (torch.tensor([3, 1]), torch.tensor([0, 1])), "weights_non_finite", "", "parameter table.weight"),
    Fault("embedding beyond float16", lambda: embedded(lambda w: w.fill_(1e5)), lambda: (torch.tensor([3, 1]), torch.tensor([0, 1])), "forward_overflow", "forward", "table", "cast to float16", cures="bfloat16"),
    Fault("convolution with weights of 1e5", lambda: convolution(1e6), images, "forward_overflow", "forward", "conv", "", cures="keep conv, bfloat16"),
    Fault("the same, emulated", lambda: convolution(1e6), images, "forward_overflow", "forward", "conv", "", options=(("dtype", FP16),), cures="keep conv, bfloat16"),
    Fault("300 in E4M3", lambda: chain(lambda x: (x * 0 + 30) ** 2), rows, "forward_overflow", "forward", "fault", "", options=(("dtype", E4M3FN),), cures="bfloat16"),
    Fault("recurrent growth", growing_rnn, sequences, "forward_overflow", "forward", "rnn", "", loss=mean, cures="keep rnn, bfloat16"),
    Fault("loss scale 2^40, perceptron", lambda: chain(nn.ReLU()), rows, "scale_too_high", "backward", "(network)", "cast to float16 of cast to float32", options=(("scale", 2.0**40),)),
    Fault("loss scale 2^40, O1", lambda: chain(nn.ReLU()), rows, "scale_too_high", "backward", "last", "cast to float16 of cast to float32", options=(("scale", 2.0**40), ("level", "O1"))),
    Fault("loss scale 2^40, transformer", lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), Op(lambda h: h.mean(1))), lambda: (sequences(), torch.tensor([0, 1])), "scale_too_high", "backward", "(network)", "cast to float16 of cast to float32", options=(("scale", 2.0**40),)),
    Fault("loss scale 2^40, sparse gradients", lambda: words_in(nn.Embedding(10, 8, sparse=True)), lambda: (torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.tensor([0, 1])), "scale_too_high", "backward", "", "", options=(("scale", 2.0**40),)),
    Fault("slope of a root at 0, late", lambda: chain(*[Op(lambda x: x + 1)] * 200, lambda x: (x * 0).sqrt()), rows, "model_non_finite", "backward", "part200", "div of sqrt"),
    Fault("exp of a GRU's output", lambda: nn.Sequential(last_of(nn.GRU(8, 8, batch_first=True)), Op(lambda h: (h * 0 + 12).exp())), lambda: (sequences(), torch.tensor([0, 1])), "forward_overflow", "forward", "1", "exp", cures="keep 1, bfloat16"),
    Fault("NaN weight of an LSTM", lambda: with_weight(last_of(nn.LSTM(8, 4, batch_first=True)), "rnn.weight_hh_l0", lambda w: w[0].fill_(math.nan)), sequences, "weights_non_finite", "", "parameter rnn.weight_hh_l0", loss=mean),
    Fault("square of 300, checkpointed", lambda: chain(checkpointed(lambda x: (x * 0 + 300) ** 2)), rows, "forward_overflow", "forward", "fault.inner.1", "pow", cures="bfloat16"),
    Fault("the same, re-entrant", lambda: chain(checkpointed(lambda x: (x * 0 + 300) ** 2, True)), rows, "forward_overflow", "forward", "fault.inner.1", "pow", cures="bfloat16"),
    Fault("slope of a root at 0, checkpointed", lambda: chain(checkpointed(lambda x: (x * 0).sqrt())), rows, "model_non_finite", "backward", "fault.inner.1", "div of sqrt"),
    Fault("gain of 1e6 between tied layers", lambda: tied(1e6), rows, "forward_overflow", "forward", "grow", "mul", cures="bfloat16"),
    Fault("masked_fill of a whole row", lambda: filled(0), rows, "model_non_finite", "forward", "0.softmax", "softmax"),
    Fault("exp in place", lambda: chain(lambda x: x.mul_(0).add_(20).exp_()), rows, "forward_overflow", "forward", "fault", "exp", cures="bfloat16"),
    Fault("every target ignored", lambda: chain(), lambda: (rows()[0], torch.full((4,), -100)), "model_non_finite", "forward", "(loss function)", "nll_loss"),
    Fault("weight norm of a zero row", lambda: with_weight(weight_normed(), "0.parametrizations.weight.original1", lambda w: w[2].zero_()), rows, "model_non_finite", "forward", "0.parametrizations.weight.0", "weight_norm"),
    Fault("negative running variance", lambda: with_weight(convolution().eval(), "norm.running_var", lambda b: b.fill_(-1)), images, "model_non_finite", "forward", "norm", "batch_norm"),
    Fault("bias of -inf", lambda: with_weight(upscaled(), "0.bias", lambda b: b.fill_(-math.inf)), images, "weights_non_finite", "", "parameter 0.bias"),
    Fault("NaN in the padding row", lambda: with_weight(words_in(nn.Embedding(10, 8, padding_idx=0)), "0.weight", lambda w: w[0].fill_(math.nan)), lambda: (torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.tensor([0, 1])), "weights_non_finite", "", "parameter 0.weight"),
    Fault("a mask times 0", lambda: Written(lambda m, x, k: m.last(x + m.times(m.view(k))), view=Op(lambda k: k[:4]), times=Op(lambda k: k * 0), last=linear()), lambda: ((rows()[0], causal(8)), rows()[1]), "model_non_finite", "forward", "times", "mul"),
    Fault("square of 300 of no module's own", lambda: Written(lambda m, x: m.last((m.first(x) * 0 + 300) ** 2 / 1e3), first=linear(8), last=linear()), rows, "forward_overflow", "forward", "(network)", "pow", cures="level O1, bfloat16"),
    Fault("a loss a million times too large", lambda: chain(), rows, "gradient_overflow", "backward", "(network)", "cast to float16 of cast to float32", loss=lambda o, y: F.cross_entropy(o, y) * 1e7, cures="bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_a_planted_fault_is_named(fault):
    network = fault.network()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    options = {"scale": 2.0**8} | dict(fault.options)

    report = diagnose(network, fault.batch(), fault.loss, **options)

    assert (report.verdict, report.level) == (fault.verdict, options.get("level", "O2")), str(report)
    if fault.phase:
        operation, _, of = fault.operation.partition(" of ")
        assert report.phase == fault.phase, str(report)
        assert operation in report.operation, str(report)
        assert report.gradient_of == of or not operation, str(report)
        assert report.operands
    assert fault.name != "0 times log 0" or "4x8 with values from nan to nan; 32 are not" in str(report.operands[0])
    assert ", ".join(f"{cure.kind} {cure.what}".strip() for cure in report.cures) == fault.cures
    if fault.module:
        assert report.module == fault.module, str(report)
    works = report.max_scale
    if fault.verdict in ("scale_too_high", "gradient_overflow"):
        assert (1 <= works < options["scale"]) if fault.verdict == "scale_too_high" else works < 1
        assert any(f"{works:.10g}" in advice for advice in report.advice)
        after = diagnose(network, fault.batch(), fault.loss, **(options | {"scale": works}))
        assert after.verdict == "healthy"
    else:
        assert works is None
    assert report.advice
    assert VERDICTS[fault.verdict] in str(report)
    for key, value in network.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0, equal_nan=True)
    assert all(p.grad is None for p in network.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())


def test_there_are_faults_of_every_kind():
    silent = {"lost_in_forward", "precision_lost", "gradients_non_finite", "scale_zero"}  # test_diagnose_silent
    assert {f.verdict for f in FAULTS} == set(VERDICTS) - {"healthy"} - silent


def test_gradients_that_overflow_when_they_are_added_belong_to_no_operation():
    """One layer in two re-entrant checkpoints: each gradient fits, their sum does not."""

    def twice(m: Any, x: Tensor) -> Tensor:
        return checkpoint(m.layer, checkpoint(m.layer, m.first(x), use_reentrant=True), use_reentrant=True)

    network = Written(twice, first=nn.Linear(1, 1, bias=False), layer=nn.Linear(1, 1, bias=False)).half()
    for p in network.parameters():
        nn.init.ones_(p)
    report = diagnose(network, torch.tensor([[40000.0]]).half(), lambda out: out.float().sum(), level=None, scale=1.0)
    assert (report.verdict, report.phase, report.gradient_of) == ("gradient_overflow", "backward", ""), str(report)
    assert report.max_scale == 0.5


def tokens() -> tuple[Tensor, Tensor]:
    t = torch.randint(16, (2, 9), generator=torch.Generator().manual_seed(9))
    return t[:, :-1], t[:, 1:].reshape(-1)


def next_token(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target)


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(11)
        return make()

    return build


small_gpt = seeded(lambda: TinyGPT(vocabulary=16, context=8, width=16, heads=2, layers=1))
digits = (torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(12)), torch.arange(4))


EIGHT = FloatFormat("e8m12", 8, 12)  # formats of eight exponent bits are rounded by their bits


HEALTHY: list[tuple[str, Callable[[], nn.Module], Any, Any, dict[str, Any]]] = [
    *[(f"perceptron {level}", seeded(lambda: Network(hidden=32)), digits, F.cross_entropy, {"level": level}) for level in ("O0", "O1", "O2", "O3", "auto")],
    ("perceptron bf16", seeded(lambda: Network(hidden=32)), digits, F.cross_entropy, {"dtype": torch.bfloat16}),
    ("perceptron E5M2", seeded(lambda: Network(hidden=32)), digits, F.cross_entropy, {"dtype": E5M2}),
    ("LeNet emulated", seeded(LeNet5), digits, F.cross_entropy, {"dtype": FP16}),
    ("convolution and batch norm", convolution, images(), F.cross_entropy, {}),
    ("residual block", seeded(lambda: ResidualBlock(1, 4)), images(), lambda o, y: o.mean(), {"dtype": FP16}),
    ("GPT", small_gpt, tokens(), next_token, {}),
    ("GPT auto", small_gpt, tokens(), next_token, {"level": "auto"}),
    ("GRU", seeded(lambda: last_of(nn.GRU(8, 4, batch_first=True))), sequences(), mean, {}),
    ("causal mask of -inf", lambda: nn.Sequential(attention(1.0, causal(4)), nn.Linear(8, 3)), rows(), F.cross_entropy, {}),
    ("boolean mask", lambda: chain(lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3, attn_mask=torch.ones(4, 4, dtype=torch.bool).tril())[0, 0]), rows(), F.cross_entropy, {}),
    ("a mask of -inf in the batch", attention, ((rows()[0], causal(4)), rows()[1]), F.cross_entropy, {}),
    ("an embedding never used", lambda: embedded(lambda w: w[9].fill_(5.0)), (torch.tensor([3, 1]), torch.tensor([0, 1])), F.cross_entropy, {}),
    ("layer norm of constant rows", lambda: chain(lambda x: x * 0 + 2, nn.LayerNorm(8)), rows(), F.cross_entropy, {}),
    ("dropout", lambda: chain(nn.Dropout(0.5)), rows(), F.cross_entropy, {}),
    ("max pooling of padding", seeded(lambda: nn.Sequential(nn.MaxPool2d(3, padding=1), nn.Flatten(), nn.Linear(4, 3))), images(), F.cross_entropy, {}),
    ("sigmoid of large values", lambda: chain(lambda x: torch.sigmoid(x * 1000)), rows(), F.cross_entropy, {}),
    ("logits near the end of float16", lambda: chain(lambda x: x.clamp(-1, 1) * 30000), rows(), lambda o, y: F.cross_entropy(o / 30000, y), {}),
    ("a loss of zero slope", lambda: chain(), rows(), lambda o, y: (o * 0).sum(), {}),
    ("transposed convolution, group norm", upscaled, images(), F.cross_entropy, {"dtype": FP16}),
    ("batch norm in evaluation", lambda: convolution().eval(), images(), F.cross_entropy, {}),
    ("embedding with padding", lambda: words_in(nn.Embedding(10, 8, padding_idx=0)), (torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.tensor([0, 1])), F.cross_entropy, {}),
    ("embedding with sparse gradients", lambda: words_in(nn.Embedding(10, 8, sparse=True)), (torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.tensor([0, 1])), F.cross_entropy, {}),
    ("targets left out", lambda: chain(), (rows()[0], torch.tensor([0, -100, 2, -100])), F.cross_entropy, {}),
    ("complex numbers times real ones", lambda: chain(lambda x: (torch.complex(x.relu(), x) * x.relu()).real), rows(), F.cross_entropy, {"level": "O0"}),
    ("zeros of a product of matrices", lambda: Written(lambda m, x: m.last(m.part(x)), part=Op(lambda x: ((x * 1e-4) @ (torch.eye(8).to(x) * 1e-4)) * 2), last=linear()), rows(), F.cross_entropy, {}),
    ("a layer that is not used", lambda: Written(lambda m, x: m.last(x), last=linear(), rest=linear()), rows(), F.cross_entropy, {}),
    ("weight norm", weight_normed, rows(), F.cross_entropy, {}),
    ("in place", lambda: chain(lambda x: x.mul_(2).relu_()), rows(), F.cross_entropy, {}),
    ("tied layers", lambda: tied(1.0), rows(), F.cross_entropy, {}),
    ("checkpointed", lambda: chain(checkpointed(F.relu)), rows(), F.cross_entropy, {}),
    ("checkpointed, re-entrant", lambda: chain(checkpointed(F.relu, True)), rows(), F.cross_entropy, {}),
    ("masked_fill of -inf", lambda: filled(1), rows(), F.cross_entropy, {}),
    ("packed LSTM, padding of -inf", packed, sequences(), mean, {}),
    ("routing by -inf", routed, rows(), F.cross_entropy, {"level": "O1"}),
    ("routing by -inf, emulated", routed, rows(), F.cross_entropy, {"dtype": FP16}),
    ("a mask of inf with its sign turned, emulated", lambda: chain(lambda x: (-x.masked_fill(torch.arange(8) > 3, math.inf)).softmax(-1)), rows(), F.cross_entropy, {"dtype": FP16}),
    ("the same, rounded by bits", lambda: chain(lambda x: (-x.masked_fill(torch.arange(8) > 3, math.inf)).softmax(-1)), rows(), F.cross_entropy, {"dtype": EIGHT}),
    ("routing by -inf, rounded by bits", routed, rows(), F.cross_entropy, {"dtype": TF32}),
    ("logsumexp with -inf", lambda: chain(lambda x: torch.logsumexp(torch.stack([x, torch.full_like(x, -math.inf)]), 0)), rows(), F.cross_entropy, {}),
    ("missing targets", lambda: chain(), (rows()[0], torch.tensor([1.0, math.nan, 0.0]).expand(4, 3)), lambda o, y: torch.where(y.isnan(), 0.0, o - y.nan_to_num()).square().mean(), {}),
    ("loss from the network itself", lambda: WithLossCell(chain(nn.ReLU()), nn.CrossEntropyLoss()), rows(), None, {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "make", "batch", "loss", "options"), HEALTHY, ids=[row[0] for row in HEALTHY])
def test_no_false_alarm(name, make, batch, loss, options):
    report = diagnose(make(), batch, loss, **({"scale": 2.0**6} | options))
    assert report.verdict == "healthy", str(report)
    assert report.max_scale >= 2.0**6
    assert (report.module, report.operation) == ("", "")
    assert 0 <= report.lost <= 1


def test_scales_are_tried_from_2_to_the_minus_40_to_the_end_of_float32():
    zeros = torch.zeros(1, 1)  # gradients of 0 at any scale
    report = diagnose(nn.Linear(1, 1, bias=False), (zeros, zeros), F.mse_loss, scale=1.0)
    assert (report.max_scale, report.lost) == (2.0**127, 0.0)
    for power, want in ((15, 1.0), (55, 2.0**-40), (56, None)):  # the slope at the output is 2**power times the scale
        loss = partial(lambda gain, out: out.float().sum() * gain, 2.0**power)
        report = diagnose(nn.Linear(1, 1).half(), torch.ones(1, 1).half(), loss, level=None, scale=4.0)
        assert (report.verdict, report.max_scale) == ("scale_too_high" if want == 1 else "gradient_overflow", want)
        assert math.isnan(report.lost_at_scale)


def test_the_lost_share_counts_gradients_that_float16_flushes():
    network, (x, y) = chain(nn.ReLU()), rows()

    def small(out, target):
        return F.cross_entropy(out, target) * 2.0**-22

    report = diagnose(network, (x, y), small, scale=2.0**20)
    wide = torch.autograd.grad(small(network(x), y), list(network.parameters()))
    auto_mixed_precision(network, "O2")
    low = torch.autograd.grad(small(network(x), y), list(network.parameters()))
    gone = sum(int(((a != 0) & (b == 0)).sum()) for a, b in zip(wide, low))
    assert report.lost == gone / sum(int((a != 0).sum()) for a in wide)
    assert report.lost > 0.3
    collapsed = diagnose(network, (x, y), small, level=None, scale=0)  # which is asked about at 1
    assert (collapsed.verdict, collapsed.scale, collapsed.lost) == ("scale_zero", 0, collapsed.lost_at_scale)
    assert report.lost_at_scale < 0.05
    assert "raise it" in diagnose(network, (x, y), small, scale=1.0).advice[0]


def test_the_level_that_the_network_has_is_kept_with_level_none():
    network = auto_mixed_precision(chain(lambda x: (x * 0 + 300) ** 2), "O2")
    kept = diagnose(network, rows(), F.cross_entropy, level=None)
    assert (kept.verdict, kept.level) == ("forward_overflow", "as it is")
    assert diagnose(network, rows(), F.cross_entropy, level="O0").verdict == "healthy"
