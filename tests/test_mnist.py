"""The main job on the real MNIST: one epoch of the written-out training step at O2, beside plain float32."""

from __future__ import annotations

import pytest
import torch
from support import ROOT
from torch import nn

from mpkit.casting import auto_mixed_precision
from mpkit.data import mnist
from mpkit.formats import FP16
from mpkit.networks import Network
from mpkit.scalers import DynamicLossScaler, all_finite

BATCH = 64


@pytest.fixture(scope="module")
def batches():
    """The 938 batches of the tutorial: shuffled, mean 0.1307 and deviation 0.3081 taken out."""
    try:
        images, labels = mnist()
    except FileNotFoundError as missing:
        beside = ROOT.parent / "shared" / "data" / "mnist"
        if not beside.is_dir():
            pytest.skip(f"needs the MNIST files: {missing}")
        images, labels = mnist(beside)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images = images.sub_(0.1307).div_(0.3081)
    return [(images[part], labels[part]) for part in order.split(BATCH)]


def trained(batches, dtype):
    """One epoch of the tutorial's training step, plain SGD with rate 0.01; float32 when `dtype` is None."""
    torch.manual_seed(1)
    model = Network()
    if dtype is not None:
        auto_mixed_precision(model, "O2", dtype)
    loss_fn, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 1e-2)
    loss_scaler = DynamicLossScaler(scale_value=2**16, scale_factor=2, scale_window=50)
    losses, skipped = [], 0
    for data, label in batches:
        loss = loss_fn(model(data), label)
        optimizer.zero_grad()
        loss_scaler.scale(loss).backward()
        grads = [p.grad for p in model.parameters()]
        is_finite = all_finite(grads)
        if is_finite:
            for p, grad in zip(model.parameters(), loss_scaler.unscale(grads)):
                p.grad = grad
            optimizer.step()
        skipped += not is_finite
        loss_scaler.adjust(is_finite)
        losses.append(loss.item())
    return model, torch.tensor(losses), skipped, loss_scaler


@pytest.fixture(scope="module")
def plain(batches):
    return trained(batches, None)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP16], ids=["bfloat16", "emulated fp16"])
def test_one_epoch_of_mnist_at_o2(batches, plain, dtype):
    model, losses, skipped, scaler = trained(batches, dtype)
    assert len(losses) == 938
    assert abs(losses[0] - 2.3) <= 0.05
    assert losses[-100:].mean() < 0.40
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())
    smooth = torch.stack([run.unfold(0, 50, 50).mean(1) for run in (losses, plain[1])])
    assert ((smooth[0] - smooth[1]).abs() <= 0.05 * smooth[1]).all()
    if dtype == FP16:
        assert skipped > 0  # the scale found the ceiling of float16 and came back
        assert scaler.scale_value < 2.0**20
    else:
        assert skipped == 0
        assert scaler.scale_value == 2.0 ** (16 + 938 // 50)


def test_plain_float32_learns_too(plain):
    assert plain[1][-100:].mean() < 0.40
    assert plain[2] == 0
