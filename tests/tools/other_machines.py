"""Stand-ins for other machines: every notebook on each of them, and the tests where that is asked.

    python tests/tools/other_machines.py --tests               # all variants, unit and contract tests too
    python tests/tools/other_machines.py --only seed --seeds 41 42   # what CI runs, with seeds that change by commit

A variant is a way in which machines differ: the last bits of matrix products (`tests/tools/jitter`), the instruction
sets that the libraries use, the number of threads, the versions of Python and of the packages. On each, pytest runs the
notebooks as anywhere, with nbval: a cell differs where its text is not what is stored.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "MPKIT_FORKED_KERNELS"  # where kernels of a test run that asks are
OLDEST_X86 = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
VERSIONS = {  # name: interpreter, packages beside the ranges of pyproject.toml
    "Python 3.11, torch 2.11": ("python3.11", ("torch==2.11.*",)),
    "Python 3.13, newest": ("python3.13", ()),
}
# tests that look at files, or start browsers, installations, clusters and notebooks of their own
ELSEWHERE = ("environment", "experiment_kills", "installed", "labs", "layers", "notebooks")


@dataclass(frozen=True)
class Variant:
    """A stand-in: environment variables, and the Python that runs it."""

    name: str
    variables: dict[str, str] = field(default_factory=dict)
    python: str = sys.executable


def variants(seeds: Sequence[int]) -> dict[str, list[Variant]]:
    """The variants by family."""
    return {
        "seed": [Variant(f"seed {seed}", {"MPKIT_JITTER": str(seed)}) for seed in seeds],
        "instructions": [
            Variant("as it is"),
            Variant("oldest kernels of torch", {"ATEN_CPU_CAPABILITY": "default"}),
            Variant("oldest kernels of MKL, oneDNN", {k: v for k, v in OLDEST_X86.items() if "ATEN" not in k}),
            Variant("oldest of all", OLDEST_X86),
            Variant("AVX2", AVX2),
        ],
        # idle threads that spin would take the cores from the other processes of this tool
        "threads": [Variant(f"{n} threads", {"OMP_NUM_THREADS": str(n), "OMP_WAIT_POLICY": "PASSIVE"}) for n in (2, 4)],
        "versions": [Variant(name, python=name) for name in VERSIONS],
    }


def python_of(name: str) -> str:
    """The interpreter of an environment of `VERSIONS`, made at its first use in `.venv-portable/`; others are paths."""
    if name not in VERSIONS:
        return name
    python, packages = VERSIONS[name]
    folder = ROOT / ".venv-portable" / name.replace(" ", "-").replace(",", "")
    own = folder / "bin" / "python"
    if not (folder / "complete").exists():
        known = [shutil.which(python), *map(str, Path.home().glob(f".pyenv/versions/{python[6:]}.*/bin/python"))]
        # pyenv puts a command on the path for versions that are not switched on, which fails
        found = [path for path in known if path and not subprocess.run([path, "-V"], capture_output=True).returncode]
        if not found:
            raise SystemExit(f"the variant {name!r} needs {python}, which this machine has not; use --only")
        subprocess.run([found[0], "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(own), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "-e", ".[test]", *packages], check=True, cwd=ROOT)
        (folder / "complete").touch()
    return str(own)


def differing(variant: Variant, jobs: int, paths: Sequence[str]) -> list[str]:
    """The cells and tests that fail on a variant; pytest's report is printed where there are any."""
    own = {k: v for k, v in os.environ.items() if k != FOLDER} | {"OMP_NUM_THREADS": "1"}
    own |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "tools" / "jitter")])}
    python = [python_of(variant.python), "-m", "pytest", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
    ignored = [f"--ignore-glob=*/test_{name}.py" for name in ELSEWHERE]
    ignored += ["--ignore=tests/tools", "--ignore=tests/page"]
    with tempfile.TemporaryDirectory() as folder:
        # torch keeps what it compiled for other runs, and does not ask for which instruction set that was
        compiled = {"TORCHINDUCTOR_CACHE_DIR": folder} if variant.variables else {}
        command = [*python, "-n", str(jobs), "--dist", "loadfile", *ignored, *paths]
        given = own | compiled | variant.variables
        done = subprocess.run(command, env=given, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 0:
        return []
    print(done.stdout[-20_000:], flush=True)
    found = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return found or [f"pytest ended with {done.returncode}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=["notebooks"], help="notebooks and tests (default: %(default)s)")
    families = list(variants([]))
    parser.add_argument("--only", nargs="+", choices=families, default=families, help="families of variants")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--tests", action="store_true", help="and the unit, contract and doctests on every variant")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="0: in pytest's own process")
    options = parser.parse_args()
    paths = [*options.paths, *(("tests", "mpkit") if options.tests else ())]
    todo = [variant for family, some in variants(options.seeds).items() if family in options.only for variant in some]
    start, differences = time.perf_counter(), 0
    for variant in todo:
        found = differing(variant, options.jobs, paths)
        differences += len(found)
        print(f"{variant.name}: {len(found)} differ", *found, sep="\n  ", flush=True)
    print(f"{differences} differences, {len(todo)} variants, {time.perf_counter() - start:.0f} s")
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main())
