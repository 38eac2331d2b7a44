"""What `make tools` presses and counts, without its kernels."""

from __future__ import annotations

import ast
import random
from typing import Any

import soak


def test_every_press_is_answered_and_half_a_run_is_torn() -> None:
    space: dict[str, Any] = {}
    exec(soak.SET_UP, space)
    rng, view = random.Random(0), space["view"]
    for what in ({"press": "Train"}, *(soak.presses(rng) for _ in range(30)), {"press": "Reset"}, {"press": "Train"}):
        answer = ast.literal_eval(repr(space["press"](what)))  # as it comes out of a kernel
        assert not soak.torn(answer), answer
    view.wait(120)
    answer = space["press"]({"press": "Stop"})
    losses, scales, skipped = answer["run"]
    assert losses > 0
    assert not soak.torn(answer)
    assert soak.torn(answer | {"run": [losses, scales - 1, skipped]})
    assert soak.torn(answer | {"run": [losses, scales, losses]})  # a skip beyond the last step
    assert soak.torn(answer | {"sentence": "Set to factor 99, window 1, floor 2^0"})
