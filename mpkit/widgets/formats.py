"""The widgets of lesson 01."""

from mpkit.explorers.formats import BitsExplorer, GradientsExplorer, RangesExplorer
from mpkit.plots.formats import bits_scene, gradients_scene, ranges_scene
from mpkit.widgets.scene import plain

bits_view = plain(BitsExplorer, bits_scene, "A number and its bits")
ranges_view = plain(RangesExplorer, ranges_scene, "One magnitude in all formats")
gradients_view = plain(GradientsExplorer, gradients_scene, "Recorded gradients over the range of a format")
