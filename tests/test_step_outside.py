"""Steps and boosts after what people do: groups added or frozen later, sparse and 16-bit gradients, other settings."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from mpkit import optimizers as opt
from mpkit.boost import (
    AutoBoost,
    BoostTrainOneStepWithLossScaleCell,
    FreezeOpt,
    GradientAccumulation,
    GroupLossScaleManager,
)
from mpkit.boost.grad_centralization import centralize_gradients
from mpkit.diagnose import diagnose
from mpkit.model import Model
from mpkit.step import (
    ScaledStep,
    TrainOneStepCell,
    TrainOneStepWithLossScaleCell,
    WithLossCell,
    build_train_network,
)
from mpkit.step.phases import clip_


def weights(*values: float) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([value])) for value in values]


def pulled(parameters: list[nn.Parameter], gradient: float = 1.0) -> None:
    for p in parameters:
        p.grad = torch.full_like(p, gradient)


# --- clipping


def test_the_norm_of_float16_gradients_may_be_above_the_largest_float16():
    p = nn.Parameter(torch.zeros(6000, dtype=torch.float16))
    p.grad = torch.full_like(p, 1000.0)
    norm = clip_([p], 100.0)
    assert norm.dtype == torch.float32
    want = 1000 * 6000**0.5  # above 65504: with a norm of inf every gradient became 0
    assert norm.item() == pytest.approx(want, rel=6000 * 2.0**-24)  # a sum of 6000 squares, in any order
    assert p.grad.float().norm().item() == pytest.approx(100.0, rel=2.0**-10)  # the coefficient in float16, a product


def test_gradients_of_several_dtypes_are_clipped_together():
    ps = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float16, torch.bfloat16, torch.float64)]
    pulled(ps, 10.0)
    assert clip_(ps, 600.0**0.5 / 2).item() == pytest.approx(600.0**0.5)
    assert [p.grad.dtype for p in ps] == [p.dtype for p in ps]
    for p in ps:
        assert p.grad.double().tolist() == pytest.approx([5.0, 5.0], rel=2.0**-8)


@pytest.mark.parametrize("coalesced", [False, True])
def test_sparse_gradients_are_clipped_by_the_norm_of_their_rows(coalesced):
    sparse, dense = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(2))
    rows = torch.sparse_coo_tensor([[1, 3, 1]], [[1.0, 0.0], [0.0, 2.0], [1.0, 0.0]], (4, 2))
    sparse.grad, dense.grad = rows.coalesce() if coalesced else rows, torch.tensor([2.0, 2.0])
    twin = [nn.Parameter(p.detach().clone()) for p in (sparse, dense)]
    twin[0].grad, twin[1].grad = sparse.grad.to_dense(), dense.grad.clone()
    assert clip_([sparse, dense], 1.0).item() == pytest.approx(nn.utils.clip_grad_norm_(twin, 1.0).item()) == 4.0
    assert sparse.grad.is_sparse
    torch.testing.assert_close(sparse.grad.to_dense(), twin[0].grad)
    torch.testing.assert_close(dense.grad, twin[1].grad)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_cell_clips_and_trains_an_embedding_with_sparse_gradients(scaled):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    before = net[0].weight.detach().clone()
    parts = WithLossCell(net, nn.MSELoss()), opt.LazyAdam(net.parameters(), 0.1)
    cell = TrainOneStepCell(*parts, clip_norm=0.5)
    if scaled:
        cell = TrainOneStepWithLossScaleCell(*parts, torch.tensor(1024.0), clip_norm=0.5)
    cell(torch.tensor([1, 2]), torch.ones(2, 1))
    assert (net[0].weight != before).any(1).tolist() == [False, True, True, False]


# --- an accumulation that was saved with another number of steps


def test_a_begun_accumulation_goes_on_with_its_own_number_of_steps_only():
    def cell(steps: int) -> TrainOneStepCell:
        net = nn.Linear(1, 1)
        loss = WithLossCell(net, nn.MSELoss())
        return TrainOneStepCell(loss, torch.optim.SGD(net.parameters(), 0.1), accumulation_steps=steps)

    one, other = cell(4), cell(8)
    one(torch.ones(1, 1), torch.ones(1, 1))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="accumulation_steps"):
        other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert other.pending == before["_extra_state"]["pending"] == 0
    cell(4).load_state_dict(copy.deepcopy(one.state_dict()))
    for _ in range(3):
        one(torch.ones(1, 1), torch.ones(1, 1))
    other.load_state_dict(copy.deepcopy(one.state_dict()))  # between two updates the number may change


@pytest.mark.parametrize(("theirs", "counted"), [(4, 1), (4, 3), (2, 1)])
def test_gradient_accumulation_refuses_sums_of_another_number_of_steps(theirs, counted):
    (w,) = weights(0.0)

    def made(steps: int) -> GradientAccumulation:
        return GradientAccumulation(steps, torch.optim.SGD([w], 1.0))

    saved, own = made(theirs), made(3)
    for _ in range(counted):
        saved(torch.zeros(()), [torch.ones(1)])
    with pytest.raises(ValueError, match="max_accumulation_step"):
        own.set_extra_state(saved.get_extra_state())
    assert own.counter == 0
    same = made(theirs)
    same.set_extra_state(saved.get_extra_state())
    for _ in range(theirs - counted):
        same(torch.zeros(()), [torch.ones(1)])
    assert w.item() == -1.0


@pytest.mark.parametrize("sparse_first", [True, False])
def test_sparse_and_dense_micro_gradients_of_one_weight_are_added(sparse_first):
    w = nn.Parameter(torch.zeros(3, 1))
    accumulate = GradientAccumulation(2, torch.optim.SGD([w], 1.0))
    micro = [torch.sparse_coo_tensor([[1]], [[2.0]], (3, 1)), torch.ones(3, 1)]
    for gradient in micro if sparse_first else reversed(micro):
        accumulate(torch.zeros(()), [gradient])
    assert w.flatten().tolist() == [-0.5, -1.5, -0.5]


@pytest.mark.parametrize("wrong", ["1", None, True])
def test_a_scaled_step_wants_a_number_to_clip_to(wrong):
    (w,) = weights(1.0)
    step = ScaledStep(torch.optim.SGD([w], 1.0), torch.tensor(8.0))
    step.backward((w * w).sum())
    step.unscale_()
    with pytest.raises(TypeError, match="max_norm must be a number"):
        step.clip_(wrong)
    assert w.grad.item() == 2.0


# --- freezing


@pytest.mark.parametrize("faithful", [False, True])
@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 1.0), lambda p: opt.SGD(p, 1.0)], ids=["torch", "mpkit"])
def test_a_group_added_to_a_freezing_optimizer_is_trained_on_every_step(make, faithful):
    first, last, added = weights(0.0, 0.0, 0.0)
    freezing = FreezeOpt(make([first, last]), [[first, last], [last]], [0, 1], faithful=faithful)
    freezing.add_param_group({"params": added})
    for twin in (freezing, copy.deepcopy(freezing)):
        ps = twin.parameters
        for want in ([-1.0, -1.0, -1.0], [-1.0, -2.0, -2.0]):
            with twin.frozen():
                assert [p.requires_grad for p in ps] == [want[0] > -2 and twin.index == 0, True, True]
            pulled(ps)
            twin.step()
            assert [p.item() for p in ps] == want


def test_a_group_added_to_the_optimizer_inside_is_trained_too_and_one_left_out_is_not():
    first, left_out, added = weights(0.0, 0.0, 0.0)
    inner = torch.optim.SGD([first, left_out], 1.0)
    freezing = FreezeOpt(inner, [[first]])
    inner.add_param_group({"params": [added]})
    assert freezing.trained() == [first, added]
    pulled([first, left_out, added])
    freezing.step()
    assert [p.item() for p in (first, left_out, added)] == [-1.0, 0.0, -1.0]


def test_a_rate_that_somebody_sets_reaches_the_copies_of_a_freezing_optimizer():
    def made() -> FreezeOpt:
        first, last = weights(0.0, 0.0)
        optimizer = torch.optim.SGD([{"params": [first]}, {"params": [last], "lr": 0.5}], 1.0)
        return FreezeOpt(optimizer, [[first, last], [last]], [0, 1], faithful=True)

    freezing, other = made(), made()
    scheduler = torch.optim.lr_scheduler.LambdaLR(freezing, lambda step: 0.5**step)
    for want in ([-1.0, -0.5], [-1.0, -0.75], [-1.25, -0.875]):
        pulled(freezing.parameters)
        freezing.step()
        scheduler.step()
        assert [p.item() for p in freezing.parameters] == want
    other.load_state_dict(freezing.state_dict())
    assert [group["lr"] for group in other.param_groups] == [0.125, 0.0625]
    pulled(other.parameters)
    other.step()
    assert [p.item() for p in other.parameters] == [0.0, -0.0625]


# --- boosts without anything to work on


def test_a_group_without_gradients_is_no_obstacle_to_dividing_by_the_updated_scale():
    (trained,), idle = weights(0.0), weights(0.0)
    manager = GroupLossScaleManager(8.0, [[trained], idle, []], faithful=True)
    pulled([trained])
    assert manager.unscale_and_update_().tolist() == [False] * 3
    assert trained.grad.item() == pytest.approx(1 / (8 * manager.growth))
    with pytest.raises(ValueError, match="assign loss_scale_groups"):
        GroupLossScaleManager(8.0).unscale_and_update_()


def test_sparse_gradients_are_centralized_by_row_for_optimizers_of_torch_too():
    table, twin = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(4, 2))
    rows = torch.sparse_coo_tensor([[1, 3, 1]], [[1.0, 0.0], [0.0, 2.0], [1.0, 0.0]], (4, 2))
    for p, gradient in ((table, rows), (twin, rows.to_dense())):
        optimizer = torch.optim.SGD([{"params": [p], "grad_centralization": True}], 1.0)
        centralize_gradients(optimizer)
        p.grad = gradient
        optimizer.step()
    assert torch.equal(table, twin)
    assert table[1].tolist() == [-1.0, 1.0]


def test_level_o1_trains_a_network_with_a_sparse_embedding():
    net = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    config = {"boost": {"mode": "manual", "grad_freeze": False}, "less_bn": {"fn_flag": False}}
    boosted, optimizer = AutoBoost("O1", config).network_auto_process_train(net, torch.optim.SGD(net.parameters(), 0.5))
    before = net[0].weight.detach().clone()
    boosted(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    change = net[0].weight - before
    assert change[[0, 3]].abs().sum() == 0
    assert change.sum(1).abs().max() < 1e-6  # four numbers of about 0.5 and their sum: roundings of 2^-24 each


def test_a_parameter_added_to_no_loss_scale_group_is_refused_before_anything_moves():
    (grouped,), (added,) = weights(1.0), weights(1.0)
    manager = GroupLossScaleManager(8.0, [[grouped]])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grouped, self.added, self.manager = grouped, added, manager

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside = self.manager(x, 0, 1) * self.grouped * self.added  # both gradients are 8 times too large
            return self.manager(inside, 1, 2).sum()

    optimizer = torch.optim.SGD([grouped], 1.0)
    cell = BoostTrainOneStepWithLossScaleCell(Net(), optimizer, manager)
    cell(torch.full((1,), 0.5))
    before, scale = grouped.item(), manager.scales.tolist()
    assert before == 0.5
    optimizer.add_param_group({"params": [added]})
    with pytest.raises(ValueError, match="no loss scale group"):
        cell(torch.full((1,), 0.5))
    assert (grouped.item(), added.item(), manager.scales.tolist()) == (before, 1.0, scale)


@pytest.mark.parametrize("make", ["WithLossCell", "build_train_network", "Model", "diagnose"])
@pytest.mark.parametrize(
    ("given", "said"),
    [(nn.MSELoss, r"the class MSELoss; make one of it: MSELoss\(\.\.\.\)"), (5, "int"), ("mse", "str")],
)
def test_a_loss_that_is_a_class_or_no_function_is_refused_where_it_enters(make, given, said):
    """torch said "Boolean value of Tensor with more than one value is ambiguous" in the first step."""
    net, batch = nn.Linear(3, 2), (torch.ones(4, 3), torch.ones(4, 2))
    calls = {
        "WithLossCell": lambda: WithLossCell(net, given),
        "build_train_network": lambda: build_train_network(net, opt.Momentum(net.parameters(), 0.1, 0.9), given),
        "Model": lambda: Model(net, given, opt.Momentum(net.parameters(), 0.1, 0.9)),
        "diagnose": lambda: diagnose(net, batch, given),
    }
    with pytest.raises(TypeError, match=f"^loss_fn must be .*, got {said}"):
        calls[make]()


def test_a_loss_may_be_a_function_and_a_backbone_must_be_a_module():
    cell = WithLossCell(nn.Linear(3, 2), nn.functional.mse_loss)
    assert cell(torch.ones(4, 3), torch.ones(4, 2)).shape == ()
    with pytest.raises(TypeError, match=r"^backbone must be an nn.Module, got the class Linear; make one of it"):
        WithLossCell(nn.Linear, nn.MSELoss())
