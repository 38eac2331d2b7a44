"""Lesson 04, *What if*: how a dynamic loss scale moves, over a recorded run, and over factors and windows."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mpkit.data import data_dir
from mpkit.policies import ScalePolicy, advance, explain, initial
from mpkit.record import Trace
from mpkit.replay import ceilings, flushed
from mpkit.replay import sweep as every_pair
from mpkit.view import Choice, Range, Sheet, Stroke, Text, exponents, fitted, linear, log2, names, power_of_two, view
from mpkit.view.parts import gradients, last_row, prediction, tenths
from mpkit.view.words import capital, counted

RUNS = {
    "mlp_digits": "perceptron on digits, healthy",
    "gpt_sums": "small GPT on sums, healthy",
    "rare_outliers": "one huge batch in 16",
    "growing_activations": "a loss without a lower bound",
    "mlp_digits_rate": "perceptron on digits, 4 times the rate",
    "mlp_digits_batch": "perceptron on digits, batches of 8 for 64",
}
OWN = Text("or the path of a trace of your own")
SHOWN = 400  # steps of a recorded run; two of them are shorter
POWERS = (-60, 120)  # what a hand may set: far beyond any axis, and within float32


# ---- numbers
def load_run(name: str) -> Trace:
    """A trace by the name of a file in `data/traces`, or by path.

    Raises:  ValueError that says what is wrong with the path or the file.
    """
    path = data_dir() / "traces" / f"{name}.npz"
    try:
        return Trace.load(path if path.is_file() else Path(name).expanduser())
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ValueError(f"{error}; write the path of a trace that was saved") from None


@cache
def recorded(run: str, own: str = "") -> tuple[Trace, np.ndarray]:
    """One of `RUNS`, or a trace by path, and the largest scale that each step can bear in float16 (negative: none).

    Those of `RUNS` were trained in float32, so that no recorded scale hides what another one would have kept, and the
    ceiling was measured in each step.
    """
    trace = load_run(own or f"{run}_float32").before(SHOWN)
    return trace, ceilings(trace, "fp16")


def zero_share(trace: Trace, scales: np.ndarray) -> np.ndarray:
    """Share of gradient values that are zero in float32 already, or become zero in float16 at these scales.

    A step without a histogram has that of the last one before it.

    Shapes:  scales (N,) -> (N,); NaN in steps whose loss is not finite: they have no gradients.
    """
    part = trace.gradients
    lost = flushed(trace, scales[trace.rows, None], "fp16")[:, 0] * part.total().sum(axis=1)
    share = (part.zeros.sum(axis=1) + lost) / part.size.sum()
    return np.where(np.isfinite(trace.loss), share[last_row(trace)], math.nan)


def stepped(policy: ScalePolicy, tops: np.ndarray, puts: dict[int, float] = {}) -> tuple[np.ndarray, ...]:
    """(scale of each step, was it finite, which finite step of the window it was or 0, what was decided after it) when
    step i overflows above `tops[i]`.

    `puts` are scales set by hand, by step; the count of finite steps starts again there.
    """
    state, steps = initial(policy), []
    for i, top in enumerate(tops.tolist()):
        state = initial(replace(policy, init_scale=puts[i])) if i in puts else state
        used, fits = state, state.scale <= top
        state, _ = advance(policy, state, fits)
        steps.append((used.scale, state.scale, fits, fits * (used.good + 1)))
    scale, after, finite, good = map(np.array, zip(*steps))
    return scale, finite, good, explain(policy, scale, after, finite)


# ---- a recorded run under your scaler
@view(
    run=RUNS, own=OWN,
    start=Range(0, 32, label="start 2^"), factor=Range(1.01, 16, 0.25, "scale_factor", log=2),
    window=Range(1, SHOWN, label="scale_window, steps"), floor=Range(-24, 10, label="floor 2^"),
    step=(0, SHOWN - 1), drawn=Stroke(SHOWN, *POWERS), puts=Stroke(SHOWN, *POWERS),
)  # fmt: skip
def dynamics(
    see: Sheet, run="gpt_sums", own="", start=24, factor=2.0, window=50, floor=0, step=SHOWN - 1, drawn={}, puts={}
) -> None:
    """A recorded run under any dynamic scale: a ball on the scale below its ceiling, and the gradients beside it.

    Numbers over all steps: `scale finite reasons ceiling headroom zeros` (share of the gradient values that are
    zero, NaN where there are none) and `layers` (whose gradient is the largest: who makes a dip of the ceiling).
    `own` is a trace by its path in place of `run`, of which 400 steps are shown; `drawn` are ceilings drawn by hand,
    `puts` scales set by hand, as exponents.
    """
    if floor > start:
        raise ValueError(f"the floor 2^{floor} must not lie above the start 2^{start}")
    trace, recorded_tops = recorded(run, own)
    ceiling, count = recorded_tops.copy(), len(trace)
    for at, power in drawn.items():
        ceiling[at : at + 1] = 2.0**power  # a trace may be shorter
    policy = ScalePolicy.by_factor(2.0**start, factor, window, 2.0**floor, name="dynamic")
    scale, finite, good, reasons = stepped(policy, ceiling, {k: 2.0**v for k, v in puts.items()})
    zeros = zero_share(trace, scale)
    plain = zero_share(trace, np.full(count, math.inf))  # in float32 already: ReLUs
    see.idle = {"run"} if own else set()
    if drawn or puts:
        see.buttons["Undo drawing"] = {"drawn": {}, "puts": {}}

    low, high = fitted(ceiling, scale, scale / 64, room=3)  # below the ball lie the floor's name and the window's ring
    see.grid(400, rows=(3, 1), cols=(2.7, 1))
    see.play("step", "step", count, every=100)
    used, top = exponents(scale, low, high), exponents(ceiling, low, high)
    layers = np.array(trace.gradients.names)[trace.gradients.largest.argmax(axis=1)][last_row(trace)]
    ring = good / min(window, count)  # how full the window is
    main = _main(see, used, top, low, high, ring, finite, {"decision": reasons, "largest gradient": layers})
    main.handle("y", "puts", used, low, high, "the scale of this step, 2 to the", cross=0, gesture=True, look="plain")
    note = f"window {window}{': further left' * (window > 60)}"
    lane = low + (4.4 if floor < low else 3 + 2 * (floor < low + 5))  # off the floor's name
    main.handle("x", "window", window, 1, SHOWN, "scale_window, steps", cross=lane, slope=-1, stem=True, note=note)
    look: dict[str, Any] = {"log2": True, "stem": True, "step": 0.25, "note": f"×{factor:.4g}"}
    main.handle("y", "factor", math.log2(factor), 0.25, 4, "scale_factor", base=used, cross=7, **look)
    note = f"floor {power_of_two(floor)}{', below' * (floor < low)}"
    main.handle("y", "floor", floor, -24, 10, "floor, 2 to the", note=note)
    gradients(see, (0, 1), trace, scale)
    _whole(see, used, top, finite, low, high, step, start)

    name = Path(own).stem if own else capital(RUNS[run])
    headroom = np.log2((bearable := np.maximum(ceiling, 2.0**-60)) / scale)
    side = np.where(scale > ceiling, "above the ceiling", "below the ceiling")
    whole = bool(ceiling.min() > 0)
    bound = "the ceiling {top:2^}, the headroom {headroom:.1f} bits" if whole else "{side}"
    share = " At this scale {empty} % of this step's gradient values are zero (in float32 already {plain} %)." * whole
    guess = "" if "fp16" in trace.measured else " The ceiling is an estimate where gradients were not recorded."
    see.say(
        f"{name}. Step {{at}}: the scale is {{power:2^}}, {bound}; decision: {{decided}}. Skipped so "
        f"far: {{so_far}} of {{count}}.{share}{guess}",
        at=np.arange(count), count=np.arange(count) + 1, so_far=np.cumsum(~finite), power=np.log2(scale), scale=scale,
        finite=finite, reasons=reasons, layers=layers, ceiling=ceiling, headroom=headroom, zeros=zeros,
        decided=[f"{r}{'' if ok else ', and the optimizer sees nothing of it'}" for r, ok in zip(reasons, finite)],
        side=np.where(ceiling > 0, side, "and no scale helps: float16 makes the loss inf or NaN"),
        top=np.log2(bearable), empty=tenths(zeros), plain=tenths(plain),
    )  # fmt: skip


def _main(see: Sheet, used: Any, top: Any, low: int, high: int, ring: Any, finite: Any, notes: dict[str, Any]) -> Any:
    """The run up to the step shown: ceiling, scale, skipped steps, and what the rule decided."""
    x = linear("step", -60, 20, follow=True) | {"ticks": [[k, str(k)] for k in range(0, len(used), 20)]}
    main = see.panel(title="the loss scale and its ceiling", x=x, y=log2("loss scale", low, high))
    skips = np.flatnonzero(~finite)
    main.band(top, high, label="here it would overflow")
    main.add("pen", y=top, color="overflow", name="drawn", lo=low, hi=high, label="ceiling", width=1.6)
    main.line(used, step="mid", width=2.6, show="upto", label="loss scale", ghost=True)
    main.points(used, color=["overflow", "own"], hue=finite.astype(np.uint8), ring=ring, size=7, show="at", glide=True)
    main.crosses(used, skips, "skipped step", "ink", since=skips, size=4.5, show="upto")
    for label, words in notes.items():
        codes, of = np.unique(words.astype(str), return_inverse=True)
        main.add("notes", label=label, told=codes.tolist(), codes=of.astype(np.uint8))
    return main


def _whole(see: Sheet, used: Any, top: Any, finite: Any, low: int, high: int, step: int, start: int) -> None:
    """All steps in small, with the handles of the step and of the start."""
    every = next(k for k in (8, 16, 32, 64) if high - low < 3.5 * k)  # four names find room
    whole = see.panel(1, 0, colspan=2, x=linear("step of the whole run", 0, len(used), 8), y=log2("", low, high, every))
    whole.band(top, high, quiet=True)
    whole.line(top, color="overflow", width=1)
    whole.line(used, step="mid", width=1.6)
    whole.crosses(used, np.flatnonzero(~finite), color="ink", size=2.5, width=1.4)
    # its ring at the foot, clear of that of the start
    whole.handle("x", "step", min(step, len(used) - 1), 0, len(used) - 1, "step", foot=True)
    up = 14 * bool(((used > start) & ~finite)[: len(used) // 7].any())  # its name stands above the crosses there
    whole.handle("y", "start", start, 0, 32, "start, 2 to the", cross=0.04 * len(used), note="start", up=up)


# ---- factor x window
FACTORS = (1.25, 1.5, 2, 3, 4, 8, 16)
WINDOWS = (2, 5, 10, 20, 50, 100, 200)
FIGURES = {  # of a cell: the title of the table, what its range is told as
    "lost": ("training signal lost, %", "% of the training signal is lost"),
    "time": ("time spent on skipped steps, %", "% of the training time is spent on skipped steps"),
}
# time of a skipped step in applied ones: all but the update, of the ResNet-18 in `data/benchmarks/boost.json`
SKIPPED = 0.985


@cache
def swept(run: str, own: str, start: int) -> dict[str, np.ndarray]:
    """Figure of `FIGURES`, in percent, and `skipped`, a share of the steps -> (factors, windows) on a recorded run."""
    rows = every_pair(recorded(run, own)[0], init=2.0**start, factor=FACTORS, window=WINDOWS, fmt="fp16", min_scale=1.0)
    table = rows.pivot(index="factor", columns="window")
    lost, skipped = (table[name].to_numpy() for name in ("lost", "skipped_share"))
    time = SKIPPED * skipped / (1 - skipped + SKIPPED * skipped)
    return {"lost": 100 * lost, "time": 100 * time, "skipped": skipped}


@view(
    run=dict([*RUNS.items()][:3]),
    own=OWN,
    start=Range(0, 32, label="initial scale, 2 to the", costly=True),
    figure=Choice({name: title for name, (title, _) in FIGURES.items()}, "what the cells show"),
)
def sweep(see: Sheet, run="gpt_sums", own="", start=16, figure="lost") -> None:
    """Every pair of factor and window on one recorded run; the pairs that lose least training signal are framed.

    Numbers: `lost time skipped`, each (factors, windows).
    """
    grids, (title, told) = swept(run, own, start), FIGURES[figure]
    grid, least = grids[figure], ""
    see.grid(400)
    see.idle = {"run"} if own else set()
    table = np.reshape(texts := [f"{v:.1f}" if v == 0 or v >= 0.05 else "< 0.1" for v in grid.flat], grid.shape)
    x, y = names(WINDOWS, "scale_window, finite steps"), names(FACTORS, "scale_factor", down=True)
    panel = see.panel(title=title, x=x, y=y, pad=[28, 14, 42, 60])
    cells = [f"factor {f}, window {w}" for f in FACTORS for w in WINDOWS]
    panel.cells(grid, texts, names=cells, label="cell", quiet=True)
    if figure == "lost":  # the least time is that of most cells
        rows, cols = np.nonzero(table == texts[grid.argmin()])  # as the cells tell it
        look: dict[str, Any] = {"edge": "normal", "width": 3, "label": "least training signal lost"}
        panel.boxes(cols - 0.47, rows - 0.47, cols + 0.47, rows + 0.47, **look)
        least = f" The least, {texts[grid.argmin()]} %, is lost with {counted(len(rows), 'pair')} in a frame."
    see.rows = [{"factor": f} | {f"window {w}": v for w, v in zip(WINDOWS, r)} for f, r in zip(FACTORS, table.tolist())]
    see.say(
        f"{Path(own).stem if own else capital(RUNS[run])}, started at 2^{start}. From {{low}} to {{high}} {told}, by "
        f"factor and window.{least}",
        low=texts[grid.argmin()], high=texts[grid.argmax()], **dict[str, Any](grids),
    )  # fmt: skip


# ---- predict: draw the next steps
FIRST, STEPS, ENDS = 40, 100, (14.0, 22.0)


@view(typed="or type it: 2 to the ..., from step 40, 50, 60, 70, 80, 90 on", drawn=Stroke(STEPS, *ENDS))
def draw(see: Sheet, typed="", drawn={}, shown=False) -> None:
    """A prediction that is drawn: the scale of steps 40 to 99, before it is shown. Numbers: `guess truth near`."""
    ceiling = recorded("gpt_sums")[1][:STEPS]
    scale, finite, *_ = stepped(ScalePolicy.by_factor(2.0**16, 2.0, 20, 1.0), ceiling)
    truth, top = np.log2(scale), np.clip(np.log2(ceiling), *ENDS)
    panel = see.panel(x=linear("step", -1, STEPS, 10), y=log2("loss scale", *ENDS))
    panel.band(top, ENDS[1], label="here it would overflow")
    panel.line(top, color="overflow", width=1.6, label="ceiling")
    panel.rule("x", FIRST - 0.5, "muted", dash=":")
    told = prediction(see, panel, "dynamic_scale.draw", truth, first=FIRST, ends=ENDS, start=17, within=0.5,
                      at=range(40, 100, 10), typed=typed, drawn=drawn, shown=shown, stairs=True)  # fmt: skip
    panel.line(truth[:told], color="reference", step="mid", width=2.6, label="loss scale")
    panel.crosses(truth, np.flatnonzero(~finite[:told]), "skipped step", "ink")
