"""The networks of the lessons, small enough to read and named as their papers and torchvision name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.gpt import CausalSelfAttention, TinyGPT, TransformerBlock

# fmt: off
__all__ = [
    "Bottleneck", "CausalSelfAttention", "DenseLayer", "DenseNet", "InvertedResidual", "LeNet5", "MobileNetV2",
    "Network", "ResNet", "ResidualBlock", "TinyGPT", "TransformerBlock", "resnet18", "resnet34", "resnet50",
]
# fmt: on


class Network(nn.Module):
    """The 784-512-512-10 perceptron of the MindSpore tutorials, for 28x28 images of ten classes.

    Shapes:  x (N, 1, 28, 28) or (N, 784) float -> logits (N, classes).
    Source:  MindSpore tutorial "automatic mixed precision", class Network (dense_relu_sequential).
    """

    def __init__(self, classes: int = 10, hidden: int = 512, inputs: int = 784) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.dense_relu_sequential = nn.Sequential(
            nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_relu_sequential(self.flatten(x))


class LeNet5(nn.Module):
    """LeNet-5 with ReLU and max pooling, as the MindSpore samples write it (biases in the dense layers).

    Shapes:  x (N, in_channels, 28, 28) or (N, in_channels, 32, 32) float -> logits (N, classes); 28x28 is padded by 2.
    Source:  LeCun et al. 1998, "Gradient-based learning applied to document recognition", section II.B.
    """

    def __init__(self, classes: int = 10, in_channels: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 6, 5, bias=False)
        self.conv2 = nn.Conv2d(6, 16, 5, bias=False)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] == 28:
            x = F.pad(x, (2, 2, 2, 2))
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return self.fc3(F.relu(self.fc2(x)))


def _conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> tuple[nn.Module, nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return conv, nn.BatchNorm2d(outputs)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (the "basic" block).

    Shapes:  x (N, in_channels, H, W) -> (N, out_channels, H/stride, W/stride).
    Source:  He et al. 2016, arXiv:1512.03385, figure 5 left; projection shortcut (option B) where shapes differ.
    """

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv_bn(in_channels, channels, 3, stride)
        self.relu = nn.ReLU()
        self.conv2, self.bn2 = _conv_bn(channels, channels, 3)
        self.downsample = _projection(in_channels, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + shortcut)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut; the stride sits in the 3x3 (the "v1.5" block).

    Shapes:  x (N, in_channels, H, W) -> (N, 4*channels, H/stride, W/stride).
    Source:  He et al. 2016, arXiv:1512.03385, figure 5 right.
    """

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        out = channels * self.expansion
        self.conv1, self.bn1 = _conv_bn(in_channels, channels, 1)
        self.conv2, self.bn2 = _conv_bn(channels, channels, 3, stride)
        self.conv3, self.bn3 = _conv_bn(channels, out, 1)
        self.relu = nn.ReLU()
        self.downsample = _projection(in_channels, out, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + shortcut)


def _projection(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    same = stride == 1 and in_channels == out_channels
    return None if same else nn.Sequential(*_conv_bn(in_channels, out_channels, 1, stride))


class ResNet(nn.Module):
    """Residual network with torchvision's names (`conv1 bn1 layer1..4 fc`, `downsample`).

    Args:
        block:        ResidualBlock or Bottleneck.
        depths:       blocks per stage, four numbers.
        width:        channels of the first stage (64 in the paper).
        small_input:  3x3 stem of stride 1 without pooling (CIFAR style) instead of 7x7 of stride 2 and a max pool.
    Shapes:  x (N, in_channels, H, W) float -> logits (N, classes).
    """

    def __init__(
        self,
        block: type[ResidualBlock] | type[Bottleneck],
        depths: Sequence[int],
        width: int = 64,
        classes: int = 10,
        in_channels: int = 3,
        small_input: bool = True,
    ) -> None:
        super().__init__()
        kernel, stride = (3, 1) if small_input else (7, 2)
        self.conv1, self.bn1 = _conv_bn(in_channels, width, kernel, stride)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if small_input else nn.MaxPool2d(3, 2, padding=1)
        channels, stages = width, []
        for stage, depth in enumerate(depths):
            inner, outer = width * 2**stage, width * 2**stage * block.expansion
            blocks = [block(outer if i else channels, inner, 2 if stage and not i else 1) for i in range(depth)]
            stages.append(nn.Sequential(*blocks))
            channels = outer
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet18(**options: Any) -> ResNet:
    """ResNet-18: [2, 2, 2, 2] basic blocks. Options as `ResNet`."""
    return ResNet(ResidualBlock, (2, 2, 2, 2), **options)


def resnet34(**options: Any) -> ResNet:
    """ResNet-34: [3, 4, 6, 3] basic blocks. Options as `ResNet`."""
    return ResNet(ResidualBlock, (3, 4, 6, 3), **options)


def resnet50(**options: Any) -> ResNet:
    """ResNet-50: [3, 4, 6, 3] bottlenecks. Options as `ResNet`."""
    return ResNet(Bottleneck, (3, 4, 6, 3), **options)


class InvertedResidual(nn.Module):
    """Expand 1x1, depthwise 3x3, project 1x1; a shortcut where shapes allow it.

    Source:  Sandler et al. 2018, arXiv:1801.04381, section 3.3 and table 1.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        self.shortcut = stride == 1 and in_channels == out_channels
        expand = () if expansion == 1 else (*_conv_bn(in_channels, hidden, 1), nn.ReLU6())
        depthwise = *_conv_bn(hidden, hidden, 3, stride, groups=hidden), nn.ReLU6()
        self.conv = nn.Sequential(*expand, *depthwise, *_conv_bn(hidden, out_channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.shortcut else self.conv(x)


Settings = Sequence[tuple[int, int, int, int]]


class MobileNetV2(nn.Module):
    """MobileNetV2 with free block settings.

    Args:
        settings:  rows of (expansion, channels, repeats, stride), as table 2 of the paper.
    Shapes:  x (N, in_channels, H, W) float -> logits (N, classes).
    Source:  Sandler et al. 2018, arXiv:1801.04381, table 2.
    """

    PAPER = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(
        self, settings: Settings = PAPER, stem: int = 32, head: int = 1280, classes: int = 10, in_channels: int = 3
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [*_conv_bn(in_channels, stem, 3, 2), nn.ReLU6()]
        channels = stem
        for expansion, outputs, repeats, stride in settings:
            for i in range(repeats):
                layers.append(InvertedResidual(channels, outputs, stride if i == 0 else 1, expansion))
                channels = outputs
        self.features = nn.Sequential(*layers, *_conv_bn(channels, head, 1), nn.ReLU6())
        self.classifier = nn.Linear(head, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


class DenseLayer(nn.Module):
    """BN-ReLU-1x1, BN-ReLU-3x3; the result is concatenated to the input.

    Source:  Huang et al. 2017, arXiv:1608.06993, section 3 (DenseNet-B).
    """

    def __init__(self, in_channels: int, growth: int, bottleneck: int = 4) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, bottleneck * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(bottleneck * growth)
        self.conv2 = nn.Conv2d(bottleneck * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(F.relu(self.norm2(y)))], 1)


class DenseNet(nn.Module):
    """DenseNet-BC for small images: a 3x3 stem, dense blocks, halving transitions.

    Shapes:  x (N, in_channels, H, W) float -> logits (N, classes).
    Source:  Huang et al. 2017, arXiv:1608.06993, section 3 and 4.2.
    """

    def __init__(self, blocks: Sequence[int] = (4, 4, 4), growth: int = 12, classes: int = 10, in_channels: int = 3):
        super().__init__()
        channels = 2 * growth
        layers: list[nn.Module] = [nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)]
        for b, depth in enumerate(blocks):
            for _ in range(depth):
                layers.append(DenseLayer(channels, growth))
                channels += growth
            if b + 1 < len(blocks):
                layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1, bias=False)]
                layers.append(nn.AvgPool2d(2))
                channels //= 2
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU())
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))
