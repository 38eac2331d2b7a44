"""AutoBoost: what a level and a configuration resolve to, and what they do to a network and an optimizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Written
from torch import nn

from mpkit import networks
from mpkit.boost import AutoBoost, BoostTrainOneStepCell, FreezeOpt, LessBN, auto
from mpkit.boost.config import FLAGS, KEYS, TUNED
from mpkit.boost.less_bn import NormalizedLinear
from mpkit.step import WithLossCell

TABLE: dict[str, tuple[Any, Any, Any]] = {  # key -> what it is by default, another value, one that is refused
    "gradient_split_groups": (None, [0, 23], (1, 2)), "device_number": (8, 1, 0), "fn_flag": (True, False, 1),
    "gc_flag": (True, False, "yes"), "param_groups": (10, 3, 2.5), "freeze_type": (1, 0, True),
    "freeze_p": (0.7, 0.5, 1.2), "total_steps": (65536, 20, "many"), "grad_accumulation_step": (1, 4, 0),
    "rho": (0.55, 0.3, -0.1), "gamma": (0.9, 0.5, None), "alpha": (0.001, 0.1, "lr"), "sigma": (0.4, 0.2, 2),
    "n_components": (32, 9, 0), "pca_mat_path": (None, "p.npy", 3), "weight_load_dir": (None, "w", 4),
    "timeout": (1800, 23, -1),
}  # fmt: skip
DEFAULTS = {name: row[0] for name, row in TABLE.items()}
ALL_ON = {"mode": "manual", **dict.fromkeys(FLAGS, True)}


def sgd(net: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, **options)


@pytest.mark.parametrize("name", TABLE)
def test_every_key_is_read_in_its_section_and_checked(name: str) -> None:
    section, (default, other, bad) = KEYS[name], TABLE[name]
    for value in (default, other):
        assert AutoBoost("O0", {"boost": ALL_ON, section: {name: value}}).hyper == {**DEFAULTS, name: value}
    with pytest.raises(ValueError, match=f"section {section}: .*{name}"):
        AutoBoost("O0", {"boost": ALL_ON, section: {name: bad}})
    wrong = "less_bn" if section != "less_bn" else "grad_freeze"
    with pytest.raises(ValueError, match=f"it belongs to section '{section}'"):
        AutoBoost("O0", {wrong: {name: other}})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("O7",), r"no level 'O7'; did you mean 'O.'\? Valid: O0, O1, O2"),
        (("O1", {"boost": {"mode": "AUTO"}}), "no mode 'AUTO'; did you mean 'auto'"),
        (("O1", {"bost": {}}), "no section 'bost'; did you mean 'boost'"),
        (("O1", {"less_bn": {"fnflag": True}}), "no key 'fnflag'; did you mean 'fn_flag'"),
        (("O1", {"boost": {"mode": "manual", "less_bn": "on"}}), "section boost: less_bn must be True or False"),
    ],
)
def test_unknown_names_and_values_are_refused_with_the_nearest_valid_one(args: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AutoBoost(*args)


def test_a_json_file_is_the_same_as_its_dict(tmp_path: Path) -> None:
    config = {"boost": {"mode": "manual", "adasum": True}, "dim_reduce": {"pca_mat_path": None}}
    path = tmp_path / "boost_config.json"
    path.write_text(json.dumps(config))
    want = AutoBoost("O1", config)
    for boost in (AutoBoost.from_json(path, "O1"), AutoBoost("O1", path), AutoBoost("O1", str(path))):
        assert (boost.flags, boost.hyper) == (want.flags, want.hyper)


# what runs and what does not


def reasons(boost: AutoBoost) -> dict[str, str]:
    return {item.what: item.reason for item in boost.inactive}


def test_what_has_no_effect_is_listed_with_the_reason() -> None:
    assert "= 0 groups" in reasons(AutoBoost("O2"))["adasum"]
    one = AutoBoost("O1", {"grad_freeze": {"freeze_p": 1}})
    assert reasons(one)["grad_freeze"] == "freeze_p is 1: no step is ever frozen"
    assert one.active == ("less_bn",)
    quiet = AutoBoost("O0", {"boost": {"less_bn": True}, "grad_freeze": {"param_groups": 3}})
    assert reasons(quiet) == {
        "boost.less_bn": "mode 'auto' does not read flags; use 'manual'",
        "section grad_freeze": "grad_freeze is off at level O0 in mode 'auto'",
    }
    assert ["  active: nothing" in str(quiet), "  active: less_bn\n" in str(one)] == [True, True]
    assert "takes the freeze path first" in reasons(AutoBoost("O2", faithful=True))["adasum"]


def test_tuned_is_a_mode_of_its_own() -> None:
    boost = AutoBoost("O1", {"boost": {"mode": "tuned"}, "grad_freeze": {"total_steps": 10}})
    assert boost.hyper == {**DEFAULTS, **TUNED, "total_steps": 10}
    assert AutoBoost("O1", {"boost": {"mode": "tuned"}, "grad_freeze": {"freeze_p": 0.9}}).hyper["freeze_p"] == 0.9
    with pytest.raises(ValueError, match="tuned"):
        AutoBoost("O1", {"boost": {"mode": "tuned"}}, faithful=True)


def test_o1_removes_norms_normalises_centralizes_and_freezes() -> None:
    net = networks.resnet18(width=4)
    inner = sgd(net, weight_decay=0.01)
    boost = AutoBoost("O1", {"grad_freeze": {"total_steps": 40}})
    network, optimizer = boost.network_auto_process_train(net, inner)
    assert (type(network), type(net.fc), type(optimizer)) == (LessBN, NormalizedLinear, FreezeOpt)
    assert optimizer.optimizer is inner
    assert (len(network.report.removed), len(optimizer.strategy), len(optimizer.groups)) == (11, 40, 10)
    held = {id(p) for group in inner.param_groups for p in group["params"]}
    assert held == {id(p) for p in network.parameters()}  # the multiplier came, what was removed went
    centralized = [p.ndim for g in inner.param_groups if g.get("grad_centralization") for p in g["params"]]
    assert centralized == [4] * 20  # every convolution; not the normalised layer
    assert {g["weight_decay"] for g in inner.param_groups} == {0.01}


def test_the_default_number_of_groups_fits_small_networks_and_a_given_one_is_not_changed_silently() -> None:
    net = networks.LeNet5()
    _, optimizer = AutoBoost("O1").network_auto_process_train(net, sgd(net))
    assert len(optimizer.groups) == 5  # type: ignore[attr-defined]
    single = nn.Linear(2, 2)
    assert len(AutoBoost("O1").network_auto_process_train(single, sgd(single))[1].groups) == 1  # type: ignore[attr-defined]
    net = networks.LeNet5()
    with pytest.warns(UserWarning, match="9 freeze groups"):
        AutoBoost("O1", {"grad_freeze": {"param_groups": 9}}).network_auto_process_train(net, sgd(net))


@pytest.mark.parametrize(("faithful", "marks"), [(False, {False, True}), (True, {False, 16})])
def test_only_the_faithful_centralize_by_the_tiles_of_mindspores_kernel(faithful: bool, marks: set[Any]) -> None:
    net = networks.resnet18(width=2)
    boost = AutoBoost("O0", {"boost": {"mode": "manual", "less_bn": True}}, faithful=faithful)
    groups = boost.network_auto_process_train(net, sgd(net))[1].param_groups
    assert {group.get("grad_centralization", False) for group in groups} == marks


def scaled_loss(loss: Any, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss that learns a temperature."""
    return nn.functional.cross_entropy(outputs * loss.temperature, labels)


@pytest.mark.parametrize("flag", ["less_bn", "grad_freeze"])
def test_what_the_optimizer_holds_beside_the_network_goes_on_learning(flag: str) -> None:
    net, loss = networks.resnet18(width=2), Written(scaled_loss, temperature=nn.Parameter(torch.ones(())))
    optimizer: torch.optim.Optimizer = torch.optim.SGD([*net.parameters(), *loss.parameters()], lr=0.1)
    boost = AutoBoost("O0", {"boost": {"mode": "manual", flag: True}, "grad_freeze": {"total_steps": 4}})
    network, optimizer = boost.network_auto_process_train(net, optimizer)
    cell = BoostTrainOneStepCell(WithLossCell(network, loss), optimizer, boost=boost)
    seen = {loss.temperature.item()}
    for _ in range(4):  # the second of them is frozen
        cell(torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))
        seen.add(loss.temperature.item())
    assert len(seen) == 5


def test_a_mark_asks_for_adasum_where_there_is_something_to_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "rank_and_size", lambda: (0, 2))
    plain, marked = sgd(nn.Linear(1, 1)), sgd(nn.Linear(1, 1))
    marked.adasum = True  # type: ignore[attr-defined]
    assert [auto.made_by(optimizer, None).merges(optimizer) for optimizer in (plain, marked)] == [False, True]


def test_what_was_left_out_of_the_optimizer_stays_out() -> None:
    net = networks.resnet18(width=2)
    with pytest.raises(ValueError, match="only what less_bn removes"):
        AutoBoost("O1").network_auto_process_train(net, sgd(net.layer1[0].bn1))
    optimizer = torch.optim.SGD(net.fc.parameters(), lr=0.1)  # only the head is fine-tuned
    AutoBoost("O0", {"boost": {"mode": "manual", "less_bn": True}}).network_auto_process_train(net, optimizer)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in net.fc.parameters()}
    assert len(held) == 2  # the weight and the new factor
