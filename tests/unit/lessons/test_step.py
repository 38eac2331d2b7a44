"""Lesson 05: one step against its formulas; the order of clipping and unscaling; answers a second way."""

import pytest
import torch

from mpkit.lessons.step import ORDERS, PLACES, clipped, handed_over, micro_gradients, one_step, orders, phases
from mpkit.view.words import words


def test_a_good_step_moves_and_a_bad_one_does_not():
    good, bad, high = one_step(16, False), one_step(16, True), one_step(30, False)
    assert 0.001 < good.change < 0.01
    assert bad.change == 0
    # the third batch is fine; 2^30 is too large a scale for float16
    assert [bool(w.skipped) for w in (good, bad, high)] == [False, True, True]
    assert [w.phases[-1].seen.split()[-1] for w in (good, bad, high)] == ["2^16", "2^15", "2^29"]


@pytest.mark.parametrize(("bad", "done"), [(False, "applied"), (True, "skipped")])
def test_the_stored_sentence_tells_what_became_of_the_update(bad, done):
    assert phases(bad=bad).sheet.stored.endswith(f"In this step the update is {done}.")


def test_in_the_wrong_order_the_weights_are_lost_and_no_number_says_otherwise():
    late = one_step(16, True, late=True)
    assert late.lost > 0
    assert not late.skipped
    view = phases(bad=True, late=True, phase=8)
    first = next(m for p in view.sheet.panels for m in p.marks if m["type"] == "text" and m["x"] == 0)
    assert first["only"] == (0, 5)
    assert "too late" in view.sentence


def test_each_phase_is_told_with_its_values():
    view = phases(bad=True)
    told = []
    for phase in range(1, 9):
        view.set(phase=phase)
        told.append(view.sentence)
    assert len(set(told)) == 8
    assert {row["place"] for row in view.table()} == {*PLACES}


def test_the_right_order_alone_does_not_depend_on_the_scale():
    seen = orders().numbers["norms"]
    right, early = seen[ORDERS[0]], seen[ORDERS[1]]
    assert max(right) / min(right) < 1.001
    assert abs(early[0] / early[20] / 2**20 - 1) < 0.01
    whole = float(micro_gradients(4).mean(0).norm())
    assert orders(max_norm=4.0).numbers["norms"][ORDERS[0]][10] == pytest.approx(whole)


def test_with_one_micro_batch_unscaling_each_is_unscaling_once():
    micro = micro_gradients(1)
    once, each = (handed_over(micro, 1024.0, 0.25, o) for o in (ORDERS[0], ORDERS[2]))
    torch.testing.assert_close(once, each)
    assert float(clipped(torch.tensor([3.0, 4.0]), 1.0).norm()) == pytest.approx(1)
    torch.testing.assert_close(micro_gradients(4).mean(0), micro[0], rtol=1e-4, atol=1e-6)


def test_answers_a_second_way():
    asked = {name: q["truth"] for name, q in words("step")["question"].items()}
    assert asked["clip"] == pytest.approx(0.25 / 4096, rel=1e-4)
    assert asked == asked | {"scale": 4096 / 2, "weights": 100 - 4, "divisions": 2**3}
