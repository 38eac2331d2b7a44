"""What several tests share: the golden data of the real frameworks."""

from __future__ import annotations

import ast
import copy
import gzip
import hashlib
import io
import json
import math
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
LESSONS = [
    path for below in ("", "more/*/") for path in sorted(ROOT.glob(f"notebooks/{below}*.ipynb"))
]  # the course, then more
GOLDEN = Path(os.environ.get("MPKIT_GOLDEN", ROOT / "tests" / "golden"))


def in_processes(worker: Callable[..., None], *args: Any, count: int = 2) -> None:
    """Run `worker(rank, *args)` in `count` processes, forks of one that imports torch and the library once."""
    multiprocessing.set_forkserver_preload(["torch.nn.parallel", "mpkit.casting", "mpkit.boost", "pytest"])
    started = torch.multiprocessing.start_processes(worker, args, count, join=False, start_method="forkserver")
    end = time.monotonic() + 240  # s; the groups give up long before, so that only a hanging process is ended
    while not started.join(5):
        if time.monotonic() > end:
            for process in started.processes:
                process.kill()
            raise TimeoutError(f"{worker.__name__} did not end in {count} processes")


def in_group(function: Callable[[int], Any], folder: Path, count: int = 2) -> list[Any]:
    """What `function(rank)` returns in each of `count` processes that are a group over gloo."""
    in_processes(join_group, function, str(folder), count, count=count)
    return [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(count)]


def join_group(rank: int, function: Callable[[int], Any], folder: str, count: int) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # ranks talk inside this machine, whatever its name resolves to
    store, patience = dist.FileStore(f"{folder}/store", count), timedelta(seconds=120)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=patience)
    torch.save(function(rank), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def without_a_wait() -> Iterator[None]:
    """A block in which the CPU may not wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Op(torch.nn.Module):
    """A function as a module, so that it has a path."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class Written(Op):
    """Named parts, and a forward pass given as a function of the module and the inputs."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__(forward)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self, *inputs, **named)


def until(condition: Callable[[], Any]) -> Any:
    """What a condition gives as soon as it holds; an error of a file that is not there, or half written, is a no."""
    end = time.monotonic() + 120  # s; nothing here is expected to take so long
    while time.monotonic() < end:
        with suppress(OSError, ValueError):
            if value := condition():
                return value
        time.sleep(0.03)
    raise AssertionError("it never happened")


def openings() -> Iterator[tuple[str, Callable[[], Any]]]:
    """("lesson: the call", what makes it anew) of every view that a cell of a lesson shows."""
    for path in LESSONS:
        known: dict[str, Any] = {}
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            tree = ast.parse("".join(cell["source"])).body if cell["cell_type"] == "code" else []
            for node in (n for n in tree if isinstance(n, ast.ImportFrom) and n.module.startswith("mpkit.lessons.")):
                known |= {a.asname or a.name: getattr(import_module(node.module), a.name) for a in node.names}
            call = getattr(tree[-1], "value", None) if tree else None
            maker = known.get(call.func.id) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else None
            if hasattr(maker, "controls"):
                given = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
                yield f"{path.stem}: {ast.unparse(call)}", partial(maker, **given)


def small_mnist(folder: Path) -> dict[str, Any]:
    """MNIST of three images a file, written into a folder; the table of what `mpkit.data` expects of such files."""
    from mpkit import data

    table = {}
    for name, (shape, _) in data._MNIST.items():
        shape, magic = (3, *shape[1:]), 0x803 if "images" in name else 0x801
        head = np.array([magic, *shape], ">u4").tobytes()
        content = head + bytes(i % 10 for i in range(math.prod(shape)))
        (folder / f"{name}-ubyte.gz").write_bytes(gzip.compress(content, mtime=0))
        table[name] = shape, hashlib.sha256(content).hexdigest()
    return table


def golden_files(folder: str) -> list[Path]:
    """Every file of one golden folder that holds a JSON object, in a stable order."""
    return [path for path in sorted((GOLDEN / folder).glob("*.json")) if isinstance(load(path), dict)]


def golden_data(folder: str, *keys: str) -> list[dict[str, Any]]:
    """The golden files that hold all `keys`: a file is told by its content, whatever its name; others are left out."""
    return [load(path) for path in golden_files(folder) if load(path).keys() >= set(keys)]


@cache
def load(path: Path) -> dict[str, Any]:
    """One golden file, parsed once per test process, with its name as `file`; callers do not change it."""
    content = json.loads(path.read_text())
    return content | {"file": path.stem} if isinstance(content, dict) else content


@cache
def archives(*keys: str) -> list[tuple[dict[str, Any], Any]]:
    """(meta, arrays) of every archive of recipes whose `meta` and arrays hold all of `keys`, whatever its name."""
    found = []
    for path in sorted((GOLDEN / "recipes").glob("*.npz")):
        z = np.load(path, allow_pickle=False)
        meta = json.loads(str(z["meta"])) | {"file": path.stem}
        if set(keys) <= set(meta) | set(z.files):
            found.append((meta, z))
    return found


def floats(patterns: Any) -> torch.Tensor:
    """Bit patterns of float32 -> the tensor they stand for."""
    return torch.from_numpy(np.asarray(patterns).view(np.float32).copy())


def array(obj: dict[str, Any]) -> np.ndarray:
    """An array object {"shape", "dtype", "data"} with "inf", "-inf" and "nan" as strings -> ndarray."""
    return np.array([float(v) for v in obj["data"]], dtype=obj["dtype"]).reshape(obj["shape"])


def assert_same(a: Any, b: Any) -> None:
    """Two states are equal: dicts and sequences entry by entry, tensors bit for bit (NaN equals NaN)."""
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    else:
        assert a == b


def tries(share: float) -> Any:
    """A share of the examples that the profile in use asks for: 100, unless `--hypothesis-profile` says more."""
    from hypothesis import settings

    return settings(max_examples=max(1, round(share * settings().max_examples)))


AGAIN = ("copy", "pickle", "file")


def again(thing: Any, how: str, fresh: Callable[[], Any]) -> Any:
    """The same object in another one: a copy, a pickle, or a fresh one that loads what was saved to a file."""
    if how == "copy":
        return copy.deepcopy(thing)
    if how == "pickle":
        return pickle.loads(pickle.dumps(thing))
    buffer, other = io.BytesIO(), fresh()
    torch.save(thing.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    return other


def answer(client: Any, code: str) -> str:
    """What a kernel prints, returns, or the name of what it raises, when it runs `code`."""
    found, kinds = [], ("stream", "execute_result", "error")
    client.execute_interactive(
        code,
        allow_stdin=False,
        stop_on_error=False,  # or the kernel leaves undone what it is asked a moment after an error
        timeout=120,
        output_hook=lambda m: found.append(m["content"]) if m["msg_type"] in kinds else None,
    )
    return " ".join(f.get("text") or f.get("ename") or f["data"]["text/plain"] for f in found).strip()


def printed(client: Any, text: str) -> None:
    """Return when the code that a kernel runs has printed `text`."""
    while text not in str(client.get_iopub_msg(timeout=120)["content"].get("text")):
        pass
