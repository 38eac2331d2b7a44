"""Training that skips, resumes and shares: no read on the host, processes that disagree, a process that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from oracles import FIXED_RATE, MEMBERS
from support import ROOT, in_processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from mpkit.boost import AutoBoost, BoostTrainOneStepCell
from mpkit.casting import auto_mixed_precision
from mpkit.model import Callback, Checkpoint, Model
from mpkit.optimizers import Adam, Momentum
from mpkit.policies import preset
from mpkit.scalers import (
    DynamicLossScaleManager,
    DynamicLossScaler,
    DynamicLossScaleUpdateCell,
    PolicyLossScaler,
    StaticLossScaler,
)
from mpkit.schedules import CosineDecayLR
from mpkit.step import Hook, ScaledStep, TrainOneStepWithLossScaleCell, WithLossCell

LEVELS = ("O0", "O1", "O2", "O3", "auto")


class HostReads(TorchDispatchMode):
    """Counts the operations that read a tensor's value on the host."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += str(func) in ("aten._local_scalar_dense.default", "aten.nonzero.default")
        return func(*args, **(kwargs or {}))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(step: int, bad: tuple[int, ...] = (3,), rows: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(rows, 4, generator=generator), torch.randn(rows, 2, generator=generator)
    if step in bad:
        x[-1, 0] = torch.inf
    return x, y


# --- nothing is read on the host


def test_reads_are_counted():
    with HostReads() as reads:
        torch.ones(()).item()
    assert reads.count == 1


SENSES = {
    "tensor": lambda: torch.tensor(1024.0),
    "static": lambda: StaticLossScaler(1024),
    "dynamic": lambda: DynamicLossScaler(1024, 2, 3),
    "cell": lambda: DynamicLossScaleUpdateCell(1024.0, 2, 3),
    "deepspeed": lambda: PolicyLossScaler(preset("deepspeed")),
}
OPTIMIZERS = {
    "fused SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "fused Adam": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "Momentum": lambda p: Momentum(p, 0.1, 0.9),
    "Adam": lambda p: Adam(p, 0.01),
}


@pytest.mark.parametrize("sense", SENSES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_twenty_steps_of_a_cell_read_nothing(optimizer, sense):
    net = network()
    made = OPTIMIZERS[optimizer](net.parameters())
    cell = TrainOneStepWithLossScaleCell(WithLossCell(net, nn.MSELoss()), made, SENSES[sense](), clip_norm=1.0)
    data = [batch(step) for step in range(20)]
    with HostReads() as reads:
        skipped = [cell(*pair).overflow for pair in data]
    assert reads.count == 0
    assert [bool(s) for s in skipped] == [step == 3 for step in range(20)]


@pytest.mark.parametrize("name", MEMBERS)
def test_an_optimizer_that_may_skip_reads_nothing(name):
    params = list(network().parameters())
    rate = {} if name in FIXED_RATE else {"lr": CosineDecayLR(0.0, 0.1, 10)}
    optimizer = MEMBERS[name](params, weight_decay=0.01, **rate)
    for p in params:
        p.grad = torch.ones_like(p)
    before = [p.clone() for p in params]
    optimizer.found_inf = torch.ones(())
    with HostReads() as reads:
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before))
    optimizer.found_inf = torch.zeros(())
    with reads:
        optimizer.step()
    assert reads.count == 0
    assert not any(torch.equal(p, q) for p, q in zip(params, before))


@pytest.mark.parametrize("name", MEMBERS)
def test_torchs_grad_scaler_drives_every_optimizer(name):
    through, plain = list(network().parameters()), list(network().parameters())
    optimizer, other = MEMBERS[name](through), MEMBERS[name](plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        scaler.scale(torch.ones(()))  # makes its scale tensor
        for i, (p, q) in enumerate(zip(through, plain)):
            q.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i))
            p.grad = q.grad * scaler.get_scale()
        if step == 1:
            through[0].grad[0, 0] = torch.inf
        else:
            other.step()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.global_step == 2
    for a, b in zip(through, plain):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Momentum", "SGD-dampening", "Adam", "AdamWeightDecay", "AdaMax", "Lamb", "LARS"])
def test_torchs_cyclic_schedulers_drive_rate_and_momentum(name):
    def seen(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[tuple[float, float]]:
        scheduler, found = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=6), []
        for _ in range(4):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
            group = optimizer.param_groups[0]
            found.append((group["lr"], group["betas"][0] if "betas" in group else group["momentum"]))
            scheduler.step()
        return found

    ours, theirs = (list(network().parameters()) for _ in "ab")
    torch.testing.assert_close(seen(MEMBERS[name](ours), ours), seen(torch.optim.SGD(theirs, 0.1, 0.9), theirs))


def test_a_step_is_the_loop_written_out():
    """Scale, backward, unscale, check, clip, update or skip, adjust: beside torch alone."""
    net, plain = network(), network()
    made, scaler = Momentum(net.parameters(), 0.1, 0.9), DynamicLossScaler(1024, 2, 3)
    cell = TrainOneStepWithLossScaleCell(WithLossCell(net, nn.MSELoss()), made, scaler, clip_norm=0.5)
    other, scale, good = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9), 1024.0, 0
    for step in range(12):
        x, y = batch(step, bad=(3, 4, 9))
        out = cell(x, y)
        other.zero_grad()
        loss = nn.functional.mse_loss(plain(x), y)
        loss.backward()
        finite = all(bool(p.grad.isfinite().all()) for p in plain.parameters())
        assert (bool(out.overflow), bool(loss.isfinite())) == (not finite, finite)
        if finite:
            assert out.loss == loss
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            other.step()
        good = good + 1 if finite else 0
        scale = max(1.0, scale / 2) if not finite else scale * 2 if good == 3 else scale
        good %= 3
        assert float(scaler.scale_value) == scale
    for p, q in zip(net.parameters(), plain.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_micro_batches_are_one_batch(parts):
    net, whole = network(), network()
    cells = [
        TrainOneStepWithLossScaleCell(
            WithLossCell(n, nn.MSELoss()), Momentum(n.parameters(), 0.1, 0.9), DynamicLossScaler(64, 2, 3), **options
        )
        for n, options in ((net, {"accumulation_steps": parts}), (whole, {}))
    ]
    for step in range(6):
        x, y = batch(step)
        for a, b in zip(x.chunk(parts), y.chunk(parts)):
            out = cells[0](a, b)
        assert bool(out.overflow) == bool(cells[1](x, y).overflow)
    for p, q in zip(net.parameters(), whole.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_hook_sees_every_phase_in_order():
    seen = []
    phases = [f"{when}_{what}" for what in ("forward", "backward", "unscale", "update") for when in ("before", "after")]

    class Notes(Hook):
        pass

    for phase in phases:
        setattr(Notes, phase, lambda _self, _ctx, phase=phase: seen.append(phase))
    net = network()
    cell = TrainOneStepWithLossScaleCell(
        WithLossCell(net, nn.MSELoss()), Momentum(net.parameters(), 0.1, 0.9), torch.tensor(64.0), hooks=[Notes()]
    )
    cell(*batch(0))
    assert seen == phases


# --- processes that disagree

RANKS, STEPS = 2, 8
WAYS = ("own", "hand", "halves", "ddp", "ddp halves")
SCALES = [1024.0, 1024.0, 2048.0, 1024.0, 1024.0, 1024.0, 2048.0, 2048.0]


def shared(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Rank 1 has an inf in step 3; the batches of both ranks together are the batch of one process."""
    x, y = batch(step, rows=2 * 6)
    return x.chunk(2)[rank], y.chunk(2)[rank]


def in_cell(net: nn.Module, rank: int, parts: int = 1) -> list[tuple[bool, float]]:
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, fused=True)
    cell = TrainOneStepWithLossScaleCell(
        WithLossCell(net, nn.MSELoss()),
        optimizer,
        DynamicLossScaleUpdateCell(1024.0, 2, 3),
        accumulation_steps=parts,
    )
    found = []
    for step in range(STEPS):
        for x, y in zip(*(part.chunk(parts) for part in shared(step, rank))):
            out = cell(x, y)
        found.append((bool(out.overflow), float(out.scale)))
    return found


def by_hand(net: nn.Module, rank: int) -> list[tuple[bool, float]]:
    step = ScaledStep(
        torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, fused=True), DynamicLossScaleUpdateCell(1024.0, 2, 3)
    )
    found = []
    for index in range(STEPS):
        x, y = shared(index, rank)
        step.backward(nn.functional.mse_loss(net(x), y))
        overflow = step.update()
        found.append((bool(overflow), float(step.scale)))
    return found


def at_level(rank: int, level: str, fully: bool) -> list[Tensor]:
    """Gradients of a network at a level under DDP, or FSDP2."""
    from torch.distributed.fsdp import fully_shard

    net = auto_mixed_precision(network(), level, torch.bfloat16)
    if fully:
        parallel = fully_shard(net, mesh=dist.init_device_mesh("cpu", (RANKS,)))
    else:
        parallel = DistributedDataParallel(net)
    parallel(shared(0, rank)[0]).float().square().sum().backward()
    grads = [p.grad for p in net.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]


class Gaps(nn.Module):
    """Weights that both processes use, that rank 0 uses, that rank 1 uses, and that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(2) for _ in range(4))

    def forward(self, rank: int) -> Tensor:
        return self.weights[0].sum() + self.weights[1 + rank].sum()


def with_gaps(rank: int, merged: bool) -> list[float]:
    """The weights after a step of processes that lack different gradients, averaged or merged by AdaSum."""
    flags = {"mode": "manual", "adasum": merged}
    boost = AutoBoost("O0", {"boost": flags, "common": {"device_number": 1}})
    net = Gaps()
    made = Momentum(net.parameters(), 0.25, 0.0, weight_decay=0.0 if merged else 0.5)
    BoostTrainOneStepCell(net, made, boost=boost)(rank)
    return [p[0].item() for p in net.parameters()]


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    ways = {"own": in_cell, "hand": by_hand, "halves": lambda net, rank: in_cell(net, rank, 2)}
    ways["ddp"] = lambda net, rank: in_cell(DistributedDataParallel(net), rank)
    ways["ddp halves"] = lambda net, rank: in_cell(DistributedDataParallel(net), rank, 2)
    results = {}
    for name, way in ways.items():
        net = network()
        results[name] = way(net, rank), [p.detach() for p in net.parameters()]
    for level in LEVELS:
        results[level] = at_level(rank, level, False), at_level(rank, level, True)
    results["gaps"] = [with_gaps(rank, merged) for merged in (False, True)]
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    if not dist.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    folder = tmp_path_factory.mktemp("ranks")
    in_processes(worker, str(folder), count=RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize("way", WAYS)
def test_an_overflow_on_one_process_skips_the_step_on_all(ranks, way):
    for rank in ranks:
        assert rank[way][0] == list(zip([step == 3 for step in range(STEPS)], SCALES))
    for a, b in zip(*(rank[way][1] for rank in ranks)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_like_one_with_both_batches(ranks, way):
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in set(range(STEPS)) - {3}:
        optimizer.zero_grad()
        x, y = batch(step, rows=12)
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    for got, want in zip(ranks[0][way][1], net.parameters()):
        torch.testing.assert_close(got, want.detach(), rtol=0, atol=2e-6)


def test_processes_that_lack_different_gradients_end_with_the_same_weights(ranks):
    averaged, merged = ranks[0]["gaps"]
    assert ranks[1]["gaps"] == [averaged, merged]
    # the mean of 1 and of nothing is half a gradient; what all lack stays missing, and does not decay
    assert averaged == [1 - 0.25 * (1 + 0.5), *[1 - 0.25 * (0.5 + 0.5)] * 2, 1.0]
    # AdaSum takes the mean of equal steps, and what one process alone has moved as it is
    assert merged == pytest.approx([0.75, 0.75, 0.75, 1.0], rel=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_at_a_level_are_the_mean_of_both_processes(ranks, level):
    alone = []
    for rank in range(RANKS):
        net = auto_mixed_precision(network(), level, torch.bfloat16)
        net(shared(0, rank)[0]).float().square().sum().backward()
        alone.append([p.grad for p in net.parameters()])
    for kind in (0, 1):
        for a, b, x, y in zip(ranks[0][level][kind], ranks[1][level][kind], *alone):
            assert a.dtype is torch.float32
            assert torch.equal(a, b)
            torch.testing.assert_close(a, (x + y) / 2, rtol=1e-6, atol=1e-6)


# --- killed, and resumed


def loader(seed: int | None) -> DataLoader:
    x, y = batch(0, bad=(), rows=48)
    x[20, 0] = torch.inf
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=generator)


def model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    made = Momentum(net.parameters(), 0.05, 0.9)
    return Model(net, nn.MSELoss(), made, loss_scale_manager=DynamicLossScaleManager(1024, 2, 4), metrics=None)


def weights(ours: Model) -> Tensor:
    return torch.cat([p.detach().flatten() for p in ours.train_network.network.parameters()])


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("stop", [1, 6, 7, 15])
def test_a_resumed_run_is_the_run_without_interruption(stop, seed, tmp_path):
    class Stop(Callback):
        def on_train_step_end(self, run):
            if run.cur_step_num == stop:
                run.request_stop()

    path = tmp_path / "run.pt"
    whole, first, second = model(), model(), model(9)
    torch.manual_seed(11)
    whole.train(3, loader(seed))
    torch.manual_seed(11)
    first.train(3, loader(seed), callbacks=[Checkpoint(path, every=100), Stop()])
    torch.manual_seed(77)  # a new process starts from elsewhere
    second.load(path)
    second.train(3, loader(seed), callbacks=[Checkpoint(path, every=100)])
    assert torch.equal(weights(second), weights(whole))
    assert not torch.equal(weights(first), weights(whole))


def one_life(path: Path) -> Model:
    ours = model()
    torch.manual_seed(os.getpid() if path.exists() else 11)
    if path.exists():
        ours.load(path)
    ours.train(40, loader(3), callbacks=[Checkpoint(path, every=3)])
    return ours


def main(folder: Path) -> None:
    """Kill a training three times at random moments, then let it end."""
    torch.set_num_threads(1)
    path, draw = folder / "run.pt", torch.Generator().manual_seed(0)
    for _ in range(3):
        child = os.fork()
        if not child:
            one_life(path)
            os._exit(0)
        before = path.stat().st_mtime_ns if path.exists() else 0
        while not path.exists() or path.stat().st_mtime_ns == before:  # it has saved something of its own
            time.sleep(0.002)
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child ended by itself"
        time.sleep(0.03 * torch.rand((), generator=draw).item())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    torch.save(weights(one_life(path)), folder / "end.pt")


def test_a_training_killed_at_random_moments_ends_with_the_same_weights(tmp_path):
    code = "import sys, pathlib; sys.path[:0] = ['tests', 'tests/contract']\nimport test_training as t\n"
    code += f"t.main(pathlib.Path({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=240)
    whole = model()
    torch.manual_seed(11)
    whole.train(40, loader(3))
    assert torch.equal(torch.load(tmp_path / "end.pt"), weights(whole))
