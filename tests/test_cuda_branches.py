"""Lines that ask whether a tensor lies on a GPU, with a tensor that says so, or a patched predicate.

The other branch then runs on a CPU and must give the same numbers. (That nothing is read on the host there, and nothing
is mixed, `test_meta_device.py` shows.)
"""

from __future__ import annotations

import sys
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
from mpkit.boost import adasum as merging
from mpkit.boost.dim_reduce.descent import _RandomState
from mpkit.casting import auto_mixed_precision, ledger, products, rules
from mpkit.casting.low import known
from mpkit.diagnose import diagnose, watch
from mpkit.experiment import engine, training
from mpkit.formats import BF16, E4M3FN, E5M2, FP16
from mpkit.model import randomness
from mpkit.optimizers import base
from mpkit.record import columns, counts, exponent_counts
from mpkit.rounding import MODES, round_to
from mpkit.scalers import finite

GPU = torch.device("cuda", 0)


def posing(tensor: Tensor, *, spreads: bool = False, **answers: Any) -> Any:
    """The same numbers in a tensor with other answers; with `spreads` what is computed from it has them too."""
    members: dict[str, Any] = {name: property(lambda self, value=value: value) for name, value in answers.items()}
    if not spreads:
        members["__torch_function__"] = torch._C._disabled_torch_function_impl
    kind = type("Posing", (Tensor,), members)
    return torch.Tensor._make_subclass(kind, tensor.detach(), tensor.requires_grad)


# --- optimizers


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


# --- numbers


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "stochastic"])
@pytest.mark.parametrize("fmt", [FP16, BF16, E5M2, E4M3FN], ids=str)
def test_rounding_without_a_look_at_the_block(fmt, mode):
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 8, 2000)
    got = round_to(posing(x, spreads=True, is_cpu=False), fmt, mode)
    torch.testing.assert_close(got.as_subclass(Tensor), round_to(x, fmt, mode), rtol=0, atol=0, equal_nan=True)


def test_random_bits_are_the_generators_own_off_the_cpu():
    x = torch.full((20_000,), 1 + FP16.eps / 4)
    generator = torch.Generator().manual_seed(0)
    got = round_to(posing(x, spreads=True, is_cpu=False), FP16, "stochastic", generator=generator).as_subclass(Tensor)
    ups = int((got == 1 + FP16.eps).sum())
    assert ups + int((got == 1).sum()) == 20_000
    assert abs(ups - 5000) < 4 * (20_000 * 0.25 * 0.75) ** 0.5


@pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=str)
def test_blocks_in_one_piece(fmt):
    x = torch.randn(40, 300, generator=torch.Generator().manual_seed(0))
    want, got = quantize_blocks(x, fmt), quantize_blocks(posing(x, spreads=True, is_cpu=False), fmt)
    assert torch.equal(got.dequantize().as_subclass(Tensor), want.dequantize())


@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_histograms_and_norms_stay_on_their_device(scale):
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * scale
    x[::7] = 0
    there = posing(x, spreads=True, device=GPU)
    for turned in (there, -there):  # the largest magnitude is of one sign
        for got, want in zip(exponent_counts(turned), exponent_counts(x)):
            assert isinstance(got, Tensor)
            assert torch.equal(got.as_subclass(Tensor), want)
    empty = exponent_counts(posing(torch.empty(0), spreads=True, device=GPU))
    assert [int(part.sum()) for part in empty] == [0, 0, 0]
    norm = counts.total_norm([there])
    assert isinstance(norm, Tensor)
    assert float(norm) == pytest.approx(float(torch.linalg.vector_norm(x.double())), rel=1e-12)


def test_what_a_recorder_keeps_of_a_gpu_is_a_copy_there():
    value = torch.tensor(3.0)
    copied = columns.kept(posing(value, spreads=True, device=GPU))
    value.fill_(4.0)
    assert (float(copied), columns.kept(value)) == (3.0, 4.0)


@pytest.mark.parametrize("bad", [0.0, torch.inf, torch.nan])
def test_extremes_by_one_launch_for_all(bad):
    group = [torch.tensor([1.0, -3.0]), torch.tensor([bad, 2.0])]
    there = finite._extremes([posing(t, device=GPU) for t in group])
    here = finite._extremes(group)
    assert [bool(torch.stack(e).isfinite().all()) for e in (there, here)] == [bad == 0] * 2


def test_adasum_adds_up_in_float32_off_the_cpu():
    a, b = torch.randn(2, 500, generator=torch.Generator().manual_seed(0)).unbind()
    there, here = merging._products(posing(a, device=GPU), posing(b, device=GPU)), merging._products(a, b)
    assert (there.dtype, here.dtype) == (torch.float32, torch.float64)
    torch.testing.assert_close(there.double(), here, rtol=1e-5, atol=1e-4)


def test_a_bias_stays_in_the_product_where_that_is_one_kernel():
    layer = auto_mixed_precision(nn.Linear(4, 3), "O3")
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    with ledger(layer) as here:
        apart = layer(x)
    del layer._parameters["bias"]
    bias = torch.tensor([0.5, 1.0, 2.0])
    layer._parameters["bias"] = posing(bias, spreads=True, is_cuda=True)
    with ledger(layer) as there:
        fused = layer(x)
    want = F.linear(x.half(), layer.weight.half(), bias.half())
    assert torch.equal(fused.as_subclass(Tensor), want)
    assert apart.shape == fused.shape
    assert len(there.rows) <= len(here.rows)


@pytest.mark.parametrize(
    ("low", "bias_in", "is_cuda", "fused"),
    [
        (torch.float16, torch.float16, True, True),
        (torch.float16, torch.float16, False, False),
        (torch.float16, torch.float32, True, False),
        (known(FP16, FP16), None, True, False),  # rounded twice, as it was told
    ],
    ids=str,
)
def test_a_bias_is_fused_on_a_gpu_alone_and_in_the_precision_of_the_product(low, bias_in, is_cuda, fused):
    given = []

    def product(x, weight, bias):
        given.append(bias)
        return F.linear(x, weight)

    bias = posing(torch.ones(3), spreads=True, is_cuda=is_cuda)
    handler = rules.product_then_bias(low, low if bias_in is None else bias_in, None)
    handler(product, (torch.ones(2, 4), torch.ones(3, 4), bias), {})
    assert [b is not None for b in given] == [fused]


# --- predicates of torch.cuda


@pytest.fixture
def gpus(monkeypatch) -> SimpleNamespace:
    """Two devices, as far as torch.cuda tells, and a diary of what was asked of them."""
    diary = SimpleNamespace(calls=[], state=torch.arange(4, dtype=torch.uint8))

    def noted(name, answer=None):
        def call(*args, **_):
            diary.calls.append((name, *args))
            return answer() if callable(answer) else answer

        return call

    answers = {
        "is_available": True,
        "device_count": 2,
        "get_device_name": "Stand-in",
        "get_device_capability": (9, 0),
        "get_rng_state_all": lambda: [diary.state, diary.state + 1],
        "get_rng_state": lambda: diary.state,
        "max_memory_allocated": 3 * 2**20,
    }
    silent = ("set_rng_state_all", "set_rng_state", "synchronize", "reset_peak_memory_stats")
    for name, answer in {**answers, **dict.fromkeys(silent)}.items():
        monkeypatch.setattr(torch.cuda, name, noted(name, answer))
    monkeypatch.delenv("MPKIT_DEVICE", raising=False)
    return diary


def names(diary) -> list[str]:
    return [call[0] for call in diary.calls]


def test_the_device_of_the_lessons(gpus, monkeypatch):
    assert devices.default_device() == torch.device("cuda")
    assert devices.describe(GPU)["device"] == "Stand-in"
    monkeypatch.setenv("MPKIT_DEVICE", "cuda:1")
    assert devices.default_device() == torch.device("cuda", 1)
    monkeypatch.setenv("MPKIT_DEVICE", "cuda:2")
    with pytest.raises(ValueError, match=r"lacks \(2 found\)"):
        devices.default_device()


@pytest.mark.parametrize("name", ["meta", "xpu", "mps"])
def test_a_device_that_cannot_compute_here_is_refused_where_it_is_named(name, monkeypatch):
    if name != "meta" and getattr(torch, name, torch.backends.mps).is_available():
        pytest.skip("it can compute here")
    monkeypatch.setenv("MPKIT_DEVICE", name)
    with pytest.raises(ValueError, match=f"MPKIT_DEVICE={name} cannot compute here"):
        devices.default_device()


def test_random_states_of_all_devices_are_saved_and_restored(gpus):
    state = randomness.random_state([])
    assert [s.tolist() for s in state["cuda"]] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    randomness.set_random_state(state)
    assert ("set_rng_state_all", state["cuda"]) in gpus.calls
    gpus.calls.clear()
    randomness.set_random_state({**state, "cuda": []})  # saved on a machine without a GPU
    assert not any(name == "set_rng_state_all" for name, *_ in gpus.calls)


def test_a_trial_repeats_the_dropout_of_its_device(gpus):
    state = _RandomState(GPU)
    state(nn.Identity(), ())
    state.restore()
    assert names(gpus) == ["get_rng_state", "set_rng_state"]
    assert gpus.calls[1][2] == GPU


def test_time_and_memory_of_a_training_are_those_of_the_device(gpus):
    clock = training._Clock(GPU)
    for _ in range(training.WARM + 2):
        with clock:
            pass
    assert clock.per_step() > 0
    assert names(gpus) == ["synchronize"] * 2  # before the first timed step, and after the last
    assert training._Memory(GPU).peak() == 3.0
    assert names(gpus)[2:] == ["reset_peak_memory_stats", "max_memory_allocated"]


def test_an_experiment_has_one_worker_a_device(gpus, monkeypatch):
    assert engine._parallel(8)[0] == 2
    monkeypatch.setenv("MPKIT_DEVICE", "cuda:1")
    assert engine._parallel(8)[0] == 1


def test_products_in_8_bits_ask_for_the_capability(gpus, monkeypatch):
    assert products.native_product(GPU)
    for capability, native in (((8, 0), False), ((8, 9), True)):  # Ada's tensor cores are the first
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        assert products.native_product(GPU) is native
    assert not products.native_product(torch.device("cpu"))


def test_a_comparison_in_float64_leaves_the_random_state_of_the_device(gpus):
    x = posing(torch.ones(3), is_cuda=True, device=GPU)
    out = sys.modules["mpkit.casting.ledger"]._in_float64(torch.add, (x, 1.0), {})
    assert out.dtype is torch.float64
    assert names(gpus)[:1] == ["get_rng_state"]
    assert names(gpus)[-1] == "set_rng_state"


def test_a_diagnosis_draws_the_same_numbers_on_the_device_in_every_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: ["state of the device"])
    back = []
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", back.append)
    diagnose(nn.Linear(3, 2), (torch.ones(2, 3), torch.ones(2, 2)), nn.MSELoss())
    assert back == [["state of the device"]] * 2  # before the run at the level, and at the end


def test_what_has_no_numbers_is_not_watched():
    assert watch._checkable(torch.ones(2))
    assert not watch._checkable(torch.ones(2, device="meta"))


def test_a_lesson_computes_in_float16_on_a_gpu():
    start = pytest.importorskip("mpkit.lessons.digits")
    assert start.computed_in("float16", GPU) is torch.float16
    assert start.computed_in("float16", torch.device("cpu")) is FP16
