# make lab: open the first lesson.   make test: prove that all of it works.   Both set everything up by themselves.
PYTHON ?= python3
FOUND = @[ "$$($(PYTHON) -c 'import sys; print(sys.version_info[0])' 2>/dev/null)" = 3 ] || { echo "mpkit: Python 3.11 to 3.13 is needed, and $(PYTHON) is no Python 3 that runs; install one, or name it: make lab PYTHON=/path/to/python3"; exit 1; };
RUN = $(FOUND) $(PYTHON) .ci/bootstrap.py run
# three on two cores: a third of the time a test waits, for a browser, a kernel or a process of its own
JOBS ?= 3
export OMP_NUM_THREADS ?= 1

.PHONY: lab test check gpu soak fuzz mutants compat portable bench views notebooks labs fork clean
.NOTPARALLEL:

lab:  ## JupyterLab at the first lesson; make lab ARGS=--no-browser only serves it
	$(FOUND) $(PYTHON) .ci/bootstrap.py lab $(ARGS)

test:  ## unit, golden, doctest, notebook and browser tests
	$(RUN) python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=15 -rs $(ARGS)

check:  ## lint, format, types, import layers
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(RUN) python -m pytest -q -p no:cacheprovider tests/test_layers.py

portable:  ## every notebook and test on stand-ins for other machines; make portable ARGS="--only seed --seeds 1 2"
	$(RUN) python tests/other_machines.py $(or $(ARGS),--tests --table data/benchmarks/portable.md)

mutants:  ## change one operator or constant at a time: do the tests notice? make mutants ARGS="--sample 60 --only boost"
	$(RUN) python tests/mutants.py $(or $(ARGS),--write data/benchmarks/mutants.json)

gpu:  ## on a machine with a GPU: its tests and benchmarks, one table, one file; make gpu PYTHON=python3 ARGS=--quick
	$(FOUND) $(PYTHON) tests/gpu.py $(ARGS)

soak:  ## kernels beside each other, pressed at random; make soak ARGS="--kernels 40 --minutes 10"
	$(RUN) python tests/soak.py $(ARGS)

fuzz:  ## thirty times as many drawn lives, other ones each time: ten minutes; a failure prints how to repeat it
	$(RUN) python -m pytest -q -m hypothesis --hypothesis-profile=deep --hypothesis-show-statistics $(or $(ARGS),tests)

compat:  ## casting on PyTorch's, torchvision's and transformers' own cases; make compat ARGS="--share 0.1 --minutes 30"
	$(RUN) python -m pip install -q "expecttest>=0.3" "torchvision>=0.26" "transformers>=5.0"
	$(RUN) python tests/compat.py $(ARGS)

bench:  ## what it costs on this machine; make bench ARGS="--only rounding"
	$(RUN) python -m mpkit.bench $(ARGS)

views:  ## how quick the views are in a browser, beside the first version's PNG views
	$(RUN) python tests/measure_views.py $(or $(ARGS),--out data/benchmarks/views.json)

notebooks:  ## run every notebook, store its outputs, show how the texts differ
	$(RUN) python notebooks/execute.py $(ARGS)

labs:  ## what students get, into notebooks/labs, from the sources in notebooks/instructor; make labs ARGS="--variant 7"
	$(RUN) python notebooks/instructor/labs.py release $(ARGS)

fork:  ## point badges and addresses to your fork: make fork OWNER=ada REPO=mpkit
	$(FOUND) $(PYTHON) .ci/fork.py $(OWNER) $(REPO)

clean:  ## remove the environment and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
