"""`mpkit experiment grid.json` as a server runs it."""

import errno
import json
import os

import pytest

from mpkit.command import main
from mpkit.experiment.batches import found


def cheap(seed, x, k=1):
    """A run for the command line to find."""
    if x == 13:
        raise ArithmeticError("thirteen")
    return {"score": k * x + seed}


def written(path, **asked):
    path.write_text(json.dumps({"run": "test_experiment_command:cheap", "seeds": 3, **asked}))
    return str(path)


def test_a_grid_runs_tells_what_it_found_and_is_shown_again(tmp_path, capsys):
    file = written(tmp_path / "g.json", grid={"x": [1, 2]}, fixed={"k": 10, "x": 9}, baseline={"x": 1})
    assert main(["experiment", file]) == 0
    told = capsys.readouterr().out
    assert "6 runs of 2 cells from 3 seeds" in told
    assert "x=2: better, +10 against x=1 (95 % interval +10 to +10, 3 seeds)." in told
    assert len(list((tmp_path / "g").glob("*.npz"))) == 6
    assert main(["experiment", file, "--show"]) == 0
    assert capsys.readouterr().out == told


def test_a_failed_run_is_told_with_its_error_and_the_status_says_so(tmp_path, capsys):
    assert (
        main(["experiment", written(tmp_path / "g.json", grid=[{"x": 1}, {"x": 13}]), "--folder", str(tmp_path / "f")])
        == 1
    )
    assert "failed: x=13, seed 0: ArithmeticError: thirteen" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "no JSON file"),
        ("[]", "must be an object with 'grid'"),
        ('{"grid": {"x": [1]}, "seed": 1}', "unknown: ['seed']"),
        ('{"grid": {"x": 1}}', "must be a list of values"),
        ('{"grid": [], "run": "nothing_there:f"}', "names nothing that can be imported"),
        ('{"grid": {"level": ["O0"]}, "fixed": {"networks": 1}}', "unexpected keyword argument 'networks'"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(tmp_path, capsys, text, sentence):
    (tmp_path / "g.json").write_text(text)
    assert main(["experiment", str(tmp_path / "g.json")]) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert err.count("\n") == 1


FAULTS = {  # a module of the reader's own -> what is said of it, after its name and the line
    "def f(:": "SyntaxError: invalid syntax",
    "import math\nmath.nothing": "AttributeError: module 'math' has no attribute 'nothing'",
    "\n\n1 / 0": "ZeroDivisionError: division by zero",
    "import nothing_there": "ModuleNotFoundError: No module named 'nothing_there'",
    "exit(3)": "SystemExit: 3",
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_in_the_readers_own_module_is_told_with_its_file_and_line(text, tmp_path, monkeypatch, capsys):
    name = f"own_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "g.json").write_text(json.dumps({"run": f"{name}:f", "grid": {"x": [1]}}))
    assert main(["experiment", str(tmp_path / "g.json")]) == 2
    err = capsys.readouterr().err
    line = len(text.splitlines())
    assert f"the module {name} was found and fails where it is imported: " in err
    assert f"{name}.py, line {line}: {FAULTS[text]}" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "name", ["json", "json:nothing", "..json:loads", ":f", "nothing_there:f", "json.nothing_there:f"]
)
def test_a_name_that_names_nothing_is_told_with_the_form_of_one(name):
    with pytest.raises(ValueError, match="names nothing that can be imported as"):
        found(name)


def test_a_full_disk_is_told_with_what_becomes_of_the_finished_cells(tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/disk/cell.json")

    monkeypatch.setattr("mpkit.experiment.store.write_whole", full)
    assert main(["experiment", written(tmp_path / "g.json", grid={"x": [1]})]) == 2
    assert "'/disk/cell.json'; what is finished is kept: give the same line again" in capsys.readouterr().err


def test_a_missing_file_and_a_folder_without_an_experiment(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["experiment", ""])
    assert "the name of the grid file is empty" in capsys.readouterr().err
    assert main(["experiment", str(tmp_path / "none.json")]) == 2
    assert "there is no file" in (err := capsys.readouterr().err)
    assert "mpkit experiment --help shows" in err
    assert main(["experiment", str(tmp_path / "none.json"), "--show"]) == 2
    assert "no experiment in" in capsys.readouterr().err
