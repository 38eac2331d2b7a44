"""One call of a torch function under a ledger: what went in after the casts, what came out, what was lost."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from mpkit.casting import operations as ops
from mpkit.casting.sparse import parts, values_of
from mpkit.casting.targets import Target, float_tensors, map_tensors, precision, promoted_precision

# by the names out of place: x.relu_() is relu, x += y is add
_KEEPS_OUTPUT = ops.words("relu sigmoid tanh softmax log_softmax exp expm1 sqrt rsqrt reciprocal tan")
_KEEPS_NOTHING = ops.words(
    """add sub neg cat concat stack mean sum view reshape flatten unflatten permute transpose t squeeze unsqueeze expand
    chunk split unbind narrow select to float half bfloat16 double contiguous clone zeros_like ones_like masked_fill
    getitem setitem radd rsub subtract negative copy fill zero dropout round floor ceil trunc fix frac sign tril triu eq
    ne lt le gt ge normal uniform bernoulli exponential random deg2rad rad2deg"""
)
_KEEPS_THE_OTHER = ops.words("mul multiply rmul div divide true_divide truediv")  # by a number: nothing


class Call:
    """Stands in for a torch function while a handler runs: sees the inputs after the casts."""

    def __init__(self, func: ops.Function, count: bool) -> None:
        self.func = func
        self.__name__ = getattr(func, "__name__", str(func))
        self.count = count
        self.computed: Target | None = None
        self.instead: Target | None = None  # what a handler computed in that does not compute so as a rule
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.flushed = self.overflowed = 0

    def __hash__(self) -> int:
        return hash(self.func)

    def __eq__(self, other: object) -> bool:
        return self.func == (other.func if isinstance(other, Call) else other)

    def __call__(self, *args: object, **kwargs: object) -> object:
        inputs = float_tensors((args, kwargs))
        reference = self._in_float64(args, kwargs) if self.count else None
        out = self.func(*args, **kwargs)
        self.inputs += inputs
        self.outputs += float_tensors(out)
        self.computed = _common(inputs)
        if reference is not None:
            for exact, got in zip(float_tensors(reference), float_tensors(out)):
                flushed, overflowed = lost_values(exact, got)
                self.flushed += flushed
                self.overflowed += overflowed
        return out

    def _in_float64(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """The result in float64; None where there is none to compare with, as for a function that draws at random."""
        if self.func in ops.IN_PLACE or _writes(self.func):
            return None
        # copies of float64 too, since a norm writes its running statistics
        widened = map_tensors(_float64_copy, (args, kwargs))
        later = {name: value for name, value in widened[1].items() if name != "out"}
        later |= {"inplace": False} if "inplace" in kwargs else {}
        devices = {x.device for x in float_tensors((args, kwargs)) if x.is_cuda}
        generators = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
        with torch.no_grad(), torch.random.fork_rng([*devices]):
            before = _random_state(devices, generators)
            try:
                out = self.func(*widened[0], **later)
            except (RuntimeError, TypeError, NotImplementedError, ValueError):  # no float64 kernel
                return None
            finally:
                after = _random_state(devices, generators)
                for generator, state in zip(generators, before):
                    generator.set_state(state)
        return out if all(torch.equal(a, b) for a, b in zip(before, after)) else None

    def kept(self) -> list[Tensor]:
        """What autograd keeps of this call."""
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in (*self.inputs, *self.outputs)):
            return []
        name = _out_of_place(self.__name__)
        if name in _KEEPS_NOTHING or (name in _KEEPS_THE_OTHER and len(self.inputs) < 2):
            return []
        if self.__name__ == "scaled_dot_product_attention":
            return [*self.inputs, *self.outputs]
        return self.outputs if name in _KEEPS_OUTPUT else self.inputs


def _out_of_place(name: str) -> str:
    """ "relu_" and "relu" -> "relu", "__iadd__" and "__add__" -> "add"."""
    return (name.removeprefix("__i") if name in ops.REFLECTED else name).strip("_")


def _float64_copy(x: Tensor) -> Tensor:
    return x.detach().to(torch.float64, copy=True) if x.is_floating_point() else x


def _writes(func: ops.Function) -> bool:
    """Whether an operator of `torch.ops`, which may write into any of its arguments, says that it writes."""
    while isinstance(func, Call):  # under several ledgers
        func = func.func
    overloads = [getattr(func, name) for name in func.overloads()] if isinstance(func, OpOverloadPacket) else [func]
    return any(isinstance(one, OpOverload) and one._schema.is_mutable for one in overloads)


def _random_state(devices: set[torch.device], generators: list[torch.Generator]) -> list[Tensor]:
    """The states of these generators, which are a caller's own, then of torch's for the processor and the devices."""
    own = [generator.get_state() for generator in generators]
    return [*own, torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _common(inputs: list[Tensor]) -> Target | None:
    """What an operation on these computes in by itself; None without a float input."""
    targets = list(dict.fromkeys(precision(x) for x in inputs))
    return promoted_precision(targets) if len(targets) > 1 else next(iter(targets), None)


def lost_values(wide: Tensor, narrow: Tensor) -> tuple[int, int]:
    """How many values became zero, and how many non-finite."""
    wide, narrow = values_of(wide), values_of(narrow)
    if wide.shape != narrow.shape:  # sparse ones that store other places
        return 0, 0
    flushed = (narrow == 0) & (wide != 0)
    overflowed = wide.isfinite() & ~narrow.isfinite()
    return int(flushed.sum()), int(overflowed.sum())


def storage(x: Tensor) -> int:
    """Which memory a tensor stands in; of a sparse one, that of its values."""
    try:
        return values_of(x).untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a tensor that stands for others
        return id(x)


def nbytes(x: Tensor) -> int:
    """Memory of a tensor of any layout (bytes)."""
    return sum(part.untyped_storage().nbytes() for part in parts(x))
