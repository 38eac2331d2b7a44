"""Development tools: `make tools` runs what takes minutes in turn; `make tools ARGS="NAME ..."` runs one of them.

mutants         one operator or constant of the library is changed at a time: do the tests notice?
planted_bugs    a bug is planted in the library: do the contract and the labs notice?
other_machines  every notebook, and the tests, on stand-ins for other machines
fuzz            thirty times as many drawn lives, other ones each time
compat          casting on PyTorch's, torchvision's and transformers' own cases
soak            many kernels beside each other, pressed at random
views           how quick the views are in a browser
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in ("tests", "tests/page"):  # modules of tests that tools share
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / folder), os.environ.get("PYTHONPATH"))))
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
TOOLS = {
    "mutants": ["tests/tools/mutants.py"],
    "planted_bugs": [*PYTEST, "tests/tools/planted_bugs.py"],
    "other_machines": ["tests/tools/other_machines.py"],
    "fuzz": [*PYTEST, "-m", "hypothesis", "--hypothesis-profile=deep", "tests/contract", "tests/unit"],
    "compat": ["tests/tools/compat.py"],
    "soak": ["tests/tools/soak.py"],
    "views": ["tests/page/measure_views.py"],
}
USUAL = {  # what each is given where nothing is asked
    "mutants": ["--sample", "200"], "other_machines": ["--only", "seed"],
    "compat": ["--share", "0.05", "--minutes", "10"], "soak": ["--kernels", "10", "--minutes", "2"],
    "views": ["--out", "data/benchmarks/views.json"],
}  # fmt: skip


def main(asked: list[str]) -> int:
    if asked and asked[0] not in TOOLS:
        print(__doc__)
        return 2
    if asked:
        return subprocess.call([sys.executable, *TOOLS[asked[0]], *asked[1:]], cwd=ROOT)
    own = subprocess.call([sys.executable, *PYTEST, "tests/tools"], cwd=ROOT)  # the tools' own tests come first
    ends = {name: subprocess.call([sys.executable, *TOOLS[name], *USUAL.get(name, [])], cwd=ROOT) for name in TOOLS}
    print({"own tests": own, **ends})
    return max(own, *ends.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
