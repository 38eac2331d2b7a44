"""Mutants: one operator, comparison, constant or boolean of the library is changed at a time. Do its tests notice?

    python tests/mutants.py --sample 60 --seed 1 [--only boost optimizers] [--minutes 20] [--write FILE]

Everything happens in a copy of the tree. First the unit tests of the modules run once under `coverage`, which tells the
tests of every line (`--map FILE` keeps that for the next call). Then a process that has loaded torch forks for each
mutant and runs the tests of its line, those of its own module first, until one fails or `--budget` seconds of tests
have passed. A line that no test reaches in this process may run in a process that a test starts: there the test files
of the module run whole.

Not changed: annotations, docstrings, messages (`raise`, f-strings, warnings), decorators, `__all__`, lists of types.
mutmut leaves out what stands in classes, modules and decorated functions, which is half of this library; cosmic-ray
changes the checkout itself and starts a process, here 4 s of imports, for each mutant.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EVERY = ("test_wrong_input", "test_meta_device")  # test files of all modules
OWN = {  # module -> beginnings of the names of its own test files
    "formats": ("test_formats",),
    "rounding": ("test_rounding",),
    "casting": ("test_casting", "test_recipes", "test_ledger", "test_golden_recipes", "test_golden_linear"),
    "policies": ("test_policies", "test_golden_scalers", "test_tensor_scale"),
    "scalers": ("test_scalers", "test_golden_scalers"),
    "step": ("test_step", "test_golden_step"),
    "optimizers": ("test_optimizers", "test_golden_optimizers", "test_adam8bit", "test_bf16"),
    "schedules": ("test_schedules", "test_golden_optimizers"),
    "model": ("test_model",),
    "boost": ("test_boost", "test_golden_boost"),
    "record": ("test_record", "test_amax", "test_traces"),
    "replay": ("test_replay", "test_tensor_scale"),
    "diagnose": ("test_diagnose", "test_preflight"),
}
WARM = ("numpy", "torch", "torch._dynamo", "torch.distributed", "pandas", "ml_dtypes", "pytest")
SWAPS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.And: ast.Or, ast.Or: ast.And,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
CONTROL = 10  # of so many mutants one has its tests run without the change, too: they must pass
SILENT = {"stacklevel"}  # keywords that only a message shows

# what no test can notice: "file: line as it stands: change" -> why
EQUIVALENT: dict[str, str] = {}


@dataclass(frozen=True)
class Mutant:
    """`file[start:end]`, bytes, becomes `new`; it stands in line `line` of a statement that begins in `begin`."""

    file: str
    line: int
    begin: int
    start: int
    end: int
    old: str
    new: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.file}: {self.text}: {self.old} -> {self.new}"

    @property
    def module(self) -> str:
        return Path(self.file).parts[1].removesuffix(".py")

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + f"({self.new})".encode() + source[self.end :]


def mutants_of(source: str, file: str) -> list[Mutant]:
    """Every mutant of a file."""
    lines = source.splitlines(keepends=True)
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line.encode()))
    found = []
    for node, changed, begin in _changes(ast.parse(source), 1):
        start, end = begins[node.lineno - 1] + node.col_offset, begins[node.end_lineno - 1] + node.end_col_offset
        old, new = ast.unparse(node), ast.unparse(changed)
        found.append(Mutant(file, node.lineno, begin, start, end, old, new, lines[node.lineno - 1].strip()))
    return found


def _changes(node: Any, begin: int) -> Iterator[tuple[Any, ast.AST, int]]:
    """(expression, what takes its place, first line of its statement) for all that stands below `node`."""
    if isinstance(node, ast.stmt):
        begin = node.lineno
    for changed in _changed(node):
        yield node, changed, begin
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _left_out(node, child):
                yield from _changes(child, begin)


def _left_out(parent: ast.AST, child: Any) -> bool:
    if isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr | ast.ImportFrom | ast.Import):
        return True
    if isinstance(child, ast.keyword) and child.arg in SILENT:
        return True
    if isinstance(child, ast.Call) and ast.unparse(child.func) in ("warnings.warn", "cast", "TypeVar"):
        return True
    if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
        return True
    if isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) == "__all__":
        return True
    types = isinstance(parent, ast.Call) and ast.unparse(parent.func) in ("isinstance", "issubclass", "check_kind")
    return types and isinstance(child, ast.BinOp)


def _changed(node: Any) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
        fields = {name: getattr(node, name) for name in node._fields} | {"op": SWAPS[type(node.op)]()}
        yield type(node)(**fields)
    elif isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            yield ast.Compare(node.left, [*node.ops[:i], SWAPS[type(op)](), *node.ops[i + 1 :]], node.comparators)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield ast.Constant(2 * node.value or 1.0)


# --- which tests run which line


def test_files(root: Path, module: str) -> list[str]:
    """The test files of a module, and its own docstrings."""
    starts = (*OWN.get(module, (f"test_{module}",)), *EVERY)
    named = [f"tests/{p.name}" for p in sorted((root / "tests").glob("test_*.py")) if p.stem.startswith(starts)]
    return [*named, *(name for name in (f"mpkit/{module}.py", f"mpkit/{module}") if (root / name).exists())]


class Map:
    """A pytest plugin: the tests of every line, and the seconds of every test that passes."""

    def __init__(self, coverage: Any) -> None:
        self.coverage = coverage
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed or report.skipped:
            self.failed.add(report.nodeid)


def measure(out: Path, files: list[str]) -> None:
    """Run test files of the working folder under coverage and write what ran what."""
    import coverage
    import pytest

    traced = coverage.Coverage(data_file=None, config_file=False, source=[str(Path("mpkit").resolve())])
    traced.start()
    plugin = Map(traced)
    marks = "not slow and not gpu and not browser"
    pytest.main(["-q", "-p", "no:cacheprovider", "-m", marks, *files], plugins=[plugin])
    traced.stop()
    tests = [name for name in plugin.seconds if name not in plugin.failed]
    number = {name: i for i, name in enumerate(tests)}
    data, lines = traced.get_data(), {}
    for path in data.measured_files():
        by_line = data.contexts_by_lineno(path).items()
        held = {line: sorted(number[c] for c in contexts if c in number) for line, contexts in by_line}
        lines[Path(path).relative_to(Path.cwd()).as_posix()] = {line: c for line, c in held.items() if c}
    seconds = [round(plugin.seconds[name], 4) for name in tests]
    out.write_text(json.dumps({"tests": tests, "seconds": seconds, "lines": lines, "failed": sorted(plugin.failed)}))


def chosen(mutant: Mutant, known: dict[str, Any], root: Path, budget: float) -> tuple[list[str], float]:
    """The tests to run and their seconds: the quick ones of its own files first, as many as the budget allows."""
    lines = known["lines"].get(mutant.file, {})
    held = lines.get(str(mutant.line)) or lines.get(str(mutant.begin)) or []
    files = test_files(root, mutant.module)
    if not held and str(mutant.line) not in lines and not _at_import(mutant, root):
        return files, 2 * budget
    if not held:  # runs when the module is imported
        held = sorted({i for tests in lines.values() for i in tests})
    own = tuple(f"{n}{'::' if n.endswith('.py') else '/'}" for n in files if Path(n).stem not in EVERY)
    tests, seconds = known["tests"], known["seconds"]
    held = sorted(held, key=lambda i: (not tests[i].startswith(own), seconds[i]))
    taken, total = [], 0.0
    for i in held:
        if total + seconds[i] <= budget and len(taken) < 600:
            taken.append(tests[i])
            total += seconds[i]
    return taken or [tests[i] for i in held[:1]], total


def _at_import(mutant: Mutant, root: Path) -> bool:
    """Whether a statement stands outside all functions, or is the head of one, with its defaults."""
    tree = ast.parse((root / mutant.file).read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return not any(f.body[0].lineno <= mutant.line <= (f.end_lineno or 0) for f in functions)


# --- one mutant


def survives(copy: Path, mutant: Mutant | None, tests: list[str], timeout: float) -> str:
    """ "survived", "killed" or "too long"; the copy is as before afterwards. None changes nothing."""
    if mutant is None:
        child = os.fork()
        if child == 0:
            _child(copy, tests)
        return _ended(child, timeout)
    path = copy / mutant.file
    source, stamp = path.read_bytes(), path.stat()
    path.write_bytes(mutant.applied(source))
    try:
        child = os.fork()
        if child == 0:
            _child(copy, tests)
        return _ended(child, timeout)
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # so the stored bytecode is still that of this source


def _child(copy: Path, tests: list[str]) -> None:
    """Run tests in the copy; never returns."""
    code = 3
    try:
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        sys.dont_write_bytecode = True
        import pytest

        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not browser", *tests]))
        home = getattr(sys.modules.get("mpkit"), "__file__", None) or str(copy)
        if not home.startswith(str(copy)):
            code = 3
    finally:
        os._exit(code)


def _ended(child: int, timeout: float) -> str:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            if code == 3:  # 1: a test failed; 2 and 4: what it imports, or what it is parametrised with, is broken
                raise RuntimeError("the tests of a mutant were not run as they should be; run them by hand")
            return "survived" if code == 0 else "killed"
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "too long"


# --- the run


def copied(root: Path, to: Path) -> Path:
    """The files that git knows or would take, in a folder of their own, with the times that they have."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=False
    ).stdout.split("\n")
    found = listed if any(listed) else [p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()]
    for name in found:
        if name and (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)
    return to


def all_mutants(root: Path, modules: list[str]) -> list[Mutant]:
    """Every mutant of some modules."""
    found = []
    for module in modules:
        single = root / "mpkit" / f"{module}.py"
        for path in [single] if single.exists() else sorted((root / "mpkit" / module).rglob("*.py")):
            found += mutants_of(path.read_text(), path.relative_to(root).as_posix())
    return found


def known_tests(copy: Path, modules: list[str], kept: Path | None) -> dict[str, Any]:
    """What `measure` finds, in a process of its own, or what an earlier call kept."""
    out = (kept or copy / "map.json").resolve()
    if not out.exists():
        files = sorted({name for module in modules for name in test_files(copy, module)})
        command = [sys.executable, str(copy / "tests" / "mutants.py"), "--measure", str(out), *files]
        subprocess.run(command, cwd=copy, check=True, env={**os.environ, "PYTHONPATH": str(copy)})
    return json.loads(out.read_text())


def table(results: list[tuple[Mutant, str]]) -> dict[str, dict[str, int]]:
    """Module -> how many were killed, survived, or cannot be noticed."""
    rows: dict[str, Counter[str]] = {}
    for mutant, end in results:
        kind = "equivalent" if end == "survived" and mutant.name in EQUIVALENT else end
        rows.setdefault(mutant.module, Counter())["killed" if kind == "too long" else kind] += 1
    return {m: {k: rows[m][k] for k in ("killed", "survived", "equivalent")} for m in sorted(rows)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=400, help="how many mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=list(OWN), metavar="MODULE")
    parser.add_argument("--like", default="", help="only mutants whose name holds this text")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no mutant after so long")
    parser.add_argument(
        "--budget", type=float, default=30.0, help="seconds of tests for a mutant (default: %(default)s)"
    )
    parser.add_argument("--map", type=Path, help="keep the tests of every line in this file, or take them from it")
    parser.add_argument("--write", type=Path, help="the JSON for the result")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("files", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.files)
        return 0
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = (
        "1"  # a second of imports for each mutant, and no test here needs one
    )
    with tempfile.TemporaryDirectory(prefix="mpkit-mutants-") as scratch:
        copy = copied(options.root.resolve(), Path(scratch).resolve())
        every = [m for m in all_mutants(copy, options.only) if options.like in m.name]
        sample = random.Random(options.seed).sample(every, min(options.sample, len(every)))
        known = known_tests(copy, options.only, options.map)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path[:] = [str(copy), *(p for p in sys.path if not _is_checkout(p, options.root))]
        for name in WARM:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        results = _run(copy, sample, known, options)
        os.chdir(options.root)
    return _told(results, len(every), options)


def _is_checkout(path: str, root: Path) -> bool:
    return Path(path or ".").resolve() in (root.resolve(), root.resolve() / "tests")


def _run(copy: Path, sample: list[Mutant], known: dict[str, Any], options: Any) -> list[tuple[Mutant, str]]:
    end, results = time.monotonic() + 60 * options.minutes, []
    for mutant in sample:
        if time.monotonic() > end:
            break
        tests, seconds = chosen(mutant, known, copy, options.budget)
        began = time.monotonic()
        if len(results) % CONTROL == 0 and (control := survives(copy, None, tests, 60 + 8 * seconds)) != "survived":
            raise RuntimeError(f"without any change the tests of {mutant.name} are {control}: they prove nothing")
        ended = survives(copy, mutant, tests, timeout=60 + 8 * seconds)
        results.append((mutant, ended))
        known_one = " (equivalent)" if mutant.name in EQUIVALENT else ""
        print(
            f"{ended:9}{known_one} {mutant.file}:{mutant.line} {mutant.old} -> {mutant.new} "
            f"[{len(tests)} tests, {time.monotonic() - began:.0f} s]",
            flush=True,
        )
    return results


def _told(results: list[tuple[Mutant, str]], of: int, options: Any) -> int:
    rows = table(results)
    total = {k: sum(row[k] for row in rows.values()) for k in ("killed", "survived", "equivalent")}
    print(f"\n{'module':12} killed survived equivalent")
    for module, row in {**rows, "all": total}.items():
        print(f"{module:12} {row['killed']:6} {row['survived']:8} {row['equivalent']:10}")
    share = total["killed"] / max(1, total["killed"] + total["survived"])
    print(f"{share:.1%} of {len(results)} killed, drawn with seed {options.seed} from {of}")
    if options.write:
        held = {
            "date": time.strftime("%Y-%m-%d"),
            "versions": {"python": platform.python_version(), "torch": importlib.metadata.version("torch")},
            "seed": options.seed,
            "drawn": len(results),
            "of": of,
            "budget_seconds": options.budget,
            "killed_share": round(share, 4),
            "modules": rows,
            "survived": [
                f"{m.name} (line {m.line})" for m, e in results if e == "survived" and m.name not in EQUIVALENT
            ],
            "equivalent": {m.name: EQUIVALENT[m.name] for m, e in results if e == "survived" and m.name in EQUIVALENT},
        }
        options.write.write_text(json.dumps(held, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
