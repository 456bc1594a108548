#!/usr/bin/env bash
# mpishard mpirun render --ranks-per-node 4 --env .venv -- python -u train.py
#
# 4 ranks on this machine, by the mpiexec of the MPI library that mpi4py uses.
set -euo pipefail

environment=./.venv
if [ -d "$environment" ]; then environment=$environment/bin/activate; fi
# such scripts use variables that are not set
set +u
# shellcheck source=/dev/null
source -- "$environment"
set -u
# what arrays free stays the process's: the kernel would clear each page that is used again
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-33554432}"
export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-1073741824}"
export OMP_NUM_THREADS=1

exec mpiexec \
    -n 4 python -u train.py "$@"
