"""Every notebook is a test: nbval, where it is installed, compares its stored outputs with fresh ones, strictly."""

import pytest

collect_ignore = ["conftest.py"]
# students have answered none of the released labs; the sources ask for answers as only the grader can (`test_labs.py`)
collect_ignore_glob = ["labs/*.ipynb", "instructor/*.ipynb"]


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Not in `addopts`: there these options would stop pytest where nbval is not installed, on a GPU server say."""
    options = config.option
    if getattr(options, "numprocesses", None) and options.dist == "no":
        options.dist = "loadfile"  # the cells of a notebook belong to one process
    if hasattr(options, "nbval") and not options.nbval_lax:
        options.nbval = options.nbval_current_env = True
        options.nbval_cell_timeout = min(options.nbval_cell_timeout, 120)
        options.nbval_sanitize_with = options.nbval_sanitize_with or config.rootpath / "tests" / "nbval_sanitize.cfg"


def pytest_report_header(config: pytest.Config) -> str | None:
    return None if hasattr(config.option, "nbval") else "notebooks are not run: nbval is not installed"
