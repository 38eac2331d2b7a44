"""The machine of the views: a function of parameters draws a sheet; a page, a stored picture, a quiz show it.

A lesson takes from here what it declares, draws and words with.
"""

from mpkit.replay.percent import percent
from mpkit.view.answers import read_number
from mpkit.view.controls import Choice, Range, Stroke, Text
from mpkit.view.parts import FATES, edges, loss_and_scale, prediction, regions, tenths, zones
from mpkit.view.sheet import DIFFERENT, GLYPHS, LINES, Panel, Sheet, exponents, fitted, linear, log2, names, space
from mpkit.view.views import View, view
from mpkit.view.words import counted, exponent, power_of_two, short

__all__ = ["LINES", "Sheet", "Stroke", "counted", "exponents", "names", "power_of_two", "regions", "short", "space"]
__all__ += ["FATES", "exponent", "fitted", "linear", "loss_and_scale", "prediction", "read_number", "tenths", "zones"]
__all__ += ["DIFFERENT", "GLYPHS", "Choice", "Panel", "Range", "Text", "View", "edges", "log2", "percent", "view"]
