"""The other half of the notebooks in JupyterLab: a file of its own, so that two workers share the work."""

import pytest
from browser import NOTEBOOKS, visit

pytestmark = pytest.mark.browser


OWN = NOTEBOOKS[1::2]


@pytest.mark.parametrize(("notebook", "following"), list(zip(OWN, [*OWN[1:], ""])), ids=OWN)
def test_a_notebook_runs_and_its_controls_work_by_keyboard(lab, context, notebook, following):
    visit(lab, context, notebook, following)
