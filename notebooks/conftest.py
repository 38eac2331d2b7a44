"""Kernels of the notebook tests use one thread each, so that two workers share two cores fairly."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
