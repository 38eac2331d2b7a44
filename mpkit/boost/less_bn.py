"""LessBN: drop the BatchNorms that a residual network can do without, and normalise its last layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.arguments import checked
from mpkit.boost.bn_rules import BATCH_NORMS, removable
from mpkit.casting.levels import copy_to_float

__all__ = ["LessBN", "LessBNReport", "NormalizedLinear"]

EPSILON = 1e-4
READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Layers of torch that read the weights of their Linear children, in evaluation at least."""


class NormalizedLinear(nn.Module):
    """A last layer that compares directions: y = m (x/|x| . W/|W| + b), with one learned factor m.

    Norms are over rows, |v| = sqrt(max(v.v, 1e-4)), so that without a bias the logits start within [-1, 1]. The
    gradient is that of this formula everywhere (below the limit MindSpore's kernel is wrong by orders).

    Shapes:  x (*, in_features) -> (*, out_features); weight (out_features, in_features), bias (out_features,) or
             None, multiplier (1,), initially 1. Norms are computed in float32 or wider.
    Source:  MindSpore boost.LessBN with fn_flag.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(out_features)) if bias else None
        self.multiplier = nn.Parameter(torch.ones(1))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    @classmethod
    def of(cls, linear: Any, keep_bias: bool = False) -> NormalizedLinear:
        """The normalised form of `linear`: its weight and `to_float`; its bias is dropped unless asked for.

        Raises:  ValueError unless its output is x W^T + b and nothing else.
        """
        if type(linear) is not nn.Linear or "weight" not in linear._parameters:
            raise ValueError(
                f"a {type(linear).__name__} cannot be normalised: it is lazy (run one batch first), computes its "
                "weight (weight_norm, say), or has a forward of its own; leave fn_flag off, or name another layer"
            )
        layer = cls(linear.in_features, linear.out_features)
        layer.weight = linear.weight  # type: ignore[assignment]  # annotated as a plain tensor
        layer.bias = linear.bias if keep_bias else None
        layer.multiplier = nn.Parameter(linear.weight.detach().new_ones(1))
        copy_to_float(linear, layer)
        return layer.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiplier * F.linear(_unit_rows(x), _unit_rows(self.weight), self.bias)


def _unit_rows(x: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # a sum of squares leaves float16 at norm 256
    return (wide * wide.square().sum(-1, keepdim=True).clamp(min=EPSILON).rsqrt()).to(x.dtype)


@dataclass(frozen=True)
class LessBNReport:
    """What LessBN did: qualified names of the BatchNorms that went, with the reason, and of those that stayed.

    >>> print(LessBNReport({"layer1.0.bn1": "inner BatchNorm of a residual branch"}, ("bn1",), ("fc",)))
    1 of 2 BatchNorms removed
      layer1.0.bn1: inner BatchNorm of a residual branch
    normalised last FC: fc
    """

    removed: dict[str, str]
    kept: tuple[str, ...]
    normalized: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{len(self.removed)} of {len(self.removed) + len(self.kept)} BatchNorms removed"]
        lines += [f"  {name}: {reason}" for name, reason in self.removed.items()]
        if self.normalized:
            lines.append("normalised last FC: " + ", ".join(self.normalized))
        return "\n".join(lines)


class LessBN(nn.Module):
    """A network with fewer BatchNorms; the network given is changed in place, for training and evaluation alike.

    In every residual block the BatchNorm nearest to the addition stays; the others of its branch and that of the
    shortcut become `nn.Identity`. In MobileNetV2 the BatchNorm after each expansion and after the last convolution
    goes, in DenseNet the first one of each layer that reads a concatenation; the stem's always stays. A second
    application changes nothing. An optimizer made before keeps the parameters of removed layers, without gradients;
    `AutoBoost` takes them out of its groups. Hooks on the layers that go, the last one that fn_flag converts among
    them, go with these layers: register them afterwards.

    Args:
        network:    traced with `torch.fx`; where that fails, its parts are. What cannot be traced keeps its BatchNorms.
        fn_flag:    also replace the last `nn.Linear`, in definition order, by `NormalizedLinear`; a layer whose weight
                    its parent reads itself, inside attention or a transformer layer of torch, does not count.
        faithful:   reproduce MindSpore, whose patterns have their accidents: `shortcut + branch` never matches, a first
                    basic block may cost the stem its BatchNorm, and fn_flag converts the last FC of *every* container.
        last_fc:    qualified name of the layer that fn_flag converts, where it is not the last one.
        keep_bias:  the converted layer keeps its bias.
    Raises:  TypeError if `network` is no module; ValueError if `last_fc` names no Linear, if the layer to convert is
             lazy, parametrised or of a subclass (its own forward would be lost), or faithful and not traced.
    Source:  MindSpore boost.LessBN (there a compiler pass that does nothing in eager mode).

    >>> from mpkit.networks import resnet18
    >>> report = LessBN(resnet18(width=4)).report
    >>> len(report.removed), len(report.kept)
    (11, 9)
    """

    @checked
    def __init__(
        self,
        network: nn.Module,
        fn_flag: bool = False,
        *,
        faithful: bool = False,
        last_fc: str | None = None,
        keep_bias: bool = False,
    ) -> None:
        super().__init__()
        self.network: nn.Module = network.network if isinstance(network, LessBN) else network
        done = (m.__dict__.get("_less_bn_report") for m in self.network.modules())
        before: LessBNReport | None = next((report for report in done if report is not None), None)
        names = self._last_layers(faithful, last_fc) if fn_flag and not (before and before.normalized) else ()
        layers = {name: NormalizedLinear.of(self.network.get_submodule(name), keep_bias) for name in names}
        if before is None:
            removed = removable(self.network, faithful=faithful)
            norms = (name for name, module in self.network.named_modules() if isinstance(module, BATCH_NORMS))
            before = LessBNReport(removed, tuple(name for name in norms if name not in removed))
            for name in removed:
                self.network.set_submodule(name, nn.Identity())
        for name, layer in layers.items():
            self.network.set_submodule(name, layer)
        self.report = LessBNReport(before.removed, before.kept, (*before.normalized, *layers))
        self.network._less_bn_report = self.report  # type: ignore[assignment]  # so that twice is once, inside a loss cell too

    def forward(self, *inputs: object, **options: object) -> Any:
        return self.network(*inputs, **options)

    def _last_layers(self, faithful: bool, last_fc: str | None) -> list[str]:
        """Names of the layers to normalise, among those that their parent calls without reading their weight itself."""
        linears = [name for name, m in self.network.named_modules() if name and isinstance(m, nn.Linear)]
        parents = {name: name.rpartition(".")[0] for name in linears}
        names = [name for name in linears if not isinstance(self.network.get_submodule(parents[name]), READERS)]
        if faithful and last_fc is None:
            return list({parents[name]: name for name in names}.values())
        if last_fc is not None and last_fc not in names:
            raise ValueError(f"last_fc must name an nn.Linear of the network ({', '.join(names)}), got {last_fc!r}")
        return names[-1:] if last_fc is None else [last_fc]
