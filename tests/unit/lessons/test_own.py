"""The picture of a lab: it holds what it was given, and refuses what it cannot draw."""

import numpy as np
import pytest

from mpkit.lessons.own import look, picture


def test_it_holds_the_lines_that_it_was_given():
    seen = picture("step", "loss scale", {"yours": [1.0, 2.0, 4.0], "ceiling": [8.0, np.inf, 8.0]}, powers=True)
    assert [m["label"] for m in seen.panels[0].marks] == ["yours", "ceiling"]
    assert seen.sentence() == "yours, ceiling: 3 places, from 1 to 8."
    assert seen.table()
    assert "1 places, from 5 to 5" in picture("step", "y", {"yours": [5.0]}).sentence()


@pytest.mark.parametrize("lines", [{}, {"yours": [np.nan]}, {"a": [1.0], "b": [1.0, 2.0]}])
def test_what_cannot_be_drawn_is_refused(lines):
    with pytest.raises(ValueError, match="need lines with a finite number"):
        picture("step", "y", lines)


def test_an_unfinished_answer_is_waited_for(capsys):
    def unfinished():
        raise NotImplementedError

    assert look(unfinished) is None
    assert "once the question above is answered (NotImplementedError)" in capsys.readouterr().out
    assert "yours: 2 places" in repr(look(lambda: picture("step", "y", {"yours": [1.0, 2.0]})))
