"""The base of every widget, driven without a browser; also an example of how a lesson's widget is written."""

import io
import threading
import time
from base64 import b64decode

import pytest
from PIL import Image, ImageChops
from scenes import look
from traitlets import Bool, Enum, Float, Int, Unicode

from mpkit.explorers.base import Explorer
from mpkit.plots.scene import Scene, linear, log2
from mpkit.widgets.scene import View, _grid


class Powers(Explorer):
    """The first powers of a base."""

    controls = ("base", "count", "sign", "shown", "name")
    actions = {"Grow": "grow", "Stop": "stop", "Fail": "fail"}
    base = Float(2.0, min=0.5, max=32.0).tag(label="base", scale="log2")
    count = Int(5, min=1, max=12).tag(label="powers", unit="terms")
    sign = Enum(["plus", "minus"], "plus").tag(label="sign")
    shown = Bool(True)
    name = Unicode("series")

    def compute(self):
        if self.base == 1.0:
            raise ValueError("base 1 has only one power; choose another")
        self.values = [(-1 if self.sign == "minus" else 1) * self.base**n for n in range(self.count)]

    def summary(self):
        return f"{self.count} powers of {self.base:g}, the last is {self.values[-1]:g}."

    def table(self):
        return [{"n": n, "value": v} for n, v in enumerate(self.values)]

    def grow(self):
        self.start(self._grow)

    def _grow(self):
        for n in range(100):
            time.sleep(0.002)
            self.values = [*self.values, 1.0]
            yield n / 100

    def fail(self):
        raise ValueError("this button cannot work now; press another")


def powers_scene(data):
    """The powers over their numbers, played one by one."""
    scene = Scene(height=200, width=400)
    scene.play("count", "powers", 12, every=100, first=1)
    values = [(-1 if data.sign == "minus" else 1) * n for n in range(12)]
    panel = scene.panel(x=linear("n, number", 0, 12), y=log2("value", -12, 60))
    panel.line(values, show="upto", label=f"powers of {data.base:g}, {data.name}")
    return scene


@pytest.fixture
def view():
    return View(Powers(), powers_scene)


def ask(view, **what):
    view.ask(what)


def test_every_control_changes_numbers_picture_and_sentence(view):
    seen = {look(view)}
    for name, value in {"base": 4.0, "sign": "minus", "name": "words", "shown": False}.items():
        ask(view, **{name: value})
        assert getattr(view.explorer, name) == view.state[name] == value
        seen.add(look(view))
    view.index = 8
    assert view.explorer.count == 9
    seen.add(look(view))
    assert len(seen) == 5  # what is not shown is not drawn
    assert view.summary() == view.sentence[0] == "9 powers of 4, the last is -65536."


def test_a_handle_sends_numbers_and_every_trait_takes_its_kind(view):
    ask(view, base=40)
    assert view.explorer.base == 32.0  # pulled over the end
    ask(view, count=3.4)
    assert view.explorer.count == 3
    ask(view, name=0.1002)
    assert view.explorer.name == "0.1002"


def test_the_step_is_no_control_of_the_form_and_stays_within_what_is_sent(view):
    assert [c["name"] for c in view.controls] == ["base", "sign", "shown", "name", "grow", "stop", "fail", "reset"]
    assert {k: v for k, v in view.state.items() if k != "tokens"} == {
        **{"base": 2.0, "sign": "plus", "shown": True, "name": "series"},
        **{"busy": False, "progress": 0.0, "idle": []},
    }
    view.explorer.set(count=12)
    assert view.index == 11


@pytest.mark.parametrize(
    ("trait", "want"),
    [
        (Float(2.0, min=1.25, max=16.0).tag(scale="log2", step=1), [1.25, 2.0, 4.0, 8.0, 16.0]),
        (Float(2.0, min=1.25, max=4.0).tag(scale="log2", step=0.5), [1.25, 1.414, 2.0, 2.828, 4.0]),
        (Int(50, min=1, max=1024).tag(scale="log2", step=1), [1, 2, 3, 6, 12, 25, 50, 100, 200, 400, 800, 1024]),
        (Float(0.1, min=1e-4, max=1.0).tag(scale="log10", step=1), [1e-4, 1e-3, 0.01, 0.1, 1.0]),
        (Float(2.3, min=0.1, max=2.45).tag(step=1.1), [0.1, 1.2, 2.3, 2.45]),
    ],
)
def test_a_slider_stops_at_its_limits_and_in_steps_from_its_default(trait, want):
    assert _grid(trait) == pytest.approx(want, rel=1e-12)


def test_a_refused_value_leaves_model_controls_and_picture_alone_and_says_why(view):
    before = look(view), view.explorer.state()
    ask(view, base=1.0)
    assert (look(view), view.explorer.state()) == before
    assert view.state["base"] == 2.0
    assert "base 1 has only one power" in view.sentence[1]
    ask(view, base=4.0)
    assert view.sentence[1] == ""


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"base": 64.0}, "base must be a number between 0.5 and 32.0, got 64.0"),
        ({"count": 2.5}, "count must be a whole number between 1 and 12, got 2.5"),
        ({"sign": "both"}, "sign must be one of plus, minus, got 'both'"),
        ({"count": 7, "base": 1.0}, "base 1 has only one power"),
        ({"size": 1}, "there is no control 'size'"),
    ],
)
def test_set_is_all_or_nothing(bad, reason):
    model = Powers()
    with pytest.raises(ValueError, match=reason):
        model.set(**bad)
    assert model.state() == {"base": 2.0, "count": 5, "sign": "plus", "shown": True, "name": "series"}
    assert model.values == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_reset_gives_the_first_picture_again(view):
    first = look(view)
    ask(view, count=12, base=4.0)
    assert look(view) != first
    view.press("Reset")
    assert look(view) == first


def test_the_table_follows_the_data_and_can_be_hidden(view):
    assert view.rows == []
    ask(view, table=True)
    assert view.rows[-1] == {"n": 4, "value": 16.0}
    ask(view, count=6)
    assert view.rows[-1] == {"n": 5, "value": 32.0}
    ask(view, table=False)
    assert view.rows == []


def test_the_stored_output_is_picture_and_sentence(view):
    bundle, _ = view._repr_mimebundle_()
    assert bundle["text/plain"] == view.summary()
    assert set(bundle) == {"text/plain", "text/html", "image/png", "application/vnd.jupyter.widget-view+json"}
    assert f'alt="{view.summary()}"' in bundle["text/html"]
    small, shown = (Image.open(io.BytesIO(png)).convert("RGB") for png in (b64decode(bundle["image/png"]), view.png()))
    assert small.size == shown.size
    assert max(high for _, high in ImageChops.difference(small, shown).getextrema()) < 40  # 256 colours, same picture


def test_background_work_reports_progress_and_can_be_stopped(view):
    view.press("Grow")
    assert view.explorer.busy
    view.press("Grow")
    assert "still at work" in view.explorer.message
    view.press("Stop")
    view.explorer.wait(5)
    assert not view.explorer.busy
    assert 5 < len(view.explorer.values) < 105


def test_a_button_that_cannot_work_says_so(view):
    view.press("Fail")
    assert "press another" in view.sentence[1]


def test_two_threads_never_leave_a_mixed_picture():
    view, want = View(Powers(), powers_scene), {}
    for count in (3, 9):
        view.explorer.set(count=count)
        want[count] = look(view)

    def drive(count):
        for _ in range(20):
            view.explorer.set(count=count)

    threads = [threading.Thread(target=drive, args=(count,)) for count in (3, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert look(view) == want[view.explorer.count]
    assert view.index == view.explorer.count - 1
