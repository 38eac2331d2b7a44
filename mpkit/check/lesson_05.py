"""Questions of lesson 05, the dynamic loss scale."""

import torch

from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task
from mpkit.explorers.scaling import DynamicsExplorer
from mpkit.policies import preset, run
from mpkit.scalers import DynamicLossScaler


def _after(finite: list[bool]) -> float:
    policy = preset("mindspore_scaler", scale_value=1024.0, scale_factor=2, scale_window=3)
    return float(run(policy, finite).scale[-1])


def _halvings() -> int:
    policy = preset("mindspore_scaler", scale_value=2.0**24, scale_factor=2, scale_window=2000)
    return int((~(run(policy, [False] * 40).scale > 2.0**10)).argmax()) + 1


def _failed_probes() -> int:
    scaler, skipped = DynamicLossScaler(2.0**16, 2, 4), 0
    for _ in range(100):
        finite = float(scaler.scale_value) <= 2.0**16
        skipped += not finite
        scaler.adjust(torch.tensor(finite))
    return skipped


def _at_the_floor() -> int:
    return run(preset("mpkit", init_scale=2.0**10, min_scale=2.0**4), [False] * 20).raised_at + 1


QUESTIONS = {
    "sequence": Question(
        "A scaler starts at 1024, with factor 2 and window 3. Two finite steps, an overflow and two finite steps "
        "follow. What is its scale then?",
        lambda: _after([True, True, False, True, True]),
        "{truth:g}: the overflow halves at once and starts the count again, and two finite steps are not yet three.",
        "Go through it step by step: what does an overflow do to the scale, and what to the count of finite steps?",
        (
            (1024, "You counted the finite steps across the overflow. The count starts again there."),
            (2048, "That would need three finite steps in a row, and no overflow."),
        ),
    ),
    "descent": Question(
        "The scale starts at 2**24, with factor 2. The ceiling is just above 2**10. How many steps are skipped first?",
        _halvings,
        "{truth}: each of them halves the scale once. A start that is too high costs a few steps, and only once.",
        "Each skipped step halves the scale once. How many halvings from 2**24 to 2**10?",
    ),
    "window": Question(
        "The ceiling stays just above 2^16. A scale starts at 2^16, with factor 2 and window 4. How many of the first "
        "100 steps are skipped?",
        _failed_probes,
        "{truth}: after every four finite steps comes a probe, and it fails. A window of 9 would skip only 10 steps.",
        "Go through the first ten steps: when does the scale double, and what happens in the step after it?",
        (
            (25, "The step that is skipped is one more: it comes after four finite ones."),
            (0, "After four finite steps the scale doubles, and 2^17 is above the ceiling."),
            (1, "The scale probes again after every four finite steps."),
        ),
    ),
    "floor": Question(
        "A scale starts at 2^10, with factor 2, and its floor is 2^4. Then the model breaks, and every step overflows. "
        "Which overflow, counted from 1, is the first that happens at the floor?",
        _at_the_floor,
        "Number {truth}: six overflows bring the scale down, and the next one finds it at the floor. It should be "
        "reported.",
        "How many halvings lead from 2^10 to 2^4, and which overflow comes after them?",
        ((6, "The sixth overflow still lowers the scale: from 2^5 to 2^4."),),
    ),
}


def _search() -> str:
    model = DynamicsExplorer(run="gpt_sums", init_exponent=24, scale_window=50, step=110)
    first = int(model.finite.argmax())
    return "a" if first == 1 else "c" if model.scale[:110].min() == 1 else "b"


def _steps() -> list[tuple[tuple[float, int, bool], tuple[float, int]]]:
    scaler = DynamicLossScaler(8.0, 2, 3)
    found = []
    for finite in (True, True, True, True, False, True, True, False, False, False, False, False, True, True, True):
        before = (float(scaler.scale_value), int(scaler.counter))
        scaler.adjust(torch.tensor(finite))
        found.append(((*before, finite), (float(scaler.scale_value), int(scaler.counter))))
    return found


PREDICTIONS = {
    "search": Prediction(
        "The scale starts at 2^24, far above the ceiling. What happens in the first 110 steps?",
        (
            (
                "The first overflow brings the scale to the ceiling at once.",
                "The scaler does not know how far it is too high: it is only told that something overflowed.",
            ),
            (
                "A few steps in a row are skipped, one for each power of two. Later, one step is skipped now and then.",
                "Every overflow halves the scale once. Later a batch with larger gradients has a lower ceiling.",
            ),
            (
                "The scale falls to 1 and climbs from there.",
                "It falls only as long as steps overflow, and that ends as soon as it is below the ceiling.",
            ),
        ),
        _search,
    ),
}

TASK = Task(
    "the function gets the scale, the counter of finite steps, and whether this step was finite. It returns the next "
    "scale and the next counter. The factor is 2, the window is 3, and the floor is 1.",
    _steps,
    "This is the whole rule of a dynamic loss scale: three settings, and one bit for each step.",
    "Finite: count, and when the window is full double the scale and start the count again. Not finite: halve, not "
    "below 1, and start the count again.",
)
