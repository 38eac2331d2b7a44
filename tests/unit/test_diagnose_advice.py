# ruff: noqa: E501  (one report per line reads best)
"""Advice that works, and networks, batches and losses of every kind."""

from __future__ import annotations

import collections
import copy
import math
import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import Op, Written
from test_diagnose import FAULTS, Fault, chain, linear, rows
from torch import Tensor, nn

from mpkit.casting import auto_mixed_precision, to_float
from mpkit.diagnose import Report, diagnose
from mpkit.diagnose.copies import tensors_of
from mpkit.diagnose.report import AS_IT_IS, IN_AUTOCAST, Cure
from mpkit.diagnose.watch import Operand
from mpkit.diagnose.words import WORDS
from mpkit.formats import BF16, FP16, TF32, FloatFormat

OVERFLOWS = [fault for fault in FAULTS if fault.verdict in ("forward_overflow", "gradient_overflow")]


GONE = ("healthy", "scale_too_high", "precision_lost")  # the loss scale is another matter


@pytest.mark.parametrize("fault", OVERFLOWS, ids=lambda fault: fault.name)
def test_every_cure_of_an_overflow_works_when_it_is_followed(fault: Fault) -> None:
    options: dict[str, Any] = {"scale": 2.0**8, "level": "O2"} | dict(fault.options)
    report = diagnose(fault.network(), fault.batch(), fault.loss, **options)
    assert report.cures, str(report)
    for cure in report.cures:
        assert str(cure) in str(report)
        network, loss, given = fault.network(), fault.loss, dict(options)
        if cure.kind == "keep":
            # as the advice says, after the level: level=None asks about the network as it is
            auto_mixed_precision(network, options["level"], options.get("dtype", torch.float16))
            to_float(network.get_submodule(cure.what), torch.float32)
            given["level"] = None
        elif cure.kind == "level":
            given["level"] = cure.what
        elif cure.kind == "bfloat16":
            given["dtype"] = BF16 if isinstance(given.get("dtype"), FloatFormat) else torch.bfloat16
        after = diagnose(network, fault.batch(), loss, **given)
        assert after.verdict in GONE or after.module != report.module, (str(cure), str(after))
        if fault.verdict == "forward_overflow":
            assert after.verdict in GONE, (str(cure), str(after))


def test_a_loss_outside_of_the_network_is_advised_to_compute_in_float32() -> None:
    torch.manual_seed(0)
    network = Written(lambda m, x: (m.layer(x), "its name"), layer=nn.Linear(8, 3, bias=False))
    loss, batch = lambda out: (out[0] * 0 + 300).square().mean(), torch.rand(4, 8)
    report = diagnose(network, batch, loss, level="auto", scale=1.0)
    assert (report.verdict, report.module) == ("forward_overflow", "(loss function)")
    assert [cure.kind for cure in report.cures] == ["loss", "bfloat16"]
    wide = diagnose(network, batch, lambda out: loss((out[0].float(),)), level="auto", scale=1.0)
    assert wide.verdict == "healthy"
    steep = diagnose(network, batch, lambda out: (out[0] * 0).sqrt().sum(), level="auto", scale=1.0)
    assert (steep.module, steep.gradient_of) == ("(loss function)", "sqrt")


HINTED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "log": (lambda x: torch.log(x * 0), lambda x: torch.log(x * 0 + 1e-3)),
    "div": (lambda x: x * 0 / (x * 0).abs(), lambda x: x * 0 / ((x * 0).abs() + 1e-3)),
    "exp": (lambda x: (x * 0 + 12).exp(), lambda x: (x * 0 + 12 - (x * 0 + 12).amax()).exp()),
    "softmax": (lambda x: masked(x, 0).softmax(-1), lambda x: masked(x, 1).softmax(-1)),
    "sqrt": (lambda x: (x * 0).sqrt(), lambda x: (x * 0 + 1e-3).sqrt()),
    "rsqrt": (lambda x: (x * 0) * (spread(x) + 1e-9).rsqrt(), lambda x: (x * 0) * (spread(x) + 1e-3).rsqrt()),
    "sum": (lambda x: x + MANY.to(x).sum() * 1e-6, lambda x: x + MANY.to(x).mean() * 0.07),
    "pow": (lambda x: (x * 0 + 300) ** 2, lambda x: ((x * 0 + 300) / 256) ** 2),
    "mm": (lambda x: (x * 0 + 300) @ WIDE.to(x), lambda x: (x * 0 + 1) @ WIDE.to(x)),
    "mul": (lambda x: (x * 0 + 300) * (x * 0 + 300) / 300, lambda x: (x * 0 + 300) / 300 * (x * 0 + 300)),
}
MANY, WIDE = torch.ones(70_000), torch.full((8, 8), 300.0)


def masked(x: Tensor, kept: int) -> Tensor:
    return (x * 0).masked_fill(torch.arange(8) >= kept, -math.inf)


def spread(x: Tensor) -> Tensor:
    return (x * 0).var(-1, keepdim=True)


@pytest.mark.parametrize("key", sorted({*WORDS["hints"]} - {"weight_norm", "bmm"}))  # bmm: test_diagnose_silent
def test_the_hint_for_an_operation_ends_its_fault(key: str) -> None:
    fault, mended = HINTED[key]
    report = diagnose(chain(Op(fault)), rows(), F.cross_entropy, scale=1.0)
    assert report.advice[0] == WORDS["hints"][key], str(report)
    assert diagnose(chain(Op(mended)), rows(), F.cross_entropy, scale=1.0).verdict == "healthy"


BROKEN = [fault for fault in FAULTS if fault.verdict in ("bad_data", "weights_non_finite")]


@pytest.mark.parametrize("fault", BROKEN, ids=lambda fault: fault.name)
def test_bad_data_and_weights_are_well_once_repaired(fault: Fault) -> None:
    def repaired(t: Any) -> Any:
        if isinstance(t, tuple):
            return tuple(map(repaired, t))
        return t.nan_to_num(0.5, 0.5, 0.5) if t.is_floating_point() else t

    network = copy.deepcopy(fault.network())
    network.load_state_dict({name: repaired(t) for name, t in network.state_dict().items()})
    assert diagnose(network, repaired(fault.batch()), fault.loss, scale=1.0).verdict == "healthy"


BRINGS_IN = Op(lambda x: torch.where(x > 1e-6, torch.full_like(x, math.inf), x))


@pytest.mark.parametrize("after", [nn.Linear(8, 8), Op(lambda x: x * 0), nn.LayerNorm(8)])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "auto"])
def test_an_infinity_of_a_constant_is_named_where_it_arises(level: str, after: nn.Module) -> None:
    network = chain(BRINGS_IN, after)
    report = diagnose(network, rows(), F.cross_entropy, level=level)
    assert (report.verdict, report.module) == ("model_non_finite", "fault")
    assert report.operation in ("full_like", "fill", "where")


TIMES = Op(lambda x: x * 1e6)


COMPLEX = Op(lambda x: (torch.complex(x, x) * 1e30 * 1e30).real)


SPARSE = Op(lambda x: torch.sparse.mm((x * 1e30 * 1e30).to_sparse(), torch.ones(8, 8)))


SUM = Op(lambda x: (x.to_sparse() * 1e30 * 1e30).to_dense())


@pytest.mark.parametrize("last", [COMPLEX, SPARSE, SUM], ids=["complex", "made sparse", "sparse"])
def test_an_infinity_in_a_complex_or_sparse_tensor_is_named_where_it_arises(last: nn.Module) -> None:
    report = diagnose(chain(last), rows(), F.cross_entropy)
    assert (report.verdict, report.module, report.operation) == ("model_non_finite", "fault", "mul")


def test_tensors_of_eight_bits_are_read() -> None:
    def narrow(x: Tensor) -> Tensor:
        return x + x.detach().to(torch.float8_e4m3fn).to(x.dtype) * 0

    assert diagnose(chain(Op(narrow)), rows(), F.cross_entropy, scale=1.0).verdict == "healthy"
    beyond = Op(lambda x: (x.detach() * 1e5).to(torch.float8_e5m2).to(x.dtype) + x)
    report = diagnose(chain(beyond), rows(), F.cross_entropy, level="O0")
    assert (report.verdict, report.module, report.operation) == ("model_non_finite", "fault", "cast to float8_e5m2")


@dataclass
class Sample:
    x: Tensor


@pytest.mark.parametrize(
    ("wrap", "read", "place"),
    [
        (lambda x: collections.UserDict(x=x), lambda x: x, "batch[0]['x']"),
        (Sample, lambda given: given.x, "batch[0].x"),
        (lambda x: {"x": x}, lambda x: x, "batch[0]['x']"),
    ],
    ids=["a mapping of one's own", "a dataclass", "a dict"],
)
def test_a_batch_in_any_container_is_looked_into(wrap: Callable, read: Callable, place: str) -> None:
    class Takes(nn.Linear):
        def forward(self, *given: Any, **named: Tensor) -> Tensor:
            return super().forward(read(*given, **named))

    network, (x, y) = Takes(8, 3), rows()
    report = diagnose(network, (wrap(x * torch.nan), y), F.cross_entropy)
    assert (report.verdict, report.module) == ("bad_data", place)
    after = diagnose(network, (wrap(x.half()), y), F.cross_entropy, scale=1.0)
    assert after.verdict == "healthy"  # float32 runs in float32


def test_a_batch_is_looked_into_six_deep() -> None:
    nest: Any = torch.ones(1)
    for _ in range(6):
        nest = [nest]
    assert [[name for name, _ in tensors_of("x", deep)] for deep in (nest, [nest])] == [["x[0][0][0][0][0][0]"], []]


class Doubles(nn.Module):
    """Writes into what it is given, counts its calls, and draws from three generators."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x *= 2
        drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))  # noqa: NPY002
        return x


drawn: list[tuple[float, float, float]] = []


def test_network_batch_loss_and_random_states_are_left_alone_and_every_run_meets_the_same() -> None:
    drawn.clear()
    network, (x, y) = nn.Sequential(Doubles(), linear(), TIMES, linear(3, 3)), rows()
    loss = Written(lambda m, output, target: F.cross_entropy(m.norm(output), target), norm=nn.BatchNorm1d(3))
    given = x.clone()
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index] # noqa: NPY002
    report = diagnose(network, (x, y), loss)
    assert report.verdict == "forward_overflow"
    assert len(drawn) >= 3  # in float32, at the level, for a cure
    assert len(set(drawn)) == 1
    assert torch.equal(x, given)
    assert int(network[0].calls) == 0  # type: ignore[arg-type]
    assert int(loss.norm.num_batches_tracked or 0) == 0
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index] # noqa: NPY002
    assert states[:2] == after[:2]
    assert torch.equal(states[2], after[2])


def test_a_loss_that_is_a_method_of_the_network_computes_with_the_copy() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.weight = nn.Linear(8, 3), nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

        def loss(self, output: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(output, target) * self.weight * torch.finfo(torch.float16).max

    network = Own()
    report = diagnose(network, rows(), network.loss, level="O0", scale=1.0)
    assert report.verdict == "healthy"
    assert network.weight.grad is None
    network.weight.data.fill_(torch.inf)
    report = diagnose(network, rows(), network.loss, level="O0", scale=1.0)
    assert (report.verdict, report.module) == ("weights_non_finite", "parameter weight")


def test_what_cannot_be_copied_or_does_not_run_is_refused_in_a_sentence() -> None:
    network = chain()
    network.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"Sequential cannot be copied: cannot pickle '_thread.lock' object; take off"):
        diagnose(network, rows(), F.cross_entropy)
    with pytest.raises(RuntimeError, match=r"does not even run in float32: .*must have the same dtype"):
        diagnose(chain(Op(lambda x: x.half())), rows(), F.cross_entropy)


def test_a_cure_that_a_network_refuses_is_no_cure_and_no_error() -> None:
    def strict(x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16:
            raise ValueError("not in bfloat16")
        return x

    report = diagnose(chain(TIMES, Op(strict)), rows(), F.cross_entropy)
    assert (report.verdict, report.cures) == ("forward_overflow", ())


def rms(module: Any, x: Tensor) -> Tensor:
    """A norm of one's own whose inputs are so small that the slope of its root leaves float16."""
    small = x / 100
    return module.weight * small * torch.rsqrt(small.pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("scale", [1.0, 2.0**16, 2.0**40])
def test_gradients_that_overflow_without_a_scale_are_named_at_scale_1_whatever_the_scale(scale: float) -> None:
    network = chain(Written(rms, weight=nn.Parameter(torch.ones(8))))
    report = diagnose(network, rows(), F.cross_entropy, scale=scale)
    assert (report.verdict, report.module, report.gradient_of) == ("gradient_overflow", "fault", "rsqrt"), str(report)
    assert report.scale == scale
    assert next((cure.kind, cure.what) for cure in report.cures) == ("keep", "fault")


@pytest.mark.parametrize("dtype", [torch.float16, FP16, TF32], ids=str)
def test_a_log_of_zero_that_is_left_out_later_is_no_overflow_of_any_format(dtype: Any) -> None:
    """So relative positions are put into buckets: what is rounded is -inf before."""

    def buckets(x: Tensor) -> Tensor:
        places = torch.arange(8)
        far = (torch.log(places.to(x) / 4) / 3 * 8).to(torch.long)
        return x + torch.where(places < 4, places, far).to(x)

    assert diagnose(chain(Op(buckets)), rows(), F.cross_entropy, dtype=dtype, scale=1.0).verdict == "healthy"


@pytest.mark.parametrize("scale", [1.0, 2.0**40])
@pytest.mark.parametrize("hides", [torch.tanh, lambda x: x.nan_to_num() * 4])
def test_an_overflow_that_a_later_operation_hides_is_the_first_one(hides: Callable[..., Tensor], scale: float) -> None:
    """Neither what it leads to in the forward pass nor a scale that is too high as well comes before it."""
    report = diagnose(chain(TIMES, Op(hides)), rows(), F.cross_entropy, scale=scale)
    assert (report.verdict, report.module, report.operation) == ("forward_overflow", "fault", "mul"), str(report)


def test_hooks_of_the_reader_belong_to_their_module_and_their_parameter() -> None:
    network = chain(nn.ReLU())
    network[1].register_forward_pre_hook(lambda _module, given: (given[0] * 1e6,))
    assert diagnose(network, rows(), F.cross_entropy).module == "fault"
    network = chain(nn.ReLU())
    seen: list[Tensor] = []
    network[0].weight.register_hook(lambda grad: seen.append(grad) or grad * 1e30 * 1e30)
    report = diagnose(network, rows(), F.cross_entropy, level="O0", scale=1.0)
    assert report.verdict == "model_non_finite", str(report)
    assert seen
    assert network[0].weight.grad is None


def inside(network: nn.Module) -> nn.Module:
    """Enters autocast itself, as wrappers of a training do."""

    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return m.network(x)

    return Written(forward, network=network)


@pytest.mark.parametrize("level", [None, "O2"])
def test_autocast_inside_of_a_network_is_no_fault_of_the_model(level: str | None) -> None:
    report = diagnose(inside(chain(TIMES)), rows(), F.cross_entropy, level=level, scale=1.0)
    assert (report.verdict, report.module, report.operation) == ("forward_overflow", "network.fault", "mul")
    assert report.loss == pytest.approx(F.cross_entropy(chain(TIMES)(rows()[0]), rows()[1]).item(), rel=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        seen = diagnose(inside(chain(nn.ReLU())), rows(), F.cross_entropy, level=None, scale=1.0)
        assert torch.is_autocast_enabled("cpu")
    exact = F.cross_entropy(chain(nn.ReLU())(rows()[0]), rows()[1])
    assert seen.loss == pytest.approx(exact.item(), rel=1e-6)
    assert seen.low_loss != seen.loss


def test_a_dict_of_inputs_is_a_batch() -> None:
    x, y = rows()

    whole = Written(lambda m, x, labels: {"loss": F.cross_entropy(m.inner(x), labels)}, inner=chain(TIMES))
    for given in ({"x": x, "labels": y}, collections.UserDict(x=x, labels=y)):
        report = diagnose(whole, given, lambda out: out["loss"], scale=1.0)
        assert (report.verdict, report.module) == ("forward_overflow", "inner.fault")
    report = diagnose(whole, {"x": x * torch.nan, "labels": y}, lambda out: out["loss"], scale=1.0)
    assert (report.verdict, report.module) == ("bad_data", "batch['x']")
    with pytest.raises(TypeError, match=r"one tensor or a dict of inputs, got tuple; several inputs go into a tuple"):
        diagnose(chain(), (x, y, y), F.cross_entropy)


# --- which sentences a report says


def keys_of(report: Report) -> str:
    """The keys of its sentences, line by line; of one in parts of its own the line."""

    def key(line: str) -> str:
        for part in ("report", "advice", "hints"):
            for name, words in WORDS[part].items():
                if re.fullmatch("(.*)".join(map(re.escape, re.split(r"\{.*?\}", words))), line):
                    return name
        return line

    return " ".join(key(line.strip().removeprefix("-> ")) for line in str(report).splitlines()[1:])


def operand(low: float) -> tuple[Operand]:
    return (Operand(torch.float16, (2, 3), low, 2.0, 1),)


BELOW, AT_0 = {"phase": "forward", "operands": operand(-1e-3)}, {"phase": "forward", "operands": operand(0.0)}
NONE, CURE = {"max_scale": None}, (Cure("bfloat16"),)


@pytest.mark.parametrize(
    ("verdict", "fields", "keys"),
    [
        ("healthy", {"level": IN_AUTOCAST, "lost": 0.2}, "as_is lost"),
        ("healthy", {"lost": 0.2, "lost_at_scale": 0.05, "lost_at_best": 0.05}, "level lost"),
        ("healthy", {"lost": 0.5, "lost_at_scale": 0.4, "lost_at_best": 0.2}, "level lost raise_it"),
        ("healthy", {"lost": 0.5, "lost_at_scale": 0.4, "lost_at_best": 0.21}, "level lost no_scale_helps"),
        ("healthy", {"lost": 0.1, "lost_at_scale": 0.09, "lost_at_best": 0.06}, "level lost no_scale_helps"),
        ("gradient_overflow", {"operation": "cast to float16"}, "born level would_fit divide"),
        ("gradient_overflow", NONE, "level divide"),
        ("gradient_overflow", {"operation": "mul", "gradient_of": "rsqrt"}, "born level rsqrt would_fit divide"),
        ("gradient_overflow", {"operation": "sqrt"} | BELOW, "born went_in level negative would_fit divide"),
        ("gradient_overflow", {"operation": "sqrt"} | BELOW | {"phase": "backward"}, "born went_in level sqrt would_fit divide"),
        ("forward_overflow", {"operation": "sqrt"} | AT_0, "born went_in level sqrt no_cure hidden"),
        ("forward_overflow", {"operation": "logical_not", "level": AS_IT_IS}, "born as_is not_tried hidden"),
        ("forward_overflow", {"operation": "weight_norm_interface", "low_loss": math.nan, "cures": CURE}, f"born level weight_norm {CURE[0]} not_the_scale"),
        ("precision_lost", {"module": "buffer x"}, "digits level wide_buffer"),
        ("forward_overflow", {"module": "buffer x", "operation": "copy"}, "born level no_cure hidden"),
        ("lost_in_forward", {"operation": "exp", "cures": CURE}, f"zeros level no_scale_helps {CURE[0]}"),
        ("gradients_non_finite", {"module": "x", "beside": "mul in x"}, "held level clear beside"),
        ("scale_zero", {"scale": 0.0}, "begin_again"),
        ("scale_zero", {"scale": 0.0} | NONE, ""),
    ],
)  # fmt: skip
def test_what_a_report_says(verdict: str, fields: dict[str, Any], keys: str) -> None:
    seen: dict[str, Any] = {"low_loss": 1.0, "scale": 2.0**16, "level": "O2", "max_scale": 2.0**20} | fields
    assert keys_of(Report(verdict, 1.0, dtype="float16", **seen)) == keys


def test_numbers_in_a_report() -> None:
    report = Report("healthy", 1.0, 1.0, 2.0**16, "O2", "float16", max_scale=None, lost=0.1234, lost_at_scale=0.0567)
    level = "The level is O2 in float16. Your loss scale is 2^16 = 65536. No loss scale works."
    lost = "Of the gradient values, 12.3 % are lost to zero at scale 1, and 5.7 % at 2^16 = 65536."
    assert str(report).splitlines()[1:3] == [f"  {level}", f"  {lost}"]
    assert str(operand(-1.0)[0]) == "a float16 tensor of 2x3 with values from -1 to 2; 1 are not finite"
