"""The presets apex_O1 and torch_autocast do at each operator what apex and CUDA's autocast do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from autocast_oracle import KINDS, Apply, cuda_autocast, disagreement, dtypes_of, faked
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mpkit.casting import auto_mixed_precision, cast_like, to_float
from mpkit.casting.operators import LISTS
from mpkit.casting.rules import listed
from mpkit.formats import FP16

A = torch.rand(4, 4)
IMAGE = torch.rand(1, 2, 6, 6)
CLASSES, PLACES = torch.tensor([0, 1, 2, 3]), torch.zeros(1, 6, 6, dtype=torch.long)

# what is on no list of one name, or was once wrong; the lists themselves are added below
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "1 / x": (lambda x: 1 / x, (A,)),
    "y / x": (lambda y, x: y / x, (A, A)),
    "x ** 2": (lambda x: x**2, (A,)),
    "2 ** x": (lambda x: 2**x, (A,)),
    "triplet_margin_with_distance_loss": (F.triplet_margin_with_distance_loss, (A, A, A)),
    "inner of a number": (torch.inner, (A[0, 0], A)),
    "sum of a number": (lambda x: x.sum_to_size(()), (A[0, 0],)),
    "sum to its own size": (lambda x: x.sum_to_size(4, 4), (A,)),
    "sum to its own size, as a tuple": (lambda x: x.sum_to_size((4, 4)), (A,)),
    "sum to a row": (lambda x: x.sum_to_size(1, 4), (A,)),
    "the kernel of a resampling": (lambda x: torch.ops.aten._upsample_bilinear2d_aa(x, [3, 3], False), (IMAGE,)),
    "the kernel of another": (lambda x: torch._C._nn.upsample_nearest2d(x, [3, 3]), (IMAGE,)),
    "the kernel of a norm": (lambda x: torch.frobenius_norm(x, 1), (A,)),
    "a loss's kernel": (lambda x: torch._C._nn.nll_loss2d(x, PLACES.to(x.device), None, 1, -100), (IMAGE,)),
    "the kernel of a grid": (lambda x, y: torch.grid_sampler(x, y, 0, 0, False), (IMAGE, torch.rand(1, 3, 3, 2))),
    "the kernel of a convolution": (
        lambda x, w: torch.convolution(x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        (IMAGE, torch.rand(3, 2, 3, 3)),
    ),
    "cross": (torch.cross, (A[:, :3], A[:, :3], 1)),
    "add one value": (torch.add, (A, A[0, 0])),
    "mul one value": (lambda x, y: x * y, (A[0, 0], A)),
    "local_response_norm": (F.local_response_norm, (IMAGE, 2)),
    "lp_pool2d": (F.lp_pool2d, (IMAGE, 2.0, 2)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), (IMAGE,)),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), (IMAGE,)),
    "area": (lambda x: F.interpolate(x, scale_factor=0.5, mode="area"), (IMAGE,)),
    "upsample": (lambda x: F.upsample(x, scale_factor=2, mode="bilinear"), (IMAGE,)),
    "area in order": (lambda x: F.interpolate(x, None, 0.5, "area"), (IMAGE,)),
    "nearest in order": (lambda x: F.interpolate(x, None, 0.5, "nearest"), (IMAGE,)),
    "sum told": (lambda x: x.sum(dtype=torch.float16), (A,)),
    "vector_norm told": (lambda x: torch.linalg.vector_norm(x, dtype=torch.float16), (A.half(),)),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), (IMAGE,)),
    "native_layer_norm": (lambda x: torch.native_layer_norm(x, (4,), None, None, 1e-5), (A,)),
    "renorm": (lambda x: x.renorm(2, 0, 1.0), (A,)),
    "nuclear norm": (lambda x: torch.norm(x, "nuc"), (A,)),
    "exp_": (lambda x: x.clone().exp_(), (A,)),
    "scatter_add": (lambda x, y: x.scatter_add(0, CLASSES.to(x.device).expand(4, 4), y), (A, A)),
    "grid_sample": (lambda x, y: F.grid_sample(x, y, align_corners=False), (IMAGE, torch.rand(1, 3, 3, 2))),
}
_UNARY = "acos asin cosh tan erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*CALLS, *_UNARY.split()])
def test_the_torch_preset_gives_the_dtypes_of_cuda_autocast(name: str) -> None:
    call, args = CALLS.get(name) or (getattr(torch, name), (A,))
    told = [text for kind in KINDS if (text := disagreement(call, args, {}, kind))]
    assert not told


def test_the_oracle_is_cuda_autocast_indeed() -> None:
    with FakeTensorMode() as mode, cuda_autocast():
        half, double = faked(mode, "float16", A), faked(mode, "float64", A)
        got = dtypes_of(lambda: (half.exp(), half @ half, double @ double))
    assert got == [torch.float32, torch.float16, torch.float64]


@pytest.mark.parametrize("call", [torch.exp, lambda x: x @ x, lambda x: torch.cat([x, A]), F.relu])
def test_autocast_leaves_float64_alone(call: Callable[..., Tensor]) -> None:
    """What computes in 16 bits, in float32, in the wider of two, and what is on no list: as without it, bit for bit."""
    x = A.double() / 3
    got = cast_like(Apply(call), "torch_autocast")(x)
    assert got.dtype is torch.float64
    assert torch.equal(got, call(x))


def test_numbers_that_float16_cannot_hold_survive_where_autocast_widens() -> None:
    calls = {
        "square": (torch.square, 300.0, 90000.0),
        "1 / x": (lambda x: 1 / x, 2.0**-17, 2.0**17),
        "distance": (lambda x: F.pairwise_distance(x, -x, eps=0.0), 60000.0, 120000.0),
    }
    for name, (call, given, want) in calls.items():
        got = cast_like(Apply(call), "torch_autocast")(torch.tensor([given]).half())
        assert (got.dtype, float(got.sum())) == (torch.float32, want), name


def listed_by_torch() -> set[str]:
    """torch ships the header that its own lists stand in."""
    text = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    start = text.index("#define AT_FORALL_LOWER_PRECISION_FP")
    return set(re.findall(r"_\((?:ADD_NS\()?(\w+)", text[start:]))


def test_the_preset_knows_every_operator_that_torch_lists() -> None:
    assert listed_by_torch() - listed("torch", torch.float16).handlers.keys() == set()


def test_every_listed_operator_of_autocast_is_listed_by_torch() -> None:
    listed = listed_by_torch()
    ours = {name for names in LISTS["torch"].values() for name in names} - {*LISTS["torch"]["banned"]}
    spelled = {"grid_sample": "grid_sampler", "vecdot": "linalg_vecdot", "multi_dot": "linalg_multi_dot"}
    # torch makes these of listed ones
    made_of = {"square", "sum_to_size", "cross_entropy", "inner", "pairwise_distance", "trapz", "trapezoid"}
    made_of |= {"cumulative_trapezoid"}
    if torch.__version__ < "2.13":  # the preset is that of 2.13, which lists one more
        made_of |= {"rms_norm"}
    assert {name for name in ours - made_of if spelled.get(name, name) not in listed} == set()


# --- apex -------------------------------------------------------------------------------------------------------------


def apex(call: Callable[..., Any]) -> Any:
    return cast_like(Apply(call), "apex_O1")


def test_apex_in_place_operations_keep_the_precision_of_what_they_write_into() -> None:
    x = torch.rand(2, 2).half()
    assert apex(lambda x: x.addmm_(A[:2, :2], A[:2, :2]))(x.clone()).dtype is torch.float16
    want = x + A[:2, :2].half()
    got = x.clone()
    apex(lambda x: x.add_(A[:2, :2]))(got)
    assert torch.equal(got, want)


def test_binary_cross_entropy_is_banned_and_at_apex_on_16_bits_only() -> None:
    with pytest.raises(RuntimeError, match="banned"):
        cast_like(Apply(lambda p: F.binary_cross_entropy(p, p)), "torch_autocast")(torch.zeros(2))
    call = apex(lambda p: F.binary_cross_entropy(p, torch.ones_like(p)))
    assert torch.equal(call(torch.full((3,), 0.5)), torch.tensor(0.5).log().neg())
    with pytest.raises(NotImplementedError, match="with_logits"):
        call(torch.full((3,), 0.5).half())
    halves = apex(lambda p: F.binary_cross_entropy(p, torch.ones(3).half()))  # the target may have 16 bits
    assert torch.equal(halves(torch.full((3,), 0.5)), torch.tensor(0.5).log().neg())


def test_apex_leaves_in_place_operations_on_wider_numbers_where_they_are() -> None:
    x = torch.zeros(2, dtype=torch.float64)
    assert apex(lambda x: x.exp_())(x) is x
    assert x.tolist() == [1.0, 1.0]


def test_apex_gives_float32_to_the_cpu_and_leaves_batch_norm_as_its_input() -> None:
    assert apex(lambda x: x.cpu())(A.half()).dtype is torch.float32
    for dtype in (torch.float16, torch.float32):
        assert cast_like(nn.BatchNorm2d(2), "apex_O1")(IMAGE.to(dtype)).dtype is dtype


def test_the_same_in_an_emulated_format() -> None:
    net = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
    want = cast_like(net, "apex_O1", torch.float16)(IMAGE)
    got = cast_like(net, "apex_O1", FP16)(IMAGE)
    # batch norm's native kernel adds up in another order, and a last bit of float32 can turn the rounding to 16 bits
    torch.testing.assert_close(got, want.float(), rtol=2**-10, atol=2**-14)
    assert torch.equal(cast_like(Apply(torch.square), "torch_autocast", FP16)(A * 300), (A * 300) ** 2)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Own(nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.weight)


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto"])
def test_the_way_out_for_an_autograd_function_of_ones_own(level):
    """As `auto_mixed_precision` says: in a module that `to_float` puts to float32."""
    net = auto_mixed_precision(nn.Sequential(nn.Linear(4, 4), Own(4, 4, bias=False)), level, torch.bfloat16)
    to_float(net[1], torch.float32)
    net(torch.randn(3, 4)).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())
