"""The machine of the views: a function of parameters draws a sheet; a page, a stored picture, a quiz show it.

A lesson takes from here what it declares, draws and words with.
"""

from mpkit.replay.percent import percent
from mpkit.view.answers import read_number
from mpkit.view.controls import Choice, Flag, Range, Stroke, Text
from mpkit.view.parts import FATES, edges, loss_and_scale, prediction, regions, tenths, zones
from mpkit.view.sheet import DIFFERENT, GLYPHS, LINES, Panel, Sheet, exponents, fitted, linear, log2, names, space
from mpkit.view.views import View, view
from mpkit.view.words import counted, exponent, power_of_two, short

__all__ = ["DIFFERENT", "GLYPHS", "LINES", "Choice", "Flag", "Panel", "Range", "Sheet", "Stroke", "Text", "View"]
__all__ += ["counted", "exponent", "exponents", "fitted", "linear", "log2", "names", "power_of_two", "space", "view"]
__all__ += ["FATES", "edges", "loss_and_scale", "percent", "prediction", "read_number", "regions", "short"]
__all__ += ["tenths", "zones"]
