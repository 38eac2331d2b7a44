"""Casting on what others wrote: PyTorch's operator and module databases, torchvision's and transformers' tiny networks.

    python tests/tools/compat.py --share 0.05 --minutes 10       # a share of the cases
    python tests/tools/compat.py --only modules
    python tests/tools/compat.py --only autocast                 # two minutes

Every case runs forwards and backwards in float32 and under every treatment (levels, presets, emulated formats). It is
within bounds when it is as near to float32 as the format allows: sixteen times what rounding the inputs alone does,
plus sixteen units of the format's last place, where the true value is in the format's range; or sixteen times as far
as torch is on a network and inputs that are 16-bit themselves ("as torch in 16 bits"). It is "beyond the format" where
a ledger counts values of the forward pass that an emulated format turns into infinity or NaN, infinities included
where the format has none. An error is torch's own ("torch has no kernel") if torch raises the very same one on 16
bits, or says that a kernel is not implemented for the dtype; "banned" is what the original of a preset refuses. A
copy, a pickle, a checkpoint and a removal have to give the same bits; compiling, tried in one case of twenty, the same
but for float32's own roundings, which torch changes without casts too.

"autocast" asks for every sample of PyTorch's operator database whether preset torch_autocast gives the dtypes that
CUDA autocast gives for fake tensors (`autocast_oracle`).

Needs `pip install "mpkit[compat]"`; the counts go to data/benchmarks/compat.json.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import logging
import math
import pickle
import re
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import autocast_oracle
import torch
from autocast_oracle import Apply
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from mpkit.casting import LEVELS, PRESETS, Ledger, auto_mixed_precision, cast_like, ledger, remove_mixed_precision
from mpkit.formats import BF16, E4M3FN, E5M2
from mpkit.rounding import round_to

STORED = Path(__file__).parents[2] / "data" / "benchmarks" / "compat.json"
FUSED = 2.0**-18  # times 16: what another order of float32 operations may change, far below a cast left out
SAMPLES = 3  # inputs of each operator or module that are tried
TREATMENTS: dict[str, tuple[str, Any]] = {
    **{f"{level} bfloat16": (level, torch.bfloat16) for level in LEVELS},
    **{f"{preset} bfloat16": (preset, torch.bfloat16) for preset in PRESETS},
    **{f"O2 {fmt.name}": ("O2", fmt) for fmt in (BF16, E5M2, E4M3FN)},
}


@dataclass(frozen=True)
class Case:
    """One network and its arguments, made anew at each call."""

    name: str
    make: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]
    portable: bool = True  # whether it can be pickled and copied at all


def operators() -> Iterator[Case]:
    """Every operator of PyTorch's database that has gradients in float32."""
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if not op.supports_dtype(torch.float32, "cpu") or not op.supports_autograd:
            continue

        def make(i: int, op: Any = op) -> Any:
            torch.manual_seed(0)
            sample = next(s for n, s in enumerate(op.sample_inputs("cpu", torch.float32, requires_grad=True)) if n == i)
            return Apply(op.op), (sample.input, *sample.args), sample.kwargs

        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        for i in range(SAMPLES):
            yield Case(f"{name}[{i}]", lambda i=i, make=make: make(i), portable=False)


def modules() -> Iterator[Case]:
    """Every module of PyTorch's database."""
    from torch.testing._internal.common_modules import module_db

    for info in module_db:

        def make(i: int, info: Any = info) -> Any:
            torch.manual_seed(0)
            given = info.module_inputs_func(info, "cpu", torch.float32, requires_grad=True, training=True)
            sample = given[i]
            network = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
            return network, sample.forward_input.args, sample.forward_input.kwargs

        for i in range(SAMPLES):
            yield Case(f"{info.name}[{i}]", lambda i=i, make=make: make(i))


def vision() -> Iterator[Case]:
    """torchvision's classification networks without weights."""
    declare_operators()
    import torchvision.models as zoo

    for name in ("resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1", "mnasnet0_5", "densenet121"):

        def make(name: str = name) -> Any:
            torch.manual_seed(0)
            return zoo.get_model(name, num_classes=4).eval(), (torch.rand(2, 3, 64, 64),), {}

        yield Case(name, make)


_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def declare_operators() -> None:
    """Where torchvision was built for another torch its operators are missing, without which it does not load.

    No network here needs one.
    """
    found = find_spec("torchvision")
    for folder in (found and found.submodule_search_locations) or ():
        for library in Path(folder).glob("_C*.so"):
            with contextlib.suppress(OSError):
                torch.ops.load_library(str(library))
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            _LIBRARY.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def language() -> Iterator[Case]:
    """transformers' networks, tiny and random."""
    declare_operators()  # transformers loads torchvision where it finds it
    import transformers as hf

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    small |= {"vocab_size": 64, "max_position_embeddings": 32}
    gpt = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    kinds = {
        "BertModel": (hf.BertConfig, small),
        "GPT2LMHeadModel": (hf.GPT2Config, gpt),
        "LlamaForCausalLM": (hf.LlamaConfig, small | {"num_key_value_heads": 2}),
        "MistralForCausalLM": (hf.MistralConfig, small | {"num_key_value_heads": 1}),
        "T5ForConditionalGeneration": (
            hf.T5Config,
            {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
            | {"decoder_start_token_id": 0, "pad_token_id": 0},
        ),
    }
    for name, (config, sizes) in kinds.items():

        def make(name: str = name, config: Any = config, sizes: Any = sizes) -> Any:
            torch.manual_seed(0)
            ids = torch.arange(12).reshape(2, 6)
            given = {"input_ids": ids} | ({} if name.endswith("Model") else {"labels": ids})
            return getattr(hf, name)(config(**sizes)).eval(), (), given

        yield Case(name, make)


SOURCES = {"modules": modules, "operators": operators, "vision": vision, "language": language}


# --- one case -----------------------------------------------------------------------------------------------------


def put(network: nn.Module, treatment: str) -> nn.Module:
    """The network under a treatment."""
    name, dtype = TREATMENTS[treatment]
    return auto_mixed_precision(network, name, dtype) if name in LEVELS else cast_like(network, name, dtype)


def trained(network: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
    """Float results, then the gradients of parameters and arguments."""
    leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    wanted = [*(p for p in network.parameters() if p.requires_grad), *leaves]
    torch.manual_seed(1)
    out = [x for x in tree_leaves(network(*args, **kwargs)) if isinstance(x, Tensor) and x.is_floating_point()]
    ends = [x.to_dense().float().sum() for x in out if x.requires_grad]
    grads = torch.autograd.grad(sum(ends), wanted, materialize_grads=True) if ends and wanted else ()  # type: ignore[arg-type]
    return [x.detach().to_dense().float() for x in (*out, *grads)]


def _rounded(value: Any, to: Any) -> Any:
    def low(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype is not torch.float32 or x.layout is not torch.strided:
            return x
        with torch.no_grad():
            y = x.to(torch.bfloat16).float() if isinstance(to, torch.dtype) else round_to(x.detach(), to)
        return y.requires_grad_(x.requires_grad)

    return tree_map(low, value)


def within(got: list[Tensor], want: list[Tensor], nearby: list[Tensor], eps: float, largest: float = math.inf) -> bool:
    """Whether every result is as near to float32 as the format allows, value by value at the scale of its tensor.

    Values beyond `largest`, the end of the format's range, are not asked for, nor what rounded inputs bring there.
    """
    if [x.shape for x in got] != [x.shape for x in want]:
        return False
    for a, b, near in zip(got, want, nearby):
        known = b.isfinite() & near.isfinite() & (torch.maximum(b.abs(), near.abs()) < min(1e4, largest))
        if not bool(known.any()):
            continue
        scale = float(b[known].abs().max())
        moved = float((near - b)[known].abs().max())
        if not bool(((a - b)[known].abs() <= 16 * moved + 16 * eps * scale + eps).all()):
            return False
    return True


EXPLAINED = {  # what is outside or fails where nothing is wrong: how its name begins, the outcome, and why
    ("operators | as_strided.partial_views[2] | O2", "RuntimeError"): (
        "a rounded copy has a memory of its own, in which the view asked for does not lie"
    ),
    ("operators | linalg.pinv.singular", "outside"): (
        "products of low rank, rounded, are of full rank, and their inverse is huge"
    ),
    ("operators | nn.functional.normalize[2] | O2", "outside"): (
        "a gradient of 0 is the difference of two equal terms, each rounded"
    ),
    ("language | T5ForConditionalGeneration | torch_autocast", "not the same after compile"): (
        "the compiler takes a CrossEntropyLoss that is made in a forward past every mode"
    ),
}
FINE = ("within", "as torch in 16 bits", "beyond the format", "torch has no kernel", "banned", "not a case")
BANS = ("torch_autocast", "apex_O1")  # whose originals refuse binary_cross_entropy in 16 bits
_NO_KERNEL = re.compile(r"\"\w+\" not implemented for '(BFloat16|Half)'")


def outcome(case: Case, treatment: str) -> str:
    """One of FINE, "outside", "not the same after ...", or the kind of an error."""
    try:
        want = trained(*case.make())
        again = trained(*case.make())
    except Exception:
        return "not a case"  # torch itself cannot run it, or the database has no such sample
    if not _same(want, again):
        return "not a case"  # draws at random, whatever the seed
    dtype = TREATMENTS[treatment][1]
    native = isinstance(dtype, torch.dtype)
    eps, largest = (2.0**-8, math.inf) if native else (dtype.eps, dtype.max)
    try:
        network, args, kwargs = case.make()
        got = trained(put(network, treatment), args, kwargs)
        if case.portable and (changed := _changed(case, treatment, got, want)):
            return f"not the same after {changed}"
    except Exception as error:
        if str(error).startswith("binary_cross_entropy is unsafe") and treatment.startswith(BANS):
            return "banned"
        known = _NO_KERNEL.fullmatch(_words(error)[1]) or (native and _words(error) == _words(_in_16_bits(case, dtype)))
        return "torch has no kernel" if known else type(error).__name__
    try:
        plain, args, kwargs = case.make()
        with torch.no_grad():
            for p in plain.parameters():
                p.copy_(_rounded(p.detach(), dtype))
        nearby = trained(plain, *_rounded((args, kwargs), dtype))
    except Exception:
        return "not a case"
    if within(got, want, nearby, eps, largest):
        return "within"
    if not native and _leaves_the_range(case, treatment):
        return "beyond the format"
    same = dtype if native else dtype.torch_dtype
    torchs = _in_16_bits(case, same) if same in (torch.float16, torch.bfloat16) else None
    return "as torch in 16 bits" if isinstance(torchs, list) and within(got, want, torchs, eps) else "outside"


def _leaves_the_range(case: Case, treatment: str) -> bool:
    """Whether a finite value of the forward pass overflows, also by a division by what was flushed to zero, or it needs
    infinities that the format has not."""

    def watched(network: nn.Module, args: Any, kwargs: Any, **options: bool) -> Ledger:
        with ledger(network, **options) as book, torch.no_grad():
            network(*args, **kwargs)
        return book

    network, args, kwargs = case.make()
    book = watched(put(network, treatment), args, kwargs, count=True)
    if any((row.overflowed or 0) > 0 for row in (*book.rows, *book.casts)):
        return True
    if any((row.flushed or 0) > 0 for row in book.rows):
        network, args, kwargs = case.make()
        if not all(bool(x.isfinite().all()) for x in watched(put(network, treatment), args, kwargs, keep=True).results):
            return True
    infinite = any(bool(result.isinf().any()) for result in watched(*case.make(), keep=True).results)
    return infinite and not TREATMENTS[treatment][1].has_inf


def _in_16_bits(case: Case, dtype: torch.dtype) -> list[Tensor] | Exception:
    """What torch gives for a network and arguments that are in `dtype` themselves, or what it raises."""

    def low(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x.detach().to(dtype).requires_grad_(x.requires_grad)

    try:
        network, args, kwargs = case.make()
        return trained(network.to(dtype), *tree_map(low, (args, kwargs)))
    except Exception as error:
        return error


def _words(error: Any) -> tuple[type, str]:
    """Its kind and torch's first line, without the way out that casting adds."""
    return type(error), re.split("\n|; to_float", str(error))[0]


def _changed(case: Case, treatment: str, got: list[Tensor], want: list[Tensor]) -> str:
    """What changes the numbers of a cast network though it should not; "" if nothing does."""
    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda network: pickle.loads(pickle.dumps(network)),
        "checkpoint": lambda network: _Checkpointed(network),
    }
    if chosen(f"compile {case.name} {treatment}", 0.05):
        torch._dynamo.reset()
        ways["compile"] = lambda network: torch.compile(network, backend="aot_eager")  # type: ignore[assignment,return-value]
    for name, way in ways.items():
        network, args, kwargs = case.make()
        again = trained(way(put(network, treatment)), args, kwargs)
        if not (within(again, got, got, FUSED) if name == "compile" else _same(again, got)):
            return name
    network, args, kwargs = case.make()
    return "" if _same(trained(remove_mixed_precision(put(network, treatment)), args, kwargs), want) else "removal"


class _Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(a, b))


# --- all of them --------------------------------------------------------------------------------------------------


def chosen(name: str, share: float) -> bool:
    """Whether a run is in a share of all: the same ones each time, and a larger share holds a smaller one."""
    return zlib.crc32(name.encode()) / 2**32 < share


def versions() -> dict[str, str]:
    """Of what the cases come from."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("torch", "torchvision", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def summary(runs: dict[str, str]) -> dict[str, Any]:
    """Counts of outcomes by source and by treatment, and the names of what is neither within nor torch's own."""
    by: dict[str, dict[str, Counter[str]]] = {"source": {}, "treatment": {}}
    for name, result in runs.items():
        source, _, treatment = name.split(" | ")
        by["source"].setdefault(source, Counter())[result] += 1
        by["treatment"].setdefault(treatment, Counter())[result] += 1
    left = {name: result for name, result in runs.items() if result not in FINE}
    explained: dict[str, list[str]] = {why: [] for why in EXPLAINED.values()}
    to_look_at = []
    for name, result in sorted(left.items()):
        whys = [why for (begin, outcome), why in EXPLAINED.items() if name.startswith(begin) and result == outcome]
        (explained[whys[0]] if whys else to_look_at).append(f"{name}: {result}")
    return {
        "counts": {kind: {key: dict(sorted(c.items())) for key, c in sorted(d.items())} for kind, d in by.items()},
        "explained": explained,
        "to_look_at": to_look_at,
    }


def run(share: float, minutes: float, only: str | None) -> dict[str, Any]:
    """Run a share of the cases, at most so long: counts of outcomes, and the names of those with no reason."""
    runs: dict[str, str] = {}
    end = time.monotonic() + 60 * minutes
    for source in SOURCES if only is None else (only,):
        for case in SOURCES[source]():
            for treatment in TREATMENTS:
                name = f"{source} | {case.name} | {treatment}"
                if chosen(name, share) and time.monotonic() < end:
                    runs[name] = outcome(case, treatment)
    return {"versions": versions(), "share": share, **summary(runs)}


def run_autocast(share: float) -> dict[str, Any]:
    """Preset torch_autocast beside CUDA autocast on a share of PyTorch's operators."""
    found = autocast_oracle.of_the_database(lambda name: chosen(f"autocast {name}", share))
    return {"autocast": {"torch": torch.__version__, "share": share, **found}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="share of all cases (0 to 1)")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this long")
    parser.add_argument("--only", choices=(*SOURCES, "autocast"))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # tells of every error it meets
    torch.set_num_threads(1)
    found = json.loads(STORED.read_text())
    if given.only != "autocast":
        found |= run(given.share, given.minutes, given.only)
    if given.only in (None, "autocast"):
        found |= run_autocast(given.share)
    STORED.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
