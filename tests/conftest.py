"""Shared set-up: one thread, and a visible skip for tests that need a GPU."""

import os

import pytest
import torch

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the kernels and processes that tests start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and this machine has none"))


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
def context(lab, tmp_path_factory):
    """One headless Chromium with a fresh profile per test process."""
    from browser import CHROMIUM, QUIET
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"),
            executable_path=CHROMIUM,
            args=QUIET,
            viewport={"width": 1280, "height": 1600},
        )
        yield context
        context.close()
