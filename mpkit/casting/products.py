"""Linear layers under a recipe: three products of cast operands, and the scales that live from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from mpkit.arguments import check_function, check_kind
from mpkit.casting import operators as ops
from mpkit.casting import rules
from mpkit.casting.low import known
from mpkit.casting.marks import mark_of, remark, root_of
from mpkit.casting.mode import LOCAL, Rule, computes
from mpkit.casting.recipe import Cast, Recipe, amax_of
from mpkit.formats import FloatFormat
from mpkit.scalers.tensor_scale import TensorScaler, several_processes, update_all_

STATE = "recipe_scales"  # the name of the module that holds the scales of a layer; there is none without state
MOST_OF_ATTENTION = 4  # linear products of an attention: query, key, value and output


class RecipeScales(nn.Module):
    """The delayed scales of one layer. It is a child of the layer, so it is saved, loaded, copied and pickled with it.

    A step ends with the step of an optimizer that has a parameter of the layer: from the amaxes seen since the last one
    the scales are renewed, so accumulated micro-batches count as one step and a recomputed forward has the scale of the
    first. Among several processes the scales of all layers are agreed on at once, also of those that another process
    alone has run, such as an expert. Other loops call `end_step`.
    """

    def __init__(self, recipe: Recipe, layer: nn.Module) -> None:
        super().__init__()
        self.recipe = recipe
        self.sites: dict[str, dict[str, TensorScaler]] = {}
        self.belongs_to = [layer]  # in a list, since a module in an attribute would be a child
        _SCALES[self] = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _SCALES[self] = None

    def site(self, key: str) -> dict[str, TensorScaler]:
        """The scalers of the product number `key` of the layer."""
        if key not in self.sites:
            self.sites[key] = {name: TensorScaler(policy) for name, policy in self.recipe.delayed().items()}
        return self.sites[key]

    def of_all_products(self) -> list[TensorScaler]:
        """The scalers of all products that the layer has in any process, in one order."""
        (layer,) = self.belongs_to
        if several_processes():
            for number in range(MOST_OF_ATTENTION if isinstance(layer, nn.MultiheadAttention) else 1):
                self.site(str(number))
        scalers = [scaler for key in sorted(self.sites) for scaler in self.sites[key].values()]
        for scaler in scalers:  # some are new: their layer has only run in another process
            scaler.follow_(next(layer.parameters()).device)
        return scalers

    def get_extra_state(self) -> dict[str, Any]:
        """Every scale, history and amax, by site and tensor."""
        sites = {key: {n: s.state_dict() for n, s in scalers.items()} for key, scalers in self.sites.items()}
        return {"recipe": self.recipe.name, "sites": sites}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take over what `get_extra_state` gave. Raises ValueError if it belongs to another recipe."""
        loaded = RecipeScales(self.recipe, *self.belongs_to)
        for key, scalers in state["sites"].items():
            if scalers.keys() != loaded.site(key).keys():
                raise ValueError(f"this state belongs to recipe {state.get('recipe')!r}, not to {self.recipe.name!r}")
            for name, scaler in scalers.items():
                loaded.site(key)[name].load_state_dict(scaler)
        self.sites = loaded.sites


_SCALES: WeakKeyDictionary[RecipeScales, None] = WeakKeyDictionary()  # in the order of making, as in every process


@rules.rule
def recipe_rule(recipe: Recipe) -> Rule:
    """Linear operations compute by the recipe; everything else is as without one."""
    element = recipe.fprop_input.element if recipe.fprop_input else None
    shown = known(element, element) if isinstance(element, FloatFormat) else None

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = recipe_linear(x, weight, recipe, _scalers() if recipe.delayed() else {})
        return y if bias is None else y + bias.to(y.dtype)

    run: Callable[..., Tensor] = linear
    if recipe.delayed():
        run = torch.compiler.disable(linear, reason="scales are kept and renewed in Python")

    def handle(func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if shown is not None:
            computes(shown)
        return run(*args, *(kwargs.get(name) for name in ("input", "weight", "bias")[len(args) :]))

    return Rule(rules.table((("linear",), handle)))  # everything else as without a rule


def _scalers() -> dict[str, TensorScaler]:
    """The delayed scales of the next product of the layer that runs, {} without state; they are numbered from 0 on."""
    key, LOCAL.products = str(LOCAL.products), LOCAL.products + 1
    scales = getattr(LOCAL.module, STATE, None)
    return {} if scales is None else scales.site(key)


def recipe_linear(x: Tensor, weight: Tensor, recipe: Recipe, scalers: dict[str, TensorScaler] | None = None) -> Tensor:
    """x @ weight.T with the three products of `recipe`, differentiable once.

    Operands are decoded to float32 and multiplied there; the result is rounded once to the dtype of `x`. Exact are the
    casts and scales, not the order in which a device sums.

    Shapes:  x (*, in), weight (out, in) -> (*, out) in the dtype of x.
    """
    check_kind("x", x, Tensor, "a tensor")
    check_kind("weight", weight, Tensor, "a tensor")
    check_kind("recipe", recipe, Recipe, "a Recipe")
    check_kind("scalers", scalers, dict, "a dict of TensorScaler objects", optional=True)
    if not (x.is_floating_point() and weight.is_floating_point()):
        raise TypeError(f"x and weight must be float tensors, got {x.dtype} and {weight.dtype}; call .float() first")
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x (*, in) and weight (out, in) must agree, got {tuple(x.shape)} and {tuple(weight.shape)}")
    products = _Products(recipe, scalers or {}, [(book, book.where) for book in LOCAL.books])
    return _RecipeLinear.apply(x, weight, products, torch.is_grad_enabled())


class _RecipeLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: _Products, tracks: bool) -> Tensor:
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # of no features -1 would be any number
        # a backward pass that comes after the end of the step has still the scales of this one
        scales = products.scales({"input": x, "weight": weight}, tracks)
        ctx.save_for_backward(rows, weight)
        ctx.settings = products, scales, x.shape
        y = products.of("fprop", (rows, weight), (1, 1), scales, x.dtype)
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        products, scales, shape = ctx.settings
        grad = grads[0].reshape(rows.shape[0], weight.shape[0])
        # the amax of a gradient is seen in the backward pass alone
        scales = {**scales, **products.scales({"grad": grad}, True)}
        # each product is made only where somebody waits for it
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = products.of("dgrad", (grad, weight), (1, 0), scales, rows.dtype).view(shape)
        if ctx.needs_input_grad[1]:
            grad_weight = products.of("wgrad", (grad, rows), (0, 0), scales, weight.dtype)
        return grad_x, grad_weight, None, None


_OPERANDS = {"fprop": ("input", "weight"), "dgrad": ("grad", "weight"), "wgrad": ("grad", "input")}


class _Products(NamedTuple):
    """How the products of one call of a layer are made; `books` are the open ledgers, with the path of the layer."""

    recipe: Recipe
    scalers: dict[str, TensorScaler]
    books: list[tuple[Any, str]]

    def scales(self, tensors: dict[str, Tensor], tracks: bool) -> dict[str, Tensor]:
        """The delayed scales of tensors, whose amaxes are observed for those of later steps."""
        found = {}
        for name, tensor in tensors.items():
            if (scaler := self.scalers.get(name)) is not None:
                scaler.follow_(tensor.device)
                found[name] = scaler.scale
                if tracks:
                    scaler.observe_(amax_of(tensor))
        return found

    def of(self, product: str, two: Any, axes: Any, scales: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Two matrices, each with the axis that is summed over -> product (rows of the first, rows of the second)."""
        two_cast: list[Tensor] = []
        for name, tensor, axis in zip(_OPERANDS[product], two, axes):
            how: Cast | None = getattr(self.recipe, f"{product}_{name}")
            operand = None if how is None else how(tensor, axis, scales.get(name) if how.delayed else None)
            for book, where in self.books:
                book.note_operand(where, product, name, operand)
            # decoded values: the casts are the recipe's on every device, whatever its tensor cores take
            values = tensor if operand is None else operand.values
            two_cast.append(values if axis == 1 else values.t())
        a, b = two_cast
        if a.dtype is not b.dtype:  # one operand in high precision
            a, b = a.float(), b.float()
        # the operands are what the recipe says: an autocast around the network must not cast them again
        with nullcontext() if a.is_meta else torch.autocast(a.device.type, enabled=False):  # no autocast on meta
            return (a @ b.t()).to(dtype)


# --- put on a network, and taken off ----------------------------------------------------------------------------------


def linear_layers(network: nn.Module) -> dict[str, nn.Module]:
    """Path -> layer, for every linear layer and every attention (whose projections are linear layers too)."""
    found = {name: m for name, m in network.named_modules() if isinstance(m, nn.Linear | nn.MultiheadAttention)}
    attentions = [m for m in found.values() if isinstance(m, nn.MultiheadAttention)]
    inside = {child for attention in attentions for child in attention.modules() if child is not attention}
    return {name: module for name, module in found.items() if module not in inside}


Keep = str | Sequence[str] | Callable[[str, nn.Module], bool] | None


def kept_layers(layers: dict[str, nn.Module], keep: Keep) -> set[str]:
    """The paths that `keep` names.

    A pattern names a layer when it matches a run of its path's components: "lm_head" names "model.lm_head", "blocks.0"
    names all in that block, "blocks.*.proj" one layer of each.
    Raises:  ValueError for a pattern that matches nothing: the layer it means would be cast silently.
    """
    kept: set[str] = set()
    for wanted in [] if keep is None else keep if isinstance(keep, list | tuple) else [keep]:
        picks: Any = partial(_names, wanted) if isinstance(wanted, str) else wanted
        check_function("keep", picks, "a pattern, a list of them or a function (path, module) -> bool")
        named = {name for name, module in layers.items() if picks(name, module)}
        if not named:
            raise ValueError(f"keep={wanted!r} matches none of the linear layers, which are {', '.join(layers)}")
        kept |= named
    return kept


def _names(pattern: str, path: str, module: nn.Module) -> bool:
    parts, length = path.split("."), pattern.count(".") + 1
    return any(fnmatchcase(".".join(parts[i : i + length]), pattern) for i in range(len(parts) - length + 1))


def cast_by_recipe(network: nn.Module, recipe: Recipe, keep: Keep = None) -> nn.Module:
    """Put `recipe` on the linear layers of `network`; see `cast_like`."""
    layers = linear_layers(network)
    if not layers:
        raise ValueError(f"a recipe casts linear layers, and this {type(network).__name__} has none")
    kept = kept_layers(layers, keep)
    for name, module in layers.items():
        drop_scales(module)
        if name not in kept:
            remark(module, recipe_rule(recipe))
            if recipe.delayed():
                module.add_module(STATE, RecipeScales(recipe, module))
        elif _recipe(module) is not None:
            remark(module, Rule())
    root_of(network).level = recipe.name
    return network


def drop_scales(module: nn.Module) -> None:
    """Take the scales of a recipe off this one module."""
    if isinstance(getattr(module, STATE, None), RecipeScales):
        delattr(module, STATE)


def recipe_of(network: nn.Module) -> dict[str, Recipe | None]:
    """Path of each linear layer -> the recipe it runs under, None where it stays high."""
    check_kind("network", network, nn.Module, "an nn.Module")
    return {name: _recipe(module) for name, module in linear_layers(network).items()}


def _recipe(layer: nn.Module) -> Recipe | None:
    found = mark_of(layer)
    made, arguments = (found and found.rule and found.rule.origin) or (None, ())
    return arguments[0] if made is recipe_rule else None


# --- the end of a step ------------------------------------------------------------------------------------------------


def _after_optimizer(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """The end of a step for every layer that has a parameter in `optimizer`; another one ends that of its own."""
    if _SCALES and not torch.compiler.is_compiling():
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        _end([s for s in [*_SCALES] if any(id(p) in stepped for p in s.belongs_to[0].parameters())])


register_optimizer_step_post_hook(_after_optimizer)


def end_step(network: nn.Module) -> None:
    """Say that a step is over, for loops that change weights without an optimizer of torch's kind.

    Among several processes each of them calls it, also before a checkpoint: what is seen since the last step is each
    process's own until then.
    """
    check_kind("network", network, nn.Module, "an nn.Module")
    _end([scales for scales in network.modules() if isinstance(scales, RecipeScales)])


def _end(every: list[RecipeScales]) -> None:
    update_all_([scaler for scales in every for scaler in scales.of_all_products()])
