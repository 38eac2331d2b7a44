"""`mpkit experiment grid.json` as a server runs it."""

import json

import pytest

from mpkit.command import main


def cheap(seed, x, k=1):
    """A run for the command line to find."""
    if x == 13:
        raise ArithmeticError("thirteen")
    return {"score": k * x + seed}


def written(path, **asked):
    path.write_text(json.dumps({"run": "test_experiment_command:cheap", "seeds": 3, **asked}))
    return str(path)


def test_a_grid_runs_tells_what_it_found_and_is_shown_again(tmp_path, capsys):
    file = written(tmp_path / "g.json", grid={"x": [1, 2]}, fixed={"k": 10}, baseline={"x": 1})
    assert main(["experiment", file]) == 0
    told = capsys.readouterr().out
    assert "6 runs of 2 cells from 3 seeds" in told
    assert "x=2: better, +10 against x=1 (95 % interval +10 to +10, 3 seeds)." in told
    assert len(list((tmp_path / "g").glob("*-*.json"))) == 6
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
        ("{", "is no JSON file"),
        ("[]", "must be an object with 'grid'"),
        ('{"grid": {"x": [1]}, "seed": 1}', "unknown: ['seed']"),
        ('{"grid": {"x": 1}}', "must be a list of values"),
        ('{"grid": [], "run": "nothing_there:f"}', "names nothing that can be imported"),
    ],
)
def test_a_wrong_file_is_told_in_one_line(tmp_path, capsys, text, sentence):
    (tmp_path / "g.json").write_text(text)
    assert main(["experiment", str(tmp_path / "g.json")]) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert err.count("\n") == 1


def test_a_missing_file_and_a_folder_without_an_experiment(tmp_path, capsys):
    assert main(["experiment", str(tmp_path / "none.json")]) == 2
    assert main(["experiment", str(tmp_path / "none.json"), "--show"]) == 2
    assert "no experiment in" in capsys.readouterr().err
