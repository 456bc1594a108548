"""How Spack (1.0 and later) builds mpishard; docs/install.md says how to use it.

The bounds are those of setup.cfg, which a test compares.
"""

import os

from spack.package import *
from spack_repo.builtin.build_systems.cuda import CudaPackage
from spack_repo.builtin.build_systems.python import PythonPackage


class PyMpishard(PythonPackage, CudaPackage):
    """Domain parallelism for torch on plain MPI: one sample, sharded over many ranks."""

    # The checkout in which this recipe lies: Spack builds what is committed there.
    git = "file://" + os.path.abspath(os.path.join(os.path.dirname(__file__), *6 * [os.pardir]))
    # the others need what variants add
    import_modules = ["mpishard"]

    license("Apache-2.0")

    version("main", branch="main")

    variant("hdf5", default=True, description="Files, by h5py on the parallel HDF5 of the same MPI")
    variant("examples", default=False, description="What the examples read and draw with")

    depends_on("py-setuptools@77:", type="build")

    with default_args(type=("build", "run")):
        depends_on("python@3.10:")
        depends_on("py-click@8.1:")
        depends_on("py-jinja2@3.1:")
        depends_on("py-mpi4py@4.1:")
        depends_on("py-numpy@2:")
        depends_on("py-rich@13:")
        depends_on("py-tomli@2:", when="^python@:3.10")
        depends_on("py-torch@2.8:")
        # Spack's torch is for CUDA unless it is told
        depends_on("py-torch ~cuda", when="~cuda")
        depends_on("py-h5py@3.12: +mpi", when="+hdf5")

        for arch in CudaPackage.cuda_arch_values:
            depends_on(f"py-torch +cuda cuda_arch={arch}", when=f"+cuda cuda_arch={arch}")
            depends_on(f"py-cupy@13.3: +cuda cuda_arch={arch}", when=f"+cuda cuda_arch={arch}")

        with when("+examples"):
            depends_on("py-h5py@3.12:")
            depends_on("py-matplotlib@3.9:")
            depends_on("py-nibabel@5.3:")
            depends_on("py-nilearn@0.11:")
            depends_on("py-tqdm@4.66:")

    # its launcher
    depends_on("mpi", type="run")

    conflicts("cuda_arch=none", when="+cuda", msg="name the GPUs: cuda_arch=90 and the like")
