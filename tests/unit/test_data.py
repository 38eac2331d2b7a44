"""The committed digits, MNIST from disk, the lessons' networks, and one epoch of the main job on the real MNIST."""

from __future__ import annotations

import gzip
import shutil

import numpy as np
import pytest
import torch
from support import ROOT, small_mnist
from torch import nn

from mpkit import data, networks
from mpkit.data import mnist
from mpkit.experiment import train
from mpkit.scalers import DynamicLossScaler


def test_digits_are_the_1797_images_with_pixels_between_0_and_1():
    images, labels = data.digits("all", size=8)
    assert (images.shape, images.dtype, labels.dtype) == ((1797, 1, 8, 8), torch.float32, torch.int64)
    assert (images.min(), images.max()) == (0, 1)
    # class sizes of the UCI test set, as its description lists them
    assert torch.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_train_and_test_split_the_digits_in_order():
    everything = data.digits("all")[0]
    parts = [data.digits(split)[0] for split in ("train", "test")]
    assert [len(p) for p in parts] == [1500, 297]
    assert torch.equal(torch.cat(parts), everything)
    assert everything.shape[1:] == (1, 28, 28)


@pytest.mark.parametrize("damage", ["truncated", "other images", "missing array"])
def test_a_damaged_digits_file_is_refused_by_name(tmp_path, monkeypatch, damage):
    path, zeros = tmp_path / "digits.npz", np.zeros((1797, 8, 8), np.uint8)
    if damage == "truncated":
        path.write_bytes((ROOT / "data" / "digits.npz").read_bytes()[:20000])
    else:
        np.savez(path, images=zeros, **({"labels": zeros[:, 0, 0]} if damage == "other images" else {}))
    monkeypatch.setenv("MPKIT_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"digits\.npz"):
        data.digits()


@pytest.fixture
def small(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_MNIST", small_mnist(tmp_path))
    return tmp_path


def test_mnist_reads_images_and_labels(small):
    for split in ("train", "test"):
        images, labels = data.mnist(small, split=split)
        assert (images.shape, labels.shape) == ((3, 1, 28, 28), (3,))
        assert 0 <= images.min() <= images.max() <= 1


def test_mnist_is_found_through_the_environment(small, tmp_path, monkeypatch):
    (tmp_path / "mnist").mkdir()
    for path in tmp_path.glob("*.gz"):
        shutil.move(path, tmp_path / "mnist")
    monkeypatch.setenv("MPKIT_DATA", str(tmp_path))
    assert len(data.mnist()[0]) == 3


def test_missing_mnist_says_how_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"download=True"):
        data.mnist(tmp_path)


@pytest.mark.parametrize("right", [True, False])
def test_a_download_arrives_and_is_read_or_is_refused_and_removed(small, tmp_path, monkeypatch, right):
    served, name = tmp_path / "served", "train-images-idx3-ubyte.gz"
    served.mkdir()
    for path in small.glob("*.gz"):
        shutil.move(path, served)
    monkeypatch.setattr(data, "_MNIST_MIRROR", served.as_uri() + "/")
    if right:
        assert len(data.mnist(small, download=True)[0]) == 3
        return
    (served / name).write_bytes(gzip.compress(bytes(3 * 784)))
    with pytest.raises(ValueError, match="SHA-256"):
        data.mnist(small, download=True)
    assert not (small / name).exists()


# --- networks


# counts as published: torchvision's model cards for the ResNets, the GPT-2 report (124 M, here with 50304 tokens)
@pytest.mark.parametrize(
    ("build", "count", "norms"),
    [
        (lambda: networks.Network(), 784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10, 0),
        (lambda: networks.resnet18(classes=1000, small_input=False), 11_689_512, 20),
        (lambda: networks.resnet34(classes=1000, small_input=False), 21_797_672, 36),
        (lambda: networks.resnet50(classes=1000, small_input=False), 25_557_032, 53),
        (lambda: networks.MobileNetV2(classes=1000), 3_504_872, 52),
        (lambda: networks.TinyGPT.gpt2_124m(), 124_439_808 + (50304 - 50257) * 768, 0),
    ],
    ids=["Network", "resnet18", "resnet34", "resnet50", "mobilenet_v2", "gpt2"],
)
def test_sizes_are_those_of_the_papers(build, count, norms):
    with torch.device("meta"):
        network = build()
    assert sum(p.numel() for p in network.parameters()) == count
    assert sum(isinstance(m, nn.BatchNorm2d) for m in network.modules()) == norms


IMAGES = [
    (networks.Network(), (2, 1, 28, 28)), (networks.LeNet5(), (2, 1, 28, 28)), (networks.LeNet5(), (2, 1, 32, 32)),
    (networks.resnet18(width=4), (2, 3, 16, 16)), (networks.DenseNet((2, 2), growth=4), (2, 3, 16, 16)),
    (networks.resnet50(width=4, in_channels=1, small_input=False), (2, 1, 32, 32)),
    (networks.MobileNetV2(((1, 4, 1, 1), (6, 8, 2, 2)), stem=4, head=16), (2, 3, 16, 16)),
]  # fmt: skip


@pytest.mark.parametrize(("network", "shape"), IMAGES, ids=lambda v: type(v).__name__ * isinstance(v, nn.Module))
def test_images_become_ten_logits_and_every_parameter_gets_a_gradient(network, shape):
    logits = network(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    assert logits.shape == (2, 10)
    logits.square().sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_a_token_of_tiny_gpt_sees_only_its_past():
    torch.manual_seed(0)
    network = networks.TinyGPT().eval()
    tokens = torch.randint(128, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 128
    before, after = network(tokens), network(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


# --- one epoch of MNIST


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "fp16"])
def test_one_epoch_of_mnist(dtype, monkeypatch):
    """The tutorial's training, plain SGD with rate 0.01; its skips are those that the scale asks for."""
    beside = ROOT.parent / "shared" / "data"
    if (beside / "mnist").is_dir():
        monkeypatch.setenv("MPKIT_DATA", str(beside))
    try:
        mnist()
    except FileNotFoundError as missing:
        pytest.skip(f"needs the MNIST files: {missing}")
    scaler = DynamicLossScaler(scale_value=2**16, scale_factor=2, scale_window=50)
    options = {"level": "O2", "dtype": dtype, "scaler": scaler, "epochs": 1, "batch": 64}
    got = train("Network", "mnist", optimizer="torch.SGD", lr=1e-2, **options)
    assert (len(got["loss"]), got["loss"][0]) == (938, pytest.approx(2.3, abs=0.05))
    assert sum(got["loss"][-100:]) < 80
    assert got["accuracy"] > 80
    if dtype == "fp16":  # the scale found the ceiling of float16 and came back
        assert got["skipped"] > 0
        assert got["last_scale"] < 2.0**20
    else:
        assert (got["skipped"], got["last_scale"]) == (0, 2.0 ** (16 + 938 // 50))
