"""Questions of lesson 09."""

from mpkit.boost import AutoBoost, LessBN
from mpkit.check import Question
from mpkit.networks import resnet34


def _active() -> list[str]:
    return sorted(AutoBoost("O2").active)


def _removed() -> int:
    return len(LessBN(resnet34(width=4)).report.removed)


def _reached() -> bool:
    from mpkit.explorers.boost import measured

    return next(row["ratio"] for row in measured()["speed"] if row["contender"] == "O1") >= 1.2


QUESTIONS = {
    "active": Question(
        "Which algorithms run at boost_level O2 in one process? A sorted list of names.",
        _active,
        "adasum has nothing to merge in one process, so O2 does what O1 does.",
        "Print AutoBoost('O2') and read the line of what is active.",
        ((["adasum", "grad_freeze", "less_bn"], "adasum is asked for; look at what is listed as inactive, and why."),),
    ),
    "removed": Question(
        "A ResNet-34 has 36 BatchNorms: stem, 16 blocks of two, and three shortcuts. How many does LessBN remove?",
        _removed,
        "One inner BatchNorm of each of the 16 blocks, and the three of the shortcuts.",
        "In every block the BatchNorm next to the addition stays. Which ones go?",
        ((16, "And the BatchNorms of the three projection shortcuts?"), (32, "One BatchNorm of each block stays.")),
    ),
    "mode": Question(
        "In which mode are the algorithm switches of the section `boost` read?",
        lambda: "manual",
        "In auto they are ignored, and print(boost) says so.",
        "Set a switch in the view above and try each mode.",
        (("auto", "In auto the level alone decides; see what is listed as inactive."),),
    ),
    "promise": Question(
        "Did O1 reach the promised 20 % more speed in the stored CPU measurement: True or False?",
        _reached,
        "Read from the benchmark file: {truth}. How far it goes depends on how much time BatchNorm takes.",
        "Look at the row O1 in the table of speed-ups.",
    ),
}
