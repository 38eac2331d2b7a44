"""The lessons in a real JupyterLab: each runs, nothing complains, every control moves what the reader sees."""

import pytest
from browser import NOTEBOOKS, visit

pytestmark = pytest.mark.browser  # in two files: each costs a JupyterLab with its page, 20 s, and takes 200


@pytest.mark.parametrize("notebook", [name for name in NOTEBOOKS if "/" not in name])
def test_a_notebook_runs_and_its_controls_work_by_keyboard(lab, context, notebook):
    visit(lab, context, notebook)
