"""Which BatchNorms of a network LessBN removes: the structural rule, and MindSpore's patterns.

Both look at a traced network as operations of a few kinds, and at the path from an operation backwards along first
inputs. A pattern is the kinds along such a path: "|" separates alternatives, a star marks what is removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from torch import fx, nn

INNER = "inner BatchNorm of a residual branch"
SHORTCUT = "BatchNorm of a projection shortcut"
EXPANSION = "BatchNorm after the expansion of an inverted residual"
LAST_CONV = "BatchNorm of the last convolution"
DENSE = "first BatchNorm of a layer that reads a concatenation"

Removed = Iterator[tuple[str, str]]
"""Qualified name of a BatchNorm, and why it goes."""


def removable(network: nn.Module, *, faithful: bool) -> dict[str, str]:
    """The BatchNorms of `network` that LessBN removes, in definition order, and why."""
    if not faithful:
        found = dict(_by_structure(network, ""))
    elif (graph := _Graph.of(network)) is not None:
        found = dict(_by_patterns(graph))
    else:
        raise ValueError("faithful=True needs a network that torch.fx can trace; without it, its parts are traced")
    return {name: found[name] for name, _ in network.named_modules() if name in found}


def _by_structure(module: nn.Module, prefix: str) -> Removed:
    """The structural rule for a network, or for those of its parts that can be traced."""
    if (graph := _Graph.of(module)) is not None:
        for name, reason in chain(_residual(graph), _inverted(graph), _dense(graph)):
            yield prefix + name, reason
        return
    for name, child in module.named_children():
        yield from _by_structure(child, f"{prefix}{name}.")


def _residual(graph: _Graph) -> Removed:
    """In every sum of a branch and a shortcut the branch's last BatchNorm stays, and the others go."""
    for paths in graph.sums():
        common = set(paths[0]) & set(paths[1])
        own = [[node for node in path if node not in common] for path in paths]  # the ends that they share are alike
        (fewer, shortcut), (more, branch) = sorted((len(graph.targets("conv", path)), path) for path in own)
        inside = set().union(*(graph.kinds[node] for path in own for node in path))
        if common and fewer <= 1 and more >= 2 and not inside & {"add", "cat", "depthwise"}:
            norms, beside = graph.targets("bn", branch), graph.targets("bn", shortcut)
            yield from ((name, INNER) for name in norms[1:])
            yield from ((name, SHORTCUT) for name in beside if norms)


def _inverted(graph: _Graph) -> Removed:
    """1x1 up, depthwise, 1x1 down without activation: the first BatchNorm goes, and that of a last 1x1 convolution."""
    block = "bn down act bn depthwise act bn* up"
    inverted = [node for node in graph.of_kind("bn") if graph.fits(graph.path(node), block)]
    for node in inverted:
        yield from graph.matched(graph.path(node), block, EXPANSION)
    ends = {*inverted, *graph.of_kind("add")}
    for node in graph.of_kind("linear") if inverted else ():
        path = graph.path(node, without="shape")[1:]
        if len(path) > 3 and path[3] in ends:
            yield from graph.matched(path, "act bn* conv", LAST_CONV)


def _dense(graph: _Graph) -> Removed:
    """BN-act-conv-BN-act-conv from one concatenation to the next: the first BatchNorm goes."""
    for node in graph.of_kind("cat"):
        for path in map(graph.path, node.all_input_nodes):
            if len(path) > 6 and len(path[6].all_input_nodes) > 1:
                yield from graph.matched(path, "conv act bn conv act bn* cat", DENSE)


_SUMS = (  # branch, shortcut; the first that fits
    ("bn conv relu bn* conv relu bn* conv", "bn* conv"),
    ("bn conv relu bn* conv relu bn* conv relu", "relu|pool"),
    ("bn conv relu bn* conv relu", "bn* conv relu"),
    ("bn conv relu bn* conv relu", "relu|pool"),
    ("bn conv relu bn* conv pool", "pool"),
)


def _by_patterns(graph: _Graph) -> Removed:
    """MindSpore's less_bn pass, accidents included."""
    for one, other in graph.sums():
        fitting = (pair for pair in _SUMS if graph.fits(one, pair[0]) and graph.fits(other, pair[1]))
        for branch, shortcut in islice(fitting, 1):
            yield from graph.matched(one, branch, INNER)
            yield from graph.matched(other, shortcut, SHORTCUT)
    for node in graph.of_kind("relu6"):
        yield from graph.matched(graph.path(node), "relu6 bn conv relu6 bn* conv bn|add", EXPANSION)
    for node in graph.of_kind("linear"):
        yield from graph.matched(graph.path(node, without="shape")[1:], "relu6 bn* conv", LAST_CONV)
    yield from _dense(graph)


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NAMES = {  # kinds of an operation -> torch's names of its layers (and what is derived from them), functions, methods
    "bn": " ".join(layer.__name__ for layer in BATCH_NORMS),
    "conv": " ".join(layer.__name__ for layer in CONVOLUTIONS),
    "linear": "Linear",
    "relu act": "ReLU relu relu_",
    "relu6 act": "ReLU6 relu6",
    "act": "SiLU GELU Hardswish LeakyReLU ELU PReLU Mish silu gelu hardswish leaky_relu elu",
    "pool": "MaxPool1d MaxPool2d MaxPool3d max_pool1d max_pool2d max_pool3d",
    "same": "Identity Dropout Dropout1d Dropout2d Dropout3d dropout",
    "shape": "Flatten AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "flatten mean view reshape squeeze",
    "add": "add iadd add_",
    "cat": "cat concat concatenate",
}
_KINDS = {name: set(kinds.split()) for kinds, names in _NAMES.items() for name in names.split()}


def _kinds_of(operation: nn.Module | Callable[..., Any] | str) -> set[str]:
    """The kinds of a layer, a function, or the name of a method; none for what the rules do not know."""
    if isinstance(operation, nn.Module):
        own = [cls.__name__ for cls in type(operation).__mro__ if cls.__module__.startswith("torch.")]
    else:
        own = [getattr(operation, "__name__", str(operation))]
    return next((set(_KINDS[name]) for name in own if name in _KINDS), set())


class _Tracer(fx.Tracer):
    """Layers that the rules know stay whole, user subclasses of them too."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return bool(_kinds_of(m)) or super().is_leaf_module(m, module_qualified_name)


class _Graph:
    """The traced operations of a network, and the kinds of each."""

    def __init__(self, network: nn.Module, nodes: list[fx.Node]) -> None:
        uses, self.kinds = Counter(node.target for node in nodes), dict[fx.Node, set[str]]()
        for node in nodes:
            what: Any = network.get_submodule(str(node.target)) if node.op == "call_module" else node.target
            kinds = self.kinds[node] = _kinds_of(what) if node.op.startswith("call_") else set()
            if uses[node.target] > 1:
                kinds.discard("bn")  # a norm in several places cannot go from one of them
            if "conv" in kinds and what.groups == what.in_channels > 1:
                kinds.add("depthwise")
            elif "conv" in kinds and what.groups == 1 and set(what.kernel_size) == {1}:
                wider = what.out_channels - what.in_channels
                kinds |= {"up"} if wider > 0 else {"down"} if wider < 0 else set()

    @classmethod
    def of(cls, network: nn.Module) -> _Graph | None:
        """None where the network cannot be traced."""
        try:
            return cls(network, list(_Tracer().trace(network).nodes))
        except Exception:  # whatever the traced code raises when it meets a proxy
            return None

    def of_kind(self, kind: str) -> list[fx.Node]:
        return [node for node, kinds in self.kinds.items() if kind in kinds]

    def targets(self, kind: str, path: list[fx.Node]) -> list[str]:
        """The names of the layers of a kind on a path."""
        return [str(node.target) for node in path if kind in self.kinds[node]]

    def path(self, node: fx.Node, without: str = "") -> list[fx.Node]:
        """From a node backwards along first inputs, without layers that change nothing (and those of a kind)."""
        path, step = [], [node]
        while step:
            path += [n for n in step if not {"same", without} & self.kinds[n]]
            step = step[0].all_input_nodes[:1]
        return path

    def sums(self) -> list[list[list[fx.Node]]]:
        """The two paths into each sum of two operations."""
        paths = ([self.path(a) for a in node.args if isinstance(a, fx.Node)] for node in self.of_kind("add"))
        return [two for two in paths if len(two) == 2]

    def fits(self, path: list[fx.Node], pattern: str) -> bool:
        """Whether a path begins with these kinds."""
        words = [set(word.rstrip("*").split("|")) for word in pattern.split()]
        return len(path) >= len(words) and all(word & self.kinds[node] for word, node in zip(words, path))

    def matched(self, path: list[fx.Node], pattern: str, reason: str) -> Removed:
        """The starred nodes of a path, if it fits."""
        starred = zip(path, pattern.split()) if self.fits(path, pattern) else ()
        return ((str(node.target), reason) for node, word in starred if word.endswith("*"))
