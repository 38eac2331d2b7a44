"""What `compat` says of cases made for each of its outcomes, a sample of operators; and the stored counts."""

from __future__ import annotations

import json
from typing import Any

import autocast_oracle
import compat
import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore")


def seeded(make: Any, inputs: Any) -> compat.Case:
    """A network and the one tensor that it takes, both of a seed."""

    def made() -> Any:
        torch.manual_seed(0)
        return make(), (inputs(),), {}

    return compat.Case("one", made)


def called(function: Any, x: Tensor) -> compat.Case:
    """A function of one tensor, without parameters."""
    return compat.Case("one", lambda: (compat.Apply(function), (x.clone().requires_grad_(),), {}), portable=False)


def refuses(x: Tensor) -> Tensor:
    """Raises what casting says, and not torch."""
    if x.dtype is torch.float32 and torch.mm(x, x).dtype is not torch.float32:
        raise RuntimeError("must be a kernel that is not supported, but expected")
    return x * 2


class Counts(nn.Linear):
    """A copy of it has other weights."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def __deepcopy__(self, memo: Any) -> Counts:
        return Counts()


FOURS, EYE = torch.full((3,), 4.0), torch.eye(2)
BANNED = called(lambda x: nn.BCELoss()(x, torch.ones(3)), torch.full((3,), 0.5))
# its 16-bit kernel adds the gradient of the bias up in 16 bits: 384 of 640
NORM = seeded(lambda: nn.LayerNorm(5), lambda: torch.rand(128, 5, 5))
MASKED = called(lambda x: torch.softmax(torch.cat([x, torch.full((3,), -torch.inf)]), 0), FOURS)
PERCEPTRON = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), lambda: torch.rand(4, 6))
TOLD = [  # case, treatment, outcome
    (called(refuses, EYE), "auto bfloat16", "RuntimeError"),
    (called(lambda x: torch.linalg.inv(x), EYE), "O3 bfloat16", "torch has no kernel"),
    (BANNED, "torch_autocast bfloat16", "banned"),
    (BANNED, "auto bfloat16", "within"),
    (NORM, "O3 bfloat16", "as torch in 16 bits"),
    (NORM, "auto bfloat16", "within"),
    (called(lambda x: (x**5).log(), FOURS), "O2 e4m3fn", "beyond the format"),  # 1024 of 448
    (called(lambda x: (x**3).log(), FOURS), "O2 e4m3fn", "within"),
    (MASKED, "O2 e4m3fn", "within"),  # float32 beside the format promotes, so -inf stays one
    (seeded(Counts, lambda: torch.ones(1, 2)), "O1 bfloat16", "not the same after deepcopy"),
]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("case", "treatment", "outcome"), TOLD)
def test_outcomes_are_told_apart(case: compat.Case, treatment: str, outcome: str) -> None:
    assert compat.outcome(case, treatment) == outcome


def test_a_wrong_number_is_seen() -> None:
    want = [torch.tensor([1.0, -2.0])]
    assert compat.within([want[0] * 1.01], want, want, 2.0**-8)
    assert not compat.within([want[0] * 1.1], want, want, 2.0**-8)
    assert not compat.within([want[0][:1]], want, want, 2.0**-8)
    assert compat.within([want[0] * 1.1], want, want, 2.0**-8, largest=0.5)  # a format that ends there


def test_the_torch_preset_is_cuda_autocast_on_a_sample_of_the_operators() -> None:
    pytest.importorskip("expecttest", reason='PyTorch\'s databases need it: pip install "mpkit[compat]"')
    always = ("inner", "sum_to_size", "_upsample_bilinear2d_aa")  # were wrong once
    found = autocast_oracle.of_the_database(lambda name: name in always or compat.chosen(f"some {name}", 0.04))
    assert found["samples"] > 100
    assert found["differ"] == []


def test_a_share_is_run_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "SOURCES", {"own": lambda: iter([PERCEPTRON])})
    monkeypatch.setattr(compat, "TREATMENTS", {name: compat.TREATMENTS[name] for name in ("O0 bfloat16", "O2 bf16")})
    assert compat.run(1.0, 0.0, None)["counts"]["source"] == {}  # no time
    assert compat.run(1.0, 1.0, None)["counts"]["source"] == {"own": {"within": 2}}
    shares = [{name for name in map(str, range(1000)) if compat.chosen(name, share)} for share in (0.1, 0.3)]
    assert shares[0] < shares[1]
    assert 250 < len(shares[1]) < 350


def test_the_stored_counts_are_whole_and_leave_nothing_to_look_at() -> None:
    stored = json.loads(compat.STORED.read_text())
    assert {"torch", "torchvision", "transformers"} == set(stored["versions"])
    assert sum(n for outcomes in stored["counts"]["source"].values() for n in outcomes.values()) > 100
    assert stored["to_look_at"] == []
    beside = stored["autocast"]
    assert (beside["share"], beside["differ"], beside["explained"]) == (1.0, [], autocast_oracle.EXPLAINED)
    assert beside["samples"] > 6000
