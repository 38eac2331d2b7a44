"""The widget of lesson 00."""

from mpkit.explorers.start import StartExplorer
from mpkit.plots.start import start_scene
from mpkit.widgets.scene import plain

start_view = plain(StartExplorer, start_scene, "Train on the digits at any level and scale")
