"""Linear layers under a recipe: three products of cast operands, and the scales that live from step to step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from functools import cache
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from mpkit.arguments import check_kind
from mpkit.casting import operators as ops
from mpkit.casting import rules
from mpkit.casting.low import Emulated
from mpkit.casting.marks import Forward, mark, mark_of
from mpkit.casting.mode import LOCAL, Rule, computes
from mpkit.casting.recipe import Cast, Operand, Recipe, amax_of
from mpkit.formats import FloatFormat
from mpkit.scalers.tensor_scale import TensorScaler, several_processes, update_all_

STATE = "recipe_scales"  # the name of the module that holds the scales of a layer; there is none without state
TENSORS = ("input", "weight", "grad")
MOST_OF_ATTENTION = 4  # linear products of an attention: query, key, value and output
Note = Callable[..., None]
"""Is told of each operand of a product under a recipe."""


class RecipeScales(nn.Module):
    """The delayed scales of one layer. It is a child of the layer, so it is saved, loaded, copied and pickled with it.

    A step ends with the step of an optimizer that has a parameter of the layer: from the amaxes seen since the last one
    the scales are renewed, so accumulated micro-batches count as one step and a recomputed forward has the scale of the
    first. Among several processes the scales of all layers are agreed on at once, also of those that another process
    alone has run, such as an expert. Other loops call `end_step`.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.sites: dict[str, dict[str, TensorScaler]] = {}

    def site(self, key: str) -> dict[str, TensorScaler]:
        """The scalers of the product number `key` of the layer."""
        if key not in self.sites:
            self.sites[key] = {name: TensorScaler(policy) for name, policy in self.recipe.delayed().items()}
        return self.sites[key]

    def of_all_products(self, layer: nn.Module) -> list[TensorScaler]:
        """The scalers of all products that the layer has in any process, in one order."""
        if several_processes():
            for number in range(MOST_OF_ATTENTION if isinstance(layer, nn.MultiheadAttention) else 1):
                self.site(str(number))
        scalers = [scaler for key in sorted(self.sites) for scaler in self.sites[key].values()]
        for parameter in islice(layer.parameters(), 1):
            for scaler in scalers:  # some are new: their layer has only run in another process
                scaler.follow_(parameter.device)
        return scalers

    def forward(self) -> None:
        """Nothing is computed here."""

    def get_extra_state(self) -> dict[str, Any]:
        """Every scale, history and amax, by site and tensor."""
        sites = {key: {n: s.state_dict() for n, s in scalers.items()} for key, scalers in self.sites.items()}
        return {"recipe": self.recipe.name, "sites": sites}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take over what `get_extra_state` gave. Raises ValueError if it belongs to another recipe."""
        self.sites = self.fitting(state)

    def fitting(self, state: object) -> dict[str, dict[str, TensorScaler]]:
        """The scalers that a saved state describes; nothing changes here. Raises ValueError for another recipe's."""
        if not isinstance(state, dict) or "sites" not in state:
            raise ValueError(f"this is not the state of a recipe's scales: {state!r:.100}")
        loaded: dict[str, dict[str, TensorScaler]] = {}
        for key, scalers in state["sites"].items():
            loaded[key] = {name: TensorScaler(policy) for name, policy in self.recipe.delayed().items()}
            if scalers.keys() != loaded[key].keys():
                raise ValueError(f"this state belongs to recipe {state.get('recipe')!r}, not to {self.recipe.name!r}")
            for name, scaler in scalers.items():
                loaded[key][name].load_state_dict(scaler)
        return loaded


class RecipeForward(Forward):
    """The mark of a layer under a recipe: it also tells the products which layer they belong to."""

    def run(self, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward of the layer, whose products are numbered from 0 on."""
        self.calls = 0
        outer, LOCAL.layer = LOCAL.layer, self
        try:
            return super().run(rule, args, kwargs)
        finally:
            LOCAL.layer = outer

    def scalers(self) -> dict[str, TensorScaler]:
        """The delayed scales of the layer's next product, {} without state."""
        assert self.module is not None
        state = self.module._modules.get(STATE)
        _LAYERS[self.module] = None
        key, self.calls = str(self.calls), self.calls + 1
        return state.site(key) if isinstance(state, RecipeScales) else {}


@cache
def recipe_rule(recipe: Recipe) -> Rule:
    """Linear operations compute by the recipe; everything else is as without one."""

    linear = _linear
    if recipe.delayed():
        linear = torch.compiler.disable(_linear, reason="scales are kept and renewed in Python")

    def handle(func: ops.Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, weight, bias = (*args, *(kwargs[k] for k in ("input", "weight", "bias")[len(args) :] if k in kwargs), None)[
            :3
        ]
        return linear(x, weight, bias, recipe, LOCAL.layer, _notes(recipe))

    return Rule(rules.recipe_table(handle), None, None, False, (recipe_rule, (recipe,)))


def _notes(recipe: Recipe) -> Note | None:
    """Tells open ledgers of each operand, and what the product that begins computes in."""
    element = recipe.fprop_input.element if recipe.fprop_input else None
    if isinstance(element, FloatFormat):
        computes(Emulated(element, element))
    notes = [book.operand_notes() for book in LOCAL.books]

    def note(*operand: object) -> None:
        for one in notes:
            one(*operand)

    return note if notes else None


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, layer: RecipeForward, note: Note | None
) -> Tensor:
    y = recipe_linear(x, weight, recipe, layer.scalers() if recipe.delayed() else {}, note)
    return y if bias is None else y + bias.to(y.dtype)


def recipe_linear(
    x: Tensor,
    weight: Tensor,
    recipe: Recipe,
    scalers: dict[str, TensorScaler] | None = None,
    note: Note | None = None,
) -> Tensor:
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
    return _RecipeLinear.apply(x, weight, recipe, scalers or {}, note, torch.is_grad_enabled())


class _RecipeLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        recipe: Recipe,
        scalers: dict[str, TensorScaler],
        note: Note | None,
        tracks: bool,
    ) -> Tensor:
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # of no features -1 would be any number
        scales = {name: scaler.scale for name, scaler in scalers.items()}
        for name, tensor in (("input", x), ("weight", weight)):
            if name in scalers:
                scalers[name].follow_(tensor.device)
                scales[name] = scalers[name].scale
                if tracks:
                    scalers[name].observe_(amax_of(tensor))
        ctx.save_for_backward(rows, weight)
        ctx.settings = (recipe, scalers, scales, note, x.shape)
        y = _product("fprop", (rows, weight), (1, 1), recipe, scales, note, x.dtype)
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        recipe, scalers, scales, note, shape = ctx.settings
        grad = grads[0].reshape(rows.shape[0], weight.shape[0])
        # the scale of this gradient is not known before backward; those of input and weight were taken in forward
        if "grad" in scalers:
            scalers["grad"].follow_(grad.device)
            scales = {**scales, "grad": scalers["grad"].scale}
            scalers["grad"].observe_(amax_of(grad))
        # each product is made only where somebody waits for it
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _product("dgrad", (grad, weight), (1, 0), recipe, scales, note, rows.dtype).view(shape)
        if ctx.needs_input_grad[1]:
            grad_weight = _product("wgrad", (grad, rows), (0, 0), recipe, scales, note, weight.dtype)
        return grad_x, grad_weight, None, None, None, None


_OPERANDS = {"fprop": ("input", "weight"), "dgrad": ("grad", "weight"), "wgrad": ("grad", "input")}


def _product(
    product: str,
    tensors: tuple[Tensor, Tensor],
    axes: tuple[int, int],
    recipe: Recipe,
    scales: dict[str, Tensor],
    note: Note | None,
    dtype: torch.dtype,
) -> Tensor:
    """Two matrices, each with the axis that is summed over -> their product (rows of the first, rows of the second)."""
    cast: list[Operand | Tensor] = []
    for name, tensor, axis in zip(_OPERANDS[product], tensors, axes):
        how: Cast | None = getattr(recipe, f"{product}_{name}")
        cast.append(tensor if how is None else how(tensor, axis, scales.get(name) if how.delayed else None))
    # tensor cores first: decoding to float32 costs a pass over both operands
    result = _native(cast[0], cast[1], axes, dtype)
    if note is not None:
        for name, operand in zip(_OPERANDS[product], cast):
            note(product, name, operand if isinstance(operand, Operand) else None, result is not None)
    if result is not None:
        return result
    a, b = (c.values if isinstance(c, Operand) else c for c in cast)
    if a.dtype is not b.dtype:  # one operand in high precision
        a, b = a.float(), b.float()
    a, b = (a if axes[0] == 1 else a.t()), (b.t() if axes[1] == 1 else b)
    # the operands are what the recipe says: an autocast around the network must not cast them again
    with nullcontext() if a.is_meta else torch.autocast(a.device.type, enabled=False):  # no autocast on meta
        return (a @ b).to(dtype)


def native_product(device: torch.device) -> bool:
    """Whether tensor cores of this device multiply 8-bit floats."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _native(a: Operand | Tensor, b: Operand | Tensor, axes: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
    """The product on tensor cores by `torch._scaled_mm`; None where the recipe, the shapes or the device have none."""
    if not (isinstance(a, Operand) and isinstance(b, Operand)) or not native_product(a.values.device):
        return None
    natives = [operand.cast.element.torch_dtype for operand in (a, b)]
    kinds = {operand.cast.granularity for operand in (a, b)}
    eight = all(native in (torch.float8_e4m3fn, torch.float8_e5m2) for native in natives)
    if not eight or natives == [torch.float8_e5m2] * 2 or len(kinds) > 1 or kinds == {"block"}:
        return None
    if kinds == {"axis"} and dtype is not torch.bfloat16:
        return None
    left, right = (o.elements if axis == 1 else o.elements.t() for o, axis in zip((a, b), axes))
    if any(size % 16 for size in (*left.shape, *right.shape)) or not left.numel() or not right.numel():
        return None
    # torch wants what decodes, the recipe keeps what encodes
    scales = [torch.reciprocal(o.scale if axis == 1 else o.scale.t()) for o, axis in zip((a, b), axes)]
    low, high = left.contiguous().to(natives[0]), right.contiguous().to(natives[1])
    return torch._scaled_mm(low, high.t(), scales[0].contiguous(), scales[1].t().contiguous(), out_dtype=dtype)


# --- put on a network, and taken off ----------------------------------------------------------------------------------


def linear_layers(network: nn.Module) -> dict[str, nn.Module]:
    """Path -> layer, for every linear layer and every attention (whose projections are linear layers too)."""
    found: dict[str, nn.Module] = {}
    inside: set[int] = set()
    for name, module in network.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            inside |= {id(child) for child in module.modules()}
            found[name] = module
        elif isinstance(module, nn.Linear) and id(module) not in inside:
            found[name] = module
    return found


Keep = str | Sequence[str] | Callable[[str, nn.Module], bool] | None


def kept_layers(layers: Iterable[tuple[str, nn.Module]], keep: Keep) -> set[str]:
    """The paths that `keep` names.

    A pattern names a layer when it matches a run of its path's components: "lm_head" names "model.lm_head", "blocks.0"
    names all in that block, "blocks.*.proj" one layer of each.
    Raises:  ValueError for a pattern that matches nothing: the layer it means would be cast silently.
    """
    layers = list(layers)
    if keep is None:
        return set()
    if callable(keep):
        chosen = {name for name, module in layers if keep(name, module)}
        if not chosen:
            raise ValueError(f"keep picked no layer, so nothing would stay high; {_listed(layers)}")
        return chosen
    patterns = [keep] if isinstance(keep, str) else list(keep) if isinstance(keep, Sequence) else [keep]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"keep is a pattern, a list of them or a function (path, module) -> bool, got {keep!r}")
    kept: set[str] = set()
    for pattern in patterns:
        named = {name for name, _ in layers if _names(pattern, name)}
        if not named:
            raise ValueError(f"keep={pattern!r} matches no linear layer, so nothing would stay high; {_listed(layers)}")
        kept |= named
    return kept


def _names(pattern: str, path: str) -> bool:
    parts, length = path.split("."), pattern.count(".") + 1
    return any(fnmatchcase(".".join(parts[i : i + length]), pattern) for i in range(len(parts) - length + 1))


def _listed(layers: Iterable[tuple[str, nn.Module]]) -> str:
    names = [name or "(the network itself)" for name, _ in layers]
    return "there are " + ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def cast_by_recipe(network: nn.Module, recipe: Recipe, keep: Keep = None) -> nn.Module:
    """Put `recipe` on the linear layers of `network`; see `cast_like`."""
    layers = linear_layers(network)
    if not layers:
        raise ValueError(f"a recipe casts linear layers, and this {type(network).__name__} has none")
    kept = kept_layers(layers.items(), keep)
    for name, module in layers.items():
        old = mark_of(module)
        around: dict[str, Any] = {} if old is None else {"result": old.result, "level": old.level}
        drop_scales(module)
        if name in kept:
            if isinstance(old, RecipeForward):
                mark(module, Rule(), **around)
            continue
        mark(module, recipe_rule(recipe), kind=RecipeForward, **around)
        if recipe.delayed():
            module.add_module(STATE, RecipeScales(recipe))
    root = mark_of(network) or mark(network, Rule())
    root.level = recipe.name
    # once per network: cast again it would check twice and warn twice
    if not any(_is_check(hook) for hook in network._load_state_dict_pre_hooks.values()):
        network.register_load_state_dict_pre_hook(_check_state)
    if recipe.delayed() and _remember not in network._forward_pre_hooks.values():
        network.register_forward_pre_hook(_remember)
    return network


def _check_state(network: nn.Module, state: Mapping[str, Any], prefix: str, *rest: object) -> None:
    """Before anything is loaded: whether the scales in `state` belong to the recipes of this network.

    A hook cannot see `strict`. So scales that are too many or too few are warned of, and torch raises if it is strict.
    """
    ending = f"{STATE}._extra_state"
    own = {f"{prefix}{path}._extra_state": m for path, m in network.named_modules() if isinstance(m, RecipeScales)}
    saved = {key: value for key, value in state.items() if key.startswith(prefix) and key.endswith(ending)}
    for key in own.keys() & saved.keys():
        own[key].fitting(saved[key])
    for key in sorted(saved.keys() - own.keys())[:1]:
        name = saved[key].get("recipe") if isinstance(saved[key], dict) else None
        warnings.warn(
            f"the state has scales of recipe {name!r} in {key!r}, and this network keeps none there: cast it like "
            f"{name!r} before loading, or load_state_dict(state, strict=False) leaves the scales out",
            stacklevel=5,
        )
    for key in sorted(own.keys() - saved.keys())[:1]:
        warnings.warn(
            f"the state has no scales for {key!r} of recipe {own[key].recipe.name!r}: it was saved without it; "
            f"load_state_dict(state, strict=False) loads the weights and keeps the scales as they are",
            stacklevel=5,
        )


def _is_check(hook: object) -> bool:
    return getattr(hook, "hook", hook) is _check_state  # torch wraps it


def drop_scales(module: nn.Module) -> None:
    """Take the scales of a recipe off this one module."""
    if STATE in module._modules and isinstance(module._modules[STATE], RecipeScales):  # TorchScript knows no get
        del module._modules[STATE]
    for key in [key for key, hook in module._load_state_dict_pre_hooks.items() if _is_check(hook)]:
        del module._load_state_dict_pre_hooks[key]
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _remember]:
        del module._forward_pre_hooks[key]


# what has run and holds delayed scales, in the order of first use: layers, and whole networks, of which all processes
# have the same ones in one order whatever layers each of them runs
_LAYERS: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
_NETWORKS: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()


def _remember(network: nn.Module, *rest: object) -> None:
    """Before a forward of the network; a hook, so that copies have it too."""
    if not torch.compiler.is_compiling():
        _NETWORKS[network] = None


def _after_optimizer(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """The end of a step for every layer that has a parameter in `optimizer`."""
    if (_LAYERS or _NETWORKS) and not torch.compiler.is_compiling():
        # a second optimizer of the same network ends the step of its own layers alone
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for part in list(_NETWORKS if several_processes() else _LAYERS):
            _end(part, lambda layer: any(id(p) in stepped for p in layer.parameters()))


register_optimizer_step_post_hook(_after_optimizer)


def end_step(network: nn.Module) -> None:
    """Say that a step is over, for loops that change weights without an optimizer of torch's kind.

    Among several processes each of them calls it, also before a checkpoint: what is seen since the last step is each
    process's own until then.
    """
    check_kind("network", network, nn.Module, "an nn.Module")
    _end(network, lambda layer: True)


def _end(network: nn.Module, of: Callable[[nn.Module], bool]) -> None:
    states = [(layer, layer._modules.get(STATE)) for layer in network.modules()]
    layers = [(layer, state) for layer, state in states if isinstance(state, RecipeScales) and of(layer)]
    update_all_([scaler for layer, state in layers for scaler in state.of_all_products(layer)], only_seen=True)


def recipe_of(network: nn.Module) -> dict[str, Recipe | None]:
    """Path of each linear layer -> the recipe it runs under, None where it stays high."""
    check_kind("network", network, nn.Module, "an nn.Module")
    found: dict[str, Recipe | None] = {}
    for name, module in linear_layers(network).items():
        forward = mark_of(module)
        rule = forward.rule if isinstance(forward, RecipeForward) else None
        found[name] = None if rule is None or rule.recipe is None else rule.recipe[1][0]
    return found
