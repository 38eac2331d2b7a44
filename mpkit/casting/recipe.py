"""A recipe: in which format each operand of a linear layer's three products is, and how its scale is found.

Output, input gradient and weight gradient are three products (fprop, dgrad, wgrad) of two operands each: six casts. A
tensor that enters two products is cast for each along the axis that is summed over.

| recipe | input, weight | gradient of the output | scale | weight gradient |
|---|---|---|---|---|
| te_hybrid_delayed | E4M3 | E5M2 | tensor, from the amaxes of 1024 steps | 8 bits |
| te_current | E4M3 | E5M2 | tensor, its own amax | 8 bits |
| te_blockwise | E4M3 | E4M3 | 1x128, weight 128x128, powers of two | 8 bits |
| torchao_tensorwise | E4M3 | E5M2 | tensor | 8 bits |
| torchao_rowwise | E4M3 | E4M3 | row, powers of two | 8 bits |
| torchao_rowwise_with_gw_hp | E4M3 | E4M3 | row; weight in dgrad: tensor | high precision |
| deepseek_v3 | E4M3 | E4M3 | 1x128, weight 128x128 | 8 bits |
| mxfp8 | E4M3 | E4M3 | 32 values, E8M0 rounded up | 8 bits |
| mxfp4 | E2M1 | E2M1 | 32 values, E8M0 rounded up | 4 bits |
| nvfp4 | E2M1 | E2M1, stochastic | 16 values, weight 16x16, E4M3 and one per tensor | 4 bits, Hadamard |

Source:  TransformerEngine 2.20 (te_, nvfp4; arXiv:2509.25149), torchao 0.18 (torchao_, mxfp8), DeepSeek-V3
         (arXiv:2412.19437, 3.3; the scales are those of its inference kernel), OCP MX 1.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mpkit import blocks
from mpkit.arguments import Checked, check_choice, check_kind
from mpkit.blocks import BlockFormat, Blocks, hadamard, quantize_blocks
from mpkit.formats import E4M3FN, E5M2, FloatFormat
from mpkit.policies import TensorScalePolicy, tensor_scale_preset
from mpkit.policies.tensor_scale import current_scale
from mpkit.rounding import Mode, round_to

Granularity = Literal["tensor", "axis", "block"]
PRODUCTS = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class Operand:
    """One operand of a product, cast.

    Args:
        values:   what the product multiplies: decoded, float32, in the shape of the tensor (with a Hadamard transform
                  the summed axis may be longer, filled up with zeros).
        encoded:  values of the element format before decoding, or a tensor in a block format; see `elements`.
        scale:    encoding scale, () or one per row; of a block format the stored decoding scale of each block.
        source:   the tensor as it went into the cast (after a Hadamard transform), float32.
        cast:     the cast that made it.
    """

    values: Tensor
    encoded: Tensor | Blocks
    scale: Tensor
    source: Tensor
    cast: Cast

    @property
    def elements(self) -> Tensor:
        """Values of the element format before decoding, float32."""
        return self.encoded.elements if isinstance(self.encoded, Blocks) else self.encoded

    @property
    def blocks(self) -> Blocks | None:
        """The tensor in its block format; None where the format is no block format."""
        return self.encoded if isinstance(self.encoded, Blocks) else None

    def clipped(self) -> Tensor:
        """Share of elements beyond what their scale can hold, () float32; a last bit does not count."""
        held = self.blocks.largest() if self.blocks is not None else self.cast.element.max / self.scale
        return _share(self.source.abs() > held * (1 + 2.0**-22))

    def flushed(self) -> Tensor:
        """Share of elements that became zero and were not, () float32."""
        return _share((self.values == 0) & (self.source != 0))


def _share(mask: Tensor) -> Tensor:
    return mask.float().sum() / max(1, mask.numel())


@dataclass(frozen=True)
class OperandRow:
    """One operand of one product, as the ledger saw it.

    Args:
        module:    path of the layer.
        product:   fprop, dgrad or wgrad.
        operand:   input, weight or grad.
        format:    the element or block format, "high precision" where nothing was cast.
        scale_min, scale_max: its scales, smallest and largest (encoding for a tensor or row, decoding for blocks).
        clipped:   share of elements beyond what their scale can hold.
        flushed:   share of elements that became zero and were not.
    """

    module: str
    product: str
    operand: str
    format: str
    scale_min: float
    scale_max: float
    clipped: float
    flushed: float


def row_of(module: str, product: str, name: str, operand: Operand | None) -> OperandRow:
    """What the ledger writes about one operand (reads the device); None: high precision."""
    if operand is None:
        return OperandRow(module, product, name, "high precision", 1.0, 1.0, 0.0, 0.0)
    low, high = torch.aminmax(operand.scale) if operand.scale.numel() else (torch.ones(()), torch.ones(()))
    shares = float(operand.clipped()), float(operand.flushed())
    return OperandRow(module, product, name, operand.cast.name, float(low), float(high), *shares)


@dataclass(frozen=True)
class Cast(Checked):
    """How one operand is cast.

    Args:
        fmt:         a FloatFormat (with a scale per tensor or row), or a BlockFormat, which brings its own scales.
        granularity: "tensor", "axis" (one scale for each row or column that is summed over) or "block"; None: block for
                     a BlockFormat, else tensor.
        policy:      how the scale of a tensor or row follows from amax; None: `te_current`. Its `element_max` is set to
                     that of the format.
        rounding:    a mode of `round_to`; "stochastic" draws from torch's own generator.
        hadamard:    transform the operand along the summed axis first; both operands of a product, or neither.
    Raises:  TypeError or ValueError for a combination that does not exist.
    """

    fmt: FloatFormat | BlockFormat
    granularity: Granularity | None = None
    policy: TensorScalePolicy | None = None
    rounding: Mode = "nearest_even"
    hadamard: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kind("fmt", self.fmt, (FloatFormat, BlockFormat), "a FloatFormat or BlockFormat, as E4M3FN or MXFP8_E4M3")
        in_blocks = isinstance(self.fmt, BlockFormat)
        kinds = ("block",) if in_blocks else ("tensor", "axis")
        chosen = check_choice("granularity", kinds[0] if self.granularity is None else self.granularity, kinds)
        object.__setattr__(self, "granularity", chosen)
        if isinstance(self.fmt, BlockFormat):
            if self.policy is not None:
                raise ValueError("a block format brings its own scales; set its scale_rounding instead of a policy")
            return
        if self.fmt.bits > 16:
            raise ValueError(f"a cast to {self.fmt} needs no scale; leave the operand out (None: high precision)")
        policy = replace(self.policy or tensor_scale_preset("te_current"), element_max=self.fmt.max)
        if chosen == "axis" and policy.delayed:
            raise ValueError("delayed scaling keeps one scale per tensor; with granularity 'axis' take a current one")
        object.__setattr__(self, "policy", policy)

    @property
    def name(self) -> str:
        """The format's name."""
        return self.fmt.name

    @property
    def element(self) -> Any:
        """The format of one element."""
        return self.fmt.element if isinstance(self.fmt, BlockFormat) else self.fmt

    @property
    def delayed(self) -> bool:
        """Whether the scale comes from earlier steps, so that there is state."""
        return self.policy is not None and self.policy.delayed is True

    def __call__(self, x: Tensor, axis: int, scale: Tensor | None = None) -> Operand:
        """Cast a matrix for a product that sums over `axis`, with a given () scale where the policy is delayed.

        Shapes:  x (rows, columns) of any float dtype, axis 0 or 1.
        """
        x = hadamard(x, axis) if self.hadamard else x.detach()
        if isinstance(self.fmt, BlockFormat):
            q = quantize_blocks(x, self.fmt, axis, self.rounding)
            return Operand(q.dequantize(torch.float32), q, q.scales, x.float(), self)
        assert self.policy is not None
        x = x.float()
        if scale is None:
            scale = current_scale(self.policy, amax_of(x, axis if self.granularity == "axis" else None))
        elements = round_to(x * scale, self.fmt, self.rounding, overflow="saturate")
        values = elements / scale if self.policy.double else elements * torch.reciprocal(scale)
        return Operand(values, elements, scale, x, self)


def amax_of(x: Tensor, axis: int | None = None) -> Tensor:
    """Largest magnitude of a tensor, () float32, or along one axis, which stays with length 1; of nothing it is 0."""
    magnitude = x.detach().abs()
    if axis is None:
        return magnitude.amax().float() if x.numel() else torch.zeros((), device=x.device)
    return (magnitude.amax(axis, keepdim=True) if x.shape[axis] else magnitude.sum(axis, keepdim=True)).float()


@dataclass(frozen=True)
class Recipe(Checked):
    """The six casts of a linear layer; None leaves an operand in high precision.

    Args:
        name:         what tables call it.
        fprop_input, fprop_weight: operands of output = input @ weight.T, summed over the input features.
        dgrad_grad, dgrad_weight:  operands of the input gradient, grad @ weight, summed over the output features.
        wgrad_grad, wgrad_input:   operands of the weight gradient, grad.T @ input, summed over the rows.
    Raises:  TypeError for what is no Cast; ValueError where one operand of a product has a Hadamard transform and the
             other has none (it would not cancel), or where two delayed casts of one tensor differ.

    >>> Recipe("fp8 forward only", Cast(E4M3FN), Cast(E4M3FN)).fprop_input.name
    'e4m3fn'
    """

    name: str
    fprop_input: Cast | None = None
    fprop_weight: Cast | None = None
    dgrad_grad: Cast | None = None
    dgrad_weight: Cast | None = None
    wgrad_grad: Cast | None = None
    wgrad_input: Cast | None = None

    def __post_init__(self) -> None:
        check_kind("the name of a recipe, which comes first,", self.name, str, "a string")
        super().__post_init__()
        for product in PRODUCTS:
            transformed = {cast is not None and cast.hadamard for key, cast in self.casts() if key.startswith(product)}
            if len(transformed) > 1:
                raise ValueError(f"a Hadamard transform cancels only if both operands of {product} have it")
        for tensor in ("input", "weight", "grad"):
            policies = {cast.policy for key, cast in self.casts() if key.endswith(tensor) and cast and cast.delayed}
            if len(policies) > 1:
                raise ValueError(f"one tensor has one delayed scale: give both casts of {tensor} the same policy")

    def casts(self) -> list[tuple[str, Cast | None]]:
        """(product_tensor, cast) of the six."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)[1:]]

    def delayed(self) -> dict[str, TensorScalePolicy]:
        """The policies that keep state, by tensor: input, weight, grad."""
        return {key.partition("_")[2]: c.policy for key, c in self.casts() if c and c.policy and c.policy.delayed}


def uniform(name: str, forward: Cast, grad: Cast | None = None, weight: Cast | None = None) -> Recipe:
    """A recipe whose tensors are cast alike in both of their products.

    Args:  forward casts input and weight; `grad` (None: the same) the gradient, `weight` (None: the same) the weight.
    """
    grad, weight = (forward if cast is None else cast for cast in (grad, weight))
    return Recipe(name, forward, weight, grad, weight, grad, forward)


def _recipes() -> Iterator[Recipe]:
    for name, policy in (("te_hybrid_delayed", "te_delayed"), ("te_current", "te_current")):
        four, five = (Cast(fmt, "tensor", tensor_scale_preset(policy, fmt)) for fmt in (E4M3FN, E5M2))
        yield uniform(name, four, five)
    te: dict[str, Any] = {"scale": blocks.E8M0, "scale_rounding": "te"}
    yield uniform("te_blockwise", Cast(replace(blocks.FP8_1X128, **te)), weight=Cast(replace(blocks.FP8_128X128, **te)))
    tensor, row = (tensor_scale_preset(name) for name in ("torchao_tensorwise", "torchao_rowwise"))
    yield uniform("torchao_tensorwise", Cast(E4M3FN, "tensor", tensor), Cast(E5M2, "tensor", tensor))
    by_row, by_tensor = Cast(E4M3FN, "axis", row), Cast(E4M3FN, "tensor", row)
    yield uniform("torchao_rowwise", by_row)
    yield Recipe("torchao_rowwise_with_gw_hp", by_row, by_row, by_row, by_tensor)
    flat, square = (Cast(replace(fmt, scale_rounding="deepseek")) for fmt in (blocks.FP8_1X128, blocks.FP8_128X128))
    yield uniform("deepseek_v3", flat, weight=square)
    yield uniform("mxfp8", Cast(replace(blocks.MXFP8_E4M3, scale_rounding="rceil")))
    yield uniform("mxfp4", Cast(replace(blocks.MXFP4, scale_rounding="rceil")))
    row16, square16 = Cast(blocks.NVFP4), Cast(replace(blocks.NVFP4, name="nvfp4_16x16", block=(16, 16)))
    random16 = replace(row16, rounding="stochastic")
    spread = replace(random16, hadamard=True), replace(row16, hadamard=True)
    yield Recipe("nvfp4", row16, square16, random16, square16, *spread)


RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _recipes()}
"""The named recipes; `dataclasses.replace` makes own ones from them."""
