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

from mpkit.arguments import check_kind
from mpkit.blocks import (
    FP8_1X128,
    FP8_128X128,
    MXFP4,
    MXFP8_E4M3,
    NVFP4,
    BlockFormat,
    Blocks,
    hadamard,
    quantize_blocks,
)
from mpkit.blocks.format import E8M0
from mpkit.formats import E4M3FN, E5M2, FloatFormat
from mpkit.policies import TensorScalePolicy, tensor_scale_preset
from mpkit.policies.tensor_scale import current_scale
from mpkit.rounding import MODES, Mode, round_to

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
        top, slack = self.cast.element.max, 1 + 2.0**-22
        if isinstance(self.encoded, Blocks):
            beyond = self.source.abs() > self.encoded.largest() * slack
        else:
            beyond = (self.source * self.scale).abs() > top * slack
        return _share(beyond)

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
        native:    True where a tensor core took the 8-bit operand, False where it was emulated.
    """

    module: str
    product: str
    operand: str
    format: str
    scale_min: float
    scale_max: float
    clipped: float
    flushed: float
    native: bool


def row_of(module: str, product: str, name: str, operand: Operand | None, native: bool) -> OperandRow:
    """What the ledger writes about one operand (reads the device); None: high precision."""
    if operand is None:
        return OperandRow(module, product, name, "high precision", 1.0, 1.0, 0.0, 0.0, native)
    low, high = torch.aminmax(operand.scale) if operand.scale.numel() else (torch.ones(()), torch.ones(()))
    shares = float(operand.clipped()), float(operand.flushed())
    return OperandRow(module, product, name, operand.cast.name, float(low), float(high), *shares, native)


@dataclass(frozen=True)
class Cast:
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
        if not isinstance(self.fmt, FloatFormat | BlockFormat):
            raise TypeError(
                f"fmt is a FloatFormat such as E4M3FN or a BlockFormat such as MXFP8_E4M3, got {self.fmt!r}"
            )
        in_blocks = isinstance(self.fmt, BlockFormat)
        check_kind("granularity", self.granularity, str, "a string", optional=True)
        chosen = self.granularity or ("block" if in_blocks else "tensor")
        if chosen not in ("tensor", "axis", "block") or (chosen == "block") != in_blocks:
            raise ValueError(
                f"{self.fmt!r} is scaled by {'block' if in_blocks else 'tensor or axis'}, got granularity {chosen!r}"
            )
        object.__setattr__(self, "granularity", chosen)
        if self.rounding not in MODES:
            raise ValueError(f"rounding is one of {', '.join(MODES)}, got {self.rounding!r}")
        if self.policy is not None and not isinstance(self.policy, TensorScalePolicy):
            raise TypeError(
                f"policy is a TensorScalePolicy such as tensor_scale_preset('te_current'), got {self.policy!r}"
            )
        if in_blocks and self.policy is not None:
            raise ValueError("a block format brings its own scales; set BlockFormat.scale_rounding instead of a policy")
        if isinstance(self.fmt, FloatFormat):
            if self.fmt.bits > 16:
                raise ValueError(f"a cast to {self.fmt} needs no scale; leave the operand out (None: high precision)")
            policy = replace(self.policy or tensor_scale_preset("te_current"), element_max=self.fmt.max)
            if chosen == "axis" and policy.delayed:
                raise ValueError(
                    "delayed scaling keeps one scale per tensor; with granularity 'axis' take a current one"
                )
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
class Recipe:
    """The six casts of a linear layer; None leaves an operand in high precision.

    Args:
        name:         what tables call it.
        fprop_input, fprop_weight: operands of output = input @ weight.T, summed over the input features.
        dgrad_grad, dgrad_weight:  operands of the input gradient, grad @ weight, summed over the output features.
        wgrad_grad, wgrad_input:   operands of the weight gradient, grad.T @ input, summed over the rows.
    Raises:  TypeError for what is no Cast; ValueError where one operand of a product has a Hadamard transform and the
             other has none (it would not cancel), or where two delayed casts of one tensor differ.

    >>> Recipe("fp8 forward only", Cast(E4M3FN), Cast(E4M3FN)).describe()["fprop.input"]
    'e4m3fn per tensor, te_current'
    """

    name: str
    fprop_input: Cast | None = None
    fprop_weight: Cast | None = None
    dgrad_grad: Cast | None = None
    dgrad_weight: Cast | None = None
    wgrad_grad: Cast | None = None
    wgrad_input: Cast | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"a recipe has a name first, got {self.name!r}")
        for field in fields(self)[1:]:
            if not isinstance(cast := getattr(self, field.name), Cast | None):
                raise TypeError(f"{field.name} is a Cast or None (high precision), got {cast!r}")
        for product in PRODUCTS:
            transformed = [cast is not None and cast.hadamard for key, cast in self.casts() if key.startswith(product)]
            if transformed[0] != transformed[1]:
                raise ValueError(f"a Hadamard transform cancels only if both operands of {product} have it")
        for tensor in ("input", "weight", "grad"):
            policies = {cast.policy for key, cast in self.casts() if key.endswith(tensor) and cast and cast.delayed}
            if len(policies) > 1:
                raise ValueError(f"one tensor has one delayed scale: give both casts of {tensor} the same policy")

    def casts(self) -> Iterator[tuple[str, Cast | None]]:
        """(product_tensor, cast) of the six."""
        for field in fields(self)[1:]:
            yield field.name, getattr(self, field.name)

    def delayed(self) -> dict[str, TensorScalePolicy]:
        """The policies that keep state, by tensor: input, weight, grad."""
        return {
            key.partition("_")[2]: cast.policy
            for key, cast in self.casts()
            if cast is not None and cast.delayed and cast.policy is not None
        }

    def describe(self) -> dict[str, str]:
        """One phrase for each cast, by product.tensor."""
        phrases = {}
        for key, cast in self.casts():
            words = ["high precision"]
            if cast is not None:
                size = "{}x{}".format(*cast.fmt.block) if isinstance(cast.fmt, BlockFormat) else cast.granularity
                how = (
                    cast.fmt.scale_rounding
                    if isinstance(cast.fmt, BlockFormat)
                    else str(cast.policy and cast.policy.name)
                )
                words = [f"{cast.name} per {size}", how]
                words += ["stochastic"] * (cast.rounding == "stochastic") + ["Hadamard"] * cast.hadamard
            phrases[key.replace("_", ".")] = ", ".join(words)
        return phrases


def uniform(name: str, forward: Cast, grad: Cast | None = None, weight: Cast | None = None) -> Recipe:
    """A recipe whose tensors are cast alike in both of their products.

    Args:  forward casts input and weight; `grad` (None: the same) the gradient, `weight` (None: the same) the weight.
    """
    for key, cast in (("grad", grad), ("weight", weight)):
        check_kind(key, cast, Cast, "a Cast", optional=True)
    grad, weight = grad or forward, weight or forward
    return Recipe(name, forward, weight, grad, weight, grad, forward)


def _te(policy: str, name: str) -> Recipe:
    return uniform(
        name,
        Cast(E4M3FN, "tensor", tensor_scale_preset(policy, E4M3FN)),
        Cast(E5M2, "tensor", tensor_scale_preset(policy, E5M2)),
    )


def _recipes() -> list[Recipe]:
    tensor, row = (tensor_scale_preset(name) for name in ("torchao_tensorwise", "torchao_rowwise"))
    by_row = Cast(E4M3FN, "axis", row)
    rowwise = uniform("torchao_rowwise", by_row)
    te_block: dict[str, Any] = {"scale": E8M0, "scale_rounding": "te"}
    mx: dict[str, Any] = {"scale_rounding": "rceil"}
    row16, square16 = Cast(NVFP4), Cast(replace(NVFP4, name="nvfp4_16x16", block=(16, 16)))
    random16 = replace(row16, rounding="stochastic")
    return [
        _te("te_delayed", "te_hybrid_delayed"),
        _te("te_current", "te_current"),
        uniform("te_blockwise", Cast(replace(FP8_1X128, **te_block)), weight=Cast(replace(FP8_128X128, **te_block))),
        uniform("torchao_tensorwise", Cast(E4M3FN, "tensor", tensor), Cast(E5M2, "tensor", tensor)),
        rowwise,
        replace(
            rowwise,
            name="torchao_rowwise_with_gw_hp",
            dgrad_weight=Cast(E4M3FN, "tensor", row),
            wgrad_grad=None,
            wgrad_input=None,
        ),
        uniform(
            "deepseek_v3",
            Cast(replace(FP8_1X128, scale_rounding="deepseek")),
            weight=Cast(replace(FP8_128X128, scale_rounding="deepseek")),
        ),
        uniform("mxfp8", Cast(replace(MXFP8_E4M3, **mx))),
        uniform("mxfp4", Cast(replace(MXFP4, **mx))),
        Recipe(
            "nvfp4",
            row16,
            square16,
            random16,
            square16,
            replace(random16, hadamard=True),
            replace(row16, hadamard=True),
        ),
    ]


RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _recipes()}
"""The named recipes; `dataclasses.replace` makes own ones from them."""
