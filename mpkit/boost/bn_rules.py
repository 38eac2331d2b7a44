"""Which BatchNorms of a network LessBN removes: the structural rule, and MindSpore's patterns.

Both look at a traced network as operations of a few kinds, and at the path from an operation backwards along first
inputs. A pattern is the kinds along such a path: "|" separates alternatives, a star marks what is removed.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

INNER = "inner BatchNorm of a residual branch"
SHORTCUT = "BatchNorm of a projection shortcut"
EXPANSION = "BatchNorm after the expansion of an inverted residual"
LAST_CONV = "BatchNorm of the last convolution"
DENSE = "first BatchNorm of a layer that reads a concatenation"

Removed = dict[str, str]
"""Qualified name of a BatchNorm -> why it goes."""


def removable(network: nn.Module, *, faithful: bool = False) -> Removed:
    """The BatchNorms of `network` that LessBN removes, in definition order."""
    graph = _Graph.of(network)
    if faithful:
        if graph is None:
            raise ValueError(
                "faithful=True needs a network that torch.fx can trace, and this one branches on its data; "
                "leave faithful out, then its parts are traced"
            )
        found = _by_patterns(graph)
    else:
        found = _by_structure(network, graph, "")
    return {name: found[name] for name, _ in network.named_modules() if name in found}


def _by_structure(module: nn.Module, graph: _Graph | None, prefix: str) -> Removed:
    """The structural rule for a network, or for those of its parts that can be traced."""
    if graph is not None:
        found = {**_residual(graph), **_inverted(graph), **_dense(graph)}
        return {prefix + name: reason for name, reason in found.items()}
    removed: Removed = {}
    for name, child in module.named_children():
        removed |= _by_structure(child, _Graph.of(child), f"{prefix}{name}.")
    return removed


def _residual(graph: _Graph) -> Removed:
    """In every sum of a branch and a shortcut the branch's last BatchNorm stays, and the others go."""
    removed: Removed = {}
    for node in graph.of_kind("add"):
        paths = [graph.path(a) for a in node.args if isinstance(a, fx.Node)]
        if len(paths) != 2 or not (common := set(paths[0]) & set(paths[1])):
            continue
        own = [path[: next(i for i, n in enumerate(path) if n in common)] for path in paths]
        shortcut, branch = sorted(own, key=lambda path: sum("conv" in graph.kinds(n) for n in path))
        convolutions = [sum("conv" in graph.kinds(n) for n in path) for path in (shortcut, branch)]
        inside = set().union(*map(graph.kinds, branch), *map(graph.kinds, shortcut))
        if convolutions[0] > 1 or convolutions[1] < 2 or inside & {"add", "cat", "depthwise"}:
            continue
        norms, beside = ([str(n.target) for n in path if "bn" in graph.kinds(n)] for path in (branch, shortcut))
        removed |= dict.fromkeys(norms[1:], INNER) | dict.fromkeys(beside if norms else (), SHORTCUT)
    return removed


def _inverted(graph: _Graph) -> Removed:
    """1x1 up, depthwise, 1x1 down without activation: the first BatchNorm goes, and that of a last 1x1 convolution."""
    removed: Removed = {}
    ends = set(graph.of_kind("add"))
    for node in graph.of_kind("bn"):
        if found := graph.matched(graph.path(node), "bn down act bn depthwise act bn* up", EXPANSION):
            removed |= found
            ends.add(node)
    for node in graph.of_kind("linear") if removed else ():
        path = graph.path(node, without="shape")[1:]
        if len(path) > 3 and path[3] in ends:
            removed |= graph.matched(path, "act bn* conv", LAST_CONV)
    return removed


def _dense(graph: _Graph) -> Removed:
    """BN-act-conv-BN-act-conv from one concatenation to the next: the first BatchNorm goes."""
    removed: Removed = {}
    for node in graph.of_kind("cat"):
        for operand in node.all_input_nodes:
            path = graph.path(operand)
            if len(path) > 6 and len(path[6].all_input_nodes) > 1:
                removed |= graph.matched(path, "conv act bn conv act bn* cat", DENSE)
    return removed


_SUMS = (  # branch, shortcut; the first that fits
    ("bn conv relu bn* conv relu bn* conv", "bn* conv"),
    ("bn conv relu bn* conv relu bn* conv relu", "relu|pool"),
    ("bn conv relu bn* conv relu", "bn* conv relu"),
    ("bn conv relu bn* conv relu", "relu|pool"),
    ("bn conv relu bn* conv pool", "pool"),
)


def _by_patterns(graph: _Graph) -> Removed:
    """MindSpore's less_bn pass, accidents included."""
    removed: Removed = {}
    for node in graph.of_kind("add"):
        paths = [graph.path(a) for a in node.args if isinstance(a, fx.Node)]
        for branch, shortcut in _SUMS if len(paths) == 2 else ():
            if graph.fits(paths[0], branch) and graph.fits(paths[1], shortcut):
                removed |= graph.matched(paths[0], branch, INNER) | graph.matched(paths[1], shortcut, SHORTCUT)
                break
    for node in graph.of_kind("relu6"):
        removed |= graph.matched(graph.path(node), "relu6 bn conv relu6 bn* conv bn|add", EXPANSION)
    for node in graph.of_kind("linear"):
        removed |= graph.matched(graph.path(node, without="shape")[1:], "relu6 bn* conv", LAST_CONV)
    return removed | _dense(graph)


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_ACTIVATIONS = (nn.SiLU, nn.GELU, nn.Hardswish, nn.LeakyReLU, nn.ELU, nn.PReLU, nn.Mish)
_MODULES: tuple[tuple[Any, str], ...] = (
    (BATCH_NORMS, "bn"),
    (CONVOLUTIONS, "conv"),
    (nn.Linear, "linear"),
    (nn.ReLU, "relu act"),
    (nn.ReLU6, "relu6 act"),
    (_ACTIVATIONS, "act"),
    ((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), "pool"),
    ((nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), "same"),
    ((nn.Flatten, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), "shape"),
)
_FUNCTIONS: dict[Any, str] = {
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add", "add_"), "add"),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), "cat"),
    **dict.fromkeys((F.relu, torch.relu, torch.relu_, "relu", "relu_"), "relu act"),
    **dict.fromkeys((F.relu6,), "relu6 act"),
    **dict.fromkeys((F.silu, F.gelu, F.hardswish, F.leaky_relu, F.elu), "act"),
    **dict.fromkeys((F.max_pool1d, F.max_pool2d, F.max_pool3d, torch.max_pool2d), "pool"),
    **dict.fromkeys((F.dropout,), "same"),
    **dict.fromkeys((torch.flatten, torch.mean, "flatten", "mean", "view", "reshape", "squeeze"), "shape"),
    **dict.fromkeys((F.adaptive_avg_pool2d, F.adaptive_avg_pool1d), "shape"),
}


class _Tracer(fx.Tracer):
    """Layers that the rules know stay whole, user subclasses of them too."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = any(isinstance(m, kind) for kind, _ in _MODULES)
        return known or super().is_leaf_module(m, module_qualified_name)


class _Graph:
    """The traced operations of a network, and the kinds of each."""

    def __init__(self, network: nn.Module, graph: fx.Graph) -> None:
        calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
        self._kinds = {node: self._kinds_of(network, node, calls[node.target] > 1) for node in graph.nodes}

    @classmethod
    def of(cls, network: nn.Module) -> _Graph | None:
        """None where the network cannot be traced."""
        try:
            return cls(network, _Tracer().trace(network))
        except Exception:  # whatever the traced code raises when it meets a proxy
            return None

    @staticmethod
    def _kinds_of(network: nn.Module, node: fx.Node, shared: bool) -> set[str]:
        if node.op in ("call_function", "call_method"):
            return set(_FUNCTIONS.get(node.target, "").split())
        if node.op != "call_module":
            return set()
        module: Any = network.get_submodule(str(node.target))
        kinds = set(next((kinds for known, kinds in _MODULES if isinstance(module, known)), "").split())
        if "conv" in kinds and module.groups == module.in_channels > 1:
            kinds.add("depthwise")
        elif "conv" in kinds and module.groups == 1 and set(module.kernel_size) == {1}:
            wider = module.out_channels - module.in_channels
            kinds |= {"up"} if wider > 0 else {"down"} if wider < 0 else set()
        return kinds - {"bn"} if shared else kinds  # a norm in several places cannot go from one of them

    def kinds(self, node: fx.Node) -> set[str]:
        return self._kinds[node]

    def of_kind(self, kind: str) -> list[fx.Node]:
        return [node for node, kinds in self._kinds.items() if kind in kinds]

    def path(self, node: fx.Node, without: str = "") -> list[fx.Node]:
        """From a node backwards along first inputs, without layers that change nothing (and those of a kind)."""
        path, step = [], [node]
        while step:
            path += [n for n in step if not {"same", without} & self.kinds(n)]
            step = step[0].all_input_nodes[:1]
        return path

    def fits(self, path: list[fx.Node], pattern: str) -> bool:
        """Whether a path begins with these kinds."""
        words = [set(word.rstrip("*").split("|")) for word in pattern.split()]
        return len(path) >= len(words) and all(word & self.kinds(node) for word, node in zip(words, path))

    def matched(self, path: list[fx.Node], pattern: str, reason: str) -> Removed:
        """The starred nodes of a path that fits."""
        starred = zip(path, pattern.split()) if self.fits(path, pattern) else ()
        return {str(node.target): reason for node, word in starred if word.endswith("*")}
