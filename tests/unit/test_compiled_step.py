"""Training goes on rightly after what people do to it: weights changed from outside, errors, copies, other dtypes."""

from __future__ import annotations

import math

import pytest
import torch
from test_accumulation import accumulating
from torch import nn

from mpkit import optimizers as opt
from mpkit.boost import BoostTrainOneStepWithLossScaleCell, FreezeOpt
from mpkit.scalers import DynamicLossScaleUpdateCell
from mpkit.step import TrainOneStepCell, TrainOneStepWithLossScaleCell, WithLossCell

# --- torch.compile


def counted():
    """(graphs, backend): a backend of the compiler that runs each graph as it is and keeps it in a list."""
    graphs = []
    return graphs, lambda module, _: graphs.append(module) or module.forward


writes_optimizers = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="the compiler of torch 2.11 cannot write an attribute of an optimizer"
)


@writes_optimizers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("strategy", "most"),
    [([0, 1, 2, 1] * 6, 4), ([0, 2, 1], 4), (None, 4)],  # three, and one where a number becomes a variable
    ids=["long", "short", "round robin"],
)
def test_a_compiled_freezeopt_makes_graphs_for_its_groups_and_not_for_its_steps(strategy, most):
    torch.compiler.reset()
    graphs, backend = counted()

    def made():
        params = [nn.Parameter(torch.full((1,), 2.0)) for _ in range(3)]
        return params, FreezeOpt(opt.SGD(params, [0.1] * 30), [params[i:] for i in range(3)], strategy)

    (params, compiled), (twins, eager) = made(), made()
    step = torch.compile(compiled.step, backend=backend)
    for _ in range(26):
        for p in [*params, *twins]:
            p.grad = torch.ones(1)
        step()
        eager.step()
        torch.testing.assert_close(params, twins, rtol=1e-6, atol=1e-7)
    assert compiled.step_index == eager.step_index == 26
    assert 3 <= len(graphs) <= most
    torch.compiler.reset()


@writes_optimizers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [lambda p: opt.SGD(p, [0.1, 0.05] * 8, 0.9), lambda p: torch.optim.AdamW(p, 0.01)])
@pytest.mark.parametrize(
    "cell",
    [
        TrainOneStepCell,
        lambda network, optimizer: TrainOneStepWithLossScaleCell(
            network, optimizer, DynamicLossScaleUpdateCell(1024.0, 2, 2), accumulation_steps=2, clip_norm=1.0
        ),
        lambda network, optimizer: BoostTrainOneStepWithLossScaleCell(
            network, optimizer, DynamicLossScaleUpdateCell(1024.0, 2, 2), boost=accumulating(2)
        ),
    ],
    ids=["plain", "accumulated", "boost's accumulation"],
)
def test_a_compiled_cell_makes_no_graph_for_its_later_steps(cell, make):
    torch.compiler.reset()
    graphs, backend = counted()

    def made():
        torch.manual_seed(0)
        net = nn.Linear(2, 3)
        return cell(WithLossCell(net, nn.CrossEntropyLoss()), make(net.parameters()))

    compiled, eager = made(), made()
    run, counts = torch.compile(compiled, backend=backend), []
    for step in range(16):  # the compiler gives up after eight of one function
        x = torch.full((2, 2), math.inf if step == 5 and cell is not TrainOneStepCell else 1.0 / (step + 1))
        for one in (run, eager):
            one(x, torch.tensor([0, 2]))
        counts.append(len(graphs))
    assert counts[0] > 0
    assert counts[3] == counts[-1]  # all kinds of call have been made once: with an update and without
    assert compiled.index == eager.index == 16
    assert compiled.step.scaling.seed == eager.step.scaling.seed
    torch.testing.assert_close(list(compiled.network.parameters()), list(eager.network.parameters()))
    torch.compiler.reset()
