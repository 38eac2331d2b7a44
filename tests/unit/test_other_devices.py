"""Lines that ask whether a tensor lies on a GPU, with a tensor that says so, or a patched predicate of torch.

The other branch then runs on a CPU and must give the same numbers. (That nothing is read on the host there, and nothing
is mixed, `test_meta_device.py` shows.)
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracles import MEMBERS
from stepping import give_gradients, parameters
from torch import Tensor, nn

from mpkit import device as devices
from mpkit.blocks import BLOCK_FORMATS, quantize_blocks
from mpkit.boost.adasum import adasum_coefficients
from mpkit.casting import auto_mixed_precision, ledger
from mpkit.diagnose import diagnose
from mpkit.formats import BF16, E4M3FN, E5M2, FP16
from mpkit.model import randomness
from mpkit.optimizers import base
from mpkit.record import columns, exponent_counts, histograms
from mpkit.rounding import MODES, round_to

GPU = torch.device("cuda", 0)


def posing(tensor: Tensor, *, spreads: bool = False, **answers: Any) -> Any:
    """The same numbers in a tensor with other answers; with `spreads` what is computed from it has them too."""
    members: dict[str, Any] = {name: property(lambda self, value=value: value) for name, value in answers.items()}
    if not spreads:
        members["__torch_function__"] = torch._C._disabled_torch_function_impl
    kind = type("Posing", (Tensor,), members)
    return torch.Tensor._make_subclass(kind, tensor.detach(), tensor.requires_grad)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_optimizer_takes_all_at_once_where_a_cpu_takes_large_tensors_alone(name, dtype, monkeypatch):
    """One launch for all on the GPU, also where a flag skips on the device."""
    monkeypatch.setattr(base, "AT_HAND", frozenset())
    monkeypatch.setattr(base, "LARGE", 4)
    plain, there = parameters(dtype), [posing(p, is_cpu=False) for p in parameters(dtype)]
    pair = [(params, MEMBERS[name](params)) for params in (plain, there)]
    for step, skip in enumerate([0.0, 1.0, 0.0]):
        for params, optimizer in pair:
            give_gradients(params, step)
            optimizer.found_inf = torch.tensor(skip)
            optimizer.step()
            with torch.no_grad():
                params[1].add_(1)  # somebody writes to a parameter: its master follows
    for a, b in zip(plain, there):
        torch.testing.assert_close(a.detach(), b.as_subclass(Tensor).detach(), rtol=2e-6, atol=1e-7)


SPREAD = random(2000) * torch.logspace(-8, 8, 2000)
SAME = {  # what is computed in another way off the CPU, of these numbers
    **{
        f"{fmt} {mode}": (SPREAD, lambda x, fmt=fmt, mode=mode: round_to(x, fmt, mode))
        for fmt in (FP16, BF16, E5M2, E4M3FN)
        for mode in MODES
        if mode != "stochastic"
    },
    **{
        f"blocks of {name}": (random(40, 300), lambda x, fmt=fmt: quantize_blocks(x, fmt).dequantize())
        for name, fmt in BLOCK_FORMATS.items()
    },
}


@pytest.mark.parametrize("what", SAME)
def test_numbers_are_rounded_alike_on_both(what):
    x, function = SAME[what]
    got = function(posing(x, spreads=True, is_cpu=False)).as_subclass(Tensor)
    torch.testing.assert_close(got, function(x), rtol=0, atol=0, equal_nan=True)


def test_random_bits_are_the_generators_own_off_the_cpu():
    x = torch.full((20_000,), 1 + FP16.eps / 4)
    generator = torch.Generator().manual_seed(0)
    got = round_to(posing(x, spreads=True, is_cpu=False), FP16, "stochastic", generator=generator).as_subclass(Tensor)
    ups = int((got == 1 + FP16.eps).sum())
    assert ups + int((got == 1).sum()) == 20_000
    assert abs(ups - 5000) < 4 * (20_000 * 0.25 * 0.75) ** 0.5


@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_histograms_norms_and_copies_stay_on_their_device(scale):
    x = random(5000) * scale
    x[::7] = 0
    there = posing(x, spreads=True, device=GPU)
    for turned in (there, -there):  # the largest magnitude is of one sign
        for got, want in zip(exponent_counts(turned), exponent_counts(x)):
            assert isinstance(got, Tensor)
            assert torch.equal(got.as_subclass(Tensor), want)
    empty = exponent_counts(posing(torch.empty(0), spreads=True, device=GPU))
    assert [int(part.sum()) for part in empty] == [0, 0, 0]
    norm = float(torch.linalg.vector_norm(x.double()))
    assert float(histograms.total_norm([there])) == pytest.approx(norm, rel=1e-12)
    value = torch.tensor(3.0)
    copied = columns.kept(posing(value, spreads=True, is_cpu=False))
    value.fill_(4.0)
    assert (float(copied), columns.kept(value)) == (3.0, 4.0)


def test_adasum_adds_up_in_float32_off_the_cpu():
    a, b = random(2, 500).unbind()
    there, here = adasum_coefficients(posing(a, device=GPU), posing(b, device=GPU)), adasum_coefficients(a, b)
    assert (there.dtype, here.dtype) == (torch.float32, torch.float64)
    torch.testing.assert_close(there.double(), here, rtol=1e-5, atol=1e-4)


def test_a_bias_stays_in_the_product_where_that_is_one_kernel():
    layer = auto_mixed_precision(nn.Linear(4, 3), "O3")
    x, bias = random(2, 4), torch.tensor([0.5, 1.0, 2.0])
    with ledger(layer) as here:
        apart = layer(x)
    del layer._parameters["bias"]
    layer._parameters["bias"] = posing(bias, spreads=True, is_cuda=True)
    with ledger(layer) as there:
        fused = layer(x)
    want = F.linear(x.half(), layer.weight.half(), bias.half())
    assert torch.equal(fused.as_subclass(Tensor), want)
    assert apart.shape == fused.shape
    assert len(there.rows) <= len(here.rows)


# --- predicates of torch.cuda


@pytest.fixture
def gpus(monkeypatch) -> SimpleNamespace:
    """Two devices, as far as torch.cuda tells, and a diary of what was set on them."""
    diary = SimpleNamespace(set=[], state=torch.arange(4, dtype=torch.uint8))
    answers = {
        "is_available": True, "device_count": 2, "get_device_name": "Stand-in", "get_device_capability": (9, 0),
        "get_rng_state_all": [diary.state, diary.state + 1],
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", diary.set.append)
    monkeypatch.delenv("MPKIT_DEVICE", raising=False)
    return diary


@pytest.mark.usefixtures("gpus")
def test_the_device_of_the_lessons(monkeypatch):
    assert devices.default_device() == torch.device("cuda")
    assert devices.describe(GPU)["device"] == "Stand-in"
    monkeypatch.setenv("MPKIT_DEVICE", "cuda:1")
    assert devices.default_device() == torch.device("cuda", 1)
    monkeypatch.setenv("MPKIT_DEVICE", "cuda:2")
    with pytest.raises(ValueError, match="got 'cuda:2'"):
        devices.default_device()
    start = pytest.importorskip("mpkit.lessons.digits")
    assert start.computed_in("float16", GPU) is torch.float16
    assert start.computed_in("float16", torch.device("cpu")) is FP16


@pytest.mark.parametrize("name", ["meta", "xpu", "mps"])
def test_a_device_that_cannot_compute_here_is_refused_where_it_is_named(name, monkeypatch):
    if name != "meta" and getattr(torch, name, torch.backends.mps).is_available():
        pytest.skip("it can compute here")
    monkeypatch.setenv("MPKIT_DEVICE", name)
    with pytest.raises(ValueError, match=f"got '{name}'"):
        devices.default_device()


def test_random_states_of_all_devices_are_saved_and_restored(gpus):
    state = randomness.random_state([])
    assert [s.tolist() for s in state["cuda"]] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    randomness.set_random_state(state)
    randomness.set_random_state({**state, "cuda": []})  # saved on a machine without a GPU
    assert gpus.set == [state["cuda"]]


def test_a_diagnosis_draws_the_same_numbers_on_the_device_in_every_run(gpus):
    diagnose(nn.Linear(3, 2), (torch.ones(2, 3), torch.ones(2, 2)), nn.MSELoss())
    assert len(gpus.set) == 2  # before the run at the level, and at the end
