"""The parts of the policies where their answers turn: words for decisions, and presets of a tensor's scale."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpkit.formats import E4M3FN
from mpkit.policies import ScalePolicy
from mpkit.policies.history import explain
from mpkit.policies.rule import FLOAT32_MAX
from mpkit.policies.tensor_scale import TENSOR_SCALE_PRESETS, tensor_scale_preset
from mpkit.replay import replay_tensor_scales

EXACT, POWER = np.float32(448) / np.float32(3), 2.0 ** math.floor(math.log2(448 / 3))
FLOORED = np.float32(448 / 1e-12)  # torchao divides by at least 1e-12
FIRST = {  # preset -> the scale of a first step whose amax is 3, and is 0
    "te_delayed": (1.0, 1.0),  # nothing has been seen yet
    "te_delayed_unfused": (1.0, 1.0),
    "te_current": (EXACT, 1.0),
    "torchao_tensorwise": (EXACT, FLOORED),
    "torchao_rowwise": (POWER, 2.0 ** math.floor(math.log2(448 / 1e-12))),
    "te_blockwise": (POWER, 1.0),
    "te_blockwise_fp32": (EXACT, 1.0),
    "torchao_blockwise": (EXACT, FLOORED),
}


@pytest.mark.parametrize("name", TENSOR_SCALE_PRESETS)
def test_a_current_scale_is_that_of_the_tensor_itself_and_a_delayed_one_of_those_before(name: str) -> None:
    """TransformerEngine keeps 1 for a tensor of zeros; power-of-two scales are rounded down, so that nothing clips."""
    policy = tensor_scale_preset(name, E4M3FN)
    for amax, scale in zip((3.0, 0.0), FIRST[name]):
        replayed = replay_tensor_scales(np.array([amax, amax, amax], dtype=np.float32), [policy], scales=True)
        assert replayed.scales is not None
        assert replayed.scales[0, 0] == np.float32(scale)
        later = EXACT if name.startswith("te_delayed") and amax else scale
        assert replayed.scales[0, 2] == pytest.approx(later, rel=2.0**-23)  # unfused the quotient is formed otherwise
    assert policy.unfused == name.endswith("unfused")
    assert policy.double == name.startswith("torchao")


BOUNDED = ScalePolicy(min_scale=2.0, max_scale=64.0)
FREE, NARROW = ScalePolicy(), ScalePolicy(scale_bits=16)


@pytest.mark.parametrize(
    ("policy", "before", "after", "finite", "word"),
    [
        (BOUNDED, 8.0, math.nan, False, "stopped"),
        (BOUNDED, 64.0, 64.0, True, "at cap"),
        (BOUNDED, 63.0, 63.0, True, "held"),
        (FREE, FLOAT32_MAX / 2, FLOAT32_MAX / 2, True, "held"),  # twice that is still a float32
        (FREE, 2.0**127, 2.0**127, True, "at cap"),
        (NARROW, 32752.0, 32752.0, True, "held"),
        (NARROW, 32768.0, 32768.0, True, "at cap"),
        (BOUNDED, 2.0, 2.0, False, "at floor"),
        (BOUNDED, 2.5, 2.5, False, "tolerated"),
        (BOUNDED, math.inf, math.inf, False, "at floor"),
        (BOUNDED, 8.0, 16.0, True, "grew"),
        (BOUNDED, 1.0, 2.0, True, "grew"),
        (BOUNDED, 4.0, 8.0, False, "grew"),  # decided a step before, as a delayed policy does
        (BOUNDED, 1.0, 2.0, False, "lifted"),
        (BOUNDED, 2.0, 3.0, False, "lifted"),
        (BOUNDED, 128.0, 64.0, True, "lowered"),
        (BOUNDED, 128.0, 32.0, True, "backed off"),
        (BOUNDED, 128.0, 64.0, False, "backed off"),
        (BOUNDED, 8.0, 4.0, False, "backed off"),
    ],
)
def test_every_decision_has_its_word(policy: ScalePolicy, before: float, after: float, finite: bool, word: str) -> None:
    assert explain(policy, [before], [after], [finite]).tolist() == [word]
