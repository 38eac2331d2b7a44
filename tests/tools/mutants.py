"""Mutants: one operator, comparison, constant or boolean of the library is changed at a time. Do its tests notice?

    python tests/tools/mutants.py --sample 400 --seed 1 [--contract] [--only boost optimizers] [--write FILE]

Everything happens in copies of the tree. The tests of all modules run once without a change, which must pass; coverage
notes the lines that each of them runs. Then a process that has imported what the tests need, but not the library, forks
for each mutant and runs the tests of its line there, the quick ones first, until one fails; last the files of its
module whose tests start processes, into which coverage does not see. Where no test was seen at the line (it runs at
import), the files of its module run whole.

Not changed: annotations, docstrings, messages (`raise`, f-strings, warnings), decorators, `__all__`, lists of types.
mutmut leaves out what stands in classes, modules and decorated functions, which is half of this library; cosmic-ray
changes the checkout itself and starts a process, here 4 s of imports, for each mutant.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[2]
EVERY = ("test_training", "test_lives", "test_damaged", "test_meta", "test_source", "test_defaults", "test_wrong")
OWN = {  # module -> what the names of its test files begin with; EVERY: those of all modules
    "formats": ("test_formats", "test_numbers"),
    "rounding": ("test_rounding", "test_numbers"),
    "blocks": ("test_blocks", "test_numbers", "test_golden_recipes"),
    "casting": (
        *("test_casting", "test_precision", "test_recipes", "test_ledger"),
        *("test_build", "test_golden_c", "test_golden_l"),
    ),
    "policies": ("test_policies", "test_golden_scalers", "test_tensor_scale"),
    "scalers": ("test_scalers", "test_golden_scalers", "test_tensor_scale", "test_recipes_distributed"),
    "step": ("test_step", "test_golden_step", "test_clip", "test_build", "test_accumulation", "test_compiled"),
    "optimizers": ("test_optimizer", "test_update_rules", "test_golden_optimizers", "test_centralization"),
    "schedules": ("test_schedules", "test_golden_optimizers"),
    "model": ("test_model", "test_golden_step"),
    "boost": ("test_boost", "test_golden_boost", "test_a", "test_dim", "test_freeze", "test_group", "test_less"),
    "record": ("test_record", "test_amax", "test_traces", "test_strange"),
    "replay": ("test_replay", "test_tensor_scale"),
    "diagnose": (
        *("test_diagnose", "test_preflight", "test_watch", "test_public_reports", "test_recommend"),
        *("test_amaxes", "test_tensor_scales"),
    ),
}
ASKED = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not gpu and not browser"]
FEW = 20  # tests that run first; most mutants are killed by them
MEMORY = 12 * 2**30  # bytes that a mutant may ask for
FORK = multiprocessing.get_context("fork")
WARM = ("numpy", "torch", "torch._dynamo", "torch.distributed", "pandas", "ml_dtypes", "hypothesis")
SWAPS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.And: ast.Or, ast.Or: ast.And,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SILENT = {"stacklevel", "flush", "strict", "total"}  # only printing or a type checker shows them, or they only guard

# what no test can notice: name of the mutant -> why; "=> *" stands for all mutants of the line of a tuning constant,
# one that decides how much is worked on at once or which of two ways to the same numbers is taken
EQUIVALENT: dict[str, str] = json.loads((ROOT / "tests" / "tools" / "equivalent_mutants.json").read_text())


@dataclass(frozen=True)
class Mutant:
    """`file[start:end]`, bytes, becomes `new`; `text` and `changed` are its lines before and after."""

    file: str
    line: int
    around: tuple[int, int, int]  # where its statement begins, where its function or class begins and ends
    scope: str
    start: int
    end: int
    old: str
    new: str
    text: str
    changed: str

    @property
    def name(self) -> str:
        return f"{self.file} {self.scope}: {self.text} => {self.changed}"

    @property
    def module(self) -> str:
        return Path(self.file).parts[1].removesuffix(".py")

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + f"({self.new})".encode() + source[self.end :]


def mutants_of(source: str, file: str) -> list[Mutant]:
    """Every mutant of a file."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line))
    whole, found = source.encode(), []
    for node, changed, around, scope in _changes(ast.parse(source), (0, 0, -1), ""):
        start, end = begins[node.lineno - 1] + node.col_offset, begins[node.end_lineno - 1] + node.end_col_offset
        old, new = ast.unparse(node), ast.unparse(changed)
        text = whole[begins[node.lineno - 1] : begins[node.end_lineno]]
        after = whole[begins[node.lineno - 1] : start] + new.encode() + whole[end : begins[node.end_lineno]]
        before, after = (" ".join(part.decode().split()) for part in (text, after))
        found.append(Mutant(file, node.lineno, around, scope, start, end, old, new, before, after))
    return found


def _changes(node: Any, around: tuple[int, int, int], scope: str) -> Iterator[tuple[Any, ast.AST, Any, str]]:
    """(expression, what takes its place, its lines, its function or class) for all that stands below `node`."""
    for changed in _changed(node):
        yield node, changed, around, scope
    if isinstance(node, ast.stmt):
        around = (node.lineno, *around[1:])
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        around, scope = (node.lineno, node.lineno, node.end_lineno), f"{scope}.{node.name}".lstrip(".")
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            stays = name in ("annotation", "returns", "decorator_list") or not isinstance(child, ast.AST)
            if not stays and not _left_out(node, child):
                yield from _changes(child, around, scope)


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


def excused(names: list[str]) -> dict[str, str]:
    """Those of some mutants that nothing can notice -> why."""
    entries = {name: (name, f"{name.split(' => ')[0]} => *") for name in names}
    return {name: EQUIVALENT[key] for name, keys in entries.items() for key in keys if key in EQUIVALENT}


# --- the run


def files_of(root: Path, module: str, contract: bool = False) -> list[list[str]]:
    """The test files of a module, the nearest first: its units, its contract, its doctests, what asks all modules."""

    def starting(folder: str, starts: tuple[str, ...]) -> list[str]:
        found = sorted((root / "tests" / folder).rglob("test_*.py"))
        return [p.relative_to(root).as_posix() for p in found if p.stem.startswith(starts)]

    asked = [starting("contract", OWN[module]), starting("contract", EVERY)]
    if not contract:
        doctests = [name for name in (f"mpkit/{module}.py", f"mpkit/{module}") if (root / name).exists()]
        asked = [starting("unit", OWN[module]), asked[0], doctests, asked[1]]
    return [files for files in asked if files]


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


def outdated(every: list[Mutant]) -> set[str]:
    """The entries of `EQUIVALENT` whose line is not there any more."""
    return set(EQUIVALENT) - {name for m in every for name in (m.name, f"{m.name.split(' => ')[0]} => *")}


def drawn(every: list[Mutant], options: Any) -> list[Mutant]:
    """The mutants to run: those that an earlier result says survived, or a random sample."""
    if options.again:
        left = set(json.loads(options.again.read_text())["survived"])
        return [m for m in every if m.name in left]
    return random.Random(options.seed).sample(every, min(options.sample, len(every)))


def _caches() -> list[Any]:
    """The functions of the library that keep their results, but for the one that makes the class of a format."""
    mine = [vars(module).values() for name, module in [*sys.modules.items()] if name.split(".")[0] == "mpkit"]
    return [x for values in mine for x in [*values] if hasattr(x, "cache_clear") and x.__name__ != "known"]


class Watch:
    """A plugin of pytest: coverage notes the lines that each test runs, and how long it took."""

    def __init__(self, scratch: Path, root: Path) -> None:
        self.seconds: dict[str, float] = {}
        self.seen = coverage.Coverage(scratch / "lines", source=[str(root / "mpkit")], config_file=False)
        self.out = scratch / "seconds.json"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        for function in _caches():  # every test that asks for a result is seen at the lines that made it
            function.cache_clear()
        self.seen.switch_context(item.nodeid)
        began = time.process_time()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.process_time() - began

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.out.with_suffix(".failed").write_text(f"{report.nodeid}\n{report.longreprtext}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self) -> None:  # a conftest may import the library, before the session starts
        self.seen.start()

    def pytest_sessionfinish(self) -> None:
        self.seen.stop()
        self.seen.save()
        self.out.write_text(json.dumps(self.seconds))


@dataclass
class Reached:
    """Which tests run a line, and how long each takes."""

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, list[str]]] = field(default_factory=dict)

    @classmethod
    def measured(cls, root: Path, files: list[str]) -> Reached:
        """Raises RuntimeError where a test fails without any change: it would prove nothing."""
        with tempfile.TemporaryDirectory(prefix="mpkit-lines-") as scratch:
            watch = Watch(Path(scratch), root)
            if not passes(files, plugins=[watch]):
                told = watch.out.with_suffix(".failed")
                raise RuntimeError(f"a test fails without any change: {told.read_text() if told.exists() else files}")
            data = coverage.CoverageData(Path(scratch) / "lines")
            data.read()
            lines = {Path(f).relative_to(root).as_posix(): data.contexts_by_lineno(f) for f in data.measured_files()}
            return cls(json.loads(watch.out.read_text()), lines)

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests that run the statement of a mutant, or its function or class; quick ones first.

        None of them for what runs at import, as a default of a signature does: any test may depend on it.
        """
        seen, (statement, begin, end) = self.lines.get(mutant.file, {}), mutant.around
        own = range(mutant.line, statement - 1, -1)
        if any("" in seen.get(line, []) for line in own):
            return []
        nearest = next((line for line in own if any(seen.get(line, []))), None)
        lines = [nearest] if nearest else range(begin, end + 1)
        found = {name for line in lines for name in seen.get(line, []) if name}
        return sorted(found, key=lambda name: self.seconds[name])


def passes(tests: list[str], seconds: float = 3600, plugins: list[Any] | None = None) -> bool:
    """Whether tests pass in a fork, which imports the library; not if they work for longer, or stand still."""
    child = FORK.Process(target=_in_fork, args=(tests, seconds, plugins))
    child.start()
    child.join(10 * seconds)  # on a busy machine a second of work takes several
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # what a test has started and left
    child.join()
    return child.exitcode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def _in_fork(tests: list[str], seconds: float, plugins: list[Any] | None) -> None:
    os.setsid()
    with open(os.devnull, "r+b") as quiet:
        for stream in (0, 1, 2):
            os.dup2(quiet.fileno(), stream)
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    os._exit(int(pytest.main([*ASKED, *tests], plugins)))


def kills(mutant: Mutant, root: Path, reached: Reached, contract: bool) -> bool:
    """Whether a test fails on a mutant, written into the tree at `root`."""
    whole = [name for files in files_of(root, mutant.module, contract) for name in files]
    tests = reached.tests(mutant)
    processes = [name for name in whole if name.endswith(("processes.py", "distributed.py"))]
    asked = (tests[:FEW], tests[FEW:], processes) if tests else (whole,)

    def limit(some: list[str]) -> float:
        return 20 + 4 * sum(s for name, s in reached.seconds.items() if {name, name.partition("::")[0]} & {*some})

    path = root / mutant.file
    source, stamp = path.read_bytes(), path.stat()
    path.write_bytes(mutant.applied(source))
    try:
        return not all(passes(some, limit(some)) for some in asked if some)
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # its stored bytecode is valid again


def table(results: list[tuple[Mutant, bool]]) -> dict[str, dict[str, int]]:
    """Module -> how many were killed, survived, or cannot be noticed."""
    counts: dict[str, Counter[str]] = {}
    for mutant, killed in results:
        kind = "killed" if killed else "equivalent" if excused([mutant.name]) else "survived"
        counts.setdefault(mutant.module, Counter())[kind] += 1
    return {m: {k: counts[m][k] for k in ("killed", "survived", "equivalent")} for m in sorted(counts)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=400, help="how many mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default: %(default)s)")
    parser.add_argument("--contract", action="store_true", help="ask the contract alone")
    parser.add_argument("--only", nargs="+", default=list(OWN), choices=OWN, metavar="MODULE")
    parser.add_argument("--again", type=Path, help="the survivors of this result instead of a sample")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no mutant after so long")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at the same time (default: %(default)s)")
    parser.add_argument("--write", type=Path, help="the JSON for the result")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.end = time.monotonic() + 60 * options.minutes
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # a second of imports, and no test here needs one
    root, results = options.root.resolve(), list[tuple[Mutant, bool]]()
    every = all_mutants(root, options.only)
    for name in outdated(every) if set(options.only) == set(OWN) else ():
        print(f"the line of an equivalent mutant has changed, look again: {name}")
    for name in WARM:
        with suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mpkit-mutants-") as scratch:
        copies = [copied(root, Path(scratch).resolve() / str(k)) for k in range(options.jobs)]
        entered(copies[0], root)
        asked = {f: None for name in options.only for group in files_of(root, name, options.contract) for f in group}
        reached, chosen = Reached.measured(copies[0], [*asked]), drawn(every, options)
        print(f"{len(reached.seconds)} tests, {sum(reached.seconds.values()):.0f} s", flush=True)
        told = FORK.SimpleQueue()
        given = told, chosen, reached, options
        workers = [FORK.Process(target=_worker, args=(k, copy, *given)) for k, copy in enumerate(copies)]
        try:
            for worker in workers:
                worker.start()
            for _ in chosen:
                number, killed, seconds = told.get()
                if killed is None:  # no time was left
                    continue
                mutant = chosen[number]
                results.append((mutant, killed))
                where = f"{mutant.file}:{mutant.line} {mutant.old} -> {mutant.new}"
                print(f"{'killed' if killed else 'survived':9} {where} [{seconds:.1f} s]", flush=True)
        finally:  # what is known is told, whatever ends the run
            for worker in workers:
                worker.terminate()
            os.chdir(root)
            _told(results, len(every), options)
    return 0


def entered(copy: Path, root: Path) -> None:
    """Work in a copy: imports find its library and its tests, and nothing of the checkout."""
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    elsewhere = {root, root / "tests"}
    sys.path[:] = [str(copy), *(p for p in sys.path if Path(p or ".").resolve() not in elsewhere)]


def _worker(k: int, copy: Path, told: Any, chosen: list[Mutant], reached: Reached, options: Any) -> None:
    """Every so many mutants, in a copy of its own: (number, killed or None, seconds)."""
    entered(copy, options.root.resolve())
    for number in range(k, len(chosen), options.jobs):
        began = time.monotonic()
        late = began > options.end
        killed = None if late else kills(chosen[number], copy, reached, options.contract)
        told.put((number, killed, time.monotonic() - began))


def _told(results: list[tuple[Mutant, bool]], of: int, options: Any) -> None:
    rows = table(results)
    total = {k: sum(row[k] for row in rows.values()) for k in ("killed", "survived", "equivalent")}
    print(f"\n{'module':12} killed survived equivalent")
    for module, row in {**rows, "all": total}.items():
        print(f"{module:12} {row['killed']:6} {row['survived']:8} {row['equivalent']:10}")
    share = total["killed"] / max(1, total["killed"] + total["survived"])
    print(f"{share:.1%} of {len(results)} killed, drawn with seed {options.seed} from {of}")
    if options.write:
        left = [m.name for m, killed in results if not killed]
        why = excused(left)
        held = {
            "date": time.strftime("%Y-%m-%d"),
            "versions": {"python": platform.python_version(), "torch": importlib.metadata.version("torch")},
            "seed": options.seed,
            "contract_alone": options.contract,
            "drawn": len(results),
            "of": of,
            "killed_share": round(share, 4),
            "modules": rows,
            "survived": [name for name in left if name not in why],
            "equivalent": why,
        }
        options.write.write_text(json.dumps(held, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
