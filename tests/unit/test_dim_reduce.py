"""Dimension-reduced training: components, files, snapshots, and a line search that disturbs nothing."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import Written
from torch import nn

from mpkit.boost.dim_reduce import DimReduce, WeightSnapshots, prepare_pca, read_pca_rows, write_pca_files
from mpkit.boost.pca import pca_matrix, read_snapshots
from mpkit.step import TrainOneStepCell, WithLossCell


def walk(samples: int, weights: int, seed: int = 0) -> np.ndarray:
    """Samples whose variance falls quickly from direction to direction, as weights on a training path do."""
    rng = np.random.default_rng(seed)
    spread = 4.0 ** -np.arange(min(samples, weights))
    return rng.normal(size=(samples, len(spread))) * spread @ rng.normal(size=(len(spread), weights)) + 3.0


# files


@pytest.mark.parametrize(("rows", "ranks"), [(5, 2), (4, 3), (8, 4), (3, 1)])
def test_no_row_is_lost_on_the_way_to_the_ranks(rows: int, ranks: int, tmp_path: Path) -> None:
    matrix = walk(rows, 6)
    write_pca_files(tmp_path / "full.npy", matrix, ranks)
    parts = [read_pca_rows(tmp_path / "full.npy", rank, 0.0) for rank in range(ranks)]
    assert np.array_equal(np.concatenate(parts), matrix)
    assert not [f for f in tmp_path.iterdir() if f.name.startswith(".")]  # no temporary file stays


def test_a_reader_waits_for_the_marker_and_gives_up_after_the_timeout(tmp_path: Path) -> None:
    full = tmp_path / "full.npy"
    writer = threading.Timer(0.3, write_pca_files, (full, np.eye(2), 1))
    writer.start()
    assert np.array_equal(read_pca_rows(full, 0, 10.0), np.eye(2))
    writer.join()
    (tmp_path / "save_pca_end.txt").unlink()
    with pytest.raises(RuntimeError, match=r"rank 1 waited 0.2 s for save_pca_end.txt"):
        read_pca_rows(full, 1, 0.2)


def test_rows_of_an_earlier_run_with_another_size_are_refused(tmp_path: Path) -> None:
    net = nn.Linear(2, 1)
    np.save(tmp_path / "full.npy", walk(4, 3))
    prepare_pca(net, 4, pca_mat_path=tmp_path / "full.npy")
    write_pca_files(tmp_path / "full.npy", walk(6, 3), 2)
    with pytest.raises(ValueError, match=r"need 2 components .* remove the files of earlier runs"):
        prepare_pca(net, 4, pca_mat_path=tmp_path / "full.npy", rank=1, rank_size=2)  # only reads
    assert prepare_pca(net, 4, pca_mat_path=tmp_path / "full.npy", rank=5, rank_size=6).shape == (0, 3)
    np.save(tmp_path / "full.npy", np.ones((4, 3), dtype=int))
    with pytest.raises(ValueError, match=r"of int64 from 'full.npy'"):
        prepare_pca(net, 4, pca_mat_path=tmp_path / "full.npy")


def test_as_many_components_as_samples_warn_that_the_last_is_noise(recwarn: pytest.WarningsRecorder) -> None:
    for samples in (4, 3):
        assert pca_matrix(walk(samples, 3), 3).shape == (3, 3)
        assert len(recwarn) == (samples == 3)


# snapshots


def test_a_hook_records_snapshots_that_come_back_in_network_order(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    net[2].bias.requires_grad_(False)
    trained = [p for p in net.parameters() if p.requires_grad]
    snapshots = WeightSnapshots(net, tmp_path / "new", every=3)
    cell = TrainOneStepCell(WithLossCell(net, nn.MSELoss()), torch.optim.SGD(trained, lr=0.1), hooks=[snapshots])
    rows = []
    for step in range(1, 8):
        cell(torch.randn(8, 3), torch.randn(8, 1))
        if step % 3 == 0:
            rows.append(nn.utils.parameters_to_vector(trained).detach().double())
    files = sorted(f.name for f in (tmp_path / "new").iterdir())
    assert files == ["step_00000003.ckpt", "step_00000006.ckpt"]
    for other in (".step_00000004.ckpt", "notes.txt"):
        (tmp_path / "new" / other).write_text("no snapshot")
    got = read_snapshots(tmp_path / "new", net)
    assert np.array_equal(got, torch.stack(rows).numpy())


# the step


def bowl(curvature: list[float]) -> Any:
    """loss = (w - c)^T A (w - c) / 2 with a diagonal A: a minimum that a second-order method finds quickly."""
    a = torch.tensor(curvature, dtype=torch.float64)
    return Written(lambda net: 0.5 * (net.a * (net.w - 1) ** 2).sum(), w=nn.Parameter(torch.zeros_like(a)), a=a)


def descend(net: nn.Module, reduce: DimReduce, steps: int, *inputs: Any) -> list[float]:
    losses = []
    for _ in range(steps):
        net.zero_grad()
        loss = net(*inputs)
        loss.backward()
        reduce(loss.detach(), [p.grad for p in net.parameters()], None, None, *inputs)
        losses.append(loss.item())
    return losses


def build(net: nn.Module, pca: Any, **options: Any) -> DimReduce:
    weights = list(net.parameters())
    return DimReduce(net, torch.optim.SGD(weights, lr=1.0), weights, pca, len(pca), **options)


def test_with_every_direction_in_the_plane_a_bowl_is_solved_like_bfgs() -> None:
    net = bowl([0.5, 1.0, 1.5])
    losses = descend(net, build(net, np.eye(3), sigma=0.1), 12)
    assert losses[-1] < 1e-12 * losses[0]


def test_a_step_that_overshoots_is_shortened_and_one_that_cannot_help_is_left_out() -> None:
    for curvature, rho in ((1.5, 0.55), (9.0, 0.0)):  # w 0 -> 1.5 overshoots a little, 0 -> 9 far too much
        net = bowl([curvature])
        reduce = build(net, np.eye(1), alpha=0.0)
        descend(net, reduce, 1)
        assert reduce.search.rho == rho
        assert net.w.item() == pytest.approx(rho * curvature)
        assert reduce.search.accepted == (rho > 0)
        assert len(reduce.search.losses) == 2
        assert (reduce.last_projection.item() == 0) == (rho == 0)


def busy() -> nn.Module:
    """A network with everything that a second forward pass would disturb."""
    body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    return Written(lambda net, x, y: F.mse_loss(F.dropout(net.body(x), 0.2), y), body=body)


def test_trials_repeat_the_dropout_and_leave_statistics_and_random_numbers_alone() -> None:
    torch.manual_seed(3)
    net, batch = busy(), (torch.randn(16, 4), torch.randn(16, 2))
    size = sum(p.numel() for p in net.parameters())
    reduce = build(net, torch.zeros(1, size), alpha=0.0)  # no direction: a trial is the same weights again
    net.train()
    loss = net(*batch)
    loss.backward()
    buffers, state = copy.deepcopy(dict(net.named_buffers())), torch.get_rng_state()
    reduce(loss.detach(), [p.grad for p in net.parameters()], None, None, *batch)
    assert reduce.search.losses == (loss.item(), loss.item())
    assert all(torch.equal(b, buffers[name]) for name, b in net.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)
    assert net.training


def test_the_state_resumes() -> None:
    straight, stopped = bowl([0.5, 2.0, 1.0]), bowl([0.5, 2.0, 1.0])
    pca = np.linalg.qr(walk(3, 3))[0][:2]
    one, two = build(straight, pca), build(stopped, pca)
    descend(straight, one, 6)
    descend(stopped, two, 3)
    state = copy.deepcopy(two.state_dict())
    assert set(state) == {"inverse_hessian", "last_projection", "last_move", "momentum"}  # the components are a file's
    two = build(stopped, pca)
    two.load_state_dict(state)
    descend(stopped, two, 3)
    assert torch.equal(straight.w, stopped.w)


def test_true_gradients_stay_in_place() -> None:
    net = bowl([0.5, 2.0, 1.0])
    reduce, loss = build(net, np.linalg.qr(walk(3, 3))[0][:2]), net()
    loss.backward()
    grad = net.w.grad.clone()
    reduce(loss.detach(), [net.w.grad], None, None)
    assert torch.equal(net.w.grad, grad)
    half = DimReduce(net, torch.optim.SGD([net.w], 1.0), [net.w], np.eye(3)[1:2], 2, rank=1, rank_size=2)
    with pytest.raises(ValueError, match="process group"):  # of two, one of which is not there
        half(loss.detach(), [net.w.grad])


@pytest.mark.gpu
def test_the_gpu_takes_the_steps_of_the_cpu_and_repeats_its_dropout_too() -> None:
    one, two = bowl([0.5, 1.0, 1.5]), bowl([0.5, 1.0, 1.5]).cuda()
    two.a = two.a.cuda()
    descend(one, build(one, np.eye(3)[:2], alpha=0.1), 8)
    descend(two, build(two, np.eye(3)[:2], alpha=0.1), 8)
    torch.testing.assert_close(two.w.cpu(), one.w)
    net, batch = busy().cuda(), (torch.randn(16, 4).cuda(), torch.randn(16, 2).cuda())
    reduce = build(net, torch.zeros(1, sum(p.numel() for p in net.parameters())), alpha=0.0)
    loss = net(*batch)
    loss.backward()
    reduce(loss.detach(), [p.grad for p in net.parameters()], None, None, *batch)
    assert reduce.search.losses == pytest.approx((loss.item(), loss.item()), rel=1e-5)
