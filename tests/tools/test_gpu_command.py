"""`make gpu` with a stand-in for the GPU: what it runs, prints and writes, and that lessons then show it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gpu
import pytest
import torch
from support import ROOT

from mpkit.bench import Row
from mpkit.bench import __main__ as bench
from mpkit.bench.gpu import MISSING, table

REPORT = """<testsuites><testsuite tests="4">
<testcase classname="tests.test_step" name="test_a"/><testcase classname="tests.test_step" name="test_b"/>
<testcase classname="tests.test_step" name="test_c"><failure message="no">assert 1 == 2</failure></testcase>
<testcase classname="tests.test_step" name="test_d"><skipped message="one device"/></testcase>
</testsuite></testsuites>"""
ROWS = [
    Row("boost", "ResNet-18", "none", 0.2, "none", 1.0, (1.0, 1.0)),
    Row("boost", "ResNet-18", "O1", 0.1, "none", 1.987, (1.9, 2.0), goal=1.5, goal_is_floor=True),
    Row("step", "a step", "fused", 0.1, "plain", 1.2, (1.1, 1.3), goal=1.05),
    Row("casting", "fp8", "mpkit", skipped="no tensor cores"),
]


@pytest.fixture
def stand_in(monkeypatch) -> torch.device:
    """The predicates and names of torch.cuda, as on a machine with one device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Stand-in 100 (80GB)")
    return torch.device("cuda", 0)


def played(commands: list[list[str]], monkeypatch, status: int):
    """A `subprocess.run` that leaves a report of pytest, and runs the benchmarks here with rows that are given."""
    asked = []
    monkeypatch.setattr(bench, "run", lambda _, *, quick, device: asked.append((quick, device)) or ROWS)

    def run(command, cwd):
        commands.append(command)
        if "pytest" in command:
            path = next(word.removeprefix("--junitxml=") for word in command if word.startswith("--junitxml="))
            Path(path).write_text(REPORT)
            return SimpleNamespace(returncode=status)
        threads = torch.get_num_threads()
        try:
            return SimpleNamespace(returncode=bench.main(command[3:]))
        finally:
            torch.set_num_threads(threads)

    return run, asked


def test_one_command_tests_measures_and_stores(stand_in, monkeypatch, tmp_path, capsys):
    commands: list[list[str]] = []
    run, asked = played(commands, monkeypatch, status=1)
    assert gpu.main(["--quick", "--only", "boost", "--folder", str(tmp_path)], run=run) == 1  # a test failed
    assert commands[0][3:6] == ["-q", "-m", "gpu"]
    assert {os.path.basename(name) for name in commands[0][9:]} == {os.path.basename(name) for name in gpu.marked()}
    assert "test_rounding.py" in {os.path.basename(name) for name in gpu.marked()}
    assert asked == [(True, stand_in)]
    made = json.loads((tmp_path / "gpu-stand-in-100-80gb.json").read_text())
    assert made["tests"] == {"passed": 2, "failed": 1, "skipped": 1, "failures": ["tests.test_step::test_c"]}
    assert (made["meta"]["device"], made["meta"]["torch"]) == ("Stand-in 100 (80GB)", torch.__version__)
    assert len(made["rows"]) == 4
    said = capsys.readouterr().out
    counts = ("2 passed, 1 failed, 1 skipped", "1 met, 1 missed, 1 not measured", "1.99x", "FAILED tests.test_step")
    assert all(words in said for words in counts)
    shown = table("boost", tmp_path).loc[("Stand-in 100 (80GB)", "ResNet-18")]
    assert shown.set_index("contender")["ratio"].to_dict() == {"none": 1.0, "O1": 1.99}
    assert table("rounding", tmp_path) == MISSING


def test_all_is_well_only_if_tests_ran_and_passed(stand_in, monkeypatch, tmp_path):
    for report, status in ((REPORT.replace("failure", "system-out"), 0), ("<testsuites/>", 1)):
        monkeypatch.setattr(sys.modules[__name__], "REPORT", report)
        run, _ = played([], monkeypatch, status=0)
        assert gpu.main(["--only", "boost", "--folder", str(tmp_path)], run=run) == status
    nothing = SimpleNamespace(returncode=2)
    assert gpu.main(["--folder", str(tmp_path / "none")], run=lambda *_, **__: nothing) == 1
    assert not (tmp_path / "none").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: `make gpu` measures it")
def test_without_a_gpu_nothing_is_run_or_written(tmp_path, capsys):
    def run(*_, **__):
        raise AssertionError("nothing may run")

    assert gpu.main(["--folder", str(tmp_path)], run=run) == 1
    assert bench.main(["--gpu", "--out", str(tmp_path / "rows.json")]) == 1
    assert list(tmp_path.iterdir()) == []
    said = capsys.readouterr()
    assert all("not measured on a GPU" in text for text in said)


ABSENT = "hypothesis ml_dtypes jupyterlab ipywidgets nbval nbclient nbformat playwright joblib traitlets "
ABSENT += "IPython ipykernel anywidget tqdm PIL xdist yaml"


def test_a_gpu_server_needs_five_packages(tmp_path):
    """torch, numpy, pandas, matplotlib and pytest: the files that `make gpu` runs are imported without any other."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}.split()))\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = dict(os.environ, PYTHONPATH=path, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--collect-only", "-p", "no:cacheprovider"]
    found = subprocess.run([*command, *gpu.marked()], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:]
    assert "tests collected" in found.stdout
