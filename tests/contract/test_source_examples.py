"""The code examples of the documents that mpkit was made from, ported to torch and run on real digits.

Names and arguments are those of the documents; where a text errs, the test says what is right. The documents, by their
numbers: 000 a dynamic loss scale with the low-level interface, 002 optimizers, 003 dynamic loss scaling as told in an
article on TensorFlow, 004 automatic mixed precision.
"""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from mpkit import scalers, schedules
from mpkit.casting import auto_mixed_precision, get_black_list, ledger, to_float
from mpkit.data import digits
from mpkit.formats import FP16, FP32
from mpkit.model import LossMonitor, Model
from mpkit.networks import Network, resnet18
from mpkit.optimizers import FTRL, SGD, AdaFactor, Adam, Momentum, trainable_params
from mpkit.policies import naive_loss_ratio, preset
from mpkit.scalers import (
    DynamicLossScaler,
    DynamicLossScaleUpdateCell,
    FixedLossScaleManager,
    PolicyLossScaler,
    StaticLossScaler,
    all_finite,
)
from mpkit.step import TrainOneStepCell, TrainOneStepWithLossScaleCell, WithLossCell, build_train_network

# The numbers beside the documents' tests below count the mistakes that were found in each text.


def datapipe(batch_size: int, count: int = 1500, size: int = 28) -> list[tuple[Tensor, Tensor]]:
    """Batches of real digits, normalised as MNIST is in document 004, in one fixed order."""
    images, labels = digits("train", size)
    normalised = (images[:count] - 0.1307) / 0.3081
    return list(zip(normalised.split(batch_size), labels[:count].split(batch_size)))


def accuracy(network: nn.Module, size: int = 28) -> float:
    images, labels = digits("test", size)
    network.eval()
    with torch.no_grad():
        return (network((images - 0.1307) / 0.3081).argmax(1) == labels).float().mean().item()


# --- 000: a dynamic loss scale with the low-level interface


def test_000_a_residual_network_with_a_dynamic_update_cell():
    lr_ori, momentum_ori, weight_decay = 0.05, 0.9, 1e-4
    torch.manual_seed(0)
    net = resnet18(width=8, in_channels=1)
    loss_function = nn.CrossEntropyLoss(reduction="mean")
    opt = SGD(trainable_params(net), lr_ori, momentum_ori, weight_decay=weight_decay)
    model_constructed = WithLossCell(net, loss_function)
    loss_scale_manager = DynamicLossScaleUpdateCell(loss_scale_value=2**12, scale_factor=2, scale_window=1000)
    model_constructed = TrainOneStepWithLossScaleCell(model_constructed, opt, scale_sense=loss_scale_manager)
    outcomes = [model_constructed(x, y) for _ in range(2) for x, y in datapipe(64, 512, 8)]
    assert outcomes[-1].loss < 0.6 * outcomes[0].loss
    assert not any(out.overflow for out in outcomes)
    assert outcomes[-1].scale == 2**12


def test_000_the_scale_moves_as_the_text_says_and_as_it_leaves_out():
    """Mistake 2: the floor at 1, and that an overflow starts the count of clean steps again, are not told there."""
    cell, scale = DynamicLossScaleUpdateCell(2**12, 2, 3), torch.tensor(2.0**12)

    def after(*overflows: bool) -> float:
        for overflow in overflows:
            cell(scale, torch.tensor(overflow))
        return scale.item()

    assert after(True) == 2**11
    assert after(False, False, True, False, False) == 2**10  # two clean steps, an overflow, two clean: no growth
    assert after(False) == 2**11
    assert after(*[True] * 20) == 1.0


def test_000_the_positional_weight_decay_is_the_dampening():
    """Mistake 1: SGD(params, LR, MOMENTUM, WEIGHT_DECAY)."""
    (group,) = SGD(Network().parameters(), 0.1, 0.9, 1e-4).param_groups
    assert (group["dampening"], group["weight_decay"]) == (1e-4, 0.0)


# --- 002: optimizers


class Net(nn.Module):
    """The document's network; its product of two 4-D tensors is not runnable there (mistake 5), in torch it is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 5)
        self.param = nn.Parameter(torch.tensor(np.array([1.0], np.float32)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = x * self.param
        return torch.matmul(x, x)


def groups_of(net: nn.Module) -> tuple[list, list]:
    conv_params = [(name, p) for name, p in trainable_params(net) if "conv" in name]
    no_conv_params = [(name, p) for name, p in trainable_params(net) if "conv" not in name]
    return conv_params, no_conv_params


def test_002_parameters_all_and_filtered():
    net = Net()
    assert len(Adam(params=trainable_params(net)).param_groups[0]["params"]) == 3
    _, no_conv_params = groups_of(net)
    optim = Adam(params=no_conv_params, learning_rate=0.1, weight_decay=0.0)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    net(digits()[0][:4]).sum().backward()
    optim.step()
    changed = [name for name, p in net.named_parameters() if not torch.equal(before[name], p)]
    assert changed == ["param"]


def test_002_a_fixed_rate_with_model():
    net = Network()
    optim = Momentum(params=trainable_params(net), learning_rate=0.01, momentum=0.9)
    model = Model(net, loss_fn=nn.CrossEntropyLoss(), optimizer=optim, metrics={"accuracy"})
    model.train(4, datapipe(64))
    assert model.eval(datapipe(100))["accuracy"] > 0.8


def test_002_the_piecewise_list():
    lr = schedules.piecewise_constant_lr([2, 5, 10], [0.1, 0.05, 0.01])
    assert lr == [0.1, 0.1, 0.05, 0.05, 0.05, 0.01, 0.01, 0.01, 0.01, 0.01]


def test_002_lists_come_from_functions_and_only_they_know_the_piecewise_one():
    """Mistake 4: the text calls the entries of dynamic_lr classes."""
    assert inspect.isfunction(schedules.piecewise_constant_lr)
    assert inspect.isclass(schedules.PolynomialDecayLR)
    assert not [name for name in dir(schedules) if name.lower().startswith("piecewise") and name.endswith("LR")]


def test_002_the_polynomial_schedule():
    polynomial_decay_lr = schedules.PolynomialDecayLR(
        learning_rate=0.1, end_learning_rate=0.01, decay_steps=4, power=0.5
    )
    assert f"{polynomial_decay_lr(torch.tensor(2, dtype=torch.int32)).item():.7f}" == "0.0736396"


def test_002_weight_decay_of_a_whole_network():
    """Mistakes 2 and 3: any decay >= 0 is taken, and ungrouped it spares names with beta or gamma, not biases."""
    net = nn.Module()
    net.weight, net.bias, net.bn_gamma = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = Momentum(trainable_params(net), learning_rate=0.01, momentum=0.9, weight_decay=1.5)
    for p in net.parameters():
        p.grad = torch.zeros(2)
    optimizer.step()
    decayed = {name: bool((p < 1).all()) for name, p in net.named_parameters()}
    assert decayed == {"weight": True, "bias": True, "bn_gamma": False}
    Momentum(trainable_params(Net()), learning_rate=0.01, momentum=0.9, weight_decay=0.9)
    with pytest.raises(ValueError, match="weight_decay"):
        Momentum(trainable_params(Net()), learning_rate=0.01, momentum=0.9, weight_decay=-0.1)


def test_002_groups_with_a_fixed_and_a_dynamic_rate():
    """Mistake 6: beside a dynamic rate, MindSpore's fixed 0.01 is really 0.009999990463256836; here it is 0.01."""
    net = Net()
    conv_params, no_conv_params = groups_of(net)
    polynomial_decay_lr = schedules.PolynomialDecayLR(0.1, 0.01, decay_steps=4, power=0.5)
    group_params = [
        {"params": conv_params, "weight_decay": 0.01, "lr": 0.01},
        {"params": no_conv_params, "lr": polynomial_decay_lr},
        {"order_params": trainable_params(net)},
    ]
    for faithful, fixed in ((True, 0.009999990463256836), (False, np.float32(0.01))):
        optim = Momentum(group_params, learning_rate=0.1, momentum=0.9, weight_decay=0.0, faithful=faithful)
        rates = {float(rate) for rate in optim.get_lr_parameter([net.conv.weight, net.conv.bias])}
        assert rates == {fixed}
        assert float(optim.get_lr_parameter(net.param)) == pytest.approx(0.1)
    assert [group["weight_decay"] for group in optim.param_groups] == [0.01, 0.0]
    net(digits()[0][:4]).sum().backward()
    optim.step()


def test_002_the_misspelt_group_key_is_refused():
    """Mistake 1."""
    for key, error in (("grad_centralizaiton", KeyError), ("grad_centralization", None)):
        groups = [{"params": trainable_params(Net()), key: True}]
        if error is None:
            Momentum(groups, 0.1, 0.9)
        else:
            with pytest.raises(error, match=key):
                Momentum(groups, 0.1, 0.9)


def test_002_an_optimizer_without_rates_per_group():
    """Mistake 7: FTRL refuses them at construction; so does AdaFactor, which fails at the first update there."""
    for optimizer in (FTRL, AdaFactor):
        with pytest.raises(ValueError, match="lr"):
            optimizer([{"params": trainable_params(Net()), "lr": 0.1}])


def test_002_the_optimizers_loss_scale_when_overflows_are_not_dropped():
    """FixedLossScaleManager(s, False) leaves the division to the optimizer, whose loss_scale must be s."""
    weights = []
    for manager in (FixedLossScaleManager(1024.0, drop_overflow_update=False), None):
        torch.manual_seed(0)
        net = Network()
        optim = Momentum(
            trainable_params(net), learning_rate=0.01, momentum=0.9, loss_scale=1024.0 if manager is not None else 1.0
        )
        model = Model(net, nn.CrossEntropyLoss(), optim, loss_scale_manager=manager)
        model.train(1, datapipe(64, 640))
        weights.append([p.detach() for p in net.parameters()])
    for scaled, plain in zip(*weights):
        torch.testing.assert_close(scaled, plain, rtol=0, atol=1e-6)


# --- 003: dynamic loss scaling in TensorFlow


def keras_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def softmax_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Per sample, as sparse_categorical_crossentropy returns it."""
    return nn.functional.cross_entropy(logits.float(), labels, reduction="none")


def test_003_as_printed_does_not_run():
    """The function is hidden by a number of the same name, and the loss is a vector, not a number."""
    dynamic_loss_scale = 1.0
    with pytest.raises(TypeError, match="not callable"):
        dynamic_loss_scale(torch.ones(4), dynamic_loss_scale=1.0)
    images, labels = datapipe(8)[0]
    losses = softmax_loss(keras_model()(images), labels)
    assert losses.shape == (8,)
    with pytest.raises(TypeError, match="loss must be a number"):
        naive_loss_ratio(1.0, losses)


def test_003_the_printed_step_passes_a_constant_so_nothing_is_scaled():
    ours, plain = auto_mixed_precision(keras_model(), "O1"), auto_mixed_precision(keras_model(), "O1")
    optimizers = [torch.optim.Adam(net.parameters()) for net in (ours, plain)]
    scale = 1.0
    for images, labels in datapipe(64, 640):
        for net, optimizer, factor in zip((ours, plain), optimizers, (1.0, None)):
            optimizer.zero_grad()
            loss = softmax_loss(net(images), labels).mean()
            (loss if factor is None else loss * factor).backward()
            optimizer.step()
        scale = naive_loss_ratio(scale, loss.item())
    assert scale != 1.0  # adapted, and never used
    for a, b in zip(ours.parameters(), plain.parameters()):
        assert torch.equal(a, b)


def test_003_the_rule_runs_away_and_never_skips():
    """With everything else repaired: it looks at the loss, not at gradients, and from 65536 it climbs without end."""
    net = auto_mixed_precision(keras_model(), "O2")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scale, scales = 65536.0, []
    for _ in range(4):
        for images, labels in datapipe(64):
            optimizer.zero_grad()
            loss = softmax_loss(net(images), labels).mean()
            (loss * scale).backward()
            for p in net.parameters():
                p.grad /= scale
            optimizer.step()
            scale = naive_loss_ratio(scale, loss.item())
            scales.append(scale)
    assert scales[10] / scales[9] == pytest.approx(1.1)
    assert not all(p.isfinite().all() for p in net.parameters())


def test_003_what_the_text_wants_is_a_finite_check():
    net = auto_mixed_precision(keras_model(), "O2")
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    scaler = PolicyLossScaler(preset("keras3", initial_scale=2.0**15, dynamic_growth_steps=50))
    step = TrainOneStepWithLossScaleCell(WithLossCell(net, nn.CrossEntropyLoss()), optimizer, scaler)
    outcomes = [step(images, labels) for _ in range(8) for images, labels in datapipe(64)]
    assert accuracy(net) > 0.85
    assert outcomes[-1].loss < 0.3
    assert all(p.isfinite().all() for p in net.parameters())


# --- 004: automatic mixed precision


def test_004_the_ranges_of_the_formats():
    """Mistakes 1 and 2: 1.7e38 is half the largest float32, and 0.00006666666 in float16 is a rounding."""
    assert (FP16.min_subnormal, FP16.max) == (2.0**-24, 65504.0)
    assert (FP32.min_subnormal, FP32.max) == (2.0**-149, float(torch.finfo(torch.float32).max))
    assert FP32.max == pytest.approx(2 * 1.7e38, rel=0.01)
    assert torch.tensor(0.00006666666).half().item() == 6.663799285888672e-05


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_004_the_written_out_training_step(level):
    torch.manual_seed(0)
    model = auto_mixed_precision(Network(), level)
    loss_fn, optimizer = nn.CrossEntropyLoss(), SGD(trainable_params(model), 1e-2)
    loss_scaler = DynamicLossScaler(scale_value=2**16, scale_factor=2, scale_window=50)

    def forward_fn(data: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(data)
        loss = loss_fn(logits, label)
        return loss_scaler.scale(loss), logits

    def train_step(data: Tensor, label: Tensor) -> Tensor:
        loss, _ = forward_fn(data, label)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        loss = loss_scaler.unscale(loss.detach())
        is_finite = all_finite(grads)
        if is_finite:
            for p, grad in zip(model.parameters(), loss_scaler.unscale(grads)):
                p.grad = grad
            optimizer.step()
        loss_scaler.adjust(is_finite)
        return loss

    losses = [train_step(data, label).item() for _ in range(6) for data, label in datapipe(16, 384)]
    assert losses[0] == pytest.approx(2.3, abs=0.1)
    assert np.mean(losses[-24:]) < 0.7
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())


def test_004_the_scalers_are_spelt_with_er():
    """Mistake 5: StaticLossScalar and DynamicLossScalar do not exist."""
    assert not hasattr(scalers, "StaticLossScalar")
    assert not hasattr(scalers, "DynamicLossScalar")


def test_004_all_finite_finds_overflow_not_underflow():
    """Mistake 3."""
    assert all_finite([torch.tensor([1e-30]).half()])  # flushed to zero, and finite
    assert not all_finite([torch.tensor([1e30]).half()])


def test_004_checking_before_and_after_the_division():
    """Mistake 4: text and code differ in the order; only corner cases tell the two apart."""
    scaler = StaticLossScaler(2.0**26)
    grads = [torch.tensor([60000.0, 1.0]).half()]
    assert all_finite(grads)
    assert scaler.unscale(grads)[0].tolist() == [0.0, 0.0]  # finite either way, and lost
    assert scaler.scale(torch.tensor(1.0).half()).isinf()


class NetworkFP16(nn.Module):
    """Document 004, cast layer by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.dense_relu_sequential = nn.Sequential(
            to_float(nn.Linear(28 * 28, 512), torch.float16),
            nn.ReLU(),
            to_float(nn.Linear(512, 512), torch.float16),
            nn.ReLU(),
            to_float(nn.Linear(512, 10), torch.float16),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_relu_sequential(self.flatten(x))


class NetworkFP16Manual(Network):
    """Document 004, the input cast by hand."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.flatten(x).to(torch.float16)
        return self.dense_relu_sequential(x).to(torch.float32)


def test_004_casting_layer_by_layer():
    network = NetworkFP16()
    images, _ = datapipe(8)[0]
    with ledger(network) as seen:
        out = network(images)
    assert out.dtype == torch.float16  # to_float casts no result back
    assert [row.compute for row in seen.rows if row.operation == "linear"] == ["float16"] * 3
    assert all(p.dtype == torch.float32 for p in network.parameters())


def test_004_casting_the_input_alone_fails_until_the_weights_are_cast_too():
    """Mistake 6."""
    images, _ = datapipe(8)[0]
    network = NetworkFP16Manual()
    with pytest.raises(RuntimeError, match="dtype"):
        network(images)
    to_float(network.dense_relu_sequential, torch.float16)
    assert network(images).dtype == torch.float32


def test_004_only_the_norms_stay_float32_under_o2():
    """Mistake 9: log and softmax are named as needing precision; O2 protects four norm classes and nothing else."""
    assert {cls.__name__ for cls in get_black_list()} == {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm"}
    network = auto_mixed_precision(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.LayerNorm(4)), "O2")
    seen = {}
    network[1].register_forward_hook(lambda *call: seen.update(softmax=call[2].dtype))
    assert network(torch.ones(2, 4)).dtype == torch.float32
    assert seen["softmax"] == torch.float16


def test_004_o3_is_not_entirely_float16():
    """Mistake 10: the result comes out float32 and parameters stay float32."""
    network = auto_mixed_precision(Network(), "O3")
    assert network(datapipe(8)[0][0]).dtype == torch.float32
    assert {p.dtype for p in network.parameters()} == {torch.float32}


def test_004_build_train_network_with_a_fixed_manager():
    """Mistakes 7 and 8: it runs on a CPU, with 128 and no adjustment; and the optimizer must be the new network's."""
    loss_fn, images = nn.CrossEntropyLoss(), datapipe(16, 384)
    loss_scale_manager = FixedLossScaleManager()
    model, optimizer_of_another = Network(), SGD(trainable_params(Network()), 1e-2)
    wrong = build_train_network(model, optimizer_of_another, loss_fn, level="O2", loss_scale_manager=loss_scale_manager)
    with pytest.raises(RuntimeError, match="not of an earlier one"):
        wrong(*images[0])
    model = Network()
    optimizer = SGD(trainable_params(model), 1e-2)
    cell = build_train_network(model, optimizer, loss_fn, level="O2", loss_scale_manager=loss_scale_manager)
    outcomes = [cell(*batch) for _ in range(3) for batch in images]
    assert {out.scale.item() for out in outcomes} == {128.0}
    assert outcomes[-1].loss < outcomes[0].loss
    assert type(build_train_network(Network(), optimizer, loss_fn)) is TrainOneStepCell


def test_004_model_prints_the_loss_in_the_documents_format(capsys):
    torch.manual_seed(0)
    model = Network()
    optimizer = SGD(trainable_params(model), 1e-2)
    trainer = Model(
        model,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        metrics={"accuracy"},
        amp_level="O2",
        loss_scale_manager=FixedLossScaleManager(),
    )
    images, labels = digits("train")
    train_dataset = DataLoader(TensorDataset(images[:384], labels[:384]), batch_size=16)
    trainer.train(10, train_dataset, callbacks=[LossMonitor(100)])
    lines = capsys.readouterr().out.splitlines()
    pattern = re.compile(r"epoch: (\d+) step: (\d+), loss is (\d\.\d+)")
    found = [pattern.fullmatch(line).groups() for line in lines]
    assert [(int(e), int(s)) for e, s, _ in found] == [(5, 4), (9, 8)]  # 24 batches per epoch, a line every 100 steps
    assert float(found[1][2]) < float(found[0][2])
    assert trainer.eval(DataLoader(TensorDataset(*digits("test")), batch_size=64))["accuracy"] > 0.6
