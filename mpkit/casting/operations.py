"""Which torch functions form one operator, however they are spelled.

A framework's list names operators (MatMul, ReLU); torch spells each in several ways: `torch.matmul`, `x.matmul(w)`,
`x @ w`, `F.relu`. Here an operator is a name, and `spellings` finds every torch function behind it.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Collection, Iterable
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


def _named(match: Callable[[str], bool]) -> frozenset[Function]:
    """Every torch function on tensors whose name satisfies `match`."""
    found = (getattr(home, name) for home in _HOMES for name in dir(home) if match(name))
    return frozenset(function for function in found if callable(function))


def _methods(names: Iterable[str]) -> frozenset[Function]:
    return frozenset(getattr(Tensor, name) for name in names if callable(getattr(Tensor, name, None)))


# These change what a tensor is seen as, no value in it.
SEEN_AS = _methods(
    words("squeeze_ unsqueeze_ transpose_ t_ swapaxes_ swapdims_ as_strided_ resize_ resize_as_ set_ detach_")
)

# x.add_(y), x += y, x[i] = y: the tensor written into keeps its dtype, so it decides.
IN_PLACE = _named(lambda name: name.endswith("_") and not name.startswith("_")) | _methods(
    ("__setitem__", *(f"__i{name}__" for name in words("add sub mul div truediv floordiv mod pow")))
)
IN_PLACE = frozenset(  # by name, since torch.detach_ is not Tensor.detach_
    f for f in IN_PLACE if f.__name__ not in ("requires_grad_", "share_memory_", *(g.__name__ for g in SEEN_AS))
)

# these write into lists of tensors, several of them at a time, and want them as they are
WRITE_INTO_LISTS = frozenset(
    f
    for name, f in vars(torch).items()
    if name.startswith(("_foreach_", "_fused_", "_amp_")) and name.endswith("_") and callable(f)
)
# signature (input, and the scales and statistics of a quantisation): some write into these, all want float32
FAKE_QUANTIZED = frozenset(
    getattr(torch, name)
    for name in words(
        """fake_quantize_per_tensor_affine fake_quantize_per_channel_affine fused_moving_avg_obs_fake_quant
        _fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_channel_affine"""
    )
)

# torch refuses a number here that the dtype of the tensor cannot hold
FILL_WITH_NUMBERS = spellings(
    *words("masked_fill masked_fill_ index_fill index_fill_ fill_ full_like new_full clamp clamp_ clip pad scatter")
)
SCALED_BY_A_NUMBER = spellings("sub")

# torch's own 16-bit results are wrong without an error: on a processor the exponential of 0.1 times a unit matrix is
# infinite (torch 2.13)
WRONG_IN_16_BITS = spellings("matrix_exp")

# numbers of things: exact as float32, while a 16-bit count beyond 2^8 or 2^11 may be another number
COUNTS = spellings("histc", "bincount")
MAY_COUNT = spellings("sum", "cumsum", "prod", "cumprod", "nansum")  # if told to give integers

REFLECTED = {f"__i{name}__": name for name in words("add sub mul div pow")} | {"__itruediv__": "div"}
# x.tanh_() -> torch.tanh: what an in-place operation computes before it writes
OUT_OF_PLACE: dict[str, Function] = {
    name: new
    for function in IN_PLACE
    if (name := function.__name__) and (base := REFLECTED.get(name, name.rstrip("_"))) not in ("fill", "zero")
    if callable(new := getattr(Tensor, base, None) or getattr(F, base, None))
}

# torch allows these on an expanded tensor, beside filling it: they choose what to write and save nothing for gradients
WRITE_EXPANDED = frozenset(words("masked_fill_ index_fill_ index_put_ tril_ triu_"))

# These convert or describe a tensor; casting their input first would change the answer or waste a copy.
LEFT_ALONE = _methods(
    words(
        """to float half bfloat16 double int long short char byte bool cpu cuda type type_as detach requires_grad_
    share_memory_ size dim ndimension stride numel nelement is_floating_point is_complex is_contiguous is_pinned
    is_shared is_signed is_inference is_set_to storage_offset element_size get_device data_ptr storage
    untyped_storage item tolist numpy backward register_hook retain_grad register_post_accumulate_grad_hook
    clone contiguous __len__ __repr__ __format__ __bool__ __float__ __int__ __index__ __contains__ __hash__
    __array__ __deepcopy__ __reduce_ex__ __iter__ new_empty new_zeros new_ones new_full new_tensor new"""
    )
) | {torch.clone, torch.detach, torch.is_floating_point, torch.is_complex, torch.numel, torch.autograd.grad}
LEFT_ALONE |= SEEN_AS
LEFT_ALONE |= frozenset(function for function in vars(torch.nn.init).values() if callable(function))
_DATA: Any = Tensor.data
# afterwards the tensor holds other memory, of which nothing is known
GIVE_NEW_MEMORY = frozenset((Tensor.set_, Tensor.resize_, Tensor.resize_as_, _DATA.__set__))
DATA_OF = _DATA.__get__
# whoever calls one of these holds the memory of a tensor, and writes into it where nothing counts that
SHOWS_MEMORY = words("numpy __array__ __dlpack__ untyped_storage storage data_ptr")
TO_NUMPY = words("numpy __array__")
_GRAD: Any = Tensor.grad
LEFT_ALONE |= {_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__}  # these names stand for every attribute of a tensor

CONVERSIONS = _methods(words("to float half bfloat16 double type type_as"))

# The same memory seen otherwise: a write into the result is a write into the tensor. `.data` and `.T` are called by
# their getters, and all getters have one name.
VIEWED_AS = frozenset(getattr(Tensor, name).__get__ for name in words("T mT H mH real data")) | spellings("detach")
# torch's own promise is that nobody writes into these; whoever does is not counted where the whole is, as with `.data`
COUNTED_APART = frozenset((DATA_OF, *spellings("unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes")))
VIEWS = spellings(
    *words(
        """adjoint as_strided atleast_1d atleast_2d atleast_3d broadcast_to broadcast_tensors detach diagonal dsplit
    expand expand_as hsplit meshgrid moveaxis movedim narrow permute positive ravel select split
    split_with_sizes squeeze swapaxes swapdims t tensor_split transpose unbind unflatten unfold unsafe_chunk
    unsafe_split unsqueeze view view_as vsplit unsafe_split_with_sizes"""
    )
) | {torch.ops.aten.alias}

# What these give may be a view of what they are given.
MAY_VIEW = (
    VIEWS
    | spellings(
        *words(
            """view reshape flatten unflatten permute transpose t squeeze unsqueeze expand expand_as movedim swapaxes
    narrow select chunk split tensor_split unbind unfold"""
        )
    )
    | _methods(("__getitem__", "view_as", "reshape_as"))
)

# These only move values or choose among them: what comes out of a format stays in it.
EXACT = (
    MAY_VIEW
    | spellings(
        *words(
            """roll flip repeat repeat_interleave tile gather index_select take_along_dim relu abs neg max_pool1d
    max_pool2d max_pool3d adaptive_max_pool2d maximum minimum amax amin zeros_like ones_like tril triu stack"""
        )
    )
    | _methods(("__neg__", "__abs__"))
)

EXACT_NAMES = frozenset(function.__name__ for function in EXACT)

CONVOLUTIONS = spellings("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
LINEAR = spellings("linear")
PRODUCT_WITH_BIAS = CONVOLUTIONS | LINEAR  # signature (input, weight, bias=None, ...)
SUM_WITH_PRODUCT = spellings("addmm", "addmv", "baddbmm")  # beta * input + alpha * (a @ b)
RECURRENT = frozenset(
    getattr(torch, name)
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
)
WITH_STATISTICS = spellings("batch_norm", "instance_norm")  # write running statistics in place
LAYER_NORM = spellings("layer_norm")


def opened(function: FunctionType) -> Function:
    """A torch function written in Python, without the check that hands it over as a whole."""

    def never(*_: object) -> bool:
        return False

    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = function.__globals__ | dict.fromkeys(checks, never)
    inner = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    inner.__kwdefaults__ = function.__kwdefaults__
    return inner


def _has_a_kernel(function: FunctionType) -> bool:
    """Whether it hands its work over to a function of its own name, such as `torch._C._nn.huber_loss`."""
    loads = (step.argval for step in dis.get_instructions(function) if step.opname in ("LOAD_ATTR", "LOAD_METHOD"))
    return function.__name__ in loads


def composed_of(listed: Collection[str]) -> dict[Function, Function]:
    """The functions of torch that Python makes of listed operators, and what to run to see these one by one."""
    in_python = [f for f in vars(F).values() if isinstance(f, FunctionType) and f.__name__ not in listed]
    return {
        f: opened(f)
        for f in in_python
        if "handle_torch_function" in f.__code__.co_names
        and not set(listed).isdisjoint(f.__code__.co_names)
        and not _has_a_kernel(f)
    }


# looked into at every level
COMPOSED: dict[Function, Function] = {
    function: opened(function)
    for name in words("multi_head_attention_forward normalize softmin gumbel_softmax linear_cross_entropy")
    if (function := getattr(F, name, None))  # torch 2.11 has not the last one
}
