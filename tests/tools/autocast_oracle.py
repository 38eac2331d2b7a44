"""CUDA autocast without a GPU: fake CUDA tensors carry shapes and dtypes through torch's own dispatcher."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from mpkit.casting import cast_like

KINDS = ("float16", "float32", "float64", "mixed", "mixed the other way")
EXPLAINED = {"svd_lowrank": "no device has a QR decomposition in float16, so autocast raises; fake tensors cannot tell"}


class Apply(nn.Module):
    """A network that is one function."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


@contextlib.contextmanager
def cuda_autocast(dtype: torch.dtype = torch.float16) -> Iterator[None]:
    """What `torch.autocast("cuda")` switches on; that one declines where there is no GPU."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


def dtypes_of(call: Callable[[], Any]) -> list[torch.dtype] | Exception:
    """Dtypes of the float results, or the error."""
    try:
        out = call()
    except Exception as error:
        return error
    return [x.dtype for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point()]


def faked(mode: FakeTensorMode, kind: str, value: Any) -> Any:
    """The same nest with fake CUDA tensors, floats in the dtype that `kind` names; None where nothing can be mixed."""
    floats = 0

    def fake(x: Any) -> Any:
        nonlocal floats
        if isinstance(x, torch.device):
            return torch.device("cuda")
        if not isinstance(x, Tensor):
            return x
        if x.layout is not torch.strided:
            return mode.from_tensor(x)
        dtype = x.dtype
        if x.is_floating_point():
            floats += 1
            both = (torch.float16, torch.float32)
            mixed = both[(floats + (kind != "mixed")) % 2]
            dtype = mixed if kind.startswith("mixed") else getattr(torch, kind)
        return torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="cuda")

    out = tree_map(fake, value)
    return None if kind.startswith("mixed") and floats < 2 else out


def disagreement(call: Callable[..., Any], args: Any, kwargs: Any, kind: str) -> str | None:
    """How preset torch_autocast differs from CUDA autocast in the dtypes of `call`'s results; None: in nothing.

    Where autocast itself fails, as it does when a fake tensor's numbers are asked for, there is nothing to compare.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = faked(mode, kind, (args, kwargs))
        if given is None:
            return None
        with cuda_autocast():
            want = dtypes_of(lambda: call(*given[0], **given[1]))
        if isinstance(want, Exception):
            return None
        args, kwargs = faked(mode, kind, (args, kwargs))
        got = dtypes_of(lambda: cast_like(Apply(call), "torch_autocast")(*args, **kwargs))
    return None if got == want else f"{kind}: autocast gives {want}, the preset {got!r}"


def of_the_database(chosen: Callable[[str], bool] = lambda name: True) -> dict[str, Any]:
    """The preset beside autocast on every sample of PyTorch's operator database, or of the operators `chosen` by name:
    how many samples there were, and what differed but for EXPLAINED."""
    from torch.testing._internal.common_methods_invocations import op_db

    samples, differ = 0, []
    for op in op_db:
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        if not op.supports_dtype(torch.float32, "cpu") or not chosen(name):
            continue
        torch.manual_seed(0)
        for i, sample in enumerate(op.sample_inputs("cpu", torch.float32)):
            samples += 1
            given = (sample.input, *sample.args), sample.kwargs
            told = [text for kind in KINDS if (text := disagreement(op.op, *given, kind))]
            differ += [f"{name}[{i}]: {text}" for text in told if name not in EXPLAINED]
    return {"samples": samples, "differ": differ, "explained": EXPLAINED}
