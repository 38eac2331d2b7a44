"""The parts of a step by themselves, where their answers turn: what other processes bring, where a scale comes from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mpkit.boost.group_loss_scale import GroupLossScaleManager
from mpkit.step import TrainOneStepWithLossScaleCell, build_train_network, distributed


class Work:
    """What an asynchronous reduction gives: something to wait for."""

    def __init__(self) -> None:
        self.waited: list[object] = []

    def wait(self, limit: object = None) -> None:
        self.waited.append(limit)


class Other:
    """Stands for torch.distributed with one more process, whose gradients are known."""

    ReduceOp = distributed.dist.ReduceOp

    def __init__(self, gradients: list[Tensor | None]) -> None:
        self.gradients = gradients
        kinds = [0 if g is None else 1 if g.is_sparse else 2 for g in gradients]
        self.kinds = torch.tensor(kinds, dtype=torch.uint8)

    def get_world_size(self, group: object = None) -> int:
        return 2

    def all_reduce(self, tensor: Tensor, op: object = None, group: object = None, async_op: bool = False) -> Work:
        if op is self.ReduceOp.MAX:
            tensor.copy_(torch.maximum(tensor, self.kinds))
        else:  # what this process sends is divided already, so the other one's is too
            tensor.add_(torch.cat([self.gradients[i].to_dense().reshape(-1) / 2 for i in self.dense]))
        return Work()

    def all_gather_object(self, parts: list[object], own: object, group: object = None) -> None:
        theirs = next(g for g in self.gradients if g is not None and g.is_sparse).coalesce()
        parts[:] = [own, (theirs.indices(), theirs.values())]


ROWS = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), torch.tensor([[2.0, 4.0], [6.0, 8.0]]), (4, 2))
FULL = torch.arange(8.0).view(4, 2)


@pytest.mark.parametrize(
    ("own", "theirs"),
    [(None, FULL), (ROWS, FULL), (FULL, FULL), (None, ROWS), (ROWS, ROWS)],
    ids=["missing and dense", "sparse and dense", "both dense", "missing and sparse", "both sparse"],
)
def test_a_mean_over_processes_whatever_kind_of_gradient_each_of_them_has(
    own: Tensor | None, theirs: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the mean of both as dense matrices; a parameter that nobody has a gradient for stays without one."""
    p, unused = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(3))
    p.grad = None if own is None else own.clone()
    other = Other([theirs, None])
    other.dense = [0]
    monkeypatch.setattr(distributed, "dist", other)
    distributed.average_([p, unused])
    mine = torch.zeros(4, 2) if own is None else own.to_dense()
    assert p.grad is not None
    assert torch.equal(p.grad.to_dense(), (mine + theirs.to_dense()) / 2)
    assert p.grad.is_sparse == (theirs.is_sparse and own is not FULL)
    assert unused.grad is None


# --- where a scale comes from


def test_a_loss_with_scales_by_group_starts_its_gradient_from_1() -> None:
    """So the gradients of a group carry the scale of that group and nothing else, and the step is the plain one."""

    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1, bias=False)
            self.manager = GroupLossScaleManager(4.0, [[self.layer.weight]])

        def forward(self, x: Tensor) -> Tensor:
            return self.manager(self.layer(self.manager(x, 0, 1)), 1, 2).sum()

    net = Marked()
    seen: list[Tensor] = []
    net.layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    before = net.layer.weight.detach().clone()
    cell = TrainOneStepWithLossScaleCell(net, torch.optim.SGD([net.layer.weight], 0.5), net.manager)
    cell(torch.tensor([[1.0, 3.0]]))
    # two products lie between: each may be rounded once more on another processor
    torch.testing.assert_close(seen[0], torch.tensor([[4.0, 12.0]]), rtol=2.0**-21, atol=0)
    torch.testing.assert_close(net.layer.weight.detach(), before - torch.tensor([[0.5, 1.5]]), rtol=0, atol=2.0**-20)


class SquaredError(nn.Module):
    """torch 2.11 has no gradient of its own one for two dtypes."""

    def forward(self, out: Tensor, label: Tensor) -> Tensor:
        return (out - label).square().mean()


@pytest.mark.parametrize(
    ("level", "dtype"),
    [
        ("O0", torch.float64),
        ("O1", torch.float64),
        ("O2", torch.float32),
        ("O3", torch.float32),
        ("auto", torch.float32),
    ],
)
def test_a_level_that_casts_results_computes_the_loss_in_float32(level: str, dtype: torch.dtype) -> None:
    """MindSpore's build_train_network: at O0 and O1 the loss takes what the network and the label are."""
    net = nn.Linear(3, 2)
    cell = build_train_network(net, torch.optim.SGD(net.parameters(), 0.1), SquaredError(), level)
    out = cell(torch.ones(4, 3), torch.ones(4, 2, dtype=torch.float64))
    assert (out if isinstance(out, Tensor) else out.loss).dtype is dtype
