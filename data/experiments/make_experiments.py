"""What *Your own experiment* opens: `python data/experiments/make_experiments.py [FOLDER]`, minutes on two cores.

A perceptron on the 8x8 digits at eight settings from ten seeds, one run at a time. Accuracies are those of any CPU up
to last bits; times are of the machine that ran it, whose load the run states: run it again on a quiet one.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from mpkit.experiment import experiment, train
from mpkit.lessons.experiments import CELLS, perceptron

FOLDER = Path(__file__).parent


def main() -> None:
    load = os.getloadavg()[0]
    folder = sys.argv[1] if len(sys.argv) > 1 else None  # a second call with the same folder goes on
    run = partial(train, perceptron, "digits8", optimizer="Momentum", lr=0.1, epochs=6, batch=64)
    results = experiment(run, CELLS, seeds=10, baseline="float32", folder=folder)
    if results.failures or results.stopped:
        raise SystemExit(str(results.failures))
    results.save(FOLDER / "digits_levels.zip")
    print(f"load {load:.1f} on {os.cpu_count()} cores; {results}. {results.note}")
    for metric in ("accuracy", "seconds_per_step"):
        print(*results.summary(metric)["sentence"], sep="\n")


if __name__ == "__main__":
    main()
