"""*Scaler zoo*: the loss-scale rules of all frameworks on one sequence of overflows, and one rule that cannot work."""

import math
from itertools import accumulate
from typing import Any

import numpy as np

from mpkit.policies import FRAMEWORKS, ScalePolicy, naive_loss_ratio, own_names, preset, stack
from mpkit.replay import Simulation, simulate
from mpkit.view import Choice, Panel, Range, Sheet, counted, exponent, exponents, fitted, linear, log2, view

STEPS = 200
_AT = np.arange(STEPS)
# its name, what the sentence tells of it, and the largest scale that each step can bear; negative where none works
SITUATIONS: dict[str, tuple[str, str, np.ndarray]] = {
    "drop": ("the ceiling falls and returns", "The ceiling falls from 2^20 to 2^3 at step 60 and returns at step 120.",
             np.where((_AT >= 60) & (_AT < 120), 2.0**3, 2.0**20)),
    "outliers": ("one bad batch in 20 steps", "The ceiling is 2^18, and one batch in 20 steps is bad.",
                 np.where(_AT % 20 == 19, 2.0**2, 2.0**18)),
    "fixed": ("the ceiling stays at 2¹³", "The ceiling is 2^13 from the start.", np.full(STEPS, 2.0**13)),
    "model": ("the model is broken", "The model is broken: from step 60 on every gradient is NaN.",
              np.where(_AT >= 60, -1.0, 2.0**20)),
    "free": ("nothing ever overflows", "Nothing ever overflows.", np.full(STEPS, math.inf)),
}  # fmt: skip
_START_NEEDED = ("jmp", "mindspore_scaler", "mindspore_cell")  # no default; the last two have none for the factor
ZOO = (*(name for name in FRAMEWORKS if name not in ("mpkit", "fairscale_layerwise")), "mpkit")


# ---- numbers
def zoo_policy(framework: str, interval: int, start: float | None = None) -> ScalePolicy:
    """A framework's policy with this growth interval and, if given, this start; all else is its default."""
    own_start, own_interval = own_names(framework)
    parameters: dict[str, Any] = {"scale_factor": 2} if framework in _START_NEEDED[1:] else {}
    if own_start is not None and (start is not None or framework in _START_NEEDED):
        parameters[own_start] = 2.0**16 if start is None else start
    return preset(framework, **parameters, **{own_interval: interval})


# ---- every framework
@view(
    situation=Choice({name: words for name, (words, *_) in SITUATIONS.items()}, "what happens"),
    interval=Range(2, 200, label="growth interval, steps"),
    together="all start at the same scale",
    start=Range(4, 24, label="that start, 2 to the"),
    beside=Choice({name: name for name in ZOO if name != "torch"}, "beside torch"),
    step=(0, STEPS - 1),
)
def zoo(see: Sheet, situation="drop", interval=20, together=True, start=16, beside="megatron", step=STEPS - 1) -> None:
    """All frameworks on one sequence of overflows, played step by step.

    Numbers: `scales` (steps, rules), `ceiling`, and for each rule `skipped lowest final raised_at`.
    """
    _, happens, ceiling = SITUATIONS[situation]
    done = simulate(ceiling, stack(zoo_policy(name, interval, 2.0**start if together else None) for name in ZOO))
    scales, stopped = done.sampled, np.isnan(done.sampled)
    bad = ~stopped & ~(np.nan_to_num(scales, nan=0.0) <= ceiling[:, None])
    lowest = np.fmin(done.lowest, done.final)  # the last decision may go below what was used
    see.idle = set() if together else {"start"}
    _every_rule(see, beside, scales, bad, ceiling, done)

    fewest, most = (end(np.cumsum(bad, axis=0), axis=1).tolist() for end in (np.min, np.max))
    stops = [ZOO[i] for i in np.flatnonzero(done.raised_at >= 0)]
    raised = f" Rules that raise an error and stop: {', '.join(stops)}." if stops else ""
    own = "start at their own defaults (jmp and two of MindSpore's, which have none, at 2^16)"
    see.say(
        f"{len(ZOO)} rules {f'start at 2^{start}' if together else own}, with a growth interval of {interval} steps. "
        f"{happens} Up to step {{at}} the rules have skipped {{from_to}}.{raised}",
        at=np.arange(STEPS), scales=scales, ceiling=ceiling,
        from_to=[f"{a} to {b} steps" if a < b else counted(b, "step") for a, b in zip(fewest, most)],
        skipped=done.skipped, lowest=lowest, final=done.final, raised_at=done.raised_at,
    )  # fmt: skip
    ends = [f"stops at step {at}" if at >= 0 else exponent(end) for at, end in zip(done.raised_at, done.final)]
    told = zip(ZOO, done.skipped.tolist(), map(exponent, lowest.tolist()), ends)
    see.rows = [dict(zip(("framework", "skipped", "lowest", "ends at"), row)) for row in told]


def _every_rule(see: Sheet, beside: str, scales: Any, bad: Any, ceiling: Any, done: Simulation) -> None:
    """Above, torch's rule and another; below, every rule under the same ceiling, with those that do the same."""
    alike, raised = dict[tuple[bytes, int], list[int]](), done.raised_at
    for i in range(len(ZOO)):
        alike.setdefault((scales[:, i].tobytes(), int(raised[i])), []).append(i)
    columns, first, second = 6, ZOO.index("torch"), ZOO.index(beside)
    rows = -(-len(alike) // columns)
    see.grid(430, 1000, rows=(3.2, *[1] * rows), cols=(1,) * columns)
    see.play("step", "step", STEPS, every=60)
    low, high = fitted(scales, ceiling)  # a line cut off would look like a floor or a cap
    top, overflows = exponents(ceiling, low, high), bool(np.isfinite(ceiling).any())
    x = linear("step", 0, STEPS - 1, 8)
    main = see.panel(colspan=columns, title=f"torch and {beside}", x=x, y=log2("loss scale", low, high))
    if overflows:
        main.band(top, high, label="here it would overflow", step="mid")

    def draw(panel: Panel, i: int, color: str, size: float, tag: bool | None, **look: Any) -> None:
        used = exponents(scales[:, i], low, high)
        panel.line(used, color=color, step="mid", show="upto", label=ZOO[i] if tag else None, tag=tag, **look)
        skips = np.flatnonzero(bad[:, i])
        told = (f"skipped by {ZOO[i]}", color) if tag else ("", "overflow")  # a small picture has one line
        panel.crosses(used, skips, *told, since=skips, size=size, show="upto")
        if raised[i] >= 0:
            look = {"since": [int(raised[i])], "show": "upto", "label": "the rule raises an error"}
            panel.points(exponents(done.final[i : i + 1], low, high), [int(raised[i])], "ink", size=4, **look)

    draw(main, first, "own", 4, True, width=2.4)
    draw(main, second, "zero", 4, True, width=2.4, dash="--")
    small = linear("", 0, STEPS - 1, 2) | {"blank": True}, log2("", low, high) | {"blank": True, "ticks": []}
    for k, same in enumerate(alike.values()):
        i = next((j for j in same if j in (first, second)), same[0])
        where: dict[str, Any] = {"row": k // columns + 1, "col": k % columns, "pad": [24, 6, 6, 8]}
        title = f"{ZOO[i]}{f' + {len(same) - 1}' if len(same) > 1 else ''}: {done.skipped[i]} ×"
        panel = see.panel(title=title, title_size=10, x=dict(small[0]), y=dict(small[1]), **where)
        if overflows:
            panel.line(top, color="overflow", width=1, step="mid")
        draw(panel, i, "own" if i == first else "zero" if i == second else "reference", 2.2, None, width=1.8)


# ---- a rule that cannot work
SPAN = 400  # steps


@view(
    start=Range(-10, 20, label="start, 2 to the"),
    loss=Range(0.01, 1000, 0.05, "first loss, nats", log=10),
    decay=Range(0, 0.05, 0.001, "the loss falls per step by"),
    ceiling=Range(4, 24, label="ceiling of the gradients, 2 to the"),
)
def naive(see: Sheet, start=16, loss=2.3, decay=0.0, ceiling=18) -> None:
    """The rule that compares the loss with the scale, beside torch's, which asks whether the gradients are finite.

    Numbers over 400 steps: `scale` of the naive rule, `torch`, `losses`. The naive rule skips nothing, so its steps
    above the ceiling go into the weights.
    """
    losses = loss * (1 - decay) ** np.arange(SPAN)
    scale = np.array([*accumulate(losses[:-1].tolist(), naive_loss_ratio, initial=2.0**start)])
    rule = preset("torch", init_scale=2.0**start, growth_interval=20)
    torch = simulate(np.full(SPAN, 2.0**ceiling), rule).sampled[:, 0]
    powers, low, high = np.log2(scale), -75, 80  # every run finds room, so that a ring stays under the hand
    see.grid(400, 900)
    y = log2("loss scale; loss", low, high, 25)
    panel = see.panel(title="two rules for the loss scale", x=linear("step", 0, SPAN, 8), y=y)
    panel.span("y", ceiling, high, "overflow/0.15", "gradients overflow")
    panel.span("y", low, -24, "zero/0.15")
    # in the corner that no line comes near
    panel.text("below the smallest float16", 0, low, anchor="start", valign="bottom", dx=6, dy=-3)
    look: dict[str, Any] = {"width": 2.2, "tag": True}
    panel.line(exponents(losses, low, high), color="reference", dash=":", label="loss", **look)
    panel.line(exponents(scale, low, high), color="overflow", dash="--", label="naive rule", **look)
    panel.line(exponents(torch, low, high), color="zero", label="torch's rule", **look)
    over = np.flatnonzero(scale > 2.0**ceiling)
    look = {"dash": ":", "glyph": "x", "size": 7, "label": "first inf in the weights"}
    for step in over[:1]:  # upright, as its lower end may lie under the ring of the start
        panel.line([powers[step], (ceiling + high) / 2], [step, step], "overflow", **look)
    # apart from each other in both directions: each ring can be grabbed
    panel.handle("y", "start", start, -10, 20, "start, 2 to the", cross=0.015 * SPAN)
    # both lines begin beside the ring; its name lies above it where the naive rule falls
    panel.text("start", 0, start, color="own", beside=4, dy=20 if powers[-1] >= start else -20, halo=True)
    panel.handle("y", "ceiling", ceiling, 4, 24, "ceiling of the gradients, 2 to the", cross=0.6 * SPAN)
    panel.text("ceiling", 0.6 * SPAN, ceiling, color="own", dy=-16, halo=True)  # torch's rule stays below it
    inf = f" From step {over[0]} on inf goes into the weights." if len(over) else ""
    see.say(
        f"The naive rule starts at 2^{start}, with a loss of {loss:.4g} that falls by {100 * decay:.2g} % a step. At "
        f"step {SPAN - 1} its scale is {exponent(float(scale[-1]))}, and that of torch's rule "
        f"{exponent(float(torch[-1]))}. The ceiling is 2^{ceiling}.{inf}",
        scale=scale, torch=torch, losses=losses,
    )  # fmt: skip
