"""A sample of what `compat` runs: modules and operators of PyTorch's own databases; and the stored counts."""

from __future__ import annotations

import json
from typing import Any

import autocast_oracle
import compat
import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore")

OWN: dict[str, tuple[Any, tuple[int, ...]]] = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), (4, 6)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.GELU()), (2, 2, 6, 6)),
    "recurrent": (lambda: nn.GRU(6, 5, batch_first=True), (2, 4, 6)),
}


def seeded(name: str, make: Any, inputs: Any) -> compat.Case:
    """A network and the one tensor that it takes, both of a seed."""

    def made() -> Any:
        torch.manual_seed(0)
        return make(), (inputs(),), {}

    return compat.Case(name, made)


def case_of(name: str) -> compat.Case:
    make, shape = OWN[name]
    return seeded(name, make, lambda: torch.rand(shape, requires_grad=True))


def called(function: Any, x: Tensor) -> compat.Case:
    """A function of one tensor, without parameters."""
    return compat.Case("one", lambda: (compat.Call(function), (x.clone().requires_grad_(),), {}), portable=False)


SOME = ("O1 bfloat16", "O2 bfloat16", "auto bfloat16", "apex_O1 bfloat16", "torch_autocast bfloat16", "O2 e5m2")


@pytest.mark.parametrize("treatment", SOME)
def test_networks_come_as_near_to_float32_as_the_format_allows(treatment: str) -> None:
    assert {name: compat.outcome(case_of(name), treatment) for name in OWN} == dict.fromkeys(OWN, "within")


def test_the_torch_preset_is_cuda_autocast_on_a_sample_of_the_operators() -> None:
    pytest.importorskip("expecttest", reason='PyTorch\'s databases need it: pip install "mpkit[compat]"')
    always = ("inner", "sum_to_size", "_upsample_bilinear2d_aa")  # were wrong once
    found = autocast_oracle.of_the_database(lambda name: name in always or compat.chosen(f"some {name}", 0.04))
    assert found["samples"] > 100
    assert found["differ"] == []


def test_the_stored_comparison_with_autocast_is_a_whole_one() -> None:
    stored = json.loads(compat.STORED.read_text())["autocast"]
    assert (stored["share"], stored["differ"], stored["explained"]) == (1.0, [], autocast_oracle.EXPLAINED)
    assert stored["samples"] > 6000


def test_a_wrong_number_and_a_changed_copy_are_seen() -> None:
    want = [torch.tensor([1.0, -2.0])]
    assert compat.within([want[0] * 1.01], want, want, 2.0**-8)
    assert not compat.within([want[0] * 1.1], want, want, 2.0**-8)
    assert not compat.within([want[0][:1]], want, want, 2.0**-8)
    assert compat.within([want[0] * 1.1], want, want, 2.0**-8, largest=0.5)  # a format that ends there

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def __deepcopy__(self, memo: Any) -> Counts:
            return Counts()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    case = seeded("a copy with other weights", Counts, lambda: torch.ones(1, 2))
    assert compat.outcome(case, "O1 bfloat16") == "not the same after deepcopy"


def test_an_error_is_torchs_own_only_if_torch_raises_it_too() -> None:
    def refuses(x: Tensor) -> Tensor:
        if x.dtype is torch.float32 and torch.mm(x, x).dtype is not torch.float32:
            raise RuntimeError("must be a kernel that is not supported, but expected")  # said by casting, not by torch
        return x * 2

    def linear_algebra(x: Tensor) -> Tensor:
        return torch.linalg.inv(x)

    assert compat.outcome(called(refuses, torch.eye(2)), "auto bfloat16") == "RuntimeError"
    assert compat.outcome(called(linear_algebra, torch.eye(2)), "O3 bfloat16") == "torch has no kernel"


def test_what_the_original_of_a_preset_refuses_is_told_apart() -> None:
    made = lambda: (nn.BCELoss(), (torch.full((3,), 0.5, requires_grad=True), torch.ones(3)), {})  # noqa: E731
    case = compat.Case("loss", made, portable=False)
    assert compat.outcome(case, "torch_autocast bfloat16") == "banned"
    assert compat.outcome(case, "auto bfloat16") == "within"


def test_numbers_that_torchs_own_16_bits_move_as_far_are_told_apart(one_thread: None) -> None:
    """The kernel of a 16-bit layer norm adds the gradient of its bias up in 16 bits: 384 of 640."""
    norm = seeded("norm", lambda: nn.LayerNorm(5), lambda: torch.rand(128, 5, 5))
    assert compat.outcome(norm, "O3 bfloat16") == "as torch in 16 bits"
    assert compat.outcome(norm, "auto bfloat16") == "within"


def test_what_leaves_the_range_of_a_format_is_told_apart() -> None:
    fours = torch.full((3,), 4.0)
    assert compat.outcome(called(lambda x: (x**5).log(), fours), "O2 e4m3fn") == "beyond the format"  # 1024 of 448
    assert compat.outcome(called(lambda x: (x**3).log(), fours), "O2 e4m3fn") == "within"
    masked = called(lambda x: torch.softmax(torch.cat([x, torch.full((3,), -torch.inf)]), 0), fours)
    assert compat.outcome(masked, "O2 e4m3fn") == "within"  # float32 beside the format promotes, so -inf stays one


def test_a_share_is_run_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "SOURCES", {"own": lambda: iter([case_of("perceptron")])})
    monkeypatch.setattr(compat, "TREATMENTS", {name: compat.TREATMENTS[name] for name in ("O0 bfloat16", "O2 bf16")})
    assert compat.run(1.0, 0.0, None)["counts"]["source"] == {}  # no time
    assert compat.run(1.0, 1.0, None)["counts"]["source"] == {"own": {"within": 2}}
    shares = [{name for name in map(str, range(1000)) if compat.chosen(name, share)} for share in (0.1, 0.3)]
    assert shares[0] < shares[1]
    assert 250 < len(shares[1]) < 350


def test_the_stored_counts_leave_nothing_to_look_at() -> None:
    stored = json.loads(compat.STORED.read_text())
    assert {"torch", "torchvision", "transformers"} == set(stored["versions"])
    assert sum(n for outcomes in stored["counts"]["source"].values() for n in outcomes.values()) > 100
    assert stored["to_look_at"] == []
