"""The boost algorithms against the results of the framework they reproduce, every case of every file found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import golden_files, load
from torch import Tensor, nn

from mpkit.boost.grad_accumulation import GradientAccumulation

FILES = {path.stem: load(path) for path in golden_files("mindspore-boost")}


def cases(stem: str, key: str) -> list[Any]:
    """(file, case) for the cases under `key` of every file whose name starts with `stem`."""
    return [
        pytest.param(content, case, id=f"{name}-{key}-{i}")
        for name, content in FILES.items()
        if name.startswith(stem)
        for i, case in enumerate(content.get(key, []))
    ]


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def tensors(values: list[Any]) -> list[Tensor]:
    return [tensor(v) for v in values]


def close(got: Tensor, want: Any, tolerance: float) -> None:
    """Equal within `tolerance` * (1 + |want|)."""
    want = torch.tensor(want, dtype=torch.float64)
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def optimizer_of(name: str, hyper: dict[str, float], weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's namesake of a recorded optimizer, with its hyper-parameters."""
    if name == "Adam":
        return torch.optim.Adam(weights, hyper["lr"], (hyper["beta1"], hyper["beta2"]), hyper["eps"])
    return torch.optim.SGD(weights, hyper["lr"], hyper.get("momentum", 0.0))


@pytest.mark.parametrize(("content", "case"), cases("grad_accumulation", "cases"))
def test_accumulated_training_follows_the_recorded_weights(content: dict[str, Any], case: dict[str, Any]) -> None:
    weights = [nn.Parameter(w) for w in tensors(case["w0"])]
    optimizer = optimizer_of(case["optimizer"], content["hyper"][case["optimizer"]], weights)
    accumulate = GradientAccumulation(case["max_accumulation_step"], optimizer)
    for t, grads in enumerate(case["grads"]):
        given, returned = case["returned"][t]
        loss = accumulate(tensor(given), tensors(grads))
        close(loss, returned, 0)
        assert accumulate.counter == case["counter"][t]
        for got, want in zip(accumulate.accumulated, case["accumulated"][t]):
            close(got, want, 2e-7)
        for got, want in zip(weights, case["weights"][t]):
            close(got.detach(), want, 2e-6 if case["optimizer"] == "Adam" else 2e-7)
