"""The view of an explorer: a control for every parameter, the picture, the sentence and the table."""

from __future__ import annotations

import bisect
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
    is put back and the reason shown. The stored output is the picture and `explorer.stored()`, so a reader without a
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
        return data | static_bundle(self._png, self.explorer.stored())

    def __repr__(self) -> str:
        return self.explorer.stored()

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
            control.layout.width = "550px"  # room for a path
        self._bind(name, control)
        return control

    def _number(self, name: str, trait: Any, label: str, value: float) -> w.Widget:
        tags, layout = trait.metadata, w.Layout(width="300px")
        whole = isinstance(trait, Int)
        limits: dict[str, Any] = {"min": trait.min, "max": trait.max}
        box_kind = w.BoundedIntText if whole else w.BoundedFloatText
        box = box_kind(value=value, description=label, style=_LABEL, step=tags.get("step", 1), **limits)
        box.layout.width = "350px"
        options = {"readout": False, "continuous_update": not tags.get("costly", False), "layout": layout}
        slider: Any
        if whole and "scale" not in tags:
            slider = w.IntSlider(value=value, step=tags.get("step", 1), **limits, **options)
        else:
            slider = _GridSlider(_grid(trait, float(trait.default_value)), value, options)
        self._bind(name, slider)
        self.boxes[name] = box
        box.observe(lambda change: self._from_control(name, change["new"]), "value")
        row = [box, slider.widget if isinstance(slider, _GridSlider) else slider]
        if tags.get("animate"):
            row.append(w.HBox(self._player(name, trait, tags["animate"])))  # together on one line
        return w.HBox(row, layout=w.Layout(flex_flow="row wrap"))

    def _player(self, name: str, trait: Any, interval: int) -> list[w.Widget]:
        play = w.Play(min=trait.min, max=trait.max, interval=max(interval, 60), show_repeat=False)
        play.observe(lambda change: self._from_control(name, change["new"]), "value")
        self.boxes[f"{name} play"] = play
        toggle, step, back = (
            w.Button(description=text, layout=w.Layout(width="auto"))
            for text in ("Play or pause", "Step", "Back to start")
        )

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


class _GridSlider:
    """A slider over the steps of a grid that speaks in values; a value between two steps stays what it is.

    A float slider in the browser moves every value that it is shown to its own grid, counted from its minimum, and
    reports that back: a factor of 2 became 2.1, and 3 typed into the box 2.97. Whole step numbers are always on it.
    """

    def __init__(self, grid: Sequence[float], value: float, options: dict[str, Any]) -> None:
        self._grid, self._value = grid, value
        self._handlers: list[Any] = []
        self.widget = w.IntSlider(value=self._nearest(value), min=0, max=len(grid) - 1, **options)
        self.widget.observe(lambda change: self._moved(change["new"]), "value")

    @property
    def value(self) -> float:
        return self._value

    @value.setter
    def value(self, value: float) -> None:
        self._value = value
        if self.widget.value != self._nearest(value):
            self.widget.value = self._nearest(value)  # which tells the handlers
        else:
            self._tell()

    def observe(self, handler: Any, _name: str) -> None:
        self._handlers.append(handler)

    def _nearest(self, value: float) -> int:
        above = bisect.bisect_left(self._grid, value)
        return min(
            (i for i in (above - 1, above) if 0 <= i < len(self._grid)), key=lambda i: abs(self._grid[i] - value)
        )

    def _moved(self, step: int) -> None:
        if step != self._nearest(self._value):
            self._value = self._grid[step]
        self._tell()

    def _tell(self) -> None:
        for handler in self._handlers:
            handler({"new": self._value})


def _grid(trait: Any, default: float) -> list[float]:
    """The values of a slider, ascending: its limits, and the whole steps from the default, in the trait's scale."""
    scale = trait.metadata.get("scale", "linear")
    step = trait.metadata.get("step", 0.01 if scale == "linear" else 1)
    ahead, back = {
        "linear": (float, float),
        "log2": (math.log2, lambda exponent: 2.0**exponent),
        "log10": (math.log10, lambda exponent: 10.0**exponent),
    }[scale]
    low, start, high = ahead(trait.min), ahead(default), ahead(trait.max)
    first, last = math.ceil((low - start) / step - 1e-9), math.floor((high - start) / step + 1e-9)
    positions = (round(start + i * step, 12) for i in range(first, last + 1))
    if isinstance(trait, Int):
        values: Any = (round(round(back(x), 6)) for x in positions)  # 12.5 is a tie, whatever the last bit
    else:  # powers with a whole exponent are exact, others have four digits
        values = (back(x) if scale == "linear" or x.is_integer() else float(f"{back(x):.4g}") for x in positions)
    return sorted({trait.min, trait.max, *(min(max(v, trait.min), trait.max) for v in values)})


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
