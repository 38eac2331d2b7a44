"""The command `mpkit`: subcommands are found and refused, and lessons are copied without touching a reader's work."""

import contextlib
import json
import os
import runpy
import subprocess
import sys

import pytest
from support import LESSONS, ROOT

from mpkit import __version__, command, info, lab


def test_help_names_every_subcommand_and_an_unknown_one_is_refused_with_them(capsys):
    assert command.main(["--help"]) == command.main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in command.COMMANDS)
    assert command.main(["lba"]) == 2
    assert "there is no 'lba'; the subcommands are lab, check, info" in capsys.readouterr().err


@pytest.mark.parametrize("name", command.COMMANDS)
def test_every_subcommand_exists_and_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main([name, "--help"])
    assert stopped.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_the_help_of_the_command_imports_no_torch():
    code = "import sys; from mpkit.command import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0


def test_info_tells_version_data_and_device_and_what_is_missing(monkeypatch, capsys):
    assert command.main(["info"]) == 0
    said = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert said["mpkit"].startswith(__version__)
    assert f"digits, {len(list((ROOT / 'data' / 'traces').glob('*.npz')))} traces" in said["data"]
    assert {"device", "python", "torch", "cuda", "packages", "missing"} <= said.keys()
    monkeypatch.setenv("MPKIT_DEVICE", "gpu")
    monkeypatch.setattr(info, "PACKAGES", ("numpy", "no-such-thing"))
    said = dict(info.facts())
    assert said["missing"] == "no-such-thing; pip install 'mpkit[lab]'"
    assert said["device"].startswith("none: MPKIT_DEVICE must name a device")


FIRST, SECOND, LAB = NAMES = ("00_start_here.txt", "01_number_formats.txt", "labs/lab01.txt")


@pytest.fixture
def lessons(tmp_path, monkeypatch):
    """A folder of lessons as the wheel has it, installed."""
    folder = tmp_path / "lessons"
    (folder / "labs").mkdir(parents=True)
    for name in NAMES:
        (folder / name).write_text(f"{name}, first edition")
    monkeypatch.setattr(lab, "installed_lessons", lambda: folder)
    monkeypatch.setattr(lab.os, "execv", lambda path, command: pytest.fail("JupyterLab was started"))
    monkeypatch.chdir(tmp_path)
    return folder


def test_lessons_are_copied_once_and_brought_up_to_date_where_nobody_changed_them(lessons, tmp_path):
    mine = tmp_path / "mine"
    assert [lab.copy_lessons(mine) for _ in "ab"] == [(3, []), (0, [])]
    (lessons / LAB).write_text("second edition")
    (mine / FIRST).unlink()
    assert lab.copy_lessons(mine) == (2, [])
    assert (mine / LAB).read_text() == "second edition"


@pytest.mark.parametrize("record", [None, "", '{"00_st', "[1]"], ids=["whole", "lost", "damaged", "of another kind"])
def test_a_changed_file_is_never_written_over(lessons, tmp_path, record):
    mine = tmp_path / "mine"
    lab.copy_lessons(mine)
    (mine / FIRST).write_text("my answers")
    if record is not None:
        (mine / lab.RECORD).write_text(record)
    for edition in ("second", "third"):
        (lessons / FIRST).write_text(f"{edition} edition")
        assert lab.copy_lessons(mine) == (0, [FIRST])
        assert (mine / FIRST).read_text() == "my answers"


def test_work_in_the_folder_before_the_first_copy_is_kept(lessons, tmp_path):
    mine, elsewhere = tmp_path / "mine", tmp_path / "elsewhere.txt"
    (mine / LAB).mkdir(parents=True)  # a folder under the name of a lesson
    (mine / FIRST).write_text("my answers")
    elsewhere.write_text("mine too")
    (mine / SECOND).symlink_to(elsewhere)
    written, kept = lab.copy_lessons(mine)
    assert (written, set(kept), elsewhere.read_text()) == (0, {*NAMES}, "mine too")


SAYS = {  # the words after `mpkit lab`, the exit status -> what is said
    ("taken", "--copy-only", 1): "could not be copied into taken",
    ("mine", 1): "pip install 'mpkit[lab]'",
    ("mine", "--copy-only", 0): "mine: 3",
    ("", "--copy-only", 2): "'' means nothing here",
    ("--copy-only", "mine", 2): "mine means nothing here; FOLDER stands first",
    ("a", "b", 2): "b means nothing here; FOLDER stands first",
}


@pytest.mark.parametrize("words", SAYS)
def test_lab_says_what_it_did_or_needs_and_a_wrong_word_copies_nothing(words, lessons, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lab, "find_spec", lambda name: None)
    (tmp_path / "taken").write_text("a file")
    try:
        status = lab.main(words[:-1])
    except SystemExit as stopped:
        status = stopped.code
    assert (status, SAYS[words] in "".join(capsys.readouterr())) == (words[-1], True)
    assert {path.name for path in tmp_path.iterdir()} - {"mine"} == {"lessons", "taken"}
    assert (tmp_path / "taken").read_text() == "a file"
    assert (tmp_path / "mine" / FIRST).exists() == (words[0] == "mine")


def test_jupyterlab_gets_every_other_word_and_replaces_the_process(lessons, tmp_path, monkeypatch):
    monkeypatch.setattr(lab.os, "name", "posix")
    monkeypatch.setattr(lab.os, "chdir", lambda folder: calls.append(folder))
    monkeypatch.setattr(lab.os, "execv", lambda path, command: calls.append(command))
    calls = []
    lab.main([str(tmp_path / "mine"), "--no-browser", "--port", "8899"])
    assert calls[0] == tmp_path / "mine"
    assert calls[1][1:3] == ["-m", "jupyterlab"]
    assert "--LabApp.default_url=/lab/tree/00_start_here.ipynb" in calls[1]
    assert calls[1][4:7] == ["--no-browser", "--port", "8899"]


def test_one_command_points_every_address_to_a_fork_and_back(tmp_path):
    fork = runpy.run_path(str(ROOT / ".ci" / "fork.py"))
    files, point = fork["FILES"], fork["fork"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text("utf-8"), "utf-8")
    before = [(tmp_path / name).read_text("utf-8") for name in files]
    owner, repo = fork["address"](ROOT)
    assert [point("ada", "fp-16.kit", tmp_path) for _ in "ab"] == [list(files), []]
    text = "".join((tmp_path / name).read_text("utf-8") for name in files)
    assert f"{owner}/{repo}" not in text
    assert text.count("ada/fp-16.kit") == "".join(before).count(f"{owner}/{repo}") >= 8
    point(owner, repo, tmp_path)
    for words in (("ada/x", "mpkit"), ("ada", ""), ("-ada", "mpkit")):
        with pytest.raises(ValueError, match="as GitHub has them"):
            point(*words, tmp_path)
    assert [(tmp_path / name).read_text("utf-8") for name in files] == before
    (tmp_path / files[-1]).unlink()  # one that lacks a file writes none
    with pytest.raises(FileNotFoundError):
        point("ada", "mpkit", tmp_path)
    assert [(tmp_path / name).read_text("utf-8") for name in files[:-1]] == before[:-1]


def test_what_travels_in_the_wheel_is_written_over_nobodys_work(tmp_path):
    """The folder was emptied first, whatever it held."""
    ship = runpy.run_path(str(ROOT / "notebooks" / "ship.py"))["ship"]
    (tmp_path / "thesis.txt").write_text("years")
    for folder in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(FileExistsError, match="is there and not empty; name a folder that is not there yet"):
            ship(folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["thesis.txt"]


def test_the_lessons_of_a_checkout_hold_no_solution(tmp_path):
    assert lab.copy_lessons(tmp_path)[1] == []
    copied = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.ipynb")}
    notebooks = [*LESSONS, *ROOT.glob("notebooks/labs/*.ipynb")]
    assert copied == {path.relative_to(ROOT / "notebooks").as_posix() for path in notebooks}
    for path in tmp_path.rglob("*.ipynb"):
        assert "### BEGIN" not in path.read_text("utf-8")
        notebook = json.loads(path.read_text("utf-8"))
        assert notebook["nbformat"] == 4
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert cells
        assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
        assert not any("test" in cell["metadata"].get("tags", []) for cell in cells)


# --- strange terminals, pipes and machines


def mpkit(*words, stdout=subprocess.PIPE, code="", **environment):
    """The command in a process of its own, which first runs `code`."""
    start = f"import sys\n{code}\nfrom mpkit.command import main\nsys.exit(main({[*words]!r}))"
    command, given = [sys.executable, "-c", start], {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, env=given)


def test_a_pipe_that_nobody_reads_any_more_ends_the_command_without_a_word():
    for words in (["--help"], ["info"]):  # one is written at the end, the other line by line
        reader, writer = os.pipe()
        os.close(reader)
        ended = mpkit(*words, stdout=writer)
        os.close(writer)
        assert (ended.returncode, ended.stderr) == (141, "")


def test_what_an_interrupted_copy_wrote_is_brought_up_to_date_later(lessons, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "labs").write_text("no folder")
    with pytest.raises(OSError, match="labs"):
        lab.copy_lessons(mine)
    (mine / "labs").unlink()
    (lessons / FIRST).write_text("second edition")
    assert lab.copy_lessons(mine) == (2, [])
    assert (mine / FIRST).read_text() == "second edition"


def test_lessons_that_cannot_be_gathered_are_told_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lab, "installed_lessons", lambda: None)
    monkeypatch.setattr(lab.tempfile, "TemporaryDirectory", lambda: contextlib.nullcontext("/dev/null/scratch"))
    assert lab.main([str(tmp_path / "mine"), "--copy-only"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "could not gather them in /dev/null/scratch: mpkit: [Errno 20] Not a directory" in err
