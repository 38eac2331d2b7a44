"""Questions of lesson 08, the scaler zoo."""

import math

from mpkit.check import Question
from mpkit.check.prediction import Prediction
from mpkit.check.task import Task
from mpkit.explorers.zoo import ZooExplorer
from mpkit.policies import naive_loss_ratio, preset, run


def _deepspeed_first_growth() -> int:
    return int((run(preset("deepspeed", scale_window=50), [True] * 100).scale > 2.0**16).argmax()) + 1


def _torch_to_zero() -> int:
    return int((run(preset("torch", init_scale=2.0**10), [False] * 200).scale == 0).argmax()) + 1


def _torch_back_from_zero() -> float:
    return float(run(preset("torch", growth_interval=1), [False] * 200 + [True] * 200).scale[-1])


def _naive_steps() -> int:
    scale, steps = 1 / 16, 0
    while scale > 2.0**-24:
        scale, steps = naive_loss_ratio(scale, 2.3), steps + 1
    return steps


def _who_stays_below() -> list[str]:
    model = ZooExplorer(situation="free", interval=10)
    return sorted(name for name, final in zip(model.names, model.done.final) if final < 2.0**36)


QUESTIONS = {
    "deepspeed": Question(
        "With scale_window=50, after how many finite steps does DeepSpeed's scale grow for the first time?",
        _deepspeed_first_growth,
        "{truth}: the first finite step after an overflow does not count, and the start counts as an overflow.",
        "It is off by one. Run `preset('deepspeed', scale_window=50)` over finite steps and look for the first change.",
        ((50, "That is torch's answer. DeepSpeed needs one step more after the start and after an overflow."),),
    ),
    "zero": Question(
        "torch's GradScaler starts at 1024 and every step overflows. After how many steps is the scale exactly 0?",
        _torch_to_zero,
        "{truth}. There is no floor, and no message.",
        "The smallest positive float32 is 2**-149. How many halvings from 2**10 to below it?",
        ((159, "At that step it is 2**-149, the smallest float32 above 0: one more."),),
    ),
    "back": Question(
        "The scale of torch's GradScaler has fallen to exactly 0, and growth_interval is 1. Then 200 finite steps "
        "follow. What is the scale after them?",
        _torch_back_from_zero,
        "Two times 0 is 0: it never comes back.",
        "What is two times 0?",
        ((lambda v: isinstance(v, int | float) and v > 0, "Every finite step doubles the scale. What is 0 doubled?"),),
    ),
    "below": Question(
        "Choose 'nothing ever overflows' in the view of all rules, and a growth interval of 10, and open its table. "
        "Most rules climb from 2^16 to 2^36 in the 200 steps. Which ones end below 2^36? A list of their names.",
        _who_stays_below,
        "{truth}. Three of them have a cap of 2^24. The other two count one step more: DeepSpeed once, flax each time.",
        "`ZooExplorer(situation='free', interval=10).table()` says where each rule ends.",
        (
            (["apex", "mpkit", "mxnet"], "These three have a cap. Two others start to grow later than the rest."),
            (lambda v: isinstance(v, list | tuple) and len(v) < 5, "There are more: caps are not the only reason."),
        ),
    ),
    "naive": Question(
        "The naive rule starts at 1/16 with a loss of 2.3. After how many steps is its scale below 2^-24, the smallest "
        "positive float16?",
        _naive_steps,
        "{truth} steps, each times 0.9: a gradient of 1 times this scale is smaller than every positive float16.",
        "Each step multiplies by 0.9 while the loss is above the scale. When is 0.9**n / 16 below 2**-24?",
        ((lambda v: isinstance(v, int | float) and v == math.inf, "It does get there: 0.9**n goes to 0."),),
    ),
}


def _where_it_goes() -> str:
    scale = 1.0
    for _ in range(300):
        scale = naive_loss_ratio(scale, 2.3)
    return "c" if scale < 2.0**-24 else "b" if scale > 2.0**18 else "a"


def _who_skips_most() -> str:
    skips = dict(zip((m := ZooExplorer(situation="drop", interval=20)).names, m.done.skipped.tolist()))
    most = max(skips, key=skips.__getitem__)
    others = [count for name, count in skips.items() if name != most]
    if max(others) - min(others) <= 3:
        return "b"
    return "c" if most == "mxnet" else "a"


def _patient() -> list[tuple[tuple[float, int, bool], tuple[float, int]]]:
    policy = preset("megatron", initial_scale=1024.0, min_scale=1.0, growth_interval=10**6, hysteresis=2)
    overflows, found, credit = [True, True, False, True, False, False, True], [], 2
    done = run(policy, [not o for o in overflows])
    before = 1024.0
    for overflow, after in zip(overflows, done.scale.tolist()):
        left = max(credit - 1, 0) if overflow else credit
        found.append(((before, credit, overflow), (after, left)))
        before, credit = after, left
    return found


PREDICTIONS = {
    "drop": Prediction(
        "The ceiling falls from 2^20 to 2^3 for sixty steps, then returns. Who skips the most steps?",
        (
            (
                "DeepSpeed, Megatron and Colossal-AI, because they wait for a second overflow each time.",
                "They wait once. Their patience comes back only when the scale grows, not after every overflow.",
            ),
            (
                "All rules skip nearly the same number (three steps apart at most), except one.",
                "Nearly all halve the scale until it fits. The exception divides by 1.25, and waits for two overflows.",
            ),
            (
                "MXNet by far, because it decides too late.",
                "It decides one step late, which costs one step, not many.",
            ),
        ),
        _who_skips_most,
    ),
    "naive": Prediction(
        "The scale starts at 1, and the loss stays at 2.3. Where does the naive rule take the scale?",
        (
            (
                "It comes to rest near the loss.",
                "1 is below the loss, so the rule makes the scale smaller: it moves away from the loss.",
            ),
            (
                "It grows until gradients overflow.",
                "It would grow above twice the loss. But 1 is below the loss, so it shrinks.",
            ),
            (
                "It falls towards 0.",
                "1 is below the loss, so the scale shrinks. Then it lies even further below the loss.",
            ),
        ),
        _where_it_goes,
    ),
}

TASK = Task(
    "write Megatron's patience. The function gets the scale, the credit (2 at the start) and whether the step "
    "overflowed. It returns the next scale and the next credit. An overflow takes one credit, but never below 0. If no "
    "credit is left then, the overflow also halves the scale. A finite step changes nothing. (Growth, which restores "
    "the credit, is left out.)",
    _patient,
    "The first overflow passes. Every later one halves the scale, until a growth restores the credit.",
    "Take the credit off first, not below 0; then look whether any is left.",
)
