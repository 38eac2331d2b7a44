"""amp_forward.json: every case of the real framework, dtypes exactly, values bit for bit or within a named bound."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from support import GOLDEN, array, golden_files, load
from torch import Tensor, nn

from mpkit.casting import auto_mixed_precision

FILES = [path for path in golden_files("mindspore-amp") if "layers" in load(path)]
CASES = [
    pytest.param(
        load(path), case, id=f"{path.stem}-{case['level']}-{case['dtype']}-{'train' if case['training'] else 'eval'}"
    )
    for path in FILES
    for case in load(path)["results"]
]
RENAMED = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}


class Exp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x)


class TinyNet(nn.Module):
    """conv - batch norm - ReLU - flatten - dense - layer norm - dense - exp, with the golden parameters."""

    def __init__(self, golden: dict[str, Any]) -> None:
        super().__init__()
        shapes = {name: tuple(value["shape"]) for name, value in golden["params"].items()}
        out, inp, *kernel = shapes["conv.weight"]
        bn = golden["batch_norm"]
        self.layers = golden["layers"]
        self.conv = nn.Conv2d(inp, out, kernel)
        self.bn = nn.BatchNorm2d(out, eps=bn["eps"], momentum=bn["new_batch_fraction"])
        self.relu, self.flatten, self.exp = nn.ReLU(), nn.Flatten(), Exp()
        self.fc1 = nn.Linear(*reversed(shapes["fc1.weight"]))
        self.ln = nn.LayerNorm(shapes["ln.gamma"], eps=golden["layer_norm_eps"])
        self.fc2 = nn.Linear(*reversed(shapes["fc2.weight"]), bias=False)
        state = {
            ".".join(RENAMED.get(part, part) for part in name.split(".")): torch.tensor(array(value))
            for name, value in golden["params"].items()
        }
        self.load_state_dict(state | {"bn.num_batches_tracked": torch.tensor(0)})

    def forward(self, x: Tensor) -> Tensor:
        for name in self.layers:
            x = getattr(self, name)(x)
        return x


def build(golden: dict[str, Any], case: dict[str, Any]) -> tuple[TinyNet, Tensor]:
    if not case["runs"]:
        pytest.skip(f"the framework could not run this case on a CPU ({case['error_type']}), so it has no values")
    network = TinyNet(golden).train(case["training"])
    auto_mixed_precision(network, case["level"], getattr(torch, case["dtype"]))
    return network, torch.tensor(array(golden["input"]))


def agree(layer: str, case: dict[str, Any], got: np.ndarray, want: np.ndarray) -> None:
    """Assert that one layer, fed with the framework's own input, gave what the framework gave.

    Rounded to float16: bit for bit. Where the order of summation puts a float32 sum on the other side of a tie, a value
    may differ by one rounding (two with a bias): one value, or 3 % of them; none does with seed 101. Adding the
    bias before rounding instead of after changes a quarter of the values. Layer norm at O3 is the exception: the
    framework's CPU kernel computes every step in float16, torch's accumulates in float32 (2 ulps seen, 8 allowed).
    Float32: the order of summation (6 ulps seen, 32 allowed), and the framework's exp is an approximation (22, 64).
    """
    if layer in ("relu", "flatten"):
        assert np.array_equal(got, want)
    elif case["layer_dtypes"][layer] == "float16" or (
        case["level"] in ("O1", "auto") and layer in ("conv", "fc1", "fc2")
    ):
        off = distance(got, want, np.float16)
        if layer == "ln" and case["level"] == "O3":
            assert off.max() <= 8
        else:
            assert off.max() <= 2
            assert np.count_nonzero(off) <= max(1, 0.03 * off.size)
    else:
        assert distance(got, want, np.float32).max() <= (64 if layer == "exp" else 32)


def distance(got: np.ndarray, want: np.ndarray, dtype: type) -> np.ndarray:
    """Difference in ulps of `want`, whose magnitude counts as at least 1/4 (below, cancellation decides)."""
    spacing = np.spacing(np.maximum(np.abs(want), 0.25).astype(dtype)).astype(np.float64)
    return np.abs(got.astype(np.float64) - want.astype(np.float64)) / spacing


@pytest.mark.parametrize(("golden", "case"), CASES)
def test_every_layer_computes_what_the_framework_computed(golden: dict[str, Any], case: dict[str, Any]) -> None:
    network, x = build(golden, case)
    seen: dict[str, Tensor] = {}
    given: dict[str, Tensor] = {"conv": x}
    names = golden["layers"]
    wanted = {name: array(case["layer_outputs"][name]) for name in names}
    given |= {name: torch.tensor(wanted[before]) for before, name in pairwise(names)}
    for name in names:  # each layer is fed with the framework's own input, so one layer's difference stays its own
        layer = getattr(network, name)
        layer.register_forward_pre_hook(lambda _m, _args, name=name: (given[name],))
        layer.register_forward_hook(lambda _m, _args, out, name=name: seen.setdefault(name, out))

    network(x)

    assert {name: str(out.dtype)[6:] for name, out in seen.items()} == case["layer_dtypes"]
    for name in names:
        agree(name, case, seen[name].detach().numpy(), wanted[name])


@pytest.mark.parametrize(("golden", "case"), CASES)
def test_the_whole_network_agrees(golden: dict[str, Any], case: dict[str, Any]) -> None:
    network, x = build(golden, case)

    out = network(x)

    last = golden["layers"][-1]
    want = array(case["layer_outputs"][last]).astype(np.float64)
    assert str(out.dtype)[6:] == case["final_dtypes"][last]
    assert {str(p.dtype)[6:] for p in network.parameters()} == set(case["param_dtypes"])
    bound = 1e-5 if case["level"] == "O0" else 1e-2  # a few float16 ulps (2**-11) that later layers carry on
    assert np.max(np.abs(out.detach().double().numpy() - want) / np.maximum(np.abs(want), 0.25)) <= bound


@pytest.mark.parametrize(("golden", "case"), CASES)
def test_running_statistics_stay_float32_and_follow_the_framework(golden: dict[str, Any], case: dict[str, Any]) -> None:
    network, x = build(golden, case)

    network(x)

    for name, want in case["running_stats_after"].items():
        got = getattr(network.bn, RENAMED[name.removeprefix("bn.")])
        assert got.dtype is torch.float32
        np.testing.assert_allclose(got.numpy(), array(want), rtol=3e-7, atol=3e-8)


def test_there_is_golden_data() -> None:
    assert CASES, (
        f"no file with layers in {GOLDEN}/mindspore-amp; MPKIT_GOLDEN names the folder that holds mindspore-amp"
    )
