"""A class on one server: many kernels, each with a view of a training, pressed at random for minutes.

    python tests/tools/soak.py --kernels 40 --minutes 10        # on the machine that serves a course

Each press is answered with the sentence, the settings and the run on screen. An answer is torn if its run is not one
moment of a training, or its sentence is not that of its settings. Printed at the end: answers, torn ones, errors, the
time of an answer, and the memory of all kernels together (proportional, so that what they share counts once).
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jupyter_client.manager import start_new_kernel

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
    told = f", factor {params['factor']}, window {params['window']}, floor 2^{params['floor']}"
    said = any(told + end in answer["sentence"] for end in (". ", ", moved by hand"))
    return losses != scales or skipped >= losses or not said


def asked(client: Any, code: str, expression: str = "None") -> Any:
    """The value of an expression after some code; what is printed can come too late on a machine this busy."""
    given = {"value": expression}
    reply = client.execute_interactive(code, user_expressions=given, output_hook=lambda _: None, timeout=120)
    content = reply["content"]
    found = content["user_expressions"]["value"] if content["status"] == "ok" else content
    if found["status"] != "ok":
        raise RuntimeError("\n".join(found["traceback"]))
    return ast.literal_eval(found["data"]["text/plain"])


def read(number: int, client: Any, until: float) -> list[tuple[float, str]]:
    """Seconds of each answer that a reader of one kernel gets, and what is wrong with it."""
    rng, answers = random.Random(number), []
    while time.monotonic() < until:
        start, wrong = time.monotonic(), ""
        try:
            wrong = "torn" if torn(asked(client, "", f"press({presses(rng)!r})")) else ""
        except Exception as error:
            wrong = f"no answer: {error}"[:300]
        answers.append((time.monotonic() - start, wrong))
        time.sleep(rng.random())
    return answers


def memory(managers: Iterable[Any]) -> float:
    """Proportional memory of kernels, MiB."""
    rolls = [Path(f"/proc/{manager.provisioner.pid}/smaps_rollup").read_text() for manager in managers]
    return sum(int(roll.partition("Pss:")[2].split()[0]) for roll in rolls) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kernels", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    started = [start_new_kernel(kernel_name="python3") for _ in range(options.kernels)]
    managers, clients = zip(*started)
    try:
        for client in clients:
            asked(client, SET_UP)
        before, until = memory(managers), time.monotonic() + 60 * options.minutes
        with ThreadPoolExecutor(options.kernels) as readers:
            found = readers.map(read, range(options.kernels), clients, [until] * options.kernels)
            answers = list(itertools.chain.from_iterable(found))
        after = memory(managers)
    finally:
        for manager, client in started:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
    times, wrong = sorted(seconds for seconds, _ in answers), [words for _, words in answers if words]
    print(f"{options.kernels} kernels, {options.minutes:g} minutes, {os.cpu_count()} cores")
    print(f"{len(times)} answers, {wrong.count('torn')} torn, {len(wrong) - wrong.count('torn')} failed")
    print(*sorted(set(wrong) - {"torn"}), sep="\n")
    print(f"an answer took {statistics.median(times):.2f} s, 99 of 100 at most {times[int(0.99 * len(times))]:.2f} s")
    print(f"memory of all kernels {before:.0f} MiB at first, {after:.0f} MiB at the end")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
