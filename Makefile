# Each target sets up what it needs, with plain python3 and pip. No root, except that
# test-cluster installs missing Debian packages where it is root.
#
#   make demo           the main job on 4 ranks (2 x 2); ARGS="--help" lists its options
#   make test           all tests on the MPICH wheel and serial HDF5
#   make test-cluster   the same tests on Debian's Open MPI and parallel HDF5, and jobs under Slurm
#   make test-gpu       the tests and figures that need a GPU, with the Python and MPI at hand
#   make lint           ruff, mypy, import-linter

SHELL = bash
.SHELLFLAGS = -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
# The torch to install. For its CPU build, where the default is another one, give pip the
# index that torch's install page names: make test PIP_ARGS="--extra-index-url URL"
TORCH ?= torch==2.13.0
PIP_ARGS ?=
# Numbers of ranks that tests run at.
RANKS ?= 1 2 3 4
# What pytest gets, e.g. make test TESTS=tests/layout PYTEST_ARGS=-x
TESTS ?= tests
PYTEST_ARGS ?=
# What the demo gets.
ARGS ?=
# The last hang guard; tests and programs have their own, which say more.
LIMIT_S ?= 1500

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

# in the group of whoever guards make itself, so that its signal arrives here
guarded = timeout --foreground --kill-after=20 $(LIMIT_S)
# Exit code 5 is "no test selected": not a failure at one size of several. Where TESTS names
# less than everything, read the counts.
none_selected = if [ "$(TESTS)" != tests ] && [ $$rc -eq 5 ]; then rc=0; fi

.PHONY: demo test test-cluster test-gpu lint clean

demo: .venv/.ready
	$(guarded) .venv/bin/mpiexec -n 4 .venv/bin/python examples/segment_brain.py $(ARGS)

test: export MPIEXEC = $(CURDIR)/.venv/bin/mpiexec
test: .venv/.ready
	rc=0; $(guarded) .venv/bin/python -m pytest $(TESTS) $(PYTEST_ARGS) || rc=$$?; $(none_selected); exit $$rc
	for ranks in $(RANKS); do \
	    rc=0; $(guarded) $(MPIEXEC) -n $$ranks .venv/bin/python -m pytest $(TESTS) --ranks $$ranks $(PYTEST_ARGS) || rc=$$?; \
	    $(none_selected); [ $$rc -eq 0 ] || exit $$rc; \
	done

test-cluster: export MPIEXEC = mpirun --oversubscribe --bind-to none$(if $(filter 0,$(shell id -u)), --allow-run-as-root)
test-cluster: .venv-cluster/.ready
	rc=0; $(guarded) .venv-cluster/bin/python -m pytest $(TESTS) --cluster $(PYTEST_ARGS) || rc=$$?; $(none_selected); exit $$rc
	for ranks in $(RANKS); do \
	    rc=0; $(guarded) $(MPIEXEC) -n $$ranks .venv-cluster/bin/python -m pytest $(TESTS) --ranks $$ranks $(PYTEST_ARGS) || rc=$$?; \
	    $(none_selected); [ $$rc -eq 0 ] || exit $$rc; \
	done

# No set-up of its own: torch with CUDA, cupy and a launcher are the machine's. One rank, then several on
# whatever GPUs there are; compute-sanitizer where it is installed.
test-gpu: export MPIEXEC ?= mpiexec
test-gpu:
	$(PYTHON) -m mpishard info
	if command -v compute-sanitizer; then PYTHONPATH=. compute-sanitizer --error-exitcode 1 $(PYTHON) tests/gpu/kernels.py; \
	    else PYTHONPATH=. $(PYTHON) tests/gpu/kernels.py; fi
	for ranks in 1 2 4; do \
	    $(guarded) $(MPIEXEC) -n $$ranks $(PYTHON) -m pytest tests/gpu --ranks $$ranks -rs $(PYTEST_ARGS); done
	$(MPIEXEC) -n 1 $(PYTHON) benchmarks/gpu.py
	$(MPIEXEC) -n 2 $(PYTHON) benchmarks/gpu.py

lint: .venv/.ready
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache

.venv/.ready: setup.cfg
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install $(PIP_ARGS) "$(TORCH)" -e ".[mpich,examples,test,dev]"
	touch $@

.venv-cluster/.ready: setup.cfg tests/cluster/environment.sh
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" PIP_ARGS="$(PIP_ARGS)" tests/cluster/environment.sh .venv-cluster
	touch $@

clean:
	rm -rf .venv .venv-cluster build dist mpishard.egg-info
