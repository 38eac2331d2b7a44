"""The widgets of the lessons on boost levels, freezing, less batch norm and centralization."""

from mpkit.explorers.boost import BoostExplorer, CentralizeExplorer, FreezeExplorer, LessBNExplorer
from mpkit.plots.boost import boost_scene, centralize_scene, freeze_scene, less_bn_scene
from mpkit.widgets.scene import plain

boost_view = plain(BoostExplorer, boost_scene, "Level, mode and algorithm switches beside a measured configuration")
freeze_view = plain(FreezeExplorer, freeze_scene, "The freeze timeline over the layers, animated")
less_bn_view = plain(LessBNExplorer, less_bn_scene, "The layers of a network and which BatchNorms go")
centralize_view = plain(CentralizeExplorer, centralize_scene, "One output's gradient with and without its mean")
