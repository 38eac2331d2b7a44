"""The two ways to install name the same packages, and the set-up says plainly what is missing."""

import importlib.util
import re
import socket
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from support import ROOT

PIP = {"pytorch": "torch", "matplotlib-base": "matplotlib", "playwright-python": "playwright", "python-build": "build"}


def wanted_by_pip() -> dict[str, SpecifierSet]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["lab"], *extras["test"], f"python{project['requires-python']}"]
    found = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): r.specifier for r in found if r.name != "mpkit"}


def wanted_by_conda() -> dict[str, SpecifierSet]:
    lines = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    found = {}
    lines += next(line["pip"] for line in lines if isinstance(line, dict))[:-1]  # not on conda-forge; the last is mpkit
    for line in (line for line in lines if isinstance(line, str) and line != "pip"):
        name, _, bounds = line.partition(" ")
        found[canonicalize_name(PIP.get(name, name))] = SpecifierSet(bounds)
    return found


def test_conda_and_pip_name_the_same_packages_with_the_same_bounds():
    assert wanted_by_conda() == wanted_by_pip()


def test_the_pinned_versions_satisfy_the_bounds():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    assert pins["torch"] == "2.13.0"
    for name, bounds in wanted_by_pip().items():
        if name != "python":
            assert bounds.contains(pins[name]), f"{name}=={pins[name]} is outside {bounds}"


@pytest.fixture
def bootstrap(monkeypatch, tmp_path):
    """The module, whose environment would be in a folder that is not there."""
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / ".ci" / "bootstrap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", str(tmp_path / "venv"))
    monkeypatch.setattr(module, "BIN", str(tmp_path / "venv" / "bin"))
    return module


def test_an_old_python_is_told_which_one_is_needed(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 9, 2))
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"Python 3\.11 to 3\.13 is needed, and .* is 3\.9"):
        bootstrap.with_a_usable_python()


def test_a_missing_venv_module_is_named(bootstrap, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(SystemExit, match="lacks the venv module; install it"):
        bootstrap.setup("lab")
    assert not (tmp_path / "venv").exists()


def test_no_network_is_said_and_the_next_try_starts_again(bootstrap, monkeypatch, tmp_path):
    monkeypatch.setattr(bootstrap, "VENV", str(tmp_path))
    monkeypatch.setattr(bootstrap.os.path, "exists", lambda path: True)
    monkeypatch.setattr(bootstrap.subprocess, "call", lambda command, **_: int("install" in command))
    with pytest.raises(SystemExit, match="without a network connection"):
        bootstrap.setup("lab")
    assert not bootstrap.installed("lab")


def test_a_taken_port_is_named_or_passed_over(bootstrap):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not bootstrap.free(port)
        for words in ([f"--port={port}"], ["--port", str(port)]):
            with pytest.raises(SystemExit, match=f"port {port} is taken"):
                bootstrap.port_of(words)
    for none in ("x", "²"):
        with pytest.raises(SystemExit, match=f"needs a number from 1 to 65535, got '{none}'"):
            bootstrap.port_of([f"--port={none}"])
    for word in ("--no-browser", "--port-retries=0", "--ServerApp.port_retries=0"):  # options, and none is the port
        assert re.fullmatch(r"--port=8[89]\d\d", bootstrap.port_of([word])[0])


def test_what_cannot_be_set_up_is_refused_before_anything_is_made(bootstrap, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["bootstrap.py", "setup", "everything"])
    with pytest.raises(SystemExit, match="nothing called everything to set up; name lab or test"):
        bootstrap.main()
    assert not (tmp_path / "venv").exists()


def test_make_lab_opens_a_copy_without_results(bootstrap, monkeypatch):
    """A checkout whose lessons were run was full of changes."""
    monkeypatch.setattr(bootstrap, "setup", lambda extra: None)
    monkeypatch.setattr(bootstrap, "run", lambda command: command)
    command = bootstrap.lab(["--no-browser"])
    assert command[1:5] == ["-m", "mpkit", "lab", "mpkit-lessons"]
    assert command[-1] == "--no-browser"
    assert "/mpkit-lessons/" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_bootstrap_parses_on_old_pythons():
    import ast

    ast.parse((ROOT / ".ci" / "bootstrap.py").read_text(), feature_version=(3, 6))
