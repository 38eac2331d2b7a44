"""A class on one server: many kernels, each with a view of a training, pressed at random for minutes.

    python tests/tools/soak.py --kernels 40 --minutes 10        # on the machine that serves a course

Each press is answered with the sentence, the settings and the run on screen. An answer is torn if its run is not one
moment of a training, or its sentence is not that of its settings. Printed at the end: answers, torn ones, errors, the
time of an answer, and the memory of all kernels together (proportional, so that what they share counts once).
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager, start_new_kernel
from jupyter_client.provisioning import LocalProvisioner

ROOT = Path(__file__).resolve().parents[2]
SET_UP = """
from mpkit.lessons.start import live
from mpkit.view.page import Page
page = Page(live(steps=60))
view = page.view
def press(what):
    page.ask(what)
    with view.lock:
        run = view.params["run"]
        params = {name: view.params[name] for name in ("factor", "window", "floor")}
        return {"params": params, "sentence": view.sentence,
                "busy": view.busy, "run": run and [len(run.losses), len(run.scales), max(run.skipped, default=-1)]}
"""


def presses(rng: random.Random) -> dict[str, object]:
    """What a reader does next."""
    return rng.choice(
        [
            *({"press": label} for label in ("Train", "Stop", "Scale × 2^10", "Scale / 2^10", "Reset")),
            {"set": {"factor": rng.randint(2, 16)}},
            {"set": {"window": rng.randint(1, 240)}},
            {"set": {"floor": rng.randint(-14, 10)}},
        ]
    )


def torn(answer: dict) -> bool:
    """Whether this is not one moment."""
    losses, scales, skipped = answer["run"] or (0, 0, -1)
    params = answer["params"]
    told = f", factor {params['factor']}, window {params['window']}, floor 2^{params['floor']}. "
    return losses != scales or skipped >= losses or told not in answer["sentence"]


class Reader(threading.Thread):
    """One kernel, and somebody who presses."""

    def __init__(self, number: int, until: float) -> None:
        super().__init__(daemon=True)
        self.rng, self.until = random.Random(number), until
        self.times, self.errors, self.torn = list[float](), 0, 0
        self.manager: KernelManager
        self.manager, self.client = start_new_kernel(kernel_name="python3")
        self._asked(SET_UP)

    @property
    def pid(self) -> int:
        provisioner = self.manager.provisioner
        assert isinstance(provisioner, LocalProvisioner)
        return provisioner.pid or 0

    def _asked(self, code: str, expression: str = "None") -> Any:
        """The value of an expression after some code; what is printed can come too late on a machine this busy."""
        given = {"value": expression}
        reply = self.client.execute_interactive(code, user_expressions=given, output_hook=lambda _: None, timeout=120)
        content = reply["content"]
        found = content["user_expressions"]["value"] if content["status"] == "ok" else content
        if found["status"] != "ok":
            raise RuntimeError("\n".join(found["traceback"]))
        return ast.literal_eval(found["data"]["text/plain"])

    def run(self) -> None:
        while time.monotonic() < self.until:
            start = time.monotonic()
            try:
                self.torn += torn(self._asked("", f"press({presses(self.rng)!r})"))
            except Exception as error:
                print(f"no answer: {error}"[:300], file=sys.stderr, flush=True)
                self.errors += 1
            self.times.append(time.monotonic() - start)
            time.sleep(self.rng.random())

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def memory(pids: list[int]) -> float:
    """Proportional memory of processes, MiB."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return total / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kernels", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    until = time.monotonic() + 1e9
    readers = [Reader(number, until) for number in range(options.kernels)]
    try:
        pids = [reader.pid for reader in readers]
        before = memory(pids)
        for reader in readers:
            reader.until = time.monotonic() + 60 * options.minutes
            reader.start()
        time.sleep(30 * options.minutes)
        half = memory(pids)
        for reader in readers:
            reader.join()
        after = memory(pids)
    finally:
        for reader in readers:
            reader.close()
    times = sorted(t for reader in readers for t in reader.times)
    wrong, failed = sum(r.torn for r in readers), sum(r.errors for r in readers)
    print(f"{options.kernels} kernels, {options.minutes:g} minutes, {os.cpu_count()} cores")
    print(f"{len(times)} answers, {wrong} torn, {failed} failed")
    print(
        f"an answer took {statistics.median(times):.2f} s (median), {times[int(0.99 * len(times))]:.2f} s (99 of 100)"
    )
    print(f"memory of all kernels {before:.0f} MiB at first, {half:.0f} MiB at half time, {after:.0f} MiB at the end")
    return int(bool(wrong or failed))


if __name__ == "__main__":
    sys.exit(main())
