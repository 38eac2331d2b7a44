"""The machine of the views: a function of parameters draws a sheet; a page, a stored picture, a quiz show it."""

from mpkit.view.controls import Choice, Flag, Range, Stroke, Text
from mpkit.view.sheet import Sheet
from mpkit.view.views import View, view

__all__ = ["Choice", "Flag", "Range", "Sheet", "Stroke", "Text", "View", "view"]
