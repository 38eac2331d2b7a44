"""The levels O0 to O3 and auto, own lists and the manual cast: put on a network and taken off again."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn

from mpkit.arguments import check_choice, check_function, check_kind
from mpkit.casting import operators as ops
from mpkit.casting.low import target_of
from mpkit.casting.marks import IN_STEPS, Decorated, Forward, check_castable, mark, mark_of, remark, root_of, unmark
from mpkit.casting.mode import running
from mpkit.casting.operators import LISTS, MODULES
from mpkit.casting.presets import MINDSPORE, PRESETS, put_black_list, put_white_list
from mpkit.casting.products import Keep, cast_by_recipe, drop_scales
from mpkit.casting.recipe import RECIPES, Recipe
from mpkit.casting.rules import listed, lowered
from mpkit.formats import FloatFormat

LEVELS = tuple(MINDSPORE)
Network = TypeVar("Network", bound=Callable[..., Any])
_log = logging.getLogger(__name__)


def auto_mixed_precision(
    network: Network,
    amp_level: str = "O0",
    dtype: torch.dtype | FloatFormat = torch.float16,
    *,
    grad_dtype: FloatFormat | None = None,
) -> Network:
    """Cast the operations of `network` at a level. The same object comes back, its parameters stay float32.

    | level | what is cast | result |
    |---|---|---|
    | O0 | nothing | as computed |
    | O1 | modules and operators of `get_white_list()`: inputs to `dtype`, result back to float32 | float32 |
    | O2 | every operation, but child modules of the classes in `get_black_list()` compute in float32 | float32 |
    | O3 | every operation | float32 |
    | auto | per operation: a list to `dtype`, a list to float32, a list to the promoted dtype | may be `dtype` |

    A level is a boundary: at O2 and O3 a module casts its float arguments when it is entered, and parameters where they
    are used. What is computed otherwise follows its inputs, so a float32 constant beside 16-bit activations promotes
    them until the next module. At O1 and auto listed operations cast, all others are torch's own affair.

    A level is put on the call of the network. Its other methods, and threads that a forward starts, compute at the
    level inside `within(network)`. Inside `torch.autocast` a level rules its own modules alone. `copy.deepcopy` copies
    the level with the network; what `copy.copy` gives shares its forward, as it shares its parameters.

    A parameter's cast is kept from its second use in a forward on, until the parameter is written into. A write through
    `.data` or NumPy, which torch does not count, is so not seen before the next forward; write under `torch.no_grad()`.

    Compile the network, or a part of it after the level is put on (before, by `part.compile()`). At O1 a part that is
    compiled with backend "eager", a help for debugging, is cast once more by the network around it: its biases are
    added in float32.

    The backward of a `torch.autograd.Function` of your own runs without a level, as without an autocast: it finds what
    its forward saved, float32 weights too, beside 16-bit gradients. The way out is a module under `to_float`.

    Args:
        network:    a module; at level "auto" also a function, which comes back decorated.
        amp_level:  one of the above, case matters.
        dtype:      torch.float16 or torch.bfloat16; a FloatFormat is emulated inside float32, forwards and backwards.
                    A number beyond it that fills a tensor, as a mask's, stands for its largest. E4M3FN has no inf: the
                    -inf of a mask becomes NaN in it; mask with -E4M3FN.max.
        grad_dtype: format of the gradients of an emulated format; None: the same format.
    Raises:  TypeError if `network` is no module (function at "auto"), or has a part that no level reaches (TorchScript,
             nn.DataParallel, a forward that yields or awaits); ValueError for another dtype or level. While it runs:
             NotImplementedError for sparse and nested operands and for an emulated format under `torch.export` and
             `torch.func`, and torch's own error, with the way out, where torch has no kernel in 16 bits.
    Warns:   when `network` already runs at a level: it changes to the new one; see also above.
    Source:  MindSpore 2.7 amp.auto_mixed_precision. There O1 returns a rewritten copy, O2 and O3 a wrapper; here
             nothing is wrapped, renamed or replaced. As there, O1 and auto respect `to_float`, O2 and O3 override it,
             and O0 does nothing at all: `remove_mixed_precision` takes a level off.

    >>> net = auto_mixed_precision(nn.Linear(2, 1), "O2", torch.bfloat16)
    >>> net(torch.ones(1, 2)).dtype, net.weight.dtype
    (torch.float32, torch.float32)
    """
    if not isinstance(network, nn.Module):
        what = "an nn.Module or, at level auto, a function"
        check_kind("network", network, object if amp_level == "auto" else nn.Module, what)
        check_function("network", network, what)
        if any(kind(network) for kind in IN_STEPS):
            raise TypeError("a function that yields or awaits runs in steps; put the level on modules that it calls")
    if amp_level not in LEVELS:
        raise ValueError(f"amp_level is one of {', '.join(LEVELS)} (case matters), got {amp_level!r}")
    low = target_of(dtype, grad_dtype)
    if amp_level == "O0":
        return network
    if isinstance(network, nn.Module):
        check_castable(network)
    before = mark_of(network)
    if before is not None and before.level:
        way_out = "call remove_mixed_precision(network) first to change levels quietly"
        warnings.warn(f"this network changes from level {before.level!r} to {amp_level!r}; {way_out}", stacklevel=2)
    if not isinstance(network, nn.Module):
        return cast(Network, Decorated(None, listed("auto", low), network, level=amp_level))
    MINDSPORE[amp_level].put(network, low)
    return network


def custom_mixed_precision(
    network: nn.Module,
    *,
    white_list: list[Any] | None = None,
    black_list: list[type[nn.Module]] | None = None,
    dtype: torch.dtype | FloatFormat = torch.float16,
    grad_dtype: FloatFormat | None = None,
) -> nn.Module:
    """O1's mechanism with your white list, or O2's with your black list. The same object comes back.

    Args:
        white_list: module classes (exact classes) and torch functions such as torch.matmul or F.relu; [] casts nothing.
        black_list: module classes (subclasses too) that stay float32; [] is O3. Norms missing from it are logged.
        dtype:      torch.float16, torch.bfloat16, or a FloatFormat with `grad_dtype` as in `auto_mixed_precision`.
    Raises:  TypeError if `network` is no module, a list is no list or has a wrong element; ValueError unless exactly
             one list is given, or for another dtype.
    Source:  MindSpore 2.7 amp.custom_mixed_precision; where that takes Primitive classes, this takes torch functions.
    """
    check_castable(network)
    if (white_list is None) == (black_list is None):
        raise ValueError(f"give exactly one of white_list and black_list, got {white_list} and {black_list}")
    low = target_of(dtype, grad_dtype)
    modules, operators = _checked(white_list if black_list is None else black_list, black_list is None)
    if black_list is None:
        put_white_list(network, low, modules, operators)
    else:
        for missing in (norm for norm in MODULES["black"] if norm not in modules):
            _log.warning("%s is not on the black list, so it computes in %s", missing.__name__, low)
        put_black_list(network, low, lambda child: isinstance(child, modules))
    root_of(network).level = ""
    return network


def get_white_list() -> list[Any]:
    """A fresh copy of O1's list: module classes, then torch functions (each stands for all its spellings).

    >>> nn.Linear in get_white_list() and torch.matmul in get_white_list()
    True
    """
    return [*MODULES["white"], *map(ops.canonical, LISTS["mindspore"]["low"])]


def get_black_list() -> list[type[nn.Module]]:
    """A fresh copy of O2's list of modules that stay float32."""
    return [*MODULES["black"]]


def _checked(given: object, white: bool) -> tuple[tuple[type[nn.Module], ...], frozenset[str]]:
    """The module classes and the operators of a list; only a white one may have operators."""
    if type(given) is not list:
        raise TypeError(f"white_list and black_list are lists, got {type(given).__name__}; write list(...)")
    modules = tuple(item for item in given if isinstance(item, type) and issubclass(item, nn.Module))
    operators = {item: ops.operator_of(item) for item in given if item not in modules}
    for item, operator in operators.items():
        if operator is None or not white:
            kinds = "classes and torch functions" if white else "classes (functions cannot be kept float32)"
            raise TypeError(f"{'white' if white else 'black'}_list holds nn.Module {kinds}, got {item!r}")
    return modules, frozenset(name for name in operators.values() if name)


def amp_level(network: object) -> str:
    """The level recorded on this very network, "" if none."""
    return root.level if (root := mark_of(network)) is not None else ""


def to_float(
    module: nn.Module, dtype: torch.dtype | FloatFormat, *, grad_dtype: FloatFormat | None = None
) -> nn.Module:
    """Make `module` and every module in it compute in `dtype`; the last call wins, module by module.

    Float arguments (float64 too) are cast on entry and parameters where they are used; integers and bools are left
    alone; results are not cast back. Parameters stay float32.

    Args:    dtype is torch.float16, torch.float32, torch.bfloat16, or a FloatFormat with `grad_dtype` as in
             `auto_mixed_precision`.
    Raises:  TypeError if `module` is no module, ValueError for another dtype.
    Source:  MindSpore 2.7 Cell.to_float, with graph mode's cast on entry. What a level put around a module (the float32
             result of the root, the 16-bit result of a norm at O2) stays around it.
    """
    check_castable(module)
    target = target_of(dtype, grad_dtype, also=(torch.float32,))
    for inner in module.modules():
        remark(inner, lowered(inner, target), by_user=target)
    return module


@contextmanager
def within(network: nn.Module) -> Iterator[None]:
    """A block that computes as the forward of `network` does: for its other methods, and for threads.

    A level is put on `forward`. Modules called by another method, or by a thread that a forward starts, are cast, since
    each has a forward of its own; what that method or thread computes itself is not, unless it runs in this block.
    Results of the block are as computed, not cast to float32.

    Raises:  TypeError if `network` is no module; ValueError if it runs at no level.

    >>> net = auto_mixed_precision(nn.Linear(2, 1), "O2", torch.bfloat16)
    >>> with within(net):
    ...     (net.weight @ torch.ones(2)).dtype
    torch.bfloat16
    """
    check_kind("network", network, nn.Module, "an nn.Module")
    found = mark_of(network)
    if found is None or found.rule is None:
        raise ValueError("this module runs at no level; put one on it by auto_mixed_precision, cast_like or to_float")
    off = bool(found.rule.handlers)  # an autocast around the block, as around a forward
    cpu, cuda = (torch.autocast(d, enabled=not off and torch.is_autocast_enabled(d)) for d in ("cpu", "cuda"))
    with cpu, cuda, running(found.rule, network):
        yield


def remove_mixed_precision(network: Network) -> Network:
    """Take every level and every `to_float` off `network` and the modules in it: the plain network (function) is back.

    Raises:  TypeError if `network` is neither a module nor a function decorated at level "auto".
    """
    if isinstance(network, Forward):
        return cast(Network, network.inner)
    for module in list(check_kind("network", cast(Any, network), nn.Module, "an nn.Module").modules()):
        unmark(module)
        drop_scales(module)
    return network


def cast_like(
    network: nn.Module,
    preset: str | Recipe,
    dtype: torch.dtype | FloatFormat | None = None,
    *,
    grad_dtype: FloatFormat | None = None,
    keep: Keep = None,
) -> nn.Module:
    """Cast `network` as another framework does at one of its levels, or its linear layers by a recipe; it comes back.

    Args:
        preset:     a key of PRESETS (see the table in `presets`) or of RECIPES (see that in `recipe`), or a Recipe.
        dtype:      of a preset: the low precision; None: the preset's own. A FloatFormat is emulated.
        grad_dtype: of a preset: format of the gradients of an emulated format.
        keep:       of a recipe: layers that stay in high precision, as a pattern of their paths ("lm_head",
                    "blocks.0", "blocks.*.proj"), a list of them, or a function (path, module) -> bool. Everything that
                    is no linear layer stays high anyway; an attention counts as one layer.
    Raises:  TypeError if `network` is no module; ValueError for an unknown preset or dtype, an option that is not the
             preset's, a recipe on a network without linear layers, or a `keep` that matches nothing. While the network
             runs, RuntimeError for what its framework bans: binary_cross_entropy at torch_autocast; at apex_O1 the
             same of 16 bits.

    >>> net = cast_like(nn.Linear(2, 1), "keras_mixed_bfloat16")
    >>> net(torch.ones(1, 2)).dtype
    torch.bfloat16
    """
    check_castable(network)
    check_kind("preset", preset, (str, Recipe), "a name (of PRESETS or RECIPES) or a Recipe")
    if isinstance(preset, Recipe) or preset in RECIPES:
        if dtype is not None or grad_dtype is not None:
            raise ValueError("a recipe names the format of every cast; replace its casts instead of giving a dtype")
        return cast_by_recipe(network, preset if isinstance(preset, Recipe) else RECIPES[preset], keep)
    check_choice("preset", preset, [*PRESETS, *RECIPES])
    if keep is not None:
        raise ValueError(f"keep goes with a recipe; {preset} has its own lists of what stays float32")
    row = PRESETS[preset]
    row.put(network, target_of(row.dtype if dtype is None else dtype, grad_dtype, also=(row.dtype,)))
    return network


def copy_to_float(source: nn.Module, target: nn.Module) -> nn.Module:
    """Give `target`, which takes the place of `source`, the precision that `to_float` set there, if any; it comes back.

    Raises:  TypeError if one of them is no module.
    """
    found = mark_of(source)
    if found is not None and found.by_user is not None:  # a level or a recipe stands around the layer
        mark(target, lowered(target, found.by_user), result=found.result, by_user=found.by_user)
    return target
