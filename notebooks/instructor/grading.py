"""Points of one submission: its code runs in a kernel of its own, the tests run here and only ask it for values.

A test of a lab calls the student's functions by their names, as in the notebook. Here these names are `Remote`s: a call
goes to the kernel as JSON, and so does its result. A function of the lab that is given an answer runs there too, from
the lab's own text. Where a cell never ends, or ends its process, a new kernel runs all the others again.
"""

from __future__ import annotations

import ast
import inspect
import json
import linecache
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import plain
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError

import mpkit
from mpkit import handin
from mpkit.handin import is_answer, is_parameters, mark

HERE = Path(__file__).resolve().parent
WORDS = 300  # characters of what is told of a question
KEPT = ("PATH", "MPKIT_DATA", "LD_LIBRARY_PATH", "LANG")  # of the environment; what a kernel gets of it
# 6 GiB of data, files of 64 MiB; then a cover over each folder that is named before "--", and what is named after it
LIMITS = "ulimit -c 0; ulimit -d 6291456; ulimit -f 131072; "
COVERS = 'while [ "$1" != -- ]; do mount -t tmpfs none "$1"; shift; done; shift; exec "$@"'
# the text of `plain` becomes a module in the kernel, which no name of the notebook leads to
PLAIN = "__import__('sys').modules['_plain']"
BEGIN = f"{PLAIN} = __import__('types').ModuleType('_plain')\nexec({inspect.getsource(plain)!r}, vars({PLAIN}))"


class AnswerError(Exception):
    """An answer raised an error, never ended, ended its process, or returned no plain value."""


@dataclass
class Graded:
    """Points by question; `notes` says why points are missing, `texts` holds what is read by a person."""

    lab: str
    variant: int | None
    notes: list[str]
    points: dict[str, float] = field(default_factory=dict)
    possible: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    by_hand: dict[str, float] = field(default_factory=dict)


def grade(submission: Any, lab: str, source: Any, seconds: float = 60, hidden: tuple[Path, ...] = (HERE,)) -> Graded:
    """Score every question of a submission.

    Args:    source: the instructor's notebook of the lab; seconds: for a cell, and for a question to the kernel;
             hidden: folders that the submission must not see.
    Raises:  RuntimeError if a given cell of the lab fails, which is the grading machine's fault and costs nobody a
             point.
    """
    found = handin.answers(submission, source)
    graded = Graded(lab, handin.variant_of(submission), found.notes)
    solutions = {mark(cell)["grade_id"]: cell["source"] for cell in source["cells"] if is_answer(cell)}
    session = Session(lambda: kernel(seconds, hidden))
    try:
        for cell in source["cells"]:
            name = mark(cell).get("grade_id", "")
            question = name.rpartition("_")[0]
            if cell["cell_type"] != "code":
                if mark(cell).get("grade"):
                    graded.by_hand[question], graded.texts[question] = mark(cell)["points"], found.text.get(name, "")
            elif is_answer(cell):
                failed = session.answered(found.code.get(name, []), cell)
                graded.notes += [f"{name} {failed}"] if failed else []
            elif mark(cell).get("grade"):
                note, most = session.tested(cell, solutions, found.code), mark(cell)["points"]
                graded.possible[question] = graded.possible.get(question, 0) + most
                graded.points[question] = graded.points.get(question, 0) + (0 if note else most)
                graded.notes += [f"{name}: {note}"] if note else []
            else:
                number = f"variant = {graded.variant or 0}"
                session.given({**cell, "source": number} if is_parameters(cell) else cell)
    finally:
        session.close()
    return graded


class Session:
    """A lab with one submission's answers: its cells in order, in a kernel that is made anew where one has gone."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.here: dict[str, Any] = {"__name__": "lab"}  # the lab's own names, for its tests
        self._make, self._ran, self._lent = make, list[str](), list[str]()
        self._context: Any = None
        self._client: NotebookClient | None = None

    def given(self, cell: Any) -> None:
        """A cell of the lab itself, which runs there and here; one that only shows figures (tag "show") does not.

        Raises:  RuntimeError if it fails.
        """
        if "show" in cell["metadata"].get("tags", []):
            return
        source = cell["source"]
        if error := self.run(source):
            raise RuntimeError(f"a given cell of the lab fails here ({error}); grade where mpkit[lab] is installed")
        _run_here(source, self.here)
        for name in handin.defined(source):
            if isinstance(self.here[name], types.FunctionType):
                self.here[name] = _there(self.here[name], self, always=False)

    def answered(self, sources: list[str], cell: Any) -> str:
        """Run the cells of an answer; from now on its functions can be asked. What went wrong, "" where nothing did."""
        errors = [error for source in sources if (error := self.run(source))]
        self.here |= {name: Remote(name, self) for name in handin.defined(cell["source"])}
        return errors[-1] if errors else ""

    def tested(self, cell: Any, solutions: dict[str, str], own: dict[str, list[str]]) -> str:
        """Run a test here: why it gives no points, "" where it does.

        Beside the names of the lab a test may use `f.each(many)`, `names_used(f, *arguments)`: what the notebook's own
        code mentions while f runs; `there(function)`, which runs beside the answers; and `lend("lab01_q3_answer")`,
        so that a mistake in an earlier answer costs nothing here.
        """

        def lend(name: str) -> None:
            self._execute(solutions[name])
            self._lent.extend(own.get(name, [solutions[name]]))

        tools: dict[str, Any] = {"there": lambda function: _there(function, self), "lend": lend}
        tools["names_used"] = lambda function, *given: self.ask(function.name, [list(given)], {})[1]
        try:
            _run_here(cell["source"], {**self.here, **tools})
        except Exception as error:
            told = isinstance(error, AssertionError | AnswerError)
            return (str(error) if told else f"{type(error).__name__}: {error}")[:WORDS] or "a check fails"
        finally:
            for source in self._lent:
                self.run(source)
            self._lent.clear()
        return ""

    def run(self, source: str) -> str:
        """What went wrong in a cell there; it runs again in every new kernel unless it has ended this one."""
        try:
            error, _ = self._execute(source)
        except AnswerError as stopped:
            return str(stopped)
        self._ran.append(source)
        return error

    def ask(self, function: str, calls: list[Any], named: Any) -> tuple[list[Any], set[str]]:
        """What each call of a function returns there, as plain values, and the names that its code mentions.

        Raises:  AnswerError; TypeError if the arguments are no plain values, and nothing that both sides have made.
        """
        names = {id(value): name for name, value in self.here.items()}
        request = json.dumps([function, plain.written(calls, names), plain.written(named, names)])
        try:
            error, outputs = self._execute(f"{PLAIN}.answer(globals(), {request!r})")
        except AnswerError as stopped:
            raise AnswerError(f"{function} {stopped}") from None
        shown = [output.data[plain.KIND] for output in outputs if plain.KIND in output.get("data", {})]
        if error or not shown:
            call = f"{function}({', '.join(map(repr, calls[0]))})" if len(calls) == 1 else function
            raise AnswerError(f"{call if len(call) < 80 else function} raised {error or 'an error without words'}")
        try:
            values, mentioned = json.loads(shown[-1][: plain.LONGEST])
            values = plain.read(values, {})
            return [values[i] for i in range(len(calls))], set(mentioned)
        except Exception as error:  # the kernel may have sent anything
            raise AnswerError(f"{function} returned no plain value ({type(error).__name__})") from None

    def _execute(self, source: str) -> tuple[str, list[Any]]:
        """("" or what went wrong, outputs) of some code; AnswerError where the kernel is gone, which is closed then."""
        if self._client is None:
            self._context = self._make()
            self._client = self._context.__enter__()
            for earlier in (BEGIN, *self._ran):
                with suppress(AnswerError):
                    _executed(self._client, earlier)
        try:
            return _executed(self._client, source)
        except AnswerError:
            self.close()
            raise

    def close(self) -> None:
        if self._context is not None:
            with suppress(RuntimeError, OSError):
                self._context.__exit__(None, None, None)
        self._context = self._client = None


def _executed(client: NotebookClient, source: str) -> tuple[str, list[Any]]:
    client.nb.cells = [cell] = [nbformat.v4.new_code_cell(source)]
    try:
        client.execute_cell(cell, 0)
    except CellTimeoutError:
        raise AnswerError(f"was stopped after {client.timeout:g} s") from None
    except DeadKernelError:
        raise AnswerError("ended its process") from None
    except Exception as error:  # of what speaks with a kernel that answers in a way of its own
        raise AnswerError(f"broke its kernel ({type(error).__name__})") from None
    told = [f"{o.ename}: {o.evalue}".strip().splitlines()[0] for o in cell.outputs if o.output_type == "error"]
    return (told[0][:WORDS] if told else ""), cell.outputs


class Remote:
    """A function of the submission, called as if it were here."""

    def __init__(self, name: str, session: Session) -> None:
        self.name, self._session = name, session

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._session.ask(self.name, [list(given)], named)[0][0]

    def each(self, arguments: Any) -> list[Any]:
        """The results for many arguments, in one question to the kernel."""
        return self._session.ask(self.name, [[argument] for argument in arguments], {})[0]


def _there(function: Callable[..., Any], session: Session, always: bool = True) -> Callable[..., Any]:
    """The function as one that runs beside the answers, from its own text; it takes and returns plain values.

    One of the lab (`always=False`) does so where it is given an answer; else it says here what is right.
    """
    tree = ast.parse(inspect.getsource(function))
    tree.body[0].decorator_list = []  # type: ignore[attr-defined]

    def called(*given: Any, **named: Any) -> Any:
        if not always and not any(isinstance(part, Remote) for part in (*given, *named.values())):
            return function(*given, **named)
        if error := session.run(ast.unparse(tree)):
            raise AnswerError(f"{function.__name__} {error}")
        return session.ask(function.__name__, [list(given)], named)[0][0]

    return called


def _run_here(source: str, space: dict[str, Any]) -> None:
    """Run the lab's own code in this process, quietly, and so that `inspect` finds the text of its functions."""
    name = f"<lab {abs(hash(source))}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        exec(compile(source, name, "exec"), space)


@cache
def walls() -> list[str]:
    """The command that shuts a kernel in: no network, no other processes, no life after the grader's; [] if none."""
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--user", "--map-root-user", "--net", "--pid", "--fork"]
    command += ["--mount", "--mount-proc", "--kill-child"]
    works = shutil.which(command[0]) and subprocess.run([*command, "true"], capture_output=True).returncode == 0
    return command if works else []


class Silent(NotebookClient):
    """What a submission prints is read and forgotten."""

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        return None if msg["msg_type"] == "stream" else super().process_message(msg, cell, cell_index)


class Kernel(AsyncKernelManager):
    """A kernel that is started by a command of its own."""

    argv: list[str]

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(argv=self.argv, display_name="submission", language="python")


@contextmanager
def kernel(seconds: float, hidden: tuple[Path, ...] = ()) -> Iterator[NotebookClient]:
    """A new kernel, which ends with all that it has started; the folders in `hidden` are empty in there."""
    with tempfile.TemporaryDirectory(prefix="lab-") as home:
        connection = str(Path(home, "c.json"))
        manager = Kernel(transport="tcp" if os.name == "nt" else "ipc", connection_file=connection)
        covered = ["sh", "-c", LIMITS + COVERS, "sh", *(map(str, hidden) if walls() else ()), "--"]
        manager.argv = [*walls(), *(covered if os.name != "nt" else ())]
        manager.argv += [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        environment = {key: os.environ[key] for key in KEPT if key in os.environ}
        environment |= {"HOME": home, "TMPDIR": home, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
        environment["PYTHONPATH"] = str(Path(mpkit.__file__).parents[1])
        client = Silent(nbformat.v4.new_notebook(), km=manager, allow_errors=True, shutdown_kernel="immediate")
        client.timeout = seconds
        with client.setup_kernel(cleanup_kc=True, cwd=home, env=environment):
            yield client
