"""An experiment or one of its workers is killed at any moment: at most the running cells are lost.

`MPKIT_KILLS=10` kills each of the two ten times; every kill costs a start of joblib's workers.
"""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, until

found = Path("/proc/self/stat").exists()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not found, reason="finds processes by /proc, as on Linux")]

JOBS, CELLS = 2, 100
KILLS = int(os.environ.get("MPKIT_KILLS", "1"))
PATIENCE = 120.0  # seconds until a wait counts as failed; nothing here is expected to take so long
STUDY = """
import os, sys, time
from pathlib import Path

def cell(seed, x, marks):
    (Path(marks) / f"{x}-{os.getpid()}-{time.time_ns()}").touch()
    time.sleep(0.01 + 0.03 * (x % 7) / 7)
    return {"y": 10 * x + seed}

if __name__ == "__main__":
    from mpkit.experiment import experiment

    folder, marks, cells, jobs = sys.argv[1:]
    grid = {"x": list(range(int(cells))), "marks": [marks]}
    found = experiment(cell, grid, seeds=1, folder=folder, n_jobs=int(jobs), progress=False)
    assert found.frame["y"].tolist() == [10.0 * x for x in range(int(cells))]
"""


class Study:
    """An experiment in a process and a session of its own, by which its workers are found."""

    def __init__(self, path):
        self.folder, self.marks, self.script = path / "cells", path / "marks", path / "study.py"
        self.marks.mkdir()
        self.folder.mkdir()
        self.script.write_text(STUDY)

    def start(self, jobs):
        words = [sys.executable, self.script, self.folder, self.marks, str(CELLS), str(jobs)]
        self.process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True)

    def alive(self):
        """pids of the processes of the session that still run."""
        stats = [[*p.read_text().rpartition(")")[2].split(), p.parent.name] for p in Path("/proc").glob("[0-9]*/stat")]
        return {int(f[-1]) for f in stats if int(f[3]) == self.process.pid and f[0] not in "ZX"}

    def done(self):
        return {p.name: p.read_bytes() for p in self.folder.glob("*.npz")}

    def begun(self):
        return [p.name.split("-") for p in self.marks.iterdir()]


def test_killed_workers_and_a_killed_experiment_cost_the_running_cells_and_leave_no_process_behind(tmp_path):
    """When a worker is killed the experiment goes on; the next one finds what a killed experiment had finished."""
    moments, study, kept = random.Random(0), Study(tmp_path), {}

    def killed(pids):
        nonlocal kept
        enough = len(kept) + moments.randrange(1, 12)
        until(lambda: len(study.done()) >= enough)
        os.kill(moments.choice(sorted(until(pids))), signal.SIGKILL)
        before, kept = kept, study.done()
        assert before.items() <= kept.items()  # what was finished stays as it was

    for _ in range(KILLS):
        study.start(JOBS)
        killed(lambda: {int(pid) for _, pid, _ in study.begun()} & study.alive())
        killed(lambda: {study.process.pid})
        assert study.process.wait() == -signal.SIGKILL
        until(lambda: not study.alive())
    study.start(1)
    assert study.process.wait(PATIENCE) == 0
    assert len(study.done()) == CELLS
    assert len(study.begun()) <= CELLS + 2 * JOBS * KILLS  # what was finished is not run again
