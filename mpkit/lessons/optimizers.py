"""*The optimizer*: Adam with a narrow state."""

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpkit.data import digits
from mpkit.formats import BF16, FP16, FP32, FloatFormat
from mpkit.optimizers import Adam
from mpkit.rounding import round_to
from mpkit.view import Choice, Range, Sheet, exponents, log2, power_of_two, view

FORMATS = {"float32": FP32, "float16": FP16, "bfloat16": BF16}


# ---- Adam's first step in a narrow format
def first_adam_step(gradient: Tensor, eps: float, fmt: FloatFormat) -> tuple[Tensor, float, Tensor]:
    """The first update of Adam with beta1 0.9, beta2 0.999, each operation rounded to `fmt`.

    Shapes:   gradient (*) float32 >= 0 -> v = (1 - beta2) g^2 as stored (*), eps as stored, and the step (*) in units
              of the learning rate; 1 in exact arithmetic when g is far above eps.
    Source:   `mpkit.optimizers.Adam` at t = 1, rounded as a float16 optimizer would.
    """
    held = partial(round_to, fmt=fmt)
    g, tiny, correction = held(gradient), held(torch.tensor(eps)), held(torch.tensor(math.sqrt(0.001) / 0.1))
    m, v = held(g * 0.1), held(held(g * g) * 0.001)
    return v, float(tiny), held(held(m * correction) / held(held(v.sqrt()) + tiny))


LOW, HIGH = -12, 8  # powers of two of the axis of steps; what lies beyond is drawn at the edge
EXPONENTS = torch.arange(-26 * 4, 16 * 4 + 1) / 4


@view(
    state=Choice({name: name for name in FORMATS}, "computed in"),
    eps=Range(-12, -1, label="eps, 10 to the"),
    gradient=Range(-26, 16, label="gradient, 2 to the"),
)
def adam_state(see: Sheet, state="float16", eps=-8, gradient=-10) -> None:
    """The size of Adam's first step over the size of the gradient, all of it computed in a narrow format.

    Numbers: `gradients`, and `narrow` and `wide`, steps in learning rates; all over the powers of two of the axis.
    """
    gradients = EXPONENTS.exp2()
    v, stored, narrow = first_adam_step(gradients, 10.0**eps, FORMATS[state])
    wide = first_adam_step(gradients, 10.0**eps, FP32)[2]
    x, marked = EXPONENTS.numpy(), int((gradient == EXPONENTS).nonzero())
    own, plain = (exponents(size.nan_to_num(math.inf, math.inf), LOW, HIGH) for size in (narrow, wide))
    see.grid(390)
    y = log2("first step, in learning rates", LOW - 1, HIGH + 2)
    inner = [[e, power_of_two(e)] for e in range(-9, HIGH, 3)]
    y["ticks"] = [[LOW, f"up to {power_of_two(LOW)}"], *inner, [HIGH, f"from {power_of_two(HIGH)}"]]
    panel = see.panel(title="Adam's first step over the gradient", x=log2("size of the gradient", -26, 16, 6), y=y)
    panel.line(own, x, "own", width=4, label="chosen format", ghost=True)
    panel.line(plain, x, "reference", width=2.2, dash="--", label="float32", tag=True)
    zero, bad = narrow == 0, ~narrow.isfinite()
    for where, color, label, word in ((zero, "zero", "no step: 0", "0"), (bad, "overflow", "inf or NaN", "not finite")):
        at = np.flatnonzero(where)[::-3]  # with the last: one value may be all there is
        if len(at):
            panel.points(own[at], x[at], color, glyph="x", size=3, label=label, told=word)
    panel.points([own[marked]], [x[marked]], "own", fill="paper", size=6)
    panel.handle("x", "gradient", gradient, -26, 16, "marked gradient, 2 to the")
    told = "not a number" if narrow[marked].isnan() else f"{narrow[marked]:.3g} times the learning rate"
    see.say(
        f"The gradient is 2^{gradient} = {2.0**gradient:.5g}. In {state} v is {v[marked]:.5g}, eps {10.0**eps:g} "
        f"becomes {stored:.3g}, and the step is {told}. In float32 it is "
        f"{wide[marked]:.3g} times the learning rate.",
        gradients=gradients, narrow=narrow, wide=wide,
    )  # fmt: skip


# ---- a training on the digits
def train_with_state(fmt: FloatFormat, eps: float, steps: int = 120) -> dict[str, Any]:
    """Train on the 8x8 digits with Adam whose moments and eps are rounded to `fmt` after every step.

    Weights, gradients and arithmetic stay in float32, so that the state alone makes the difference.
    """
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = Adam(network.parameters(), 0.01, eps=eps)
    optimizer.param_groups[0]["eps"] = stored = float(round_to(torch.tensor(eps), fmt))
    images, labels = digits("train", size=8)
    for pick in (torch.arange(64 * step, 64 * step + 64) % len(images) for step in range(steps)):
        loss = nn.functional.cross_entropy(network(images[pick]), labels[pick])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for moments in optimizer.state.values():
            for moment in moments.values():
                round_to(moment, fmt, out=moment)
    images, labels = digits("test", size=8)
    right = float((network(images).argmax(1) == labels).float().mean())
    return {"state": fmt.name, "eps": eps, "stored eps": f"{stored:.4g}", "last loss": loss.item(), "accuracy": right}
