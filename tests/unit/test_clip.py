"""Steps and boosts after what people do: groups added or frozen later, sparse and 16-bit gradients, other settings."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

from mpkit import optimizers as opt
from mpkit.step import TrainOneStepCell, TrainOneStepWithLossScaleCell, WithLossCell
from mpkit.step.phases import clip_


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
    made = (
        partial(TrainOneStepWithLossScaleCell, *parts, torch.tensor(1024.0))
        if scaled
        else partial(TrainOneStepCell, *parts, sens=1)
    )
    made(clip_norm=0.5)(torch.tensor([1, 2]), torch.ones(2, 1))
    assert (net[0].weight != before).any(1).tolist() == [False, True, True, False]
    made(clip_norm=math.inf)(torch.tensor([3]), torch.ones(1, 1))  # clips nothing
    assert (net[0].weight != before).any(1).tolist() == [False, True, True, True]


def test_a_loss_may_be_a_function_and_a_backbone_must_be_a_module():
    cell = WithLossCell(nn.Linear(3, 2), nn.functional.mse_loss)
    assert cell(torch.ones(4, 3), torch.ones(4, 2)).shape == ()
    with pytest.raises(TypeError, match=r"^backbone must be an nn.Module, got the class Linear; make one of it"):
        WithLossCell(nn.Linear, nn.MSELoss())
