"""The widgets of the lessons on boost levels, freezing, less batch norm and centralization."""

from __future__ import annotations

from typing import Any

from mpkit.explorers.boost import BoostExplorer, CentralizeExplorer, FreezeExplorer, LessBNExplorer
from mpkit.plots.boost import BoostPicture, CentralizePicture, FreezePicture, LessBNPicture
from mpkit.widgets.base import View


def boost_view(**params: Any) -> View:
    """Level, mode and algorithm switches beside a measured configuration; parameters as `BoostExplorer`."""
    return View(BoostExplorer(**params), BoostPicture())


def freeze_view(**params: Any) -> View:
    """The freeze timeline over the layers, animated; parameters as `FreezeExplorer`."""
    return View(FreezeExplorer(**params), FreezePicture())


def less_bn_view(**params: Any) -> View:
    """The layers of a network and which BatchNorms go; parameters as `LessBNExplorer`."""
    return View(LessBNExplorer(**params), LessBNPicture())


def centralize_view(**params: Any) -> View:
    """One output's gradient with and without its mean; parameters as `CentralizeExplorer`."""
    return View(CentralizeExplorer(**params), CentralizePicture())
