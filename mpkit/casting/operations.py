"""Which torch functions form one operator, however they are spelled.

A framework's list names operators (MatMul, ReLU); torch spells each in several ways: `torch.matmul`, `x.matmul(w)`,
`x @ w`, `F.relu`. Here an operator is a name, and `spellings` finds every torch function behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]

_HOMES = (torch, Tensor, F, torch.linalg, torch.special)
_ALIASES = {
    "matmul": ("__matmul__", "__rmatmul__"),
    "pow": ("__pow__", "__rpow__", "float_power"),
    "outer": ("ger",),
    "norm": ("vector_norm", "matrix_norm"),
    "multi_dot": ("chain_matmul",),
    "div": ("__truediv__", "__rtruediv__", "__rdiv__", "divide", "true_divide"),
    "add": ("__add__", "__radd__"),
    "mul": ("__mul__", "__rmul__", "multiply"),
    "sub": ("__sub__", "__rsub__", "subtract", "rsub"),
    "cat": ("concat", "concatenate"),
    "lt": ("__lt__", "less"),
    "le": ("__le__", "less_equal"),
    "gt": ("__gt__", "greater"),
    "ge": ("__ge__", "greater_equal"),
    "eq": ("__eq__",),
    "ne": ("__ne__", "not_equal"),
}


def spellings(*operators: str) -> frozenset[Function]:
    """Every torch function that is one of `operators`: as a function, a method, a symbol.

    Raises:  ValueError if torch has no function of that name.

    >>> len(spellings("matmul"))    # torch.matmul, Tensor.matmul, @ and its reflection, torch.linalg.matmul
    5
    """
    found: set[Function] = set()
    for operator in operators:
        names = (operator, *_ALIASES.get(operator, ()))
        here = {getattr(home, name) for home in _HOMES for name in names if callable(getattr(home, name, None))}
        if not here:
            raise ValueError(
                f"torch has no function named {operator!r}; give the name used in torch or torch.nn.functional"
            )
        found |= here
    return frozenset(found)


def every(match: Callable[[str], bool]) -> frozenset[Function]:
    """Every torch function whose name satisfies `match`."""
    return frozenset(
        getattr(home, name)
        for home in _HOMES
        for name in dir(home)
        if match(name) and callable(getattr(home, name, None))
    )


def _existing(names: Iterable[str]) -> frozenset[Function]:
    return frozenset(getattr(Tensor, name) for name in names if callable(getattr(Tensor, name, None)))


# x.add_(y), x += y, x[i] = y: the tensor written into keeps its dtype, so it decides.
IN_PLACE = every(lambda name: name.endswith("_") and not name.endswith("__")) | _existing(
    (
        "__iadd__",
        "__isub__",
        "__imul__",
        "__idiv__",
        "__itruediv__",
        "__ifloordiv__",
        "__imod__",
        "__ipow__",
        "__setitem__",
    )
) - _existing(("requires_grad_", "share_memory_"))

# These convert or describe a tensor; casting their input first would change the answer or waste a copy.
LEFT_ALONE = _existing(
    [
        "to",
        "float",
        "half",
        "bfloat16",
        "double",
        "int",
        "long",
        "short",
        "char",
        "byte",
        "bool",
        "cpu",
        "cuda",
        "type",
        "type_as",
        "detach",
        "requires_grad_",
        "share_memory_",
        "size",
        "dim",
        "ndimension",
        "stride",
        "numel",
        "nelement",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "is_pinned",
        "is_shared",
        "is_signed",
        "is_inference",
        "is_set_to",
        "storage_offset",
        "element_size",
        "get_device",
        "data_ptr",
        "storage",
        "untyped_storage",
        "item",
        "tolist",
        "numpy",
        "backward",
        "register_hook",
        "retain_grad",
        "register_post_accumulate_grad_hook",
        "clone",
        "contiguous",
        "__len__",
        "__repr__",
        "__format__",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "__contains__",
        "__hash__",
        "__array__",
        "__deepcopy__",
        "__reduce_ex__",
        "__iter__",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_tensor",
        "new",
    ]
) | {torch.clone, torch.detach, torch.is_floating_point, torch.is_complex, torch.numel, torch.autograd.grad}

CONVOLUTIONS = spellings("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
PRODUCT_WITH_BIAS = CONVOLUTIONS | spellings("linear")  # signature (input, weight, bias=None, ...)
SUM_WITH_PRODUCT = spellings("addmm", "addmv", "addbmm", "baddbmm")  # beta * input + alpha * product
RECURRENT = frozenset(
    getattr(torch, name)
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
)
ATTENTION = spellings("scaled_dot_product_attention")
