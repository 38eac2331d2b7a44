"""The committed digits and MNIST from disk: what is read, and what is refused."""

import gzip
import hashlib
import shutil
import sys

import numpy as np
import pytest
import torch
from support import ROOT

from mpkit import data


def test_digits_are_the_1797_images_with_pixels_between_0_and_1():
    images, labels = data.digits("all", size=8)
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert images.min() == 0
    assert images.max() == 1
    # class sizes of the UCI test set, as its description lists them
    assert torch.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_train_and_test_split_the_digits_in_order():
    everything = data.digits("all")[0]
    parts = [data.digits(split)[0] for split in ("train", "test")]
    assert [len(p) for p in parts] == [1500, 297]
    assert torch.equal(torch.cat(parts), everything)
    assert everything.shape[1:] == (1, 28, 28)


def test_digits_name_what_is_wrong_with_an_argument():
    with pytest.raises(ValueError, match="split must be 'train' or 'test' or 'all', got 'validation'"):
        data.digits("validation")
    with pytest.raises(ValueError, match="at least 8, got 7"):
        data.digits(size=7)


@pytest.mark.parametrize("damage", ["truncated", "other images", "not a zip", "missing array"])
def test_a_damaged_digits_file_is_refused_by_name(tmp_path, monkeypatch, damage):
    path = tmp_path / "digits.npz"
    original = (ROOT / "data" / "digits.npz").read_bytes()
    if damage == "truncated":
        path.write_bytes(original[:20000])
    elif damage == "other images":
        np.savez(path, images=np.zeros((1797, 8, 8), np.uint8), labels=np.zeros(1797, np.uint8))
    elif damage == "not a zip":
        path.write_bytes(b"digits")
    else:
        np.savez(path, images=np.zeros((1797, 8, 8), np.uint8))
    before = path.read_bytes()
    monkeypatch.setenv("MPKIT_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"digits\.npz"):
        data.digits()
    assert path.read_bytes() == before


def idx(magic: int, shape: tuple[int, ...], body: bytes) -> bytes:
    return gzip.compress(b"".join(n.to_bytes(4, "big") for n in (magic, *shape)) + body, mtime=0)


@pytest.fixture
def small_mnist(tmp_path, monkeypatch):
    """Four valid idx files of three images, with the table of what is expected set to match."""
    table, rng = {}, np.random.default_rng(0)
    for name, (magic, shape, _) in data._MNIST.items():
        shape = (3, *shape[1:])
        file = idx(magic, shape, rng.integers(0, 256, np.prod(shape), np.uint8).tobytes())
        (tmp_path / name).write_bytes(file)
        table[name] = (magic, shape, hashlib.sha256(gzip.decompress(file)).hexdigest())
    monkeypatch.setattr(data, "_MNIST", table)
    return tmp_path


def test_mnist_reads_images_and_labels(small_mnist):
    for split in ("train", "test"):
        images, labels = data.mnist(small_mnist, split=split)
        assert images.shape == (3, 1, 28, 28)
        assert 0 <= images.min() <= images.max() <= 1
        assert labels.shape == (3,)


def test_mnist_is_found_through_the_environment(small_mnist, tmp_path, monkeypatch):
    (tmp_path / "mnist").mkdir()
    for name in data._MNIST:
        shutil.move(tmp_path / name, tmp_path / "mnist" / name)
    monkeypatch.setenv("MPKIT_DATA", str(tmp_path))
    assert len(data.mnist()[0]) == 3


def test_a_folder_with_mnist_alone_leaves_the_lessons_their_data(small_mnist, monkeypatch):
    monkeypatch.setenv("MPKIT_DATA", str(small_mnist))
    assert data.data_dir() == ROOT / "data"
    assert len(data.digits("all")[0]) == 1797
    assert (data.data_dir() / "traces" / "mlp_digits.npz").exists()


BREAKS = {
    "truncated": (lambda f: f[: len(f) // 2], "not a whole gzip file"),
    "not gzip": (lambda f: b"<html>", "not a whole gzip file"),
    "magic": (lambda f: idx(0x802, (3,), b"abc"), "magic number"),
    "short": (lambda f: gzip.compress(gzip.decompress(f)[:-1]), "header"),
    "flipped": (lambda f: gzip.compress(gzip.decompress(f)[:-1] + b"\x07"), "SHA-256"),
}


@pytest.mark.parametrize("kind", BREAKS)
@pytest.mark.parametrize("name", data._MNIST)
def test_a_damaged_mnist_file_is_refused_by_name_and_left_alone(small_mnist, name, kind):
    break_it, message = BREAKS[kind]
    path = small_mnist / name
    path.write_bytes(break_it(path.read_bytes()))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"{name}.*{message}"):
        data.mnist(small_mnist, split="train" if name.startswith("train") else "test")
    assert path.read_bytes() == before


def test_missing_mnist_says_how_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"download=True"):
        data.mnist(tmp_path)


def test_a_failed_download_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_MNIST_MIRROR", "http://127.0.0.1:9/")
    with pytest.raises(ConnectionError, match="could not download train-images"):
        data.mnist(tmp_path / "new", download=True)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_wrong_download_is_refused_and_removed(small_mnist, tmp_path, monkeypatch):
    served = tmp_path / "served"
    served.mkdir()
    name = next(iter(data._MNIST))
    (served / name).write_bytes(idx(0x803, (3, 28, 28), bytes(3 * 784)))
    (small_mnist / name).unlink()
    monkeypatch.setattr(data, "_MNIST_MIRROR", served.as_uri() + "/")
    with pytest.raises(ValueError, match="SHA-256"):
        data.mnist(small_mnist, download=True)
    assert not (small_mnist / name).exists()


def test_a_right_download_arrives_and_is_read(small_mnist, tmp_path, monkeypatch):
    served = tmp_path / "served"
    served.mkdir()
    for name in data._MNIST:
        shutil.move(small_mnist / name, served / name)
    monkeypatch.setattr(data, "_MNIST_MIRROR", served.as_uri() + "/")
    assert len(data.mnist(small_mnist, download=True)[0]) == 3


@pytest.mark.parametrize("read", [data.digits, lambda split: data.mnist(split=split)], ids=["digits", "mnist"])
def test_a_split_that_is_no_text_is_refused_in_words(read):
    with pytest.raises(TypeError, match=r"split must be one of the strings train, test.*got \['train'\]"):
        read(["train"])


def test_a_home_that_nobody_has_is_told_with_the_path(monkeypatch):
    with pytest.raises(FileNotFoundError, match="'~nobody-here/x': nobody of that name has a home here"):
        data.mnist("~nobody-here/x")
    monkeypatch.setenv("MPKIT_DATA", "~nobody-here/x")
    with pytest.raises(FileNotFoundError, match="name the whole path"):
        data.digits()


def test_without_the_bar_of_a_download_the_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="pip install tqdm"):
        data.mnist(tmp_path / "mnist", download=True)
    assert not (tmp_path / "mnist").exists()
