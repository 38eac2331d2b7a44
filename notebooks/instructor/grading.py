"""Points of one submission: its code runs in a kernel of its own, the tests run here and only ask it for values.

A test of a lab calls the student's functions by their names, as in the notebook. Here these names are `Remote`s: a call
goes to the kernel as JSON, and so does its result. A function of the lab that is given an answer runs there too, from
the lab's own text. Where a cell never ends, or ends its process, a new kernel runs all the others again.
"""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import plain
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from mpkit import handin
from mpkit.handin import is_answer, is_parameters, mark

HERE = Path(__file__).resolve().parent
# a kernel that was stopped leaves a task, whose traceback would stand between the rows, and parse while a lab is parsed
logging.getLogger("asyncio").setLevel(logging.CRITICAL)
WORDS, VALUE = 300, 2**22  # characters of what is told of a question, and of what is read of an answer's values
KERNEL = [sys.executable, "-m", "ipykernel_launcher", "-f"]  # the name of its connection file follows
KEPT = ("PATH", "PYTHONPATH", "MPKIT_DATA", "LD_LIBRARY_PATH", "LANG")  # of the environment; what a kernel gets of it
# 6 GiB of data, files of 64 MiB; then a cover over each folder that is named before "--", and what is named after it
COVERED = "ulimit -c 0; ulimit -d 6291456; ulimit -f 131072; "
COVERED += 'while [ "$1" != -- ]; do mount -t tmpfs none "$1"; shift; done; shift; exec "$@"'
# the text of `plain` becomes a module in the kernel, which no name of the notebook leads to
PLAIN = "__import__('sys').modules['_plain']"
TEXT = Path(plain.__file__).read_text(encoding="utf-8")
BEGIN = f"{PLAIN} = __import__('types').ModuleType('_plain')\nexec({TEXT!r}, vars({PLAIN}))"


class AnswerError(Exception):
    """An answer raised an error, never ended, ended its process, or returned no plain value."""


@dataclass
class Graded:
    """Points by question; `notes` says why points are missing, `texts` holds what is read by a person."""

    variant: int
    notes: list[str]
    points: Counter[str] = field(default_factory=Counter)
    possible: Counter[str] = field(default_factory=Counter)
    texts: dict[str, str] = field(default_factory=dict)


def grade(submission: Any, source: Any, seconds: float = 60, hidden: tuple[Path, ...] = (HERE,)) -> Graded:
    """Score every question of a submission.

    An answer that lost points gives way to the right one before the next is tested: a mistake costs its own question.

    Args:    source: the instructor's notebook of the lab; seconds: for a cell, and for a question to the kernel;
             hidden: folders that the submission must not see.
    Raises:  RuntimeError if a given cell of the lab fails, which is the grading machine's fault and costs nobody a
             point.
    """
    answers, notes = handin.answers(submission, source)
    graded = Graded(handin.variant_of(submission) or 0, notes)
    last, right = "", ""
    with closing(Session(seconds, hidden)) as session:
        for cell in source["cells"]:
            name, most, code = mark(cell).get("grade_id", ""), mark(cell).get("points", 0), cell["cell_type"] == "code"
            question, note = name.rpartition("_")[0], ""
            if is_answer(cell) and code:
                if graded.points[last] < graded.possible[last]:
                    session.run(right)
                last, right = question, cell["source"]
                note = session.answered(answers[name], cell)
            elif is_answer(cell):
                graded.texts[question] = "\n\n".join(filter(None, answers[name]))
            elif mark(cell).get("grade"):
                note = session.tested(cell)
                graded.possible[question] += most
                graded.points[question] += 0 if note else most
            elif code and "show" not in cell["metadata"].get("tags", []):  # such a cell only shows figures
                session.given(f"variant = {graded.variant}" if is_parameters(cell) else cell["source"])
            notes += [f"{name}: {note}"] if note else []
    return graded


class Session:
    """A lab with one submission's answers: its cells in order, in a kernel that is made anew where one has gone."""

    def __init__(self, seconds: float, hidden: tuple[Path, ...] = ()) -> None:
        self.here: dict[str, Any] = {"__name__": "lab"}  # the lab's own names, for its tests
        self._make, self._kernel, self._ran = lambda: kernel(seconds, hidden), ExitStack(), list[str]()
        self._client: NotebookClient | None = None

    def given(self, source: str) -> None:
        """A cell of the lab itself, which runs there and here; RuntimeError if it fails."""
        if error := self.run(source):
            raise RuntimeError(f"a given cell of the lab {error} here; grade where mpkit[lab] is installed, in quiet")
        _run_here(source, self.here)
        for name, node in handin.defined(source).items():
            if isinstance(node, ast.FunctionDef):
                self.here[name] = self._there(node, self.here[name], always=False)

    def answered(self, sources: list[str], cell: Any) -> str:
        """Run the cells of an answer; from now on its functions can be asked. What went wrong, "" where nothing did."""
        errors = [error for source in sources if (error := self.run(source))]
        self.here |= {name: Remote(name, self) for name in handin.defined(cell["source"])}
        return f"its cell {errors[-1]}" if errors else ""

    def tested(self, cell: Any) -> str:
        """Run a test here: why it gives no points, "" where it does.

        Beside the names of the lab a test may use `f.each(many)`, `names_used(f, *arguments)`: what the notebook's own
        code mentions while f runs; and `there(function)`, which runs beside the answers.
        """
        tools: dict[str, Any] = {"names_used": lambda function, *given: self.ask(function.name, [given], {})[1]}
        tools["there"] = lambda f: self._there(handin.defined(cell["source"])[f.__name__], f)
        try:
            _run_here(cell["source"], self.here | tools)
        except Exception as error:
            told = isinstance(error, AssertionError | AnswerError)
            return (str(error) if told else f"{type(error).__name__}: {error}")[:WORDS] or "a check fails"
        return ""

    def run(self, source: str) -> str:
        """What went wrong in a cell there; it runs again in every new kernel unless it has ended this one."""
        error, _ = self._execute(source)
        self._ran += [source] if self._client else []
        return error

    def ask(self, function: str, calls: list[Any], named: Any) -> tuple[list[Any], set[str]]:
        """What each call of a function returns there, as plain values, and the names that its code mentions.

        Raises:  AnswerError; TypeError if the arguments are no plain values, and nothing that both sides have made.
        """
        request = json.dumps(plain.written([function, calls, named], {id(v): k for k, v in self.here.items()}))
        error, outputs = self._execute(f"{PLAIN}.answer(globals(), {request!r})")
        shown = [output.data[plain.KIND] for output in outputs if plain.KIND in output.get("data", {})]
        try:
            values, mentioned = plain.read(json.loads(shown[-1][:VALUE]), {})
            return [values[i] for i in range(len(calls))], set(mentioned)
        except Exception:  # the kernel may have sent anything, or nothing
            call = f"{function}({', '.join(map(repr, calls[0]))})" if len(calls) == 1 else function
            why = error or "gave nothing that can be read: an error without words, or too long a value"
            raise AnswerError(f"{call if len(call) < 80 else function} {why}") from None

    def _execute(self, source: str) -> tuple[str, list[Any]]:
        """(what went wrong or "", outputs) of some code; a kernel that has gone is closed, and the next a new one."""
        if self._client is None:
            self._client = self._kernel.enter_context(self._make())
            for earlier in (BEGIN, *self._ran):
                _executed(self._client, earlier)
        error, outputs = _executed(self._client, source)
        if outputs is None:
            self.close()
        return error, outputs or []

    def _there(self, node: Any, function: Callable[..., Any], always: bool = True) -> Callable[..., Any]:
        """The function of a cell as one that runs beside the answers; it takes and returns plain values.

        One of the lab (`always=False`) does so where it is given an answer; else it says here what is right.
        """
        node.decorator_list = []

        def called(*given: Any, **named: Any) -> Any:
            if not always and not any(isinstance(part, Remote) for part in (*given, *named.values())):
                return function(*given, **named)
            if error := self.run(ast.unparse(node)):
                raise AnswerError(f"{function.__name__} {error}")
            return self.ask(function.__name__, [given], named)[0][0]

        return called

    def close(self) -> None:
        self._client = None
        with suppress(RuntimeError, OSError):
            self._kernel.close()


def _executed(client: NotebookClient, source: str) -> tuple[str, list[Any] | None]:
    """("" or what went wrong, outputs) of some code; None where its kernel has gone."""
    client.nb.cells = [cell] = [nbformat.v4.new_code_cell(source)]
    try:
        client.execute_cell(cell, 0)
    except Exception as error:  # also of what speaks with a kernel that answers in a way of its own
        known = {"CellTimeoutError": f"was stopped after {client.timeout:g} s", "DeadKernelError": "ended its process"}
        return known.get(type(error).__name__, f"broke its kernel: {error!r}"[:WORDS]), None
    told = [f"raised {o.ename}: {o.evalue}".splitlines()[0] for o in cell.outputs if o.output_type == "error"]
    return (told[0][:WORDS] if told else ""), cell.outputs


class Remote:
    """A function of the submission, called as if it were here."""

    def __init__(self, name: str, session: Session) -> None:
        self.name, self._session = name, session

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._session.ask(self.name, [given], named)[0][0]

    def each(self, arguments: Any) -> list[Any]:
        """The results for many arguments, in one question to the kernel."""
        return self._session.ask(self.name, [(argument,) for argument in arguments], {})[0]


def _run_here(source: str, space: dict[str, Any]) -> None:
    """Run the lab's own code in this process, quietly."""
    with redirect_stdout(io.StringIO()):
        exec(source, space)


@cache
def walls() -> list[str]:
    """The command that shuts a kernel in: no network, no other processes, no life after the grader's; [] if none."""
    # a user who is root in there only, without network, with processes and mounts of its own
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", "-U", "-r", "-n", "-p", "-m", "-f"]
    command += ["--mount-proc", "--kill-child"]
    works = shutil.which(command[0]) and subprocess.run([*command, "true"], capture_output=True).returncode == 0
    return command if works else []


class Silent(NotebookClient):
    """What a submission prints is read and forgotten."""

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        return None if msg["msg_type"] == "stream" else super().process_message(msg, cell, cell_index)


@contextmanager
def kernel(seconds: float, hidden: tuple[Path, ...] = ()) -> Iterator[NotebookClient]:
    """A new kernel, which ends with all that it has started; the folders in `hidden` are empty in there."""
    with tempfile.TemporaryDirectory(prefix="lab-") as home:
        manager = AsyncKernelManager(transport="tcp" if os.name == "nt" else "ipc", connection_file=f"{home}/c.json")
        shell = ["sh", "-c", COVERED, "sh", *(map(str, hidden) if walls() else ()), "--"] if os.name != "nt" else []
        command = [*walls(), *shell, *KERNEL, f"{home}/c.json"]
        manager.format_kernel_cmd = lambda extra_arguments=None: command
        environment = {key: os.environ[key] for key in KEPT if key in os.environ}
        environment |= {"HOME": home, "TMPDIR": home, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
        client = Silent(nbformat.v4.new_notebook(), km=manager, allow_errors=True, shutdown_kernel="immediate")
        client.timeout = seconds
        with client.setup_kernel(cleanup_kc=True, cwd=home, env=environment):
            yield client
