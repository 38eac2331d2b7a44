"""How a rule gets onto the modules of a network: by lists of operators, of modules, or everywhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from mpkit.casting.forward import Forward, mark, mark_of
from mpkit.casting.lists import AUTO_MADE_OF_WIDE, AUTO_PROMOTED, AUTO_TO_LOW, AUTO_TO_WIDE, AUTO_WRITTEN
from mpkit.casting.rules import Rule, everything, operator_lists, protected, recurrent, white_operators
from mpkit.casting.targets import Target


def refuse_scripted(network: object) -> None:
    """Raise TypeError if TorchScript runs a part of `network`: its interpreter does not ask a rule."""
    modules = network.named_modules() if isinstance(network, nn.Module) else ()
    if (name := next((name for name, m in modules if isinstance(m, torch.jit.ScriptModule)), None)) is not None:
        raise TypeError(
            f"{name or 'the network'} is TorchScript, which runs in an interpreter of its own and cannot be cast; "
            "cast the network before torch.jit.trace, or use torch.compile or torch.export"
        )


def root_of(network: nn.Module) -> Forward:
    root = mark_of(network)
    return mark(network, Rule()) if root is None else root


def settle(network: nn.Module, level: str = "") -> None:
    """Record the level on a network whose modules were marked, and on them that the way in is its forward."""
    root = root_of(network)
    root.level = level
    for module in network.modules():
        found = mark_of(module)
        if found is not None and found is not root:
            found.inside = True


def auto_lists(low: Target, module: nn.Module | None = None) -> Rule:
    wide = AUTO_TO_WIDE | AUTO_MADE_OF_WIDE
    return operator_lists(low, AUTO_TO_LOW, wide, AUTO_PROMOTED, False, entry=entry_of(module), written=AUTO_WRITTEN)


def entry_of(module: nn.Module | None) -> Target | None:
    """What the arguments of a module are cast to where only its operations are listed.

    torch's recurrent layers compare the dtype of their input with that of the stored float32 weights.
    """
    return torch.float32 if isinstance(module, nn.RNNBase) else None


def lowered(module: nn.Module, low: Target) -> Rule:
    """Everything in `low`, as a rule for `module`."""
    return recurrent(low) if isinstance(module, nn.RNNBase) else everything(low, None, low)


def spread(network: nn.Module, rule_for: Callable[[nn.Module], Rule | None]) -> None:
    """Mark every module by its rule; a module that the user set by `to_float`, or without a rule, keeps its subtree."""
    seen: set[int] = set()

    def descend(module: nn.Module) -> None:
        found, rule = mark_of(module), rule_for(module)
        if id(module) in seen or rule is None or (found is not None and found.by_user):
            return
        seen.add(id(module))
        mark(module, rule)
        for child in module.children():
            descend(child)

    descend(network)


def put_white_list(network: nn.Module, low: Target, modules: tuple[type, ...], operators: frozenset[str]) -> None:
    """O1's mechanism: in modules of exactly these classes everything computes in `low`, elsewhere the operators do."""
    inside = everything(low, torch.float32)
    forced = {id(inner) for module in network.modules() if type(module) in modules for inner in module.modules()}

    def rule(module: nn.Module) -> Rule:
        return inside if id(module) in forced else white_operators(low, operators, entry_of(module))

    spread(network, rule)


def everything_in(network: nn.Module, low: Target) -> None:
    """Mark every module: all its operations in `low`, whatever `to_float` said before."""
    for module in network.modules():
        mark(module, lowered(module, low))


def put_black_list(network: nn.Module, low: Target, black: tuple[type[nn.Module], ...]) -> None:
    """O2's mechanism: everything in `low` but the children that are instances of a class in `black`."""
    everything_in(network, low)
    protect_children(network, low, lambda child: isinstance(child, black))
    root_of(network).result = torch.float32


def protect_children(module: nn.Module, low: Target, protects: Callable[[nn.Module], bool]) -> None:
    """Descendants that `protects` picks compute in float32 and give their result in `low`."""
    for child in module.children():
        if not protects(child):
            protect_children(child, low, protects)
            continue
        for inner in child.modules():  # only the protected module itself hands over in `low`
            result = low if inner is child else None
            mark(inner, protected(result or torch.float32, _entry_of_protected(inner)), result=result)


def _entry_of_protected(module: nn.Module) -> Target | None:
    takes_low = (nn.modules.batchnorm._BatchNorm.forward, nn.LayerNorm.forward)
    return None if type(module).forward in takes_low else torch.float32
