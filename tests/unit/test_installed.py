"""The wheel is complete: built from the sdist, installed outside the checkout, it runs examples, lessons and the lab.

The new environment holds mpkit alone and sees the packages of the running one, so nothing is downloaded.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import zipfile
from pathlib import Path

import pytest
from support import LESSONS, ROOT, until

import mpkit

build = pytest.importorskip("build", reason="building a wheel needs the package `build`, of the extra `test`")
pytest.importorskip("nbval", reason="a lesson is run with nbval, of the extra `test`")

pytestmark = pytest.mark.slow  # about 50 s: a build, and seven processes that import torch
LESSON = "more/scalers/scaler_zoo.ipynb"
SCRIPTS = "Scripts" if os.name == "nt" else "bin"
README = (ROOT / "README.md").read_text("utf-8")
NOT_SOURCE = (".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")


def done(command, folder, **options):
    """What a command printed; its whole output in the failure when it fails."""
    ran = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, timeout=300, **options)
    assert ran.returncode == 0, f"{command} ended with {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """(sdist, wheel), the wheel built from the sdist, as pip and `python -m build` do it."""
    folder = tmp_path_factory.mktemp("build")
    shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(*NOT_SOURCE), symlinks=True)
    done([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", "source"], folder)
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(archives, tmp_path_factory):
    """(scripts folder, empty folder, environment) of a new environment that holds the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    # pip too: with the checkout in PYTHONPATH it would find mpkit installed already
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MPKIT", "PYTEST", "JUPYTER"))}
    done([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], folder)
    python = folder / "venv" / SCRIPTS / "python"
    options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    done([sys.executable, "-m", "pip", "--python", python, "install", *options, archives[1]], folder, env=inherited)
    site = Path(done([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    # the packages of the running environment; its .pth files are not read, so an editable mpkit is not seen
    (site / "running.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    dirs = {f"JUPYTER_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    assets = Path(sys.prefix) / "share" / "jupyter" / "lab"
    environment = inherited | dirs | {"JUPYTERLAB_DIR": str(assets), "IPYTHONDIR": str(folder / "ipython")}
    (folder / "empty").mkdir()
    return python.parent, folder / "empty", environment


def test_the_wheel_holds_data_and_lessons_and_no_solution(archives):
    with zipfile.ZipFile(archives[1]) as wheel:
        names = {name.removeprefix("mpkit/share/") for name in wheel.namelist()}
        notebooks = [name for name in wheel.namelist() if name.endswith(".ipynb")]
        assert {f"notebooks/labs/{p.name}" for p in ROOT.glob("notebooks/instructor/lab*.ipynb")} <= names
        assert not any(b"### BEGIN" in wheel.read(name) for name in notebooks)
        assert f"mpkit-{mpkit.__version__}.dist-info/METADATA" in names
    stored = [p for pattern in ("*.npz", "*.json", "*.zip") for p in (ROOT / "data").rglob(pattern)]
    needed = {p.relative_to(ROOT).as_posix() for p in (*stored, *LESSONS, *(ROOT / "mpkit").rglob("*.py"))}
    assert len(stored) > 10
    assert needed | {"mpkit/py.typed", "data/README.md"} <= names


def test_the_sdist_holds_what_the_tests_need(archives):
    with tarfile.open(archives[0]) as sdist:
        names = {name.split("/", 1)[-1] for name in sdist.getnames()}
    needed = {"Makefile", "constraints.txt", ".ci/bootstrap.py", "notebooks/instructor/labs.py", "tests/support.py"}
    assert needed <= names


def test_the_example_of_the_readme_runs_where_mpkit_is_only_installed(installed):
    scripts, folder, environment = installed
    example, shown = (re.search(rf"```{kind}\n(.*?)```", README, re.S)[1] for kind in ("python", "text"))
    code = f"{example}\nimport mpkit; print(mpkit.__file__)"
    *said, home = done([scripts / "python", "-c", code], folder, env=environment).splitlines()
    assert said == shown.splitlines()
    assert not Path(home).is_relative_to(ROOT)
    assert list(folder.iterdir()) == []


def test_the_command_is_installed_and_tells_what_there_is(installed):
    scripts, folder, environment = installed
    said = done([scripts / "mpkit", "info"], folder, env=environment)
    assert f"mpkit     {mpkit.__version__} in {scripts.parent}" in said
    assert "nothing that lessons need" in said
    assert f"digits, {len(list(ROOT.glob('data/traces/*.npz')))} traces" in said


def test_a_lesson_gives_its_stored_numbers_where_mpkit_is_only_installed(installed, tmp_path):
    scripts, _, environment = installed
    done([scripts / "mpkit", "lab", tmp_path / "mine", "--copy-only"], tmp_path, env=environment)
    sanitize = f"--nbval-sanitize-with={ROOT / 'tests' / 'nbval_sanitize.cfg'}"
    options = ["--nbval", "--nbval-current-env", sanitize, "-p", "no:cacheprovider", "-q", "--rootdir", tmp_path]
    said = done([scripts / "python", "-m", "pytest", *options, f"mine/{LESSON}"], tmp_path, env=environment)
    assert re.search(r"^\d+ passed", said, re.M)


def test_mpkit_lab_serves_the_lessons(installed, tmp_path):
    scripts, _, environment = installed
    command = [scripts / "mpkit", "lab", "mine", "--no-browser", "--port=0", "--ServerApp.open_browser=False"]
    server = subprocess.Popen(command, cwd=tmp_path, env=environment)
    try:
        # named after the process: the server is the command itself, so signals reach it
        told = Path(environment["JUPYTER_RUNTIME_DIR"]) / f"jpserver-{server.pid}.json"
        where = until(lambda: json.loads(told.read_text()))
        get = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        status = f"{where['url']}api/status?token={where['token']}"
        until(lambda: get(status).close() is None)  # the file is there a moment before the server listens
        with get(f"{where['url']}api/contents/00_start_here.ipynb?token={where['token']}&content=0") as answer:
            assert json.load(answer)["writable"]
        with get(f"{where['url']}lab/tree/00_start_here.ipynb?token={where['token']}") as answer:
            assert b"jupyter-config-data" in answer.read()
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
