"""The widgets of lesson 01."""

from __future__ import annotations

from typing import Any

import ipywidgets as w

from mpkit.explorers.formats import BitsExplorer, GradientsExplorer, RangesExplorer
from mpkit.plots.formats import BitsPicture, GradientsPicture, RangesPicture, field_of
from mpkit.widgets.base import View

_STYLE = {"sign": "danger", "exponent": "success", "fraction": "info"}


class BitButtons(w.HBox):
    """One toggle button per bit of the present format, most significant first; Tab and Space or Enter work.

    `bits[i]` is the button of bit i; those that the format does not have are disabled.
    """

    def __init__(self, explorer: BitsExplorer) -> None:
        self.explorer = explorer
        self._syncing = False
        self.bits = [self._button(index) for index in range(32)]
        super().__init__(list(reversed(self.bits)), layout=w.Layout(flex_flow="row wrap"))
        explorer.observe(lambda _: self._sync(), "revision")
        self._sync()

    def _button(self, index: int) -> w.ToggleButton:
        button = w.ToggleButton(layout=w.Layout(width="30px", padding="0", margin="1px"))
        button.observe(lambda _: self._pressed(index), "value")
        return button

    def _pressed(self, index: int) -> None:
        with self.explorer.lock:
            if not self._syncing:
                self.explorer.toggle(index)
                self._sync()

    def _sync(self) -> None:
        with self.explorer.lock:
            self._syncing = True
            try:
                for index, button in enumerate(self.bits):
                    self._show(button, index)
            finally:
                self._syncing = False

    def _show(self, button: w.ToggleButton, index: int) -> None:
        fmt = self.explorer.format
        used = index < fmt.bits
        bit = self.explorer.bit(index) if used else 0
        button.disabled = not used
        button.value = bool(bit)
        button.description = str(bit) if used else "·"
        button.tooltip = f"bit {index}, {field_of(index, fmt)}" if used else f"{fmt.name} has no bit {index}"
        button.button_style = _STYLE[field_of(index, fmt)] if used else ""
        button.layout.display = None if used or index < 16 else "none"  # 16 stay, so that the row does not jump


class BitsView(View):
    """A view with the bits as buttons; `bit_buttons.bits[i]` toggles bit i."""

    def __init__(self, explorer: BitsExplorer) -> None:
        self.bit_buttons = BitButtons(explorer)
        super().__init__(explorer, BitsPicture(), extra=(self.bit_buttons,))


def bits_view(**params: Any) -> BitsView:
    """A number and its bits; parameters as `BitsExplorer`."""
    return BitsView(BitsExplorer(**params))


def ranges_view(**params: Any) -> View:
    """One magnitude in all formats; parameters as `RangesExplorer`."""
    return View(RangesExplorer(**params), RangesPicture())


def gradients_view(**params: Any) -> View:
    """Recorded gradients over the range of a format; parameters as `GradientsExplorer`."""
    return View(GradientsExplorer(**params), GradientsPicture())
