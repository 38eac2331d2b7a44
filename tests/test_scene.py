"""Pictures as data: what a scene says, and that the page and the stored picture show the same."""

import contextlib
import copy
import inspect
import json
import pickle
import pkgutil
import re
import threading
from collections.abc import Callable
from functools import cache
from importlib import import_module
from itertools import combinations
from typing import get_type_hints

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import CHROMIUM, NARROW, QUIET
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.text import Text
from scenes import THEMES, page, plain, unpacked, weight

from mpkit import widgets
from mpkit.explorers.base import Explorer
from mpkit.explorers.scaling import DynamicsExplorer
from mpkit.plots.scaling import dynamics_scene
from mpkit.plots.scene import KINDS, ROLES, Scene, exponents, linear, log2, names, power_of_two, unpack
from mpkit.plots.static import figure, said
from mpkit.widgets import ahead
from mpkit.widgets import scene as module
from mpkit.widgets.scaling import dynamics_view
from mpkit.widgets.scene import HERE, View

TOPICS = [import_module(f"mpkit.widgets.{info.name}") for info in pkgutil.iter_modules(widgets.__path__)]
VIEWS: dict[str, Callable[..., View]] = {
    f"{topic.__name__.rpartition('.')[2]}.{name.removesuffix('_view')}": make
    for topic in TOPICS
    for name, make in vars(topic).items()
    if name.endswith("_view")
}
INSIDE = """const inside = (e) => { const g = e.closest('[clip-path]'); // parts that move may be cut off
  if (!g) return true;
  const cut = document.getElementById(g.getAttribute('clip-path').slice(5, -1)).firstChild.getBBox();
  const page = g.ownerSVGElement.getBoundingClientRect(), at = e.getBoundingClientRect();
  const middle = (at.left + at.right) / 2 - page.left;
  return middle >= cut.x + 5 && middle <= cut.x + cut.width - 5; };
const words = (stage) => [...stage.querySelectorAll('text')]
  .filter((e) => e.textContent && e.getClientRects().length && inside(e));"""
WORDS = f"""() => {{ {INSIDE}
  return words(document).map((e) => [...e.childNodes].map((t) => t.textContent).join('\\n')); }}"""
LINES = """() => [...document.querySelectorAll('.mpk-stage svg[role=img] path[data-mark]')]
  .filter((e) => e.getAttribute('d') && e.getClientRects().length)
  .map((e) => { const b = e.getBBox(), dx = e.getCTM().e, points = e.dataset.mark === 'points';
    return [b.x + dx, b.x + b.width + dx, b.y, b.y + b.height]
      .map((v, i, all) => (points ? (all[i & 2] + all[i | 1]) / 2 : v)); })"""
BOXES = """() => [...document.querySelectorAll('.mpk-stage svg[role=img] path.box')]
  .filter((e) => e.getAttribute('d') && e.getClientRects().length)
  .map((e) => [e.getBBox(), e.getCTM().e])
  .map(([b, dx]) => [b.x + dx, b.x + b.width + dx, b.y, b.y + b.height])"""
OVERLAPS = f"""() => {{ {INSIDE}
  return [...document.querySelectorAll('.mpk-stage')].flatMap((stage) => {{
    const all = words(stage).map((e) => [e.textContent, e.getBoundingClientRect()]), found = [];
    for (const [i, [s, a]] of all.entries()) for (const [t, b] of all.slice(i + 1)) {{
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      if (wide > -2 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 5) found.push(s + ' | ' + t);
    }}
    return found; }}); }}"""
OUTSIDE = f"""() => {{ {INSIDE}
  return [...document.querySelectorAll('.mpk-stage')].flatMap((stage) => {{
    const page = stage.querySelector('svg').getBoundingClientRect();
    return words(stage).filter((e) => {{ const a = e.getBoundingClientRect();
      return Math.max(page.left - a.left, a.right - page.right, page.top - a.top, a.bottom - page.bottom) > 1; }})
      .map((e) => e.textContent); }}); }}"""
BELOW_TITLES = """() => [...document.querySelectorAll('.mpk-stage')].flatMap((stage) => {
  const boxes = (what) => [...stage.querySelectorAll(what)].filter((e) => e.getClientRects().length)
    .map((e) => [e.textContent, e.getBoundingClientRect()]);
  return boxes('text[font-weight="600"]').flatMap(([title, a]) =>
    boxes('.handle circle:not(.plain)').filter(([, b]) => Math.min(a.right, b.right) > Math.max(a.left, b.left)
      && a.bottom + 2 > b.top && a.top < b.bottom).map(() => title)); })"""
COVERED = f"""() => {{ {INSIDE}
  return [...document.querySelectorAll('.mpk-stage')].flatMap((stage) => {{
    const balls = [...stage.querySelectorAll('.handle circle:not(.plain), path.glyph')]
      .filter((e) => e.getClientRects().length && (e.getAttribute('d') ?? 'M').split('M').length === 2)
      .map((e) => [e, e.getBoundingClientRect()]);
    return words(stage).flatMap((e) => {{ const a = e.getBoundingClientRect();
      return balls.filter(([ball, b]) => ball.parentNode !== e.parentNode
        && Math.min(a.right, b.right) - Math.max(a.left, b.left) > 3
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4).map(() => e.textContent); }}); }}); }}"""
STRUCK = """() => [...document.querySelectorAll('g[clip-path]')].flatMap((g) => {
  const cut = document.getElementById(g.getAttribute('clip-path').slice(5, -1)).firstChild.getBBox();
  const page = g.ownerSVGElement.getBoundingClientRect(), later = Node.DOCUMENT_POSITION_FOLLOWING;
  const between = (v, to) => 0 < v && v < to;
  return [...document.querySelectorAll('path.grid')].filter((e) => { const a = e.getBoundingClientRect();
    const x = (a.left + a.right) / 2 - page.left - cut.x, y = (a.top + a.bottom) / 2 - page.top - cut.y;
    return !g.contains(e) && (g.compareDocumentPosition(e) & later) && between(x, cut.width) && between(y, cut.height);
  }); }).length"""
CUT = """() => [...document.querySelectorAll('select')].filter((e) => { const wide = e.offsetWidth;
  e.style.maxWidth = 'none';
  const cut = e.offsetWidth > wide;
  e.style.maxWidth = '';
  return cut; }).map((e) => e.dataset.control)"""
RGB = """const brush = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const rgb = (colour) => { brush.clearRect(0, 0, 1, 1); brush.fillStyle = colour; brush.fillRect(0, 0, 1, 1);
  return [...brush.getImageData(0, 0, 1, 1).data]; };
const fill = (e) => rgb(getComputedStyle(e).fill);"""
INKS = f"""() => {{ {RGB}
  return [...document.querySelectorAll('.mpk-stage text')].filter((e) => e.textContent)
    .map((e) => [[...e.childNodes].map((t) => t.textContent).join('\\n'), ...fill(e).slice(0, 3)]); }}"""
PALE = f"""() => {{ {INSIDE} {RGB}
  const linear = (v) => (v <= 10 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (e, x, y) => e.classList.contains('halo') ? null : document.elementsFromPoint(x, y)
    .find((o) => o.matches('path.box, path.band') && o.getAttribute('fill')?.[0] !== 'u' && fill(o)[3] > 0);
  const ground = (e, c = rgb(getComputedStyle(e).backgroundColor)) => c[3] ? c : ground(e.parentNode);
  return words(document).flatMap((e) => {{ const a = e.getBoundingClientRect(), page = ground(e);
    return [0.1, 0.5, 0.9].map((share) => {{
      const under = behind(e, a.left + share * a.width, (a.top + a.bottom) / 2);
      const both = [fill(e), under ? fill(under) : page];
      const [dark, bright] = both.map(light).sort((p, q) => p - q);
      return [e.textContent, (bright + 0.05) / (dark + 0.05)]; }}).filter(([, contrast]) => contrast < 4.5).slice(0, 1);
  }}); }}"""
FAINT = f"""() => {{ {RGB}
  const linear = (v) => (v <= 10 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const contrast = (...pair) => {{ const [a, b] = pair.map(light).sort((p, q) => p - q);
    return (b + 0.05) / (a + 0.05); }};
  const page = rgb(getComputedStyle(document.querySelector('.mpk')).backgroundColor);
  const stroke = (e) => rgb(getComputedStyle(e).stroke);
  const seen = (e, kind) => !/none|url/.test(getComputedStyle(e)[kind]);
  return [...document.querySelectorAll('svg[role=img] > g')].flatMap((panel) => {{
    const boxes = [...panel.querySelectorAll('path.box')].filter((e) => e.getAttribute('d') && seen(e, 'fill'));
    const drawn = boxes.filter((e) => seen(e, 'stroke')), tints = boxes.filter((e) => !seen(e, 'stroke')).map(fill);
    return drawn.flatMap((e) => [page, ...tints].filter((under) => contrast(stroke(e), under) < 3)
      .map((under) => [getComputedStyle(e).fill, getComputedStyle(e).stroke, under])); }}); }}"""
SOURCE = (HERE / "scene.js").read_text()


@pytest.fixture(scope="module")
def browser(chromium):
    browser = chromium.launch(executable_path=CHROMIUM, args=QUIET)
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def touch(browser):
    """One tab for all tests, on a machine that can be touched."""
    return browser.new_context(has_touch=True).new_page()


@pytest.fixture
def show(touch, tmp_path):
    """Views in a bare page, as wide as their scene; nothing may have failed when the test ends."""

    def show(*views, theme="light", motion="no-preference"):
        wide = max(view.spec["width"] for view in views)
        touch.set_viewport_size({"width": wide + 16, "height": 900})
        touch.emulate_media(reduced_motion=motion)
        file = tmp_path / "page.html"
        file.write_text(page(views, theme))
        touch.goto(file.as_uri())
        touch.wait_for_function("window.done && models.length", polling=20)
        return touch

    yield show
    assert touch.evaluate("window.errors ?? []") == []


@cache
def made(name: str) -> View:
    """A view as it opens, for tests that leave it alone."""
    return VIEWS[name]()


def mark(view, label):
    """The first mark of that label, with its numbers."""
    kept = view.kept | view.spec["data"]
    return next(
        {k: unpack(v, kept) for k, v in m.items()}
        for panel in view.spec["panels"]
        for m in panel["marks"]
        if m.get("label") == label
    )


def asked(tab):
    """What the reader did, in order, without the counter, and without the step at which a played picture rests."""
    return [question["ask"] for name, question in tab.evaluate("models[0].sent") if name == "ask" and question["ask"]]


def dawdle(tab):
    """From now on what the page does "a moment later" it does ten moments later: so late can a busy machine look."""
    tab.evaluate("() => { const soon = setTimeout; window.setTimeout = (f, ms) => soon(f, 10 * ms); }")


def slow(tab):
    """From now on the kernel answers when it is told to: it does, and the page asks what waits."""
    tab.evaluate("models[0].slow = true")


def answer(tab):
    tab.evaluate("models[0].done()")


def narrow(tab):
    """As in a window of 900 pixels."""
    tab.set_viewport_size({"width": NARROW + 16, "height": 900})
    fits = f"[...document.querySelectorAll('.mpk-stage > svg')].every((e) => e.clientWidth <= {NARROW})"
    tab.wait_for_function(fits, polling=20)


def test_what_makes_a_view_is_a_function_known_by_its_name():
    """Though it is a row of a table: it can be pickled, and help, signature and types are those of a function there."""
    for name, make in VIEWS.items():
        assert pickle.loads(pickle.dumps(make)) is make
        assert make.__qualname__ == make.__name__ == f"{name.rpartition('.')[2]}_view"
        assert str(inspect.signature(make)) == "(**params: 'object') -> 'View'"
        assert get_type_hints(make) == {"params": object, "return": View}
        explorer = type(made(name).explorer)
        assert make.__doc__.endswith(f"; parameters as `{explorer.__name__}`.")
        assert getattr(inspect.getmodule(make), explorer.__name__) is explorer


def test_the_scene_says_what_the_explorer_computed():
    view = dynamics_view(scale_window=20)
    data = view.explorer
    assert np.allclose(2.0 ** mark(view, "loss scale")["y"], data.scale, rtol=1e-6)
    assert mark(view, "skipped step")["since"].tolist() == np.flatnonzero(~data.finite).tolist()
    assert np.array_equal(mark(view, "decision")["codes"], [sorted(set(data.reasons)).index(r) for r in data.reasons])


@pytest.mark.parametrize("name", VIEWS)
def test_a_line_at_the_step_stands_at_the_number_that_is_told(name):
    """Also where the first step is 1."""
    view = VIEWS[name]()
    rules = [(i, m) for i, p in enumerate(view.spec["panels"]) for m in p["marks"] if m.get("at") == "index"]
    for i, _ in rules:
        view.index = view.spec["index"]["count"] // 3
        drawn = figure(view.spec | {"kept": view.kept}, view.index)
        lines = [line.get_xdata() for line in drawn.axes[i].lines]
        assert [view.explorer.state()[view._step]] * 2 in [list(x) for x in lines if len(x) == 2], lines


@pytest.mark.parametrize("name", VIEWS)
def test_a_change_costs_at_most_25_kb(name):
    assert weight(made(name).spec) < 25_000


@pytest.mark.parametrize("name", VIEWS)
def test_reset_shows_the_opening_picture_from_any_choice_and_step(name):
    view = VIEWS[name]()
    if "stop" in {c["name"] for c in view.controls}:
        return  # a training has its own test: a reset does not undo its steps
    first, opened = plain(view.spec | {"kept": view.kept}), view.index
    for control in view.controls:
        others = [v for _, v in control["options"]] if control["kind"] == "choice" else control.get("grid", [])
        if others:
            view.ask({control["name"]: others[-1]})
            view.index = view.spec.get("index", {"count": 1})["count"] // 3
            view.press("Reset")
            assert plain(view.spec | {"kept": view.kept}) == first, control["name"]
            assert view.index == opened, control["name"]


@pytest.mark.parametrize("name", VIEWS)
def test_no_stored_view_is_blank(name):
    """A view of a training that nobody has started yet shows one that was recorded."""
    view = made(name)
    kept, drawn = view.kept | view.spec["data"], 0
    for m in (m for panel in view.spec["panels"] for m in panel["marks"]):
        y = np.asarray(unpack(m.get("y", m.get("values", m.get("y1", []))), kept), dtype=float)
        if m["type"] in ("line", "pen", "points", "bars", "boxes", "arrows") and not (
            m.get("quiet") and y.size == 1
        ):  # a region
            drawn += np.isfinite(y).sum()
    assert drawn >= 4
    if name in ("start.start", "scaling.live"):
        assert len(mark(view, "a recorded run")["y"]) == len(view.explorer.recorded.losses)


@pytest.mark.parametrize("name", VIEWS)
def test_page_and_stored_picture_show_the_same(show, name):
    """Every word in the same order and every line through the same pixels, at the first, a middle and the last step."""
    view = made(name)
    tab = show(view)
    count = view.spec.get("index", {"count": 1})["count"]
    for index in {0, count // 2, count - 1}:
        tab.evaluate(f"models[0].put('index', {index})")
        drawn = figure(view.spec | {"kept": view.kept}, index)
        drawn.canvas.draw()
        seen = tab.evaluate(WORDS)
        for text in (t for a in drawn.axes for t in a.findobj(match=_is_text) if t.get_visible() and t.get_text()):
            box = text.get_window_extent()
            assert max(-box.x0, box.x1 - drawn.bbox.width) < 3, f"{text.get_text()} leaves the stored picture"
        legends = tab.evaluate("[...document.querySelectorAll('.mpk-legend span')].map((e) => e.textContent)")
        words = [
            t.get_text() for a in drawn.axes for t in a.findobj(match=_is_text) if t.get_visible() and t.get_text()
        ]
        assert sorted(seen) == sorted(words)
        assert legends == ([t.get_text() for t in drawn.legends[0].get_texts()] if drawn.legends else [])
        assert all(legend.get_window_extent().height < 26 for legend in drawn.legends), "a second row covers a title"
        lines = tab.evaluate(LINES)
        stored = [box for a in drawn.axes for line in a.lines if line.get_gid() and (box := _pixels(a, line, drawn))]
        assert len(lines) == len(stored)
        assert np.abs(np.array(lines) - np.array(stored)).max(initial=0) < 1.5
        shapes = [p for a in drawn.axes for p in a.patches if isinstance(p, Rectangle | FancyBboxPatch)]
        boxes = [_extent(shape, drawn) for shape in shapes]
        assert np.allclose(_hull(tab.evaluate(BOXES)), _hull(boxes), atol=2)
    assert tab.locator(".mpk-stage").bounding_box()["y"] < 60
    for wide in (view.spec["width"] + 16, NARROW + 16):
        tab.set_viewport_size({"width": wide, "height": 900})
        tab.wait_for_function(f"document.querySelector('.mpk-stage svg').clientWidth <= {wide}", polling=20)
        assert overlaps(tab) == []
        assert tab.evaluate(OUTSIDE) == [], "words that leave the picture"
        assert tab.evaluate(COVERED) == [], "words under a ball"
    assert tab.evaluate(STRUCK) == 0, "grid lines over the marks"
    assert tab.evaluate(CUT) == [], "choices that their box cuts"
    for what, given in shown_controls(name):
        tab.evaluate("(given) => Object.entries(given).forEach(([name, value]) => models[0].put(name, value))", given)
        assert tab.locator(".mpk-form").bounding_box()["height"] <= 54, f"three rows of controls after {what}"
        assert tab.locator(".mpk-legend").bounding_box()["height"] <= 26, f"a legend of two rows after {what}"


def shown_controls(name):
    """(what leads there, what the page gets) of every set of controls that a view can come to show: by one or two
    choices, and by what is drawn or trained then.
    """
    view, found = made(name), {}

    def keep(what):
        given = {k: plain(getattr(view, k)) for k in ("kept", "spec", "state")}
        found.setdefault(tuple(view.state["idle"]), (what, given))

    keep("opening")
    if type(view.explorer).idle is not Explorer.idle:
        view = VIEWS[name]()
        options = {c["name"]: [v for _, v in c["options"]] for c in view.controls if c["kind"] == "choice"}
        options |= {c["name"]: [False, True] for c in view.controls if c["kind"] == "checkbox"}
        options = {k: [v for v in values if v != view.state[k]] for k, values in options.items()}
        few = [k for k, values in options.items() if len(values) <= 4]
        choices = [{k: v} for k, values in options.items() for v in values]
        choices += [{a: x, b: y} for a, b in combinations(few, 2) for x in options[a] for y in options[b]]
        for choice in [{}, *choices]:
            view.ask({"reset": True} | choice)
            keep(choice)
            if name == "experiment.own_experiment":
                view.explorer.results = view.explorer.shown
                view.explorer.touch()
            elif "undraw" in view.state["idle"]:
                view.ask({"draw": {"0": 3.0}})
            keep(f"{choice} and a deed")
    return found.values()


STATES: list[tuple[str, dict[str, object], int | None]] = [  # crowded ones: what was chosen, and the step
    ("scaling.dynamics", {"fmt": "bf16", "hold": True}, 120),
    ("scaling.dynamics", {"run": "growing_activations"}, 200),
    ("scaling.dynamics", {"run": "rare_outliers", "apart": True}, 60),
    ("scaling.zoo", {"situation": "model", "same_start": False}, 199),
    ("formats.bits", {"fmt": "fp32", "number": "1e-40", "pinned": "fp16"}, None),
    ("formats.gradients", {"fmt": "bf16"}, 0),
    ("evidence.run", {}, 399),
    ("evidence.what_if", {}, None),
    ("evidence.what_if", {"init": 0, "factor": 8.0, "window": 1}, None),
    ("evidence.grid", {"init": 10}, None),
    ("rounding.staircase", {"fmt": "e2m1", "span": 3}, None),
    ("evidence.detective", {"name": "B", "dtype": "bfloat16", "exponent": -8}, 14),
    ("formats.bits", {"fmt": "e2m1", "number": "0"}, None),
    ("boost.boost", {"mode": "tuned", "full_step_fraction": 0.0, "compare": "freezing"}, None),
    ("training.underflow", {"format": "e4m3"}, 30),
    ("boost.less_bn", {"network": "LeNet-5"}, None),
    ("optimizers.decay", {"parameter": "bn.beta"}, 200),
]


def test_words_find_room_in_crowded_states(show):
    views = []
    for name, chosen, step in STATES:
        views.append(VIEWS[name]())
        for control, value in chosen.items():
            views[-1].ask({control: value})
        if step is not None:
            views[-1].index = step
    tab = show(*views)
    narrow(tab)
    assert overlaps(tab) == []
    assert tab.evaluate(OUTSIDE) == [], "words that leave the picture"
    assert tab.evaluate(COVERED) == [], "words under a ball"
    rows = tab.evaluate("[...document.querySelectorAll('.mpk-legend')].map((e) => e.clientHeight)")
    assert max(rows) <= 26, "a legend of two rows"


@pytest.mark.parametrize("theme", [0, 1])
def test_words_in_the_cells_of_a_table_can_be_read(theme):
    """Contrast of 4.5 in every cell, whatever it holds, as WCAG 2.2 asks (1.4.3)."""

    def rgb(role):
        return np.array([int(ROLES[role][theme][i : i + 2], 16) for i in (1, 3, 5)])

    def light(colour):
        return (
            np.where(colour <= 10, colour / 3294.6, ((colour / 255 + 0.055) / 1.055) ** 2.4) * [0.2126, 0.7152, 0.0722]
        ).sum()

    for name in ("scaling.sweep", "evidence.grid", "evidence.what_if"):
        cells = mark(made(name), "cell")
        for k, fill in enumerate(cells["fill"]):
            role, share = fill.split("/")
            ink = cells.get("ink", "ink")
            behind = light(float(share) * rgb(role) + (1 - float(share)) * rgb("paper"))
            over = light(rgb(ink if isinstance(ink, str) else ink[k]))
            assert (max(behind, over) + 0.05) / (min(behind, over) + 0.05) >= 4.5


def _is_text(artist):
    from matplotlib.text import Text

    return isinstance(artist, Text)


def _extent(patch, drawn):
    at, total = patch.get_window_extent(), drawn.bbox.height - 26
    return [at.x0, at.x1, total - at.y1, total - at.y0]


def _hull(boxes):
    """Around all of them: left, right, top, bottom."""
    return [f([box[i] for box in boxes], default=0) for i, f in enumerate((min, max, min, max))]


def _pixels(axes, line, drawn):
    at = axes.transData.transform(line.get_xydata())
    at = at[np.isfinite(at).all(1)]
    if not len(at):
        return None
    (left, low), (right, high) = at.min(0), at.max(0)
    if line.get_gid() == "points":  # the size of the glyphs left out
        left, low = right, high = (left + right) / 2, (low + high) / 2
    total = drawn.bbox.height - 26
    return [left, right, total - high, total - low]


@pytest.mark.parametrize(
    "settings",
    [
        {"scale_factor": 16.0},
        {"scale_window": 1},
        {"scale_window": 400},
        {"run": "growing_activations"},
        {"init_exponent": 0},
    ],
)
def test_extreme_settings_draw_without_a_nan(show, settings):
    tab = show(dynamics_view(**settings))
    assert "NaN" not in tab.inner_html(".mpk-stage")
    assert tab.locator(".mpk-stage path.line").count() >= 4


def test_equal_steps_look_equal_and_others_do_not(show):
    tab = show(dynamics_view())
    look = lambda i: tab.evaluate(f"models[0].put('index', {i}); document.querySelector('.mpk-stage svg').innerHTML")  # noqa: E731
    assert look(100) != look(300)
    assert look(100) == look(100)


def test_a_drag_and_the_keys_ask_for_values_in_steps(show):
    tab = show(dynamics_view(floor_exponent=0, step=30))
    tab.locator("[data-name=init_exponent]").focus()
    grip = tab.locator("[data-name=init_exponent] circle").bounding_box()
    tab.mouse.move(grip["x"] + 7, grip["y"] + 7)
    tab.mouse.down()
    slow(tab)
    tab.mouse.move(grip["x"] + 7, grip["y"] + 12)
    for y in range(18, 36, 6):
        tab.mouse.move(grip["x"] + 7, grip["y"] + y)
        answer(tab)
    tab.mouse.up()
    tab.keyboard.press("ArrowUp")
    answer(tab)
    values = [what["init_exponent"] for what in asked(tab)]
    assert len(values) >= 3
    assert values[:-1] == sorted(values[:-1], reverse=True)
    assert values[-1] == values[-2] + 1
    assert all(v == round(v) for v in values)
    assert tab.locator("[data-name=init_exponent]").get_attribute("aria-valuenow") == str(values[-1])


def test_nothing_that_was_done_gets_lost_while_the_kernel_is_at_work(show):
    """Trap: of a trait ipywidgets sends the latest value alone while an earlier one is under way."""
    tab = show(VIEWS["formats.bits"]())
    slow(tab)
    first, second, third = (tab.locator(".pick").nth(i) for i in range(3))
    first.press("Enter")
    for pick in (second, third, second):
        pick.press("Enter")
    tab.locator("[data-control=number]").fill("0.5")
    tab.locator("[data-control=number]").press("Enter")
    tab.locator("[data-control=number]").fill("0.75")
    tab.locator("[data-control=number]").press("Enter")
    tab.get_by_role("button", name="Reset").click()
    assert asked(tab) == [{"toggle": 15}]  # the others wait for its answer
    for _ in range(9):
        answer(tab)
    assert asked(tab) == [
        *({"toggle": bit} for bit in (15, 14, 13, 14)),
        {"number": "0.75"},  # of one that waits the newest value counts
        {"reset": True},
    ]


def test_two_strokes_while_the_kernel_is_at_work_arrive_both(show):
    tab = show(dynamics_view(step=200))
    slow(tab)
    box = tab.locator(".mpk-over").bounding_box()
    for start in (100, 400):
        tab.mouse.move(box["x"] + start, box["y"] + 100)
        tab.mouse.down()
        for x in (10, 20, 30):
            tab.mouse.move(box["x"] + start + x, box["y"] + 220)
        tab.mouse.up()
    for _ in range(3):
        answer(tab)
    first, whole, second = (list(map(int, what["draw"])) for what in asked(tab))
    assert min(first) == min(whole)
    assert len(whole) > 3
    assert min(second) > max(whole) + 10


def test_the_kernel_answers_every_question_even_one_that_fails():
    view, told = dynamics_view(step=50), []
    view.send = told.append
    view._handle_custom_msg({"ask": {"scale_window": 30}, "index": 40, "n": 1}, [])
    assert (view.explorer.scale_window, view.explorer.step) == (30, 40)
    view._handle_custom_msg({"ask": {"floor_exponent": 10}, "index": 40, "n": 2}, [])  # above a start of 2^4: refused
    view.explorer.set = lambda **_: 1 / 0
    with contextlib.suppress(ZeroDivisionError):
        view._handle_custom_msg({"ask": {"scale_window": 31}, "index": 40, "n": 3}, [])
    assert told == [{"done": 1}, {"done": 2}, {"done": 3}]


def test_every_handle_moves_by_keyboard_and_is_named(show):
    view = dynamics_view(apart=True)
    tab = show(view)
    handles = tab.locator(".handle")
    assert handles.count() == 7
    slow(tab)
    for i in range(handles.count()):
        handle = handles.nth(i)
        assert len(handle.get_attribute("aria-label")) > 3
        before = handle.get_attribute("aria-valuenow")
        handle.press("ArrowDown" if float(before) > float(handle.get_attribute("aria-valuemin")) else "ArrowUp")
        assert handle.get_attribute("aria-valuenow") != before


def test_a_vector_is_dragged_by_its_tip_and_moved_by_keys(show):
    tab = show(VIEWS["adasum.adasum"]())
    tip = tab.locator("[data-name=drag_b]")
    grip = tip.locator("circle").bounding_box()
    x, y = grip["x"] + grip["width"] / 2, grip["y"] + grip["height"] / 2
    tab.mouse.move(x, y)
    tab.mouse.down()
    slow(tab)
    tab.mouse.move(x - 30, y - 30, steps=3)
    tab.mouse.up()
    answer(tab)
    dragged = asked(tab)[-1]["drag_b"][1]
    assert dragged[0] < 0.75 < 1.3 < dragged[1]
    tip.press("ArrowUp")
    tip.press("ArrowRight")
    answer(tab)
    moved = asked(tab)[-1]["drag_b"][1]
    assert np.allclose(np.subtract(moved, dragged), 0.1)


@pytest.mark.parametrize(
    ("name", "handle", "by"),
    [("scaling.dynamics", "init_exponent", (0, 40)), ("training.underflow", "exponent", (60, 0))],
)
def test_a_finger_drags_a_handle_both_ways(show, name, handle, by):
    """A vertical drag must not scroll the page instead."""
    tab = show(VIEWS[name]())
    finger, grip = tab.context.new_cdp_session(tab), tab.locator(f"[data-name={handle}]")
    before, box = float(grip.get_attribute("aria-valuenow")), grip.locator("circle").bounding_box()
    for kind, share in (
        ("touchStart", 0),
        ("touchMove", 0.3),
        ("touchMove", 0.6),
        ("touchMove", 1),
        ("touchEnd", None),
    ):
        points = [] if share is None else [{"x": box["x"] + 7 + share * by[0], "y": box["y"] + 7 + share * by[1]}]
        finger.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        if kind == "touchMove":
            slow(tab)
    assert abs(float(grip.get_attribute("aria-valuenow")) - before) >= 3


@pytest.mark.parametrize("name", VIEWS)
def test_every_handle_is_moved_by_keys_and_its_value_can_be_typed(show, name):
    view = made(name)
    tab = show(view)
    slow(tab)
    handles = tab.locator(".handle")
    for i in range(handles.count()):
        handle = handles.nth(i)
        told = lambda handle=handle: [handle.get_attribute(f"aria-value{kind}") for kind in ("now", "text")]  # noqa: E731
        before = told()
        top = float(handle.get_attribute("aria-valuenow")) >= float(handle.get_attribute("aria-valuemax"))
        handle.press("ArrowDown" if top else "ArrowUp")
        assert told() != before
    steps = view.spec.get("index", {}).get("name")
    typed = {c["name"] for c in view.controls if c["kind"] in ("range", "text")} | {steps}
    marks = [m for panel in view.spec["panels"] for m in panel["marks"] if m["type"] == "handle"]
    assert {m["name"] for m in marks if not m.get("gesture")} <= typed


def test_words_stay_in_the_box_in_which_they_begin(show):
    """Of the training step, the most words in the smallest boxes, in a window of 900 pixels."""
    view = VIEWS["training.step"](bad=True)
    tab = show(view)
    narrow(tab)
    over = f"""() => {{ {INSIDE}
      const boxes = [...document.querySelectorAll('path.box')].map((e) => e.getBoundingClientRect());
      return words(document).filter((e) => {{ const a = e.getBoundingClientRect(), in_ = (b) => b.left <= a.left
        && a.left < b.right && b.top <= a.top && a.top < b.bottom;
        return boxes.some((b) => in_(b) && a.right > b.right - 2); }}).map((e) => e.textContent); }}"""
    for phase in range(8):
        tab.evaluate(f"models[0].put('index', {phase})")
        assert tab.evaluate(over) == []


def test_the_names_of_steps_are_shown_whole_or_not_at_all(show):
    """Where the axis moves under the marks, they are cut at its ends; a name there would be another number."""
    view = made("scaling.dynamics")
    tab = show(view)
    ticks = f"""() => {{ {INSIDE} const cut = document.querySelector('[clip-path]');
      return words(document).map((e) => cut.contains(e) ? '' : e.textContent).filter((t) => /^\\d+$/.test(t)); }}"""
    for step, ends in ((300, ["240", "320"]), (301, ["260", "320"]), (319, ["260", "320"]), (320, ["260", "340"])):
        tab.evaluate(f"models[0].put('index', {step})")
        drawn = figure(view.spec | {"kept": view.kept}, step).axes[0]
        stored = [label.get_text() for label in drawn.get_xticklabels()]
        assert [stored[0], stored[-1]] == ends
        assert tab.evaluate(ticks)[: len(stored)] == stored


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_what_was_removed_slides_out_once(show, motion):
    view = VIEWS["boost.boost"]()
    tab = show(view, motion=motion)
    moves = "[...document.querySelectorAll('.leaves')].map((e) => getComputedStyle(e).animationName)"
    view.ask({"compare_with": "O1 tuned"})
    drawn = []
    for fresh in (True, False):  # drawn again, for whatever reason, nothing leaves again, and the picture is the same
        tab.evaluate("(given) => models[0].put('spec', given)", plain(view.spec))
        assert set(tab.evaluate(moves)) == {"mpk-leave" if fresh and motion == "no-preference" else "none"}
        drawn.append(tab.locator("svg[role=img]").first.inner_html())
    assert drawn[0] == drawn[1]


def test_the_arrows_of_a_number_box_go_as_far_as_those_of_its_slider(show):
    tab = show(VIEWS["boost.freeze"]())
    box = tab.locator("[data-box=full_step_fraction]")
    box.press("ArrowUp")
    box.press("Enter")
    assert asked(tab) == [{"full_step_fraction": 0.75}]
    assert box.evaluate("(e) => e.checkValidity()")


def test_an_emptied_box_asks_nothing_and_gets_its_value_back(show):
    tab = show(dynamics_view())
    box = tab.locator("[data-box=scale_window]")
    box.fill("")
    box.press("Tab")
    assert (asked(tab), box.input_value()) == ([], "50")


def test_bits_are_buttons_that_the_arrow_keys_walk_along(show):
    tab = show(VIEWS["formats.bits"]())
    tab.locator(".pick").first.press("Enter")
    tab.locator(".pick").first.press("ArrowRight")
    tab.keyboard.press("Space")
    assert asked(tab) == [{"toggle": 15}, {"toggle": 14}]
    assert tab.locator(".pick").first.get_attribute("aria-label") == "bit 15, sign: 0"


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_the_marker_glides_to_where_a_bit_sends_it(show, motion):
    """But not away from the pointer that drags it, and not for readers who want no motion."""
    view = VIEWS["formats.bits"](number="1")
    tab = show(view, motion=motion)
    run = "() => document.getAnimations().filter((a) => a.transitionProperty === 'cx').length"
    tab.evaluate("document.querySelector('.glides').getBoundingClientRect()")
    moves = []
    for dragged in (False, True):
        if dragged:
            tab.mouse.move(60, 14)
            tab.mouse.down()
        view.ask({"toggle": 13})
        tab.evaluate("(given) => models[0].put('spec', given)", plain(view.spec))
        moves.append(tab.evaluate(run))
    tab.mouse.up()
    assert moves == [motion == "no-preference", 0]


@pytest.mark.parametrize("name", VIEWS)
def test_whatever_can_be_chosen_in_the_picture_is_a_button_of_its_own(show, name):
    view = made(name)
    marks = [m for panel in view.spec["panels"] for m in panel["marks"] if m.get("pick")]
    if not marks:
        return
    tab = show(view)
    buttons = tab.locator(".pick")
    assert buttons.count() == sum(len(m["keys"]) for m in marks)
    slow(tab)
    for i in range(buttons.count()):
        buttons.nth(i).press("Enter")
        answer(tab)
    assert asked(tab) == [{m["pick"]: key} for m in marks for key in m["keys"]]


def test_a_histogram_under_its_scale_is_dragged_without_the_kernel(show):
    tab = show(VIEWS["training.underflow"]())
    look = lambda: tab.inner_html(".mpk-stage svg")  # noqa: E731
    before = look()
    tab.locator("[data-name=exponent]").press("PageUp")
    assert look() != before
    assert tab.locator("[data-name=exponent]").get_attribute("aria-valuenow") == "10"
    assert asked(tab) == []


def test_the_threshold_below_the_histogram_is_the_scale_too(show):
    tab = show(VIEWS["training.underflow"]())
    threshold, ring = (tab.locator(f"[data-name={name}]") for name in ("threshold", "exponent"))
    where = lambda handle: float(handle.locator("circle").get_attribute("cx"))  # noqa: E731
    before = where(threshold), where(ring)
    threshold.press("PageUp")
    assert [handle.get_attribute("aria-valuenow") for handle in (threshold, ring)] == ["10", "10"]
    assert tab.get_by_role("spinbutton", name="static scale").input_value() == "10"
    moved = where(threshold), where(ring)
    assert moved[0] - before[0] == pytest.approx(before[1] - moved[1], abs=0.2)  # ten powers of two, to the left
    grip = threshold.locator("circle").bounding_box()
    tab.mouse.move(grip["x"] + 7, grip["y"] + 7)
    tab.mouse.down()
    tab.mouse.move(grip["x"] + 7 + (before[0] - moved[0]) / 2, grip["y"] + 7, steps=3)
    tab.mouse.up()
    assert ring.get_attribute("aria-valuenow") == "5"
    box = tab.get_by_role("spinbutton", name="static scale")
    box.fill("99")
    box.press("Enter")
    assert ring.get_attribute("aria-valuenow") == "30"  # no further than the last
    assert asked(tab) == []


def test_rings_keep_off_the_titles(show):
    tab = show(*(made(name) for name in VIEWS))
    assert tab.evaluate(BELOW_TITLES) == []


def test_the_kernel_does_what_a_handle_asks_for():
    view = dynamics_view()
    for what in ({"scale_window": 10.2}, {"scale_factor": 4.0}, {"floor_exponent": -30}, {"put": [40, 20]}):
        view.ask(what)
    model = view.explorer
    assert (model.scale_window, model.scale_factor, model.floor_exponent) == (10, 4.0, -24)
    assert model.scale[40] == 2.0**20
    view.ask({"draw": {"100": 3.0, "101": 3.5}})
    assert model.ceiling[100] == 8.0
    assert not model.finite[100]
    view.ask({"hold": True})
    assert (model.scale == 2.0**24).all()
    view.ask({"reset": True})
    assert (model.scale_window, model.drawn, model.puts, model.hold) == (50, {}, {}, False)


def test_a_refused_value_comes_back_with_its_reason():
    view = dynamics_view(init_exponent=4)
    view.ask({"floor_exponent": 10})
    assert view.explorer.floor_exponent == 0
    assert "must not lie above the start" in view.sentence[1]


def test_the_page_can_name_no_other_method():
    view = dynamics_view()
    before = view.explorer.state()
    view.ask({"stop": True, "_recompute": True, "__init__": True, "no": 1})
    assert view.explorer.state() == before


def test_a_stroke_is_told_whole(show):
    tab = show(dynamics_view(step=200))
    box = tab.locator(".mpk-over").bounding_box()
    tab.mouse.move(box["x"] + 200, box["y"] + 100)
    tab.mouse.down()
    for x in (220, 300, 380):
        tab.mouse.move(box["x"] + x, box["y"] + 220)
    tab.mouse.up()
    stroke = {int(k): v for k, v in asked(tab)[-1]["draw"].items()}
    assert sorted(stroke) == list(range(min(stroke), max(stroke) + 1))  # no gap, though the pointer jumped
    counters = tab.evaluate("models[0].sent.filter((s) => s[0] === 'ask').map((s) => s[1].n)")
    assert counters == list(range(1, len(counters) + 1))


def test_nobody_writes_over_what_is_being_typed(show):
    """An answer that comes between two keys, or a step that is played, would change the number under the fingers."""
    tab = show(dynamics_view(step=10))
    slow(tab)
    tab.get_by_role("button", name="Reset").click()
    step = tab.get_by_role("spinbutton", name="step", exact=True)
    step.fill("4")
    answer(tab)
    assert step.input_value() == "4"
    step.press("Enter")
    assert tab.locator("[data-name=step]").get_attribute("aria-valuenow") == "4"
    step.fill("99999")
    step.press("Enter")
    assert step.input_value() == tab.locator("[data-name=step]").get_attribute("aria-valuemax")  # what came of it


def test_a_text_that_is_being_typed_outlives_an_answer(show):
    tab = show(VIEWS["formats.bits"]())
    text = tab.locator("[data-control=number]")
    text.fill("0.7")
    tab.evaluate("models[0].put('state', models[0].state.state)")  # the kernel's answer to something else
    assert text.input_value() == "0.7"
    text.press("Enter")
    assert asked(tab) == [{"number": "0.7"}]


@pytest.mark.parametrize("taken", [False, True])
def test_enter_ends_typing_once(show, taken):
    """Trap: inside a cell JupyterLab takes away the line break (`insertLineBreak`) by which Enter ends it."""
    tab = show(VIEWS["formats.bits"](), dynamics_view())
    if taken:
        tab.evaluate("document.addEventListener('beforeinput', (e) => e.data === null && e.preventDefault())")
    told = "([i, name]) => models[i].sent.filter(([kind, q]) => kind === 'ask' && name in q.ask).map(([, q]) => q.ask)"
    for i, name, where, value in ((0, "number", "control", "0.7"), (1, "scale_window", "box", 77)):
        box = tab.locator(f"[data-{where}={name}]")
        box.click()
        tab.keyboard.press("Control+a")
        tab.keyboard.type(str(value))
        tab.keyboard.press("Enter")
        assert tab.evaluate(told, [i, name]) == [{name: value}]
        assert box.evaluate("(e) => e === document.activeElement")  # the next number can be typed at once
    step = tab.get_by_role("spinbutton", name="step", exact=True)
    step.fill("33")
    step.press("Enter")
    assert tab.locator("[data-name=step]").get_attribute("aria-valuenow") == "33"


def test_a_handle_of_the_played_step_needs_no_kernel(show):
    tab = show(dynamics_view(step=50))
    dawdle(tab)
    tab.locator("[data-name=step]").focus()
    tab.keyboard.press("Home")
    assert tab.evaluate("models[0].sent") == []  # the kernel hears of it a moment later, once
    tab.wait_for_function("models[0].sent.length", polling=20)
    assert tab.evaluate("models[0].sent") == [["index", 0], ["ask", {"ask": {}, "n": 1, "index": 0}]]
    assert tab.get_by_role("spinbutton", name="step", exact=True).input_value() == "0"


def test_a_question_takes_the_step_along(show):
    """Or a Reset right after a scrub would leave the page where it is: the kernel never heard of the step."""
    tab = show(dynamics_view(step=50))
    dawdle(tab)
    tab.locator("[data-name=step]").press("ArrowLeft")
    tab.get_by_role("button", name="Reset").click()
    sent = tab.evaluate("models[0].sent")
    assert next(question for name, question in sent if name == "ask") == {"ask": {"reset": True}, "index": 49, "n": 1}


def test_play_moves_the_picture_and_tells_the_kernel_where_it_stops(show):
    tab = show(dynamics_view(step=10))
    tab.get_by_role("button", name="10× as fast").click()
    tab.get_by_role("button", name="Play").click()
    tab.wait_for_function("+document.querySelector('.mpk-player input').value > 20", polling=20)
    assert tab.evaluate("models[0].sent") == []
    tab.get_by_role("button", name="Pause").click()
    tab.wait_for_function("models[0].sent.length", polling=20)
    (question,) = tab.evaluate("models[0].sent.filter((s) => s[0] === 'ask').map((s) => s[1])")
    assert question["ask"] == {}
    assert question["index"] == tab.evaluate("models[0].state.index") > 20


def test_reduced_motion_moves_by_whole_steps(show):
    tab = show(dynamics_view(step=10), motion="reduce")
    tab.evaluate("""() => { window.seen = new Set(); new MutationObserver(() =>
        seen.add(document.querySelector('.mpk-stage g[transform]').getAttribute('transform')))
      .observe(document.querySelector('.mpk-stage'), {subtree: true, attributes: true}); }""")
    tab.get_by_role("button", name="Play").click()
    tab.wait_for_function("+document.querySelector('.mpk-player input').value >= 12", polling=20)
    assert tab.evaluate("seen.size") <= 4


def test_focus_and_drag_survive_a_new_scene(show):
    """Traps: nodes of handles stay when the picture is drawn anew, and a drag keeps the axes it began on."""
    view = dynamics_view()
    tab = show(view)
    grip = tab.locator("[data-name=init_exponent] circle").bounding_box()
    x, y = grip["x"] + 7, grip["y"] + 7
    tab.mouse.move(x, y)
    tab.mouse.down()
    tab.mouse.move(x, y + 12)
    first = asked(tab)[-1]["init_exponent"]
    view.explorer.set(init_exponent=8)  # another vertical axis
    tab.evaluate("(spec) => models[0].put('spec', spec)", plain(view.spec))
    assert tab.evaluate("document.activeElement.dataset.name") == "init_exponent"
    tab.mouse.move(x + 1, y + 24)
    tab.mouse.move(x + 1, y + 12)
    assert asked(tab)[-1]["init_exponent"] == first
    tab.mouse.up()


def test_jupyterlab_leaves_the_keys_to_the_controls(show):
    """Trap: Lab takes the arrow keys of every focused element that does not itself carry this attribute."""
    tab = show(dynamics_view())
    missing = tab.evaluate(
        "[...document.querySelectorAll('.mpk :is(input, select, button, summary, [tabindex])')]"
        ".filter((e) => !e.hasAttribute('data-lm-suppress-shortcuts')).map((e) => e.outerHTML.slice(0, 80))"
    )
    assert missing == []


def test_controls_have_names_and_stand_below_the_picture(show):
    view = dynamics_view()
    tab = show(view)
    assert tab.locator("svg[role=img]").get_attribute("aria-label") == view.summary()
    for kind in ("slider", "spinbutton", "combobox", "checkbox", "button"):
        found = tab.get_by_role(kind)
        assert found.count()
    top, form = tab.locator(".mpk-stage").bounding_box(), tab.locator(".mpk-form").bounding_box()
    assert top["y"] < 60
    assert form["y"] > top["y"] + top["height"]
    assert form["height"] < 70  # two rows
    assert not tab.get_by_label("factor down, number").is_visible()  # acts only when both factors are apart


def test_words_do_not_overlap(show):
    """At the narrow width of a notebook and at a wide one."""
    tab = show(dynamics_view(step=200))
    for wide in (760, 1180):
        tab.set_viewport_size({"width": wide, "height": 900})
        tab.wait_for_function(
            f"Math.abs(document.querySelector('.mpk-stage svg').clientWidth - Math.min({wide} - 16, 1092)) < 4",
            polling=20,
        )
        assert overlaps(tab) == []


def overlaps(tab):
    """Pairs of words in one picture whose boxes overlap by more than a few pixels."""
    return tab.evaluate(OVERLAPS)


@pytest.mark.parametrize("theme", THEMES)
def test_axe_finds_nothing_in_any_view(show, theme):
    """All views with their tables open, a message told and work under way; what depends on a whole page is not ours."""
    views = [made(name) for name in VIEWS]
    tab = show(*views, theme=theme)
    for i, view in enumerate(views):
        tab.evaluate("([i, rows]) => models[i].put('rows', rows)", [i, plain(view.data())[:20]])  # enough to scroll
        state = {**view.state, "busy": True, "progress": 0.5}
        tab.evaluate("([i, state]) => models[i].put('state', state)", [i, plain(state)])
        tab.evaluate("i => models[i].put('sentence', [models[i].state.sentence[0], 'a message'])", i)
    tab.evaluate("document.querySelectorAll('details').forEach((more) => { more.open = true; })")
    only = {} if theme == "light" else {"runOnly": ["color-contrast"]}  # nothing but colours is another in the dark
    found = Axe().run(tab, "main", options={"resultTypes": ["violations"], **only}).response
    assert [(rule["id"], node["html"][:200]) for rule in found["violations"] for node in rule["nodes"]] == []
    looked = {rule["id"] for rule in found["passes"]}
    assert looked >= ({"color-contrast"} if only else {"color-contrast", "label", "svg-img-alt", "button-name"})


@pytest.mark.parametrize("theme", THEMES)
def test_words_stand_out_from_what_lies_behind_them(show, theme):
    """By 4.5 (WCAG 2.2, 1.4.3), in every view; axe looks at no words in an SVG. Stored ones have the same colours."""
    views = [made(name) for name in VIEWS]
    tab = show(*views, theme=theme)
    tab.set_viewport_size({"width": 1016, "height": tab.evaluate("document.documentElement.scrollHeight")})
    assert tab.evaluate(PALE) == []
    if theme == "light":
        figures = [figure(view.spec | {"kept": view.kept}, view.index) for view in views]
        stored = {
            (t.get_text(), *(round(255 * part) for part in to_rgb(t.get_color())))
            for drawn in figures
            for a in drawn.axes
            for t in a.texts
            if t.get_text()
        }
        seen = {(text, *map(round, rgb)) for text, *rgb in tab.evaluate(INKS)}
        assert {text for text, *_ in stored} - {text for text, *_ in seen} == set()
        assert not [s for s in stored if not any(s[0] == t[0] and np.allclose(s[1:], t[1:], atol=2) for t in seen)]


@pytest.mark.parametrize("theme", THEMES)
def test_outlines_of_bars_and_boxes_stand_out_from_page_and_regions(show, theme):
    """By 3 (WCAG 2.2, 1.4.11): yellow bars on a yellow region had an outline of the page's colour."""
    states = (VIEWS["formats.bits"](number="1e-6"), VIEWS["evidence.run"](step=160))
    tab = show(*map(made, VIEWS), *states, theme=theme)
    assert tab.evaluate(FAINT) == []


@pytest.mark.parametrize("theme", [0, 1])
def test_lines_and_words_stand_out_from_the_page(theme):
    def light(role):
        parts = [int(ROLES[role][theme][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    def contrast(role):
        a, b = sorted((light(role), light("paper")), reverse=True)
        return (a + 0.05) / (b + 0.05)

    for role, need in {
        "own": 4.5,
        "ink": 7,
        "muted": 4.5,
        "reference": 4.5,
        "zero": 3,
        "overflow": 3,
        "normal": 3,
    }.items():
        assert contrast(role) >= need, role


def test_two_threads_leave_the_scene_of_the_last_settings():
    view = dynamics_view()

    def drag(values):
        for value in values:
            view.ask({"scale_window": value})

    threads = [threading.Thread(target=drag, args=(r,)) for r in (range(20, 60, 4), range(100, 140, 4))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert view.spec == dynamics_view(**view.explorer.state()).spec


def test_without_anywidget_the_stored_picture_says_what_to_install(monkeypatch):
    from traitlets import HasTraits

    plain = type(
        "Plain",
        (HasTraits,),
        {k: v for k, v in vars(View).items() if k not in ("__dict__", "__weakref__", "__module__")},
    )
    monkeypatch.setattr(module, "_Widget", HasTraits)
    plain.__init__ = _rebound(View.__init__, plain)
    view = plain(DynamicsExplorer(step=20), dynamics_scene)
    bundle = view._repr_mimebundle_()
    assert bundle["text/plain"] == f"{view.summary()} {module.MISSING}"
    assert bundle["image/png"]
    assert "pip install anywidget" in bundle["text/html"]


def _rebound(function, cls):
    """`super()` in the function means the given class."""
    from types import CellType, FunctionType

    return FunctionType(function.__code__, function.__globals__, closure=(CellType(cls),))


def test_the_module_is_one_readable_file_without_imports():
    lines = SOURCE.splitlines()
    assert len(lines) <= 600
    assert len(SOURCE.encode()) <= 36_000
    assert not re.search(r"^\s*import\b|https?://(?!www\.w3\.org)|\bfetch\(|innerHTML", SOURCE, re.M)
    drawers = SOURCE[SOURCE.index("const DRAW") :]
    assert all(re.search(rf"\b{kind}(\(| ?:)", drawers) for kind in KINDS)


def test_what_is_read_out_of_a_square_is_its_own_number(show):
    view = made("boost.boost")
    tab = show(view)
    for name, _, runs in view.explorer.field:
        button = tab.get_by_role("button", name=f"compare with {name}", exact=True).bounding_box()
        tab.mouse.move(button["x"] + button["width"] / 2, button["y"] + button["height"] / 2)
        told = tab.locator(".mpk-tip").inner_text().splitlines()
        assert f"{name}: {said(float(np.float32(np.mean(runs))))}" in told
        assert all(line.startswith(("speed-up", "one seed", name)) for line in told)


def pixels_of(view, panel, x, y):
    """Where a point of a panel lies in the picture, on its edge if it lies beyond."""
    (x0, x1, y0, y1), (up, right, down, left) = panel["place"], panel["pad"]
    wide, high = view.spec["width"], view.spec["height"]
    ends = {"x": [wide * x0 + left, wide * x1 - right], "y": [high * y1 - down, high * y0 + up]}
    if panel.get("equal"):
        spans = {k: abs(panel[k]["hi"] - panel[k]["lo"]) for k in "xy"}
        unit = min(abs(b - a) / spans[k] for k, (a, b) in ends.items())
        ends = {
            "x": [ends["x"][0], ends["x"][0] + unit * spans["x"]],
            "y": [ends["y"][1] + unit * spans["y"], ends["y"][1]],
        }
    found = []
    for v, (k, (a, b)) in zip((x, y), ends.items()):
        place = a + (v - panel[k]["lo"]) / (panel[k]["hi"] - panel[k]["lo"]) * (b - a)
        found.append(float(min(max(place, min(a, b)), max(a, b))))
    return found


def read_at(tab, view, panel, x, y):
    """The lines of the read-out with the pointer at a point of a panel."""
    box = tab.locator(".mpk-stage").bounding_box()
    x, y = pixels_of(view, panel, x, y)
    tab.mouse.move(box["x"] + x, box["y"] + y)
    return [line for line in tab.locator(".mpk-tip").all_inner_texts() for line in line.splitlines()]


def axis_says(value, axis):
    """A value as the axis tells it: "≤" where it was cut at an end of powers, the name of a tick, or the number."""
    cut = (
        "" if "format" not in axis else "≤ " if value < axis["lo"] + 1e-6 else "≥ " if value > axis["hi"] - 1e-6 else ""
    )
    for at, name in axis["ticks"]:
        if at == value:
            return cut + name
    if axis.get("format") == "log2":
        return cut + power_of_two(round(float(value), 1) + 0.0)
    return cut + said(10 ** float(value) if axis.get("format") == "log10" else float(value))


def inside(axis, values, off=0):
    low, high = sorted((axis["lo"] + off, axis["hi"] + off))
    return [k for k, v in enumerate(values) if low <= v <= high]


def of_a_line(view, panel, m, index):
    """Of a few of its points: what the axis says there, or what is told instead; as well of those a pixel away."""
    off = index if panel["x"].get("follow") else 0
    x, y = np.broadcast_arrays(m.get("x", np.arange(np.size(m["y"]))), np.asarray(m["y"], dtype=float))
    assert "told" in m or not (panel["y"].get("hidden") or "names" in panel["y"]), f"{m['label']}: a row is no value"
    told = np.broadcast_to(m["told"], len(y)) if "told" in m else [axis_says(v, panel["y"]) for v in y]
    n = len(y)
    if m.get("show") == "upto":
        n = sum(since <= index for since in m["since"]) if "since" in m else min(n, index + 1)
    fine = [k for k in inside(panel["x"], x[:n], off) if np.isfinite(y[k])]
    at = {k: pixels_of(view, panel, x[k] - off, y[k])[0] for k in fine}
    for k in fine[:: max(1, len(fine) // 3)]:
        yield m["label"], {str(told[i]) for i in fine if abs(at[i] - at[k]) < 1.5}, x[k] - off, y[k]


def of_bars(view, panel, m, index):
    item = lambda value: np.ravel(value)[min(index, np.size(value) - 1)]  # noqa: E731
    own, other = ("y", "x") if m.get("axis") == "y" else ("x", "y")
    rows = np.asarray(m["values"], dtype=float).reshape(-1, m["count"])
    values, at = (
        rows[min(int(item(m.get("rows", index))), len(rows) - 1)],
        np.atleast_1d(m["at"]) + item(m.get("shift", 0)),
    )
    middle = (panel[other]["lo"] + panel[other]["hi"]) / 2
    fine = inside(panel[own], at)
    for k in fine[:: max(1, len(fine) // 3)]:
        told = said(round(values[k] * m["unit"], 1)) if "unit" in m else axis_says(values[k], panel[other])
        yield (
            m["label"],
            {str(item(m["told"])) if "told" in m else told},
            *((at[k], middle) if own == "x" else (middle, at[k])),
        )


def of_boxes(view, panel, m, index):
    """A frame alone has nothing to tell."""
    if "fill" not in m:
        return
    told = m.get("told", m.get("text"))
    assert told is not None, f"{m['label']}: an edge is no value"
    corners = np.array(np.broadcast_arrays(*(m[k] for k in ("x0", "x1", "y0", "y1"))), dtype=float)
    x, y = corners.reshape(2, 2, -1).mean(axis=1)
    for k in range(0, len(x), max(1, len(x) // 4)):
        yield m["names"][k] if "names" in m else m["label"], {str(np.broadcast_to(told, len(x))[k])}, x[k], y[k]


READ = {"line": of_a_line, "points": of_a_line, "pen": of_a_line, "bars": of_bars, "boxes": of_boxes}


def readings(view, index):
    """(panel, label, what may be read out there, x, y) for some items of each mark that is read out at a step."""
    kept = view.kept | view.spec["data"]
    for panel in (p for p in view.spec["panels"] if not p.get("bare")):
        for m in ({k: unpack(v, kept) for k, v in packed.items()} for packed in panel["marks"]):
            first, last = m.get("only", (index, index))
            if m["type"] in READ and m.get("label") and first <= index <= last and m.get("show") != "at":
                yield from ((panel, *reading) for reading in READ[m["type"]](view, panel, m, index))


@pytest.mark.parametrize("name", VIEWS)
def test_what_is_read_out_is_a_number_of_the_scene(show, name):
    """Of every mark that is named, at the first and a later step; nothing else is read under that name."""
    view = made(name)
    tab = show(view)
    for index in {0, view.spec.get("index", {"count": 1})["count"] // 2}:
        tab.evaluate(f"models[0].put('index', {index})")
        for panel, label, may, x, y in readings(view, index):
            told = read_at(tab, view, panel, x, y)
            own = [line.removeprefix(f"{label}: ") for line in told if line.startswith(f"{label}: ")]
            assert set(own) & may, (label, told, may)


def test_what_is_read_out_is_no_place_in_the_picture(show):
    """Where a mark has no number, or not the one of the place where it is drawn, the reading says so or is silent."""

    def told(view, label, at):
        """The reading at the item `at` of a mark of that label."""
        tab = show(view)
        panel, m = next((p, m) for p in view.spec["panels"] for m in p["marks"] if m.get("label") == label)
        x, y = (unpack(m[k], view.kept | view.spec["data"])[at] if k in m else at for k in "xy")
        return read_at(tab, view, panel, x, np.nan_to_num(y))

    assert "stored: 0.09997559" in told(VIEWS["formats.bits"](number="0.1"), "stored", 0)
    lost = "lost: log(0), stored as -inf"
    assert f"{lost}: -inf" in told(VIEWS["casting.log_softmax"](), lost, 5)
    assert not [t for t in told(VIEWS["drawing.draw"](), "your line", 3) if t.startswith("your line")]
    steps = VIEWS["optimizers.adam_state"]()
    sizes = steps.explorer.narrow.size.numpy()
    assert f"chosen format: from {power_of_two(8)}" in told(
        steps, "chosen format", int(np.flatnonzero(np.isinf(sizes))[0])
    )
    assert f"chosen format: up to {power_of_two(-12)}" in told(
        steps, "chosen format", int(np.flatnonzero(sizes == 0)[0])
    )


def test_a_window_tells_its_ends_and_a_part_of_a_row_its_share(show):
    """They told a height, and the name of the row in which they lie."""
    view = VIEWS["training.underflow"]()
    tab = show(view)
    for step, ends in ((8, (-25, 16)), (18, (-35, 6))):  # float16 at the scales 1 and 2^10
        tab.evaluate(f"models[0].put('index', {step})")
        told = read_at(tab, view, view.spec["panels"][1], sum(ends) / 2, 30)
        assert f"window of the format: {' to '.join(map(power_of_two, ends))}" in told
    view = made("formats.ranges")
    tab = show(view)
    half = view.spec["panels"][0]
    row = half["y"]["names"].index("fp16")
    assert f"subnormal: {power_of_two(-24)} to {power_of_two(-14)}" in read_at(tab, view, half, -20, row)
    assert f"normal: {power_of_two(-14)} to 65504" in read_at(tab, view, half, 3, row)
    view = made("boost.boost")
    tab = show(view)
    for row, steps in enumerate(view.explorer.rows):
        share = dict(zip(("forward", "batch norm", "backward", "update"), steps.parts[0]))
        told = read_at(tab, view, view.spec["panels"][2], float(share["forward"]) / 2, row)
        assert told[1:] == [f"forward: {share['forward']:.2f} of a step"]


def test_a_frame_tells_nothing_and_of_points_above_one_another_the_nearest_is_told(show):
    view = made("evidence.grid")
    tab = show(view)
    row, column = view.explorer.factors.index(view.explorer.factor), view.explorer.windows.index(view.explorer.window)
    (told,) = read_at(tab, view, view.spec["panels"][0], column, row)[1:]
    assert told.startswith(f"factor {view.explorer.factor:g}, window {view.explorer.window}: ")
    view = made("boost.boost")
    tab = show(view)
    for _, speed, runs in view.explorer.field:
        for run in runs:
            told = read_at(tab, view, view.spec["panels"][0], speed, run)
            assert f"one seed: {said(float(np.float32(run)))}" in told
    view = made("experiment.own_experiment")
    tab = show(view)
    for row, cell in enumerate(view.explorer.rows):
        told = read_at(tab, view, view.spec["panels"][0], cell.interval[1], row)
        assert f"mean: {cell.interval[1]:.4g}" in told
        assert sum(line.startswith("mean") for line in told) == 1, "of other rows too"


def test_the_arrow_keys_read_nothing_in_a_panel_without_axes(show):
    """There a mark lies where it has room: the rows of layers of a network were told as if they were numbers."""
    tab = show(made("boost.less_bn"))
    for _ in range(20):
        tab.locator(".mpk-over").press("ArrowRight")
        assert not tab.locator(".mpk-tip").is_visible()


def test_words_about_a_histogram_lie_over_none_of_its_bars(show):
    view = made("evidence.run")
    tab = show(view)
    over = """() => { const at = (e) => e.getBoundingClientRect();
      const words = [...document.querySelectorAll('text.halo')].filter((e) => e.textContent.includes('%')).map(at);
      const bars = [...document.querySelectorAll('path.box')].map((e) => [e, at(e)])
        .filter(([e]) => getComputedStyle(e).stroke !== 'none').map(([, b]) => b);
      return [words.length, words.filter((a) => bars.some((b) => a.left < b.right && b.left < a.right
        && a.top < b.bottom && b.top < a.bottom)).length]; }"""
    for step in range(0, len(view.explorer.trace), 20):
        tab.evaluate(f"models[0].put('index', {step})")
        assert tab.evaluate(over) == [2, 0], step


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_while_the_marker_glides_the_gap_before_is_seen_beside_the_gap_now(show, motion):
    """To scale, where it fits the picture: the zoom always shows about as many neighbours, so these tell little."""
    view = VIEWS["formats.bits"](number="0.15")
    assert mark(view, "gap now")
    with pytest.raises(StopIteration):
        mark(view, "gap before")  # nothing was before
    tab = show(view, motion=motion)
    tab.evaluate("document.querySelector('.glides').getBoundingClientRect()")
    before = view.explorer.gap
    view.ask({"toggle": 10})
    tab.evaluate("(given) => models[0].put('spec', given)", plain(view.spec))
    glides = "document.getAnimations().filter((a) => a.transitionProperty === 'cx').length"
    assert tab.evaluate(glides) == (motion == "no-preference")
    old, new = tab.evaluate("""[...[...document.querySelectorAll('g[clip-path]')].at(-1).querySelectorAll('path.box')]
      .map((e) => e.getBBox().width)""")
    assert new == pytest.approx(2 * old, rel=0.02)
    assert (view.explorer.gap_before, view.explorer.gap) == (before, 2 * before)
    words = [m["text"][0] for m in view.spec["panels"][2]["marks"] if m["type"] == "text"]
    assert [text for text in words if text.startswith("gap")] == [
        f"gap before: {before:.4g}",
        f"gap now: {2 * before:.4g}",
    ]
    view.ask({"toggle": 14})  # 2^16 times as wide
    assert mark(view, "gap before")["x1"][0] - mark(view, "gap before")["x0"][0] < mark(view, "gap now")["x1"][0]
    view.ask({"toggle": 14})
    (words,) = (
        m["text"][0] for m in view.spec["panels"][2]["marks"] if m.get("text", [""])[0].startswith("gap before")
    )
    assert words.endswith(", wider than this picture")
    view.ask({"reset": True})
    assert view.explorer.gap_before == 0


def test_numbers_are_read_out_alike(show):
    tab = show(dynamics_view())
    for value in (0.1, 1 / 3, 12345.678, 118282.0, 3.66e-05, 100.0, 0.0, -2.5):
        assert tab.evaluate("(v) => String(+v.toPrecision(4))", value) == said(value)


def test_axes_have_round_ticks_within_their_limits():
    for axis in (linear("", 0, 1), linear("", 5, -5), linear("", 0.9, 1.1), log2("", -26, 34), log2("", 0, 3)):
        ticks = [v for v, _ in axis["ticks"]]
        assert 2 <= len(ticks) <= 12
        assert min(axis["lo"], axis["hi"]) - 1e-9 <= min(ticks) <= max(ticks) <= max(axis["lo"], axis["hi"]) + 1e-9
    assert names(["a", "b"], down=True)["lo"] > 0
    assert power_of_two(-14) == "2⁻¹⁴"
    assert exponents([0.0, 1.0, np.inf], -4, 4).tolist() == [-4, 0, 4]


def test_a_mark_is_of_a_known_kind():
    panel = Scene().panel(x=linear("", 0, 1), y=linear("", 0, 1))
    with pytest.raises(ValueError, match="a mark is one of line"):
        panel.add("blob")


def test_the_roles_reach_the_page():
    assert json.dumps(ROLES)
    assert all(f"--mk-{role}:{dark}" in View._css for role, (_, dark) in ROLES.items() if role not in ("ink", "paper"))


def ahead_of(view, name, **wish):
    """What the page gets when the reader comes near a control."""
    view.wish = {"name": name, "n": view.wish.get("n", 0) + 1, **wish}
    return view.ahead


@pytest.mark.parametrize("name", ["scaling.dynamics", "formats.bits"])
def test_what_is_sent_ahead_is_what_the_kernel_would_draw(name, monkeypatch):
    monkeypatch.setattr(ahead, "PATIENCE", 0.01)
    view = VIEWS[name]()
    for _ in range(2 * (name == "formats.bits")):
        view.ask({"toggle": 0})  # the first deed leaves a gap before, which all that follow have
    for moved in view.explorer.ahead:
        sent = ahead_of(view, moved)
        if moved == "down_factor":
            continue  # no picture shows it while both factors are one
        assert sent["values"]
        assert len(sent["data"]) < 25_000
        k = len(sent["values"]) - 1
        got = unpacked(sent["data"], k, {"kept": view.kept, "spec": view.spec})
        mark, _ = ahead.positions(view.spec, view.controls, moved)
        value = 2.0 ** sent["values"][k] if mark and mark.get("log2") else sent["values"][k]
        other = View(copy.copy(view.explorer), view.scene)
        other.index = view.index
        other.ask({moved: [view.index, value] if "index" in sent else value})
        assert got == {"kept": other.kept, "spec": other.spec}
        if moved in view.explorer.controls:  # it holds at all values of its own parameter
            assert other.state["tokens"][moved] == sent["token"]
        assert view.state["tokens"][moved] == sent["token"]


def test_pictures_of_other_numbers_hold_while_the_gap_that_they_call_the_one_before_does():
    view, tokens = VIEWS["formats.bits"](number="1.5"), []
    for number in ("1.25", "1.75", "2.5"):
        view.ask({"number": number})
        tokens.append(view.state["tokens"]["number"])
    assert tokens[0] == tokens[1] != tokens[2]


def test_further_values_follow_wish_by_wish(monkeypatch):
    monkeypatch.setattr(ahead, "PATIENCE", 0.0)
    view = dynamics_view()
    assert ahead_of(view, "scale_window")["values"] == []
    monkeypatch.setattr(ahead, "PATIENCE", 0.01)
    first = ahead_of(view, "scale_window")["values"]
    assert first[0] == 50
    second = ahead_of(view, "scale_window", have=first)["values"]
    assert second
    assert not set(first) & set(second)
    places = ahead.nearest(ahead.positions(view.spec, view.controls, "scale_window")[1], 50)
    assert ahead_of(view, "scale_window", have=places)["whole"]


@pytest.mark.parametrize(
    ("name", "moved", "keys"),
    [
        ("scaling.dynamics", "scale_window", "ArrowUp"),
        ("scaling.dynamics", "scale_factor", "ArrowUp"),
        ("formats.bits", "number", "ArrowRight"),
        ("formats.bits", "toggle", "Enter"),
    ],
)
def test_a_value_that_was_sent_ahead_is_drawn_without_the_kernel(show, name, moved, keys):
    view = VIEWS[name]()
    tab = show(view)
    there = tab.locator(f"[data-name={moved}], .pick[data-for={moved}]").first
    there.focus()
    assert tab.evaluate("models[0].sent.filter(([k]) => k === 'wish').at(-1)[1].name") == moved
    tab.evaluate("""() => { const unpack = Response.prototype.arrayBuffer;
      Response.prototype.arrayBuffer = async function () { const all = await unpack.call(this);
        requestAnimationFrame(() => { window.read = true; });
        return all; }; }""")
    have = []
    while not view.ahead.get("whole"):
        have += ahead_of(view, moved, have=have)["values"]
        tab.evaluate("(given) => { window.read = false; models[0].put('ahead', given); }", plain(view.ahead))
        tab.wait_for_function("read", polling=20)
    before = tab.evaluate("models[0].sent.filter(([k]) => k === 'ask').length")
    slow(tab)
    tab.evaluate("() => { window.later = []; window.setTimeout = (f) => { later.push(f); return -1; }; }")
    there.press(keys)
    assert tab.evaluate("models[0].sent.filter(([k]) => k === 'ask').length") == before
    assert tab.evaluate("document.querySelector('.mpk').ariaBusy") == "true"  # what it shows is not what the kernel has
    drawn = tab.inner_html(".mpk-stage")
    tab.evaluate("later.forEach((f) => f())")  # the kernel hears where it rests
    view.ask(asked(tab)[-1])
    tab.evaluate(
        "([kept, spec]) => { models[0].put('kept', kept); models[0].put('spec', spec); }",
        [plain(view.kept), plain(view.spec)],
    )
    assert tab.inner_html(".mpk-stage") == drawn


def test_of_messages_that_overlap_none_is_lost(show, monkeypatch):
    """They are unpacked side by side, and the first to come may be the last to be ready."""
    monkeypatch.setattr(ahead, "PATIENCE", 0.01)
    view = dynamics_view()
    tab = show(view)
    handle = tab.locator("[data-name=scale_window]")
    handle.focus()
    tab.evaluate("""() => { const unpack = Response.prototype.arrayBuffer;
      window.gates = []; window.read = 0;
      Response.prototype.arrayBuffer = async function () { const all = await unpack.call(this);
        await new Promise((open) => gates.push(open));
        requestAnimationFrame(() => { window.read += 1; });
        return all; }; }""")
    values: list[float] = []
    for held in (1, 2):
        sent = ahead_of(view, "scale_window", have=values)
        assert sent["values"]
        values = values + sent["values"]
        tab.evaluate("(given) => models[0].put('ahead', given)", plain(sent | {"whole": False}))
        tab.wait_for_function(f"gates.length === {held}", polling=20)
    tab.evaluate("gates.reverse().forEach((open) => open())")
    tab.wait_for_function("read === 2", polling=20)
    have = tab.evaluate("models[0].sent.filter(([k]) => k === 'wish').at(-1)[1].have")
    assert sorted(have) == sorted(values)  # what it does not have it would wish for again


@pytest.mark.parametrize("name", VIEWS)
def test_no_word_of_a_stored_picture_is_cut_off_at_its_edge(name):
    """The names of an axis without a label of its own stood at the very edge: the first letter lost a stem."""
    view = VIEWS[name]()
    fig = figure(view.spec | {"kept": view.kept}, view.index)
    FigureCanvasAgg(fig).draw()
    shown = [a for axes in fig.axes for a in (axes.findobj(Text) if axes.axison else axes.texts)]
    boxes = {text.get_text(): text.get_window_extent() for text in shown if text.get_text() and text.get_visible()}
    ends = fig.bbox.padded(0.5)
    assert [words for words, box in boxes.items() if box.width and not (box.x0 >= ends.x0 and box.x1 <= ends.x1)] == []
