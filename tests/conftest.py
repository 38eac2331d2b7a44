"""Shared set-up: one thread unless OMP_NUM_THREADS says otherwise, and a visible skip for tests that need a GPU."""

import gc
import multiprocessing
import os
import random
from importlib.util import find_spec

import pytest
import torch
from _pytest.runner import runtestprotocol
from forked_kernels import offered
from without_packages import is_missing, stand_in

pytest.register_assert_rewrite("browser", "questions", "sentences", "support")  # these too show the values that differ
# no doctests: a conftest of the same name and `site` own these module names
collect_ignore = ["conftest.py", "tools/jitter", "tools/__main__.py"]

# Where only torch, numpy, pandas, matplotlib and pytest are at hand, a GPU server say, the library is still tested.
JUPYTER_SIDE = (
    *("browser", "browser_more", "test_environment", "test_forked_kernels", "test_grading", "test_labs"),
    *("test_notebooks", "test_other_machines", "test_scenes", "test_site", "test_slides", "test_wrong_input"),
)
collect_ignore_glob = [] if find_spec("jupyterlab") else [f"*{name}.py" for name in JUPYTER_SIDE]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the kernels and processes that tests start
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# inductor believes what the processor says of its vector instructions: to compile a trial of each takes it 7 s
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

if find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # no clock decides about a test: a busy machine is slow at drawing examples, and that is no fault of theirs
    calm = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
    settings.register_profile("steady", derandomize=True, **calm)
    settings.register_profile("deep", max_examples=3000, derandomize=False, print_blob=True, **calm)
    settings.load_profile("steady")
for name in ("hypothesis", "ml_dtypes"):
    stand_in(name)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="random order and draws of this seed")


def pytest_configure(config: pytest.Config) -> None:
    if "--shuffle" in config.invocation_params.args:
        # pytest looks for conftest files before it knows this option: the number by itself would be a path to it
        raise pytest.UsageError("write --shuffle=SEED as one word; as two, the notebooks would be left out")
    kernels = offered()  # for the notebooks; the workers of xdist inherit it
    os.environ.update(kernels)
    if kernels and hasattr(config.option, "nbval"):
        config.option.nbval_current_env = False  # that looks for no kernels


@pytest.fixture(autouse=True)
def same_draws(request):
    """A test without a seed of its own draws the same numbers alone, after any other tests and in any worker."""
    seed(request.config)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """So does a file of tests; both draw others where the order is another one."""
    if isinstance(collector, pytest.Module):
        seed(collector.config)


def seed(config: pytest.Config) -> None:
    torch.random.default_generator.manual_seed(config.getoption("shuffle", None) or 0)


@pytest.fixture
def one_thread():
    """For a test of what a sum in 16 bits loses: more threads add up other parts of it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def own_kernels(monkeypatch):
    """Programs that a test starts, a grading say, have the kernels of their own environment."""
    monkeypatch.delenv("JUPYTER_PATH", raising=False)


def pytest_report_header(config: pytest.Config) -> list[str]:
    left_out = ["tests of notebooks and widgets are left out: jupyterlab is not installed"]
    seed = config.getoption("shuffle", None)  # None too where this file is found too late to have options
    return left_out * bool(collect_ignore_glob) + [f"random order of --shuffle={seed}"] * (seed is not None)


def shuffled(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """All tests mixed, but the cells of a notebook one after the other."""
    blocks: dict[str, list[pytest.Item]] = {}
    for item in items:
        blocks.setdefault(str(item.path) if item.path.suffix == ".ipynb" else item.nodeid, []).append(item)
    order = list(blocks.values())
    random.Random(seed).shuffle(order)
    return [item for block in order for item in block]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("shuffle", None)) is not None:
        items[:] = shuffled(items, seed)
    for item in items:
        if is_missing(getattr(getattr(item, "module", None), "ml_dtypes", None)) and "gpu" not in item.keywords:
            item.add_marker(pytest.mark.skip(reason="ml_dtypes is not installed"))
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and this machine has none"))


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A worker of xdist tells how a test ended, not that its set-up and its end went well: 1 ms less for each test."""
    if not hasattr(item.config, "workerinput"):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    """`make test` ends with one line: what passed, and what is left to `make more`."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("MPKIT_TELL") and terminal and not hasattr(config, "workerinput"):
        apart, tests = ("contract", "tools", "test_layers.py"), config.rootpath / "tests"
        rest = [path for path in tests.rglob("test_*.py") if path.relative_to(tests).parts[0] not in apart]
        functions = sum(path.read_text("utf-8").count("\ndef test_") for path in rest)
        passed, failed = (len(terminal.stats.get(key, ())) for key in ("passed", "failed"))
        more = f"`make more` would add {functions} tests in {len(rest)} files: units, pages, labs, compilers, processes"
        print(f"mpkit: {passed} passed, {failed} failed; {more}")


def pytest_collection_finish() -> None:
    gc.freeze()  # what torch and ten thousand tests consist of stays; a collection need not look at it each time


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """(manager, client) of a kernel in an empty folder, with ONLY_HERE in its environment."""
    from jupyter_client.manager import start_new_kernel

    if not (folders := offered()):
        pytest.skip("processes cannot be forked here")
    monkeypatch.setenv("JUPYTER_PATH", folders["JUPYTER_PATH"])
    monkeypatch.setenv("ONLY_HERE", "seen")
    manager, client = start_new_kernel(startup_timeout=300, cwd=str(tmp_path))
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """One JupyterLab per test process."""
    from browser import CHROMIUM, Lab

    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine; install the package chromium to run the browser tests")
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


@pytest.fixture(scope="session")
def chromium():
    """Playwright's Chromium type; a process can hold one Playwright only, which keeps its event loop running."""
    from browser import CHROMIUM

    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine; install the package chromium to run the browser tests")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright.chromium
        for process in multiprocessing.active_children():  # a fork holds Playwright's pipes open, which then never ends
            process.terminate()


@pytest.fixture(scope="session")
def headless(chromium):
    """One Chromium without a profile per test process."""
    from browser import CHROMIUM, QUIET

    browser = chromium.launch(executable_path=CHROMIUM, args=QUIET)
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def context(lab, chromium, tmp_path_factory):
    """One headless Chromium with a fresh profile per test process."""
    from browser import CHROMIUM, QUIET

    context = chromium.launch_persistent_context(
        tmp_path_factory.mktemp("profile"),
        executable_path=CHROMIUM,
        args=QUIET,
        viewport={"width": 1280, "height": 1600},
    )
    yield context
    context.close()
