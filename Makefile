# make lab: open the first lesson.   make test: prove what mpkit promises.   Both set everything up by themselves.
PYTHON ?= python3
FOUND = @[ "$$($(PYTHON) -c 'import sys; print(sys.version_info[0])' 2>/dev/null)" = 3 ] || { echo "mpkit: Python 3.11 to 3.13 is needed, and $(PYTHON) is no Python 3 that runs; install one, or name it: make lab PYTHON=/path/to/python3"; exit 1; };
RUN = $(FOUND) $(PYTHON) .ci/bootstrap.py run
# four on two cores: half of the time a test waits, for a browser, a kernel or a process of its own
JOBS ?= 4
# the lesson in a browser that make test runs
IN_TEST = tests/page/test_browser.py::test_a_notebook_runs_and_its_controls_work_by_keyboard[04_dynamic_loss_scale.ipynb]
PYTEST = python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder -rs
export OMP_NUM_THREADS ?= 1
# compiled files are kept: else each of two hundred processes, a kernel say, would compile all of mpkit anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help lab test more tools check bench gpu site notebooks
.NOTPARALLEL:

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /make \1\t/p' Makefile | expand -t 16

lab:  ## JupyterLab at the first lesson; make lab ARGS=--no-browser only serves it
	$(FOUND) $(PYTHON) .ci/bootstrap.py lab $(ARGS)

test: export MPKIT_TELL = 1
test:  ## what mpkit promises: contract, doctests, every notebook, one lesson in a browser (5 minutes on two cores)
	$(RUN) $(PYTEST) $(or $(ARGS),tests/contract tests/page/test_browser.py mpkit notebooks -k "not test_browser or 04_dynamic")

more:  ## everything else that is tested: units, pages, labs, compilers, processes
	$(RUN) $(PYTEST) --durations=20 $(addprefix --ignore=tests/,contract tools test_layers.py) --deselect "$(IN_TEST)" $(or $(ARGS),tests)

tools:  ## mutants, planted bugs, other machines, soak, compat in turn; make tools ARGS="mutants --sample 60"
	$(RUN) python tests/tools $(ARGS)

check:  ## lint, format, types, import layers
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(RUN) python -m pytest -q -p no:cacheprovider tests/test_layers.py

bench:  ## what it costs on this machine; make bench ARGS="--only rounding"
	$(RUN) python -m mpkit.bench $(ARGS)

gpu:  ## on a machine with a GPU: its tests and benchmarks; make gpu PYTHON=python3 ARGS=--quick
	$(FOUND) $(PYTHON) tests/tools/gpu.py $(ARGS)

site:  ## the course as static pages that need no kernel, into build/site; make site ARGS=FOLDER
	$(RUN) python notebooks/site/publish.py $(or $(ARGS),build/site)

notebooks:  ## run every notebook, store its outputs, show how the texts differ; then the labs as students get them
	$(RUN) python notebooks/execute.py $(ARGS)
	$(if $(ARGS),,$(RUN) python notebooks/instructor/labs.py release)
