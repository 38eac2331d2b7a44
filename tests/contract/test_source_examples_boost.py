"""Every code example of document 001, the boost API, ported to torch with as few changes as possible.

What had to change everywhere: `Cell` is `nn.Module`, `construct` is `forward`, `trainable_params()` is
`parameters()`, a loss takes torch's names. The tests are in the order of the text; each says where the text errs.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mpkit import boost
from mpkit.boost import AutoBoost, FreezeOpt, OptimizerProcess, ParameterProcess, freeze_cell
from mpkit.data import digits
from mpkit.model import Model
from mpkit.networks import LeNet5, resnet18
from mpkit.optimizers import Momentum
from mpkit.scalers import DynamicLossScaleUpdateCell
from mpkit.step import WithLossCell

SUGGESTED = {
    "boost": {
        "mode": "auto",
        "less_bn": False,
        "grad_freeze": False,
        "adasum": False,
        "grad_accumulation": False,
        "dim_reduce": False,
    },
    "common": {"gradient_split_groups": [50, 100], "device_number": 8},
    "less_bn": {"fn_flag": True, "gc_flag": True},
    "grad_freeze": {"param_groups": 10, "freeze_type": 1, "freeze_p": 0.7, "total_steps": 65536},
    "grad_accumulation": {"grad_accumulation_step": 1},
    "dim_reduce": {
        "rho": 0.55,
        "gamma": 0.9,
        "alpha": 0.001,
        "sigma": 0.4,
        "n_components": 32,
        "pca_mat_path": None,
        "weight_load_dir": None,
        "timeout": 1800,
    },
}


NAMES = {
    *("AdaSum", "AutoBoost", "BoostTrainOneStepCell", "BoostTrainOneStepWithLossScaleCell", "DimReduce", "FreezeOpt"),
    *("GradientAccumulation", "GradientFreeze", "GroupLossScaleManager", "LessBN", "OptimizerProcess"),
    *("ParameterProcess", "freeze_cell"),
}


class Net(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = Parameter(torch.from_numpy(np.ones([in_features, out_features]).astype(np.float32)))
        self.matmul = torch.matmul

    def forward(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.weight)


def create_dataset(batches: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Real digits in batches of 32."""
    images, labels = digits("train")
    return list(zip(images.split(32), labels.split(32)))[:batches]


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_the_suggested_configuration_is_the_default_one(level: str) -> None:
    """In mode auto its flags are not read, and its values are the defaults, gradient_split_groups apart."""
    suggested, default = AutoBoost(level, SUGGESTED), AutoBoost(level)
    assert suggested.flags == default.flags
    assert {k: v for k, v in suggested.hyper.items() if v != default.hyper[k]} == {"gradient_split_groups": [50, 100]}


def test_autoboost(tmp_path: Path) -> None:
    # 1) when configuring the dict directly:
    boost_config_dict = {"boost": {"mode": "auto"}}
    chosen = AutoBoost("O1", boost_config_dict)
    assert chosen.active == ("less_bn", "grad_freeze")

    # 2) when loading the dict from a json file:
    boost_json = tmp_path / "boost_config.json"
    boost_json.write_text(json.dumps(SUGGESTED))
    with open(boost_json) as fp:
        boost_config_dict = json.load(fp)
    chosen = AutoBoost("O1", boost_config_dict)
    assert chosen.active == ("less_bn", "grad_freeze")


def test_autoboost_refuses_another_mode() -> None:
    with pytest.raises(ValueError, match="Valid: auto, manual, enable_all, disable_all"):
        AutoBoost("O1", {"boost": {"mode": "AUTO"}})


def test_optimizer_process() -> None:
    """In MindSpore this example changes nothing: a flat list of parameters gets no centralization there."""
    _size, in_features, out_features = 16, 16, 10
    network = Net(in_features, out_features)
    optimizer: torch.optim.Optimizer = Momentum(network.parameters(), learning_rate=0.1, momentum=0.9)
    optimizer_process = OptimizerProcess(optimizer)
    optimizer_process.add_grad_centralization(network)
    optimizer = optimizer_process.generate_new_optimizer()
    assert optimizer.param_groups[0]["grad_centralization"] is True


class TwoWeights(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = Parameter(torch.from_numpy(np.ones([in_features, out_features]).astype(np.float32)))
        self.weight2 = Parameter(torch.from_numpy(np.ones([in_features, out_features]).astype(np.float32)))
        self.matmul = torch.matmul
        self.matmul2 = torch.matmul

    def forward(self, x: Tensor) -> Tensor:
        output = self.matmul(x, self.weight)
        output2 = self.matmul2(x, self.weight2)
        return output + output2


def test_parameter_process() -> None:
    _size, in_features, out_features = 16, 16, 10
    network = TwoWeights(in_features, out_features)
    new_parameter = list(network.parameters())[:1]
    group_params = ParameterProcess.generate_group_params(new_parameter, list(network.parameters()))
    assert [[id(p) for p in group["params"]] for group in group_params] == [[id(network.weight)]]


def test_boost_train_one_step_cell() -> None:
    """The user's own cell of the text takes (x, y, label) and calls backbone(x, y): a backbone of two inputs."""
    net = LeNet5()
    loss_fn = nn.CrossEntropyLoss()
    optim = Momentum(net.parameters(), learning_rate=0.1, momentum=0.9)
    images, labels = create_dataset(1)[0]
    # 1) Using the WithLossCell existing provide
    loss_net: nn.Module = WithLossCell(net, loss_fn)
    train_net = boost.BoostTrainOneStepCell(loss_net, optim)
    loss, overflow, scale = train_net(images, labels)
    assert loss.shape == overflow.shape == scale.shape == ()
    assert overflow.dtype == torch.bool

    # 2) Using user-defined WithLossCell
    class MyWithLossCell(nn.Module):
        def __init__(self, backbone: nn.Module, loss_fn: nn.Module) -> None:
            super().__init__()
            self._backbone = backbone
            self._loss_fn = loss_fn

        def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
            out = self._backbone(x, y)
            return self._loss_fn(out, label)

        @property
        def backbone_network(self) -> nn.Module:
            return self._backbone

    class Sum(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.net(x + y)

    loss_net = MyWithLossCell(Sum(net), loss_fn)
    train_net = boost.BoostTrainOneStepCell(loss_net, optim)
    assert train_net(images / 2, images / 2, labels).loss < loss


@pytest.mark.parametrize("sens", ["1.0", [1.0]])
def test_boost_train_one_step_cell_refuses_sens_that_is_no_number(sens: object) -> None:
    net = LeNet5()
    with pytest.raises(TypeError, match="sens"):
        boost.BoostTrainOneStepCell(net, Momentum(net.parameters(), 0.1, 0.9), sens)  # type: ignore[arg-type]


def test_boost_train_one_step_with_loss_scale_cell() -> None:
    """The labels of the first example have shape (10,) beside outputs of (10, 10); here they have that shape."""
    size, in_features, out_features = 16, 16, 10
    # 1) when the type of scale_sense is Cell:
    net = Net(in_features, out_features)
    loss = nn.MSELoss()
    optimizer = Momentum(net.parameters(), learning_rate=0.1, momentum=0.9)
    net_with_loss = WithLossCell(net, loss)
    manager = DynamicLossScaleUpdateCell(loss_scale_value=2**12, scale_factor=2, scale_window=1000)
    train_network = boost.BoostTrainOneStepWithLossScaleCell(net_with_loss, optimizer, scale_sense=manager)
    input = torch.from_numpy(np.ones([out_features, in_features])).to(torch.float32)
    labels = torch.from_numpy(np.ones([out_features, out_features])).to(torch.float32)
    output = train_network(input, labels)
    # a last bit of each output moves its distance of 15 by 2**-20, and the sum of 100 squares rounds as often
    assert output.loss.item() == pytest.approx(15.0**2, rel=1e-5)
    assert not output.overflow
    assert output.scale == 2**12

    # 2) when the type of scale_sense is Tensor:
    net = Net(in_features, out_features)
    loss = nn.MSELoss()
    optimizer = Momentum(net.parameters(), learning_rate=0.1, momentum=0.9)
    net_with_loss = WithLossCell(net, loss)
    inputs = torch.from_numpy(np.ones([size, in_features]).astype(np.float32))
    label = torch.from_numpy(np.zeros([size, out_features]).astype(np.float32))
    scaling_sens = torch.from_numpy(np.full((1), np.finfo(np.float32).max)).to(dtype=torch.float32)
    train_network = boost.BoostTrainOneStepWithLossScaleCell(net_with_loss, optimizer, scale_sense=scaling_sens)
    output = train_network(inputs, label)
    assert output.overflow  # the largest float32 as a scale makes every gradient infinite: the step is skipped
    assert torch.equal(net.weight, torch.ones(in_features, out_features))


@pytest.mark.parametrize(("scale_sense", "error"), [(1.0, TypeError), (torch.ones(2), ValueError)])
def test_boost_train_one_step_with_loss_scale_cell_refuses(scale_sense: object, error: type[Exception]) -> None:
    net = Net(2, 2)
    with pytest.raises(error, match="scale_sense"):
        boost.BoostTrainOneStepWithLossScaleCell(net, Momentum(net.parameters(), 0.1, 0.9), scale_sense)


def test_less_bn() -> None:
    """ "Without losing accuracy" is the text's claim; what is measured stands in data/benchmarks/boost.json."""
    network: nn.Module = resnet18(width=4)
    network = boost.LessBN(network)
    assert sum(isinstance(m, nn.BatchNorm2d) for m in network.modules()) == 9


def test_gradient_freeze() -> None:
    """The text calls the first argument a list of parameters; it is the number of groups. freeze_p is the share of
    steps that are not frozen."""
    network: nn.Module = resnet18(width=4)
    optimizer: torch.optim.Optimizer = Momentum(network.parameters(), 0.1, 0.9)
    gradient_freeze_class = boost.GradientFreeze(10, 1, 0.5, 2000)
    network, optimizer = gradient_freeze_class.freeze_generate(network, optimizer)
    assert isinstance(optimizer, FreezeOpt)
    assert len(optimizer.groups) == 10
    assert optimizer.strategy.count(0) == 1000


def test_freeze_cell() -> None:
    in_features, out_features = 16, 10
    network = Net(in_features, out_features)
    optimizer: torch.optim.Optimizer = Momentum(network.parameters(), learning_rate=0.1, momentum=0.9)
    optimizer = FreezeOpt(optimizer)
    grad = None  # GradOperation(get_by_list=True, sens_param=True): autograd needs none
    freeze_nets = freeze_cell(False, network, optimizer, 1.0, grad, False, None, None, 1)
    assert len(freeze_nets) == 1


class AmpNet(nn.Module):
    def __init__(self, enhanced_amp: boost.GroupLossScaleManager, num_class: int = 10, num_channel: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_channel, 6, 5, padding=2)  # a 28x28 digit; the text's inputs are 32x32
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_class)
        self.relu = nn.ReLU()
        self.max_pool2d = nn.MaxPool2d(kernel_size=2, stride=2)
        self.flatten = nn.Flatten()
        self.enhanced_amp = enhanced_amp

    def forward(self, x: Tensor) -> Tensor:
        x = self.enhanced_amp(x, 0, 1)
        x = self.max_pool2d(self.relu(self.conv1(x)))
        x = self.max_pool2d(self.relu(self.conv2(x)))
        x = self.flatten(x)
        x = self.enhanced_amp(x, 1, 2)
        x = self.relu(self.fc1(x))
        x = self.relu(self.fc2(x))
        x = self.fc3(x)
        return self.enhanced_amp(x, 2, 3)


def test_group_loss_scale_manager() -> None:
    """The text's weights of fc1..fc3 are all ones, with which nothing trains; here they start as torch's."""
    loss_scale_manager = boost.GroupLossScaleManager(4096, [])
    net = AmpNet(loss_scale_manager)
    param_group1 = []
    param_group2 = []
    for name, param in net.named_parameters():
        if "conv" in name:
            param_group1.append(param)
        else:
            param_group2.append(param)
    loss_scale_manager.loss_scale_groups = [param_group1, param_group2]
    loss = nn.CrossEntropyLoss()
    optim = Momentum(net.parameters(), learning_rate=0.1, momentum=0.9)
    boost_config_dict = {
        "boost": {
            "mode": "manual",
            "less_bn": False,
            "grad_freeze": False,
            "adasum": False,
            "grad_accumulation": False,
            "dim_reduce": False,
            "loss_scale_group": True,
        }
    }
    model = Model(
        net,
        loss_fn=loss,
        optimizer=optim,
        metrics=None,
        loss_scale_manager=loss_scale_manager,
        boost_level="O1",
        boost_config_dict=boost_config_dict,
    )
    dataset = create_dataset()
    model.train(2, dataset)
    grown = 4096 * 2 ** (8 / 1000)
    torch.testing.assert_close(loss_scale_manager.scales, torch.full((2,), grown))


@pytest.mark.parametrize("name", boost.__all__)
def test_every_public_name_of_boost_is_one_of_the_texts_and_documented(name: str) -> None:
    assert name in NAMES
    assert getattr(boost, name).__doc__


def test_no_name_of_the_text_is_missing() -> None:
    assert set(boost.__all__) == NAMES
