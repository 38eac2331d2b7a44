"""Every preset of a framework with what it has no default for, and with a short growth interval."""

from __future__ import annotations

from mpkit.policies import FRAMEWORKS, ScalePolicy, own_names, preset

GIVEN = {  # what has no default in the framework
    "jmp": {"loss_scale": 2.0**15},
    "mindspore_scaler": {"scale_value": 2.0**15, "scale_factor": 2, "scale_window": 2000},
    "mindspore_cell": {"loss_scale_value": 2.0**15, "scale_factor": 2, "scale_window": 2000},
    "fairscale_layerwise": {"layer_scale_dict": {"a": 1024.0, "b": 16.0}},
}
SINGLE = [name for name in FRAMEWORKS if name != "fairscale_layerwise"]


def of(framework: str, **parameters: object) -> ScalePolicy:
    return preset(framework, **{**GIVEN.get(framework, {}), **parameters})


def short(framework: str, **parameters: object) -> ScalePolicy:
    """With a growth interval of 3, so that a short run grows too."""
    return of(framework, **{own_names(framework)[1]: 3}, **parameters)
