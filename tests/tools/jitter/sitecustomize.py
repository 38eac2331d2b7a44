"""A stand-in for other processors: the last bit of every matrix product and convolution is moved.

    PYTHONPATH=tests/tools/jitter MPKIT_JITTER=3 python -m pytest notebooks

Python runs this file at its start, before anything else, in that process, in the kernels of its notebooks and in every
process that they start. When torch is imported, the CPU kernels of products and convolutions, forwards and backwards,
are replaced for all threads: each number of a result is multiplied by 1 + eps or 1 - eps of its dtype. That moves it
by one or two units in its last place and leaves zero, inf and NaN as they are. The pattern depends on the seed
`MPKIT_JITTER` and on the shape, so the same product twice gives the same bits, as on any one machine, and no two
machines (seeds) agree. Without the variable nothing happens.

A 16-bit result is a float32 sum, rounded, so it is computed as one here: its sum moves by `SUM` eps of float32, as
much as another order of adding 16 numbers can move it, and the rounding shows that only near a tie.
This departs from a real machine in one way: there a product of small integers is exact. A stored number that needs such
a product to be exact is not one that this project stores.
"""

import os
import sys
from importlib.machinery import PathFinder

FLASH = "_scaled_dot_product_flash_attention_for_cpu"
PRODUCTS = (
    *("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot"),
    *("mm.out", "addmm.out", "bmm.out", "baddbmm.out", "addmv.out"),  # what compiled code calls
    *("addmm_", "baddbmm_", "addmv_"),
    *("convolution", "convolution_backward"),
    *(FLASH, f"{FLASH}_backward"),
)
SUM = 8.0


def install(seed: int, times: float = 1.0) -> None:
    """Replace the CPU kernels of `PRODUCTS` by themselves with moved last bits, `times` eps, until the process ends."""
    import warnings
    from functools import lru_cache

    import numpy as np
    import torch

    library = torch.library.Library("aten", "IMPL", "CPU")
    install.library = library  # the kernels live as long as this object

    @lru_cache(maxsize=512)
    def pattern(shape: tuple[int, ...], dtype: torch.dtype, size: float) -> torch.Tensor:
        draw = np.random.default_rng([seed, len(shape), *shape])
        step = np.asarray(2 * draw.integers(0, 2, shape, dtype=np.int8) - 1)
        return 1 + size * times * torch.finfo(dtype).eps * torch.from_numpy(step).to(dtype)

    def moved_(result: object, size: float = 1.0) -> object:
        """A tensor with its last bits moved in place, or a tuple of such."""
        if isinstance(result, (tuple, list)):
            return type(result)(moved_(part, size) for part in result)
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            result.mul_(pattern(tuple(result.shape), result.dtype, size))
        return result

    def cast(value: object, old: torch.dtype, new: torch.dtype) -> object:
        if isinstance(value, (tuple, list)):
            return type(value)(cast(part, old, new) for part in value)
        return value.to(new) if isinstance(value, torch.Tensor) and value.dtype == old else value

    def half(name: str, args: tuple) -> torch.dtype | None:
        """The 16-bit dtype of a product, by its first tensor; None for a wider one, or if torch refuses the others."""
        first, *others = (a.dtype for a in args if isinstance(a, torch.Tensor))
        mixed = not name.startswith(FLASH) and any(other != first for other in others)  # its logarithms are float32
        return first if first in (torch.float16, torch.bfloat16) and not mixed else None

    def kernel_of(name: str):
        packet, _, overload = name.partition(".")
        return torch.library.get_kernel(getattr(getattr(torch.ops.aten, packet), overload or "default"), "CPU")

    kernels = {name: kernel_of(name) for name in PRODUCTS}

    def moved(name: str):
        plain = name.removesuffix(".out").removesuffix("_")  # what the forms that write into a tensor compute

        def call(keys, *args, **kwargs):
            with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
                low = half(name, args)
                if low is None:
                    return moved_(kernels[name].call_boxed(keys, *args, **kwargs))
                target = kwargs.pop("out", args[0] if name.endswith("_") else None)
                wide = {name: cast(value, low, torch.float32) for name, value in kwargs.items()}  # a mask, say
                sums = kernels[plain].call_boxed(keys, *cast(args, low, torch.float32), **wide)
                result = moved_(sums, SUM)
                if name == FLASH:  # the logarithms beside the result are float32 in any case
                    return cast(result[0], torch.float32, low), result[1]
                result = cast(result, torch.float32, low)
                return result if target is None else target.copy_(result)

        return call

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that a kernel is replaced
        for name in PRODUCTS:
            library.impl(name, moved(name), "CPU", with_keyset=True)


class AfterTorch(PathFinder):
    """Finds `torch` like Python itself, and calls `install` at the end of its import."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name == "torch" else None
        if spec is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                install(int(os.environ["MPKIT_JITTER"]))

            spec.loader.exec_module = exec_module
        return spec


if os.environ.get("MPKIT_JITTER"):
    sys.meta_path.insert(0, AfterTorch)
