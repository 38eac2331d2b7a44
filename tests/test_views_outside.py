"""Explorers and views as a stranger uses them: odd values, two owners, observers that fail, copies, closed views."""

import copy
import math
import pickle
import threading

import numpy as np
import pytest
from traitlets import Bool, Enum, Float, Int, Unicode, link

from mpkit.explorers.adasum import PairExplorer, WorkersExplorer
from mpkit.explorers.base import Explorer
from mpkit.explorers.drawing import DrawExplorer
from mpkit.explorers.evidence import GridExplorer, WhatIfExplorer
from mpkit.explorers.formats import BitsExplorer
from mpkit.explorers.own_experiment import OwnExperimentExplorer
from mpkit.explorers.scaling import DynamicsExplorer, LiveExplorer
from mpkit.plots.formats import bits_scene
from mpkit.plots.scene import Scene, linear, log2, unpack
from mpkit.widgets.scene import View


class Sum(Explorer):
    """Every kind of parameter, and a result."""

    controls = ("a", "b", "name", "flag", "kind")
    gestures = ("take",)
    a = Int(1, min=0, max=9)
    b = Float(1.0, min=0.0, max=9.0)
    name = Unicode("sum")
    flag = Bool(False)
    kind = Enum((1, 2.5), 1)

    def compute(self):
        self.total = self.a + self.b
        if self.total == 14:
            raise ValueError("14 is too much; take another number")

    def take(self, a):
        self.set(a=a)

    def summary(self):
        return f"{self.name} {self.total:g}"


def picture(data):
    scene = Scene(height=100, width=200)
    scene.panel(x=linear("n", 0, 2), y=linear("value", 0, 20)).line([data.a, data.total])
    return scene


def all_of(model):
    return model.state(), model.total, model.revision


# --- values


ODD = [math.nan, math.inf, -math.inf, None, [], {}, np.array([1, 2]), b"x", object(), 10**400, 2 + 1j, -1, 3.5]
ALSO = {"a": ["x", True], "b": ["x", True], "name": [True], "flag": ["x", 1], "kind": ["x", True]}


@pytest.mark.parametrize("name", Sum.controls)
def test_a_value_of_another_kind_is_refused_in_plain_words_and_changes_nothing(name):
    model = Sum()
    heard = []
    model.observe(heard.append, list(Sum.controls))
    before = all_of(model)
    for odd in ODD[: -1 if name == "b" else None] + ALSO[name]:
        for change in (lambda odd=odd: model.set(**{"b": 5, name: odd}), lambda odd=odd: setattr(model, name, odd)):
            with pytest.raises(ValueError, match=f"^{name} must be [^']* got ") as told:
                change()
            assert model.message == str(told.value)
            assert len(model.message) < 150
            assert all_of(model) == before
    assert heard == []


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ({"a": np.int64(3)}, 3),
        ({"a": np.uint8(3)}, 3),
        ({"b": np.float32(0.5)}, 0.5),
        ({"b": 2}, 2.0),
        ({"flag": np.True_}, True),
        ({"kind": np.float64(1.0)}, 1),
        ({"name": np.str_("x")}, "x"),
    ],
)
def test_a_scalar_of_numpy_counts_as_what_it_is_and_is_held_as_pythons_own(given, held):
    model = Sum()
    model.set(**given)
    (value,) = (model.state()[name] for name in given)
    assert (type(value), value) == (type(held), held)


def test_a_refused_assignment_says_why_as_a_refused_set_does():
    model = Sum(a=7)
    before = all_of(model)
    with pytest.raises(ValueError, match="14 is too much"):
        model.b = 7
    assert model.message.startswith("14 is too much")
    assert all_of(model) == before
    model.set(a=2, b=7)
    assert (model.total, model.message) == (9, "")


@pytest.mark.parametrize("odd", [None, math.nan, "x", [], {}])
def test_what_the_page_sends_of_another_shape_is_answered_with_the_reason(odd):
    view = View(Sum(), picture)
    before = all_of(view.explorer)
    for name in ("a", "b"):
        view.ask({name: odd})
        assert view.sentence[1].startswith(f"{name} must be a ")
    view.ask({"take": odd if odd != [] else [[]]})
    assert view.sentence[1].startswith("a must be a whole number")
    assert all_of(view.explorer) == before


@pytest.mark.parametrize(("sent", "held"), [(math.inf, 9), (-math.inf, 0), (9.4, 9), (1e300, 9)])
def test_a_handle_that_is_pulled_over_the_end_stays_at_the_end(sent, held):
    view = View(Sum(), picture)
    view.ask({"a": sent, "b": sent})
    assert (view.explorer.a, view.explorer.b) == (held, held)


# --- observers


def test_observers_of_a_parameter_hear_of_it_once_when_the_results_are_there():
    model, heard = Sum(), []
    model.observe(lambda c: heard.append((c.name, c.old, c.new, model.total)), list(Sum.controls))
    model.a = 3
    model.set(a=4, b=5.0, name="sum")
    assert heard == [("a", 1, 3, 4.0), ("a", 3, 4, 9.0), ("b", 1.0, 5.0, 9.0)]


def test_an_observer_that_sets_a_parameter_has_it_computed():
    for change in (lambda m: m.set(a=3), lambda m: setattr(m, "a", 3)):
        model = Sum()
        model.observe(lambda _, m=model: m.b == 5 or setattr(m, "b", 5.0), "revision")
        change(model)
        assert (model.state()["b"], model.total) == (5.0, 8.0)


def test_what_an_observer_raises_is_its_own_and_the_change_stands():
    model = Sum()

    def fails(_):
        raise ValueError("no ink")

    model.observe(fails, "revision")
    with pytest.raises(ValueError, match="no ink"):
        model.set(a=3)
    assert (model.a, model.total, model.message) == (3, 4.0, "")


def test_two_threads_and_two_explorers_linked_in_both_ways_end_with_results_that_fit():
    one, two = Sum(), Sum()
    link((one, "a"), (two, "a"))
    threads = [
        threading.Thread(target=lambda name=name: [setattr(one, name, k % 7) for k in range(300)]) for name in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert one.a == two.a
    assert (one.total, two.total) == (one.a + one.b, two.a + two.b)


def test_an_interrupt_takes_back_what_was_not_computed():
    class Slow(Sum):
        def compute(self):
            super().compute()
            if self.name == "slow":
                raise KeyboardInterrupt

    model = Slow()
    with pytest.raises(KeyboardInterrupt):
        model.set(a=3, name="slow")
    assert (model.state(), model.total) == (Sum().state(), 2.0)


# --- hands


@pytest.mark.parametrize(
    ("make", "gesture", "given"),
    [
        (make, "draw", given)
        for make in (DynamicsExplorer, WhatIfExplorer, DrawExplorer)
        for given in ([None], ["x"], [{"50": math.nan}], [{"50": 16.0, "x": 1}], [{"50": None}], [{"50": 10**400}])
    ]
    + [(DynamicsExplorer, "put", given) for given in ([0, math.nan], [0, math.inf], [None, 3], [0, "x"])]
    + [(WhatIfExplorer, "pair", [k]) for k in (-1, 35, 10**6, 2.5, "x", None, math.inf, True)]
    + [(GridExplorer, "cell", [k]) for k in (-1, 35, "x")]
    + [(PairExplorer, "drag_b", [0, tip]) for tip in ([], [1], [math.nan, 1], [math.inf, 0], None, "xy", [1, 2, 3])]
    + [(BitsExplorer, "toggle", [k]) for k in (-1, 16, 2.5, "x", True, None)]
    + [(BitsExplorer, "shift_to", [0, k]) for k in (None, math.nan, "x", math.inf)]
    + [(OwnExperimentExplorer, "choose", [k]) for k in (-1, 8, "x", None)],
    ids=repr,
)
def test_a_gesture_that_makes_no_sense_is_refused_and_leaves_nothing_half_done(make, gesture, given):
    model = opened(make)
    before = model.state(), model.summary(), model.table(), model.changes
    with pytest.raises(ValueError, match=r"got|no control"):
        getattr(model, gesture)(*given)
    assert (model.state(), model.summary(), model.table(), model.changes) == before
    model.reset()
    assert (model.state(), model.summary(), model.table()) == before[:3]


MADE: dict[type, Explorer] = {}


def opened(make):
    """One for all tests, which leave it as it was."""
    return MADE.setdefault(make, make())


def test_a_hand_beyond_the_picture_reaches_its_edge_and_no_other_step():
    model = DynamicsExplorer()
    model.draw({"-1": 3, "400": 3, "10": 1e9, "11": -1e9})
    assert model.drawn == {10: 2.0**120, 11: 2.0**-60}
    model.put(5, 1e9)
    model.put(10**6, 3)
    model.put(-1, 3)
    assert model.puts == {5: 2.0**120}
    model.hold = True
    model.put(0, 1e9)
    assert model.init_exponent == 32
    bits = BitsExplorer(number="1")
    bits.shift_to(0, 1e9)
    assert bits.value == 2.0**15


def test_a_scale_put_where_it_is_counts_its_window_anew():
    model = DynamicsExplorer(run="mlp_digits", init_exponent=4, scale_window=50)
    model.put(20, 4)
    grown = int(np.flatnonzero(model.scale > 2.0**4)[0])
    assert grown == 20 + 50
    assert model.good[grown - 1] == 50  # the ring is full when the ball hops
    assert model.good[19:21].tolist() == [20, 1]


def test_reset_forgets_what_was_drawn_and_keeps_the_opening_parameters():
    for model in (DynamicsExplorer(scale_window=60), WhatIfExplorer(window=60)):
        first = model.summary(), model.table()
        model.draw({str(k): 3.0 for k in range(50, 90)})
        assert (model.summary(), model.table()) != first
        model.reset()
        assert (model.summary(), model.table(), model.drawn) == (*first, {})


# --- copies and views


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
@pytest.mark.parametrize("make", [Sum, DynamicsExplorer, LiveExplorer, BitsExplorer])
def test_a_copy_goes_its_own_way(make, copied):
    model = make()
    heard = []
    model.observe(heard.append, "revision")
    other = copied(model)
    name, value = next(
        (n, v) for n, v in {"a": 3, "init_exponent": 20, "scale_window": 9, "number": "3"}.items() if n in make.controls
    )
    before = model.summary()
    other.set(**{name: value})
    assert other.summary() == make(**{name: value}).summary() != before
    assert (model.summary(), heard) == (before, [])
    assert other.lock is not model.lock
    setattr(other, name, model.state()[name])
    assert other.summary() == before


def test_a_copy_of_one_at_work_is_at_rest():
    model, go = Sum(), threading.Event()

    def work():
        go.wait(60)
        yield 1.0

    model.start(work)
    other = copy.deepcopy(model)
    assert (model.busy, other.busy) == (True, False)
    other.start(lambda: iter([1.0]))
    other.wait(60)
    go.set()
    model.wait(60)
    assert not model.busy


def test_a_closed_view_is_left_alone_and_the_other_goes_on():
    model, drawn = Sum(), []

    def counted(data):
        drawn.append(data.total)
        return picture(data)

    closed, view = View(model, counted), View(model, picture)
    closed.close()
    drawn.clear()
    model.a = 4
    assert drawn == []
    assert view.sentence[0] == "sum 5"
    closed.close()  # again, as Python does when it forgets the view


def test_a_button_that_is_not_there_is_named_with_those_that_are():
    view = View(Sum(), picture)
    with pytest.raises(ValueError, match="a button must be 'Reset', got 'Train'"):
        view.press("Train")


def test_workers_of_an_equal_number_are_that_number():
    assert WorkersExplorer(workers=np.float64(2.0)).summary() == WorkersExplorer(workers=2).summary()


# --- scenes


def test_a_stored_float32_lies_on_its_own_tooth_and_not_on_the_next():
    model = BitsExplorer(fmt="fp32", number="1.00000012")
    spec = bits_scene(model).spec()
    stored = next(m for m in spec["panels"][2]["marks"] if m.get("label") == "stored")
    assert model.value == 1 + 2.0**-23
    assert stored["x"] == [pytest.approx(model.value, abs=2.0**-27)]


def test_numbers_of_another_kind_with_the_same_bytes_are_not_mixed_up():
    scene = Scene()
    panel = scene.panel(x=linear("x", 0, 52), y=linear("y", 0, 1))
    panel.bars(np.zeros(52, np.uint8))
    panel.line(np.zeros(13))
    spec = scene.spec()
    bars, line = spec["panels"][0]["marks"]
    assert unpack(bars["values"], spec["data"]).shape == (52,)
    assert unpack(line["y"], spec["data"]).shape == (13,)


@pytest.mark.parametrize("axis", [linear, log2])
@pytest.mark.parametrize("ends", [(1, 1), (0, math.inf), (math.nan, 1)])
def test_an_axis_without_length_is_refused(axis, ends):
    with pytest.raises(ValueError, match="the axis 'loss' needs two ends"):
        axis("loss", *ends)


def test_an_axis_of_all_powers_of_float64_has_few_ticks():
    assert [name for _, name in log2("magnitude", -1074, 1024)["ticks"]][:2] == ["2⁻¹⁰²⁴", "2⁻⁷⁶⁸"]


@pytest.mark.parametrize("trait", [Float(1.0), Int(1, min=0), Float(1.0, max=3.0)])
def test_a_control_without_ends_has_no_slider_and_says_so(trait):
    class Open(Sum):
        controls = ("open",)
        open = trait

    model = Open()
    model.open = 2
    with pytest.raises(ValueError, match=r"open must be (a whole|a) number(| at least 0| at most 3\.0), got nan"):
        model.open = math.nan
    with pytest.raises(ValueError, match="the control open needs a min and a max"):
        View(model, picture)
