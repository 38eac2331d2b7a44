"""The view of an explorer: a control for every parameter, the picture, the sentence and the table."""

from __future__ import annotations

import html
import math
import threading
from collections.abc import Sequence
from typing import Any

import ipywidgets as w
from traitlets import Bool, CaselessStrEnum, Enum, Float, Int, TraitType

from mpkit.explorers.base import Explorer
from mpkit.plots.base import Picture, image_tag, static_bundle

_LABEL = {"description_width": "220px"}
_CHOICE = {"description_width": "220px", "button_width": "auto"}


class View(w.VBox):
    """Controls bound to an explorer, and its picture redrawn at every revision.

    Every number has a slider and a labelled number box (ipywidgets gives sliders no accessible name), every picture
    its sentence as text alternative and as status line, and a button shows the same data as a table. A refused value
    is put back and the reason shown. The stored output is the picture and the sentence, so a reader without a
    kernel, a screen reader and nbval all see what the view shows.

    Args:
        explorer:  the model.
        picture:   draws `explorer`; `Picture.png(explorer)` is called under the explorer's lock.
        extra:     further widgets between the controls and the picture (bit buttons, for instance).
    """

    def __init__(self, explorer: Explorer, picture: Picture, extra: Sequence[w.Widget] = ()) -> None:
        self.explorer, self.picture = explorer, picture
        self.controls: dict[str, Any] = {}
        self.boxes: dict[str, Any] = {}
        self.buttons: dict[str, w.Button] = {}
        self._syncing = False
        self._lock = threading.RLock()
        rows = [row for name in explorer.controls if (row := self._control(name)) is not None]
        self._bar = w.FloatProgress(min=0.0, max=1.0, layout=w.Layout(width="300px", visibility="hidden"))
        self.image = w.HTML()
        self.status = w.HTML()
        self._table = w.HTML()
        self._png = b""
        super().__init__([*rows, *self._button_row(), *extra, self.image, self.status, self._table])
        explorer.observe(lambda _: self.redraw(), "revision")
        explorer.observe(lambda _: self._show_status(), "message")
        explorer.observe(lambda _: self._show_progress(), ["busy", "progress"])
        self.redraw()

    def png(self) -> bytes:
        """The picture on screen."""
        return self._png

    def summary(self) -> str:
        """The sentence on screen."""
        return self.explorer.summary()

    def data(self) -> list[dict[str, Any]]:
        """The data on screen, one dict per row."""
        return self.explorer.table()

    def redraw(self) -> None:
        """Draw the explorer's present state into picture, sentence, table and controls."""
        with self.explorer.lock, self._lock:
            self._png = self.picture.png(self.explorer)
            self.image.value = image_tag(self._png, self.summary())
            self._show_status()
            self._sync_controls()
            if self._table.value:
                self._table.value = _as_table(self.data())

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        return data | static_bundle(self._png, self.summary())

    def __repr__(self) -> str:
        return self.summary()

    # controls

    def _control(self, name: str) -> w.Widget | None:
        trait = self.explorer.traits()[name]
        tags = trait.metadata
        label = tags.get("label", name) + (f", {tags['unit']}" if tags.get("unit") else "")
        value = getattr(self.explorer, name)
        if tags.get("hidden"):
            return None
        if isinstance(trait, Enum | CaselessStrEnum):
            wide = w.Layout(width="auto")
            # not a Dropdown: JupyterLab keeps the arrow keys for moving between cells
            control = w.ToggleButtons(
                options=_options(trait), value=value, description=label, style=_CHOICE, layout=wide
            )
        elif isinstance(trait, Bool):
            control = w.Checkbox(value=value, description=label, indent=False)
        elif isinstance(trait, Int | Float):
            return self._number(name, trait, label, value)
        else:
            control = w.Text(value=str(value), description=label, continuous_update=False, style=_LABEL)
        self._bind(name, control)
        return control

    def _number(self, name: str, trait: Any, label: str, value: float) -> w.Widget:
        tags, layout = trait.metadata, w.Layout(width="300px")
        whole = isinstance(trait, Int)
        kind, box_kind = (w.IntSlider, w.BoundedIntText) if whole else (w.FloatSlider, w.BoundedFloatText)
        limits: dict[str, Any] = {"min": trait.min, "max": trait.max}
        box = box_kind(value=value, description=label, style=_LABEL, step=tags.get("step", 1), **limits)
        box.layout.width = "350px"
        options = {"readout": False, "continuous_update": not tags.get("costly", False), "layout": layout}
        base = {"log2": 2, "log10": 10}.get(tags.get("scale", "linear"))
        slider: Any
        if base:
            low, high = (math.log(limit, base) for limit in (trait.min, trait.max))
            slider = _LogSlider(base, low, high, tags.get("step", 1), whole, value, options)
        else:
            slider = kind(value=value, step=tags.get("step", 1 if whole else 0.01), **limits, **options)
        self._bind(name, slider)
        self.boxes[name] = box
        box.observe(lambda change: self._from_control(name, change["new"]), "value")
        row = [box, slider.widget if isinstance(slider, _LogSlider) else slider]
        if tags.get("animate"):
            row += self._player(name, trait, tags["animate"])
        return w.HBox(row, layout=w.Layout(flex_flow="row wrap"))

    def _player(self, name: str, trait: Any, interval: int) -> list[w.Widget]:
        play = w.Play(min=trait.min, max=trait.max, interval=max(interval, 60), show_repeat=False)
        play.observe(lambda change: self._from_control(name, change["new"]), "value")
        self.boxes[f"{name} play"] = play
        toggle, step, back = (w.Button(description=text) for text in ("Play or pause", "Step", "Back to start"))

        def toggled(_: Any) -> None:
            if not play.playing:  # go on from where the slider is
                play.value = getattr(self.explorer, name)
            play.playing = not play.playing

        toggle.on_click(toggled)
        step.on_click(lambda _: self._from_control(name, min(trait.max, getattr(self.explorer, name) + 1)))
        back.on_click(lambda _: self._from_control(name, trait.min))
        self.buttons |= {"Play or pause": toggle, "Step": step, "Back to start": back}
        return [play, toggle, step, back]

    def _bind(self, name: str, control: Any) -> None:
        self.controls[name] = control
        control.observe(lambda change: self._from_control(name, change["new"]), "value")

    def _button_row(self) -> list[w.Widget]:
        for label, method in self.explorer.actions.items():
            button = w.Button(description=label)
            button.on_click(lambda _, method=method: self.explorer.act(method))
            self.buttons[label] = button
        reset, table = w.Button(description="Reset"), w.Button(description="Show as table")
        reset.on_click(lambda _: self._reset())
        table.on_click(lambda _: self._toggle_table(table))
        own = {"Reset": reset} if self.explorer.controls else {}
        self.buttons |= own | {"Show as table": table}
        playing = {"Play or pause", "Step", "Back to start"}
        shown: list[w.Widget] = [b for label, b in self.buttons.items() if label not in playing]
        if any(method == "stop" for method in self.explorer.actions.values()):
            shown.append(self._bar)
        return [w.HBox(shown, layout=w.Layout(flex_flow="row wrap"))]

    # events

    def _from_control(self, name: str, value: Any) -> None:
        if self._syncing:
            return
        with self.explorer.lock, self._lock:
            if getattr(self.explorer, name) == value:
                return
            try:
                self.explorer.set(**{name: value})
            except ValueError:  # the explorer kept its state and says why in its message
                self._sync_controls()
                self._show_status()

    def _reset(self) -> None:
        with self.explorer.lock, self._lock:
            self.explorer.reset()

    def _toggle_table(self, button: w.Button) -> None:
        with self.explorer.lock, self._lock:
            self._table.value = "" if self._table.value else _as_table(self.data())
            button.description = "Hide table" if self._table.value else "Show as table"

    def _sync_controls(self) -> None:
        """Show the explorer's values in its controls without hearing an echo of them."""
        self._syncing = True
        try:
            for name in self.explorer.controls:
                value = getattr(self.explorer, name)
                for control in (self.controls.get(name), self.boxes.get(name), self.boxes.get(f"{name} play")):
                    if control is not None and control.value != value:
                        control.value = value
        finally:
            self._syncing = False

    def _show_status(self) -> None:
        text = html.escape(self.summary())
        note = f" <b>{html.escape(self.explorer.message)}</b>" if self.explorer.message else ""
        self.status.value = f'<div role="status" style="line-height:1.4">{text}{note}</div>'

    def _show_progress(self) -> None:
        self._bar.value = self.explorer.progress
        self._bar.layout.visibility = "visible" if self.explorer.busy else "hidden"


class _LogSlider:
    """A slider over exponents that speaks in values, so that Home, End and arrows hit exact powers."""

    def __init__(
        self, base: int, low: float, high: float, step: float, whole: bool, value: float, options: dict[str, Any]
    ) -> None:
        self._base, self._whole = base, whole
        self.widget = w.FloatSlider(value=math.log(value, base), min=low, max=high, step=step, **options)

    @property
    def value(self) -> float:
        value = float(self._base) ** self.widget.value
        return round(value) if self._whole else value

    @value.setter
    def value(self, value: float) -> None:
        self.widget.value = math.log(value, self._base)

    def observe(self, handler: Any, _name: str) -> None:
        self.widget.observe(lambda _: handler({"new": self.value}), "value")


def _options(trait: TraitType) -> list[tuple[str, Any]]:
    names = trait.metadata.get("names", {})
    return [(str(names.get(value, value)), value) for value in trait.values]  # type: ignore[attr-defined]


def _as_table(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return "<p>Nothing is on screen.</p>"
    head = "".join(f"<th scope='col'>{html.escape(str(key))}</th>" for key in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(value))}</td>" for value in row.values()) + "</tr>" for row in rows
    )
    return f"<div style='max-height:240px;overflow:auto'><table><tr>{head}</tr>{body}</table></div>"
