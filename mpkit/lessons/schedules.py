"""*Schedules and groups*: learning-rate schedules side by side, and which weights weight decay reaches."""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

import mpkit.schedules as lr
from mpkit.optimizers import SGD, Adam, AdamWeightDecay
from mpkit.view import DIFFERENT, Choice, Panel, Range, Sheet, linear, view

STEPS = 200


def _curves(see: Sheet, panel: Panel, curves: dict[str, np.ndarray]) -> tuple[str, dict[str, Any]]:
    """A line for each curve with its name at the end, a marker at the step that is played, and a handle there.

    Returns:  words for the values at that step, and the columns that fill them.
    """
    for k, ((name, seen), look) in enumerate(zip(curves.items(), DIFFERENT)):  # where some agree all are seen
        panel.line(seen, width=1.8, label=name, tag=True, **look | {"glyph": None})
        panel.points(seen, show="at", **look | {"dash": None, "fill": "none", "width": 1.8, "size": 3.5 + 2 * k})
    see.play("step", "step", len(seen), on=panel)
    told = ", ".join(f"{name} {{c{i}}}" for i, name in enumerate(curves))
    return told, {"at": np.arange(len(seen))} | {f"c{i}": np.float64(c) for i, c in enumerate(curves.values())}


# ---- schedules
@view(
    rate=Range(1e-4, 1.0, 0.25, "learning_rate", log=10),
    factor=Range(0.05, 1.5, 0.05, "decay_rate"),
    span=Range(1, STEPS, label="decay_steps"),
    power=Range(0.25, 4.0, 0.25, "power"),
    stair="is_stair",
    warmup=Range(0, 100, label="warm-up, steps"),
    step=Range(0, STEPS - 1, hidden=True),
)
def schedules(see: Sheet, rate=0.1, factor=0.5, span=60, power=0.5, stair=False, warmup=0, step=40) -> None:
    """Five schedules with the same numbers. Numbers: `curves`, name -> (200,) learning rates."""
    found: dict[str, Any] = {
        "exponential": lr.ExponentialDecayLR(rate, factor, span, stair),
        "natural exp": lr.NaturalExpDecayLR(rate, factor, span, stair),
        "inverse": lr.InverseDecayLR(rate, factor, span, stair),
        "cosine": lr.CosineDecayLR(0.0, rate, span),
        "polynomial": lr.PolynomialDecayLR(rate, 0.0, span, power),
    }
    warmed: Any = lr.WarmUpLR(rate, warmup).then if warmup else lambda schedule, at: schedule
    curves = {name: warmed(s, at=warmup)(torch.arange(STEPS)).numpy() for name, s in found.items()}
    most = max(float(c.max()) for c in curves.values())  # a decay_rate above 1 makes one of them grow
    top = float(f"{min(max(rate, most), 4 * rate):.3g}")
    see.grid(380)
    x, y = linear("step", -0.02 * STEPS, STEPS - 1, 8), linear("learning rate", -0.05 * top, 1.05 * top, 5)
    told, columns = _curves(see, see.panel(title="the same numbers, five schedules", x=x, y=y), curves)
    see.say(
        f"Learning rates at step {{at}}, with learning_rate {rate:.3g}, decay_rate {factor:.3g}, decay_steps {span} "
        f"and power {power:.3g}: {told}.{' What leaves the picture above grows on.' * (most > 4 * rate)}",
        curves=curves, **columns,
    )  # fmt: skip


# ---- weight decay
NAMES = ("fc.weight", "fc.bias", "bn.gamma", "bn.beta")
PLACES = ("no groups", "in a group", "in a group with weight_decay 0", "left out of all groups")


@cache
def decay_curves(size: float, rate=0.01, amount=0.1, name=NAMES[0], place=PLACES[0]) -> dict[str, np.ndarray]:
    """A weight of 1 before each step and after the last, while its gradients alternate, -size and +size.

    Args:
        size:   of the gradients (>= 0).
        rate:   learning rate; `amount` the weight_decay of the optimizer.
        name:   of the parameter; `place`, one of `PLACES`, how the optimizer gets it.
    Returns:  SGD, Adam, AdamWeightDecay -> (201,) values.
    """
    curves = {}
    for kind in (SGD, Adam, AdamWeightDecay):
        weight, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        own = [(name, weight)]
        handed = own, [{"params": own}], [{"params": own, "weight_decay": 0.0}], [{"params": [("another", other)]}]
        optimizer = kind(handed[PLACES.index(place)], rate, weight_decay=amount)
        seen = [1.0]
        for step in range(STEPS):
            weight.grad = torch.tensor([size if step % 2 else -size])
            optimizer.step()
            seen.append(weight.item())
        curves[kind.__name__] = np.array(seen)
    return curves


@view(
    parameter=list(NAMES),
    place=Choice({place: place for place in PLACES}, "handed over"),
    size=Range(1e-4, 10.0, 0.25, "gradient size", log=10),
    rate=Range(0.0, 0.03, 0.001, "learning rate"),
    amount=Range(0.0, 0.5, 0.01, "weight_decay"),
    step=Range(0, STEPS, hidden=True),
)
def decay(see: Sheet, parameter=NAMES[0], place=PLACES[0], size=0.1, rate=0.01, amount=0.1, step=STEPS) -> None:
    """The weight decay of three optimizers at work on one weight, by its name and by how the optimizer got it.

    Numbers: `curves`, name -> the weight before each step and after the last; `reached`, whether decay reaches it.
    """
    curves = decay_curves(size, rate, amount, parameter, place)
    probe = decay_curves(0.0, 0.1, 0.5, parameter, place)["SGD"][-1]  # only decay can move it
    does = "does not reach" if probe >= 1 else "reaches" if amount * rate else "would reach"
    reach = "it is not trained" if place == PLACES[3] else f"weight decay {does} it"
    see.grid(380)
    x, y = linear("step", -0.02 * STEPS, STEPS, 8), linear("weight", -0.2, 1.4, 8)
    panel = see.panel(title=f"{parameter}, {place}: {reach}", x=x, y=y)
    alone = (1 - rate * amount) ** np.arange(STEPS + 1)
    panel.line(alone, color="reference", dash=":", width=5, label="× (1 − rate × decay) each step")
    told, columns = _curves(see, panel, curves)
    elsewhere = " outside of this group" if place == PLACES[2] else ""
    see.say(
        f"{parameter}, {place}: {reach}. The learning rate is {rate:.3g}, weight_decay is {amount:.3g}{elsewhere}, and "
        f"the gradients are -{size:.3g} and +{size:.3g} in turn. A weight of 1 after {{at}} steps: {told}.",
        curves=curves, reached=probe < 1, **columns,
    )  # fmt: skip
