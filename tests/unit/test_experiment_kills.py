"""An experiment or one of its workers is killed at any moment: at most the running cells are lost.

`MPKIT_KILLS=10` kills each of the two ten times; every kill costs a start of joblib's workers.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import ROOT

pytest.importorskip("joblib")
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes by /proc, as on Linux")

JOBS = 2
KILLS = int(os.environ.get("MPKIT_KILLS", "2"))
PATIENCE = 120.0  # seconds until a wait counts as failed; nothing here is expected to take so long


def alive(session):
    """pids of the processes of a session that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(stat.parent.name))
    return found


def until(condition):
    end = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.03)
    return value


class Nursery:
    """Starts experiments in children that are cheap to lose."""

    cells = 150

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "killed_experiments.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        )

    def move(self, path):
        """Begin anew in an empty folder."""
        self.folder, self.marks = path / "cells", path / "marks"
        self.marks.mkdir()

    def ask(self, words):
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, jobs=JOBS):
        return self.ask(f"start {self.folder} {self.marks} {self.cells} {jobs}")

    def done(self):
        return {p.name: p.read_bytes() for p in self.folder.glob("*.npz")} if self.folder.exists() else {}

    def count(self):
        return sum(name.endswith(".npz") for name in os.listdir(self.folder)) if self.folder.exists() else 0

    def begun(self):
        return [p.name.split("-") for p in self.marks.iterdir()]


@pytest.fixture(scope="module")
def process():
    made = Nursery()
    yield made
    made.process.stdin.close()
    made.process.wait()
    made.process.stdout.close()


@pytest.fixture
def nursery(process, tmp_path):
    process.move(tmp_path)
    return process


@pytest.mark.slow
def test_a_killed_experiment_loses_the_running_cells_and_leaves_no_process_behind(nursery):
    moments = random.Random(0)
    kept, running = {}, 0
    for kill in range(KILLS):
        jobs = JOBS - kill % 2  # in turn with workers, which must end too, and alone, where starting costs nothing
        running += jobs
        pid = nursery.start(jobs)
        enough = len(kept) + moments.randrange(0, 12)
        until(lambda: nursery.count() >= enough)  # noqa: B023
        time.sleep(moments.uniform(0, 0.03))
        os.kill(pid, signal.SIGKILL)
        assert nursery.ask("wait") == -signal.SIGKILL
        until(lambda: not alive(pid))  # noqa: B023
        now = nursery.done()
        assert kept.items() <= now.items()  # what was finished stays as it was
        assert len(nursery.begun()) <= len(now) + running  # and is not run again
        kept = now
    nursery.start(1)
    assert nursery.ask("wait") == 0
    assert len(nursery.done()) == nursery.cells
    assert len(nursery.begun()) <= nursery.cells + running


@pytest.mark.slow
def test_a_killed_worker_costs_the_running_cells_and_the_experiment_goes_on(nursery):
    moments = random.Random(1)
    pid = nursery.start()
    for kill in range(KILLS):
        enough = nursery.cells * kill // (KILLS + 1) + moments.randrange(0, 10)
        until(lambda: nursery.count() >= enough)  # noqa: B023
        time.sleep(moments.uniform(0, 0.03))
        workers = until(lambda: {int(p) for _, p, _ in nursery.begun()} & set(alive(pid)))
        os.kill(moments.choice(sorted(workers)), signal.SIGKILL)
    assert nursery.ask("wait") == 0
    until(lambda: not alive(pid))
    assert len(nursery.done()) == nursery.cells
    assert len(nursery.begun()) <= nursery.cells + JOBS * KILLS
