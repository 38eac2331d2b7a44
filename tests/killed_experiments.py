"""A process that starts experiments as its children when told to, for tests that kill them.

It imports torch once and then forks, so that a test can afford many parents. Commands on stdin, answers on stdout:
`start FOLDER MARKS CELLS JOBS` -> the child's pid; `wait` -> its exit status (minus the signal that ended it).
"""

import os
import sys
import time
from pathlib import Path


def cell(seed, x, marks):
    """A short run that leaves a mark when it begins; needs no torch, so its worker starts at once."""
    import os

    (Path(marks) / f"{x}-{os.getpid()}-{time.time_ns()}").touch()
    time.sleep(0.01 + 0.03 * (x % 7) / 7)
    return {"y": 10 * x + seed}


def child(folder: str, marks: str, cells: int, jobs: int) -> None:
    """A whole experiment in a session of its own, by which its processes are found."""
    from mpkit.experiment import experiment

    os.setsid()
    grid = {"x": list(range(cells)), "marks": [marks]}
    found = experiment(cell, grid, seeds=1, folder=folder, n_jobs=jobs, progress=False)
    right = [found.values(x, "y") for x in range(cells)] == [{0: 10.0 * x} for x in range(cells)]
    os._exit(0 if right and not found.stopped else 3)


def main() -> None:
    import joblib

    import mpkit.experiment.engine

    assert joblib
    assert mpkit.experiment.engine
    pid = 0
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "start":
            pid = os.fork()
            if pid == 0:
                child(rest[0], rest[1], int(rest[2]), int(rest[3]))
            print(pid, flush=True)
        else:
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
