# Each target sets up what it needs, with plain python3 and pip. No root, except that
# test-cluster installs missing Debian packages where it is root.
#
#   make demo           the main job on 4 ranks (2 x 2); ARGS="--help" lists its options
#   make demo-insitu    a simulation on 4 ranks, beside it a model on 2 that learns meanwhile; ARGS="--help"
#   make test           all tests on the MPICH wheel and serial HDF5: in full at 2 ranks, at 1, 3 and 4 a sample that
#                       each run draws anew, as of programs in C and Fortran
#   make test-cluster   what another MPI or HDF5 may change, on Debian's Open MPI and parallel HDF5: a sample of the tests
#                       at 2 and at 4 ranks and of programs that are killed; programs in C and Fortran in full, Slurm
#   make test-all       every test at every number of ranks, on both
#   make test-oldest    what the versions of dependencies may change, at 1 and 2 ranks, with the oldest that setup.cfg
#                       promises; give it the oldest Python: PYTHON=python3.10
#   make test-newest    the same with the newest releases: PYTHON=python3.13
#   make fuzz           what is drawn at random, by the hundred: calls that differ between ranks, damaged files, kills,
#                       simulations and links; CASES=300 of each, SEED=1, FUZZ_RANKS="2 3", ON=cluster for Open MPI: docs/robustness.md
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
SAMPLE ?= 12
# What pytest gets, e.g. make test TESTS=tests/layout PYTEST_ARGS=-x
TESTS ?= tests
PYTEST_ARGS ?=
# What is run with the oldest and the newest dependencies.
VERSION_TESTS ?= $(addprefix tests/,autograd comm graph insitu io layout models nn ops planning points profiling tensor testing)
VERSION_RANKS ?= 1 2
# What is drawn: how many of each kind, from which seed, at which numbers of ranks, on which stack.
CASES ?= 300
SEED ?= 1
FUZZ_RANKS ?= 2 3
ON ?= mpich
# What the demo gets.
ARGS ?=
# The last hang guard; tests and programs have their own, which say more.
LIMIT_S ?= 3000

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

guarded = timeout --foreground --kill-after=20 $(LIMIT_S)

.PHONY: demo demo-insitu fuzz test test-cluster test-oldest test-newest test-all test-gpu lint docs clean

demo: .venv/.ready
	$(guarded) .venv/bin/mpiexec -n 4 .venv/bin/python examples/segment_brain.py $(ARGS)

demo-insitu: .venv/.ready
	$(guarded) .venv/bin/python examples/online_demo.py $(ARGS)

export LIMIT_S SAMPLE

test: export MPIEXEC = $(CURDIR)/.venv/bin/mpiexec
test: .venv/.ready
	tests/run.sh .venv/bin/python "$(RANKS)" $(TESTS) $(PYTEST_ARGS)

cluster_mpiexec = mpirun --oversubscribe --bind-to none$(if $(filter 0,$(shell id -u)), --allow-run-as-root)
test-cluster: export MPIEXEC = $(cluster_mpiexec)
test-cluster: STACK_ARGS ?= --stack
test-cluster: STACK_RANKS ?= 2 4
test-cluster: .venv-cluster/.ready
	tests/run.sh .venv-cluster/bin/python "$(STACK_RANKS)" $(TESTS) --cluster $(STACK_ARGS) $(PYTEST_ARGS)

fuzz_venv = $(if $(filter cluster,$(ON)),.venv-cluster,.venv)
fuzz: export MPIEXEC = $(if $(filter cluster,$(ON)),$(cluster_mpiexec),$(CURDIR)/.venv/bin/mpiexec)
fuzz: export MPISHARD_SEED = $(SEED)
fuzz: export MPISHARD_VARIANTS = $(CASES)
fuzz: export MPISHARD_KILLS = $(shell expr $(CASES) / 45 + 1)
fuzz: $(fuzz_venv)/.ready
	$(guarded) $(fuzz_venv)/bin/python -m tests.failure.test_mismatch $(SEED) $(CASES) $(FUZZ_RANKS)
	$(guarded) $(MPIEXEC) -n 2 $(fuzz_venv)/bin/python -m pytest --ranks 2 \
	    -o faulthandler_timeout=$(LIMIT_S) tests/io/test_damage.py tests/io/test_drawn.py tests/io/test_append.py $(PYTEST_ARGS)
	for ranks in 1 $(FUZZ_RANKS); do \
	    $(guarded) $(MPIEXEC) -n $$ranks $(fuzz_venv)/bin/python -m pytest --ranks $$ranks \
	        tests/insitu/test_drawn.py $(PYTEST_ARGS); done
	$(guarded) $(fuzz_venv)/bin/python -m pytest tests/coupling/test_programs.py -k drawn $(PYTEST_ARGS)
	$(guarded) $(fuzz_venv)/bin/python -m pytest tests/failure/test_append.py tests/failure/test_checkpoint.py -k killed \
	    $(PYTEST_ARGS)

test-oldest test-newest: test-%: .venv-%/.ready
	MPIEXEC=$(CURDIR)/.venv-$*/bin/mpiexec tests/run.sh .venv-$*/bin/python "$(VERSION_RANKS)" $(VERSION_TESTS) $(PYTEST_ARGS)

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

# Compiled at once: ranks that import a file for the first time would do so all at the same time.
.venv-oldest/.ready: resolution = lowest-direct
.venv-newest/.ready: resolution = highest
.venv-oldest/.ready .venv-newest/.ready: .venv-%/.ready: setup.cfg tests/packaging/versions.py
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install uv
	.venv-$*/bin/uv pip install --python .venv-$*/bin/python --compile-bytecode --resolution $(resolution) \
	    -e ".[mpich,examples,test]"
	.venv-$*/bin/python tests/packaging/versions.py $(if $(filter oldest,$*),--oldest)
	touch $@

clean:
	rm -rf .venv .venv-cluster .venv-oldest .venv-newest build dist mpishard.egg-info
