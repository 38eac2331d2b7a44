"""The widgets of lesson 03."""

from mpkit.explorers.casting import CastingExplorer, LogSoftmaxExplorer
from mpkit.plots.casting import casting_scene, log_softmax_scene
from mpkit.widgets.scene import plain

casting_view = plain(CastingExplorer, casting_scene, "A network at a level, operation by operation")
log_softmax_view = plain(LogSoftmaxExplorer, log_softmax_scene, "Why softmax and log want float32")
