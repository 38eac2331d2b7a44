"""The widgets of the lessons on boost levels, freezing, less batch norm and centralization."""

from __future__ import annotations

from mpkit.explorers.boost import BoostExplorer, CentralizeExplorer, FreezeExplorer, LessBNExplorer
from mpkit.plots.boost import boost_scene, centralize_scene, freeze_scene, less_bn_scene
from mpkit.widgets.scene import View


def boost_view(**params: object) -> View:
    """Level, mode and algorithm switches beside a measured configuration; parameters as `BoostExplorer`."""
    return View(BoostExplorer(**params), boost_scene)


def freeze_view(**params: object) -> View:
    """The freeze timeline over the layers, animated; parameters as `FreezeExplorer`."""
    return View(FreezeExplorer(**params), freeze_scene)


def less_bn_view(**params: object) -> View:
    """The layers of a network and which BatchNorms go; parameters as `LessBNExplorer`."""
    return View(LessBNExplorer(**params), less_bn_scene)


def centralize_view(**params: object) -> View:
    """One output's gradient with and without its mean; parameters as `CentralizeExplorer`."""
    return View(CentralizeExplorer(**params), centralize_scene)
