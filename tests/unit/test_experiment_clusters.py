"""The same call on a cluster: dask with two local processes, ray where it is asked for by MPKIT_TEST_RAY=1."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from support import ROOT

CALL = """
import os, sys, joblib
from mpkit.experiment import experiment

def run(seed, x):
    import os, torch
    return {"y": 10 * x + seed, "pid": os.getpid(), "threads": torch.get_num_threads()}

def call():
    results = experiment(run, {"x": [1, 2, 3]}, seeds=2, folder=sys.argv[1], progress=False)
    pids = set(results.frame.pid)
    print(results, results.frame.y.tolist(), len(pids) >= 1 and os.getpid() not in pids, set(results.frame.threads))
    again = experiment(run, {"x": [1, 2, 3]}, seeds=2, folder=sys.argv[1], progress=False)
    print(again.frame.equals(results.frame))
"""
DASK = """
from dask.distributed import Client, LocalCluster

if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster):
        with joblib.parallel_config("dask"):
            call()
"""
RAY = """
import ray
from ray.util.joblib import register_ray

if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    register_ray()
    with joblib.parallel_config("ray", n_jobs=-1):
        call()
"""


def told(tmp_path, cluster):
    """What a script of its own prints: a cluster's threads and loops end with it."""
    script = tmp_path / "cluster.py"
    script.write_text(CALL + cluster)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "cells")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},  # ray writes a token there
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


EXPECTED = ["6 runs of 3 cells from 2 seeds [10.0, 11.0, 20.0, 21.0, 30.0, 31.0] True {1.0}", "True"]


@pytest.mark.slow
@pytest.mark.parametrize(("package", "cluster"), [("distributed", DASK), ("ray", RAY)])
def test_a_cluster_runs_the_same_call_in_other_processes(package, cluster, tmp_path):
    if find_spec(package) is None or (package == "ray" and not os.environ.get("MPKIT_TEST_RAY")):
        pytest.skip(f"{package} is not installed, or not asked for by MPKIT_TEST_RAY=1")
    assert told(tmp_path, cluster)[-2:] == EXPECTED
