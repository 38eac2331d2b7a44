"""One loss scale per group: markers multiply, the manager divides by what was used."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpkit.boost import GroupLossScaleManager
from mpkit.boost.group_loss_scale import GROWTH, SHRINK
from mpkit.step import ScaledStep


class Chain(nn.Module):
    """Linear layers with tanh, each its own scale group, markers before, between and after."""

    def __init__(self, sizes: list[int], init: Any = 1024.0, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.manager = GroupLossScaleManager(init, [list(layer.parameters()) for layer in self.layers], **options)

    def forward(self, x: Tensor, marked: bool = True) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(self.manager(x, i, i + 1) if marked else x))
        return self.manager(x, len(self.layers), len(self.layers) + 1) if marked else x


def chain(groups: int = 3, **options: Any) -> tuple[Chain, Tensor]:
    torch.manual_seed(groups)
    return Chain([4] * (groups + 1), **options), torch.randn(6, 4, requires_grad=True)


def gradients(net: Chain, x: Tensor, **options: Any) -> list[Tensor]:
    net.zero_grad()
    x.grad = None
    net(x, **options).square().sum().backward()
    return [x.grad, *(p.grad for layer in net.layers for p in layer.parameters())]


def test_a_scale_changed_between_forward_and_backward_is_the_one_used() -> None:
    net, x = chain(1, init=2.0)
    true = gradients(net, x, marked=False)[1].clone()
    net.zero_grad()
    loss = net(x).square().sum()
    net.manager.update_loss_scale_status(0, 8.0)
    loss.backward()
    assert torch.equal(net.layers[0].weight.grad, true * 16)


def test_groups_and_ratios_that_are_refused_change_nothing() -> None:
    manager = chain(2, init=[2.0, 4.0])[0].manager
    groups = manager.loss_scale_groups
    with pytest.raises(ValueError, match="each of 1 groups"):
        manager.loss_scale_groups = groups[:1]
    for layer, ratio, words in ((0, math.nan, "update_ratio"), (2, 0.5, "layer"), (-1, 0.5, "layer")):
        with pytest.raises(ValueError, match=words):
            manager.update_loss_scale_status(layer, ratio)
    for marker in ((-1, 0), (0, -1), (4, 0), (0, 4)):
        with pytest.raises(ValueError, match=r"groups 0\.\.3"):
            manager(torch.ones(1), *marker)
    assert [manager(torch.ones(1), *marker).item() for marker in ((0, 3), (3, 0))] == [1, 1]
    assert (manager.loss_scale_groups, manager.scales.tolist()) == (groups, [2.0, 4.0])


def test_a_scale_may_start_at_a_bound_and_obeys_one_that_is_moved() -> None:
    """Also on the way to the other bound, and without bounds it grows to inf."""
    weights = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    largest = torch.finfo(torch.float32).max
    manager = GroupLossScaleManager([1.0, 2.0**24, 64.0], [[w] for w in weights])
    GroupLossScaleManager(8.0, growth=1.0, min_scale=8.0, max_scale=8.0)
    free = GroupLossScaleManager(largest, [weights], min_scale=0.0, max_scale=math.inf)
    manager.min_scale, manager.max_scale = 8.0, 16.0
    for w, grad in zip(weights, (1.0, 1.0, math.inf)):
        w.grad = torch.tensor([grad])
    manager.unscale_and_update_()
    assert manager.scales.tolist() == [8.0, 16.0, 16.0]
    weights[2].grad = torch.ones(1)
    free.unscale_and_update_()
    assert free.scales.tolist() == [math.inf]
    free.loss_scale_groups = []
    assert free.scales.tolist() == []


@pytest.mark.parametrize(("blame", "shrunk"), [("first", [0, 1, 0, 0]), ("every", [1, 1, 0, 0])])
def test_an_overflow_is_blamed_on_the_group_where_it_began(blame: Any, shrunk: list[int]) -> None:
    net, x = chain(4, init=64.0, blame=blame)
    net.layers[1].weight.register_hook(lambda g: g * math.inf)  # its weight, and what goes on to group 1
    net.layers[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * math.inf,))
    gradients(net, x)
    assert net.manager.unscale_and_update_().tolist() == [True, True, False, False]
    moved = [SHRINK if s else (1.0 if reached else GROWTH) for s, reached in zip(shrunk, [1, 1, 0, 0])]
    torch.testing.assert_close(net.manager.scales, 64 * torch.tensor(moved), rtol=1e-6, atol=0)
    assert net.manager.passed.all()  # the next step starts from nothing


def test_an_overflow_that_leaves_no_trace_in_the_weights_of_its_group_is_found() -> None:
    net, x = chain(3, init=64.0)
    net.layers[1].requires_grad_(False)  # group 2 is frozen and has no gradients of its own
    net.layers[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * math.inf,))
    net(x).square().sum().backward()
    assert net.manager.unscale_and_update_().tolist() == [True, True, False]
    torch.testing.assert_close(net.manager.scales, 64 * torch.tensor([1.0, SHRINK, GROWTH]), rtol=1e-6, atol=0)


def test_a_loss_that_is_not_finite_shrinks_the_last_group() -> None:
    net, x = chain(2, init=64.0)
    (net(x).square().sum() * math.nan).backward()
    assert net.manager.unscale_and_update_().tolist() == [True, True]
    torch.testing.assert_close(net.manager.scales, 64 * torch.tensor([1.0, SHRINK]), rtol=1e-6, atol=0)


def test_the_scales_travel_in_the_state_and_stay_float32_when_the_network_is_cast() -> None:
    net, _ = chain(2, init=4096.0)
    other, _ = chain(2, init=8.0)
    step, twin = (ScaledStep(torch.optim.SGD(n.parameters(), 0.1), n.manager) for n in (net, other))
    for one, two in ((net, other), (step, twin)):  # either is enough
        net.manager.update_loss_scale_status(1, GROWTH)
        two.load_state_dict(one.state_dict())
        assert torch.equal(other.manager.table, net.manager.table)
    other.half()
    assert other.layers[0].weight.dtype == torch.float16
    assert torch.equal(other.manager.table, net.manager.table)


@pytest.mark.gpu
def test_the_gpu_scales_like_the_cpu_and_follows_the_network_there() -> None:
    net, x = chain(3, init=[16.0, 256.0, 4.0])
    other, _ = chain(3, init=[16.0, 256.0, 4.0])
    other.cuda()
    gradients(net, x)
    gradients(other, x.detach().cuda().requires_grad_())
    other.layers[1].bias.grad[0] = net.layers[1].bias.grad[0] = math.nan
    assert net.manager.unscale_and_update_().tolist() == other.manager.unscale_and_update_().tolist()
    torch.testing.assert_close(other.manager.table.cpu(), net.manager.table)
    torch.testing.assert_close(other.layers[0].weight.grad.cpu(), net.layers[0].weight.grad, rtol=1e-4, atol=1e-5)


def test_a_group_without_gradients_is_no_obstacle_to_dividing_by_the_updated_scale():
    trained, idle = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    manager = GroupLossScaleManager(8.0, [[trained], [idle], []], faithful=True)
    trained.grad = torch.ones(1)
    assert manager.unscale_and_update_().tolist() == [False] * 3
    assert trained.grad.item() == pytest.approx(1 / (8 * manager.growth))
    with pytest.raises(ValueError, match="assign loss_scale_groups"):
        GroupLossScaleManager(8.0).unscale_and_update_()
    assert manager.get_drop_overflow_update()
    assert [*GroupLossScaleManager(8.0).state_dict()] == ["table"]
    for init, wrong in ((8.0, {"shrink": 0.0}), (8.0, {"shrink": 1.0}), (0.0, {"min_scale": 0.0})):
        with pytest.raises(ValueError, match="shrink < 1" if init else "init_loss_scale"):
            GroupLossScaleManager(init, [[trained]], **wrong)
