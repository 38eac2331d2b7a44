"""The base of every widget, driven without a browser; also an example of how a lesson's widget is written."""

import io
import threading
import time
from base64 import b64decode

import pytest
from ipywidgets import IntSlider
from PIL import Image, ImageChops
from traitlets import Bool, Enum, Float, Int

from mpkit.explorers.base import Explorer
from mpkit.plots.base import BLUE, Picture, log2_axis
from mpkit.widgets.base import View, _grid


class Powers(Explorer):
    """The first powers of a base."""

    controls = ("base", "count", "sign", "shown")
    actions = {"Grow": "grow", "Stop": "stop", "Fail": "fail"}
    base = Float(2.0, min=0.5, max=32.0).tag(label="base", scale="log2")
    count = Int(5, min=1, max=12).tag(label="powers", unit="terms", animate=100)
    sign = Enum(["plus", "minus"], "plus").tag(label="sign")
    shown = Bool(True)

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


class PowersPicture(Picture):
    size = (4.0, 2.0)

    def layout(self, figure, data):
        axes = figure.subplots()
        axes.set(xlabel="n, number", ylabel="value")
        axes.set_xlim(0, 12)
        log2_axis(axes, "y", -12, 60)
        (self.line,) = axes.plot([], [], "o-", color=BLUE)
        self.moving(self.line)

    def update(self, data):
        self.line.set_data(range(len(data.values)), [abs(v) for v in data.values])


@pytest.fixture
def view():
    return View(Powers(), PowersPicture())


def test_every_control_changes_numbers_picture_and_sentence(view):
    seen = {view.png()}
    for name, value in {"base": 4.0, "count": 9, "sign": "minus"}.items():
        view.controls[name].value = value
        assert getattr(view.explorer, name) == value
        seen.add(view.png())
    assert len(seen) == 3  # the sign is not drawn
    assert view.summary() == "9 powers of 4, the last is -65536."
    assert view.summary() in view.image.value
    assert view.summary() in view.status.value


def test_box_and_slider_show_the_same_number(view):
    view.boxes["base"].value = 8.0
    assert view.controls["base"].widget.value == 4  # of the steps 1/2, 1, 2, 4, 8, 16, 32
    view.controls["base"].widget.value = 5
    assert view.boxes["base"].value == 16.0


def test_a_value_between_two_steps_of_the_slider_stays_what_it_is(view):
    view.boxes["base"].value = 7.5
    assert view.controls["base"].widget.value == 4
    assert view.explorer.base == view.controls["base"].value == view.boxes["base"].value == 7.5
    view.controls["base"].widget.value = 5
    view.controls["base"].widget.value = 4
    assert view.explorer.base == 8.0
    assert all(isinstance(c.widget, IntSlider) for c in view.controls.values() if hasattr(c, "widget"))


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
    assert _grid(trait, trait.default_value) == pytest.approx(want, rel=1e-12)


def test_a_refused_value_leaves_model_controls_and_picture_alone_and_says_why(view):
    before = view.png(), view.explorer.state()
    view.controls["base"].widget.value = 1  # the step of base 1
    assert (view.png(), view.explorer.state()) == before
    assert view.controls["base"].value == 2.0
    assert "base 1 has only one power" in view.status.value
    view.boxes["base"].value = 4.0
    assert "only one power" not in view.status.value


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"base": 64.0}, "base must be between 0.5 and 32.0, got 64.0"),
        ({"count": 2.5}, "count must be between 1 and 12, got 2.5"),
        ({"sign": "both"}, "sign must be one of plus, minus, got 'both'"),
        ({"count": 7, "base": 1.0}, "base 1 has only one power"),
        ({"size": 1}, "there is no control 'size'"),
    ],
)
def test_set_is_all_or_nothing(bad, reason):
    model = Powers()
    with pytest.raises(ValueError, match=reason):
        model.set(**bad)
    assert model.state() == {"base": 2.0, "count": 5, "sign": "plus", "shown": True}
    assert model.values == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_reset_gives_the_first_picture_again(view):
    first = view.png()
    view.controls["count"].value = 12
    view.controls["base"].value = 4.0
    assert view.png() != first
    view.buttons["Reset"].click()
    assert view.png() == first


def test_play_step_and_back_move_the_same_number_as_the_slider(view):
    view.buttons["Step"].click()
    assert view.explorer.count == 6
    view.buttons["Play or pause"].click()
    assert view.boxes["count play"].playing
    view.boxes["count play"].value = 7
    assert view.explorer.count == view.controls["count"].value == 7
    view.buttons["Back to start"].click()
    assert view.explorer.count == 1


def test_the_table_follows_the_data_and_can_be_hidden(view):
    view.buttons["Show as table"].click()
    assert "<td>16.0</td>" in view._table.value
    view.controls["count"].value = 6
    assert "<td>32.0</td>" in view._table.value
    view.buttons["Show as table"].click()
    assert view._table.value == ""


def test_the_stored_output_is_picture_and_sentence(view):
    bundle = view._repr_mimebundle_()
    assert bundle["text/plain"] == view.summary()
    assert set(bundle) == {"text/plain", "text/html", "image/png", "application/vnd.jupyter.widget-view+json"}
    assert f'alt="{view.summary()}"' in bundle["text/html"]
    small, shown = (Image.open(io.BytesIO(png)).convert("RGB") for png in (b64decode(bundle["image/png"]), view.png()))
    assert small.size == shown.size
    assert max(high for _, high in ImageChops.difference(small, shown).getextrema()) < 40  # 256 colours, same picture


def test_background_work_reports_progress_and_can_be_stopped(view):
    view.buttons["Grow"].click()
    assert view.explorer.busy
    view.buttons["Grow"].click()
    assert "still at work" in view.explorer.message
    view.buttons["Stop"].click()
    view.explorer.wait(5)
    assert not view.explorer.busy
    assert 5 < len(view.explorer.values) < 105


def test_a_button_that_cannot_work_says_so(view):
    view.buttons["Fail"].click()
    assert "press another" in view.status.value


def test_two_threads_never_leave_a_mixed_picture():
    view, want = View(Powers(), PowersPicture()), {}
    for count in (3, 9):
        view.explorer.set(count=count)
        want[count] = view.png()

    def drive(count):
        for _ in range(20):
            view.explorer.set(count=count)

    threads = [threading.Thread(target=drive, args=(count,)) for count in (3, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert view.png() == want[view.explorer.count]
    assert view.controls["count"].value == view.explorer.count
