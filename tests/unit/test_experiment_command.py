"""`mpkit experiment grid.json` as a server runs it."""

import json

import pytest

from mpkit.command import main
from mpkit.experiment.command import found, results_of


def cheap(seed, x, k=1):
    """A run for the command line to find."""
    if x == 13:
        raise ArithmeticError("thirteen")
    return {"score": k * x + seed}


def typed(seed, x, k):
    """How many functions it is given."""
    return {"functions": callable(x) + callable(k[0])}


def written(path, **asked):
    path.write_text(json.dumps({"run": "test_experiment_command:cheap", "seeds": 3, **asked}))
    return str(path)


def test_a_grid_runs_tells_what_it_found_and_tells_it_again(tmp_path, capsys):
    file = written(tmp_path / "g.json", grid={"x": [1, 2]}, fixed={"k": 10, "x": 9}, baseline={"x": 1})
    assert main(["experiment", file]) == 0
    told = capsys.readouterr().out
    assert "6 runs of 2 cells from 3 seeds" in told
    assert "x=2: better, +10 against x=1 (95 % interval +10 to +10, 3 seeds)." in told
    assert len(list((tmp_path / "g").glob("*.npz"))) == 6
    assert main(["experiment", file]) == 0
    assert capsys.readouterr().out == told


def test_a_failed_run_is_told_with_its_error_and_the_status_says_so(tmp_path, capsys):
    file = written(tmp_path / "g.json", grid=[{"x": 1}, {"x": 13}])
    assert main(["experiment", file, "--folder", str(tmp_path / "f")]) == 1
    assert "failed: x=13, seed 0: ArithmeticError: thirteen" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "no JSON file"),
        ('{"grid": {"x": [1]}, "seed": 1}', "unexpected keyword argument 'seed'"),
        ('{"seeds": 1}', "has no grid; mpkit experiment --help shows one"),
        ('{"grid": {"level": ["O0"]}, "fixed": {"networks": 1}}', "unexpected keyword argument 'networks'"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(tmp_path, capsys, text, sentence):
    (tmp_path / "g.json").write_text(text)
    assert main(["experiment", str(tmp_path / "g.json")]) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["json:nothing", "..json:loads", ":f", "nothing_there:f", "own_exit:f", "own_zero:f"])
def test_a_name_that_names_nothing_or_a_module_that_fails_is_refused(name, tmp_path, monkeypatch):
    (tmp_path / "own_exit.py").write_text("exit(3)")
    (tmp_path / "own_zero.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="cannot be imported"):
        found(name)


def test_a_text_in_the_form_of_a_name_stands_for_what_it_names(tmp_path):
    asked = {"run": "test_experiment_command:typed", "grid": {"x": ["math:sqrt", "12:30"]}, "seeds": 1}
    frame = results_of({**asked, "fixed": {"k": ["json:loads"]}}, tmp_path).frame
    assert frame[["functions", "x"]].values.tolist() == [[2, "sqrt"], [1, "12:30"]]
