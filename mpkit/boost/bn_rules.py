"""Which BatchNorms of a network LessBN removes: the structural rule, and MindSpore's patterns."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

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
    if graph is not None:
        found = {**_residual(graph), **_inverted(graph), **_dense(graph)}
        return {prefix + name: reason for name, reason in found.items()}
    removed = {prefix + name: reason for name, reason in _block_by_names(module).items()}
    for name, child in module.named_children():
        removed |= _by_structure(child, _Graph.of(child), f"{prefix}{name}.")
    return removed


# the structural rule


def _residual(graph: _Graph) -> Removed:
    """In every sum of a branch and a shortcut the branch's last BatchNorm stays, and the others go."""
    removed: Removed = {}
    for node in graph.nodes("add"):
        operands = [a for a in node.args if isinstance(a, fx.Node)]
        if len(operands) != 2:
            continue
        paths = graph.paths_to_common(*operands)
        shortcut, branch = sorted(paths, key=graph.convolutions)
        if graph.convolutions(branch) < 2 or graph.convolutions(shortcut) > 1:
            continue
        kinds = {graph.kind(n) for n in (*branch, *shortcut)}
        if kinds & {"add", "cat"} or any(graph.is_depthwise(n) for n in branch):
            continue
        norms = [n for n in branch if graph.kind(n) == "bn"]
        removed |= {graph.name(n): INNER for n in norms[1:]}
        if norms:
            removed |= {graph.name(n): SHORTCUT for n in shortcut if graph.kind(n) == "bn"}
    return removed


def _inverted(graph: _Graph) -> Removed:
    """1x1 up, depthwise, 1x1 down without activation: the first BatchNorm goes, and that of a last 1x1 convolution."""
    removed: Removed = {}
    projections = set()
    for node in graph.nodes("bn"):
        chain = graph.back(node, "bn conv act bn conv act bn conv")
        if chain and graph.is_depthwise(chain[4]) and graph.is_pointwise(chain[1]) and graph.is_pointwise(chain[7]):
            down, up = graph.module(chain[1]), graph.module(chain[7])
            if down.out_channels < down.in_channels and up.out_channels > up.in_channels:
                projections.add(node)
                removed[graph.name(chain[6])] = EXPANSION
    for node in graph.nodes("linear") if projections else ():
        chain = graph.back(graph.through(node, "shape"), "act bn conv")
        before = graph.input(chain[2]) if chain else None
        if chain and before is not None and (before in projections or graph.kind(before) == "add"):
            removed[graph.name(chain[1])] = LAST_CONV
    return removed


def _dense(graph: _Graph) -> Removed:
    """BN-act-conv-BN-act-conv from one concatenation to the next: the first BatchNorm goes."""
    removed: Removed = {}
    for node in graph.nodes("cat"):
        for operand in graph.operands(node):
            chain = graph.back(operand, "conv act bn conv act bn cat")
            if chain and len(graph.operands(chain[6])) > 1:
                removed[graph.name(chain[5])] = DENSE
    return removed


_SHORTCUT_NAMES = ("downsample", "shortcut", "skip", "identity", "project", "residual")


def _block_by_names(block: nn.Module) -> Removed:
    """For a block that cannot be traced: BatchNorms in definition order, the shortcut known by its name."""
    children = dict(block.named_children())
    attributes = (*children, *vars(block))  # a block without projection often has downsample = None
    shortcuts = {name for name in attributes if any(word in name.lower() for word in _SHORTCUT_NAMES)}
    named_so = any(word in type(block).__name__.lower() for word in ("block", "bottleneck", "residual"))
    norms = [name for name, child in children.items() if isinstance(child, _BatchNorm) and name not in shortcuts]
    convolutions = [name for name, child in children.items() if isinstance(child, _ConvNd) and name not in shortcuts]
    if len(norms) < 2 or len(convolutions) < 2 or not (shortcuts or named_so):
        return {}
    removed = dict.fromkeys(norms[:-1], INNER)
    for name in shortcuts & children.keys():
        inside = children[name].named_modules(prefix=name)
        removed |= {full: SHORTCUT for full, module in inside if isinstance(module, _BatchNorm)}
    return removed


# MindSpore's patterns: roots and chains of operations, walked backwards along first inputs, first match wins

_SUM_PATTERNS = (
    # branch, shortcut; a star marks what is removed, "|" separates alternatives
    ("bn conv relu bn* conv relu bn* conv", "bn* conv"),
    ("bn conv relu bn* conv relu bn* conv relu", "relu|pool"),
    ("bn conv relu bn* conv relu", "bn* conv relu"),
    ("bn conv relu bn* conv relu", "relu|pool"),
    ("bn conv relu bn* conv pool", "pool"),
)


def _by_patterns(graph: _Graph) -> Removed:
    """MindSpore's less_bn pass, accidents included."""
    removed: Removed = {}
    for node in graph.nodes("add"):
        operands = [a for a in node.args if isinstance(a, fx.Node)]
        for patterns in _SUM_PATTERNS if len(operands) == 2 else ():
            chains = [graph.starred(start, pattern) for start, pattern in zip(operands, patterns)]
            if None not in chains:
                removed |= {graph.name(n): reason for c, reason in zip(chains, (INNER, SHORTCUT)) for n in c or ()}
                break
    for node in graph.nodes("relu6"):
        found = graph.starred(node, "relu6 bn conv relu6 bn* conv bn|add")
        removed |= {graph.name(n): EXPANSION for n in found or ()}
    for node in graph.nodes("linear"):
        found = graph.starred(graph.through(node, "shape"), "relu6 bn* conv")
        removed |= {graph.name(n): LAST_CONV for n in found or ()}
    return removed | _dense(graph)


# a network as a graph of operation kinds

_MODULES: tuple[tuple[Any, str], ...] = (
    (_BatchNorm, "bn"),
    (_ConvNd, "conv"),
    (nn.Linear, "linear"),
    (nn.ReLU, "relu"),
    (nn.ReLU6, "relu6"),
    ((nn.SiLU, nn.GELU, nn.Hardswish, nn.LeakyReLU, nn.ELU, nn.PReLU, nn.Mish), "act"),
    ((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), "pool"),
    ((nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), "same"),
    ((nn.Flatten, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), "shape"),
)
_FUNCTIONS: dict[Any, str] = {
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add", "add_"), "add"),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), "cat"),
    **dict.fromkeys((F.relu, torch.relu, torch.relu_, "relu", "relu_"), "relu"),
    **dict.fromkeys((F.relu6,), "relu6"),
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
    """The traced operations of a network and the kind of each."""

    def __init__(self, network: nn.Module, graph: fx.Graph) -> None:
        self._network = network
        self._graph = graph
        self._calls = Counter(n.target for n in graph.nodes if n.op == "call_module")

    @classmethod
    def of(cls, network: nn.Module) -> _Graph | None:
        """None where the network cannot be traced."""
        try:
            return cls(network, _Tracer().trace(network))
        except Exception:  # whatever the traced code raises when it meets a proxy
            return None

    def nodes(self, kind: str) -> list[fx.Node]:
        return [n for n in self._graph.nodes if self.kind(n) == kind]

    def kind(self, node: fx.Node) -> str:
        if node.op == "call_module":
            module = self.module(node)
            if isinstance(module, _BatchNorm) and self._calls[node.target] > 1:
                return "other"  # shared between places: it cannot go from one of them
            return next((kind for known, kind in _MODULES if isinstance(module, known)), "other")
        return _FUNCTIONS.get(node.target, "other") if node.op in ("call_function", "call_method") else node.op

    def module(self, node: fx.Node) -> Any:
        return self._network.get_submodule(str(node.target))

    def name(self, node: fx.Node) -> str:
        return str(node.target)

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """What a concatenation joins."""
        tensors = node.args[0] if node.args else node.kwargs.get("tensors", ())
        return [t for t in tensors if isinstance(t, fx.Node)] if isinstance(tensors, list | tuple) else []

    def input(self, node: fx.Node) -> fx.Node | None:
        """The first input, looking through layers that change nothing."""
        before = next(iter(node.all_input_nodes), None)
        return before if before is None else self._skip_same(before)

    def back(self, start: fx.Node | None, pattern: str) -> list[fx.Node] | None:
        """The nodes from `start` backwards along first inputs when their kinds fit the pattern, else None."""
        node = None if start is None else self._skip_same(start)
        chain = []
        for wanted in pattern.split():
            if node is None or not self._fits(node, wanted.rstrip("*")):
                return None
            chain.append(node)
            node = self.input(node)
        return chain

    def starred(self, start: fx.Node | None, pattern: str) -> list[fx.Node] | None:
        """The starred nodes of a chain that fits, else None."""
        chain = self.back(start, pattern)
        return chain and [n for n, wanted in zip(chain, pattern.split()) if wanted.endswith("*")]

    def through(self, node: fx.Node, kind: str) -> fx.Node | None:
        """The first node before `node` that is not of `kind`."""
        before = self.input(node)
        while before is not None and self.kind(before) == kind:
            before = self.input(before)
        return before

    def paths_to_common(self, a: fx.Node, b: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
        """The nodes from a and from b backwards, each up to the first node that both paths share."""
        path_a, path_b = (list(self._walk(n)) for n in (a, b))
        on_b = set(path_b)
        common = next((n for n in path_a if n in on_b), None)
        if common is None:
            return [], []
        return path_a[: path_a.index(common)], path_b[: path_b.index(common)]

    def convolutions(self, path: list[fx.Node]) -> int:
        return sum(self.kind(n) == "conv" for n in path)

    def is_depthwise(self, node: fx.Node) -> bool:
        module = self.module(node) if self.kind(node) == "conv" else None
        return module is not None and module.groups == module.in_channels > 1

    def is_pointwise(self, node: fx.Node) -> bool:
        module = self.module(node)
        return module.groups == 1 and all(k == 1 for k in module.kernel_size)

    def _fits(self, node: fx.Node, wanted: str) -> bool:
        kind = self.kind(node)
        return kind in wanted.split("|") or (wanted == "act" and kind in ("relu", "relu6"))

    def _walk(self, node: fx.Node | None) -> Iterator[fx.Node]:
        while node is not None:
            yield node
            node = self.input(node)

    def _skip_same(self, node: fx.Node) -> fx.Node:
        while self.kind(node) == "same" and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return node
