"""Schedules and optimizers against MindSpore 2.7, every stored case."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import golden_files, load
from torch import Tensor

from mpkit import optimizers, schedules

FILES = [(path, load(path)) for path in golden_files("mindspore-amp")]


def cases(key: str, kind: str) -> list[Any]:
    """One parameter set per case of every file with a list `key` of `kind`s, skipping what the README leaves out."""
    return [
        pytest.param(data, case, id=f"{path.stem}-{i}-{case[kind]}", marks=skips(case))
        for path, data in FILES
        for i, case in enumerate(data.get(key, []))
        if isinstance(case, dict) and (kind in case if kind != "optimizer" else "runs" in case and kind in case)
    ]


def skips(case: dict[str, Any]) -> list[Any]:
    """A case that a note calls a deviation of the CPU kernel, or one without a CPU kernel."""
    note = case.get("note") or ""
    return [pytest.mark.skip(reason=note)] if "CPU kernel" in note else []


@pytest.mark.parametrize(("_data", "case"), cases("schedules", "class"))
def test_a_schedule_gives_the_reference_rate_on_numbers_and_tensors(_data, case):
    args = case["args"]
    schedule = getattr(schedules, case["class"])(**args)
    want = np.array(case["lr_float32"], dtype=np.float32)
    bound = 1e-6 * max(args.get("learning_rate", 0.0), args.get("max_lr", 0.0), 0.1)
    bound *= 3 if args.get("update_decay_steps") else 1

    tensor = schedule(torch.tensor(case["steps"], dtype=torch.int32))

    assert tensor.dtype == torch.float32
    np.testing.assert_allclose(tensor.numpy(), want, rtol=0, atol=bound)
    np.testing.assert_allclose([schedule(step) for step in case["steps"]], want, rtol=0, atol=bound)


@pytest.mark.parametrize(("_data", "case"), cases("lists", "function"))
def test_a_list_equals_the_reference_list(_data, case):
    got = getattr(schedules, case["function"])(**case["args"])
    np.testing.assert_allclose(got, case["lr"], rtol=0, atol=1e-15)


def setting(value: Any) -> Any:
    """A stored argument -> the object it stands for."""
    if isinstance(value, dict) and "class" in value:
        return getattr(schedules, value["class"])(**{k: v for k, v in value.items() if k != "class"})
    if isinstance(value, dict):
        return lambda step: value["base_over_one_plus_step"] / (1 + step)
    return value


def built(data: dict[str, Any], case: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """The optimizer of a case and its named parameters."""
    named = {
        name: torch.nn.Parameter(torch.tensor(flat).reshape(shape))
        for name, shape, flat in zip(data["names"], data["shapes"], data["initial"])
    }
    kwargs = {key: setting(value) for key, value in case["kwargs"].items()}
    kwargs.update(
        {
            key: tuple(value)
            for key, value in kwargs.items()
            if key in ("etas", "step_sizes", "eps") and isinstance(value, list)
        }
    )
    groups = case["groups"] and [
        {key: [(n, named[n]) for n in value] if key.endswith("params") else setting(value) for key, value in g.items()}
        for g in case["groups"]
    ]
    return getattr(optimizers, case["optimizer"])(groups or list(named.items()), faithful=True, **kwargs), named


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(("data", "case"), cases("cases", "optimizer"))
def test_an_optimizer_moves_the_weights_as_the_reference(data, case, on_device):
    if not case["runs"]:
        with pytest.raises((ValueError, TypeError, KeyError, RuntimeError)) as error:
            built(data, case)
        assert error.type.__name__ == case["error_type"]
        return
    optimizer, named = built(data, case)
    assert [n for p in optimizer.parameters for n in named if named[n] is p] == case["parameter_order"]
    bound = 5e-5 if case["optimizer"] == "AdamWeightDecay" else 3e-6
    if on_device:
        optimizer.found_inf = torch.zeros(())

    for lr, grads, want in zip(case["lr_seen"], data["grads"], case["weights_after"]):
        rates = optimizer.get_lr()
        seen = [float(rate) for rate in rates] if isinstance(rates, list) else float(rates)
        np.testing.assert_allclose(seen, np.float32(lr), rtol=0, atol=1e-7)
        for p, flat in zip(named.values(), grads):
            p.grad = torch.tensor(flat).reshape(p.shape)
        optimizer.step()
        for p, flat in zip(named.values(), want):
            np.testing.assert_allclose(p.detach().numpy().ravel(), np.float32(flat), rtol=0, atol=bound)
    assert optimizer.global_step == case["global_step"]
