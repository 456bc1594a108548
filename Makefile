# Each target sets up what it needs, with plain python3 and pip. No root, except that
# test-cluster installs missing Debian packages where it is root.
#
#   make demo           the main job on 4 ranks (2 x 2); ARGS="--help" lists its options
#   make demo-insitu    a simulation on 4 ranks, beside it a model on 2 that learns meanwhile; ARGS="--help"
#   make test           all tests on the MPICH wheel and serial HDF5: in full at 2 ranks, at 1, 3 and 4 a sample that
#                       each run draws anew
#   make test-cluster   what another MPI or HDF5 may change, in full at 2 and 4 ranks, on Debian's Open MPI and parallel
#                       HDF5, and Slurm jobs
#   make test-all       every test at every number of ranks, on both
#   make test-gpu       the tests and figures that need a GPU, with the Python and MPI at hand
#   make lint           ruff, mypy, import-linter
#   make docs           the documentation, build/docs/index.html; a warning is an error

SHELL = bash
.SHELLFLAGS = -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
# The torch to install. For its CPU build, where the default is another one, give pip the
# index that torch's install page names: make test PIP_ARGS="--extra-index-url URL"
TORCH ?= torch==2.13.0
PIP_ARGS ?=
# Numbers of ranks that tests run at (also 6, for operations), and of those that are not in full there, one in SAMPLE.
RANKS ?= 1 2 3 4
SAMPLE ?= 4
# What pytest gets, e.g. make test TESTS=tests/layout PYTEST_ARGS=-x
TESTS ?= tests
PYTEST_ARGS ?=
# What the demo gets.
ARGS ?=
# The last hang guard; tests and programs have their own, which say more.
LIMIT_S ?= 3000

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

guarded = timeout --foreground --kill-after=20 $(LIMIT_S)

.PHONY: demo demo-insitu test test-cluster test-all test-gpu lint docs clean

demo: .venv/.ready
	$(guarded) .venv/bin/mpiexec -n 4 .venv/bin/python examples/segment_brain.py $(ARGS)

demo-insitu: .venv/.ready
	$(guarded) .venv/bin/python examples/online_demo.py $(ARGS)

export LIMIT_S SAMPLE

test: export MPIEXEC = $(CURDIR)/.venv/bin/mpiexec
test: .venv/.ready
	tests/run.sh .venv/bin/python "$(RANKS)" $(TESTS) $(PYTEST_ARGS)

test-cluster: export MPIEXEC = mpirun --oversubscribe --bind-to none$(if $(filter 0,$(shell id -u)), --allow-run-as-root)
test-cluster: STACK_ARGS ?= --stack
test-cluster: STACK_RANKS ?= 2 4
test-cluster: .venv-cluster/.ready
	tests/run.sh .venv-cluster/bin/python "$(STACK_RANKS)" $(TESTS) --cluster $(STACK_ARGS) $(PYTEST_ARGS)

test-all:
	$(MAKE) test SAMPLE=1
	$(MAKE) test-cluster SAMPLE=1 STACK_ARGS= STACK_RANKS="$(RANKS)"

# No set-up of its own: torch with CUDA, cupy and a launcher are the machine's. One rank, then several on
# whatever GPUs there are; compute-sanitizer where it is installed.
test-gpu: export MPIEXEC ?= mpiexec
test-gpu:
	$(PYTHON) -m mpishard info
	if command -v compute-sanitizer; then PYTHONPATH=. compute-sanitizer --error-exitcode 1 $(PYTHON) tests/gpu/kernels.py; \
	    else PYTHONPATH=. $(PYTHON) tests/gpu/kernels.py; fi
	for ranks in 1 2 4; do \
	    $(guarded) $(MPIEXEC) -n $$ranks $(PYTHON) -m pytest tests/gpu --ranks $$ranks -rs $(PYTEST_ARGS); done
	$(MPIEXEC) -n 1 $(PYTHON) -m benchmarks --case gpu
	$(MPIEXEC) -n 2 $(PYTHON) -m benchmarks --case gpu

lint: .venv/.ready
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache

docs: .venv/.ready
	PYTHONPATH=. .venv/bin/python -m sphinx --fail-on-warning --keep-going --quiet -d build/doctrees docs build/docs

.venv/.ready: setup.cfg
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install $(PIP_ARGS) "$(TORCH)" -e ".[mpich,examples,test,dev]"
	touch $@

.venv-cluster/.ready: setup.cfg tests/cluster/environment.sh
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" PIP_ARGS="$(PIP_ARGS)" tests/cluster/environment.sh .venv-cluster
	touch $@

clean:
	rm -rf .venv .venv-cluster build dist mpishard.egg-info
