"""The networks have the sizes that their papers state."""

import pytest
import torch
from torch import nn

from mpkit import networks


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def batch_norms(module: nn.Module) -> int:
    return sum(isinstance(m, nn.BatchNorm2d) for m in module.modules())


# counts as published: torchvision's model cards for the ResNets, the GPT-2 report (124 M, here with 50304 tokens)
@pytest.mark.parametrize(
    ("build", "count", "norms"),
    [
        (lambda: networks.Network(), 784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10, 0),
        (lambda: networks.resnet18(classes=1000, small_input=False), 11_689_512, 20),
        (lambda: networks.resnet34(classes=1000, small_input=False), 21_797_672, 36),
        (lambda: networks.resnet50(classes=1000, small_input=False), 25_557_032, 53),
        (lambda: networks.MobileNetV2(classes=1000), 3_504_872, 52),
        (lambda: networks.TinyGPT.gpt2_124m(), 124_439_808 + (50304 - 50257) * 768, 0),
    ],
    ids=["Network", "resnet18", "resnet34", "resnet50", "mobilenet_v2", "gpt2"],
)
def test_sizes_are_those_of_the_papers(build, count, norms):
    with torch.device("meta"):
        network = build()
    assert parameters(network) == count
    assert batch_norms(network) == norms


@pytest.mark.parametrize(
    ("network", "shape"),
    [
        (networks.Network(), (2, 1, 28, 28)),
        (networks.LeNet5(), (2, 1, 28, 28)),
        (networks.LeNet5(), (2, 1, 32, 32)),
        (networks.resnet18(width=4), (2, 3, 16, 16)),
        (networks.resnet50(width=4, in_channels=1, small_input=False), (2, 1, 32, 32)),
        (networks.MobileNetV2(((1, 4, 1, 1), (6, 8, 2, 2)), stem=4, head=16), (2, 3, 16, 16)),
        (networks.DenseNet((2, 2), growth=4), (2, 3, 16, 16)),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_images_become_ten_logits_and_every_parameter_gets_a_gradient(network, shape):
    logits = network(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    assert logits.shape == (2, 10)
    logits.square().sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_a_token_of_tiny_gpt_sees_only_its_past():
    torch.manual_seed(0)
    network = networks.TinyGPT().eval()
    tokens = torch.randint(128, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 128
    before, after = network(tokens), network(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_a_network_says_what_it_cannot_be_made_of_or_take():
    with pytest.raises(ValueError, match=r"depths must be four numbers of blocks, as in \(2, 2, 2, 2\), got \(1, 1\)"):
        networks.ResNet(networks.ResidualBlock, (1, 1))
    with pytest.raises(ValueError, match="each of depths must be at least 0, got -1"):
        networks.ResNet(networks.ResidualBlock, (1, -1, 1, 1), width=4)
    with pytest.raises(ValueError, match="tokens must be at most 4 to a row, the context of this network, got 5"):
        networks.TinyGPT(context=4)(torch.zeros(1, 5, dtype=torch.long))
