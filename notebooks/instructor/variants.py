"""Variants of the labs: other formats, numbers, traces and faults, drawn from a seed.

A lab without a variant is variant 0, the source as it stands. `varied(notebook, 7)` gives the source of variant 7, with
its solutions and tests: texts of the source are replaced by those of the drawn values, all at once. Each choice falls
on another option than in the variants before and after. What an example expects is computed by the library. A text that
the source does not have is an error, so a changed source is noticed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import permutations, product
from random import Random
from typing import Any

import numpy as np
import torch

from mpkit.boost.grad_freeze import GradientFreeze
from mpkit.data import data_dir
from mpkit.experiment.statistics import student_quantile
from mpkit.formats import E2M3, E3M2, get_format
from mpkit.record import Trace
from mpkit.rounding import round_to

# where (a question, or the id of a cell; "" is the whole lab) -> {text of the source: text of the variant}
Texts = dict[str, dict[str, str]]
NUMBER = "mpkit_variant"  # the key in a notebook's metadata


class Draw:
    """The choices of one variant. Neighbours differ in each; n variants in a row take each of n options once."""

    def __init__(self, lab: str, seed: int) -> None:
        self.lab, self.seed, self.calls = lab, seed, 0

    def choice(self, options: Sequence[Any]) -> Any:
        self.calls += 1
        block, place = divmod(self.seed, len(options))
        return options[self._order(len(options), block)[place]]

    def _order(self, count: int, block: int) -> list[int]:
        if count < 3:
            return list(range(count))
        order, before = (Random(f"{self.lab} {self.calls} {b}").sample(range(count), count) for b in (block, block - 1))
        if order[0] == before[-1]:  # a swap of the first two leaves the last one, which the next block looks at
            order[:2] = order[1::-1]
        return order


def varied(notebook: Any, seed: int) -> Any:
    """The source of variant `seed` of a lab's source; the number stands in its metadata.

    Raises:  ValueError for a negative seed, or where a text to be replaced is not in the source.
    """
    if seed < 0:
        raise ValueError(f"a variant is a whole number from 0, got {seed}; 0 is the lab as it stands")
    variant = deepcopy(notebook)
    if seed == 0:
        return variant
    variant.metadata[NUMBER] = seed
    marks = [cell.metadata.get("nbgrader", {}).get("grade_id", "") for cell in variant.cells]
    lab = next(name[:5] for name in marks if name)
    drawn = LABS[lab](Draw(lab, seed))
    of_all = drawn.pop("", {})
    places = {where: [] for where in drawn}
    for cell, name in zip(variant.cells, marks):
        where = name.split("_")[1] if name else cell.id
        places.setdefault(where, []).append(cell)
        _replace(cell, of_all | drawn.get(where, {}))
    for where, texts in drawn.items():
        before = "\n".join(cell.source for cell in notebook.cells if cell.id in {c.id for c in places[where]})
        missing = [text for text in texts if text not in before]
        if missing:
            raise ValueError(f"{lab}, {where}: the source lacks {missing[0]!r}, which variants.py replaces")
    return variant


def _replace(cell: Any, texts: dict[str, str]) -> None:
    """All texts at once, longer ones first, so that no replacement meets the result of another."""
    if texts:
        either = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
        cell.source = re.sub(either, lambda found: texts[found[0]], cell.source)
    if cell.cell_type == "code":
        cell.outputs, cell.execution_count = [], None


def _raised(exponent: int) -> str:
    """2 to a power as labs print it: 2⁻¹⁴."""
    return "2" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def formats(draw: Draw) -> Texts:
    """Lab 01: another format of 15 or 16 bits, and another loss scale in the question that is read."""
    exponent_bits, fraction_bits = draw.choice([(4, 11), (6, 9), (5, 9), (4, 10), (6, 8)])
    name, fmt = f"E{exponent_bits}M{fraction_bits}", get_format(f"e{exponent_bits}m{fraction_bits}")
    bias, bits = 2 ** (exponent_bits - 1) - 1, 1 + exponent_bits + fraction_bits
    tie = fmt.max + fmt.max * fmt.eps / (2 - fmt.eps) / 2
    patterns = [bias << fraction_bits, (1 << (bits - 1)) + ((bias + 1) << fraction_bits)]
    patterns += [((2**exponent_bits - 1) << fraction_bits) - 1, (draw.choice(range(2, bias)) << fraction_bits) + 341]
    values = fmt.decode(torch.tensor(patterns)).tolist()
    pairs = ", ".join(f"({pattern:#06x}, {value!r})" for pattern, value in zip(patterns, values))
    even = 2.0 ** draw.choice(range(-2, bias - 2))
    x = [draw.choice((0.1, 0.3, 0.7)), even * (1 + fmt.eps / 2), even * (1 + 1.5 * fmt.eps), 1.07 * fmt.max]
    x.append(fmt.min_subnormal * draw.choice((5.7, 11.2)))
    y = round_to(torch.tensor(x), fmt).tolist()
    rounded = ", ".join(f"({a!r}, {'math.inf' if b == float('inf') else repr(b)})" for a, b in zip(x, y))
    one = 1.0 if exponent_bits > 4 else 2.0**-6
    low, smallest = _raised(1 - bias), _raised(1 - bias - fraction_bits)
    scale = draw.choice((6, 8, 12))
    return {
        "": {'_get_format("e5m10")': f'_get_format("{fmt.name}")'},
        "c00": {"FP16": name},
        "q1": {
            "FP16": name,
            "5 exponent bits (bias 15) and 10": f"{exponent_bits} exponent bits (bias {bias}) and {fraction_bits}",
            "0 to 65535": f"0 to {2**bits - 1}",
            "2⁻¹⁴": low,
            "exponent field 31": f"exponent field {2**exponent_bits - 1}",
            "2ᵉ⁻¹⁵": "2ᵉ" + _raised(-bias)[1:],
            "bits, bias = 5, 10, 15": f"bits, bias = {exponent_bits}, {fraction_bits}, {bias}",
            "(0x3C00, 1.0), (0xC000, -2.0), (0x7BFF, 65504.0), (0x3555, 0.333251953125)": pairs,
        },
        "q3": {
            "FP16": name,
            "65520": repr(tie),
            "2⁻¹⁴": low,
            "2⁻²⁴": smallest,
            "= -14, 10, 65504.0": f"= {1 - bias}, {fraction_bits}, {fmt.max!r}",
            "(0.1, 0.0999755859375), (2049.0, 2048.0), (2051.0, 2052.0), (70000.0, math.inf), "
            "(6.666666e-5, 6.663799285888672e-05)": rounded,
        },
        "q4": {"FP16": name, "2.0**-11": f"2.0**-{fraction_bits + 1}"},
        "q5": {
            "FP16": name,
            "one, number = 1.0, 4096": f"one, number = {one!r}, {2 ** (fraction_bits + 2)}",
        },
        "q6": {"loss scale of 1024": f"loss scale of {2**scale}", **_shares(scale)},
    }


def _shares(scale: int) -> dict[str, str]:
    """The solution's sentence about a loss scale of 2**scale, from the trace that the question shows."""
    gradients = Trace.load(data_dir() / "traces" / "mlp_float32.npz").gradients
    counts = gradients.counts.sum((0, 1))
    below = dict(zip(gradients.exponents, 100 * (np.cumsum(counts) - counts) / counts.sum()))
    rows = [-25 - scale, -17 - scale, -10 - scale]
    shares = [f"{below[row]:.1f} %" for row in rows]
    return {
        "A scale of 1024 moves every value up by 10": f"A scale of {2**scale} moves every value up by {scale}",
        "2^-35, 2^-27 and 2^-20": f"2^{rows[0]}, 2^{rows[1]} and 2^{rows[2]}",
        "0.2 %, 1.9 % and 8.9 %": f"{shares[0]}, {shares[1]} and {shares[2]}",
    }


def loss_scaling(draw: Draw) -> Texts:
    """Lab 02: the format that flushes, the floor of the rule, the batch with the inf, the trace."""
    floor, poison = draw.choice((2, 4, 8, 16)), draw.choice((1, 2, 4))
    run, narrower = draw.choice([*product(("mlp_digits", "mnist_lenet"), (False, True))])
    flags = [i != poison for i in range(6)]
    texts: Texts = {
        "q2": {"but not below 1": f"but not below {floor}", "floor = 1.0": f"floor = {floor}.0"},
        "q3": {
            "poison=3)": f"poison={poison})",
            "[True, True, True, False, True, True]": repr(flags),
            "steps=3)": f"steps={poison})",
            "poison=3, steps=4": f"poison={poison}, steps={poison + 1}",
            "_seen[-1] != 3": f"_seen[-1] != {poison}",
        },
        "c21": {"mlp_digits": run},
    }
    if narrower:
        narrow = {
            "in FP16": "in E5M2",
            "to FP16": "to E5M2 (`torch.float8_e5m2`)",
            "torch.float16": "torch.float8_e5m2",
        }
        texts["q1"] = narrow | {'"fp16"': '"e5m2"'}
    return texts


def casting(draw: Draw) -> Texts:
    """Lab 03: the 16-bit format, which network has which fault, where it sits, the room of a scale, a rule."""
    letters = draw.choice([*permutations("ABCD")][1:])
    square, softmax, data, weights = letters
    deeper, bfloat16 = draw.choice([*product((False, True), repeat=2)])
    room, (up, down) = draw.choice((12, 13, 14)), draw.choice(((2, 4), (2, 8), (4, 8)))
    at, last = (5, 6) if deeper else (3, 4)
    texts: Texts = {
        "c11": {f'kind == "{old}"': f'kind == "{new}"' for old, new in zip("ABCD", letters)},
        "q3": {
            'broken("A")': f'broken("{square}")',
            'broken("B")': f'broken("{softmax}")',
            "network A overflows": f"network {square} overflows",
            "module 3 of network A": f"module {at} of network {square}",
            "module 4 of network B": f"module {last} of network {softmax}",
            '"A": "forward_overflow"': f'"{square}": "forward_overflow"',
            '"C": "bad_data"': f'"{data}": "bad_data"',
            '"D": "weights_non_finite"': f'"{weights}": "weights_non_finite"',
            '[1] == "3"': f'[1] == "{at}"',
            '"forward_overflow", "4"': f'"forward_overflow", "{last}"',
        },
        "q4": {
            "network A": f"network {square}",
            "Network A": f"Network {square}",
            'broken("A")': f'broken("{square}")',
            "(3, 4)": f"({at}, {last})",
        },
        "q5": {"2¹⁵": _raised(room), "2**15": f"2**{room}", "room = 15": f"room = {room}"},
        "q6": {"growth_interval=n)": f"growth_interval=n, growth_factor={up}.0, backoff_factor={1 / down})"},
        "q7": {text.format("A"): text.format(square) for text in ("network {}", "Network {}")}
        | {"network B": f"network {softmax}"},
    }
    if deeper:
        layers = "nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)"
        texts["c11"] |= {
            layers: "nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)",
            "body.insert(3": "body.insert(5",
            "body[1].weight.data *= 1000": "body[3].weight.data *= 3000",
            "body[3].weight.data *= 100": "body[5].weight.data *= 300",
            "body[3].weight.data[0, 0]": "body[5].weight.data[0, 0]",
        }
        texts["q4"] |= {
            '{"1", "2"} <=': '{"1", "2", "3", "4"} <=',
            "modules 1 and 2 do": "modules 1 to 4 do",
        }
    if bfloat16:
        texts["q1"] = {"float16": "bfloat16"}
        texts["q2"] = {
            "FP16": "BF16",
            "`.half()`": "`.bfloat16()`",
            "t.half()": "t.bfloat16()",
            "2.0**-12": "2.0**-9",
            "2.0**-11": "2.0**-8",
            "2**-12": "2**-9",
            "torch.float16": "torch.bfloat16",
        }
    return texts


def boost(draw: Draw) -> Texts:
    """Lab 04: the loss, an example of the sequence, which workers merge first, the numbers of the claim."""
    first, second = draw.choice([((0, 2), (1, 3)), ((0, 3), (1, 2))])
    order, pairs = (*first, *second), ["e1"] * 4
    for worker in second:
        pairs[worker] = "e2"
    p, claim = draw.choice([*product((0.6, 0.8), (25, 30))])
    sequence = GradientFreeze(10, 0, p, 1000).generate_freeze_index_sequence(10, 0, p, 1000)
    saved = sum(2 * v for v in sequence) / (20 * len(sequence))
    step, speed = saved * 2 / 3, 1 / (1 - saved * 2 / 3)
    groups, full = draw.choice([(4, 5), (5, 4), (3, 6), (6, 3), (4, 3)])
    share = full / (full + groups - 1)  # a fraction that a float holds exactly
    cycle = [*[0] * full, *range(1, groups)]
    smoothing = draw.choice((0.05, 0.1, 0.15, 0.2, 0.25))
    smoothed = {"cross-entropy": f"cross-entropy with a label smoothing of {smoothing}"}
    return {
        "q2": smoothed | {", labels)\n": f", labels, label_smoothing={smoothing})\n"},
        "c08": {"labels[:number])": f"labels[:number], label_smoothing={smoothing})"},
        "q3": {
            "freeze_sequence(3, 0.5, 8)) == [0, 0, 1, 2, 0, 0, 1, 2]": f"freeze_sequence({groups}, {share!r}, "
            f"{2 * len(cycle)})) == {cycle * 2!r}",
            "2 full steps (index 0), then each index from 1 to 2": f"{full} full steps (index 0), then each index from "
            f"1 to {groups - 1}",
        },
        "q6": {
            "the workers 0 and 1 merge": f"the workers {first[0]} and {first[1]} merge",
            "the workers 2 and 3": f"the workers {second[0]} and {second[1]}",
            "(0, 1, 2, 3)": repr(order),
            "[e1, e1, e2, e2]": f"[{', '.join(pairs)}]",
        },
        "q7": {
            "p = 0.7": f"p = {p}",
            "MindSpore's documentation promises 20 %": f"Somebody promises {claim} %",
            "about 15 %": f"about {100 * saved:.0f} %",
            "15 % * 2/3 = 10 %": f"{100 * saved:.0f} % * 2/3 = {100 * step:.0f} %",
            "1 / 0.90 = 1.11": f"1 / {1 - step:.2f} = {speed:.2f}",
            "For 1.20 a step must shrink to 0.833": f"For {1 + claim / 100:.2f} a step must shrink to "
            f"{1 / (1 + claim / 100):.3f}",
            "another 7 %": f"another {100 * (1 - step - 1 / (1 + claim / 100)):.0f} %",
        },
    }


def scales(draw: Draw) -> Texts:
    """Lab 05: the margin of the delayed scale, the element format of the blocks."""
    margin, fmt = draw.choice([*product((1, 2), (E3M2, E2M3))])
    name, top, largest = f"MXFP6 ({fmt.name.upper()})", 4 if fmt is E3M2 else 2, f"{fmt.max:g}"
    element = {"MXFP4 as": f"MXFP6_{fmt.name.upper()} as"}
    kept = round_to(torch.tensor([0.1, -0.6, 1.0, 2.4, 5.0, 0.02]) * 2 ** (top - 2), fmt).mul(2.0 ** (2 - top)).tolist()
    five = round_to(torch.tensor(5.0 * 2 ** (top - 2)), fmt).item() * 2.0 ** (2 - top)
    zeros = int((round_to(torch.full((31,), 5.0) * 2.0 ** (top - 9), fmt) == 0).sum())
    small, large = 0.8 * fmt.max, 1.2 * fmt.max
    return {
        "c00": {
            "that of E2M1 is 6": f"that of {fmt.name.upper()} is {largest}",
            "MXFP4": name,
            "8 or 4 bits": "8 or 6 bits",
        },
        "c01": {"E2M1": fmt.name.upper()},
        "q2": {
            "divided by that amax.": f"divided by {2**margin} times that amax, which leaves a margin of "
            f"{'a power' if margin == 1 else 'two powers'} of two.",
            "margin = 1.0": f"margin = {2.0**margin}",
            "[1.0, 112.0, 112.0, 112.0, 896.0]": repr([1.0, *(448 / 2**margin / a for a in (4, 4, 4, 0.5))]),
            "margin=0": f"margin={margin}",
        },
        "q3": {
            "_margin = 0": f"_margin = {margin}",
            "the scale 896, with which nothing beyond 0.5 fits": f"the scale {896 / 2**margin:g}, with which nothing "
            f"beyond {0.5 * 2**margin:g} fits",
        },
        "q4": {
            "MXFP4": name,
            "E2M1": fmt.name.upper(),
            "2^(e − 2)": f"2^(e − {top})",
            "The 2 is the exponent of 4": f"The {top} is the exponent of {2**top}",
            "top = 2": f"top = {top}",
            "== 1.0, ": f"== {2.0 ** (2 - top)!r}, ",
            "2.0**-4": f"2.0**-{2 + top}",
        },
        "q5": element
        | {
            "MXFP4": name,
            "E2M1": fmt.name.upper(),
            "beyond 6 becomes 6": f"beyond {largest} becomes {largest}",
            "[0.0, -0.5, 1.0, 2.0, 4.0, 0.0]": repr(kept),
            "so the scale is 1": f"so the scale is {2.0 ** (2 - top):g}",
            "== 31 and": f"== {zeros} and",
            "== 4).all()": f"== {five!r}).all()",
            "_top = 2": f"_top = {top}",
        },
        "q6": element
        | {
            "amax ≤ 6 s": f"amax ≤ {largest} s",
            "largest = 6": f"largest = {largest}",
            "[5.0])) == 1.0": f"[{small!r}])) == 1.0",
            '"5 is at most 6"': f'"{small:g} is at most {largest}"',
            "[7.0])) == 2.0": f"[{large!r}])) == 2.0",
            '"7 is beyond 6 and at most 12"': f'"{large:g} is beyond {largest} and at most {2 * fmt.max:g}"',
        },
    }


def project(draw: Draw) -> Texts:
    """Lab 06: the level of the interval, the correction that goes with it, the numbers of seeds and cells."""
    level, (few, many) = draw.choice([*product((90, 99), (("seven", "eight"), ("nine", "ten")))])
    quantile = (1 + level / 100) / 2
    table = {df: round(student_quantile(quantile, df), 3) for df in range(1, 10)}
    once = student_quantile(quantile, 9)
    wider = np.mean([(student_quantile(1 - (1 - quantile) / m, 9) / once - 1) / np.log2(m) for m in (2, 4, 8)])
    least = {"seven": 7, "nine": 9}[few]
    return {
        "c01": {
            "95 %": f"{level} %",
            "{1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}": repr(table),
        },
        "q1": {"95 %": f"{level} %", "_level = 0.95": f"_level = {level / 100}"},
        "q2": {"0.19": f"{wider:.2f}", "one part in a hundred": "three parts in a hundred"},
        "q5": {
            "five or six": f"{few} or {many}",
            "assert 5 <=": f"assert {least} <=",
            "<= 6,": f"<= {least + 1},",
            "range(5)": f"range({least})",
        },
        "q7": {"95 %": f"{level} %", "five seeds": f"{few} seeds"},
    }


def gpu(draw: Draw) -> Texts:
    """Lab 07: the norm that a step is clipped to, the first scale, the times of the pretended device."""
    norm, start, slow = draw.choice((0.02, 0.03, 0.08)), draw.choice((6, 8, 12)), draw.choice((3, 4, 5))
    return {
        "q1": {"[9.0, 2.0, 2.0, 2.0]": f"[9.0, {slow}.0, {slow}.0, {slow}.0]", "3) == 2.0": f"3) == {slow}.0"},
        "q2": {"0.05": str(norm)},
        "q4": {"2¹⁰": _raised(start), "2.0**10": f"2.0**{start}"},
    }


LABS: dict[str, Callable[[Draw], Texts]] = {
    "lab01": formats,
    "lab02": loss_scaling,
    "lab03": casting,
    "lab04": boost,
    "lab05": scales,
    "lab06": project,
    "lab07": gpu,
}
