#!/usr/bin/env bash
# What a cluster has, on a Debian machine: Open MPI, parallel HDF5, Slurm, and a Python
# environment in DIR whose mpi4py and h5py use them.
#
#   [PYTHON=python3] [TORCH=torch] [PIP_ARGS=...] [HDF5_DIR=...] [WHEELS=DIR.wheels] tests/cluster/environment.sh DIR
#
# h5py is built once for an HDF5, an MPI and a Python, and kept as a wheel in WHEELS. Installs missing packages where it may (root, apt-get); says what is missing otherwise.
set -euo pipefail
dir=$1
python=${PYTHON:-python3}
read -ra pip_args <<<"${PIP_ARGS:-}"
PATH=$PATH:/usr/sbin:/sbin
# The packages' own order: mpirun and mpicc must be Debian's, not a wheel's.
packages=(gcc gfortran libc6-dev libopenmpi-dev openmpi-bin libhdf5-openmpi-dev slurm-wlm munge procps)

hdf5_dir() {
    if [ -n "${HDF5_DIR-}" ]; then
        echo "$HDF5_DIR"
    else
        echo "/usr/lib/$(gcc -print-multiarch 2>/dev/null || true)/hdf5/openmpi"
    fi
}

missing() {
    local tool
    for tool in gcc gfortran mpicc mpirun munged slurmctld slurmd sbatch srun pgrep; do
        command -v "$tool" >/dev/null || echo "$tool"
    done
    [ -e "$(hdf5_dir)/lib/libhdf5.so" ] || [ -e "$(hdf5_dir)/libhdf5.so" ] || echo "parallel HDF5 (libhdf5.so in $(hdf5_dir))"
    "$python" - <<'PY' || true
import importlib.util, os, sysconfig
if importlib.util.find_spec("ensurepip") is None:
    print("ensurepip for Python (Debian: python3-venv)")
if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
    print("Python.h (Debian: python3-dev)")
PY
    if command -v mpirun >/dev/null && ! mpirun --version 2>/dev/null | grep -q "Open MPI"; then
        echo "Open MPI's mpirun (the first on PATH is $(command -v mpirun))"
    fi
}

if [ -n "$(missing)" ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    if [ "$(command -v "$python")" = /usr/bin/python3 ]; then packages+=(python3-dev python3-venv); fi
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${packages[@]}"
fi
if [ -n "$(missing)" ]; then
    {
        echo "environment.sh: the cluster tests need what this machine lacks:"
        missing | sed 's/^/  - /'
        echo "On Debian or Ubuntu, as root: apt-get install ${packages[*]}"
    } >&2
    exit 1
fi

[ -x "$dir/bin/python" ] || "$python" -m venv "$dir"
pip=("$dir/bin/python" -m pip install "${pip_args[@]}")

parallel_h5py() {
    "$dir/bin/python" -c 'import h5py; raise SystemExit(not h5py.get_config().mpi)' 2>/dev/null
}

if ! parallel_h5py; then
    # h5py states its licence in a way that the setuptools of an older venv cannot read
    "${pip[@]}" cython pkgconfig "setuptools>=77" wheel numpy mpi4py
    # What the build depends on, as one name.
    built_on=$({ mpirun --version | head -n 1; sha256sum <"$(readlink -f "$(hdf5_dir)/lib/libhdf5.so" "$(hdf5_dir)/libhdf5.so" 2>/dev/null | head -n 1)"; "$dir/bin/python" -VV; } | sha256sum | cut -c 1-16)
    wheels=${WHEELS:-$dir.wheels}/$built_on
    mkdir -p "$wheels"
    if ! ls "$wheels"/h5py-*.whl >/dev/null 2>&1; then
        # Most of the time goes to its compilation, on one core: on all of them, for speed to compile, not to run.
        parallel=$(mktemp)
        printf '[build_ext]\nparallel = %s\n' "$(nproc)" >"$parallel"
        # pip's cache may hold a serial build of the same version
        DIST_EXTRA_CONFIG=$parallel CFLAGS="-O1 -g0 -fwrapv" HDF5_MPI=ON CC=mpicc HDF5_DIR=$(hdf5_dir) \
            "$dir/bin/python" -m pip wheel "${pip_args[@]}" --no-cache-dir --no-build-isolation --no-binary=h5py --no-deps --wheel-dir "$wheels" h5py
        rm "$parallel"
    fi
    "${pip[@]}" --force-reinstall --no-deps --no-index "$wheels"/h5py-*.whl
fi
# No MPI library from a wheel here.
"${pip[@]}" "${TORCH:-torch}" -e ".[examples,test,dev]"
# An ocean to couple with, and what it needs besides: on its own terms it would change versions of all others.
"${pip[@]}" --no-deps veros==1.7.0 entrypoints==0.4 h5netcdf==1.8.1 loguru==0.7.3
parallel_h5py || { echo "environment.sh: h5py in $dir was replaced by a serial build" >&2; exit 1; }
