"""LessBN: what goes, what stays, and that train and eval agree."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit import networks
from mpkit.boost import LessBN
from mpkit.boost.less_bn import NormalizedLinear
from mpkit.casting import auto_mixed_precision, ledger, to_float

COUNTS = {"resnet18": (11, 9), "resnet34": (19, 17), "resnet50": (36, 17)}


def norms(net: nn.Module) -> set[str]:
    return {name for name, m in net.named_modules() if isinstance(m, nn.BatchNorm2d)}


@pytest.mark.parametrize("small_input", [True, False])
@pytest.mark.parametrize(("name", "counts"), COUNTS.items())
def test_residual_networks_keep_one_norm_per_block_and_the_stem(name: str, counts: tuple, small_input: bool) -> None:
    net = getattr(networks, name)(width=4, small_input=small_input)
    before = norms(net)
    report = LessBN(net).report
    assert (len(report.removed), len(report.kept)) == counts
    assert set(report.removed) == before - norms(net)
    assert norms(net) == set(report.kept)
    assert "bn1" in report.kept
    assert sum("downsample" in name for name in report.removed) == (4 if name == "resnet50" else 3)
    last = "bn3" if name == "resnet50" else "bn2"
    assert all(kept.endswith(last) for kept in report.kept if kept != "bn1")


class Swapped(networks.ResidualBlock):
    """The same block with the addition written the other way round, which MindSpore overlooks."""

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(torch.add(shortcut, self.bn2(self.conv2(y))))


class DependsOnData(networks.ResidualBlock):
    """A block that torch.fx cannot trace."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(x + 0)


class RootDependsOnData(networks.ResNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(x + 0)


def test_the_order_of_operands_changes_nothing_and_what_cannot_be_traced_stays() -> None:
    want = LessBN(networks.resnet18(width=4)).report
    assert LessBN(networks.ResNet(Swapped, (2, 2, 2, 2), width=4)).report == want
    assert LessBN(networks.ResNet(DependsOnData, (2, 2, 2, 2), width=4)).report.removed == {}


def test_parts_are_traced_where_the_whole_cannot_be() -> None:
    net = RootDependsOnData(networks.ResidualBlock, (2, 2, 2, 2), width=4)
    with pytest.raises(ValueError, match=r"needs a network that torch.fx can trace"):
        LessBN(net, faithful=True)
    assert LessBN(net).report == LessBN(networks.resnet18(width=4)).report


def test_inverted_residuals_lose_the_norm_after_the_expansion_and_the_last_one() -> None:
    net = networks.MobileNetV2([(1, 4, 1, 1), (6, 6, 2, 2), (6, 8, 1, 1)], stem=4, head=16)
    gone = {"features.4.conv.1", "features.5.conv.1", "features.6.conv.1", "features.8"}
    assert LessBN(net).report.removed.keys() == gone


@pytest.mark.parametrize(
    ("channels", "gone"), [((4, 5, 4), {"4"}), ((1, 2, 1), {"4"}), ((4, 4, 3), {}), ((4, 5, 5), {})]
)
def test_a_residual_is_inverted_where_it_widens_and_narrows(
    channels: tuple[int, int, int], gone: Iterable[str]
) -> None:
    a, b, c = channels
    up, down = (nn.Conv2d(a, b, 1), nn.BatchNorm2d(b), nn.ReLU6()), (nn.Conv2d(b, c, 1), nn.BatchNorm2d(c))
    inside = nn.Conv2d(b, b, 3, padding=1, groups=b), nn.BatchNorm2d(b), nn.ReLU6()
    near = nn.ReLU(), nn.ReLU(), nn.Linear(4, 4)  # a linear layer so near to the input is not the last one
    assert LessBN(nn.Sequential(*near, *up, *inside, *down)).report.removed.keys() == {*gone}


class First(nn.Sequential):
    """A dense layer that reads a concatenation of one, which is none."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, super().forward(torch.cat([x], 1))], 1)


def test_dense_layers_lose_the_norm_that_reads_a_concatenation() -> None:
    report = LessBN(networks.DenseNet((3, 2), growth=4)).report
    assert set(report.removed) == {"features.2.norm1", "features.3.norm1", "features.9.norm1"}
    layers = [part for _ in range(2) for part in (nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 2, 1))]
    assert LessBN(First(*layers)).report.removed == {}


class Plain(nn.Module):
    """Additions that are no residual blocks: two branches of equal depth, and a branch without a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.bn_a, self.bn_b = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.c, self.d, self.e = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.bn_e = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn_a(self.a(x)) + self.bn_b(self.b(x))
        return self.d(F.relu(self.c(x))) + self.bn_e(self.e(x)) + 1


def test_other_sums_are_left_alone() -> None:
    assert LessBN(Plain()).report.removed == {}


def test_a_norm_shared_by_two_places_stays() -> None:
    block = networks.ResidualBlock(4, 4)
    block.bn2 = block.bn1
    assert LessBN(block).report.removed == {}


def test_twice_is_once_and_wrapping_a_wrapped_network_too() -> None:
    net = networks.resnet18(width=4)
    first = LessBN(net, True)
    state = copy.deepcopy(first.state_dict())
    for again in (LessBN(first, True), LessBN(net, True), LessBN(nn.Sequential(net), True)):
        assert again.report == first.report
    assert LessBN(first).network is net
    torch.testing.assert_close(first.state_dict(), state, rtol=0, atol=0)
    assert sum(isinstance(m, NormalizedLinear) for m in net.modules()) == 1


def test_the_converted_layer_keeps_the_weight_object_and_drops_the_bias_unless_asked() -> None:
    net = networks.LeNet5()
    weight, bias = net.fc3.weight, net.fc3.bias
    LessBN(net, True)
    assert net.fc3.weight is weight
    assert net.fc3.bias is None
    assert net.fc3.multiplier.item() == 1
    other = networks.LeNet5()
    bias = other.fc2.bias
    assert LessBN(other, True, last_fc="fc2", keep_bias=True).report.normalized == ("fc2",)
    assert other.fc2.bias is bias
    bound = NormalizedLinear(256, 64).weight.abs().max().item() * 16  # of a uniform draw within 1 / sqrt(256)
    assert 0.99 < bound <= 1
    with pytest.raises(ValueError, match=r"last_fc must name an nn.Linear of the network .*fc1, fc2.*'nope'"):
        LessBN(networks.LeNet5(), True, last_fc="nope")


def test_below_the_limit_of_a_norm_the_gradient_is_the_formulas() -> None:
    layer = NormalizedLinear(4, 3).double()
    tiny = torch.full((1, 4), 1e-3, dtype=torch.float64, requires_grad=True)  # squared norm 4e-6, below 1e-4
    layer(tiny).sum().backward()
    unit = layer.weight / layer.weight.norm(dim=1, keepdim=True)
    torch.testing.assert_close(tiny.grad, (unit.sum(0) / 1e-2)[None])


def test_half_precision_norms_do_not_overflow() -> None:
    layer = NormalizedLinear(4, 3).half()
    y = layer(torch.full((1, 4), 1e4, dtype=torch.float16))
    assert y.dtype == torch.float16
    assert y.isfinite().all()


# --- LessBN's last layer


def test_a_layer_that_a_transformer_reads_itself_is_not_normalised():
    net = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 1, 8, batch_first=True))
    report = LessBN(net, True, keep_bias=True).report
    assert report.normalized == ("0",)
    assert type(net[1].linear2) is nn.Linear
    net.eval()(torch.zeros(1, 2, 4))


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "to_float"])
def test_a_last_layer_that_was_cast_is_cast_as_before(level):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if level == "to_float":
        to_float(net[1], torch.float16)
    else:
        auto_mixed_precision(net, level)
    LessBN(net, True)
    assert type(net[1]) is NormalizedLinear
    with ledger(net) as made:
        net(torch.ones(1, 4))
    products = [row for row in made.rows if row.module == "1" and "linear" in row.operation]
    assert [row.compute for row in products] == ["float16"]


class Louder(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)), "weight_norm"),
        (lambda: nn.utils.spectral_norm(nn.Linear(4, 2)), "weight_norm"),
        (lambda: nn.LazyLinear(2), "one batch"),
        (lambda: Louder(4, 2), "Louder"),
    ],
)
def test_a_last_layer_that_cannot_be_normalised_is_named(last, words):
    with pytest.raises(ValueError, match=words):
        LessBN(nn.Sequential(nn.Linear(4, 4), last()), True)
