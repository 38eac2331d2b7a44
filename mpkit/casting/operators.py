"""Which torch functions form one operator, however they are spelled, and what kinds of operators there are.

A framework's list names operators (MatMul, ReLU); torch spells each in several ways: `torch.matmul`, `x.matmul(w)`,
`x @ w`, `F.relu`. Here an operator is a name, and `spellings` finds every torch function behind it. A rule knows a
function by its `__name__`, which is the same in all homes, so the kinds below are sets of such names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import get_overridable_functions

Function = Callable[..., Any]


def words(names: str) -> tuple[str, ...]:
    """Names written with blanks between them, as a tuple."""
    return tuple(names.split())


_HOMES: tuple[Any, ...] = (torch, Tensor, F, torch.linalg, torch.special)
_ALIASES = {
    "matmul": ("__matmul__", "__rmatmul__"),
    "pow": ("__pow__", "__rpow__", "float_power"),
    "outer": ("ger",),
    "dot": ("vdot",),
    "sigmoid": ("expit",),
    "lgamma": ("gammaln",),
    "mvlgamma": ("multigammaln",),
    "digamma": ("psi",),
    "acos": ("arccos",),
    "asin": ("arcsin",),
    "atan2": ("arctan2",),
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

    >>> spellings("relu") == {torch.relu, torch.Tensor.relu, torch.nn.functional.relu}
    True
    """
    found: set[Function] = set()
    for operator in operators:
        names = (operator, *_ALIASES.get(operator, ()))
        here = {getattr(home, name) for home in _HOMES for name in names if callable(getattr(home, name, None))}
        if not here:
            raise ValueError(f"torch has no function named {operator!r}; give a name of torch or torch.nn.functional")
        found |= here
    return frozenset(found)


def names_of(*operators: str) -> frozenset[str]:
    """The `__name__` of every spelling of `operators`."""
    return frozenset(function.__name__ for function in spellings(*operators))


def canonical(operator: str) -> Function:
    """The torch function that stands for an operator: F's if it has one, else torch's, else the method."""
    return next(getattr(home, operator) for home in (F, torch, Tensor) if callable(getattr(home, operator, None)))


def operator_of(function: object) -> str | None:
    """The operator that a torch function spells, None if it is no operator on tensors.

    >>> operator_of(torch.Tensor.__matmul__), operator_of(torch.ger), operator_of(print)
    ('matmul', 'outer', None)
    """
    name = getattr(function, "__name__", "")
    if not callable(function) or isinstance(function, type):
        return None
    if function not in _on_tensors() and function is not getattr(F, name, None):  # F.tanh only calls x.tanh()
        return None
    name = name.removeprefix("special_").removeprefix("linalg_")
    operator = next((key for key, aliases in _ALIASES.items() if name in aliases), name)
    known = any(callable(getattr(home, operator, None)) for home in _HOMES)
    return operator if known and function in spellings(operator) else None


@cache
def _on_tensors() -> frozenset[Function]:
    """Every torch function that a mode sees, which leaves out `torch.manual_seed` and the like."""
    return frozenset(function for functions in get_overridable_functions().values() for function in functions)


# --- kinds of functions, by name --------------------------------------------------------------------------------------

# x.add_(y), x += y, x[i] = y: the tensor written into keeps its dtype, so it decides
IN_PLACE = frozenset(name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_")) | {
    "__setitem__",
    *(f"__i{name}__" for name in words("add sub mul div truediv floordiv mod pow")),
}
CONVERSIONS = frozenset(words("to float half bfloat16 double type type_as"))
# these convert, describe, copy or make a tensor: a cast before would change the answer or waste a copy
LEFT_ALONE = CONVERSIONS | frozenset(
    words(
        """int long short char byte bool cpu cuda detach requires_grad_ share_memory_ size dim ndimension stride numel
        nelement is_floating_point is_complex is_contiguous is_pinned is_shared is_signed is_inference is_set_to
        storage_offset element_size get_device data_ptr storage untyped_storage item tolist numpy register_hook
        retain_grad register_post_accumulate_grad_hook clone contiguous __len__ __repr__ __format__ __bool__ __float__
        __int__ __index__ __contains__ __hash__ __array__ __deepcopy__ __reduce_ex__ __iter__ new_empty new_zeros
        new_ones new_full new_tensor new __get__ __set__ __delete__"""
    )
)
LEFT_ALONE |= {name for name, function in vars(torch.nn.init).items() if callable(function)}
# what these give may be a view of what they are given, so that a write into it must arrive there
MAY_VIEW = names_of(
    *words(
        """view view_as reshape reshape_as flatten unflatten permute transpose t squeeze unsqueeze expand expand_as
        movedim moveaxis swapaxes narrow select chunk split tensor_split unbind unfold diagonal adjoint ravel"""
    )
) | {"__getitem__"}
# these only move values or choose among them: what comes out of a format stays in it
EXACT = MAY_VIEW | names_of(
    *words(
        """roll flip repeat repeat_interleave tile gather index_select take_along_dim relu abs neg max_pool1d max_pool2d
        max_pool3d adaptive_max_pool2d maximum minimum amax amin zeros_like ones_like tril triu stack"""
    )
)
# whoever holds the memory of a parameter writes into it where nothing counts that
SHOWS_MEMORY = frozenset(words("numpy __array__ __dlpack__ untyped_storage storage data_ptr"))
FILLS_WITH_NUMBERS = names_of(
    *words("masked_fill masked_fill_ index_fill index_fill_ fill_ full_like new_full clamp clamp_ clip pad scatter sub")
)
CONVOLUTIONS = frozenset(words("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"))
PRODUCT_WITH_BIAS = CONVOLUTIONS | {"linear"}  # signature (input, weight, bias=None, ...)
SUM_WITH_PRODUCT = frozenset(words("addmm addmv baddbmm"))  # beta * input + alpha * (a @ b)
RECURRENT = frozenset(words("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"))
WITH_STATISTICS = frozenset(words("batch_norm instance_norm"))  # write running statistics in place
ATTENTION = "scaled_dot_product_attention"
# torch runs these as one, though a product that a list may name is in them
MADE_OF_PRODUCTS = names_of("einsum", "tensordot", "multi_dot") | {ATTENTION}
# torch has these for inputs of one dtype only
OF_ONE_DTYPE = MADE_OF_PRODUCTS | names_of(
    *words(
        """matmul mm bmm mv addmm addmv baddbmm addbmm addr outer dot vdot vecdot inner bilinear lerp cdist prelu
        grid_sample solve lstsq polar complex heaviside isclose allclose binary_cross_entropy ctc_loss conv_tbc"""
    )
)
# written into a tensor of another dtype, what is written takes that
WRITTEN_BESIDE = frozenset(
    words(
        """scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ index_add index_add_ index_copy
        index_copy_ index_put index_put_ index_reduce index_reduce_ masked_scatter masked_scatter_ put put_ lerp_ """
    )
)

# their class weights take the dtype of the scores, which a network may have made float32 on purpose
WEIGHTED_LOSSES = frozenset(words("cross_entropy nll_loss multi_margin_loss"))


def opened(function: FunctionType) -> Function:
    """A torch function written in Python, without the check that hands it over as a whole."""

    def never(*_: object) -> bool:
        return False

    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = function.__globals__ | dict.fromkeys(checks, never)
    inner = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    inner.__kwdefaults__ = function.__kwdefaults__
    return inner


def _composed(names: str) -> dict[str, Function]:
    # torch 2.11 has not all of them
    return {name: opened(getattr(F, name)) for name in words(names) if hasattr(F, name)}


# functions that Python makes of others; at every level these are looked into
COMPOSED = _composed("multi_head_attention_forward normalize softmin gumbel_softmax linear_cross_entropy")
# and these where the operations that they are made of are listed
COMPOSED_OF_LISTED = _composed(
    """local_response_norm lp_pool1d lp_pool2d lp_pool3d gaussian_nll_loss multilabel_soft_margin_loss
    triplet_margin_with_distance_loss"""
)
