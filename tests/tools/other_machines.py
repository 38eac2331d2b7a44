"""Stand-ins for other machines: every notebook on each of them, and a table of what differs.

    python tests/tools/other_machines.py --tests               # all variants, unit and golden tests too
    python tests/tools/other_machines.py --only seed --seeds 41 42   # what CI runs, with seeds that change by commit

A variant is a way in which machines differ: the last bits of matrix products (`tests/tools/jitter`), the instruction
sets that the libraries use, the number of threads, the versions of Python and of the packages. A notebook passes on a
variant when every cell ends as it is stored and gives the stored text, the comparison of nbval without its kernels: one
process per environment imports everything once and forks for each notebook, so a notebook costs what its cells cost.
With `--tests` each variant also runs the unit and golden tests and the doctests, as pytest runs them anywhere.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from queue import Queue
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted([*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("notebooks/more/*/*.ipynb")])
OLDEST_X86 = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"}
TIMES = float(os.environ.get("MPKIT_JITTER_TIMES", "1"))  # a larger one finds what is near to its edge
VERSIONS = {  # name: interpreter, packages beside the ranges of pyproject.toml
    "Python 3.11, torch 2.11": ("python3.11", ("torch==2.11.*",)),
    "Python 3.13, newest": ("python3.13", ()),
}
ELSEWHERE = (  # tests that look at files, or start browsers, installations, clusters and notebooks of their own
    *("environment", "experiment_kills", "installed", "labs", "layers", "notebooks"),
)
IMPORTED = (
    *("torch", "torch._dynamo", "numpy", "pandas", "matplotlib.figure", "ipywidgets", "anywidget", "execute"),
    "IPython.core.interactiveshell",
)
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


@dataclass(frozen=True)
class Variant:
    """A stand-in: environment variables, a seed of the jitter (None: no jitter), and the Python that runs it."""

    name: str
    variables: dict[str, str] = field(default_factory=dict, hash=False)
    seed: int | None = None
    python: str = sys.executable


def variants(seeds: Sequence[int]) -> dict[str, list[Variant]]:
    """The variants by family."""
    return {
        "seed": [Variant(f"seed {seed}", seed=seed) for seed in seeds],
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
        found = next(
            (path for path in known if path and not subprocess.run([path, "-V"], capture_output=True).returncode), None
        )
        if found is None:
            raise SystemExit(
                f"the variant {name!r} needs {python}, and this machine has none; install it or use --only"
            )
        subprocess.run([found, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(own), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "-e", ".[test]", *packages], check=True, cwd=ROOT)
        (folder / "complete").touch()
    return str(own)


# in the process of a variant


def serve(package: str) -> None:
    """Read jobs from stdin, one JSON object a line; run each in a fork; write its result to stdout, one line.

    `package` is the folder of the mpkit that every job runs, or "" where each job names its own.
    """
    for name in IMPORTED:
        importlib.import_module(name)
    if package == str(ROOT):  # the mpkit of all notebooks, imported once; nothing here starts a thread
        for path in sorted((ROOT / "mpkit" / "lessons").glob("[a-z]*.py")):
            importlib.import_module(f"mpkit.lessons.{path.stem}")
    for line in sys.stdin:
        job = json.loads(line)
        end, begin = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(end)
            with os.fdopen(begin, "w") as out:
                out.write(json.dumps(run_here(**job)))
            os._exit(0)
        os.close(begin)
        with os.fdopen(end) as found:
            text = found.read()
        os.waitpid(child, 0)
        print(text or json.dumps({"differ": [{"cell": "process ended"}], "seconds": 0.0}), flush=True)


def run_here(notebook: str, seed: int | None = None, package: str = "", first: bool = False) -> dict[str, Any]:
    """Run a notebook in this process: which cells differ from what is stored, and its seconds.

    With the mpkit of the folder `package`, where that is named; to the `first` difference only, where that is asked.
    """
    if package:
        assert "mpkit" not in sys.modules, "an mpkit is imported before the one that is asked for"
        sys.path.insert(0, package)
    import nbformat
    from execute import texts
    from IPython.core.displayhook import CapturingDisplayHook
    from IPython.core.displaypub import CapturingDisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from nbformat.v4 import new_code_cell, new_notebook, new_output

    start = time.perf_counter()
    if seed is not None:
        install(seed, TIMES)
    os.chdir(Path(notebook).parent)
    pd.set_option("display.max_columns", 20)  # as in a notebook, not as in a terminal
    shell = InteractiveShell.instance()
    shell.display_pub = published = CapturingDisplayPublisher()
    shell.display_trap.hook = CapturingDisplayHook(shell, published.outputs)
    differ = []
    for number, cell in enumerate(c for c in nbformat.read(notebook, as_version=4).cells if c.cell_type == "code"):
        published.outputs.clear()
        with redirect_stdout(StringIO()) as printed:
            done = shell.run_cell(cell.source)
        error = done.error_in_exec or done.error_before_exec
        if error:  # IPython printed its traceback
            outputs = [new_output("error", ename=type(error).__name__, evalue=str(error))]
        else:
            outputs = [new_output("stream", text=printed.getvalue())]
        outputs += [new_output("display_data", shown["data"]) for shown in published.outputs]
        stored, fresh = (texts(new_notebook(cells=[c])) for c in (cell, new_code_cell(outputs=outputs)))
        if sorted(fresh) != sorted(stored):
            differ.append({"cell": number, "stored": stored, "fresh": fresh})
            if first:
                break
    return {"differ": differ, "seconds": round(time.perf_counter() - start, 1)}


# outside


def results(todo: Sequence[Variant], notebooks: Sequence[Path], jobs: int) -> Iterator[tuple[Variant, Path, dict]]:
    """Run every notebook on every variant, `jobs` processes at a time; results as they come."""
    found: Queue[tuple[Variant, Path, dict] | Exception | None] = Queue()
    work = [(variant, path) for variant in todo for path in notebooks]
    lock = threading.Lock()

    def worker() -> None:
        server, kind = None, None
        try:
            while True:
                with lock:
                    # the same environment if there is one, and the longest notebook first
                    same = [w for w in work if (w[0].python, w[0].variables) == kind] or work
                    if not same:
                        return
                    variant, path = max(same, key=lambda w: w[1].stat().st_size if kind else 0)
                    work.remove((variant, path))
                if kind != (variant.python, variant.variables):
                    if server:
                        end(server)
                    kind = (variant.python, variant.variables)
                    server = started(variant)
                found.put((variant, path, asked(server, notebook=str(path), seed=variant.seed)))
        except Exception as error:  # a place that could not run is no place without differences
            with lock:
                work.clear()
            found.put(error)
        finally:
            if server:
                end(server)
            found.put(None)

    threads = [threading.Thread(target=worker) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for _ in threads:
        for result in iter(found.get, None):
            if isinstance(result, Exception):
                raise result
            yield result


def started(variant: Variant, package: str = str(ROOT)) -> subprocess.Popen[str]:
    """A process with everything imported, in the environment of the variant, that serves jobs."""
    settings = {"OMP_NUM_THREADS": "1", "MPLCONFIGDIR": os.environ.get("MPLCONFIGDIR", ""), **variant.variables}
    return subprocess.Popen(
        [python_of(variant.python), __file__, "--serve", package],
        env={k: v for k, v in (os.environ | settings).items() if v} | {"PYTHONPATH": package},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def end(server: subprocess.Popen[str]) -> None:
    """Close the pipes of a server, which ends it, and wait."""
    with suppress(BrokenPipeError):  # of one that had ended before it read what it was asked
        server.__exit__(None, None, None)


def failed_tests(variant: Variant, jobs: int, paths: Sequence[str] = ("tests", "mpkit")) -> list[str]:
    """The unit tests, golden tests and doctests that fail on a variant; 0 `jobs` run in pytest's own process."""
    jitter = {"MPKIT_JITTER": "" if variant.seed is None else str(variant.seed)}
    found_by = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "tools" / "jitter")])}
    python = [python_of(variant.python), "-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
    ignored = [f"--ignore-glob=*/test_{name}.py" for name in ELSEWHERE]
    ignored += ["--ignore=tests/tools", "--ignore=tests/page"]
    with tempfile.TemporaryDirectory() as folder:
        # torch keeps what it compiled for other runs, and does not ask for which instruction set that was
        compiled = {"TORCHINDUCTOR_CACHE_DIR": folder} if variant.variables else {}
        done = subprocess.run(
            [*python, "-n", str(jobs), "--dist", "loadfile", *ignored, *paths],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | found_by | jitter | compiled | variant.variables,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    found = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return found if found or done.returncode == 0 else [f"pytest ended with {done.returncode}: {done.stdout[-500:]}"]


def table(cells: dict[tuple[str, str], str], names: Sequence[str], columns: Sequence[str], earlier: str = "") -> str:
    """Markdown: a row per variant, a column per notebook, the cells that differ or 0; tests: how many fail.

    What an `earlier` table says of other variants, and of these columns, stays, so that all need not run at one time;
    a place that never ran is empty.
    """
    short = {stem: stem[:5] if stem.startswith(("lab", "tests")) else stem[:2] for stem in columns}
    head, _, *rows = [line[2:-2].split(" | ") for line in earlier.splitlines() if line[:1] == "|"] or [[], []]
    found = {row[0]: dict(zip(head[1:], row[1:])) for row in rows}
    for name in names:
        fresh = {short[stem]: text for (variant, stem), text in cells.items() if variant == name}
        found[name] = found.get(name, {}) | fresh
    lines = [[name, *(told.get(column, "") for column in short.values())] for name, told in found.items()]
    where = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return (
        f"# Cells that differ on stand-ins for other machines\n\nMade by `make tools` on {where}.\n"
        "The last column counts unit tests, golden tests and doctests that fail. A place that never ran is empty.\n\n"
        + "\n".join(map(line_of, [["variant", *short.values()], ["---"] * (1 + len(short)), *lines]))
        + "\n"
    )


def line_of(fields: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(fields) + " |"


def asked(server: subprocess.Popen[str], **job: Any) -> dict[str, Any]:
    """What `run_here(**job)` returns in a fork of the server."""
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
    except BrokenPipeError:  # it may have answered nothing, or ended before it was asked
        pass
    answer = server.stdout.readline()
    if not answer:
        raise RuntimeError(f"the process of a variant ended before it answered {job}; its message stands above")
    return json.loads(answer)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="all lessons and labs when none is named")
    families = list(variants([]))
    parser.add_argument("--only", nargs="+", choices=families, default=families, help="families of variants")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--tests", action="store_true", help="and the unit and golden tests on every variant")
    parser.add_argument("--no-notebooks", action="store_true", help="the tests alone")
    parser.add_argument("--table", type=Path, help="write the table variant x notebook to this file, as Markdown")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if missing := [str(path) for path in options.notebooks if not path.is_file()]:
        parser.error(f"no such notebook: {', '.join(missing)}; name files, such as notebooks/01_number_formats.ipynb")
    todo = [variant for family, some in variants(options.seeds).items() if family in options.only for variant in some]
    notebooks = [] if options.no_notebooks else [path.resolve() for path in options.notebooks] or NOTEBOOKS
    start, differences = time.perf_counter(), 0
    cells: dict[tuple[str, str], str] = {}
    columns = [*(path.stem for path in NOTEBOOKS), "tests"]
    earlier = options.table.read_text() if options.table and options.table.exists() else ""

    def write_table() -> None:
        if options.table:
            options.table.write_text(table(cells, [v.name for v in todo], columns, earlier))

    whole = len(todo) * len(notebooks)
    for done, (variant, path, result) in enumerate(results(todo, notebooks, options.jobs), 1):
        print(f"{done}/{whole} {variant.name}: {path.stem}, {result['seconds']} s", file=sys.stderr, flush=True)
        cells[variant.name, path.stem] = " ".join(f"c{cell['cell']}" for cell in result["differ"]) or "0"
        write_table()
        for cell in result["differ"]:
            differences += 1
            print(f"{variant.name}: {path.stem} cell {cell['cell']}")
            lines = difflib.unified_diff(cell.get("stored", []), cell.get("fresh", []), "stored", "here", "", "", 0, "")
            print("\n".join(line[:200] for line in list(lines)[2:12]), flush=True)
    for variant in todo if options.tests else ():
        failed = failed_tests(variant, options.jobs)
        cells[variant.name, "tests"] = str(len(failed))
        write_table()
        differences += len(failed)
        print(*(f"{variant.name}: {test}" for test in failed), sep="\n", end="\n" * bool(failed), flush=True)
    print(f"{differences} differences, {len(todo)} variants, {time.perf_counter() - start:.0f} s")
    return int(differences > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        sys.path[:0] = [str(ROOT / "notebooks"), str(ROOT / "tests" / "tools" / "jitter")]
        sys.modules.pop("sitecustomize", None)  # Debian's Python has one of its own, and has imported it
        import pandas as pd
        from sitecustomize import install

        serve(sys.argv[2])
    else:
        sys.exit(main())
