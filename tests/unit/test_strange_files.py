"""Files from strangers: damaged and hostile variants of every kind of file that mpkit reads.

Each is loaded as it should be, or refused in one sentence by an error that the docstring names, and without writing a
file. `MPKIT_VARIANTS=10000` makes so many of each
kind; what else a variant may do is what its kind says.
"""

import copy
import functools
import gzip
import io
import json
import os
import random
import shutil
import struct
import tempfile
import tracemalloc
import warnings
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from support import assert_same, small_mnist
from torch import nn

from mpkit import data
from mpkit.boost import AutoBoost
from mpkit.boost.dim_reduce import prepare_pca
from mpkit.boost.pca import WeightSnapshots, read_pca_rows, read_snapshots, write_pca_files
from mpkit.experiment import Results, command, experiment, train
from mpkit.files import read_npz, read_tensors
from mpkit.model import Model
from mpkit.optimizers import Momentum
from mpkit.record import AmaxTrace, Ranges, Trace

VARIANTS = int(os.environ.get("MPKIT_VARIANTS", "40"))


def small_trace() -> Trace:
    steps, names = np.arange(6, dtype=np.int64), ("a.weight", "a.bias")
    counts = np.zeros((6, 2, 20), np.uint32)
    counts[:, :, 3:7] = 5
    whole = np.full((6, 2), 1, np.int64)
    ranges = Ranges(names, np.array([60, 60]), steps, -12, counts, whole, whole, np.full((6, 2), 0.5, np.float32))
    series, fine, meta = np.linspace(1, 2, 6), np.zeros(6, bool), {"policy": {"name": "torch"}}
    return Trace(steps, series, series * 8, fine, series, series, series, ranges, meta=meta)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


WEIGHTS = 3 * 4 + 4 + 4 * 2 + 2
ROWS = np.linspace(-1, 1, 3 * WEIGHTS).reshape(3, WEIGHTS)


def model() -> Model:
    net = network()
    return Model(net, nn.MSELoss(), Momentum(list(net.parameters()), 0.1, 0.9))


def run(seed: int, lr: float) -> dict:
    return {"loss": lr + seed, "series": np.arange(5) * lr}


@dataclass
class Kind:
    """`make(folder)` writes a whole file and names it; `load(path)` reads it. `text` files hold JSON."""

    make: object
    load: object
    refused: tuple = (ValueError, OSError)
    text: bool = False
    torch: bool = False  # torch.save compresses nothing
    state: object = field(default=lambda: None)  # what a refusal leaves as it was


def _saved(name, save):
    def make(folder: Path) -> Path:
        save(folder / name)
        return folder / name

    return make


def _rows(folder: Path) -> Path:
    write_pca_files(folder / "pca.npy", ROWS, 1)
    return folder / "pca_rank_0.npy"


def _components(path: Path) -> object:
    return prepare_pca(network(), 3, pca_mat_path=path, timeout=1)


def _store(folder: Path, ending: str) -> Path:
    experiment(run, {"lr": [0.1, 0.2]}, seeds=2, folder=folder / "store")
    return next(p for p in sorted((folder / "store").iterdir()) if p.name.endswith(ending))


def _results(path: Path) -> None:
    """All that a store holds; a cell that is left out, with a warning, counts as refused."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = Results.load(path if path.suffix == ".zip" else path.parent)
    assert len(found) <= 4
    try:
        for cell, seed, error in found.frame[["cell", "seed", "error"]].values:
            assert error or isinstance(found.series(cell, "series", seed), np.ndarray)
    finally:
        if path.suffix == ".zip":  # it would stay until this process ends
            shutil.rmtree(found.folder)
    if said:
        raise ValueError(str(said[0].message))


def _planned(path: Path) -> None:
    """A grid file up to the point where its first cell would run."""
    asked = command.read(path)
    command.train, made = stopped, command.train
    try:
        assert command.results_of({**asked, "n_jobs": 1}, path.with_suffix("")).stopped
    finally:
        command.train = made


@functools.wraps(train)
def stopped(**_):
    raise KeyboardInterrupt


MODEL = model()


def _everything() -> dict:
    return copy.deepcopy(MODEL.train_network.state_dict())


BOOST = {"boost": {"mode": "manual", "grad_freeze": True}, "grad_freeze": {"freeze_p": 0.4, "total_steps": 100}}
GRID = {"grid": {"lr": [0.1, 0.2], "level": ["O0", "O2"]}, "fixed": {"epochs": 1}, "seeds": 3, "baseline": {"lr": 0.1}}
SNAPSHOT, IMAGES = lambda folder: WeightSnapshots(network(), folder).save(10), "t10k-images-idx3-ubyte.gz"
Settings = functools.partial(Kind, refused=(ValueError, OSError, TypeError), text=True)
"""JSON that somebody wrote; a command says what was refused in a sentence."""
KINDS = {
    "trace": Kind(_saved("t.npz", small_trace().save), Trace.load),
    "amaxes": Kind(_saved("a.npz", AmaxTrace(("a", "b"), np.ones((9, 2), np.float32)).save), AmaxTrace.load),
    "components": Kind(_saved("pca.npy", lambda p: np.save(p, ROWS)), _components),
    "rows of a rank": Kind(_rows, lambda p: read_pca_rows(p.with_name("pca.npy"), 0, timeout=1)),
    "snapshot": Kind(SNAPSHOT, lambda p: read_snapshots(p.parent, network()), torch=True),
    "checkpoint": Kind(_saved("c.ckpt", MODEL.save), MODEL.load, torch=True, state=_everything),
    "idx": Kind(_saved(IMAGES, lambda p: small_mnist(p.parent)), lambda p: data.mnist(p.parent, split="test")),
    "boost": Settings(_saved("boost.json", lambda p: p.write_text(json.dumps(BOOST))), lambda p: AutoBoost("O0", p)),
    "grid": Settings(_saved("grid.json", lambda p: p.write_text(json.dumps(GRID))), _planned),
    "finished cell": Kind(lambda folder: _store(folder, "npz"), _results),
    "index of a store": Kind(lambda folder: _store(folder, "experiment.json"), _results, text=True),
    "store in a zip": Kind(lambda f: _saved("s.zip", Results.load(_store(f, "npz").parent).save)(f), _results),
}


# --- damage


def _cut(raw, rng):
    return raw[: rng.randrange(len(raw))]


def _flip(raw, rng):
    held = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 8))):
        held[rng.randrange(len(held))] ^= 1 << rng.randrange(8)
    return bytes(held)


def _overwrite(raw, rng):
    at, long = rng.randrange(len(raw)), rng.randrange(1, 40)
    return raw[:at] + rng.choice((bytes(long), b"\xff" * long, rng.randbytes(long))) + raw[at + long :]


def _foreign(raw, rng):
    return rng.choice((b"", b"\0" * 100, b"<html>", b"PK\x03\x04", b"\x93NUMPY", b"{", rng.randbytes(300)))


def _inside(raw, rng):
    """Damage behind the checksum: an entry of a zip file, or the content of a gzip file, and a checksum that fits."""
    if raw[:2] == b"\x1f\x8b":
        return gzip.compress(rng.choice(BLIND)(gzip.decompress(raw), rng))
    entries = dict(_entries(raw))
    name = rng.choice(list(entries))
    change = rng.choice(("content", "name", "gone", "other", "header"))
    if change == "content":
        entries[name] = rng.choice(BLIND)(entries[name] or b"x", rng)
    elif change == "header":
        entries[name] = _header(entries[name], rng)
    elif change == "other":
        entries[name] = entries[rng.choice(list(entries))]
    else:
        held = entries.pop(name)
        if change == "name":
            entries[rng.choice(("../../up.npy", "/tmp/absolute.npy", "x" * 3000, "C:\\a.npy", f"../{name}"))] = held
    return _zipped(entries.items())


def _header(raw, rng):
    """An array that claims another shape or kind than its bytes have."""
    if raw[:6] != b"\x93NUMPY":
        return raw[::-1]
    shape = rng.choice(("(10**9,)", "(1000000000,)", "(-1,)", "(2, -3)", f"({'9' * 300},)", "()", "(0, 9999999999)"))
    kind = rng.choice(("<f8", "|O", "<U9999999", "|b1", "<i4", ">f8", "<c16", "|V8", "<m8", "<f4"))
    text = f"{{'descr': '{kind}', 'fortran_order': {rng.choice(('True', 'False', '[]'))}, 'shape': {shape}, }}"
    body = raw[10 + struct.unpack("<H", raw[8:10])[0] :]
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(text)) + text.encode() + body


BLIND = (_cut, _flip, _overwrite, _foreign)


ODD = (None, True, -1, 10**9, 10**400, 1e308, float("nan"), float("inf"), "", "../x", "x" * 300, [], {}, [[]], [None])


def _odd(raw, rng):
    """JSON in which one value is an odd one."""
    held = place = json.loads(raw)
    while True:
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not (isinstance(place[key], dict | list) and place[key]) or rng.random() < 0.2:
            break
        place = place[key]
    place[key] = rng.choice(ODD)
    return json.dumps(held).encode()


def _deep(raw, rng):
    many = rng.choice((500, 100_000))
    return rng.choice((b"[" * many + b"]" * many, b'{"a":' * many + b"1" + b"}" * many, b"[" * many))


def _entries(raw):
    with zipfile.ZipFile(io.BytesIO(raw)) as file:
        return [(entry.filename, file.read(entry)) for entry in file.infolist()]


def _zipped(entries, packed=zipfile.ZIP_DEFLATED):
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", packed) as file:
        for name, content in entries:
            file.writestr(name, content)
    return held.getvalue()


def damage(raw: bytes, kind: Kind, rng: random.Random) -> bytes:
    if kind.text:
        return rng.choice((*BLIND, _odd, _odd, _odd, _deep))(raw, rng)
    if raw[:6] == b"\x93NUMPY":
        return rng.choice((*BLIND, _header))(raw, rng)
    changed = rng.choice((*BLIND, _inside, _inside, _inside, _inside))(raw, rng)
    if kind.torch and rng.random() < 0.9:
        with suppress(ValueError, OSError, zipfile.BadZipFile, RuntimeError, EOFError, zlib.error):
            return _zipped(_entries(changed), zipfile.ZIP_STORED)
    return changed


def listing(folder: Path) -> set:
    return {p.relative_to(folder) for p in folder.rglob("*")}


def refusal(kind: Kind, path: Path) -> str | None:
    """What loading a file was refused with."""
    try:
        kind.load(path)
    except kind.refused as raised:
        return str(raised)
    return None


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    monkeypatch.setattr(data, "_MNIST", small_mnist(tmp_path / "mnist"))
    return tmp_path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_is_refused_in_a_sentence(name, place):
    kind, rng = KINDS[name], random.Random(name)
    path = kind.make(place)
    raw = path.read_bytes()
    kind.load(path)
    before, refused = kind.state(), 0
    for _ in range(VARIANTS):
        path.write_bytes(damage(raw, kind, rng))
        there = listing(place)
        error = refusal(kind, path)
        if error is not None:
            refused += 1
            assert "\n" not in error, "more than a sentence"
            assert 10 < len(error) < 1000
            assert listing(place) <= there, "a refused file left another one behind"
            assert_same(kind.state(), before)
        if kind.state() is not None:
            path.write_bytes(raw)
            kind.load(path)
    assert refused > VARIANTS / 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["trace", "snapshot", "idx", "store in a zip"])
def test_a_bomb_in_place_of_any_packed_file_is_refused(name, place):
    path = KINDS[name].make(place)
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        path.write_bytes(gzip.compress(gzip.decompress(raw) + bytes(2**26 + 1)))
    else:
        path.write_bytes(_zipped([(entry, bytes(2**26 + 1)) for entry, _ in _entries(raw)[:1]] + _entries(raw)[1:]))
    tracemalloc.start()
    try:
        assert refusal(KINDS[name], path)
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


def test_entries_that_lie_in_each_other_are_refused_before_they_are_unpacked(tmp_path):
    """Else 100 kB become gigabytes, each entry by no more than the allowed factor. Not every Python looks at this."""
    np.save(array := io.BytesIO(), np.tile(np.arange(200, dtype=np.uint8), 10_000))
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("0.npy", array.getvalue())
        for i in range(1, 200):  # further names for the same bytes
            file.filelist.append(copy.copy(file.filelist[0]))
            file.filelist[-1].filename = f"{i}.npy"
    tracemalloc.start()
    try:
        for read in (read_npz, read_tensors):
            with pytest.raises(ValueError, match="its entries lie in each other"):
                read(path)
        assert tracemalloc.get_traced_memory()[1] < 2**21
    finally:
        tracemalloc.stop()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_a_link_to_a_device_or_a_pipe_is_refused_unread(name, place):
    """One to /dev/zero would take all memory, and a pipe wait for ever."""
    path = KINDS[name].make(place)
    path.unlink()
    path.symlink_to(os.devnull)
    told = "no experiment in" if name == "index of a store" else "is a device or a pipe"
    with pytest.raises(KINDS[name].refused, match=told):
        KINDS[name].load(path)


def test_a_checkpoint_without_the_state_of_a_part_is_refused_by_name(tmp_path):
    MODEL.save(tmp_path / "c.ckpt")
    state = torch.load(tmp_path / "c.ckpt")
    state["train_network"]["_extra_sTate"] = state["train_network"].pop("_extra_state")
    torch.save(state, tmp_path / "c.ckpt")
    with pytest.raises(ValueError, match=r"'_extra_sTate' is no tensor there and missing here"):
        MODEL.load(tmp_path / "c.ckpt")
