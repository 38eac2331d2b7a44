"""Ten questions that a curious student has after each of the lessons 10 to 21, as in `test_ten_questions`."""

from collections import Counter

import pytest
from questions import Table, answer, cases

from mpkit.explorers.adasum import PairExplorer as Pair
from mpkit.explorers.adasum import WorkersExplorer as Workers
from mpkit.explorers.boost import CentralizeExplorer as Centralize
from mpkit.explorers.boost import FreezeExplorer as Freeze
from mpkit.explorers.boost import LessBNExplorer as LessBN
from mpkit.explorers.dim_reduce import DimReduceExplorer as Reduce
from mpkit.explorers.evidence import DetectiveExplorer as Detective
from mpkit.explorers.evidence import GridExplorer as Grid
from mpkit.explorers.evidence import NaiveRuleExplorer as NaiveRule
from mpkit.explorers.evidence import RunExplorer as Recorded
from mpkit.explorers.evidence import WhatIfExplorer as WhatIf
from mpkit.explorers.group_scale import GroupScaleExplorer as Group
from mpkit.explorers.optimizers import PLACES
from mpkit.explorers.optimizers import DecayExplorer as Decay
from mpkit.explorers.optimizers import SchedulesExplorer as Schedules
from mpkit.explorers.own_experiment import OwnExperimentExplorer as Own
from mpkit.explorers.recipes import AmaxExplorer as Amax
from mpkit.explorers.recipes import BlockExplorer as Block
from mpkit.explorers.recipes import RecipeExplorer as Recipe

RUN, WEIGHT, NO_SCALE = "growing_activations", "h.0.attn.c_attn.weight", {"init": 0, "window": 1024}
OTHERS = [f"cell_{i}" for i in range(1, 8)]


HIGH, PLAIN = "mxfp4, weight gradient high", "nvfp4, nearest and no Hadamard"


def most_flushed(recipe):
    return max(recipe.shares, key=lambda operand: recipe.shares[operand][1])


def without_float32(experiment):
    with pytest.raises(ValueError, match="choose float32"):
        experiment.set(cell_0=False)


def only(*cells):
    """Settings in which float32 and these cells alone are ticked."""
    return {name: name in cells for name in OTHERS}


TABLE: Table = {
    "10": [
        ("how many steps are frozen at freeze_p 0.7?", Freeze, {}, None, "In 30 % of the 120 steps"),
        ("so at freeze_p 1 all are frozen?", Freeze, {"full_step_fraction": 1.0}, None, "In 0 % of the 120 steps"),
        ("what does that save?", Freeze, {}, None, r"saves 11\.5 % of all"),
        ("is type 0 better?", Freeze, {"freeze_type": 0}, None, r"saves 15\.7 % of all"),
        ("and if every step froze some stages?", Freeze, {"full_step_fraction": 0.0}, None, r"formula says 39\.2 %"),
        (
            "is the last stage ever frozen?",
            Freeze,
            {"groups": 21, "full_step_fraction": 0.0},
            None,
            lambda m: max(m.sequence) * m.stride < len(m.names),
        ),
        ("why does a LeNet lose no BatchNorm?", LessBN, {"network": "LeNet-5"}, None, "has no BatchNorm"),
        ("does a deeper network lose more of them?", LessBN, {"network": "ResNet-50"}, None, " 36 of 53 "),
        ("which one never goes?", LessBN, {}, None, lambda m: m.layers[1] == ("bn1", "kept")),
        ("how much of a gradient is its mean?", Centralize, {"layer": "conv2.weight"}, None, "keeps 94 % of its"),
    ],
    "11": [
        ("how far ahead is it after 40 steps?", Reduce, {}, None, r"40 steps it is 0\.05\d \(gradient descent 0\.56"),
        ("is the full step always taken?", Reduce, {}, None, r"accepts the step size 0\.55"),
        ("are 2 directions enough?", Reduce, {"components": 2}, None, r"after 40 steps it is 1\.82"),
        ("4?", Reduce, {"components": 4}, None, r"after 40 steps it is 0\.09"),
        ("16?", Reduce, {"components": 16}, None, r"after 40 steps it is 0\.02"),
        ("why does it stay at 1.82?", Reduce, {"components": 2, "step": 39}, None, "accepts neither step size"),
        ("what sets it free?", Reduce, {"components": 2, "alpha": 0.2}, None, r"after 40 steps it is 0\.04"),
        (
            "does nothing move without a residual?",
            Reduce,
            {"components": 2, "alpha": 0.0},
            None,
            lambda m: (m.path.weights[-1] == m.path.weights[10]).all(),
        ),
        (
            "where is the gradient at the end?",
            Reduce,
            {"step": 39},
            None,
            "more than 99 % as long as the whole gradient",
        ),
        ("is a shorter second step better?", Reduce, {"rho": 0.3}, None, r"accepts the step size 0\.3\..* 0\.048 \("),
    ],
    "12": [
        ("what if both say the same?", Pair, {"angle": 0, "length_b": 2.0}, None, r"mean 2\.00, AdaSum 2\.00"),
        ("at a right angle?", Pair, {"angle": 90}, None, r"sum 2\.50.* AdaSum 2\.50\."),
        ("the opposite?", Pair, {"angle": 180, "length_b": 2.0}, None, r"AdaSum 0\.00\."),
        ("can it be longer than the sum?", Pair, {"angle": 150}, None, r"sum 1\.03.* AdaSum 1\.33"),
        ("if one worker has nothing to say?", Pair, {"length_b": 0.0}, None, r"mean 1\.00, AdaSum 2\.00"),
        ("can a weight be negative?", Pair, {"length_a": 1.0, "length_b": 3.0, "angle": 0}, None, r"-0\.50 a"),
        ("16 workers that agree?", Workers, {"workers": 16, "agreement": 1.0}, None, r"sum 16\.00.*AdaSum 1\.00"),
        ("16 that share nothing?", Workers, {"workers": 16, "agreement": 0.0}, None, r"AdaSum 3\.9"),
        ("does AdaSum find the better direction?", Workers, {}, None, r"is 0\.88 for AdaSum and 0\.88 for the mean"),
        ("in few dimensions?", Workers, {"workers": 16, "agreement": 0.0, "dimension": 2}, None, r"AdaSum 1\.7"),
    ],
    "13": [
        ("what does group 1 keep with one scale?", Group, {}, None, "rounded to zero: 23 % with one scale"),
        ("with a scale of its own?", Group, {}, None, "rounded to zero: .* and 100 % with four"),
        ("what does that cost?", Group, {}, None, "skipped: 44 with one scale and 64 with four"),
        (
            "does a shallow network need it?",
            Group,
            {"depth": 1},
            None,
            "rounded to zero: 100 % with one scale and 100 %",
        ),
        ("a deeper one?", Group, {"depth": 5}, None, "rounded to zero: 0 % with one scale and 97 %"),
        ("is float16 wide enough?", Group, {"format": "float16"}, None, "rounded to zero: 94 % with one"),
        (
            "for the deeper one too?",
            Group,
            {"format": "float16", "depth": 5},
            None,
            "rounded to zero: 0 % with .* and more than 99 %",
        ),
        ("what if the scales grow slowly?", Group, {"window": 50}, None, "rounded to zero: 0 % with one scale and 0 %"),
        ("if they start high?", Group, {"init_exponent": 30, "step": 20}, None, "skipped: 21 with one scale and 21"),
        ("how far apart do they end?", Group, {}, None, r"per group are 2\^48\.0, .* 2\^19\.5\."),
    ],
    "14": [
        ("is the scale to blame in A?", Detective, {}, None, "scale_too_high"),
        ("which scale would do?", Detective, {}, None, r"that works is 2\^20"),
        ("does it?", Detective, {"exponent": 20}, None, "healthy"),
        ("does a scale of 1 heal B?", Detective, {"name": "B", "exponent": 0}, None, "forward_overflow.*No scale"),
        ("bfloat16?", Detective, {"name": "B", "dtype": "bfloat16"}, None, "healthy"),
        ("which operation is it in D?", Detective, {"name": "D"}, None, "entropy, forward pass, operation log"),
        ("does bfloat16 heal D?", Detective, {"name": "D", "dtype": "bfloat16"}, None, "model_non_finite"),
        ("where is the NaN of C?", Detective, {"name": "C"}, None, r"batch\[0\]"),
        ("when does the recorded run first skip?", Recorded, {"run": RUN, "step": 116}, None, "so far: 1"),
        ("where does its scale end?", Recorded, {"run": RUN, "step": 399}, None, "loss not finite, scale 0"),
    ],
    "15": [
        ("does a replay give the run itself?", WhatIf, {}, None, r"3 of 400 steps are skipped \(recorded: 3\)"),
        ("window 1?", WhatIf, {"window": 1}, None, "197 of 400"),
        ("never grow?", WhatIf, {"window": 1024}, None, r" 0 of 400.* 4\.9 bits"),
        ("larger jumps?", WhatIf, {"factor": 8.0}, None, r" 5 of 400.* 3\.4 bits"),
        ("start at 2^32?", WhatIf, {"init": 32}, None, "19 of 400"),
        ("no loss scale at all?", WhatIf, NO_SCALE, None, r"3\.71 % of the non-zero gradient values"),
        ("a long window with outliers?", WhatIf, {"run": "rare_outliers", "window": 400}, None, "collapses.*37 bits"),
        ("a short one?", WhatIf, {"run": "rare_outliers", "window": 10}, None, lambda m: not m.row["collapsed"]),
        ("what does one spike cost?", WhatIf, {}, lambda m: m.draw({100: 10.0}), " 4 of 400"),
        ("which pair is best from 2^16?", Grid, {"init": 16}, None, "5 of 35 pairs are the .* window 500, with 0 %"),
    ],
    "16": [
        ("where does the loss rule go from 1?", NaiveRule, {}, None, r"at step 158 it falls below 2\^-24"),
        ("from 2^16?", NaiveRule, {"exponent": 16}, None, "at step 8 the gradients overflow"),
        ("from 2^-10, is it sooner?", NaiveRule, {"exponent": -10}, None, "at step 93 it falls"),
        ("can it rest?", NaiveRule, {"exponent": 2, "loss": 3.0, "decay": 0.0}, None, "nothing has ended it"),
        ("also while the loss falls?", NaiveRule, {"exponent": 2, "loss": 3.0}, None, "at step 192 the gradients o"),
        ("does a small loss help?", NaiveRule, {"loss": 0.6}, None, "at step 161 the gradients overflow"),
        ("does a fast fall of the loss help?", NaiveRule, {"exponent": 16, "decay": 0.05}, None, "at step 8 the"),
        ("does the dynamic rule find 2^17 from 1?", NaiveRule, {}, None, "ends at 131072"),
        ("from above?", NaiveRule, {"exponent": 20}, None, "ends at 131072"),
        ("in 1000 steps from 2^-10?", NaiveRule, {"exponent": -10}, None, "ends at 512"),
    ],
    "17": [
        ("how often is a gradient clipped?", Amax, {}, None, "in 27 of 300 steps"),
        ("with the newest amax alone?", Amax, {"most_recent": True}, None, "in 151 of 300"),
        ("is that a history of 1?", Amax, {"history_len": 1}, None, "in 151 of 300"),
        ("with a long history?", Amax, {"history_len": 128}, None, r"in 7 of 300.* 5\.4 bits of the range"),
        ("what does a margin do?", Amax, {"margin": 1}, None, r"in 10 of 300.* 3\.7 bits of the range"),
        ("a large one?", Amax, {"margin": 4}, None, r"in 5 of 300.* 6\.6 bits of the range"),
        ("current scaling?", Amax, {"current": True}, None, r"in 0 of 300 steps; 0\.0 bits"),
        ("are weights clipped too?", Amax, {"tensor": WEIGHT}, None, r"in 175 of 300.* at worst by a factor of 1\.04"),
        ("does a margin help them?", Amax, {"tensor": WEIGHT, "margin": 1}, None, "in 0 of 300"),
        ("what does a spike do to a long history?", Amax, {"spike": 10, "history_len": 128}, None, r" 6\.1 bits"),
    ],
    "18": [
        ("how good are 4 bits?", Block, {}, None, r"18\.8 dB"),
        ("what does an outlier do?", Block, {"outlier": 6}, None, r" 6\.0 dB"),
        ("is a larger one worse?", Block, {"outlier": 10}, None, r" 6\.0 dB"),
        ("do smaller blocks help?", Block, {"outlier": 10, "size": 16}, None, r" 8\.9 dB"),
        ("one scale for all 128?", Block, {"outlier": 10, "size": 128}, None, r" 0\.0 dB.* 99\.2 % of the values"),
        ("how many blocks does floor clip?", Block, {}, None, r"29\.6 % of the blocks"),
        ("and rounding up?", Block, {"rule": "rceil"}, None, r"18\.8 dB.* 0 % of the blocks"),
        ("is ceil the same?", Block, {"rule": "ceil"}, None, r"16\.8 dB"),
        ("do 8 bits bear the outlier?", Block, {"outlier": 10, "fmt": "MXFP8"}, None, r"30\.8 dB"),
        ("what does NVFP4 gain?", Block, {"fmt": "NVFP4", "size": 16}, None, r"20\.5 dB"),
    ],
    "19": [
        ("is 8 bits worse than float32?", Recipe, {"recipe": "mxfp8"}, None, r"training by -0\.029 to \+0\.039"),
        ("with one scale a tensor?", Recipe, {"recipe": "te_current"}, None, r"-0\.024 to \+0\.017"),
        ("4 bits?", Recipe, {}, None, r"training by -0\.004 to \+0\.018"),
        ("is its weight gradient to blame?", Recipe, {"recipe": HIGH}, None, r"-0\.020 to \+0\.027"),
        ("is NVFP4 better?", Recipe, {"recipe": "nvfp4"}, None, r"-0\.007 to \+0\.005"),
        ("without its two remedies?", Recipe, {"recipe": PLAIN}, None, r"\+0\.004 to \+0\.039"),
        ("can that be chance?", Recipe, {"recipe": PLAIN}, None, r"themselves differ by 0\.028"),
        ("was it worse earlier?", Recipe, {"recipe": PLAIN, "step": 50}, None, r"in step 50 by -0\.069 to \+0\.055"),
        ("which operand of MXFP4 loses most?", Recipe, {}, None, lambda m: most_flushed(m) == "wgrad.grad"),
        ("which of NVFP4?", Recipe, {"recipe": "nvfp4"}, None, lambda m: most_flushed(m) == "fprop.weight"),
    ],
    "20": [
        ("is float16 worse?", Own, {}, None, r"fp16 O2 89\.3, not distinguishable"),
        ("how few bits are too few?", Own, {}, None, r"e5m2 O2, scaled 88\.5, not .*e5m1 O2, scaled 83\.5, worse"),
        ("what would one seed have said?", Own, {"recorded_seeds": 1}, None, r"1 seed\. .*fp16 O2 90\.\d, one seed"),
        ("three?", Own, {"recorded_seeds": 3}, None, r"3 seeds\. .*e5m1 O2, scaled \S+, not distinguishable"),
        ("may I drop comparisons to find one?", Own, only("cell_6"), None, r"freezing 87\.4, not distinguishable"),
        ("do runs of a seed start alike?", Own, {}, None, r"step 1 from seed 0: float32 2\.309, \D+16 O2, \D+2\.309"),
        ("when does e5m1 part from it?", Own, {"other": "e5m1 O2, scaled", "step": 30}, None, r"1\.765, .* 1\.801"),
        ("is another seed other?", Own, {"seed": 3}, None, lambda m: m.losses[0][0] != Own().losses[0][0]),
        ("may float32 be left out?", Own, {}, without_float32, lambda m: "choose float32" in m.message),
        ("what will Run do?", Own, {"network": "LeNet-5", "seeds": 3}, None, "missing runs of LeNet-5 from 3 seeds"),
    ],
    "21": [
        ("what is exponential decay after 60 steps?", Schedules, {}, None, r"exponential 0\.05,"),
        ("natural exp after 10?", Schedules, {"step": 10}, None, r"natural exp 0\.000674"),
        ("is a rate above 1 refused?", Schedules, {"decay_rate": 1.5}, None, r"exponential 0\.15,"),
        ("which of them wait?", Schedules, {"is_stair": True, "step": 59}, None, r"inverse 0\.1, cosine 6\.85e-05"),
        ("where does a warm-up stand half-way?", Schedules, {"warmup_steps": 40, "step": 20}, None, r"inverse 0\.05,"),
        ("when does the decay begin then?", Schedules, {"warmup_steps": 40, "step": 40}, None, r"cosine 0\.1,"),
        ("where is cosine half-way?", Schedules, {"step": 30}, None, r"cosine 0\.05,"),
        ("is polynomial with power 1 a line?", Schedules, {"power": 1.0, "step": 30}, None, r"polynomial 0\.05\."),
        ("what comes after the last step?", Schedules, {"step": 199}, None, "cosine 0, polynomial 0"),
        ("does inverse ever reach 0?", Schedules, {"step": 199}, None, r"inverse 0\.0376"),
        ("are biases decayed?", Decay, {"parameter": "fc.bias"}, None, "groups: weight decay reaches it"),
        ("is the scale of a norm?", Decay, {"parameter": "bn.gamma"}, None, "groups: weight decay does not reach it"),
        ("also if it is in a group?", Decay, {"parameter": "bn.gamma", "place": PLACES[1]}, None, "group: .* reaches"),
        (
            "how do I spare a bias?",
            Decay,
            {"parameter": "fc.bias", "place": PLACES[2]},
            None,
            r"not reach.* 1\.00 in S",
        ),
        (
            "what if no group names it?",
            Decay,
            {"place": PLACES[3]},
            None,
            r"not trained.* 1\.00 in SGD, 1\.00 in Adam,",
        ),
        ("do small gradients slow the decay?", Decay, {"size": 1e-3}, None, r"0\.02 in Adam, 0\.88 in AdamWeightDecay"),
        ("and large ones?", Decay, {"size": 10.0}, None, r" 1\.00 in Adam, 0\.88 in AdamWeightDecay"),
        ("does twice the weight_decay take twice as much?", Decay, {"weight_decay": 0.2}, None, r" 0\.67 in SGD"),
        ("does a larger rate decay faster?", Decay, {"learning_rate": 0.03}, None, r" 0\.5\d in SGD"),
        ("is there decay at a rate of 0?", Decay, {"learning_rate": 0.0}, None, r" 1\.00 in SGD, 1\.00 in Adam, 1\.00"),
    ],
}

CASES, NAMES = cases(TABLE)


def test_there_are_ten_questions_for_every_lesson():
    assert Counter(name[:2] for name in NAMES) == dict.fromkeys(TABLE, 10) | {"21": 20}  # on schedules, and on decay
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize(("view", "settings", "done", "reading"), CASES, ids=NAMES)
def test_a_question_is_answered_by_playing(view, settings, done, reading):
    answer(view, settings, done, reading)
