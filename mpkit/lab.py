"""`mpkit lab`: copy the lessons and labs into FOLDER and open JupyterLab there.

A file that you changed is never written over: delete or rename it to get the lesson again. FOLDER stands first and is
mpkit-lessons when it is left out. Other options go to JupyterLab, for instance --no-browser, --port=8899, --ip=0.0.0.0.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from mpkit.files import write_whole

DEFAULT = "mpkit-lessons"
FIRST_LESSON = "00_start_here.ipynb"
RECORD = ".mpkit-lessons.json"  # file -> SHA-256 of what was copied: what differs from it is the reader's own work


def main(arguments: Sequence[str] = ()) -> int:
    """Copy what is new, say what was kept, open JupyterLab at the first lesson; the exit status."""
    folder, copy_only, others = _asked(arguments)
    try:
        copied, kept = copy_lessons(folder)
    except OSError as error:
        return _fail(f"the lessons could not be copied into {folder} ({error}); name a folder that you may write in")
    print(f"mpkit: files that are new in {folder.resolve()}: {copied}", flush=True)
    print(f"mpkit: kept as you changed them: {', '.join(kept) or 'none'}", flush=True)
    if copy_only:
        return 0
    if find_spec("jupyterlab") is None:
        return _fail("JupyterLab is not installed here; pip install 'mpkit[lab]'")
    # not the file itself: the address that the server prints would lead to an empty launcher
    command = [sys.executable, "-m", "jupyterlab", f"--LabApp.default_url=/lab/tree/{FIRST_LESSON}", *others]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")  # containers and course servers
    if os.name == "nt":  # there exec would start a second process and end this one
        return subprocess.call(command, cwd=folder)
    os.chdir(folder)
    os.execv(command[0], command)  # the server gets the signals that were meant for this command


def _asked(arguments: Sequence[str]) -> tuple[Path, bool, list[str]]:
    """The folder, whether to copy only, and the options of JupyterLab; ends the process where they make no sense."""
    words = list(arguments)
    named = words.pop(0) if words and not words[0].startswith("-") else DEFAULT
    usage = "mpkit lab [FOLDER] [--copy-only] [OPTIONS OF JUPYTER LAB]"
    parser = argparse.ArgumentParser(usage=usage, description=__doc__, allow_abbrev=False)
    parser.add_argument("--copy-only", action="store_true", help="copy, and do not start JupyterLab")
    options, others = parser.parse_known_args(words)
    if not named or (others and (options.copy_only or not others[0].startswith("-"))):  # before anything is copied
        parser.error(f"{others[0] if others else repr(named)} means nothing here; FOLDER stands first, . is this one")
    return Path(named).expanduser(), options.copy_only, others


def installed_lessons() -> Path | None:
    """The lessons that came in the wheel; None in a checkout."""
    folder = Path(__file__).resolve().parent / "share" / "notebooks"
    return folder if folder.exists() else None


def copy_lessons(folder: str | os.PathLike[str]) -> tuple[int, list[str]]:
    """Copy lessons and released labs into `folder`; a file that its reader changed, or a link, stays as it is.

    A file is the reader's when it differs both from the lesson of today and from what an earlier copy wrote.

    Returns: how many files were written, and the names of those kept though a lesson of that name differs.
    Raises:  OSError if the folder cannot be written.
    """
    with tempfile.TemporaryDirectory() as scratch:
        return _copy(installed_lessons() or shipped_lessons(Path(scratch)), Path(folder))


def shipped_lessons(scratch: Path) -> Path:
    """What would travel in the wheel, made from the checkout that this file stands in."""
    script = Path(__file__).resolve().parent.parent / "notebooks" / "ship.py"
    done = subprocess.run([sys.executable, str(script), str(scratch / "share")], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise OSError(f"{script.name} could not gather them in {scratch}: {done.stderr.strip().splitlines()[-1]}")
    return scratch / "share" / "notebooks"


def _copy(lessons: Path, folder: Path) -> tuple[int, list[str]]:
    record, written, kept = _read_record(folder / RECORD), 0, []
    try:
        for source in sorted(path for path in lessons.rglob("*") if path.is_file() and path.suffix != ".pyc"):
            name = source.relative_to(lessons).as_posix()
            content = as_opened(source.read_bytes()) if source.suffix == ".ipynb" else source.read_bytes()
            target, new = folder / name, _sha256(content)
            found = _sha256(target.read_bytes()) if target.is_file() and not target.is_symlink() else ""
            if os.path.lexists(target) and found not in (record.get(name), new):
                kept.append(name)
                continue
            if found != new:
                _write(target, content)
                written += 1
            record[name] = new
    finally:  # after an interrupt too: what was copied by then is no reader's work
        if record:
            _write(folder / RECORD, json.dumps(record, indent=1).encode())
    return written, kept


def as_opened(content: bytes) -> bytes:
    """A stored notebook as its reader first meets it: without results and without hidden tests."""
    notebook = json.loads(content)
    notebook["cells"] = [c for c in notebook["cells"] if "test" not in c["metadata"].get("tags", ())]
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    return (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode()


def _read_record(path: Path) -> dict[str, str]:
    """The hashes of what was copied; nothing where the record is missing or damaged, so that every file is kept."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _write(path: Path, content: bytes) -> None:
    write_whole(path, lambda file: file.write(content))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _fail(sentence: str) -> int:
    print(f"mpkit: {sentence}", file=sys.stderr)
    return 1
