"""How mutants are run: which tests reach a line, and one fork of a process that has collected all tests per mutant.

A change inside a function is put into the functions that the fork has inherited, so nothing is imported or collected
again. Where that is not enough (what runs when a module is imported, defaults, classes) the fork imports the library
itself. The changed file lies on the disk either way, for the processes that tests start.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from mutants import Mutant

ASKED = ["-q", "-p", "no:cacheprovider", "--capture=sys", "-m", "not slow and not gpu and not browser"]
MEMORY = 12 * 2**30  # bytes that a mutant may ask for
ELSEWHERE = 99  # exit status of a fork that found no function to change
OVERHEAD = 0.02  # seconds that pytest takes for a test, on a busy machine
PROCESSES = Path("/proc")
STILL = 60  # seconds without any work, after which a mutant waits for what never comes
SHORT = 0.3  # seconds of a test that runs before longer ones, whatever their files


# --- which tests reach which line


class Seeded:
    """A pytest plugin: what a test draws does not depend on the tests before it."""

    def pytest_runtest_setup(self, item: Any) -> None:
        for name, seed in (("random", "seed"), ("numpy.random", "seed"), ("torch", "manual_seed")):
            if name in sys.modules:
                getattr(sys.modules[name], seed)(0)


class Measure(Seeded):
    """A pytest plugin: the lines that each test reaches, the seconds it takes, and whether it starts processes."""

    def __init__(self, coverage: Any) -> None:
        self.coverage = coverage
        self.tests: dict[str, list[float]] = {}
        self.missing: set[str] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.before = os.times()
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not report.passed:
            self.missing.add(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        own_user, own_system, user, system, _ = (now - then for now, then in zip(os.times(), self.before))
        self.coverage.switch_context("")
        self.tests[nodeid] = [round(own_user + own_system, 3), round(user + system, 3)]


def measured(copy: Path, files: list[str]) -> list[dict[str, Any]]:
    """Run test files in the working folder under coverage: {"tests", "lines", "imported", "missing"} for each."""
    import coverage
    import pytest

    traced = coverage.Coverage(data_file=None, config_file=False, source=[str(copy / "mpkit")])
    traced.start()
    plugin = Measure(traced)
    pytest.main([*ASKED, *files], plugins=[plugin])
    traced.stop()
    return [_part(file, plugin, traced.get_data(), copy) for file in files]


def _part(file: str, plugin: Measure, data: Any, copy: Path) -> dict[str, Any]:
    """What was measured on the tests of one file."""
    mine = [name for name in plugin.tests if name.startswith((f"{file}::", f"{file}/"))]
    names = [name for name in mine if name not in plugin.missing]
    number = {name: i for i, name in enumerate(names)}
    lines, imported = {}, {}
    for path in data.measured_files():
        source, by_line = Path(path).relative_to(copy).as_posix(), data.contexts_by_lineno(path)
        reached = {line: sorted(number[c] for c in by if c in number) for line, by in by_line.items()}
        lines[source] = {line: tests for line, tests in reached.items() if tests}
        imported[source] = sorted(line for line, by in by_line.items() if "" in by)
    tests = [[name, *plugin.tests[name]] for name in names]
    return {"file": file, "tests": tests, "lines": lines, "imported": imported, "missing": sorted({*mine} - {*names})}


class Known:
    """What `measured` found, for several runs of it."""

    def __init__(self, parts: Collection[dict[str, Any]]) -> None:
        self.seconds: dict[str, float] = {}
        self.blind: set[str] = set()  # tests that reach no line: they ask for signatures
        self.apart: set[str] = set()  # tests of files that start processes, and what torch compiles: unseen, in part
        self.lines: dict[str, dict[int, set[str]]] = {}
        self.imported: dict[str, set[int]] = {}
        self.breadth: Counter[str] = Counter()  # how many lines a test reaches
        for part in parts:
            reaching = {i for lines in part["lines"].values() for tests in lines.values() for i in tests}
            processes = any(others for _, _, others in part["tests"])
            for i, (name, own, others) in enumerate(part["tests"]):
                self.seconds[name] = own + others + OVERHEAD
                if processes or "compile" in name:
                    self.apart.add(name)
                elif i not in reaching:
                    self.blind.add(name)
            for file, lines in part["lines"].items():
                held = self.lines.setdefault(file, {})
                for line, tests in lines.items():
                    names = [part["tests"][i][0] for i in tests]
                    held.setdefault(int(line), set()).update(names)
                    self.breadth.update(names)
            for file, numbers in part["imported"].items():
                self.imported.setdefault(file, set()).update(numbers)

    def reach(self, mutant: Mutant) -> set[str]:
        """The tests of the line; of the function or class for its head; of the file for what stands outside of both."""
        lines = self.lines.get(mutant.file, {})
        if mutant.place.inside:
            return lines.get(mutant.line) or lines.get(mutant.place.begin) or set()
        within = [tests for line, tests in lines.items() if mutant.place.first <= line <= mutant.place.last]
        return set().union(*within) or set().union(*lines.values())

    def needs_import(self, mutant: Mutant) -> bool:
        """Whether its effect begins when the library is imported or tests are collected."""
        return not mutant.place.inside or bool(
            {mutant.line, mutant.place.begin} & self.imported.get(mutant.file, set())
        )

    def chosen(self, mutant: Mutant, own: tuple[str, ...], budget: float) -> list[str]:
        """The tests to run: those that reach it, short ones of its own files or signature first; then unseen ones.

        Of these a test that reaches few lines comes before one that passes by on its way through the library.

        Each kind for `budget` seconds. Unseen are its own tests in other processes, and tests that reach no line, first
        those that name the function or class. Of a test with many cases one comes first, then one of the next test: a
        thousand cases of one promise would leave no time for the others.
        """
        reach, seconds = self.reach(mutant), self.seconds
        called = mutant.place.scope.split(".")[0]  # tests by signature have the name of what they call in their own
        case, turns = {}, Counter()
        for test in sorted(reach, key=lambda t: (seconds[t], t)):
            case[test] = turns[test.split("[")[0]]
            turns[test.split("[")[0]] += 1
        first = sorted(  # `case` is in the order of their seconds
            case,
            key=lambda t: (
                *(t in self.apart, not (t.startswith(own) or (called and t.endswith(f".{called}]")))),
                *(seconds[t] > SHORT, case[t], self.breadth[t]),
            ),
        )
        unseen = self.blind | {t for t in self.apart if t.startswith(own)}
        taken: list[str] = []
        for tests in (first, sorted(unseen - reach, key=lambda t: (not called or called not in t, seconds[t]))):
            total = 0.0
            for test in tests:
                if not taken or total + seconds[test] <= budget:
                    taken.append(test)
                    total += seconds[test]
        return taken


def known_tests(copy: Path, files: list[str], kept: Path | None) -> Known:
    """`measured` for some test files; `kept` saves it, and only test files that have changed are run again."""
    library = _digest(sorted((copy / "mpkit").rglob("*.py")))
    stored = json.loads(kept.read_text()) if kept and kept.exists() else {}
    parts = stored["parts"] if stored.get("library") == library else []
    parts = [p for p in parts if p["digest"] == _digest([copy / p["file"]])]
    missing = sorted(set(files) - {p["file"] for p in parts})
    if missing:
        out = copy / "measured.json"
        ended = forked(lambda: out.write_text(json.dumps(measured(copy, missing))) * 0, seconds=7200)
        if ended != 0:
            raise RuntimeError(f"the tests could not be measured: {ended}")
        parts += [{**part, "digest": _digest([copy / part["file"]])} for part in json.loads(out.read_text())]
        if kept:
            kept.write_text(json.dumps({"library": library, "parts": parts}))
    used = [p for p in parts if p["file"] in files]
    left = sum(len(p["missing"]) for p in used)
    print(f"{sum(len(p['tests']) for p in used)} tests; {left} others failed or were skipped and are not used")
    return Known(used)


def _digest(paths: list[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths if path.is_file())).hexdigest()


# --- one mutant


def forked(run: Callable[[], int], seconds: float) -> int | str:
    """The exit status of `run` in a fork, or "too long": above `seconds` of processor time, or `STILL` without."""
    child = os.fork()
    if child == 0:
        _in_fork(run, seconds)
    worked, since = 0.0, time.monotonic()
    while time.monotonic() - since < STILL:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            _end_group(child)
            return "too long" if code == -signal.SIGXCPU else code
        if time.monotonic() - since > 1 and (now := _worked(child)) > worked + 0.1:
            worked, since = now, time.monotonic()
        time.sleep(0.01)
    _end_group(child)
    os.waitpid(child, 0)
    return "too long"


def _worked(session: int) -> float:
    """Processor seconds of a session's processes; where the system lists none, a clock, as if they always worked."""
    if not PROCESSES.exists():
        return time.monotonic()
    total = 0
    for stat in PROCESSES.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            _, _, _, own, *more = stat.read_text().rpartition(")")[2].split()
            total += sum(map(int, more[7:11])) if int(own) == session else 0
    return total / os.sysconf("SC_CLK_TCK")


def _in_fork(run: Callable[[], int], seconds: float) -> None:
    code = 3
    try:
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, hard))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
        code = run()
    finally:
        os._exit(code)


def _end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


@contextlib.contextmanager
def written(copy: Path, mutant: Mutant | None) -> Iterator[bytes]:
    """The copy with the mutant in it; gives the source without it."""
    if mutant is None:
        yield b""
        return
    path = copy / mutant.file
    source, stamp = path.read_bytes(), path.stat()
    path.write_bytes(mutant.applied(source))
    try:
        yield source
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # so the stored bytecode is still that of this source


@dataclass
class Job:
    """A mutant, or None for tests without any change, and what to run."""

    mutant: Mutant | None
    tests: list[str]
    seconds: float  # that the tests take without a change
    imports: bool

    def unchanged(self) -> Job:
        return replace(self, mutant=None)


def verdict(ended: int | str) -> str:
    """2 and 4 come when something that tests import, or are parametrised with, is broken."""
    if ended in (3, 5):
        raise RuntimeError("the tests of a mutant were not run as they should be; run them by hand")
    return ended if isinstance(ended, str) else "survived" if ended == 0 else "killed"


class Chosen(Seeded):
    """A pytest plugin: of what is collected, the tests of a job in its order, and those that only the change made."""

    def __init__(self, tests: list[str], known: Collection[str]) -> None:
        self.order, self.known = {name: i for i, name in enumerate(tests)}, known

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        kept = [item for item in items if item.nodeid in self.order or item.nodeid not in self.known]
        items[:] = sorted(kept, key=lambda item: self.order.get(item.nodeid, len(self.order)))


def imported(copy: Path, job: Job, known: Collection[str]) -> str:
    """The verdict on a job in a process that imports the library; the first test file alone first, to collect less."""
    files = list(dict.fromkeys(test.split("::")[0] for test in job.tests))

    def run(some: list[str]) -> int:
        import pytest

        code = int(pytest.main([*ASKED, "-x", *some], plugins=[Chosen(job.tests, known)]))
        home = getattr(sys.modules.get("mpkit"), "__file__", None) or str(copy)
        return code % 5 if home.startswith(str(copy)) else 3  # 5: the change left no test of this name

    with written(copy, job.mutant):
        for some in (files[:1], files[1:]):
            found = verdict(forked(lambda some=some: run(some), 60 + 4 * job.seconds)) if some else "survived"
            if found != "survived":
                return found
    return "survived"


class Server(Seeded):
    """A pytest plugin: collects all tests, and instead of running them forks for each job that is asked for."""

    def __init__(self, copy: Path, jobs: list[Job], asked: TextIO, told: TextIO) -> None:
        self.copy, self.jobs, self.asked, self.told, self.why = copy, jobs, asked, told, ""

    def pytest_runtestloop(self, session: Any) -> bool:
        """A number comes, a verdict goes."""
        self.session, self.items = session, {item.nodeid: item for item in session.items}
        self.functions: dict[str, list[FunctionType]] = {}
        gc.unfreeze()  # what is frozen is not listed
        for found in gc.get_objects():
            if type(found) is FunctionType and found.__code__.co_filename.startswith(str(self.copy / "mpkit")):
                self.functions.setdefault(found.__code__.co_filename, []).append(found)
        gc.freeze()  # a collection in a fork would copy every page
        print("ready", file=self.told, flush=True)
        for line in self.asked:
            number = int(line)
            job = self.jobs[number] if number >= 0 else self.jobs[~number].unchanged()
            print(self.verdict(job), file=self.told, flush=True)
        return True

    def verdict(self, job: Job) -> str:
        with written(self.copy, job.mutant) as source:
            ended = forked(lambda: self.run(job, source), 20 + 4 * job.seconds)
        return "elsewhere" if ended == ELSEWHERE else verdict(ended)

    def run(self, job: Job, source: bytes) -> int:
        if job.mutant is not None:
            path = str(self.copy / job.mutant.file)
            if not patch(path, source, job.mutant.applied(source), self.functions.get(path, [])):
                return ELSEWHERE
        items = [self.items[name] for name in job.tests]
        for item, following in zip(items, [*items[1:], None]):
            try:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                passed = not self.session.testsfailed
            except BaseException:  # pytest lets a Ctrl-C through, and there may be no memory left for its report
                passed = False
            if not passed:
                (self.copy / "failed").write_text(f"{item.nodeid} {self.why}")
                return 1
        return 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        """What is told of a test that fails without a change: it comes and goes, and may not come again."""
        if report.failed:
            self.why = f"({report.when}: {report.longreprtext[-2000:]})"


def patch(path: str, before: bytes, after: bytes, functions: list[FunctionType]) -> int:
    """Give the functions of a file the code that they have in the changed source; how many have another one now."""
    old, new = (compile(source, path, "exec", dont_inherit=True) for source in (before, after))
    changed = {a: b for a, b in _pairs(old, new) if a != b}
    found = [f for f in functions if f.__code__ in changed]
    for function in found:
        function.__code__ = changed[function.__code__]
    return len(found)


def _pairs(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    yield old, new
    inner = ([c for c in code.co_consts if isinstance(c, CodeType)] for code in (old, new))
    for pair in zip(*inner):
        yield from _pairs(*pair)


@contextlib.contextmanager
def served(copy: Path, files: list[str], jobs: list[Job]) -> Iterator[Callable[[int], str]]:
    """A function: number of a job -> its verdict, or "elsewhere"; ~number runs its tests without a change."""
    (asked, ask), (tell, told) = os.pipe(), os.pipe()
    log = copy / "server.log"
    child = os.fork()
    if child == 0:
        try:
            import pytest

            os.close(ask)  # or the end of the asking would never be seen
            for stream in (1, 2):
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
            pytest.main([*ASKED, *files], plugins=[Server(copy, jobs, os.fdopen(asked), os.fdopen(told, "w"))])
        finally:
            os._exit(0)
    os.close(asked)
    os.close(told)
    with os.fdopen(ask, "w") as questions, os.fdopen(tell) as answers:

        def answer() -> str:
            if found := answers.readline().strip():
                return found
            raise RuntimeError(f"the process that holds the tests has ended:\n{log.read_text()[-3000:]}")

        def verdict_on(number: int) -> str:
            print(number, file=questions, flush=True)
            return answer()

        answer()  # that it is ready: until it has imported the library no file of that may change
        yield verdict_on
    os.waitpid(child, 0)


# --- all of them


def run_all(
    copy: Path, sample: list[Mutant], files: dict[str, list[str]], shared: list[str], options: Any
) -> Iterator[tuple[Mutant, str]]:
    """(mutant, verdict) one after the other; `files`: the test files of each module, `shared`: those of all."""
    every = sorted({*shared, *(name for names in files.values() for name in names)})
    known, jobs = known_tests(copy, every, options.map), []
    for mutant in sample:
        tests = known.chosen(mutant, tuple(files[mutant.module]), options.budget)
        jobs.append(Job(mutant, tests, sum(map(known.seconds.get, tests)), known.needs_import(mutant)))
    if not jobs:
        return
    end = time.monotonic() + 60 * options.minutes
    with served(copy, every, jobs) as ask:
        for number, job in enumerate(jobs):
            if time.monotonic() > end:
                return
            began = time.monotonic()
            if number % options.control == options.control - 1:
                _check_control(job, imported(copy, job.unchanged(), known.seconds) if job.imports else ask(~number))
            found = "survived" if not job.tests else "elsewhere" if job.imports else ask(number)
            if found == "elsewhere":
                found = imported(copy, job, known.seconds)
            seconds = time.monotonic() - began
            where = f"{job.mutant.file}:{job.mutant.line} {job.mutant.old} -> {job.mutant.new}"
            print(f"{found:9} {where} [{len(job.tests)} tests{' *' * job.imports}, {seconds:.1f} s]", flush=True)
            yield job.mutant, found


def _check_control(job: Job, found: str) -> None:
    if found != "survived":
        where = (Path.cwd() / "failed").read_text() if found == "killed" and not job.imports else "a test"
        raise RuntimeError(f"without any change {where} of {job.mutant.name} is {found}: it proves nothing")
