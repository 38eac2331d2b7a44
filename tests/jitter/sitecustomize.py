"""A stand-in for other processors: the last bit of every matrix product and convolution is moved.

    PYTHONPATH=tests/jitter MPKIT_JITTER=3 python -m pytest notebooks

Python runs this file at its start, before anything else, in that process, in the kernels of its notebooks and in every
process that they start. When torch is imported, the CPU kernels of products and convolutions, forwards and backwards,
are replaced for all threads: each number of a result is multiplied by 1 + eps or 1 - eps of its dtype. That moves it
by one or two units in its last place and leaves zero, inf and NaN as they are. The pattern depends on the seed
`MPKIT_JITTER` and on the shape, so the same product twice gives the same bits, as on any one machine, and no two
machines (seeds) agree. Without the variable nothing happens.

A 16-bit result is a float32 sum, rounded: the last bits of that sum decide only near a tie, so one number in 64 moves.
This departs from a real machine in one way: there a product of small integers is exact. A stored number that needs such
a product to be exact is not one that this project stores.
"""

import os
import sys
from importlib.machinery import PathFinder

PRODUCTS = (
    *("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot"),
    *("mm.out", "addmm.out", "bmm.out", "baddbmm.out", "addmv.out"),  # what compiled code calls
    *("addmm_", "baddbmm_", "addmv_"),
    *("convolution", "convolution_backward"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"),
)


def install(seed: int, times: float = 1.0) -> None:
    """Replace the CPU kernels of `PRODUCTS` by themselves with moved last bits, `times` eps, until the process ends."""
    import warnings
    from functools import lru_cache

    import numpy as np
    import torch

    library = torch.library.Library("aten", "IMPL", "CPU")
    install.library = library  # the kernels live as long as this object

    @lru_cache(maxsize=512)
    def pattern(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        draw = np.random.default_rng([seed, len(shape), *shape])
        step = np.asarray(2 * draw.integers(0, 2, shape, dtype=np.int8) - 1)
        if dtype.itemsize == 2:
            step = np.asarray(np.where(draw.random(shape) < 1 / 64, step, 0))
        return 1 + times * torch.finfo(dtype).eps * torch.from_numpy(step).to(dtype)

    def move_(result: object) -> None:
        """Move the last bits of a tensor, or of each tensor of a tuple, in place."""
        if isinstance(result, (tuple, list)):
            for part in result:
                move_(part)
        elif isinstance(result, torch.Tensor) and result.is_floating_point():
            result.mul_(pattern(tuple(result.shape), result.dtype))

    def moved(name: str):
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        kernel = torch.library.get_kernel(op, "CPU")

        def call(keys, *args, **kwargs):
            with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
                result = kernel.call_boxed(keys, *args, **kwargs)
                move_(result)
            return result

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
